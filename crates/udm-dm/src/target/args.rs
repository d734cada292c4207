//! The input of a target's constructor, and the lookup of the devices that its words name.

use crate::device_ref::{DeviceLookupError, ResolvedDevice};
use crate::invalid_store::InvalidStoreMark;
use std::sync::Arc;
use udm_core::{ControlIo, Sector, Sectors};

/// Arguments of a target's constructor: its line, split into words.
pub struct TargetArgs<'a> {
    /// First sector of the target in the mapped device.
    pub start: Sector,
    /// Length of the target.
    pub len: Sectors,
    /// The words after the type, without the escaping backslashes.
    pub args: &'a [String],
    /// Looks up devices.
    pub resolver: &'a mut dyn DeviceNameResolver,
    /// Reads and writes metadata on devices before a lane is open.
    pub io: &'a dyn ControlIo,
    /// Number of cores (io-affinity masks).
    pub cores: usize,
}

/// Looks up the devices that table lines and messages name: a path, a URI, `major:minor` or
/// `@name`.
pub trait DeviceNameResolver {
    /// Looks up the device for `word`, and opens it if necessary.
    ///
    /// # Errors
    /// An errno and the reason: ENOENT for an unknown name, ENXIO for unknown numbers, otherwise
    /// the errno of the backend.
    fn get(&mut self, word: &str) -> Result<ResolvedDevice, DeviceLookupError>;

    /// Returns the device for `word`, whose server is down, as a path to the same disk as one of
    /// `others`: with the size and limits of that device. Its lanes connect when the server
    /// answers. `None` if this cannot be assumed.
    fn get_like(&mut self, word: &str, others: &[&ResolvedDevice]) -> Option<ResolvedDevice> {
        let _ = (word, others);
        None
    }

    /// The mark that records a store on `device` as invalid. `device` came from this resolver.
    /// `None` if no marks are kept.
    fn mark(&self, device: &ResolvedDevice) -> Option<Arc<dyn InvalidStoreMark>> {
        let _ = device;
        None
    }
}

/// Parses a decimal number as the kernel's constructors do: only digits, no sign, 64 bits.
#[must_use]
pub fn parse_decimal_u64(word: &str) -> Option<u64> {
    word.bytes().all(|b| b.is_ascii_digit()).then(|| word.parse().ok()).flatten()
}
