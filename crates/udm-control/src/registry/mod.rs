//! All devices of a process: those that tables opened, by URI, and the mapped ones, by name.
//!
//! Contract: the same URI is the same device with the same number; a mapped device has the lowest minor number that is free when it is made, as in
//! the kernel. The registry's lock is held for look-ups only, never while a device is opened or a table built: those are serialised by a
//! lock of their own, so that a slow backend delays other loads and nothing else. No lane ever sees either lock.

mod opened;

pub use opened::OPENED_MAJOR;

use crate::error::VerbError;
use crate::exports::Exporter;
use crate::http::api;
use opened::Opened;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use udm_core::{Cores, DevNo, Device};
use udm_targets::{DeviceRef, LookupError, MappedDevice, Resolver, TargetError};
use udm_wire::uri::{self, DeviceUri};

/// The major number of mapped devices.
pub const MAPPED_MAJOR: u32 = 254;

/// How many mapped devices there can be (the kernel's minors have 20 bits).
const MAPPED_MAX: u32 = 1 << 20;

const ENOENT: i32 = 2;
const ENXIO: i32 = 6;
const EBUSY: i32 = 16;

/// All devices of a process.
pub struct Registry {
    cores: Arc<dyn Cores>,
    core_count: usize,
    state: Mutex<State>,
    build: Mutex<()>,
    exporter: OnceLock<Exporter>,
}

#[derive(Default)]
struct State {
    opened: Opened,
    mapped: BTreeMap<u32, Arc<Mapped>>,
}

/// A mapped device in the registry.
pub struct Mapped {
    /// The device.
    pub device: Arc<MappedDevice>,
    /// Held by whoever suspends, resumes or removes it: one at a time, in the order they came.
    pub(crate) changing: tokio::sync::Mutex<()>,
}

impl Registry {
    /// An empty registry for the `core_count` cores behind `cores`.
    pub fn new(cores: Arc<dyn Cores>, core_count: usize) -> Arc<Registry> {
        Arc::new(Registry {
            cores,
            core_count,
            state: Mutex::default(),
            build: Mutex::default(),
            exporter: OnceLock::new(),
        })
    }

    /// Has devices exported from now on. Once; later calls change nothing.
    pub fn export_by(&self, exporter: Exporter) {
        let _ = self.exporter.set(exporter);
    }

    /// What exports devices, when something does.
    #[must_use]
    pub fn exporter(&self) -> Option<&Exporter> {
        self.exporter.get()
    }

    /// Everything that clients can connect to.
    #[must_use]
    pub fn exports(&self) -> Vec<api::Export> {
        self.exporter().map(Exporter::list).unwrap_or_default()
    }

    /// The cores that commands go to.
    #[must_use]
    pub fn cores(&self) -> &dyn Cores {
        &*self.cores
    }

    /// How many cores there are.
    #[must_use]
    pub fn core_count(&self) -> usize {
        self.core_count
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held while a table is built, so that no URI is opened twice at the same time.
    pub(crate) fn building(&self) -> MutexGuard<'_, ()> {
        self.build.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mapped device called `word`: a name, a uuid, or `major:minor`.
    ///
    /// # Errors
    /// ENXIO, as the kernel says it of names that it does not know.
    pub fn find(&self, word: &str) -> Result<Arc<Mapped>, VerbError> {
        let state = self.state();
        let found = state.by_name(word).or_else(|| {
            let by_uuid = || state.mapped.values().find(|m| m.device.uuid().as_deref() == Some(word));
            let by_number = || word.parse().ok().and_then(|number| state.by_number(number));
            by_uuid().or_else(by_number)
        });
        found.cloned().ok_or_else(|| VerbError::missing(word))
    }

    /// Every mapped device, by number.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Mapped>> {
        self.state().mapped.values().cloned().collect()
    }

    /// Makes a mapped device without a table.
    ///
    /// # Errors
    /// EINVAL for a bad name or uuid, EBUSY for one that is taken.
    pub(crate) fn insert(&self, name: &str, uuid: Option<&str>) -> Result<Arc<Mapped>, TargetError> {
        let mut state = self.state();
        if state.by_name(name).is_some() {
            return Err(TargetError::errno(EBUSY).because("a device of that name exists"));
        }
        if uuid.is_some() && state.mapped.values().any(|m| m.device.uuid().as_deref() == uuid) {
            return Err(TargetError::errno(EBUSY).because("a device with that uuid exists"));
        }
        let free = (0..MAPPED_MAX).find(|minor| !state.mapped.contains_key(minor));
        let minor = free.ok_or_else(|| TargetError::errno(EBUSY).because("all device numbers are taken"))?;
        let number = DevNo { major: MAPPED_MAJOR, minor };
        let device = MappedDevice::new(name, uuid, number)?;
        let mapped = Arc::new(Mapped { device, changing: tokio::sync::Mutex::default() });
        state.mapped.insert(minor, Arc::clone(&mapped));
        Ok(mapped)
    }

    /// Forgets a mapped device.
    pub(crate) fn forget(&self, mapped: &Mapped) {
        self.state().mapped.remove(&mapped.device.number().minor);
    }

    /// What a number that stands in a table means: a URI, or `@` and a name. Empty when it means nothing.
    #[must_use]
    pub fn uri_of(&self, number: DevNo) -> String {
        let state = self.state();
        match number.major {
            MAPPED_MAJOR => state.by_number(number).map(|m| format!("@{}", m.device.name())),
            OPENED_MAJOR => state.opened.uri(number.minor).map(String::from),
            _ => None,
        }
        .unwrap_or_default()
    }

    /// Looks up what is known already.
    fn known(&self, uri: &DeviceUri) -> Option<DeviceRef> {
        let state = self.state();
        let mapped = |m: &Arc<Mapped>| DeviceRef {
            number: m.device.number(),
            name: m.device.name(),
            device: Arc::clone(&m.device) as Arc<dyn Device>,
        };
        let word = match uri {
            DeviceUri::Mapped(name) => return state.by_name(name).map(mapped),
            DeviceUri::Number { major: MAPPED_MAJOR, minor } => return state.mapped.get(minor).map(mapped),
            DeviceUri::Number { major: OPENED_MAJOR, minor } => state.opened.uri(*minor)?.to_string(),
            DeviceUri::Number { .. } => return None,
            other => canonical(other),
        };
        let (number, device) = state.opened.get(&word)?;
        Some(DeviceRef { number, name: word, device })
    }

    /// Opens what is not known yet. Only while [`Registry::building`] is held.
    fn open(&self, uri: &DeviceUri) -> Result<DeviceRef, LookupError> {
        let reopened;
        let uri = match uri {
            DeviceUri::Mapped(name) => return Err(lookup(ENOENT, format!("there is no device @{name}"))),
            DeviceUri::Number { major, minor } => {
                // A number whose device was closed meanwhile still means that device.
                let known =
                    (*major == OPENED_MAJOR).then(|| self.state().opened.uri(*minor).map(String::from));
                let known = known.flatten();
                let unknown = || lookup(ENXIO, format!("no device has the number {major}:{minor}"));
                reopened = known.and_then(|word| uri::parse(&word).ok()).ok_or_else(unknown)?;
                &reopened
            }
            other => other,
        };
        let word = canonical(uri);
        let device = udm_backends::open(uri).map_err(|e| lookup(e.errno, without_errno(e.errno, e.text)))?;
        let number = self.state().opened.put(&word, &device);
        let number = number.ok_or_else(|| lookup(EBUSY, "all device numbers are taken".into()))?;
        Ok(DeviceRef { number, name: word, device })
    }
}

impl State {
    fn by_name(&self, name: &str) -> Option<&Arc<Mapped>> {
        self.mapped.values().find(|m| m.device.name() == name)
    }

    fn by_number(&self, number: DevNo) -> Option<&Arc<Mapped>> {
        (number.major == MAPPED_MAJOR).then(|| self.mapped.get(&number.minor)).flatten()
    }
}

fn lookup(errno: i32, reason: String) -> LookupError {
    LookupError { errno, reason }
}

/// The text of an error without the errno's own at its end, which whoever prints a look-up error puts there.
fn without_errno(errno: i32, mut text: String) -> String {
    let plain = std::io::Error::from_raw_os_error(errno).to_string();
    for end in [format!(": {plain}"), format!(": {}", plain.split(" (os error").next().unwrap_or_default())] {
        if text.ends_with(&end) {
            text.truncate(text.len() - end.len());
        }
    }
    text
}

fn parsed(word: &str) -> Result<DeviceUri, LookupError> {
    // A word that is no URI names nothing.
    uri::parse(word).map_err(|e| lookup(ENOENT, e.to_string()))
}

/// The word under which a device is known: a file goes by its real path, so that links and `..` lead to the same device.
fn canonical(uri: &DeviceUri) -> String {
    match uri {
        DeviceUri::File { path, direct, readonly } => {
            let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.clone());
            DeviceUri::File { path, direct: *direct, readonly: *readonly }.to_string()
        }
        other => other.to_string(),
    }
}

/// Looks up the devices of a table, and opens those that are not open.
pub(crate) struct Opening<'a>(pub &'a Registry);

impl Resolver for Opening<'_> {
    fn get(&mut self, word: &str) -> Result<DeviceRef, LookupError> {
        let uri = parsed(word)?;
        self.0.known(&uri).map_or_else(|| self.0.open(&uri), Ok)
    }
}

/// Looks up the devices that a message names. Opens nothing: what a message means is in use already.
pub(crate) struct Known<'a>(pub &'a Registry);

impl Resolver for Known<'_> {
    fn get(&mut self, word: &str) -> Result<DeviceRef, LookupError> {
        let uri = parsed(word)?;
        let errno = if matches!(uri, DeviceUri::Number { .. }) { ENXIO } else { ENOENT };
        self.0.known(&uri).ok_or_else(|| lookup(errno, format!("no table uses {word}")))
    }
}
