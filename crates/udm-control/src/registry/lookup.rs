//! What a word of a table or a message means.
//!
//! A table asks the file system what each of its paths leads to now ([`Opening`]). A message asks nobody, as long as it spells a name as the table
//! did: what it means is in use, and must be found though the file system hangs ([`Known`]). In neither is the registry's lock held
//! while the file system is asked.

use super::opened::OPENED_MAJOR;
use super::{Holds, Mapped, Registry};
use std::collections::HashMap;
use std::sync::Arc;
use udm_core::{DevNo, Device, OpenError};
use udm_targets::{DeviceRef, LookupError, Resolver};
use udm_wire::uri::{self, DeviceUri, FileUri};

const ENOENT: i32 = 2;
const ENXIO: i32 = 6;
const EBUSY: i32 = 16;

/// Looks up the devices of one table, and opens those that are not open.
pub(crate) struct Opening<'a> {
    registry: &'a Registry,
    holds: Holds,
}

impl Opening<'_> {
    /// For a table that is to be built.
    pub fn new(registry: &Registry) -> Opening<'_> {
        Opening { registry, holds: HashMap::new() }
    }
}

impl Resolver for Opening<'_> {
    fn get(&mut self, word: &str) -> Result<DeviceRef, LookupError> {
        let uri = parsed(word)?;
        if let Some(mapped) = self.registry.mapped(&uri, Some(&mut self.holds)) {
            return mapped;
        }
        match uri {
            DeviceUri::Number { major: OPENED_MAJOR, minor } => self.registry.open_numbered(minor),
            DeviceUri::Number { .. } => Err(unknown(&uri)),
            uri => self.registry.open(&uri),
        }
    }
}

/// Looks up the devices that a message to `mapped` names. Opens nothing: what a message means is in use already.
pub(crate) struct Known<'a> {
    /// Where.
    pub registry: &'a Registry,
    /// The device that the message is for.
    pub mapped: &'a Mapped,
}

impl Resolver for Known<'_> {
    fn get(&mut self, word: &str) -> Result<DeviceRef, LookupError> {
        let uri = parsed(word)?;
        if let Some(mapped) = self.registry.mapped(&uri, None) {
            return mapped;
        }
        let found = match &uri {
            DeviceUri::Number { major: OPENED_MAJOR, minor } => {
                let state = self.registry.state();
                let name = state.opened.uri(*minor).map(String::from);
                name.zip(state.opened.device(*minor)).map(|(name, found)| known(name, found))
            }
            DeviceUri::Number { .. } => None,
            uri => self.named(&uri.to_string()).or_else(|| self.named(&canonical(uri))),
        };
        let errno = if matches!(uri, DeviceUri::Number { .. }) { ENXIO } else { ENOENT };
        found.ok_or_else(|| lookup(errno, format!("no table uses {word}")))
    }
}

impl Known<'_> {
    /// The device that the live table calls so. A name may have led to several disks; failing that, the last one is meant.
    fn named(&self, uri: &str) -> Option<DeviceRef> {
        let live = self.mapped.device.live();
        let targets = live.iter().flat_map(|table| table.targets());
        let used: Vec<DevNo> =
            targets.flat_map(|entry| entry.target.devices()).map(|used| used.device.number).collect();
        let mut found: Vec<_> = self.registry.state().opened.named(uri).collect();
        let at = found.iter().position(|(number, _)| used.contains(number)).unwrap_or(0);
        (at < found.len()).then(|| known(uri.into(), found.swap_remove(at)))
    }
}

impl Registry {
    /// What `uri` leads to now, opened if it is not open. May block for as long as the file system does.
    fn open(&self, uri: &DeviceUri) -> Result<DeviceRef, LookupError> {
        let name = canonical(uri);
        let identity = self.backends.look(uri).map_err(refused)?;
        let open = {
            let mut state = self.state();
            state.opened.spell(uri.to_string(), &name);
            state.opened.get(&name, identity)
        };
        if let Some(found) = open {
            return Ok(known(name, found));
        }
        let opened = self.backends.open(uri).map_err(refused)?;
        let numbered = self.state().opened.put(&name, opened.identity, opened.device);
        let found = numbered.ok_or_else(|| lookup(EBUSY, "all device numbers are taken".into()))?;
        Ok(known(name, found))
    }

    /// The device of a number, which means what it meant when it was given, or nothing.
    fn open_numbered(&self, minor: u32) -> Result<DeviceRef, LookupError> {
        let number = DeviceUri::Number { major: OPENED_MAJOR, minor };
        let (name, was, open) = {
            let state = self.state();
            let name = state.opened.uri(minor).map(String::from);
            let (name, was) = name.zip(state.opened.identity(minor)).ok_or_else(|| unknown(&number))?;
            (name, was, state.opened.device(minor))
        };
        let uri = uri::parse(&name).map_err(|_| unknown(&number))?;
        let now = self.backends.look(&uri);
        if let Some(found) = open {
            // Open, whatever its name has come to mean. The look was for its size.
            return Ok(known(name, found));
        }
        if now.map_err(refused)? != was {
            let reason = format!("{number} was {name}, which is another disk now; name it by its path");
            return Err(lookup(ENXIO, reason));
        }
        self.open(&uri)
    }
}

fn known(name: String, (number, device): (DevNo, Arc<dyn Device>)) -> DeviceRef {
    DeviceRef { number, name, device, hold: None }
}

pub(super) fn lookup(errno: i32, reason: String) -> LookupError {
    LookupError { errno, reason }
}

fn unknown(number: &DeviceUri) -> LookupError {
    lookup(ENXIO, format!("no device has the number {number}"))
}

/// The text of an error goes without the errno's own at its end, which whoever prints a look-up error puts there.
fn refused(OpenError { errno, mut text }: OpenError) -> LookupError {
    let plain = std::io::Error::from_raw_os_error(errno).to_string();
    for end in [format!(": {plain}"), format!(": {}", plain.split(" (os error").next().unwrap_or_default())] {
        if text.ends_with(&end) {
            text.truncate(text.len() - end.len());
        }
    }
    lookup(errno, text)
}

fn parsed(word: &str) -> Result<DeviceUri, LookupError> {
    // A word that is no URI names nothing.
    uri::parse(word).map_err(|e| lookup(ENOENT, e.to_string()))
}

/// The word under which a device is known: a file goes by its real path, so that links and `..` lead to the same device. Asks the file system.
fn canonical(uri: &DeviceUri) -> String {
    match uri {
        DeviceUri::File(file) => {
            let path = std::fs::canonicalize(&file.path).unwrap_or_else(|_| file.path.clone());
            DeviceUri::File(FileUri { path, ..file.clone() }).to_string()
        }
        other => other.to_string(),
    }
}
