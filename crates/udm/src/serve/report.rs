//! What `udm serve` says when it is ready.

use crate::log;
use std::fmt::Write;
use std::path::Path;
use udm_control::api;
use udm_wire::size::Size;

/// One line an export, to standard error. Without any, where the server is told to make some.
pub(super) fn exports(exports: &[api::Export], control: &Path) {
    let (bold, dim, plain) = if log::colour() { ("\x1b[1m", "\x1b[2m", "\x1b[0m") } else { ("", "", "") };
    let width = exports.iter().map(|e| e.name.chars().count()).max().unwrap_or(0);
    let mut out = String::new();
    for export in exports {
        let read_only = if export.read_only { " read-only" } else { "" };
        // Writing to a String can't fail.
        let _ = writeln!(
            out,
            "udm: {bold}{:<width$}{plain}  {dim}{}{read_only}{plain}  {}",
            export.name,
            Size(export.size_bytes),
            export.uris.join("  ")
        );
    }
    if exports.is_empty() {
        let _ = writeln!(out, "udm: no devices yet; control socket {}", control.display());
    }
    log::say(out);
}
