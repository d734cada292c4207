//! Commands that change a device.

use super::create::translate_node_paths;
use super::options::OptionName;
use super::session::{CommandError, CommandResult, DeviceSelector, Session, command_failed, ioctl_failed};
use super::show::describe;
use crate::requests::current_dir;
use std::thread::sleep;
use std::time::Duration;
use udm_control::api::{self, verbs};
use udm_control::client::ClientError;
use udm_core::errno::{EBUSY, ENXIO, ETIMEDOUT};

/// Attempts of `--retry`, and the pause between them.
const TRIES: usize = 25;
const PAUSE: Duration = Duration::from_millis(200);

/// With `--verbose`, prints the device in its new state, as `info` does.
pub fn print_if_verbose(session: &mut Session, selector: &DeviceSelector) -> CommandResult {
    if session.has(OptionName::Verbose)
        && let Some(device) = session.lookup(selector)?
    {
        session.out += &describe(session, &device)?;
    }
    Ok(())
}

/// The query of a removal with the options of the command.
fn removal_query(session: &Session) -> api::RemoveQuery {
    api::RemoveQuery {
        force: Some(session.has(OptionName::Force)),
        deferred: Some(session.has(OptionName::Deferred)),
        timeout_ms: None,
    }
}

/// Runs `dmsetup remove`.
pub fn remove(session: &mut Session, words: &[String]) -> CommandResult {
    session.each(words, |session, selector| {
        let force = session.has(OptionName::Force);
        let missing = |failure: CommandError| {
            if force { failure.with_lines_before(&error_table_failed(selector)) } else { failure }
        };
        let device = session.find(selector, "remove").map_err(missing)?;
        let query = removal_query(session);
        let mut tries = if session.has(OptionName::Retry) { TRIES } else { 1 };
        loop {
            let done = session.client.call(verbs::REMOVE_DEVICE.on(&device.name).with(&query), &());
            let is_busy =
                matches!(&done, Err(ClientError::Refused(why)) if why.errno == EBUSY.unsigned_abs());
            tries -= 1;
            match session.map_error("remove", selector, done) {
                Err(CommandError::Failed(text)) if is_busy && tries > 0 => Session::warn(&text),
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
pub fn remove_all(session: &mut Session, _: &[String]) -> CommandResult {
    let query = removal_query(session);
    loop {
        let all = session.all()?;
        let mut removed = 0;
        for device in &all {
            match session.client.call(verbs::REMOVE_DEVICE.on(&device.name).with(&query), &()) {
                Ok(()) => removed += 1,
                // In use, or already removed.
                Err(ClientError::Refused(_)) => {}
                Err(error) => return command_failed(error.to_string()),
            }
        }
        // A deferred removal succeeds although the device remains.
        if removed == 0 || session.has(OptionName::Deferred) {
            return Ok(());
        }
    }
}

/// Runs `dmsetup suspend`.
pub fn suspend(session: &mut Session, words: &[String]) -> CommandResult {
    let how = api::Suspend { noflush: Some(session.has(OptionName::NoFlush)), timeout_ms: None };
    for_each_named(session, words, "suspend", |session, name| {
        session.client.call(verbs::SUSPEND_DEVICE.on(name), &how)
    })
}

/// Runs `dmsetup resume`.
pub fn resume(session: &mut Session, words: &[String]) -> CommandResult {
    let how = api::Resume::default();
    for_each_named(session, words, "resume", |session, name| {
        session.client.call(verbs::RESUME_DEVICE.on(name), &how)
    })
}

/// Runs `dmsetup clear`.
pub fn clear(session: &mut Session, words: &[String]) -> CommandResult {
    for_each_named(session, words, "clear", |session, name| {
        session.client.call(verbs::CLEAR_TABLE.on(name), &())
    })
}

fn for_each_named(
    session: &mut Session,
    words: &[String],
    ioctl: &'static str,
    verb: impl Fn(&Session, &str) -> Result<(), ClientError>,
) -> CommandResult {
    session.each(words, |session, selector| {
        let device = session.find(selector, ioctl)?;
        session.map_error(ioctl, selector, verb(session, &device.name))?;
        print_if_verbose(session, selector)
    })
}

/// `dmsetup wipe_table`: loads a table of error targets with the length of the present table.
pub fn wipe_table(session: &mut Session, words: &[String]) -> CommandResult {
    session.each(words, |session, selector| {
        let Some(device) = session.lookup(selector)? else {
            return command_failed(error_table_failed(selector));
        };
        let sectors = device.size_bytes / 512;
        if sectors == 0 {
            return Ok(());
        }
        let body = api::Load { table: format!("0 {sectors} error"), folder: None, read_only: None };
        let done = session.client.call(verbs::LOAD_TABLE.on(&device.name), &body);
        session.map_error("reload", selector, done)?;
        let how = api::Resume::default();
        let done = session.client.call(verbs::RESUME_DEVICE.on(&device.name), &how);
        session.map_error("resume", selector, done)?;
        print_if_verbose(session, selector)
    })
}

/// Runs `dmsetup rename`.
pub fn rename(session: &mut Session, words: &[String]) -> CommandResult {
    let (selector, rest) = session.one(words, "No device specified.")?;
    let [new] = rest else { return command_failed("No device specified.") };
    let to = if session.has(OptionName::SetUuid) {
        api::Rename { uuid: Some(new.clone()), name: None }
    } else if new.contains('/') {
        return command_failed(format!("Name \"{new}\" invalid. It contains \"/\"."));
    } else if new.is_empty() {
        return command_failed("Non empty new name is required.");
    } else {
        api::Rename { name: Some(new.clone()), uuid: None }
    };
    // The kernel finds a device to rename only by its name.
    if !matches!(selector, DeviceSelector::Name(_)) {
        return command_failed(ioctl_failed("rename", &selector.in_errors(), ENXIO.unsigned_abs()));
    }
    let device = session.find(&selector, "rename")?;
    session.map_error("rename", &selector, session.client.call(verbs::RENAME_DEVICE.on(&device.name), &to))
}

/// Runs `dmsetup message`.
pub fn message(session: &mut Session, words: &[String]) -> CommandResult {
    let (selector, rest) = session.one(words, "No device specified.")?;
    let [sector, message @ ..] = rest else {
        return Err(CommandError::Usage("Incorrect number of arguments.".into()));
    };
    let Ok(sector) = sector.parse() else { return command_failed("Invalid sector.") };
    if message.is_empty() {
        Session::warn("No message supplied.");
    }
    let device = session.find(&selector, "message")?;
    let message = translate_node_paths(session, message.join(" "))?;
    let body = api::Message { sector, message, folder: current_dir() };
    let answer = session.client.call(verbs::SEND_MESSAGE.on(&device.name), &body);
    let answer = session.map_error("message", &selector, answer)?.answer;
    if !answer.is_empty() {
        session.out += answer.trim_end_matches('\n');
        session.out.push('\n');
    }
    print_if_verbose(session, &selector)
}

/// `dmsetup wait`. The server limits the time of a request, so the request is repeated.
pub fn wait(session: &mut Session, words: &[String]) -> CommandResult {
    let (selector, rest) = session.one(words, "No device specified.")?;
    let event_nr = match rest.first() {
        Some(number) => number.parse().or_else(|_| command_failed("Invalid event number."))?,
        None => 0,
    };
    let device = session.find(&selector, "waitevent")?;
    let body = api::Wait { event_nr, timeout_ms: None };
    loop {
        match session.client.call(verbs::WAIT_EVENT.on(&device.name), &body) {
            Err(ClientError::Refused(why)) if why.errno == ETIMEDOUT.unsigned_abs() => {}
            done => {
                let device = session.map_error("waitevent", &selector, done)?;
                if session.has(OptionName::Verbose) {
                    session.out += &describe(session, &device)?;
                }
                return Ok(());
            }
        }
    }
}
