//! Making devices and loading tables.
//!
//! As dmsetup, and unlike `udm create`, `create` makes a device, loads its table and resumes it in
//! three requests: what is refused is said of the one of them, with the device's number.

use super::change::print_if_verbose;
use super::options::Name;
use super::session::{CommandError, CommandResult, DeviceSelector, NODES, NegotiatedSession, command_failed};
use crate::concise::{self, ConciseDevice};
use crate::verbs::{folder, read_bounded};
use std::path::Path;
use udm_control::api::{self, verbs};
use udm_control::registry::MAPPED_MAJOR as MAJOR;

/// A table of the command line, of a file or of standard input. Empty where it has no target.
fn table(face: &NegotiatedSession, file: Option<&String>) -> Result<String, CommandError> {
    let (text, source) = match (face.value(Name::Table), file) {
        (Some(text), _) => (text.to_owned(), ""),
        (None, Some(file)) => {
            let Ok(open) = std::fs::File::open(Path::new(file)) else {
                return command_failed(format!("Couldn't open '{file}' for reading."));
            };
            (read(open, file)?, file.as_str())
        }
        (None, None) => (read(std::io::stdin().lock(), "standard input")?, "on stdin"),
    };
    check_table(face, text, source)
}

fn read(from: impl std::io::Read, name: &str) -> Result<String, CommandError> {
    read_bounded(from, name)
        .map_err(|error| CommandError::Failed(crate::strip_os_error(&format!("{error:#}"))))
}

/// `text`, if it is a table, with the paths of udm's own devices as udm spells them.
fn check_table(face: &NegotiatedSession, text: String, source: &str) -> Result<String, CommandError> {
    match udm_wire::table::parse(&text) {
        Ok(lines) if lines.is_empty() => Ok(String::new()),
        Ok(_) => translate_node_paths(face, text),
        Err(error) => command_failed(error.in_table(source)),
    }
}

/// `text` with each word that is the path to the node of a device of the server's as that device.
pub fn translate_node_paths(face: &NegotiatedSession, text: String) -> Result<String, CommandError> {
    if !text.contains(NODES) {
        return Ok(text);
    }
    let all = face.all()?;
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

/// `dmsetup create`.
pub fn create(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    if face.has(Name::ConciseDevice) {
        return create_concise(face, words);
    }
    let [name, rest @ ..] = words else { return command_failed("Please provide a name for the new device.") };
    // The major number is the driver's, as in a kernel that has one.
    let minor = match face.value(Name::Minor) {
        Some(number) => {
            Some(number.parse().or_else(|_| command_failed(format!("Invalid minor number '{number}'.")))?)
        }
        None => None,
    };
    let table = if face.has(Name::NoTable) { String::new() } else { table(face, rest.first())? };
    let uuid = face.value(Name::Uuid).unwrap_or_default().to_owned();
    let read_only = face.has(Name::ReadOnly);
    let name = name.clone();
    make(face, &ConciseDevice { name: name.clone(), uuid, minor, read_only, table })?;
    print_if_verbose(face, &DeviceSelector::Name(name))
}

/// `dmsetup create --concise`: one after the other, until one fails.
fn create_concise(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    let text = match words.first() {
        Some(text) => text.clone(),
        None => read(std::io::stdin().lock(), "standard input")?,
    };
    let (devices, wrong) = concise::parse(&text);
    for mut device in devices {
        device.table = check_table(face, device.table, "")?;
        make(face, &device)?;
    }
    wrong.map_or(Ok(()), command_failed)
}

fn make(face: &mut NegotiatedSession, new: &ConciseDevice) -> CommandResult {
    if new.name.contains('/') {
        return command_failed(format!("Name \"{}\" invalid. It contains \"/\".", new.name));
    }
    concise::make(&face.client, new).map(drop).or_else(|ioctl_failed| {
        let number = new.minor.map(|minor| format!("({MAJOR}:{minor})")).unwrap_or_default();
        let device = match ioctl_failed.number {
            Some(number) => format!("{} ({number})", new.name),
            None => format!("{} {}{number}", new.name, new.uuid),
        };
        face.said(ioctl_failed.ioctl, &device, Err(ioctl_failed.error))
    })
}

/// `dmsetup load`.
pub fn load(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    let (which, rest) = face.one(words, "Please specify device.")?;
    let table = table(face, rest.first())?;
    let device = face.find(&which, "reload")?;
    let body = api::Load { table, folder: folder(), read_only: Some(face.has(Name::ReadOnly)) };
    let done = face.client.call(verbs::LOAD_TABLE.on(&device.name), &body);
    face.map_error_of("reload", &which, done)?;
    print_if_verbose(face, &which)
}
