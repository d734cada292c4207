//! What `udm serve` says when it is ready.

use crate::log;
use std::fmt::Write;
use udm_control::http::api;
use udm_wire::size::Size;

/// One line an export, to standard error.
pub(super) fn exports(exports: &[api::Export]) {
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
    log::say(out);
}
