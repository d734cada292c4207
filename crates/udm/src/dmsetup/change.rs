//! Commands that change a device.

use super::create::translate_node_paths;
use super::options::Name;
use super::session::{
    CommandError, CommandResult, DeviceSelector, NegotiatedSession, command_failed, ioctl_failed,
};
use super::show::describe;
use crate::verbs::folder;
use std::thread::sleep;
use std::time::Duration;
use udm_control::api::{self, verbs};
use udm_control::client::ClientError;
use udm_core::errno::{EBUSY, ENXIO, ETIMEDOUT};

/// How often `--retry` tries, and how far apart.
const TRIES: usize = 25;
const PAUSE: Duration = Duration::from_millis(200);

/// With `--verbose`, the device as it is now, as `info` shows it.
pub fn print_if_verbose(face: &mut NegotiatedSession, which: &DeviceSelector) -> CommandResult {
    if face.has(Name::Verbose)
        && let Some(device) = face.look(which)?
    {
        face.out += &describe(face, &device)?;
    }
    Ok(())
}

/// The query of a removal with the options of the command.
fn removal_query(face: &NegotiatedSession) -> api::RemoveQuery {
    api::RemoveQuery {
        force: Some(face.has(Name::Force)),
        deferred: Some(face.has(Name::Deferred)),
        timeout_ms: None,
    }
}

/// `dmsetup remove`.
pub fn remove(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    face.each(words, |face, which| {
        let force = face.has(Name::Force);
        let missing =
            |failure: CommandError| if force { failure.behind(&error_table_failed(which)) } else { failure };
        let device = face.find(which, "remove").map_err(missing)?;
        let query = removal_query(face);
        let mut tries = if face.has(Name::Retry) { TRIES } else { 1 };
        loop {
            let done = face.client.call(verbs::REMOVE_DEVICE.on(&device.name).with(&query), &());
            let is_busy =
                matches!(&done, Err(ClientError::Refused(why)) if why.errno == EBUSY.unsigned_abs());
            tries -= 1;
            match face.map_error_of("remove", which, done) {
                Err(CommandError::Failed(text)) if is_busy && tries > 0 => NegotiatedSession::warn(&text),
                done => return done,
            }
            sleep(PAUSE);
        }
    })
}

/// What a table of errors for a device that is not there ends with.
fn error_table_failed(which: &DeviceSelector) -> String {
    let line = |ioctl| ioctl_failed(ioctl, &which.in_errors(), ENXIO.unsigned_abs());
    [line("table"), line("reload")].join("\n")
}

/// `dmsetup remove_all`: what lies on others goes first; what is open stays.
pub fn remove_all(face: &mut NegotiatedSession, _: &[String]) -> CommandResult {
    let query = removal_query(face);
    loop {
        let all = face.all()?;
        let mut removed = 0;
        for device in &all {
            match face.client.call(verbs::REMOVE_DEVICE.on(&device.name).with(&query), &()) {
                Ok(()) => removed += 1,
                // In use, or gone meanwhile.
                Err(ClientError::Refused(_)) => {}
                Err(error) => return command_failed(error.to_string()),
            }
        }
        // A removal that was deferred is done, but its device is still there.
        if removed == 0 || face.has(Name::Deferred) {
            return Ok(());
        }
    }
}

/// `dmsetup suspend`.
pub fn suspend(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    let how = api::Suspend { noflush: Some(face.has(Name::NoFlush)), timeout_ms: None };
    for_each_named(face, words, "suspend", |face, name| {
        face.client.call(verbs::SUSPEND_DEVICE.on(name), &how)
    })
}

/// `dmsetup resume`.
pub fn resume(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    let how = api::Resume::default();
    for_each_named(face, words, "resume", |face, name| face.client.call(verbs::RESUME_DEVICE.on(name), &how))
}

/// `dmsetup clear`.
pub fn clear(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    for_each_named(face, words, "clear", |face, name| face.client.call(verbs::CLEAR_TABLE.on(name), &()))
}

fn for_each_named(
    face: &mut NegotiatedSession,
    words: &[String],
    ioctl: &'static str,
    verb: impl Fn(&NegotiatedSession, &str) -> Result<(), ClientError>,
) -> CommandResult {
    face.each(words, |face, which| {
        let device = face.find(which, ioctl)?;
        face.map_error_of(ioctl, which, verb(face, &device.name))?;
        print_if_verbose(face, which)
    })
}

/// `dmsetup wipe_table`: a table of errors, as long as the one that there is.
pub fn wipe_table(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    face.each(words, |face, which| {
        let Some(device) = face.look(which)? else { return command_failed(error_table_failed(which)) };
        let sectors = device.size_bytes / 512;
        if sectors == 0 {
            return Ok(());
        }
        let body = api::Load { table: format!("0 {sectors} error"), folder: None, read_only: None };
        face.map_error_of("reload", which, face.client.call(verbs::LOAD_TABLE.on(&device.name), &body))?;
        let how = api::Resume::default();
        face.map_error_of("resume", which, face.client.call(verbs::RESUME_DEVICE.on(&device.name), &how))?;
        print_if_verbose(face, which)
    })
}

/// `dmsetup rename`.
pub fn rename(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    let (which, rest) = face.one(words, "No device specified.")?;
    let [new] = rest else { return command_failed("No device specified.") };
    let to = if face.has(Name::SetUuid) {
        api::Rename { uuid: Some(new.clone()), name: None }
    } else if new.contains('/') {
        return command_failed(format!("Name \"{new}\" invalid. It contains \"/\"."));
    } else if new.is_empty() {
        return command_failed("Non empty new name is required.");
    } else {
        api::Rename { name: Some(new.clone()), uuid: None }
    };
    // A kernel looks for a device that it is to rename by its name alone.
    if !matches!(which, DeviceSelector::Name(_)) {
        return command_failed(ioctl_failed("rename", &which.in_errors(), ENXIO.unsigned_abs()));
    }
    let device = face.find(&which, "rename")?;
    face.map_error_of("rename", &which, face.client.call(verbs::RENAME_DEVICE.on(&device.name), &to))
}

/// `dmsetup message`.
pub fn message(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    let (which, rest) = face.one(words, "No device specified.")?;
    let [sector, message @ ..] = rest else {
        return Err(CommandError::Usage("Incorrect number of arguments.".into()));
    };
    let Ok(sector) = sector.parse() else { return command_failed("Invalid sector.") };
    if message.is_empty() {
        NegotiatedSession::warn("No message supplied.");
    }
    let device = face.find(&which, "message")?;
    let message = translate_node_paths(face, message.join(" "))?;
    let body = api::Message { sector, message, folder: folder() };
    let answer = face.client.call(verbs::SEND_MESSAGE.on(&device.name), &body);
    let answer = face.map_error_of("message", &which, answer)?.answer;
    if !answer.is_empty() {
        face.out += answer.trim_end_matches('\n');
        face.out.push('\n');
    }
    print_if_verbose(face, &which)
}

/// `dmsetup wait`. A server lets nobody wait for ever, so it is asked again and again.
pub fn wait(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    let (which, rest) = face.one(words, "No device specified.")?;
    let event_nr = match rest.first() {
        Some(number) => number.parse().or_else(|_| command_failed("Invalid event number."))?,
        None => 0,
    };
    let device = face.find(&which, "waitevent")?;
    let body = api::Wait { event_nr, timeout_ms: None };
    loop {
        match face.client.call(verbs::WAIT_EVENT.on(&device.name), &body) {
            Err(ClientError::Refused(why)) if why.errno == ETIMEDOUT.unsigned_abs() => {}
            done => {
                let device = face.map_error_of("waitevent", &which, done)?;
                if face.has(Name::Verbose) {
                    face.out += &describe(face, &device)?;
                }
                return Ok(());
            }
        }
    }
}
