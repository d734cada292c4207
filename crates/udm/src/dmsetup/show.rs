//! Commands that print tables, statuses and descriptions of devices.

use super::options::DmsetupOption;
use super::report::{build_column_report, repeat_report};
use super::session::{DmsetupError, DmsetupInvocation, DmsetupResult};
use crate::columns::{ColumnReport, report_fields_help};
use crate::concise;
use crate::verbs;
use udm_control::api;
use udm_control::client::ControlClientError;

/// The active table of a device, or with `--inactive` the inactive one.
fn fetch_device_table(
    session: &DmsetupInvocation,
    device: &api::DeviceDescription,
) -> Result<api::TableDescription, ControlClientError> {
    session.client.call(api::verbs::GET_TABLE.on(&device.number).with(&table_slot_from_options(session)), &())
}

/// The table slot that the command asks for.
fn table_slot_from_options(session: &DmsetupInvocation) -> api::TableSlotQuery {
    api::TableSlotQuery::of(session.has(DmsetupOption::Inactive))
}

/// The lines of the target type in `--target`, or all lines; `None` if no line has the type.
fn filter_lines_by_target(
    session: &DmsetupInvocation,
    mut lines: Vec<api::TableOrStatusLine>,
) -> Option<Vec<api::TableOrStatusLine>> {
    let Some(target) = session.value(DmsetupOption::Target) else { return Some(lines) };
    lines.retain(|line| line.target == target);
    Some(lines).filter(|lines| !lines.is_empty())
}

/// Describes a device as `info` does, with the number of targets in the chosen slot.
///
/// # Errors
/// The server does not answer.
pub fn format_dmsetup_info(
    session: &DmsetupInvocation,
    device: &api::DeviceDescription,
) -> Result<String, DmsetupError> {
    let mut device = device.clone();
    if session.has(DmsetupOption::Inactive) {
        let table = fetch_device_table(session, &device).map_err(|e| DmsetupError::Failed(e.to_string()))?;
        device.targets = table.lines.len() as u64;
    }
    let mut out = String::new();
    verbs::write_device_info(&device, &mut out);
    Ok(out)
}

/// Runs `dmsetup table`.
pub fn run_dmsetup_table(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    if session.has(DmsetupOption::Concise) {
        return run_dmsetup_table_concise(session, words);
    }
    session.each_or_all(words, |session, selector, prefix| {
        let device = session.find(selector, "table")?;
        let table = session.map_error("table", selector, fetch_device_table(session, &device))?;
        print_table_or_status_lines(session, &device, table.lines, prefix)
    })
}

/// Runs `dmsetup status`.
pub fn run_dmsetup_status(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    session.each_or_all(words, |session, selector, prefix| {
        let device = session.find_or_fail(selector)?;
        let verb = api::verbs::GET_STATUS.on(&device.number).with(&table_slot_from_options(session));
        let status = session.map_error("table", selector, session.client.call(verb, &()))?;
        print_table_or_status_lines(session, &device, status.lines, prefix)
    })
}

fn print_table_or_status_lines(
    session: &mut DmsetupInvocation,
    device: &api::DeviceDescription,
    lines: Vec<api::TableOrStatusLine>,
    prefix: bool,
) -> DmsetupResult {
    let Some(lines) = filter_lines_by_target(session, lines) else { return Ok(()) };
    if session.has(DmsetupOption::Verbose) {
        session.out += &format_dmsetup_info(session, device)?;
    }
    verbs::format_table_or_status_lines(prefix.then_some(device.name.as_str()), &lines, &mut session.out);
    Ok(())
}

fn run_dmsetup_table_concise(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    let mut all = Vec::new();
    let done = session.each_or_all(words, |session, selector, _| {
        let device = session.find(selector, "table")?;
        let table = session.map_error("table", selector, fetch_device_table(session, &device))?;
        all.extend(
            filter_lines_by_target(session, table.lines)
                .map(|lines| concise::format_concise_device(&device, &lines)),
        );
        Ok(())
    });
    if !all.is_empty() {
        session.out += &(all.join(";") + "\n");
    }
    done
}

/// Runs `dmsetup info`.
pub fn run_dmsetup_info(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    if session.has(DmsetupOption::Columns) {
        return run_dmsetup_info_columns(session, words);
    }
    session.each_or_all(words, |session, selector, _| {
        let device = session.find_or_fail(selector)?;
        session.out += &format_dmsetup_info(session, &device)?;
        Ok(())
    })
}

fn run_dmsetup_info_columns(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    if matches!(session.value(DmsetupOption::Options), Some("help" | "?"))
        || session.value(DmsetupOption::Select) == Some("help")
    {
        DmsetupInvocation::warn(report_fields_help().trim_end());
        return Ok(());
    }
    let mut columns = build_column_report(session, session.value(DmsetupOption::Options))?;
    repeat_report(session, |session| print_column_report(session, words, &mut columns))
}

fn print_column_report(
    session: &mut DmsetupInvocation,
    words: &[String],
    columns: &mut ColumnReport,
) -> DmsetupResult {
    let mut devices = Vec::new();
    let done = session.each_or_all(words, |session, selector, _| {
        devices.push(session.find_or_fail(selector)?);
        Ok(())
    });
    let rows = columns.ask(&session.client, devices).map_err(|e| DmsetupError::Failed(e.to_string()))?;
    let (text, wrong) = columns.print(rows);
    session.out += &text;
    match (done, wrong.is_empty()) {
        (Ok(()), false) => Err(DmsetupError::Failed(wrong.join("\n"))),
        (done, _) => done,
    }
}
