//! Resolves words of tables and messages to devices.
//!
//! A table asks the file system where each of its paths leads now ([`TableResolver`]). A message
//! uses only names that the live table uses, without file system access, so it works while the file
//! system hangs ([`MessageResolver`]). Neither holds the registry's lock during file system access.
//! Only the name being resolved is locked, so a hung file system blocks only verbs that name
//! something on it. Relative paths are relative to a [`BaseDir`].

use super::device_opener::{DeviceOpener, DeviceWithDiskIdentity};
use super::name_locks::NameLockGuard;
use super::opened::OPENED_MAJOR;
use super::{DeviceRegistry, RegisteredDevice, TableDeviceUses};
use crate::error::VerbError;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use udm_backends::DiskIdentity;
use udm_core::errno::{self, EBUSY, EINVAL, ENOENT, ENXIO};
use udm_core::{DevNo, Device, DeviceControlError};
use udm_dm::{DeviceLookupError, DeviceNameResolver, InvalidStoreMark, ResolvedDevice, TargetError};
use udm_wire::uri::{self, DeviceUri, FileUri};

/// Base directory of relative paths.
#[derive(Debug, Clone, Default)]
pub struct BaseDir(Option<PathBuf>);

impl BaseDir {
    /// No base directory: relative paths are refused.
    #[must_use]
    pub fn none() -> BaseDir {
        BaseDir(None)
    }

    /// The working directory of the process; none if it was deleted.
    #[must_use]
    pub fn own() -> BaseDir {
        BaseDir(std::env::current_dir().ok())
    }

    /// The directory `path`.
    ///
    /// # Errors
    /// If `path` is relative.
    pub fn at(path: &Path) -> Result<BaseDir, &'static str> {
        if path.is_absolute() {
            Ok(BaseDir(Some(path.into())))
        } else {
            Err("folder: expected an absolute path")
        }
    }

    /// Parses `word` as a URI and makes its path absolute.
    pub(crate) fn resolve(&self, word: &str) -> Result<DeviceUri, DeviceLookupError> {
        let uri = uri::parse_device_uri(word).map_err(|e| device_lookup_error(EINVAL, e.to_string()))?;
        match (uri, &self.0) {
            (DeviceUri::File(file), Some(folder)) if file.path.is_relative() => {
                // Removes the `.` components of `./a`.
                let path = folder.join(&file.path).components().collect();
                Ok(DeviceUri::File(FileUri { path, ..file }))
            }
            (DeviceUri::File(file), None) if file.path.is_relative() => {
                let path = file.path.display();
                Err(device_lookup_error(
                    EINVAL,
                    format!("{path}: give an absolute path, or the folder that it counts from"),
                ))
            }
            (uri, _) => Ok(uri),
        }
    }
}

/// Resolves the words of one table; opens devices that are not open.
pub(crate) struct TableResolver<'a> {
    registry: &'a DeviceRegistry,
    folder: &'a BaseDir,
    device_uses: TableDeviceUses,
    /// The device that gets the table.
    own: Option<&'a RegisteredDevice>,
}

impl<'a> TableResolver<'a> {
    /// A resolver for a new table.
    pub fn new(registry: &'a DeviceRegistry, folder: &'a BaseDir) -> TableResolver<'a> {
        TableResolver { registry, folder, device_uses: HashMap::new(), own: None }
    }

    /// A resolver for a table of `device`: it refuses that device and devices above it. The load
    /// would refuse them too, but only after targets may have written to them.
    pub fn of(self, device: &'a RegisteredDevice) -> TableResolver<'a> {
        TableResolver { own: Some(device), ..self }
    }

    /// True if `uri` names the device that gets the table.
    fn is_own(&self, uri: &DeviceUri) -> bool {
        self.own.is_some_and(|own| match uri {
            DeviceUri::Mapped(name) => *name == own.device.name(),
            DeviceUri::Number { major, minor } => {
                own.device.number() == DevNo { major: *major, minor: *minor }
            }
            _ => false,
        })
    }

    /// Returns `found`, unless it is above the device that gets the table.
    fn below(&self, found: ResolvedDevice) -> Result<ResolvedDevice, DeviceLookupError> {
        match self.own.map(|own| &own.device) {
            Some(own) if udm_dm::device_stack_contains(&found.device, |device| device.id() == own.id()) => {
                Err(device_lookup_error(
                    EINVAL,
                    format!("{} is on top of {} already", found.name, own.name()),
                ))
            }
            _ => Ok(found),
        }
    }
}

impl DeviceNameResolver for TableResolver<'_> {
    fn get(&mut self, word: &str) -> Result<ResolvedDevice, DeviceLookupError> {
        let uri = self.folder.resolve(word)?;
        if let Some(mapped) = self.registry.mapped(&uri, Some(&mut self.device_uses)) {
            return match mapped {
                Ok(found) => self.below(found),
                // A device that is being created can't be looked up, not even by itself.
                Err(_) if self.is_own(&uri) => {
                    Err(device_lookup_error(EINVAL, format!("{uri} is this device itself")))
                }
                refused => refused,
            };
        }
        match uri {
            DeviceUri::Number { major: OPENED_MAJOR, minor } => self.registry.open_numbered(minor),
            DeviceUri::Number { .. } => Err(unknown_number(&uri)),
            uri => self.registry.open(&uri),
        }
    }

    fn get_like(&mut self, word: &str, others: &[&ResolvedDevice]) -> Option<ResolvedDevice> {
        let is_remote = |uri: &DeviceUri| matches!(uri, DeviceUri::Nbd(_) | DeviceUri::Nvme(_));
        let uri = self.folder.resolve(word).ok().filter(is_remote)?;
        let kind = std::mem::discriminant(&uri);
        let other = others.iter().find_map(|other| {
            let other = uri::parse_device_uri(&other.name).ok()?;
            (std::mem::discriminant(&other) == kind).then_some(other)
        })?;
        let found = self.registry.open_with(&uri, |opener| opener.open_like(&uri, &other)).ok()?;
        tracing::warn!(
            "{uri}: its server is down: taken to be a path to the same disk as {other}, and failed until it answers"
        );
        Some(found)
    }

    fn mark(&self, device: &ResolvedDevice) -> Option<Arc<dyn InvalidStoreMark>> {
        self.registry.mark(device)
    }
}

/// Resolves the devices of a message to `mapped`. Opens nothing: the devices of a message are in
/// use already.
pub(crate) struct MessageResolver<'a> {
    /// The registry with the devices.
    pub registry: &'a DeviceRegistry,
    /// The device that receives the message.
    pub mapped: &'a RegisteredDevice,
    /// Base directory of relative paths.
    pub folder: &'a BaseDir,
}

impl DeviceNameResolver for MessageResolver<'_> {
    fn get(&mut self, word: &str) -> Result<ResolvedDevice, DeviceLookupError> {
        let uri = self.folder.resolve(word)?;
        if let Some(mapped) = self.registry.mapped(&uri, None) {
            return mapped;
        }
        let found = match &uri {
            DeviceUri::Number { major: OPENED_MAJOR, minor } => {
                let state = self.registry.state();
                let name = state.opened.uri(*minor).map(String::from);
                name.zip(state.opened.device(*minor)).map(|(name, found)| make_resolved_device(name, found))
            }
            DeviceUri::Number { .. } => None,
            uri => self.named(&uri.to_string()).or_else(|| self.named(&self.registry.opener.canonical(uri))),
        };
        found.ok_or_else(|| match &uri {
            DeviceUri::Number { .. } => unknown_number(&uri),
            DeviceUri::File(file) if !self.registry.opener.exists(&file.path) => {
                device_lookup_error(ENOENT, file.path.display().to_string())
            }
            // The device exists, but is no path of this table: EINVAL, as in the kernel.
            _ => device_lookup_error(EINVAL, "no table uses it".into()),
        })
    }
}

impl MessageResolver<'_> {
    /// The open device named `uri`. If the name has led to several disks, this is the one in the
    /// live table, or else the latest.
    fn named(&self, uri: &str) -> Option<ResolvedDevice> {
        let live = self.mapped.device.live();
        let targets = live.iter().flat_map(|table| table.targets());
        let used: Vec<DevNo> =
            targets.flat_map(|entry| entry.target.devices()).map(|used| used.device.number).collect();
        let mut found: Vec<_> = self.registry.state().opened.named(uri).collect();
        let at = found.iter().position(|(number, _)| used.contains(number)).unwrap_or(0);
        (at < found.len()).then(|| make_resolved_device(uri.into(), found.swap_remove(at)))
    }
}

impl DeviceRegistry {
    /// The device of `uri`, opened if necessary. May block as long as the file system.
    fn open(&self, uri: &DeviceUri) -> Result<ResolvedDevice, DeviceLookupError> {
        self.open_with(uri, |opener| opener.open(uri))
    }

    /// As [`DeviceRegistry::open`]; `open` opens the device.
    fn open_with(
        &self,
        uri: &DeviceUri,
        open: impl FnOnce(&dyn DeviceOpener) -> Result<DeviceWithDiskIdentity, DeviceControlError>,
    ) -> Result<ResolvedDevice, DeviceLookupError> {
        let written = uri.to_string();
        let _name = self.lock_name(format!("name {written}"), &written)?;
        let name = self.opener.canonical(uri);
        let identity = self.opener.identify(uri).map_err(open_error_to_lookup_error)?;
        // Other names of the same disk take this lock too. The name is always locked before the
        // disk, to prevent deadlocks.
        let same = if identity == DiskIdentity::Virtual { name.clone() } else { format!("{identity:?}") };
        let _same = self.lock_name(format!("disk {same}"), &written)?;
        let found = {
            let mut state = self.state();
            state.opened.spell(written, &name);
            state.opened.get(&name, identity)
        };
        if let Some(found) = found {
            return Ok(make_resolved_device(name, found));
        }
        let opened = open(&*self.opener).map_err(|mut error| {
            if let Some(advice) = self.advice_on_refused_file(error.errno) {
                error.text = format!("{}; {advice}", error.text);
            }
            open_error_to_lookup_error(error)
        })?;
        let numbered = self.state().opened.put(&name, opened.identity, opened.device);
        let found =
            numbered.ok_or_else(|| device_lookup_error(EBUSY, "all device numbers are taken".into()))?;
        Ok(make_resolved_device(name, found))
    }

    fn lock_name(&self, name: String, written: &str) -> Result<NameLockGuard<'_>, DeviceLookupError> {
        let hung = || {
            device_lookup_error(
                EBUSY,
                format!("{written}: another load waits for it to open: does its storage hang?"),
            )
        };
        self.opening.take(name).ok_or_else(hung)
    }

    /// Locks the snapshots of `disks` until the guards are dropped.
    ///
    /// # Errors
    /// EBUSY for `name` if the lock takes too long.
    pub(crate) fn lock_snapshots(
        &self,
        name: &str,
        disks: impl IntoIterator<Item = DevNo>,
    ) -> Result<Vec<NameLockGuard<'_>>, VerbError> {
        let mut disks: Vec<DevNo> = disks.into_iter().collect();
        // A fixed order prevents deadlocks.
        disks.sort_unstable();
        disks.dedup();
        let busy = || {
            let reason = "another change of the snapshots of its disk is under way: does its storage hang?";
            VerbError::new(name, TargetError::errno(EBUSY).because(reason))
        };
        disks.iter().map(|disk| self.opening.take(format!("snapshots of {disk}")).ok_or_else(busy)).collect()
    }

    /// The device of a number. If the name of the number leads to another disk now, this fails.
    fn open_numbered(&self, minor: u32) -> Result<ResolvedDevice, DeviceLookupError> {
        let number = DeviceUri::Number { major: OPENED_MAJOR, minor };
        let (name, was, open) = {
            let state = self.state();
            let name = state.opened.uri(minor).map(String::from);
            let (name, was) =
                name.zip(state.opened.identity(minor)).ok_or_else(|| unknown_number(&number))?;
            (name, was, state.opened.device(minor))
        };
        let uri = uri::parse_device_uri(&name).map_err(|_| unknown_number(&number))?;
        let locked = self.lock_name(format!("name {name}"), &name)?;
        let now = self.opener.identify(&uri);
        drop(locked);
        if let Some(found) = open {
            // An open device keeps its number, even if its name leads elsewhere. The look updates
            // its size.
            return Ok(make_resolved_device(name, found));
        }
        let another = || {
            let reason = format!("{number} was {name}, which is another disk now; name it by its path");
            Err(device_lookup_error(ENXIO, reason))
        };
        if now.map_err(open_error_to_lookup_error)? != was {
            return another();
        }
        // The name may lead elsewhere since the look.
        let found = self.open(&uri)?;
        if found.number.minor == minor { Ok(found) } else { another() }
    }
}

fn make_resolved_device(name: String, (number, device): (DevNo, Arc<dyn Device>)) -> ResolvedDevice {
    ResolvedDevice { number, name, device, hold: None }
}

pub(super) fn device_lookup_error(errno: i32, reason: String) -> DeviceLookupError {
    DeviceLookupError { errno, reason }
}

fn unknown_number(number: &DeviceUri) -> DeviceLookupError {
    device_lookup_error(ENXIO, format!("no device has the number {number}"))
}

/// Removes the text of the errno from the end of an error text, because the text of the look-up
/// error ends with it again.
fn open_error_to_lookup_error(
    DeviceControlError { errno, mut text }: DeviceControlError,
) -> DeviceLookupError {
    // With and without the suffix that Rust adds.
    let plain = errno::describe_errno(errno);
    for end in [format!(": {plain} (os error {errno})"), format!(": {plain}")] {
        if text.ends_with(&end) {
            text.truncate(text.len() - end.len());
        }
    }
    device_lookup_error(errno, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_paths_count_from_the_folder() {
        let folder = BaseDir::at(Path::new("/srv/disks")).unwrap();
        let resolved = |folder: &BaseDir, word: &str| folder.resolve(word).map(|uri| uri.to_string());
        assert_eq!(resolved(&folder, "a.img").unwrap(), "/srv/disks/a.img");
        assert_eq!(resolved(&folder, "./../a.img").unwrap(), "/srv/disks/../a.img");
        assert_eq!(resolved(&folder, "file:a%20b?direct=on").unwrap(), "file:/srv/disks/a%20b?direct=on");
        for word in ["/dev/sda", "mem:1M", "@a", "253:1"] {
            assert_eq!(resolved(&folder, word).unwrap(), word);
            assert_eq!(resolved(&BaseDir::none(), word).unwrap(), word);
        }
        assert_eq!(resolved(&BaseDir::none(), "./a.img").unwrap_err().errno, EINVAL);
        assert!(BaseDir::at(Path::new("srv")).is_err());
    }

    #[test]
    fn a_malformed_word_is_invalid_and_says_why() {
        for word in ["mem:", "null:size=x", "what:ever", "@a/b"] {
            let error = BaseDir::own().resolve(word).unwrap_err();
            assert!(error.errno == EINVAL && !error.reason.is_empty(), "{word}: {error:?}");
        }
    }
}
