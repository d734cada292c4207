//! `udm info`: devices, as dmsetup prints them.

use super::power::format_disk_power_state;
use super::queue::format_request_queue;
use super::show::{NONE, find_devices};
use super::throttle::format_device_throttle;
use crate::args::{OutputFormatArgs, ServerArgs};
use crate::columns::{ColumnReport, ColumnReportArgError, ColumnReportLayout, report_fields_help};
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::explain_client_error;
use anyhow::{Result, anyhow, bail};
use clap::Args;
use std::fmt::Write as _;
use udm_control::api;
use udm_control::client::ControlClient;

/// The arguments of `udm info`.
#[derive(Debug, Args)]
pub struct InfoArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub print: OutputFormatArgs,
    /// The devices [default: all]
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    #[command(flatten)]
    pub columns: InfoColumnArgs,
}

/// How `udm info -c` prints.
#[derive(Debug, Args)]
pub struct InfoColumnArgs {
    /// Print one line per device, with one column per field
    #[arg(short = 'c', short_alias = 'C', long, conflicts_with = "json")]
    pub columns: bool,
    /// The fields to print; with a + in front, in addition to the default ones; help lists all
    /// fields
    #[arg(short = 'o', long, value_name = "FIELDS", requires = "columns")]
    pub options: Option<String>,
    /// Sort by these fields; a - in front of a field sorts in descending order
    #[arg(short = 'O', long, value_name = "FIELDS", requires = "columns", allow_hyphen_values = true)]
    pub sort: Option<String>,
    /// Only devices that meet these criteria: 'open>0 && (name=a || uuid!=b)'
    #[arg(short = 'S', long, value_name = "CRITERIA", requires = "columns")]
    pub select: Option<String>,
    /// Omit the line of headings; values are then not aligned
    #[arg(long, requires = "columns")]
    pub noheadings: bool,
    /// Separator of values, which are then not aligned [default: a blank, or : without headings]
    #[arg(long, value_name = "TEXT", requires = "columns")]
    pub separator: Option<String>,
    /// Print each value as DM_FIELD='VALUE'
    #[arg(long, requires = "columns")]
    pub nameprefixes: bool,
    /// Print these values without quotes
    #[arg(long, requires = "nameprefixes")]
    pub unquoted: bool,
    /// Print one line per field instead of one line per device
    #[arg(long, requires = "columns")]
    pub rows: bool,
}

pub fn run_info_command(args: &InfoArgs) -> Result<()> {
    let client = args.server.client()?;
    if args.columns.columns {
        return print_info_columns(&client, &args.names, &args.columns);
    }
    let devices = find_devices(&client, &args.names)?;
    if args.print.json {
        return print_json_to_stdout(&devices);
    }
    let mut out = String::new();
    for device in &devices {
        write_device_info(device, &mut out);
        if !device.queues.is_empty() || !device.power.is_empty() || device.throttle.is_some() {
            // The lines of queues and limits belong before the empty line at the end of the block.
            out.pop();
            device.queues.iter().for_each(|queue| format_request_queue(queue, &mut out));
            device.power.iter().for_each(|power| format_disk_power_state(power, &mut out));
            if let Some(throttle) = &device.throttle {
                // Writing to a String can't fail.
                let _ = writeln!(out, "Limits: {}", format_device_throttle(throttle));
            }
            out.push('\n');
        }
    }
    print_to_stdout(if devices.is_empty() { NONE } else { &out })
}

fn print_info_columns(client: &ControlClient, names: &[String], args: &InfoColumnArgs) -> Result<()> {
    if matches!(args.options.as_deref(), Some("help" | "?")) {
        return print_to_stdout(&report_fields_help());
    }
    let layout = ColumnReportLayout {
        no_headings: args.noheadings,
        separator: args.separator.clone(),
        name_prefixes: args.nameprefixes,
        unquoted: args.unquoted,
        rows: args.rows,
    };
    let (options, sort, select) = (args.options.as_deref(), args.sort.as_deref(), args.select.as_deref());
    let wrong = |(ColumnReportArgError::Word(why) | ColumnReportArgError::Value(why))| {
        anyhow!(join_message_lines(&why))
    };
    let mut columns = ColumnReport::new(options, sort, select, layout).map_err(wrong)?;
    let devices = find_devices(client, names)?;
    if devices.is_empty() {
        return print_to_stdout(NONE);
    }
    let (text, wrong) =
        columns.print(columns.ask(client, devices).map_err(|e| explain_client_error(e, None))?);
    print_to_stdout(&text)?;
    match wrong.first() {
        Some(why) => bail!(join_message_lines(why)),
        None => Ok(()),
    }
}

/// Joins the lines of a message of dmsetup.
fn join_message_lines(text: &str) -> String {
    text.replace('\n', ": ")
}

/// One device as `dmsetup info` prints it, with the empty line at the end. "Read Ahead" is omitted:
/// udm has none.
pub fn write_device_info(device: &api::DeviceDescription, out: &mut String) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_is_dmsetups() {
        let mut out = String::new();
        let device = api::DeviceDescription {
            name: "snap".into(),
            uuid: Some("LVM-x".into()),
            number: "254:3".into(),
            state: "active".into(),
            live_table: true,
            inactive_table: true,
            targets: 2,
            ..api::DeviceDescription::default()
        };
        write_device_info(&device, &mut out);
        let expected = "Name:              snap\nState:             ACTIVE\nTables present:    LIVE & INACTIVE\n\
                      Open count:        0\nEvent number:      0\nMajor, minor:      254, 3\nNumber of targets: 2\nUUID: LVM-x\n\n";
        assert_eq!(out, expected);
    }
}
