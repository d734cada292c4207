//! Small commands: versions, names, and commands without a counterpart in udm.

use super::options::OptionName;
use super::report::{columns_of, repeat_report};
use super::session::{CommandError, CommandResult, Session, command_failed, ioctl_failed};
use crate::columns::{list_of_fields, split_row};
use crate::log;
use udm_control::api::{self, verbs};
use udm_control::client::ClientError;
use udm_core::errno::EINVAL;

/// Fails for a command or an option that udm does not have.
///
/// # Errors
/// Always fails.
pub fn unsupported(feature: &str, why: &str) -> CommandResult {
    command_failed(format!("{feature}: not in udm: {why}"))
}

/// Runs `dmsetup help`.
pub fn help(session: &mut Session, _: &[String]) -> CommandResult {
    let fields = if session.has(OptionName::Columns) { list_of_fields() } else { String::new() };
    log::say(format!("{}{fields}", super::usage()));
    Ok(())
}

fn versions(session: &Session) -> Result<api::Version, CommandError> {
    let failed = |e: ClientError| CommandError::Failed(e.to_string());
    session.client.call(verbs::GET_VERSION, &()).map_err(failed)
}

/// Runs `dmsetup version`.
pub fn version(session: &mut Session, _: &[String]) -> CommandResult {
    session.out += &format!("Library version:   {} (udm)\n", env!("CARGO_PKG_VERSION"));
    let version = versions(session)?;
    session.out += &format!("Driver version:    {}\n", version.driver_version);
    Ok(())
}

/// Runs `dmsetup targets`.
pub fn targets(session: &mut Session, _: &[String]) -> CommandResult {
    for target in versions(session)?.targets {
        session.out += &format!("{:<16} v{}\n", target.name, target.version);
    }
    Ok(())
}

/// Runs `dmsetup target-version`.
pub fn target_version(session: &mut Session, words: &[String]) -> CommandResult {
    let targets = versions(session)?.targets;
    for word in words {
        let Some(target) = targets.iter().find(|target| target.name == *word) else {
            return command_failed(ioctl_failed(
                "target-version",
                &format!("{word} "),
                EINVAL.unsigned_abs(),
            ));
        };
        session.out += &format!("{:<16} v{}\n", target.name, target.version);
    }
    Ok(())
}

/// `dmsetup mangle`: udm keeps names unchanged, so no name needs a correction.
pub fn mangle(session: &mut Session, words: &[String]) -> CommandResult {
    session.each_or_all(words, |session, selector, _| {
        let device = session.find_or_fail(selector)?;
        let (uuid, names) = match &device.uuid {
            Some(uuid) => (uuid.as_str(), "name and UUID"),
            None => ("[no UUID]", "name"),
        };
        session.out += &format!("{}: {uuid}: {names} already in correct form\n", device.name);
        Ok(())
    })
}

/// `dmsetup udevcookies`: prints an empty list, because udm does not wait for udev.
pub fn cookies(session: &mut Session, _: &[String]) -> CommandResult {
    session.out += "Cookie       Semid      Value      Last semop time           Last change time\n";
    Ok(())
}

/// Runs `dmsetup udevcomplete_all`.
pub fn complete_all(session: &mut Session, _: &[String]) -> CommandResult {
    session.out += "0 semaphores with keys prefixed by 3405 (0xd4d) destroyed. 0 skipped.\n";
    Ok(())
}

/// Runs `dmsetup splitname`.
pub fn split_name(session: &mut Session, words: &[String]) -> CommandResult {
    let fields = session.value(OptionName::Options).unwrap_or("vg_name,lv_name,lv_layer");
    let mut columns = columns_of(session, Some(fields))?;
    let subsystem = words.get(1).map_or("LVM", String::as_str);
    repeat_report(session, |session| {
        let (text, _) = columns.print(vec![split_row(&words[0], subsystem)]);
        session.out += &text;
        Ok(())
    })
}
