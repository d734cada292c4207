//! Devices that tables use: opened once, known by their URI, numbered for good.
//!
//! Contract: a device is open for as long as a table holds it, and not longer. Its number stays its URI's for the life of the process, so that
//! a number in a script never comes to mean another device.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use udm_core::{DevNo, Device};

/// The major number of opened devices: a range that Linux leaves to local use.
pub const OPENED_MAJOR: u32 = 253;

/// How many URIs are remembered (the kernel's minors have 20 bits).
const KNOWN_MAX: usize = 1 << 20;

/// The URIs that were ever opened, by minor number.
#[derive(Default)]
pub(super) struct Opened {
    known: Vec<Known>,
    minors: HashMap<String, u32>,
}

struct Known {
    uri: String,
    device: Weak<dyn Device>,
}

impl Opened {
    /// The device of a canonical URI, when it is open.
    pub fn get(&self, uri: &str) -> Option<(DevNo, Arc<dyn Device>)> {
        let minor = *self.minors.get(uri)?;
        let device = self.known[minor as usize].device.upgrade()?;
        Some((number(minor), device))
    }

    /// The URI of a number.
    pub fn uri(&self, minor: u32) -> Option<&str> {
        self.known.get(minor as usize).map(|k| k.uri.as_str())
    }

    /// Remembers a device that was just opened. `None` when all numbers are taken by open devices.
    pub fn put(&mut self, uri: &str, device: &Arc<dyn Device>) -> Option<DevNo> {
        let known = Known { uri: uri.into(), device: Arc::downgrade(device) };
        if let Some(&minor) = self.minors.get(uri) {
            self.known[minor as usize] = known;
            return Some(number(minor));
        }
        let minor = if self.known.len() < KNOWN_MAX {
            self.known.push(known);
            self.known.len() - 1
        } else {
            let minor = self.known.iter().position(|k| k.device.strong_count() == 0)?;
            self.minors.remove(&self.known[minor].uri);
            self.known[minor] = known;
            minor
        };
        let minor = u32::try_from(minor).ok()?;
        self.minors.insert(uri.into(), minor);
        Some(number(minor))
    }
}

fn number(minor: u32) -> DevNo {
    DevNo { major: OPENED_MAJOR, minor }
}
