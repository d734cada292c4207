//! The memory of a simulated machine, and its copy at the moment at which a server is killed.
//!
//! The memory consists of one block per ring. A block begins with the parts of the ring, and ends
//! with places for data. In some worlds it is two regions that adjoin in the guest. At times there
//! is another region, into which guests read.

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32};
use udm_buf::{SharedMemoryMap, copy_from_shared, copy_to_shared};
use udm_wire::vhost_user::GuestMemoryRegion;

/// First address of the memory in the guest.
pub(super) const GUEST: u64 = 0x10_0000;
/// First address of the memory in the front end's process. The second region is at another one.
const USER: u64 = 0x7f00_0000_0000;
/// Distance of the regions in the front end's process, beyond the length of the first one.
const GAP: u64 = 1 << 30;

/// Offset of the region that is added and removed, its part per ring, and its bytes.
pub(super) const EXTRA: usize = 1 << 40;
pub(super) const EXTRA_PART: usize = 4096;
const EXTRA_LEN: usize = 4 * EXTRA_PART;

/// Bytes per block.
pub(super) const BLOCK: usize = 96 << 10;
/// Offsets in a block: the available ring, the used ring, headers, status bytes, tables of indirect
/// descriptors, and data. The descriptor table is at its start.
pub(super) const AVAIL: usize = 4096;
pub(super) const USED: usize = 8192;
pub(super) const HEADERS: usize = 12_288;
pub(super) const STATUSES: usize = 14_336;
pub(super) const TABLES: usize = 16_384;
pub(super) const DATA: usize = 32_768;

/// The memory of a machine.
pub(super) struct MachineMemory {
    parts: Vec<(Arc<OwnedFd>, SharedMemoryMap)>,
    /// Length of the first region in bytes.
    split: usize,
    len: usize,
    extra: Option<ExtraRegion>,
}

/// The state of a region that is added and removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExtraRegionState {
    /// The back end may not have it yet, or is to remove it: guests do not use it for new requests.
    Closed,
    /// The back end has it.
    Open,
    /// The back end has removed it.
    Removed,
}

struct ExtraRegion {
    file: Arc<OwnedFd>,
    map: SharedMemoryMap,
    state: ExtraRegionState,
}

impl MachineMemory {
    /// Memory for `rings` rings: one region, or two that adjoin in the data of the first ring.
    pub(super) fn new(rings: usize, in_two: bool) -> io::Result<MachineMemory> {
        let len = rings * BLOCK;
        let split = if in_two { DATA + 4096 } else { len };
        let lens = if in_two { vec![split, len - split] } else { vec![len] };
        let part = |len: usize| {
            let file = memfd_create("machine", MemfdFlags::CLOEXEC)?;
            ftruncate(&file, len as u64)?;
            let map = SharedMemoryMap::of_guest_memory(&file, 0, len)?;
            Ok((Arc::new(file), map))
        };
        let parts = lens.into_iter().map(part).collect::<io::Result<_>>()?;
        Ok(MachineMemory { parts, split, len, extra: None })
    }

    /// Creates the region that is added and removed. Returns its file.
    pub(super) fn create_extra(&mut self) -> io::Result<Arc<OwnedFd>> {
        let file = memfd_create("extra", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, EXTRA_LEN as u64)?;
        let map = SharedMemoryMap::of_guest_memory(&file, 0, EXTRA_LEN)?;
        let file = Arc::new(file);
        self.extra = Some(ExtraRegion { file: file.clone(), map, state: ExtraRegionState::Closed });
        Ok(file)
    }

    /// The state of the region that is added and removed, if there was one.
    pub(super) fn extra_state(&self) -> Option<ExtraRegionState> {
        self.extra.as_ref().map(|extra| extra.state)
    }

    pub(super) fn set_extra_state(&mut self, state: ExtraRegionState) {
        if let Some(extra) = &mut self.extra {
            extra.state = state;
        }
    }

    /// The region that is added and removed.
    pub(super) fn extra_region() -> GuestMemoryRegion {
        GuestMemoryRegion {
            guest_address: GUEST + EXTRA as u64,
            size: EXTRA_LEN as u64,
            user_address: 1 << 44,
            file_offset: 0,
        }
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The regions, each with its file.
    pub(super) fn regions(&self) -> Vec<(GuestMemoryRegion, Arc<OwnedFd>)> {
        let mut at = 0;
        let region = |(file, map): &(Arc<OwnedFd>, SharedMemoryMap)| {
            let (guest_address, user_address) = (GUEST + at as u64, self.user_address(at));
            let size = map.len() as u64;
            at += map.len();
            (GuestMemoryRegion { guest_address, size, user_address, file_offset: 0 }, file.clone())
        };
        let extra = self.extra.iter().filter(|extra| extra.state != ExtraRegionState::Removed);
        let extra = extra.map(|extra| (MachineMemory::extra_region(), extra.file.clone()));
        self.parts.iter().map(region).chain(extra).collect()
    }

    /// The address of byte `at` in the front end's process.
    pub(super) fn user_address(&self, at: usize) -> u64 {
        USER + at as u64 + if at < self.split { 0 } else { GAP }
    }

    fn part(&self, at: usize) -> (&SharedMemoryMap, usize) {
        if let Some(extra) = self.extra.as_ref().filter(|_| at >= EXTRA) {
            return (&extra.map, at - EXTRA);
        }
        if at < self.split { (&self.parts[0].1, at) } else { (&self.parts[1].1, at - self.split) }
    }

    /// The 16-bit word at byte `at`.
    pub(super) fn u16_at(&self, at: usize) -> &AtomicU16 {
        let (map, at) = self.part(at);
        map.u16_at(at)
    }

    /// The 32-bit word at byte `at`.
    pub(super) fn u32_at(&self, at: usize) -> &AtomicU32 {
        let (map, at) = self.part(at);
        map.u32_at(at)
    }

    /// Writes `bytes` at byte `at`.
    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        let front = self.split.saturating_sub(at).min(bytes.len());
        for (at, bytes) in [(at, &bytes[..front]), (at + front, &bytes[front..])] {
            if !bytes.is_empty() {
                let (map, at) = self.part(at);
                copy_to_shared(map.words(), at, bytes);
            }
        }
    }

    /// Reads `len` bytes at byte `at`.
    pub(super) fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        let front = self.split.saturating_sub(at).min(len);
        let (first, second) = out.split_at_mut(front);
        for (at, bytes) in [(at, first), (at + front, second)] {
            if !bytes.is_empty() {
                let (map, at) = self.part(at);
                copy_from_shared(map.words(), at, bytes);
            }
        }
        out
    }

    /// Clears the block of a ring.
    pub(super) fn clear(&self, block: usize) {
        self.write(block, &vec![0; BLOCK]);
    }
}
