//! Commands that create devices and load tables.
//!
//! As in dmsetup, and unlike `udm create`, `create` uses three requests: create, load and resume.
//! An error names the request that failed and the number of the device.

use super::change::print_if_verbose;
use super::options::OptionName;
use super::session::{CommandError, CommandResult, DeviceSelector, NODES, Session, command_failed};
use crate::concise::{self, ConciseDevice};
use crate::requests::current_dir;
use crate::verbs::read_bounded;
use std::path::Path;
use udm_control::api::{self, verbs};
use udm_control::registry::MAPPED_MAJOR as MAJOR;

/// Reads a table from the command line, a file or standard input; returns an empty text if it has
/// no targets.
fn table(session: &Session, file: Option<&String>) -> Result<String, CommandError> {
    let (text, source) = match (session.value(OptionName::Table), file) {
        (Some(text), _) => (text.to_owned(), ""),
        (None, Some(file)) => {
            let Ok(open) = std::fs::File::open(Path::new(file)) else {
                return command_failed(format!("Couldn't open '{file}' for reading."));
            };
            (read(open, file)?, file.as_str())
        }
        (None, None) => (read(std::io::stdin().lock(), "standard input")?, "on stdin"),
    };
    check_table(session, text, source)
}

fn read(from: impl std::io::Read, name: &str) -> Result<String, CommandError> {
    read_bounded(from, name)
        .map_err(|error| CommandError::Failed(crate::strip_os_error(&format!("{error:#}"))))
}

/// Checks that `text` is a table, and translates the paths of udm's own devices.
fn check_table(session: &Session, text: String, source: &str) -> Result<String, CommandError> {
    match udm_wire::table::parse(&text) {
        Ok(lines) if lines.is_empty() => Ok(String::new()),
        Ok(_) => translate_node_paths(session, text),
        Err(error) => command_failed(error.in_table(source)),
    }
}

/// Replaces each path of a node of one of the server's devices in `text` by udm's name of the
/// device.
pub fn translate_node_paths(session: &Session, text: String) -> Result<String, CommandError> {
    if !text.contains(NODES) {
        return Ok(text);
    }
    let all = session.all()?;
    let device = |word: &str| {
        let name = word.strip_prefix(NODES)?;
        all.iter().any(|device| device.name == name).then(|| format!("@{name}"))
    };
    let words = text.split_inclusive(char::is_whitespace).map(|part| {
        let word = part.trim_end_matches(char::is_whitespace);
        device(word).map_or_else(|| part.to_owned(), |device| device + &part[word.len()..])
    });
    Ok(words.collect())
}

/// Runs `dmsetup create`.
pub fn create(session: &mut Session, words: &[String]) -> CommandResult {
    if session.has(OptionName::Concise) {
        return create_concise(session, words);
    }
    let [name, rest @ ..] = words else { return command_failed("Please provide a name for the new device.") };
    // The major number is ignored: the driver chooses it, as in the kernel.
    let minor = match session.value(OptionName::Minor) {
        Some(number) => {
            Some(number.parse().or_else(|_| command_failed(format!("Invalid minor number '{number}'.")))?)
        }
        None => None,
    };
    let table = if session.has(OptionName::NoTable) { String::new() } else { table(session, rest.first())? };
    let uuid = session.value(OptionName::Uuid).unwrap_or_default().to_owned();
    let read_only = session.has(OptionName::ReadOnly);
    let name = name.clone();
    make(session, &ConciseDevice { name: name.clone(), uuid, minor, read_only, table })?;
    print_if_verbose(session, &DeviceSelector::Name(name))
}

/// `dmsetup create --concise`: creates devices one after the other; stops at the first failure.
fn create_concise(session: &mut Session, words: &[String]) -> CommandResult {
    let text = match words.first() {
        Some(text) => text.clone(),
        None => read(std::io::stdin().lock(), "standard input")?,
    };
    let (devices, wrong) = concise::parse(&text);
    for mut device in devices {
        device.table = check_table(session, device.table, "")?;
        make(session, &device)?;
    }
    wrong.map_or(Ok(()), command_failed)
}

fn make(session: &mut Session, new: &ConciseDevice) -> CommandResult {
    if new.name.contains('/') {
        return command_failed(format!("Name \"{}\" invalid. It contains \"/\".", new.name));
    }
    concise::make(&session.client, new).map(drop).or_else(|failure| {
        let number = new.minor.map(|minor| format!("({MAJOR}:{minor})")).unwrap_or_default();
        let device = match failure.number {
            Some(number) => format!("{} ({number})", new.name),
            None => format!("{} {}{number}", new.name, new.uuid),
        };
        session.map_ioctl_error(failure.ioctl, &device, Err(failure.error))
    })
}

/// Runs `dmsetup load`.
pub fn load(session: &mut Session, words: &[String]) -> CommandResult {
    let (selector, rest) = session.one(words, "Please specify device.")?;
    let table = table(session, rest.first())?;
    let device = session.find(&selector, "reload")?;
    let body = api::Load { table, folder: current_dir(), read_only: Some(session.has(OptionName::ReadOnly)) };
    let done = session.client.call(verbs::LOAD_TABLE.on(&device.name), &body);
    session.map_error("reload", &selector, done)?;
    print_if_verbose(session, &selector)
}
