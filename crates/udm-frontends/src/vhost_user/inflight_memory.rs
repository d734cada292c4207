//! The memory for requests in flight, which the front end keeps over the end of a server.

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use udm_buf::SharedMemoryMap;
use udm_wire::vhost_user::{InflightArea, InflightLayout, PackedInflightLayout};

/// The kinds of rings for which memory is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RingKinds {
    Split,
    Packed,
    Any,
}

/// The mapped memory. [`super::inflight_record`] has the part of each ring.
pub(super) struct InflightMemory {
    pub(super) file: OwnedFd,
    pub(super) map: Arc<SharedMemoryMap>,
    pub(super) area: InflightArea,
}

impl InflightMemory {
    /// Maps `area` of `file`.
    ///
    /// # Errors
    /// The area is not in the file, or cannot be mapped.
    pub(super) fn new(file: OwnedFd, area: InflightArea) -> io::Result<InflightMemory> {
        let len = usize::try_from(area.size).map_err(|_| io::ErrorKind::InvalidData)?;
        let map = Arc::new(SharedMemoryMap::of_guest_memory(&file, area.offset, len)?);
        Ok(InflightMemory { file, map, area })
    }

    /// Clears the records of all rings.
    pub(super) fn clear(&self) {
        // The mapping may be longer than the area.
        let len = self.map.len().min(usize::try_from(self.area.size).unwrap_or(usize::MAX));
        self.map.words()[..len / 8].iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// Creates memory for the queues that `asked` names. Also returns the file for the front end.
    ///
    /// # Errors
    /// There are more than `queues_max` queues or `ring_max` entries, or there is no memory.
    pub(super) fn create(
        asked: InflightArea,
        queues_max: u16,
        ring_max: u16,
        kinds: RingKinds,
    ) -> io::Result<(InflightMemory, OwnedFd)> {
        if !(1..=queues_max).contains(&asked.queues) || !(1..=ring_max).contains(&asked.ring_size) {
            let why = format!(
                "memory for requests in flight: expected 1 to {queues_max} queues of 1 to {ring_max}"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let ring_size = asked.ring_size;
        let part = match kinds {
            RingKinds::Split => InflightLayout { ring_size }.part_len(),
            // It has room for a split ring too.
            RingKinds::Packed | RingKinds::Any => PackedInflightLayout { ring_size }.part_len(),
        };
        let size = (part * usize::from(asked.queues)).next_multiple_of(4096) as u64;
        let file = memfd_create("udm-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, size)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let area = InflightArea { size, offset: 0, ..asked };
        Ok((InflightMemory::new(file.try_clone()?, area)?, file))
    }
}
