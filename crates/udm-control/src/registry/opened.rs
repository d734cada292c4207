//! Opened devices: each URI and disk is opened once and keeps its number.
//!
//! Contract: a device is open as long as a table holds it. A number means one name of one disk for
//! the life of the process. If a name leads to another disk, it gets another number; if it leads
//! back, it gets the old one again. So a number in a script never means another disk.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use udm_backends::DiskIdentity;
use udm_core::{DevNo, Device};
use udm_dm::MappedDevice;

/// The major number of opened devices: a range that Linux leaves to local use.
pub const OPENED_MAJOR: u32 = 253;

/// Maximum number of devices, and of other spellings of URIs, that are remembered (the kernel's
/// minors have 20 bits).
const REMEMBERED_MAX: usize = 1 << 20;

/// All devices that were opened, by minor number.
#[derive(Default)]
pub(super) struct OpenedDevices {
    remembered: Vec<OpenedDevice>,
    /// The numbers of a canonical URI, the latest last. There are several if it has led to several
    /// disks.
    minors: HashMap<String, Vec<u32>>,
    /// Canonical URIs by the spellings in tables.
    spellings: HashMap<String, String>,
}

struct OpenedDevice {
    uri: String,
    identity: DiskIdentity,
    device: Weak<dyn Device>,
}

/// A device number and its open device.
pub(super) type NumberedDevice = (DevNo, Arc<dyn Device>);

impl OpenedDevices {
    fn at(&self, minor: u32) -> Option<&OpenedDevice> {
        self.remembered.get(minor as usize)
    }

    /// The device of a number, if it is open.
    pub fn device(&self, minor: u32) -> Option<NumberedDevice> {
        Some((opened_device_number(minor), self.at(minor)?.device.upgrade()?))
    }

    /// The URI of a number.
    pub fn uri(&self, minor: u32) -> Option<&str> {
        self.at(minor).map(|one| one.uri.as_str())
    }

    /// The disk of a number, open or not.
    pub fn identity(&self, minor: u32) -> Option<DiskIdentity> {
        self.at(minor).map(|one| one.identity)
    }

    /// All remembered devices, by number.
    pub fn disks(&self) -> Vec<(String, DiskIdentity)> {
        self.remembered.iter().map(|one| (one.uri.clone(), one.identity)).collect()
    }

    /// Remembers devices that another process had opened. Does nothing if any is remembered.
    pub fn remember(&mut self, disks: Vec<(String, DiskIdentity)>) {
        if !self.remembered.is_empty() {
            return;
        }
        for (minor, (uri, identity)) in (0..).zip(disks.into_iter().take(REMEMBERED_MAX)) {
            self.minors.entry(uri.clone()).or_default().push(minor);
            self.remembered.push(OpenedDevice { uri, identity, device: Weak::<MappedDevice>::new() });
        }
    }

    /// The device of a canonical URI that leads to `identity`, if it is open.
    pub fn get(&self, uri: &str, identity: DiskIdentity) -> Option<NumberedDevice> {
        self.numbered(uri, identity).and_then(|minor| self.device(minor))
    }

    /// The open devices of a URI, canonical or as spelled in a table; the latest comes first.
    pub fn named(&self, uri: &str) -> impl Iterator<Item = NumberedDevice> {
        let uri = self.spellings.get(uri).map_or(uri, String::as_str);
        let minors = self.minors.get(uri).into_iter().flatten().rev();
        minors.filter_map(|&minor| self.device(minor))
    }

    fn numbered(&self, uri: &str, identity: DiskIdentity) -> Option<u32> {
        let mut minors = self.minors.get(uri)?.iter();
        minors.find(|&&minor| self.at(minor).is_some_and(|one| one.identity == identity)).copied()
    }

    /// Remembers `spelling` as a spelling of `uri`.
    pub fn spell(&mut self, spelling: String, uri: &str) {
        if spelling == uri {
            return;
        }
        if self.spellings.len() >= REMEMBERED_MAX {
            self.spellings.clear();
        }
        self.spellings.insert(spelling, uri.into());
    }

    /// Adds a device that was just opened. If another thread was faster, returns its device. `None`
    /// if all numbers are taken by open devices.
    pub fn put(
        &mut self,
        uri: &str,
        identity: DiskIdentity,
        device: Arc<dyn Device>,
    ) -> Option<NumberedDevice> {
        let opened = OpenedDevice { uri: uri.into(), identity, device: Arc::downgrade(&device) };
        let minor = match self.numbered(uri, identity) {
            Some(minor) => {
                if let Some(open) = self.device(minor) {
                    return Some(open);
                }
                self.remembered[minor as usize] = opened;
                self.move_last(uri, minor);
                return Some((opened_device_number(minor), device));
            }
            None if self.remembered.len() < REMEMBERED_MAX => {
                self.remembered.push(opened);
                self.remembered.len() - 1
            }
            None => {
                let minor = self.remembered.iter().position(|one| one.device.strong_count() == 0)?;
                self.forget(minor as u32);
                self.remembered[minor] = opened;
                minor
            }
        };
        let minor = u32::try_from(minor).ok()?;
        self.minors.entry(uri.into()).or_default().push(minor);
        Some((opened_device_number(minor), device))
    }

    fn move_last(&mut self, uri: &str, minor: u32) {
        if let Some(minors) = self.minors.get_mut(uri) {
            minors.retain(|&m| m != minor);
            minors.push(minor);
        }
    }

    fn forget(&mut self, minor: u32) {
        let uri = &self.remembered[minor as usize].uri;
        if let Some(minors) = self.minors.get_mut(uri) {
            minors.retain(|&m| m != minor);
            if minors.is_empty() {
                self.minors.remove(uri);
            }
        }
    }
}

fn opened_device_number(minor: u32) -> DevNo {
    DevNo { major: OPENED_MAJOR, minor }
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_wire::uri;

    fn device() -> Arc<dyn Device> {
        udm_backends::open_standalone_device(&uri::parse_device_uri("null:size=1M").unwrap()).unwrap()
    }

    fn disk(inode: u64) -> DiskIdentity {
        DiskIdentity::File { device: 1, inode }
    }

    #[test]
    fn a_number_is_one_name_of_one_disk() {
        let mut opened = OpenedDevices::default();
        let (first, second) = (device(), device());
        let put = |opened: &mut OpenedDevices, name: &str, inode, device: &Arc<dyn Device>| {
            opened.put(name, disk(inode), Arc::clone(device)).unwrap().0.minor
        };
        assert_eq!(put(&mut opened, "/a", 1, &first), 0);
        assert_eq!(put(&mut opened, "/b", 1, &device()), 1, "another name can be another path");
        assert_eq!(put(&mut opened, "/a", 2, &second), 2, "replaced");
        assert!(opened.get("/a", disk(3)).is_none());
        let numbers =
            |opened: &OpenedDevices, name| opened.named(name).map(|(n, _)| n.minor).collect::<Vec<_>>();
        assert_eq!(numbers(&opened, "/a"), [2, 0]);
        drop(second);
        assert_eq!(numbers(&opened, "/a"), [0]);
        assert_eq!((opened.identity(2), opened.uri(2)), (Some(disk(2)), Some("/a")));
        drop(first);
        let back = device();
        assert_eq!(put(&mut opened, "/a", 1, &back), 0, "its old number");
        let late = opened.put("/a", disk(1), device()).unwrap().1;
        assert_eq!(late.id(), back.id(), "the one that is open");
        opened.spell("/x/../a".into(), "/a");
        assert_eq!(numbers(&opened, "/x/../a"), [0]);
    }
}
