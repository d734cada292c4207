//! Verbs that print the state of devices in dmsetup's format.

use crate::args::{OutputFormatArgs, ServerArgs, SharedListArgs};
use crate::concise;
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::{all_devices, call_verb_without_body, explain_client_error};
use anyhow::Result;
use clap::Args;
use std::fmt::Write as _;
use udm_control::api;
use udm_control::api::verbs;
use udm_control::client::{ControlClient, ControlClientError};

/// dmsetup's text if there are no devices.
pub(super) const NONE: &str = "No devices found\n";

pub(super) fn fetch_all_devices(client: &ControlClient) -> Result<Vec<api::DeviceDescription>> {
    all_devices(client).map_err(|e| explain_client_error(e, None))
}

/// The lines of `dmsetup table` and `dmsetup status`. A device without a table has one empty line.
/// With a name, each line begins with it.
pub fn format_table_or_status_lines(name: Option<&str>, lines: &[api::TableOrStatusLine], out: &mut String) {
    let prefix = name.map(|name| format!("{name}: ")).unwrap_or_default();
    if lines.is_empty() {
        out.push_str(&prefix);
        out.push('\n');
    }
    for line in lines {
        let (start, len) = (line.start_bytes / 512, line.length_bytes / 512);
        // Writing to a String can't fail.
        let _ = writeln!(out, "{prefix}{start} {len} {} {}", line.target, line.params);
    }
}

/// The tables of the named devices, or of all devices in one request.
pub(super) fn fetch_tables_of_devices(
    client: &ControlClient,
    names: &[String],
    inactive: bool,
) -> Result<Vec<api::TableDescription>> {
    let slot = api::TableSlotQuery::of(inactive);
    match names {
        [] => Ok(call_verb_without_body(client, verbs::LIST_TABLES.with(&slot))?.tables),
        names => names
            .iter()
            .map(|name| call_verb_without_body(client, verbs::GET_TABLE.on(name).with(&slot)))
            .collect(),
    }
}

/// The status of the named devices, or of all devices in one request.
fn fetch_statuses_of_devices(
    client: &ControlClient,
    names: &[String],
    inactive: bool,
) -> Result<Vec<api::TableStatus>> {
    let slot = api::TableSlotQuery::of(inactive);
    match names {
        [] => Ok(call_verb_without_body(client, verbs::LIST_STATUSES.with(&slot))?.statuses),
        names => names
            .iter()
            .map(|name| call_verb_without_body(client, verbs::GET_STATUS.on(name).with(&slot)))
            .collect(),
    }
}

/// The arguments of `udm table` and `udm status`.
#[derive(Debug, Args)]
pub struct TableStatusArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub print: OutputFormatArgs,
    /// The devices [default: all, each line with the device's name in front]
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// Use the table in the inactive slot
    #[arg(long)]
    pub inactive: bool,
    /// Only targets of this type
    #[arg(long, value_name = "TYPE")]
    pub target: Option<String>,
}

fn print_tables_or_statuses<T: serde::Serialize>(
    args: &TableStatusArgs,
    mut replies: Vec<T>,
    lines_of: impl Fn(&mut T) -> (&String, &mut Vec<api::TableOrStatusLine>),
) -> Result<()> {
    let is_none = replies.is_empty();
    let prefix = args.names.len() != 1;
    if let Some(target) = &args.target {
        replies.retain_mut(|reply| {
            let (_, lines) = lines_of(reply);
            lines.retain(|line| line.target == *target);
            !lines.is_empty()
        });
    }
    if args.print.json {
        return print_json_to_stdout(&replies);
    }
    let mut out = String::new();
    for reply in &mut replies {
        let (name, of_it) = lines_of(reply);
        format_table_or_status_lines(prefix.then_some(name.as_str()), of_it, &mut out);
    }
    print_to_stdout(if is_none { NONE } else { &out })
}

/// The arguments of `udm table`.
#[derive(Debug, Args)]
pub struct TableArgs {
    #[command(flatten)]
    pub show: TableStatusArgs,
    /// Print all on one line, as udm create --concise reads it:
    /// NAME,UUID,MINOR,FLAGS,LINE,LINE;NAME,...
    #[arg(long, conflicts_with = "json")]
    pub concise: bool,
}

pub fn run_table_command(args: &TableArgs) -> Result<()> {
    if args.concise {
        return run_table_concise_command(&args.show);
    }
    let tables = fetch_tables_of_devices(&args.show.server.client()?, &args.show.names, args.show.inactive)?;
    print_tables_or_statuses(&args.show, tables, |table| (&table.name, &mut table.lines))
}

/// The named devices, or all devices.
pub(super) fn find_devices(client: &ControlClient, names: &[String]) -> Result<Vec<api::DeviceDescription>> {
    match names {
        [] => fetch_all_devices(client),
        names => {
            names.iter().map(|name| call_verb_without_body(client, verbs::GET_DEVICE.on(name))).collect()
        }
    }
}

fn run_table_concise_command(args: &TableStatusArgs) -> Result<()> {
    let client = args.server.client()?;
    let slot = api::TableSlotQuery::of(args.inactive);
    let devices = find_devices(&client, &args.names)?;
    let mut all = Vec::new();
    for device in &devices {
        let mut lines =
            call_verb_without_body(&client, verbs::GET_TABLE.on(&device.number).with(&slot))?.lines;
        if let Some(target) = &args.target {
            lines.retain(|line| line.target == *target);
            if lines.is_empty() {
                continue;
            }
        }
        all.push(concise::format_concise_device(device, &lines));
    }
    match (devices.is_empty(), all.is_empty()) {
        (true, _) => print_to_stdout(NONE),
        (false, true) => Ok(()),
        (false, false) => print_to_stdout(&(all.join(";") + "\n")),
    }
}

pub fn run_status_command(args: &TableStatusArgs) -> Result<()> {
    let statuses = fetch_statuses_of_devices(&args.server.client()?, &args.names, args.inactive)?;
    print_tables_or_statuses(args, statuses, |status| (&status.name, &mut status.lines))
}

/// The arguments of `udm ls`.
#[derive(Debug, Args)]
pub struct LsArgs {
    #[command(flatten)]
    pub list: SharedListArgs,
    /// Show the devices as trees, each above the devices that it uses
    #[arg(long, conflicts_with = "json")]
    pub tree: bool,
    /// Only devices with a target of this type
    #[arg(long, value_name = "TYPE", conflicts_with = "tree")]
    pub target: Option<String>,
}

pub fn run_ls_command(args: &LsArgs) -> Result<()> {
    let client = args.list.server.client()?;
    let mut devices = fetch_all_devices(&client)?;
    let is_none = devices.is_empty();
    if let Some(target) = &args.target {
        let mut selected = Vec::new();
        for device in devices {
            let table = call_verb_without_body(&client, verbs::GET_TABLE.on(&device.number))?;
            if table.lines.iter().any(|line| line.target == *target) {
                selected.push(device);
            }
        }
        devices = selected;
    }
    if args.list.print.json {
        return print_json_to_stdout(&devices);
    }
    let out: String = devices.iter().map(|d| format!("{}\t({})\n", d.name, d.number)).collect();
    print_to_stdout(if is_none { NONE } else { &out })
}

pub fn run_exports_command(args: &SharedListArgs) -> Result<()> {
    let exports = call_verb_without_body(&args.server.client()?, verbs::LIST_EXPORTS)?.exports;
    if args.print.json {
        return print_json_to_stdout(&exports);
    }
    let out: String = exports.iter().map(|e| format!("{}\t{}\n", e.name, e.uris.join(" "))).collect();
    print_to_stdout(if exports.is_empty() { "No exports found\n" } else { &out })
}

/// The versions of the server. If no socket is given and no server runs, those of this program.
fn fetch_server_or_own_version(args: &SharedListArgs) -> Result<api::ServerVersions> {
    match args.server.client()?.call(verbs::GET_VERSION, &()) {
        Err(ControlClientError::Unreachable { .. }) if args.server.socket.is_none() => {
            Ok(udm_control::verbs::server_versions())
        }
        answer => answer.map_err(|e| explain_client_error(e, None)),
    }
}

pub fn run_targets_command(args: &SharedListArgs) -> Result<()> {
    let version = fetch_server_or_own_version(args)?;
    if args.print.json {
        return print_json_to_stdout(&version.targets);
    }
    print_to_stdout(
        &version.targets.iter().map(|t| format!("{:<16} v{}\n", t.name, t.version)).collect::<String>(),
    )
}

pub fn run_version_command(args: &SharedListArgs) -> Result<()> {
    // As with dmsetup, the library is this program and the driver is the server.
    let version = fetch_server_or_own_version(args)?;
    if args.print.json {
        return print_json_to_stdout(&version);
    }
    print_to_stdout(&format!(
        "Library version:   {} (udm)\nDriver version:    {} (udm {})\n",
        env!("CARGO_PKG_VERSION"),
        version.driver_version,
        version.version
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_a_table_is_an_empty_line() {
        let mut out = String::new();
        format_table_or_status_lines(Some("d"), &[], &mut out);
        format_table_or_status_lines(None, &[], &mut out);
        let line = api::TableOrStatusLine {
            start_bytes: 512,
            length_bytes: 1024,
            target: "error".into(),
            params: String::new(),
        };
        format_table_or_status_lines(None, &[line], &mut out);
        assert_eq!(out, "d: \n\n1 2 error \n");
    }
}
