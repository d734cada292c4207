//! Support for tests of targets: disks in memory that fail or wait on demand, cores stepped by
//! hand, and a resolver of fixed names.
//!
//! Not part of the crate's interface. It takes locks and allocates freely, because it stands above
//! and below the data path and is not part of it.

mod disk;
mod invalid_store;
mod io;
mod tasks;
mod world;

pub use disk::{LoggedTestDiskRequest, TestDisk};
pub use invalid_store::TestStoreMarks;
pub use io::TestControlIo;
pub use world::{SteppedTestCores, TestCoreInboxes};

use crate::device_ref::{DeviceLookupError, ResolvedDevice};
use crate::invalid_store::InvalidStoreMark;
use crate::target::DeviceNameResolver;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use udm_core::errno::{ENOENT, ENXIO};
use udm_core::{Bio, Buf, DevNo, Device, Limits, Op, SECTOR_SIZE, Sector, Sectors};

fn lock_test_mutex<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// A bio without data.
#[must_use]
pub fn bio_without_data(op: Op, sector: u64, sectors: u64) -> Box<Bio> {
    let mut bio = Bio::new();
    (bio.op, bio.sector, bio.sectors) = (op, Sector(sector), Sectors(sectors));
    bio
}

/// A read into a buffer of 0xee.
#[must_use]
pub fn make_test_read_bio(sector: u64, sectors: u64) -> Box<Bio> {
    let mut buf = Buf::zeroed((sectors * SECTOR_SIZE) as usize);
    buf.fill(0xee);
    Bio::read(Sector(sector), Sectors(sectors), buf.into())
}

/// A write whose sector `i` is full of `fill + i`.
#[must_use]
pub fn make_test_write_bio(sector: u64, sectors: u64, fill: u8) -> Box<Bio> {
    let mut buf = Buf::zeroed((sectors * SECTOR_SIZE) as usize);
    for (i, bytes) in buf.chunks_mut(SECTOR_SIZE as usize).enumerate() {
        bytes.fill(fill.wrapping_add(i as u8));
    }
    Bio::write(Sector(sector), Sectors(sectors), buf.into())
}

/// The data of `bio` in one piece.
#[must_use]
pub fn copy_bio_data(bio: &Bio) -> Vec<u8> {
    let mut bytes = vec![0; bio.data.len()];
    bio.data.copy_to(&mut bytes);
    bytes
}

/// A resolver of fixed names, with one mark per store name.
#[derive(Default)]
pub struct TestDeviceNameResolver {
    names: BTreeMap<String, (DevNo, Arc<dyn Device>)>,
    /// The marks of invalid stores.
    pub marks: TestStoreMarks,
}

impl TestDeviceNameResolver {
    /// A resolver without names.
    #[must_use]
    pub fn new() -> TestDeviceNameResolver {
        TestDeviceNameResolver::default()
    }

    /// The devices of the machine on which the invalid tables were recorded: `/dev/nullb0` to
    /// `/dev/nullb3` (253:0 to 253:3), 2097152 sectors each.
    #[must_use]
    pub fn recorded() -> TestDeviceNameResolver {
        let mut resolver = TestDeviceNameResolver::new();
        for minor in 0..4 {
            let disk = TestDisk::null(Limits::new(Sectors(2_097_152)));
            resolver.add(&format!("/dev/nullb{minor}"), DevNo { major: 253, minor }, disk);
        }
        resolver
    }

    /// Adds `device` under `name` and under its number.
    pub fn add(&mut self, name: &str, number: DevNo, device: Arc<dyn Device>) {
        self.names.insert(number.to_string(), (number, Arc::clone(&device)));
        self.names.insert(name.to_owned(), (number, device));
    }
}

impl DeviceNameResolver for TestDeviceNameResolver {
    fn get(&mut self, word: &str) -> Result<ResolvedDevice, DeviceLookupError> {
        match self.names.get(word) {
            Some((number, device)) => Ok(ResolvedDevice {
                number: *number,
                name: word.to_owned(),
                device: Arc::clone(device),
                hold: None,
            }),
            // The kernel's errors for numbers without a device, and for paths without a file.
            None if word.parse::<DevNo>().is_ok() => {
                Err(DeviceLookupError { errno: ENXIO, reason: String::new() })
            }
            None => Err(DeviceLookupError { errno: ENOENT, reason: String::new() }),
        }
    }

    fn mark(&self, device: &ResolvedDevice) -> Option<Arc<dyn InvalidStoreMark>> {
        Some(self.marks.of(&device.name))
    }
}
