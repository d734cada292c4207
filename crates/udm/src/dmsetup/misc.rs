//! Commands that need few words: versions, names, and what has no counterpart in udm.

use super::options::Name;
use super::report::{columns_of, repeat_report};
use super::session::{CommandError, CommandResult, NegotiatedSession, command_failed, ioctl_failed};
use crate::columns::{list_of_fields, split_row};
use crate::log;
use udm_control::api::{self, verbs};
use udm_control::client::ClientError;
use udm_core::errno::EINVAL;

/// A command or an option that udm can't do.
///
/// # Errors
/// Always.
pub fn unsupported(what: &str, why: &str) -> CommandResult {
    command_failed(format!("{what}: not in udm: {why}"))
}

/// `dmsetup help`.
pub fn help(face: &mut NegotiatedSession, _: &[String]) -> CommandResult {
    let fields = if face.has(Name::Columns) { list_of_fields() } else { String::new() };
    log::say(format!("{}{fields}", super::usage()));
    Ok(())
}

fn versions(face: &NegotiatedSession) -> Result<api::Version, CommandError> {
    let command_failed = |e: ClientError| CommandError::Failed(e.to_string());
    face.client.call(verbs::GET_VERSION, &()).map_err(command_failed)
}

/// `dmsetup version`.
pub fn version(face: &mut NegotiatedSession, _: &[String]) -> CommandResult {
    face.out += &format!("Library version:   {} (udm)\n", env!("CARGO_PKG_VERSION"));
    let version = versions(face)?;
    face.out += &format!("Driver version:    {}\n", version.driver_version);
    Ok(())
}

/// `dmsetup targets`.
pub fn targets(face: &mut NegotiatedSession, _: &[String]) -> CommandResult {
    for target in versions(face)?.targets {
        face.out += &format!("{:<16} v{}\n", target.name, target.version);
    }
    Ok(())
}

/// `dmsetup target-version`.
pub fn target_version(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    let targets = versions(face)?.targets;
    for word in words {
        let Some(target) = targets.iter().find(|target| target.name == *word) else {
            return command_failed(ioctl_failed(
                "target-version",
                &format!("{word} "),
                EINVAL.unsigned_abs(),
            ));
        };
        face.out += &format!("{:<16} v{}\n", target.name, target.version);
    }
    Ok(())
}

/// `dmsetup mangle`: names are kept as they are, so none is in a wrong form.
pub fn mangle(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    face.each_or_all(words, |face, which, _| {
        let device = face.find_or_fail(which)?;
        let (uuid, what) = match &device.uuid {
            Some(uuid) => (uuid.as_str(), "name and UUID"),
            None => ("[no UUID]", "name"),
        };
        face.out += &format!("{}: {uuid}: {what} already in correct form\n", device.name);
        Ok(())
    })
}

/// `dmsetup udevcookies`: there are none, as nothing waits for udev.
pub fn cookies(face: &mut NegotiatedSession, _: &[String]) -> CommandResult {
    face.out += "Cookie       Semid      Value      Last semop time           Last change time\n";
    Ok(())
}

/// `dmsetup udevcomplete_all`.
pub fn complete_all(face: &mut NegotiatedSession, _: &[String]) -> CommandResult {
    face.out += "0 semaphores with keys prefixed by 3405 (0xd4d) destroyed. 0 skipped.\n";
    Ok(())
}

/// `dmsetup splitname`.
pub fn split_name(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    let fields = face.value(Name::Options).unwrap_or("vg_name,lv_name,lv_layer");
    let mut columns = columns_of(face, Some(fields))?;
    let subsystem = words.get(1).map_or("LVM", String::as_str);
    repeat_report(face, |face| {
        let (text, _) = columns.print(vec![split_row(&words[0], subsystem)]);
        face.out += &text;
        Ok(())
    })
}
