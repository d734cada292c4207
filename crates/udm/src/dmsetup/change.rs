//! Commands that change a device.

use super::create::translate_node_paths;
use super::options::DmsetupOption;
use super::session::{
    DeviceSelector, DmsetupError, DmsetupInvocation, DmsetupResult, command_failed_error, ioctl_failed,
};
use super::show::format_dmsetup_info;
use crate::requests::current_dir;
use std::thread::sleep;
use std::time::Duration;
use udm_control::api::{self, verbs};
use udm_control::client::ControlClientError;
use udm_core::errno::{EBUSY, ENXIO, ETIMEDOUT};

/// Attempts of `--retry`, and the pause between them.
const TRIES: usize = 25;
const PAUSE: Duration = Duration::from_millis(200);

/// With `--verbose`, prints the device in its new state, as `info` does.
pub fn print_device_if_verbose(session: &mut DmsetupInvocation, selector: &DeviceSelector) -> DmsetupResult {
    if session.has(DmsetupOption::Verbose)
        && let Some(device) = session.lookup(selector)?
    {
        session.out += &format_dmsetup_info(session, &device)?;
    }
    Ok(())
}

/// The query of a removal with the options of the command.
fn build_remove_query(session: &DmsetupInvocation) -> api::RemoveDeviceQuery {
    api::RemoveDeviceQuery {
        force: Some(session.has(DmsetupOption::Force)),
        deferred: Some(session.has(DmsetupOption::Deferred)),
        timeout_ms: None,
    }
}

/// Runs `dmsetup remove`.
pub fn run_dmsetup_remove(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    session.each(words, |session, selector| {
        let force = session.has(DmsetupOption::Force);
        let missing = |failure: DmsetupError| {
            if force { failure.with_lines_before(&error_table_failed(selector)) } else { failure }
        };
        let device = session.find(selector, "remove").map_err(missing)?;
        let query = build_remove_query(session);
        let mut tries = if session.has(DmsetupOption::Retry) { TRIES } else { 1 };
        loop {
            let done = session.client.call(verbs::REMOVE_DEVICE.on(&device.name).with(&query), &());
            let is_busy =
                matches!(&done, Err(ControlClientError::Refused(why)) if why.errno == EBUSY.unsigned_abs());
            tries -= 1;
            match session.map_error("remove", selector, done) {
                Err(DmsetupError::Failed(text)) if is_busy && tries > 0 => DmsetupInvocation::warn(&text),
                done => return done,
            }
            sleep(PAUSE);
        }
    })
}

/// The error text for an error table, if the device does not exist.
fn error_table_failed(selector: &DeviceSelector) -> String {
    let line = |ioctl| ioctl_failed(ioctl, &selector.in_errors(), ENXIO.unsigned_abs());
    [line("table"), line("reload")].join("\n")
}

/// `dmsetup remove_all`: removes devices in the order of their dependencies, and leaves those in
/// use.
pub fn run_dmsetup_remove_all(session: &mut DmsetupInvocation, _: &[String]) -> DmsetupResult {
    let query = build_remove_query(session);
    loop {
        let all = session.all()?;
        let mut removed = 0;
        for device in &all {
            match session.client.call(verbs::REMOVE_DEVICE.on(&device.name).with(&query), &()) {
                Ok(()) => removed += 1,
                // In use, or already removed.
                Err(ControlClientError::Refused(_)) => {}
                Err(error) => return command_failed_error(error.to_string()),
            }
        }
        // A deferred removal succeeds although the device remains.
        if removed == 0 || session.has(DmsetupOption::Deferred) {
            return Ok(());
        }
    }
}

/// Runs `dmsetup suspend`.
pub fn run_dmsetup_suspend(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    let how =
        api::SuspendDeviceRequest { noflush: Some(session.has(DmsetupOption::NoFlush)), timeout_ms: None };
    for_each_named(session, words, "suspend", |session, name| {
        session.client.call(verbs::SUSPEND_DEVICE.on(name), &how)
    })
}

/// Runs `dmsetup resume`.
pub fn run_dmsetup_resume(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    let how = api::ResumeDeviceRequest::default();
    for_each_named(session, words, "resume", |session, name| {
        session.client.call(verbs::RESUME_DEVICE.on(name), &how)
    })
}

/// Runs `dmsetup clear`.
pub fn run_dmsetup_clear(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    for_each_named(session, words, "clear", |session, name| {
        session.client.call(verbs::CLEAR_TABLE.on(name), &())
    })
}

fn for_each_named(
    session: &mut DmsetupInvocation,
    words: &[String],
    ioctl: &'static str,
    verb: impl Fn(&DmsetupInvocation, &str) -> Result<(), ControlClientError>,
) -> DmsetupResult {
    session.each(words, |session, selector| {
        let device = session.find(selector, ioctl)?;
        session.map_error(ioctl, selector, verb(session, &device.name))?;
        print_device_if_verbose(session, selector)
    })
}

/// `dmsetup wipe_table`: loads a table of error targets with the length of the present table.
pub fn run_dmsetup_wipe_table(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    session.each(words, |session, selector| {
        let Some(device) = session.lookup(selector)? else {
            return command_failed_error(error_table_failed(selector));
        };
        let sectors = device.size_bytes / 512;
        if sectors == 0 {
            return Ok(());
        }
        let body =
            api::LoadTableRequest { table: format!("0 {sectors} error"), folder: None, read_only: None };
        let done = session.client.call(verbs::LOAD_TABLE.on(&device.name), &body);
        session.map_error("reload", selector, done)?;
        let how = api::ResumeDeviceRequest::default();
        let done = session.client.call(verbs::RESUME_DEVICE.on(&device.name), &how);
        session.map_error("resume", selector, done)?;
        print_device_if_verbose(session, selector)
    })
}

/// Runs `dmsetup rename`.
pub fn run_dmsetup_rename(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    let (selector, rest) = session.one(words, "No device specified.")?;
    let [new] = rest else { return command_failed_error("No device specified.") };
    let to = if session.has(DmsetupOption::SetUuid) {
        api::RenameDeviceRequest { uuid: Some(new.clone()), name: None }
    } else if new.contains('/') {
        return command_failed_error(format!("Name \"{new}\" invalid. It contains \"/\"."));
    } else if new.is_empty() {
        return command_failed_error("Non empty new name is required.");
    } else {
        api::RenameDeviceRequest { name: Some(new.clone()), uuid: None }
    };
    // The kernel finds a device to rename only by its name.
    if !matches!(selector, DeviceSelector::Name(_)) {
        return command_failed_error(ioctl_failed("rename", &selector.in_errors(), ENXIO.unsigned_abs()));
    }
    let device = session.find(&selector, "rename")?;
    session.map_error("rename", &selector, session.client.call(verbs::RENAME_DEVICE.on(&device.name), &to))
}

/// Runs `dmsetup message`.
pub fn run_dmsetup_message(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    let (selector, rest) = session.one(words, "No device specified.")?;
    let [sector, message @ ..] = rest else {
        return Err(DmsetupError::Usage("Incorrect number of arguments.".into()));
    };
    let Ok(sector) = sector.parse() else { return command_failed_error("Invalid sector.") };
    if message.is_empty() {
        DmsetupInvocation::warn("No message supplied.");
    }
    let device = session.find(&selector, "message")?;
    let message = translate_node_paths(session, message.join(" "))?;
    let body = api::TargetMessageRequest { sector, message, folder: current_dir() };
    let answer = session.client.call(verbs::SEND_MESSAGE.on(&device.name), &body);
    let answer = session.map_error("message", &selector, answer)?.answer;
    if !answer.is_empty() {
        session.out += answer.trim_end_matches('\n');
        session.out.push('\n');
    }
    print_device_if_verbose(session, &selector)
}

/// `dmsetup wait`. The server limits the time of a request, so the request is repeated.
pub fn run_dmsetup_wait(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    let (selector, rest) = session.one(words, "No device specified.")?;
    let event_nr = match rest.first() {
        Some(number) => number.parse().or_else(|_| command_failed_error("Invalid event number."))?,
        None => 0,
    };
    let device = session.find(&selector, "waitevent")?;
    let body = api::WaitDeviceEventRequest { event_nr, timeout_ms: None };
    loop {
        match session.client.call(verbs::WAIT_EVENT.on(&device.name), &body) {
            Err(ControlClientError::Refused(why)) if why.errno == ETIMEDOUT.unsigned_abs() => {}
            done => {
                let device = session.map_error("waitevent", &selector, done)?;
                if session.has(DmsetupOption::Verbose) {
                    session.out += &format_dmsetup_info(session, &device)?;
                }
                return Ok(());
            }
        }
    }
}
