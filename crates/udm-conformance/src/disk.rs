//! A strict disk below the targets. It checks its requests, delays them on demand, and has a cache
//! that is lost when power is cut.
//!
//! A request takes effect between `submit` and `poll`. Each poll completes a few requests, in any
//! order. The disk panics on a request that the layer above must not send: a range beyond the end,
//! an odd length, a length above the limits, an unsupported operation or flag.

use crate::STAMP;
use rand::RngExt;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use udm_core::{
    Batch, Bio, BioFlags, Cx, Device, DeviceControlError, DeviceId, Lane, Limits, Nanos, Op, SECTOR_SIZE,
    Sectors, SharedDiskState, Status,
};

const BLOCK: usize = SECTOR_SIZE as usize;

/// A disk in memory. Two disks with the same [`SharedDiskMedium`] are two paths to one disk.
pub struct StrictMemoryDisk {
    id: DeviceId,
    medium: Arc<SharedDiskMedium>,
}

/// The state that the paths to a disk share.
pub struct SharedDiskMedium {
    limits: Limits,
    shared_disk_state: SharedDiskState,
    state: Mutex<MediumState>,
}

struct MediumState {
    /// The content that reads see.
    bytes: Vec<u8>,
    /// The number of the write of each sector, for `bytes` here and for `stable` below.
    written: Vec<u64>,
    stable: Vec<u8>,
    stable_written: Vec<u64>,
    writes: u64,
    bad: Vec<(Range<u64>, Status)>,
    /// Paths that fail all requests.
    down: BTreeMap<DeviceId, Status>,
    holding: bool,
    lanes: usize,
    waiting: usize,
}

impl SharedDiskMedium {
    /// Creates a medium of zeroes with these limits.
    #[must_use]
    pub fn new(limits: Limits) -> Arc<SharedDiskMedium> {
        let (sectors, bytes) = (limits.size.0 as usize, limits.size.bytes() as usize);
        let state = MediumState {
            bytes: vec![0; bytes],
            written: vec![0; sectors],
            stable: vec![0; bytes],
            stable_written: vec![0; sectors],
            writes: 0,
            bad: Vec::new(),
            down: BTreeMap::new(),
            holding: false,
            lanes: 0,
            waiting: 0,
        };
        Arc::new(SharedDiskMedium {
            limits,
            shared_disk_state: SharedDiskState::default(),
            state: Mutex::new(state),
        })
    }

    /// Creates another path to the medium.
    #[must_use]
    pub fn path(self: &Arc<SharedDiskMedium>) -> Arc<StrictMemoryDisk> {
        Arc::new(StrictMemoryDisk { id: DeviceId::new(), medium: self.clone() })
    }

    fn state(&self) -> MutexGuard<'_, MediumState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cuts the power and restores it. Data that is only in the cache is lost.
    pub fn cut_power(&self) {
        let state = &mut *self.state();
        state.bytes.clone_from(&state.stable);
        state.written.clone_from(&state.stable_written);
    }

    /// While `hold` is set, requests stay in the disk.
    pub fn hold(&self, hold: bool) {
        self.state().holding = hold;
    }

    /// Makes the sector that begins with `stamp` fail with `status`. Returns false if there is no
    /// such sector.
    #[must_use]
    pub fn inject_error(&self, stamp: [u8; STAMP], status: Status) -> bool {
        let state = &mut *self.state();
        let at = state.bytes.chunks(BLOCK).position(|sector| sector[..STAMP] == stamp);
        state.bad.extend(at.map(|at| (at as u64..at as u64 + 1, status)));
        at.is_some()
    }

    /// Makes all requests to `path` fail with `status`, including flushes.
    pub fn fail_path(&self, path: DeviceId, status: Status) {
        self.state().down.insert(path, status);
    }

    /// Removes all injected errors.
    pub fn heal(&self) {
        let state = &mut *self.state();
        state.bad.clear();
        state.down.clear();
    }

    /// Number of open lanes, and of requests in them.
    #[must_use]
    pub fn in_use(&self) -> (usize, usize) {
        let state = self.state();
        (state.lanes, state.waiting)
    }

    /// Panics if `bio` is a request that must not be sent to the disk.
    fn assert_fits(&self, bio: &Bio) {
        let limits = &self.limits;
        assert!(bio.is_in_flight(), "a bio that was not started: {bio:?}");
        if !limits.fua {
            assert!(!bio.flags.contains(BioFlags::FUA), "FUA for a disk without FUA: {bio:?}");
        }
        if bio.op == Op::Flush {
            return assert!(
                bio.data.is_empty() && bio.sectors == Sectors::ZERO,
                "a flush with a range or data: {bio:?}"
            );
        }
        limits.check(bio.op, bio.sector, bio.sectors).unwrap_or_else(|why| panic!("{why}: {bio:?}"));
        assert!(bio.sectors <= limits.max_for(bio.op), "longer than the limits allow: {bio:?}");
        let data = if bio.op.has_data() { bio.sectors.bytes() } else { 0 };
        assert_eq!(bio.data.len() as u64, data, "data of another length: {bio:?}");
    }
}

impl Device for StrictMemoryDisk {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, _: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        self.medium.state().lanes += 1;
        Ok(Box::new(DiskLane { id: self.id, medium: self.medium.clone(), waiting: Vec::new() }))
    }

    fn limits(&self) -> Limits {
        self.medium.limits
    }

    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        Some(&self.medium.shared_disk_state)
    }
}

/// The data that a flush makes durable: sectors, each with the number of its write and its bytes.
type CachedSectors = BTreeMap<u64, (u64, Vec<u8>)>;

struct DiskLane {
    id: DeviceId,
    medium: Arc<SharedDiskMedium>,
    /// Requests, each with the content of the cache at its submission if it flushes.
    waiting: Vec<(Box<Bio>, CachedSectors)>,
}

impl MediumState {
    fn cached(&self) -> CachedSectors {
        let differs = |&(_, (a, b)): &(usize, (&u64, &u64))| a != b;
        let sectors = self.written.iter().zip(&self.stable_written).enumerate().filter(differs);
        sectors
            .map(|(i, (&write, _))| (i as u64, (write, self.bytes[i * BLOCK..(i + 1) * BLOCK].to_vec())))
            .collect()
    }

    fn write_back(&mut self, cached: &CachedSectors) {
        for (&sector, (write, bytes)) in cached {
            let i = sector as usize;
            if self.stable_written[i] < *write {
                self.stable_written[i] = *write;
                self.stable[i * BLOCK..(i + 1) * BLOCK].copy_from_slice(bytes);
            }
        }
    }

    fn act(&mut self, bio: &mut Bio, cached: &CachedSectors, limits: &Limits) -> Status {
        let (start, end) = (bio.sector.0, bio.end().0);
        let hit = |(bad, _): &&(Range<u64>, Status)| bad.start < end && start < bad.end;
        if let Some((_, status)) = self.bad.iter().find(hit) {
            return *status;
        }
        self.write_back(cached);
        let range = start as usize * BLOCK..end as usize * BLOCK;
        match bio.op {
            Op::Read => {
                bio.data.copy_from(&self.bytes[range]);
                return Status::Ok;
            }
            Op::Flush => return Status::Ok,
            Op::Write => drop(bio.data.copy_to(&mut self.bytes[range])),
            Op::WriteZeroes => self.bytes[range].fill(0),
            // A discard may leave any content.
            Op::Discard => self.bytes[range].fill(0xdd),
        }
        self.writes += 1;
        self.written[start as usize..end as usize].fill(self.writes);
        if bio.flags.contains(BioFlags::FUA) || !limits.write_cache {
            let range = start as usize * BLOCK..end as usize * BLOCK;
            self.stable[range.clone()].copy_from_slice(&self.bytes[range]);
            self.stable_written[start as usize..end as usize].fill(self.writes);
        }
        Status::Ok
    }
}

impl Lane for DiskLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let mut state = self.medium.state();
        state.waiting += batch.len();
        for bio in batch.drain(..) {
            self.medium.assert_fits(&bio);
            let flush = bio.op == Op::Flush || bio.flags.contains(BioFlags::PREFLUSH);
            let cached = if flush { state.cached() } else { CachedSectors::new() };
            self.waiting.push((bio, cached));
        }
        cx.wake_now();
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        if self.waiting.is_empty() {
            return;
        }
        let mut state = self.medium.state();
        if state.holding {
            return cx.wake_at(cx.now() + Nanos::from_millis(1));
        }
        for _ in 0..self.waiting.len().div_ceil(2) {
            let at = cx.rng().random_range(0..self.waiting.len());
            let (mut bio, cached) = self.waiting.swap_remove(at);
            let down = state.down.get(&self.id).copied();
            let status = down.unwrap_or_else(|| state.act(&mut bio, &cached, &self.medium.limits));
            bio.end_with(status);
            state.waiting -= 1;
            done.push(bio);
        }
        if !self.waiting.is_empty() {
            cx.wake_now();
        }
    }
}

impl Drop for DiskLane {
    fn drop(&mut self) {
        self.medium.state().lanes -= 1;
    }
}
