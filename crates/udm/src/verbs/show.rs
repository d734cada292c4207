//! Verbs that print the state of devices in dmsetup's format.

use crate::args::{ListArgs, PrintArgs, ServerArgs};
use crate::concise;
use crate::output::{say, say_json};
use crate::requests::{all_devices, ask, explain};
use anyhow::Result;
use clap::Args;
use std::fmt::Write as _;
use udm_control::api;
use udm_control::api::verbs;
use udm_control::client::{ClientError, ControlClient};

/// dmsetup's text if there are no devices.
pub(super) const NONE: &str = "No devices found\n";

pub(super) fn list(client: &ControlClient) -> Result<Vec<api::Device>> {
    all_devices(client).map_err(|e| explain(e, None))
}

/// The lines of `dmsetup table` and `dmsetup status`. A device without a table has one empty line.
/// With a name, each line begins with it.
pub fn table_lines(name: Option<&str>, lines: &[api::Line], out: &mut String) {
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
pub(super) fn tables(client: &ControlClient, names: &[String], inactive: bool) -> Result<Vec<api::Table>> {
    let slot = api::SlotQuery::of(inactive);
    match names {
        [] => Ok(ask(client, verbs::LIST_TABLES.with(&slot))?.tables),
        names => names.iter().map(|name| ask(client, verbs::GET_TABLE.on(name).with(&slot))).collect(),
    }
}

/// The status of the named devices, or of all devices in one request.
fn statuses(client: &ControlClient, names: &[String], inactive: bool) -> Result<Vec<api::Status>> {
    let slot = api::SlotQuery::of(inactive);
    match names {
        [] => Ok(ask(client, verbs::LIST_STATUSES.with(&slot))?.statuses),
        names => names.iter().map(|name| ask(client, verbs::GET_STATUS.on(name).with(&slot))).collect(),
    }
}

/// The arguments of `udm table` and `udm status`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub print: PrintArgs,
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

fn show<T: serde::Serialize>(
    args: &ShowArgs,
    mut replies: Vec<T>,
    lines_of: impl Fn(&mut T) -> (&String, &mut Vec<api::Line>),
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
        return say_json(&replies);
    }
    let mut out = String::new();
    for reply in &mut replies {
        let (name, of_it) = lines_of(reply);
        table_lines(prefix.then_some(name.as_str()), of_it, &mut out);
    }
    say(if is_none { NONE } else { &out })
}

/// The arguments of `udm table`.
#[derive(Debug, Args)]
pub struct TableArgs {
    #[command(flatten)]
    pub show: ShowArgs,
    /// Print all on one line, as udm create --concise reads it:
    /// NAME,UUID,MINOR,FLAGS,LINE,LINE;NAME,...
    #[arg(long, conflicts_with = "json")]
    pub concise: bool,
}

pub fn table(args: &TableArgs) -> Result<()> {
    if args.concise {
        return table_concise(&args.show);
    }
    let tables = tables(&args.show.server.client()?, &args.show.names, args.show.inactive)?;
    show(&args.show, tables, |table| (&table.name, &mut table.lines))
}

/// The named devices, or all devices.
pub(super) fn find_devices(client: &ControlClient, names: &[String]) -> Result<Vec<api::Device>> {
    match names {
        [] => list(client),
        names => names.iter().map(|name| ask(client, verbs::GET_DEVICE.on(name))).collect(),
    }
}

fn table_concise(args: &ShowArgs) -> Result<()> {
    let client = args.server.client()?;
    let slot = api::SlotQuery::of(args.inactive);
    let devices = find_devices(&client, &args.names)?;
    let mut all = Vec::new();
    for device in &devices {
        let mut lines = ask(&client, verbs::GET_TABLE.on(&device.number).with(&slot))?.lines;
        if let Some(target) = &args.target {
            lines.retain(|line| line.target == *target);
            if lines.is_empty() {
                continue;
            }
        }
        all.push(concise::print(device, &lines));
    }
    match (devices.is_empty(), all.is_empty()) {
        (true, _) => say(NONE),
        (false, true) => Ok(()),
        (false, false) => say(&(all.join(";") + "\n")),
    }
}

pub fn status(args: &ShowArgs) -> Result<()> {
    let statuses = statuses(&args.server.client()?, &args.names, args.inactive)?;
    show(args, statuses, |status| (&status.name, &mut status.lines))
}

/// The arguments of `udm ls`.
#[derive(Debug, Args)]
pub struct LsArgs {
    #[command(flatten)]
    pub list: ListArgs,
    /// Show the devices as trees, each above the devices that it uses
    #[arg(long, conflicts_with = "json")]
    pub tree: bool,
    /// Only devices with a target of this type
    #[arg(long, value_name = "TYPE", conflicts_with = "tree")]
    pub target: Option<String>,
}

pub fn ls(args: &LsArgs) -> Result<()> {
    let client = args.list.server.client()?;
    let mut devices = list(&client)?;
    let is_none = devices.is_empty();
    if let Some(target) = &args.target {
        let mut selected = Vec::new();
        for device in devices {
            let table = ask(&client, verbs::GET_TABLE.on(&device.number))?;
            if table.lines.iter().any(|line| line.target == *target) {
                selected.push(device);
            }
        }
        devices = selected;
    }
    if args.list.print.json {
        return say_json(&devices);
    }
    let out: String = devices.iter().map(|d| format!("{}\t({})\n", d.name, d.number)).collect();
    say(if is_none { NONE } else { &out })
}

pub fn exports(args: &ListArgs) -> Result<()> {
    let exports = ask(&args.server.client()?, verbs::LIST_EXPORTS)?.exports;
    if args.print.json {
        return say_json(&exports);
    }
    let out: String = exports.iter().map(|e| format!("{}\t{}\n", e.name, e.uris.join(" "))).collect();
    say(if exports.is_empty() { "No exports found\n" } else { &out })
}

/// The versions of the server. If no socket is given and no server runs, those of this program.
fn versions(args: &ListArgs) -> Result<api::Version> {
    match args.server.client()?.call(verbs::GET_VERSION, &()) {
        Err(ClientError::Unreachable { .. }) if args.server.socket.is_none() => {
            Ok(udm_control::verbs::version())
        }
        answer => answer.map_err(|e| explain(e, None)),
    }
}

pub fn targets(args: &ListArgs) -> Result<()> {
    let version = versions(args)?;
    if args.print.json {
        return say_json(&version.targets);
    }
    say(&version.targets.iter().map(|t| format!("{:<16} v{}\n", t.name, t.version)).collect::<String>())
}

pub fn version(args: &ListArgs) -> Result<()> {
    // As with dmsetup, the library is this program and the driver is the server.
    let version = versions(args)?;
    if args.print.json {
        return say_json(&version);
    }
    say(&format!(
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
        table_lines(Some("d"), &[], &mut out);
        table_lines(None, &[], &mut out);
        let line =
            api::Line { start_bytes: 512, length_bytes: 1024, target: "error".into(), params: String::new() };
        table_lines(None, &[line], &mut out);
        assert_eq!(out, "d: \n\n1 2 error \n");
    }
}
