//! Small commands: versions, names, and commands without a counterpart in udm.

use super::options::DmsetupOption;
use super::report::{build_column_report, repeat_report};
use super::session::{DmsetupError, DmsetupInvocation, DmsetupResult, command_failed_error, ioctl_failed};
use crate::columns::{build_splitname_row, report_fields_help};
use crate::log;
use udm_control::api::{self, verbs};
use udm_control::client::ControlClientError;
use udm_core::errno::EINVAL;

/// Fails for a command or an option that udm does not have.
///
/// # Errors
/// Always fails.
pub fn fail_unsupported_feature(feature: &str, why: &str) -> DmsetupResult {
    command_failed_error(format!("{feature}: not in udm: {why}"))
}

/// Runs `dmsetup help`.
pub fn run_dmsetup_help(session: &mut DmsetupInvocation, _: &[String]) -> DmsetupResult {
    let fields = if session.has(DmsetupOption::Columns) { report_fields_help() } else { String::new() };
    log::queue_stderr_text(&format!("{}{fields}", super::dmsetup_usage_text()));
    Ok(())
}

fn fetch_server_version(session: &DmsetupInvocation) -> Result<api::ServerVersions, DmsetupError> {
    let failed = |e: ControlClientError| DmsetupError::Failed(e.to_string());
    session.client.call(verbs::GET_VERSION, &()).map_err(failed)
}

/// Runs `dmsetup version`.
pub fn run_dmsetup_version(session: &mut DmsetupInvocation, _: &[String]) -> DmsetupResult {
    session.out += &format!("Library version:   {} (udm)\n", env!("CARGO_PKG_VERSION"));
    let version = fetch_server_version(session)?;
    session.out += &format!("Driver version:    {}\n", version.driver_version);
    Ok(())
}

/// Runs `dmsetup targets`.
pub fn run_dmsetup_targets(session: &mut DmsetupInvocation, _: &[String]) -> DmsetupResult {
    for target in fetch_server_version(session)?.targets {
        session.out += &format!("{:<16} v{}\n", target.name, target.version);
    }
    Ok(())
}

/// Runs `dmsetup target-version`.
pub fn run_dmsetup_target_version(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    let targets = fetch_server_version(session)?.targets;
    for word in words {
        let Some(target) = targets.iter().find(|target| target.name == *word) else {
            return command_failed_error(ioctl_failed(
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
pub fn run_dmsetup_mangle(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
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
pub fn run_dmsetup_udevcookies(session: &mut DmsetupInvocation, _: &[String]) -> DmsetupResult {
    session.out += "Cookie       Semid      Value      Last semop time           Last change time\n";
    Ok(())
}

/// Runs `dmsetup udevcomplete_all`.
pub fn run_dmsetup_udevcomplete_all(session: &mut DmsetupInvocation, _: &[String]) -> DmsetupResult {
    session.out += "0 semaphores with keys prefixed by 3405 (0xd4d) destroyed. 0 skipped.\n";
    Ok(())
}

/// Runs `dmsetup splitname`.
pub fn run_dmsetup_splitname(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    let fields = session.value(DmsetupOption::Options).unwrap_or("vg_name,lv_name,lv_layer");
    let mut columns = build_column_report(session, Some(fields))?;
    let subsystem = words.get(1).map_or("LVM", String::as_str);
    repeat_report(session, |session| {
        let (text, _) = columns.print(vec![build_splitname_row(&words[0], subsystem)]);
        session.out += &text;
        Ok(())
    })
}
