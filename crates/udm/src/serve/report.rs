//! What `udm serve` says when it is ready.

use std::io::{IsTerminal, Write};
use udm_control::http::api;
use udm_wire::size::Size;

/// One line an export, to standard error.
pub(super) fn exports(exports: &[api::Export]) {
    let mut out = std::io::stderr().lock();
    let colour = out.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let (bold, dim, plain) = if colour { ("\x1b[1m", "\x1b[2m", "\x1b[0m") } else { ("", "", "") };
    let width = exports.iter().map(|e| e.name.chars().count()).max().unwrap_or(0);
    for export in exports {
        let read_only = if export.read_only { " read-only" } else { "" };
        // A server whose standard error is closed serves all the same.
        let _ = writeln!(
            out,
            "udm: {bold}{:<width$}{plain}  {dim}{}{read_only}{plain}  {}",
            export.name,
            Size(export.size_bytes),
            export.uris.join("  ")
        );
    }
}
