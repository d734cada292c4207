//! Commands that create devices and load tables.
//!
//! As in dmsetup, and unlike `udm create`, `create` uses three requests: create, load
//! and resume. An error names the request that failed and the number of the device.

use super::change::print_device_if_verbose;
use super::options::DmsetupOption;
use super::session::{
    DeviceSelector, DmsetupError, DmsetupInvocation, DmsetupResult, NODES, command_failed_error,
};
use crate::concise::{self, ConciseDevice};
use crate::requests::current_dir;
use crate::verbs::read_bounded_table;
use std::path::Path;
use udm_control::api::{self, verbs};
use udm_control::registry::MAPPED_MAJOR as MAJOR;

/// Reads a table from the command line, a file or standard input; returns an empty text if it has
/// no targets.
fn read_dmsetup_table_argument(
    session: &DmsetupInvocation,
    file: Option<&String>,
) -> Result<String, DmsetupError> {
    let (text, source) = match (session.value(DmsetupOption::Table), file) {
        (Some(text), _) => (text.to_owned(), ""),
        (None, Some(file)) => {
            let Ok(open) = std::fs::File::open(Path::new(file)) else {
                return command_failed_error(format!("Couldn't open '{file}' for reading."));
            };
            (read_table_for_dmsetup(open, file)?, file.as_str())
        }
        (None, None) => (read_table_for_dmsetup(std::io::stdin().lock(), "standard input")?, "on stdin"),
    };
    check_and_translate_table(session, text, source)
}

fn read_table_for_dmsetup(from: impl std::io::Read, name: &str) -> Result<String, DmsetupError> {
    read_bounded_table(from, name)
        .map_err(|error| DmsetupError::Failed(crate::strip_os_error(&format!("{error:#}"))))
}

/// Checks that `text` is a table, and translates the paths of udm's own devices.
fn check_and_translate_table(
    session: &DmsetupInvocation,
    text: String,
    source: &str,
) -> Result<String, DmsetupError> {
    match udm_wire::table::parse_table(&text) {
        Ok(lines) if lines.is_empty() => Ok(String::new()),
        Ok(_) => translate_node_paths(session, text),
        Err(error) => command_failed_error(error.in_table(source)),
    }
}

/// Replaces each path of a node of one of the server's devices in `text` by udm's name of the
/// device.
pub fn translate_node_paths(session: &DmsetupInvocation, text: String) -> Result<String, DmsetupError> {
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
pub fn run_dmsetup_create(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    if session.has(DmsetupOption::Concise) {
        return create_concise(session, words);
    }
    let [name, rest @ ..] = words else {
        return command_failed_error("Please provide a name for the new device.");
    };
    // The major number is ignored: the driver chooses it, as in the kernel.
    let minor = match session.value(DmsetupOption::Minor) {
        Some(number) => Some(
            number.parse().or_else(|_| command_failed_error(format!("Invalid minor number '{number}'.")))?,
        ),
        None => None,
    };
    let table = if session.has(DmsetupOption::NoTable) {
        String::new()
    } else {
        read_dmsetup_table_argument(session, rest.first())?
    };
    let uuid = session.value(DmsetupOption::Uuid).unwrap_or_default().to_owned();
    let read_only = session.has(DmsetupOption::ReadOnly);
    let name = name.clone();
    create_device_for_dmsetup(session, &ConciseDevice { name: name.clone(), uuid, minor, read_only, table })?;
    print_device_if_verbose(session, &DeviceSelector::Name(name))
}

/// `dmsetup create --concise`: creates devices one after the other; stops at the first failure.
fn create_concise(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    let text = match words.first() {
        Some(text) => text.clone(),
        None => read_table_for_dmsetup(std::io::stdin().lock(), "standard input")?,
    };
    let (devices, wrong) = concise::parse_concise_devices(&text);
    for mut device in devices {
        device.table = check_and_translate_table(session, device.table, "")?;
        create_device_for_dmsetup(session, &device)?;
    }
    wrong.map_or(Ok(()), command_failed_error)
}

fn create_device_for_dmsetup(session: &mut DmsetupInvocation, new: &ConciseDevice) -> DmsetupResult {
    if new.name.contains('/') {
        return command_failed_error(format!("Name \"{}\" invalid. It contains \"/\".", new.name));
    }
    concise::create_load_resume_device(&session.client, new).map(drop).or_else(|failure| {
        let number = new.minor.map(|minor| format!("({MAJOR}:{minor})")).unwrap_or_default();
        let device = match failure.number {
            Some(number) => format!("{} ({number})", new.name),
            None => format!("{} {}{number}", new.name, new.uuid),
        };
        session.map_ioctl_error(failure.ioctl, &device, Err(failure.error))
    })
}

/// Runs `dmsetup load`.
pub fn run_dmsetup_load(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    let (selector, rest) = session.one(words, "Please specify device.")?;
    let table = read_dmsetup_table_argument(session, rest.first())?;
    let device = session.find(&selector, "reload")?;
    let body = api::LoadTableRequest {
        table,
        folder: current_dir(),
        read_only: Some(session.has(DmsetupOption::ReadOnly)),
    };
    let done = session.client.call(verbs::LOAD_TABLE.on(&device.name), &body);
    session.map_error("reload", &selector, done)?;
    print_device_if_verbose(session, &selector)
}
