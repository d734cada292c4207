//! Commands that print tables, statuses and descriptions of devices.

use super::options::OptionName;
use super::report::{columns_of, repeat_report};
use super::session::{CommandError, CommandResult, Session};
use crate::columns::{Columns, list_of_fields};
use crate::concise;
use crate::verbs;
use udm_control::api;
use udm_control::client::ClientError;

/// The active table of a device, or with `--inactive` the inactive one.
fn table_of(session: &Session, device: &api::Device) -> Result<api::Table, ClientError> {
    session.client.call(api::verbs::GET_TABLE.on(&device.number).with(&slot(session)), &())
}

/// The table slot that the command asks for.
fn slot(session: &Session) -> api::SlotQuery {
    api::SlotQuery::of(session.has(OptionName::Inactive))
}

/// The lines of the target type in `--target`, or all lines; `None` if no line has the type.
fn filter_by_target(session: &Session, mut lines: Vec<api::Line>) -> Option<Vec<api::Line>> {
    let Some(target) = session.value(OptionName::Target) else { return Some(lines) };
    lines.retain(|line| line.target == target);
    Some(lines).filter(|lines| !lines.is_empty())
}

/// Describes a device as `info` does, with the number of targets in the chosen slot.
///
/// # Errors
/// The server does not answer.
pub fn describe(session: &Session, device: &api::Device) -> Result<String, CommandError> {
    let mut device = device.clone();
    if session.has(OptionName::Inactive) {
        let table = table_of(session, &device).map_err(|e| CommandError::Failed(e.to_string()))?;
        device.targets = table.lines.len() as u64;
    }
    let mut out = String::new();
    verbs::describe(&device, &mut out);
    Ok(out)
}

/// Runs `dmsetup table`.
pub fn table(session: &mut Session, words: &[String]) -> CommandResult {
    if session.has(OptionName::Concise) {
        return concise_table(session, words);
    }
    session.each_or_all(words, |session, selector, prefix| {
        let device = session.find(selector, "table")?;
        let table = session.map_error("table", selector, table_of(session, &device))?;
        lines(session, &device, table.lines, prefix)
    })
}

/// Runs `dmsetup status`.
pub fn status(session: &mut Session, words: &[String]) -> CommandResult {
    session.each_or_all(words, |session, selector, prefix| {
        let device = session.find_or_fail(selector)?;
        let verb = api::verbs::GET_STATUS.on(&device.number).with(&slot(session));
        let status = session.map_error("table", selector, session.client.call(verb, &()))?;
        lines(session, &device, status.lines, prefix)
    })
}

fn lines(session: &mut Session, device: &api::Device, lines: Vec<api::Line>, prefix: bool) -> CommandResult {
    let Some(lines) = filter_by_target(session, lines) else { return Ok(()) };
    if session.has(OptionName::Verbose) {
        session.out += &describe(session, device)?;
    }
    verbs::table_lines(prefix.then_some(device.name.as_str()), &lines, &mut session.out);
    Ok(())
}

fn concise_table(session: &mut Session, words: &[String]) -> CommandResult {
    let mut all = Vec::new();
    let done = session.each_or_all(words, |session, selector, _| {
        let device = session.find(selector, "table")?;
        let table = session.map_error("table", selector, table_of(session, &device))?;
        all.extend(filter_by_target(session, table.lines).map(|lines| concise::print(&device, &lines)));
        Ok(())
    });
    if !all.is_empty() {
        session.out += &(all.join(";") + "\n");
    }
    done
}

/// Runs `dmsetup info`.
pub fn info(session: &mut Session, words: &[String]) -> CommandResult {
    if session.has(OptionName::Columns) {
        return columns(session, words);
    }
    session.each_or_all(words, |session, selector, _| {
        let device = session.find_or_fail(selector)?;
        session.out += &describe(session, &device)?;
        Ok(())
    })
}

fn columns(session: &mut Session, words: &[String]) -> CommandResult {
    if matches!(session.value(OptionName::Options), Some("help" | "?"))
        || session.value(OptionName::Select) == Some("help")
    {
        Session::warn(list_of_fields().trim_end());
        return Ok(());
    }
    let mut columns = columns_of(session, session.value(OptionName::Options))?;
    repeat_report(session, |session| report(session, words, &mut columns))
}

fn report(session: &mut Session, words: &[String], columns: &mut Columns) -> CommandResult {
    let mut devices = Vec::new();
    let done = session.each_or_all(words, |session, selector, _| {
        devices.push(session.find_or_fail(selector)?);
        Ok(())
    });
    let rows = columns.ask(&session.client, devices).map_err(|e| CommandError::Failed(e.to_string()))?;
    let (text, wrong) = columns.print(rows);
    session.out += &text;
    match (done, wrong.is_empty()) {
        (Ok(()), false) => Err(CommandError::Failed(wrong.join("\n"))),
        (done, _) => done,
    }
}
