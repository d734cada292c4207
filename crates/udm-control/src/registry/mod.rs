//! All devices of a process: those that tables opened, by URI, and the mapped ones, by name.
//!
//! Contract: the same URI is the same device with the same number; the places of mapped devices are [`places`]'. The registry's lock is held for look-ups only, never while a device is opened or a table built: those are serialised by a
//! lock of their own, so that a slow backend delays other loads and nothing else. No lane ever sees either lock.

mod opened;
mod places;

pub use opened::OPENED_MAJOR;
pub use places::Mapped;

use crate::exports::Exporter;
use crate::http::api;
use opened::Opened;
use places::{Hold, Places};
use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use udm_core::{Cores, DevNo, Device, DeviceId};
use udm_targets::{DeviceRef, LookupError, Resolver};
use udm_wire::uri::{self, DeviceUri};

/// The major number of mapped devices.
pub const MAPPED_MAJOR: u32 = 254;

const ENOENT: i32 = 2;
const ENXIO: i32 = 6;
const EBUSY: i32 = 16;

/// All devices of a process.
pub struct Registry {
    cores: Arc<dyn Cores>,
    core_count: usize,
    state: Mutex<State>,
    build: Mutex<()>,
    linking: Mutex<()>,
    exporter: OnceLock<Exporter>,
}

#[derive(Default)]
struct State {
    opened: Opened,
    places: Places,
}

impl Registry {
    /// An empty registry for the `core_count` cores behind `cores`.
    pub fn new(cores: Arc<dyn Cores>, core_count: usize) -> Arc<Registry> {
        Arc::new(Registry {
            cores,
            core_count,
            state: Mutex::default(),
            build: Mutex::default(),
            linking: Mutex::default(),
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

    /// Held while a table is put into a slot, and where a removal begins: checks of what lies on what stay true until the table is there.
    pub(crate) fn linking(&self) -> MutexGuard<'_, ()> {
        self.linking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a number that stands in a table means: a URI, or `@` and a name. Empty when it means nothing.
    #[must_use]
    pub fn uri_of(&self, number: DevNo) -> String {
        let state = self.state();
        match number.major {
            MAPPED_MAJOR => state.places.numbered(number.minor).ok().map(|m| format!("@{}", m.device.name())),
            OPENED_MAJOR => state.opened.uri(number.minor).map(String::from),
            _ => None,
        }
        .unwrap_or_default()
    }

    /// A mapped device that a table or a message names, when `uri` names one. A table holds it.
    fn mapped(&self, uri: &DeviceUri, holds: Option<&mut Holds>) -> Option<Result<DeviceRef, LookupError>> {
        let state = self.state();
        let (found, errno) = match uri {
            DeviceUri::Mapped(name) => (state.places.named(name), ENOENT),
            DeviceUri::Number { major: MAPPED_MAJOR, minor } => (state.places.numbered(*minor), ENXIO),
            _ => return None,
        };
        let found = found.map_err(|absent| match absent.reason() {
            None => lookup(errno, format!("there is no device {uri}")),
            Some(reason) => lookup(EBUSY, format!("{uri}: {reason}")),
        });
        Some(found.map(|mapped| {
            let hold = || -> Arc<dyn Any + Send + Sync> { Arc::new(Hold::new(mapped)) };
            DeviceRef {
                number: mapped.device.number(),
                name: mapped.device.name(),
                device: Arc::clone(&mapped.device) as Arc<dyn Device>,
                // One for the whole table, however often it names the device.
                hold: holds.map(|holds| Arc::clone(holds.entry(mapped.device.id()).or_insert_with(hold))),
            }
        }))
    }

    /// Looks up what is open already.
    fn known(&self, uri: &DeviceUri) -> Option<DeviceRef> {
        let state = self.state();
        let word = match uri {
            DeviceUri::Number { major: OPENED_MAJOR, minor } => state.opened.uri(*minor)?.to_string(),
            DeviceUri::Number { .. } | DeviceUri::Mapped(_) => return None,
            other => canonical(other),
        };
        let (number, device) = state.opened.get(&word)?;
        Some(DeviceRef { number, name: word, device, hold: None })
    }

    /// Opens what is not known yet. Only while [`Registry::building`] is held.
    fn open(&self, uri: &DeviceUri) -> Result<DeviceRef, LookupError> {
        let reopened;
        let uri = match uri {
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
        Ok(DeviceRef { number, name: word, device, hold: None })
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

/// What a table holds of mapped devices.
type Holds = HashMap<DeviceId, Arc<dyn Any + Send + Sync>>;

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
        self.registry.known(&uri).map_or_else(|| self.registry.open(&uri), Ok)
    }
}

/// Looks up the devices that a message names. Opens nothing: what a message means is in use already.
pub(crate) struct Known<'a>(pub &'a Registry);

impl Resolver for Known<'_> {
    fn get(&mut self, word: &str) -> Result<DeviceRef, LookupError> {
        let uri = parsed(word)?;
        if let Some(mapped) = self.0.mapped(&uri, None) {
            return mapped;
        }
        let errno = if matches!(uri, DeviceUri::Number { .. }) { ENXIO } else { ENOENT };
        self.0.known(&uri).ok_or_else(|| lookup(errno, format!("no table uses {word}")))
    }
}
