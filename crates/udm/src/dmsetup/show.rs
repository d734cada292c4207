//! Tables, statuses, and what devices are.

use super::options::Name;
use super::report::{columns_of, repeat_report};
use super::session::{CommandError, CommandResult, NegotiatedSession};
use crate::columns::{Columns, list_of_fields};
use crate::concise;
use crate::verbs;
use udm_control::api;
use udm_control::client::ClientError;

/// The table of a device, or what `inactive` would make it.
fn table_of(face: &NegotiatedSession, device: &api::Device) -> Result<api::Table, ClientError> {
    face.client.call(api::verbs::GET_TABLE.on(&device.number).with(&slot(face)), &())
}

/// The table slot that is asked for.
fn slot(face: &NegotiatedSession) -> api::SlotQuery {
    api::SlotQuery::of(face.has(Name::Inactive))
}

/// The lines of a type that is asked for, or all.
fn filter_by_target(face: &NegotiatedSession, mut lines: Vec<api::Line>) -> Option<Vec<api::Line>> {
    let Some(target) = face.value(Name::Target) else { return Some(lines) };
    lines.retain(|line| line.target == target);
    Some(lines).filter(|lines| !lines.is_empty())
}

/// As `info` prints a device, with the number of targets in the slot that is asked for.
///
/// # Errors
/// When the server does not answer.
pub fn describe(face: &NegotiatedSession, device: &api::Device) -> Result<String, CommandError> {
    let mut device = device.clone();
    if face.has(Name::Inactive) {
        let table = table_of(face, &device).map_err(|e| CommandError::Failed(e.to_string()))?;
        device.targets = table.lines.len() as u64;
    }
    let mut out = String::new();
    verbs::describe(&device, &mut out);
    Ok(out)
}

/// `dmsetup table`.
pub fn table(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    if face.has(Name::ConciseDevice) {
        return concise_table(face, words);
    }
    face.each_or_all(words, |face, which, prefix| {
        let device = face.find(which, "table")?;
        let table = face.map_error_of("table", which, table_of(face, &device))?;
        lines(face, &device, table.lines, prefix)
    })
}

/// `dmsetup status`.
pub fn status(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    face.each_or_all(words, |face, which, prefix| {
        let device = face.find_or_fail(which)?;
        let verb = api::verbs::GET_STATUS.on(&device.number).with(&slot(face));
        let status = face.map_error_of("table", which, face.client.call(verb, &()))?;
        lines(face, &device, status.lines, prefix)
    })
}

fn lines(
    face: &mut NegotiatedSession,
    device: &api::Device,
    lines: Vec<api::Line>,
    prefix: bool,
) -> CommandResult {
    let Some(lines) = filter_by_target(face, lines) else { return Ok(()) };
    if face.has(Name::Verbose) {
        face.out += &describe(face, device)?;
    }
    verbs::table_lines(prefix.then_some(device.name.as_str()), &lines, &mut face.out);
    Ok(())
}

fn concise_table(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    let mut all = Vec::new();
    let done = face.each_or_all(words, |face, which, _| {
        let device = face.find(which, "table")?;
        let table = face.map_error_of("table", which, table_of(face, &device))?;
        all.extend(filter_by_target(face, table.lines).map(|lines| concise::print(&device, &lines)));
        Ok(())
    });
    if !all.is_empty() {
        face.out += &(all.join(";") + "\n");
    }
    done
}

/// `dmsetup info`.
pub fn info(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    if face.has(Name::Columns) {
        return columns(face, words);
    }
    face.each_or_all(words, |face, which, _| {
        let device = face.find_or_fail(which)?;
        face.out += &describe(face, &device)?;
        Ok(())
    })
}

fn columns(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    if matches!(face.value(Name::Options), Some("help" | "?")) || face.value(Name::Select) == Some("help") {
        NegotiatedSession::warn(list_of_fields().trim_end());
        return Ok(());
    }
    let mut columns = columns_of(face, face.value(Name::Options))?;
    repeat_report(face, |face| report(face, words, &mut columns))
}

fn report(face: &mut NegotiatedSession, words: &[String], columns: &mut Columns) -> CommandResult {
    let mut devices = Vec::new();
    let done = face.each_or_all(words, |face, which, _| {
        devices.push(face.find_or_fail(which)?);
        Ok(())
    });
    let rows = columns.ask(&face.client, devices).map_err(|e| CommandError::Failed(e.to_string()))?;
    let (text, wrong) = columns.print(rows);
    face.out += &text;
    match (done, wrong.is_empty()) {
        (Ok(()), false) => Err(CommandError::Failed(wrong.join("\n"))),
        (done, _) => done,
    }
}
