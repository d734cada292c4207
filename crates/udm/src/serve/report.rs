//! The report of `udm serve` when it is ready.

use crate::log;
use crate::output::count_noun;
use std::fmt::Write;
use std::path::Path;
use udm_control::api;
use udm_wire::size::SizeWithUnit;

/// Prints one line per export to standard error, with its NBD URIs, vhost-user sockets and block
/// devices (`disks`, by name), one per address of the NVMe target (`nvme`), and one for the control
/// socket if it is `Some`.
pub(super) fn print_exports_to_stderr(
    exports: &[api::NbdExportDescription],
    disks: &[(String, String)],
    nvme: &[String],
    control: Option<&Path>,
) {
    let (bold, dim, plain) =
        if log::stderr_uses_colour() { ("\x1b[1m", "\x1b[2m", "\x1b[0m") } else { ("", "", "") };
    let width = exports.iter().map(|e| e.name.chars().count()).max().unwrap_or(0);
    let mut out = String::new();
    for export in exports {
        let disks = disks.iter().filter(|(name, _)| *name == export.name).map(|(_, address)| address.clone());
        let addresses: Vec<String> = export.uris.iter().cloned().chain(disks).collect();
        let read_only = if export.read_only { " read-only" } else { "" };
        // Writing to a String can't fail.
        let _ = writeln!(
            out,
            "udm: {bold}{:<width$}{plain}  {dim}{}{read_only}{plain}  {}",
            export.name,
            SizeWithUnit(export.size_bytes),
            addresses.join("  ")
        );
    }
    for address in nvme {
        let _ = writeln!(out, "udm: {dim}all as namespaces of{plain}  {address}");
    }
    if let Some(control) = control {
        let none = if exports.is_empty() { "no devices yet; " } else { "" };
        let _ = writeln!(out, "udm: {dim}{none}control socket{plain} {}", control.display());
    }
    log::queue_stderr_text(&out);
}

/// Prints what this server has taken over from process `old`.
pub(super) fn print_taken_over(devices: usize, clients: usize, old: u32) {
    let (devices, clients) = (count_noun(devices as u64, "device"), count_noun(clients as u64, "client"));
    log::queue_stderr_text(&format!("udm: took over {devices} and {clients} from process {old}\n"));
}
