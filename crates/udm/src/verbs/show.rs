//! Verbs that print something, as dmsetup prints it.

use super::explain;
use super::power::power_line;
use super::queue::queue_lines;
use crate::cli::{ColumnArgs, InfoArgs, ListArgs, LsArgs, ShowArgs, TableArgs, WaitArgs};
use crate::columns::{ColumnLayout, Columns, Wrong, list_of_fields};
use crate::concise;
use crate::output::{say, say_json};
use anyhow::{Result, anyhow, bail};
use std::fmt::Write as _;
use std::time::Instant;
use udm_control::api;
use udm_control::api::verbs::{self, Verb};
use udm_control::client::{ClientError, ControlClient};
use udm_core::errno::ETIMEDOUT;

/// What dmsetup says when there is nothing.
pub(super) const NONE: &str = "No devices found\n";

/// The answer to a verb without a body.
fn ask<Q, R: serde::de::DeserializeOwned>(client: &ControlClient, verb: Verb<Q, (), R>) -> Result<R> {
    client.call(verb, &()).map_err(|e| explain(e, None))
}

/// All devices, by number.
///
/// # Errors
/// When the server does not answer.
pub fn all_devices(client: &ControlClient) -> Result<Vec<api::Device>, ClientError> {
    Ok(client.call(verbs::LIST_DEVICES, &())?.devices)
}

/// The live tables of all devices.
///
/// # Errors
/// When the server does not answer.
pub fn all_tables(client: &ControlClient) -> Result<Vec<api::Table>, ClientError> {
    Ok(client.call(verbs::LIST_TABLES, &())?.tables)
}

pub(super) fn list(client: &ControlClient) -> Result<Vec<api::Device>> {
    all_devices(client).map_err(|e| explain(e, None))
}

/// The text of `dmsetup table` and `dmsetup status`: a device without a table has one empty line.
/// With a name, it stands before each.
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

/// The tables of the devices that are named; without names all, in one answer.
pub(super) fn tables(client: &ControlClient, names: &[String], inactive: bool) -> Result<Vec<api::Table>> {
    let slot = api::SlotQuery::of(inactive);
    match names {
        [] => Ok(ask(client, verbs::LIST_TABLES.with(&slot))?.tables),
        names => names.iter().map(|name| ask(client, verbs::GET_TABLE.on(name).with(&slot))).collect(),
    }
}

/// The same of their status.
fn statuses(client: &ControlClient, names: &[String], inactive: bool) -> Result<Vec<api::Status>> {
    let slot = api::SlotQuery::of(inactive);
    match names {
        [] => Ok(ask(client, verbs::LIST_STATUSES.with(&slot))?.statuses),
        names => names.iter().map(|name| ask(client, verbs::GET_STATUS.on(name).with(&slot))).collect(),
    }
}

fn show<T: serde::Serialize>(
    args: &ShowArgs,
    mut replies: Vec<T>,
    lines_of: impl Fn(&mut T) -> (&String, &mut Vec<api::Line>),
) -> Result<()> {
    let is_none = replies.is_empty();
    let prefix = args.names.len() != 1;
    if let Some(wanted) = &args.target {
        replies.retain_mut(|reply| {
            let (_, lines) = lines_of(reply);
            lines.retain(|line| line.target == *wanted);
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

pub fn table(args: &TableArgs) -> Result<()> {
    if args.concise {
        return table_concise(&args.show);
    }
    let tables = tables(&args.show.talk.client()?, &args.show.names, args.show.inactive)?;
    show(&args.show, tables, |table| (&table.name, &mut table.lines))
}

/// The devices that are named, or all of them.
fn find_devices(client: &ControlClient, names: &[String]) -> Result<Vec<api::Device>> {
    match names {
        [] => list(client),
        names => names.iter().map(|name| ask(client, verbs::GET_DEVICE.on(name))).collect(),
    }
}

fn table_concise(args: &ShowArgs) -> Result<()> {
    let client = args.talk.client()?;
    let slot = api::SlotQuery::of(args.inactive);
    let devices = find_devices(&client, &args.names)?;
    let mut all = Vec::new();
    for device in &devices {
        let mut lines = ask(&client, verbs::GET_TABLE.on(&device.number).with(&slot))?.lines;
        if let Some(wanted) = &args.target {
            lines.retain(|line| line.target == *wanted);
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
    let statuses = statuses(&args.talk.client()?, &args.names, args.inactive)?;
    show(args, statuses, |status| (&status.name, &mut status.lines))
}

pub fn info(args: &InfoArgs) -> Result<()> {
    let client = args.talk.client()?;
    if args.columns.columns {
        return columns(&client, &args.names, &args.columns);
    }
    let devices = find_devices(&client, &args.names)?;
    if args.print.json {
        return say_json(&devices);
    }
    let mut out = String::new();
    for device in &devices {
        describe(device, &mut out);
        if !device.queues.is_empty() || !device.power.is_empty() {
            // Within its block, in front of the empty line.
            out.pop();
            device.queues.iter().for_each(|queue| queue_lines(queue, &mut out));
            device.power.iter().for_each(|power| power_line(power, &mut out));
            out.push('\n');
        }
    }
    say(if devices.is_empty() { NONE } else { &out })
}

fn columns(client: &ControlClient, names: &[String], args: &ColumnArgs) -> Result<()> {
    if matches!(args.options.as_deref(), Some("help" | "?")) {
        return say(&list_of_fields());
    }
    let layout = ColumnLayout {
        no_headings: args.noheadings,
        separator: args.separator.clone(),
        name_prefixes: args.nameprefixes,
        unquoted: args.unquoted,
        rows: args.rows,
    };
    let (options, sort, select) = (args.options.as_deref(), args.sort.as_deref(), args.select.as_deref());
    let wrong = |(Wrong::Word(why) | Wrong::Value(why))| anyhow!(one_line(&why));
    let mut columns = Columns::new(options, sort, select, layout).map_err(wrong)?;
    let devices = find_devices(client, names)?;
    if devices.is_empty() {
        return say(NONE);
    }
    let (text, wrong) = columns.print(columns.ask(client, devices).map_err(|e| explain(e, None))?);
    say(&text)?;
    match wrong.first() {
        Some(why) => bail!(one_line(why)),
        None => Ok(()),
    }
}

/// What dmsetup says in several lines.
fn one_line(text: &str) -> String {
    text.replace('\n', ": ")
}

/// A server lets nobody wait for ever, so it is asked again and again.
pub fn wait(args: &WaitArgs) -> Result<()> {
    let (client, begun) = (args.talk.client()?, Instant::now());
    let device = loop {
        let left = args.timeout.map(|timeout| timeout.saturating_sub(begun.elapsed()));
        let timeout_ms = left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
        let wait = api::Wait { event_nr: args.event_nr, timeout_ms };
        match client.call(verbs::WAIT_EVENT.on(&args.name), &wait) {
            Ok(device) => break device,
            Err(ClientError::Refused(why))
                if why.errno == ETIMEDOUT.unsigned_abs()
                    && args.timeout.is_none_or(|timeout| begun.elapsed() < timeout) => {}
            Err(error) => return Err(explain(error, None)),
        }
    };
    if args.print.json {
        return say_json(&device);
    }
    let mut out = String::new();
    if args.verbose {
        describe(&device, &mut out);
    }
    say(&out)
}

/// One device as `dmsetup info` prints it, with its empty line. "Read Ahead" is left out: there is
/// none.
pub fn describe(device: &api::Device, out: &mut String) {
    let mut state = device.state.to_ascii_uppercase();
    if device.read_only {
        state.push_str(" (READ-ONLY)");
    }
    if device.deferred_remove {
        state.push_str(" (DEFERRED REMOVE)");
    }
    let tables = match (device.live_table, device.inactive_table) {
        (true, true) => "LIVE & INACTIVE",
        (true, false) => "LIVE",
        (false, true) => "INACTIVE",
        (false, false) => "None",
    };
    let (major, minor) = device.number.split_once(':').unwrap_or((&device.number, ""));
    let mut line = |key: &str, value: &str| {
        // Writing to a String can't fail.
        let _ = writeln!(out, "{key:<19}{value}");
    };
    line("Name:", &device.name);
    line("State:", &state);
    line("Tables present:", tables);
    line("Open count:", &device.open_count.to_string());
    line("Event number:", &device.event_nr.to_string());
    line("Major, minor:", &format!("{major}, {minor}"));
    line("Number of targets:", &device.targets.to_string());
    if let Some(uuid) = &device.uuid {
        let _ = writeln!(out, "UUID: {uuid}");
    }
    out.push('\n');
}

pub fn ls(args: &LsArgs) -> Result<()> {
    let client = args.list.talk.client()?;
    let mut devices = list(&client)?;
    let is_none = devices.is_empty();
    if let Some(target) = &args.target {
        let mut kept = Vec::new();
        for device in devices {
            let table = ask(&client, verbs::GET_TABLE.on(&device.number))?;
            if table.lines.iter().any(|line| line.target == *target) {
                kept.push(device);
            }
        }
        devices = kept;
    }
    if args.list.print.json {
        return say_json(&devices);
    }
    let out: String = devices.iter().map(|d| format!("{}\t({})\n", d.name, d.number)).collect();
    say(if is_none { NONE } else { &out })
}

pub fn exports(args: &ListArgs) -> Result<()> {
    let exports = ask(&args.talk.client()?, verbs::LIST_EXPORTS)?.exports;
    if args.print.json {
        return say_json(&exports);
    }
    let out: String = exports.iter().map(|e| format!("{}\t{}\n", e.name, e.uris.join(" "))).collect();
    say(if exports.is_empty() { "No exports found\n" } else { &out })
}

/// The server's versions; where none is named and none runs, our own, which are those of a server
/// that we would start.
fn versions(args: &ListArgs) -> Result<api::Version> {
    match args.talk.client()?.call(verbs::GET_VERSION, &()) {
        Err(ClientError::Unreachable { .. }) if args.talk.socket.is_none() => {
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
    // As dmsetup: the library is this program, the driver is the server.
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

    #[test]
    fn info_is_dmsetups() {
        let mut out = String::new();
        let device = api::Device {
            name: "snap".into(),
            uuid: Some("LVM-x".into()),
            number: "254:3".into(),
            state: "active".into(),
            live_table: true,
            inactive_table: true,
            targets: 2,
            ..api::Device::default()
        };
        describe(&device, &mut out);
        let wanted = "Name:              snap\nState:             ACTIVE\nTables present:    LIVE & INACTIVE\n\
                      Open count:        0\nEvent number:      0\nMajor, minor:      254, 3\nNumber of targets: 2\nUUID: LVM-x\n\n";
        assert_eq!(out, wanted);
    }
}
