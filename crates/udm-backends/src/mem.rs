//! `mem:SIZE`: a disk of memory, shared by all cores.
//!
//! A page is allocated and zeroed on its first write. That is the only allocation in the data path.
//! If two cores write a page first, [`OnceLock`] makes both use the same page. Written memory stays
//! allocated until the device is dropped. A discard zeroes the range; for pages that were never
//! written, it costs almost nothing.
//!
//! If two cores write the same block, the result is that of a real disk with two writers: each byte
//! comes from one of them. So the memory consists of `AtomicU64` words, and data is copied as
//! `udm-buf` copies memory that others may change. No ordering between words or requests is needed.
//! A client may see its write complete and then read through another core. To do that, the client
//! passes something between the cores (a socket, an inbox), and that orders the two accesses.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use udm_core::errno::EINVAL;
use udm_core::{
    Bio, BioProgress, CpuBioHandler, CpuBudgetedLane, Cx, Device, DeviceControlError, DeviceId, ExtentKind,
    Extents, Lane, Limits, Op, SECTOR_SIZE, Sector, Sectors, SharedDiskState, Status, copy_from_shared,
    copy_to_shared,
};
use zerocopy::FromZeros;

/// Bytes in a page: large enough for a small directory, small enough for a cheap sparse disk. Only
/// the touched parts of a new page take memory.
const PAGE: u64 = 256 << 10;

/// Pages in a directory.
const FAN: u64 = 1024;

/// The largest device in bytes (64 TiB). Its list of directories takes 4 MiB.
pub(crate) const MAX_SIZE: u64 = 64 << 40;

/// Cost of a discard of a page that was never written, in bytes touched.
const LOOK: u64 = 64;

/// The longest discard or write-zeroes in sectors (64 MiB).
pub(crate) const MAX_ZERO: Sectors = Sectors(64 << 11);

type SparseMemoryPage = Box<[AtomicU64]>;
type SparseMemoryPageDirectory = Box<[OnceLock<SparseMemoryPage>]>;

/// The pages of a disk and its size.
pub(crate) struct SparseMemory {
    pub(crate) size: Sectors,
    directories: Box<[OnceLock<SparseMemoryPageDirectory>]>,
    pub(crate) shared_disk_state: SharedDiskState,
}

impl SparseMemory {
    /// Creates a store of `size` bytes, rounded down to sectors. It takes almost no memory until it
    /// is written.
    ///
    /// # Errors
    /// EINVAL for less than a sector, or more than [`MAX_SIZE`].
    pub(crate) fn new(size: u64) -> Result<SparseMemory, DeviceControlError> {
        let sectors = Sectors::from_bytes(size);
        if sectors == Sectors::ZERO || size > MAX_SIZE {
            return Err(DeviceControlError::new(
                EINVAL,
                format!("memory of {size} bytes: not in 512..={MAX_SIZE}"),
            ));
        }
        let directories = (0..size.div_ceil(PAGE * FAN)).map(|_| OnceLock::new()).collect();
        Ok(SparseMemory { size: sectors, directories, shared_disk_state: SharedDiskState::default() })
    }

    /// Returns the page that holds `offset`, if it was ever written.
    fn page(&self, offset: u64) -> Option<&SparseMemoryPage> {
        let number = offset / PAGE;
        self.directories[(number / FAN) as usize].get()?[(number % FAN) as usize].get()
    }

    /// Appends the extents of a range. A page that was never written is a hole, unless `cached`
    /// returns true for its bytes because a cache above holds data of them.
    pub(crate) fn extents(
        &self,
        from: Sector,
        len: Sectors,
        out: &mut Extents,
        cached: impl Fn(&Range<u64>) -> bool,
    ) {
        let (mut at, end) = (from.bytes(), (from + len).bytes());
        while at < end && !out.is_full() {
            let now = (PAGE - at % PAGE).min(end - at);
            // The cache must be checked first: data that is written back meanwhile is then found in
            // the page.
            let is_data = cached(&(at..at + now)) || self.page(at).is_some();
            let content = if is_data { ExtentKind::Data } else { ExtentKind::Hole };
            out.push(Sectors::from_bytes(now), content);
            at += now;
        }
    }

    /// Returns the page that holds `offset`; allocates it if necessary.
    fn make_page(&self, offset: u64) -> Result<&SparseMemoryPage, Status> {
        let number = offset / PAGE;
        let directory = self.directories[(number / FAN) as usize]
            .get_or_init(|| (0..FAN).map(|_| OnceLock::new()).collect());
        let slot = &directory[(number % FAN) as usize];
        if let Some(page) = slot.get() {
            return Ok(page);
        }
        // Zeroed by the system, so a page takes no memory until its parts are touched.
        let fresh =
            <[AtomicU64]>::new_box_zeroed_with_elems(PAGE as usize / 8).map_err(|_| Status::Resource)?;
        Ok(slot.get_or_init(|| fresh))
    }

    /// Copies the bytes at byte `offset` into `out`.
    pub(crate) fn read(&self, mut offset: u64, mut out: &mut [u8]) {
        while !out.is_empty() {
            let at = (offset % PAGE) as usize;
            let (now, rest) = out.split_at_mut(out.len().min(PAGE as usize - at));
            match self.page(offset) {
                Some(page) => copy_from_shared(page, at, now),
                None => now.fill(0),
            }
            offset += now.len() as u64;
            out = rest;
        }
    }

    /// Copies `data` to byte `offset`.
    pub(crate) fn write(&self, mut offset: u64, mut data: &[u8]) -> Result<(), Status> {
        while !data.is_empty() {
            let at = (offset % PAGE) as usize;
            let (now, rest) = data.split_at(data.len().min(PAGE as usize - at));
            copy_to_shared(self.make_page(offset)?, at, now);
            offset += now.len() as u64;
            data = rest;
        }
        Ok(())
    }

    /// Zeroes the bytes that `part` allows of the range at byte `start`. `start` may be negative
    /// (wrapped); `start + part.done` is the position. Pages that were never written cost almost
    /// nothing.
    pub(crate) fn zero(&self, start: u64, part: &mut BioProgress) {
        while !part.is_done() && part.left > 0 {
            let offset = start.wrapping_add(part.done);
            let at = offset % PAGE;
            let rest = part.rest().min(PAGE - at);
            let Some(page) = self.page(offset) else {
                part.advance_for(rest, LOOK);
                continue;
            };
            let now = rest.min((part.left & !(SECTOR_SIZE - 1)).max(SECTOR_SIZE));
            for word in &page[at as usize / 8..(at + now) as usize / 8] {
                // Untouched memory is zero; storing to it would make the system allocate it.
                if word.load(Relaxed) != 0 {
                    word.store(0, Relaxed);
                }
            }
            part.advance(now);
        }
    }

    /// Upper bound of the cost of a request, in bytes touched.
    pub(crate) fn cost(bio: &Bio) -> u64 {
        if bio.op == Op::Flush { 0 } else { bio.sectors.0.saturating_mul(SECTOR_SIZE) }
    }

    /// Serves a part of one request.
    pub(crate) fn serve(&self, bio: &mut Bio, part: &mut BioProgress) -> Status {
        if bio.op == Op::Flush {
            return Status::Ok;
        }
        if let Some(status) = crate::invalid_bio_status(bio, self.size) {
            return status;
        }
        let start = bio.sector.bytes();
        let (from, now) = (part.done as usize, part.now() as usize);
        match bio.op {
            Op::Read => {
                let at = start + part.done;
                bio.data.produce(from, now, |done, piece| self.read(at + done as u64, piece));
                part.advance(now as u64);
            }
            Op::Write => {
                let (at, mut written) = (start + part.done, Ok(()));
                bio.data.consume(from, now, |done, piece| {
                    written = written.and_then(|()| self.write(at + done as u64, piece));
                });
                if let Err(status) = written {
                    return status;
                }
                part.advance(now as u64);
            }
            Op::Discard | Op::WriteZeroes | Op::Flush => self.zero(start, part),
        }
        Status::Ok
    }
}

pub(crate) struct MemoryDevice {
    id: DeviceId,
    store: Arc<SparseMemory>,
}

impl MemoryDevice {
    /// Creates a device of `size` bytes.
    ///
    /// # Errors
    /// As [`SparseMemory::new`].
    pub(crate) fn new(size: u64) -> Result<MemoryDevice, DeviceControlError> {
        Ok(MemoryDevice { id: DeviceId::new(), store: Arc::new(SparseMemory::new(size)?) })
    }
}

impl Device for MemoryDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, _cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(CpuBudgetedLane::new(MemoryBioHandler(Arc::clone(&self.store)))))
    }

    fn limits(&self) -> Limits {
        Limits { max_discard: MAX_ZERO, max_write_zeroes: MAX_ZERO, ..Limits::new(self.store.size) }
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        self.store.extents(from, len, out, |_| false);
    }

    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        Some(&self.store.shared_disk_state)
    }
}

struct MemoryBioHandler(Arc<SparseMemory>);

impl CpuBioHandler for MemoryBioHandler {
    fn cost(&self, bio: &Bio) -> u64 {
        SparseMemory::cost(bio)
    }

    fn serve(&mut self, bio: &mut Bio, part: &mut BioProgress) -> Status {
        self.0.serve(bio, part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{SingleLaneTestCore, bio_without_data, make_zeroed_segments};
    use proptest::prelude::*;
    use udm_core::Sector;

    /// Three pages, so that requests cross from one to the next.
    const SECTORS: u64 = 3 * PAGE / 512;

    #[derive(Debug, Clone)]
    struct RandomRequest {
        op: Op,
        sector: u64,
        sectors: u64,
        cuts: Vec<usize>,
        seed: u8,
    }

    fn request() -> impl Strategy<Value = RandomRequest> {
        let op = prop_oneof![3 => Just(Op::Write), 3 => Just(Op::Read), 1 => Just(Op::Discard), 1 => Just(Op::WriteZeroes)];
        let sector = prop_oneof![0..SECTORS, (PAGE / 512 - 4)..(PAGE / 512 + 4)];
        (op, sector, 1..40u64, proptest::collection::vec(1..700usize, 0..4), any::<u8>()).prop_map(
            |(op, sector, sectors, cuts, seed)| RandomRequest {
                op,
                sector,
                sectors: sectors.min(SECTORS - sector),
                cuts,
                seed,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// A memory device behaves as a vector of bytes, for any pieces of data, from either of two
        /// cores.
        #[test]
        fn as_a_vector(requests in proptest::collection::vec((request(), 0..2usize), 1..60)) {
            let device = MemoryDevice::new(SECTORS * 512).unwrap();
            let mut cores = [SingleLaneTestCore::over(&device), SingleLaneTestCore::over(&device)];
            let mut model = vec![0u8; (SECTORS * 512) as usize];
            for (r, core) in requests {
                let range = (r.sector * 512) as usize..((r.sector + r.sectors) * 512) as usize;
                let data = if r.op.has_data() { make_zeroed_segments(range.len(), &r.cuts) } else { Default::default() };
                let mut bio = bio_without_data(r.op, r.sector, r.sectors);
                bio.data = data;
                if r.op == Op::Write {
                    let bytes: Vec<u8> = (0..range.len()).map(|i| (i / 3) as u8 ^ r.seed).collect();
                    bio.data.copy_from(&bytes);
                    model[range.clone()].copy_from_slice(&bytes);
                } else if r.op != Op::Read {
                    model[range.clone()].fill(0);
                }
                let bio = cores[core].run(bio);
                prop_assert_eq!(bio.status, Status::Ok);
                if r.op == Op::Read {
                    let mut got = vec![1; range.len()];
                    bio.data.copy_to(&mut got);
                    prop_assert!(got == model[range]);
                }
            }
        }
    }

    #[test]
    fn a_huge_disk_costs_what_is_written() {
        let mut core = SingleLaneTestCore::over(&MemoryDevice::new(MAX_SIZE).unwrap());
        let mut data = make_zeroed_segments(4096, &[]);
        data.fill(7);
        let last = Sector(MAX_SIZE / 512 - 8);
        assert_eq!(core.run(Bio::write(last, Sectors(8), data)).status, Status::Ok);
        let bio = core.run(Bio::read(last, Sectors(8), make_zeroed_segments(4096, &[])));
        assert!(bio.data.iter().all(|b| b.iter().all(|&x| x == 7)));
        let beyond = core.run(Bio::read(last, Sectors(16), make_zeroed_segments(8192, &[])));
        assert_eq!(beyond.status, Status::IoErr);
        for op in [Op::Read, Op::Write] {
            assert_eq!(core.run(bio_without_data(op, 0, 1)).status, Status::Inval, "without data");
        }
    }

    /// Discards of many pages take many short turns, and a read that is submitted meanwhile takes
    /// one.
    #[test]
    fn discards_leave_room_for_others() {
        let mut core = SingleLaneTestCore::over(&MemoryDevice::new(256 << 20).unwrap());
        for page in 0..1024 {
            let mut data = make_zeroed_segments(512, &[]);
            data.fill(1);
            core.run(Bio::write(Sector(page * PAGE / 512), Sectors(1), data));
        }
        let discards =
            (0..120).map(|i| bio_without_data(Op::Discard, i % 4 * MAX_ZERO.0, MAX_ZERO.0)).collect();
        core.submit(discards);
        assert_eq!(core.poll().0.len(), 0, "they take longer than a turn");
        core.submit(vec![Bio::read(Sector(0), Sectors(8), make_zeroed_segments(4096, &[]))]);
        let (done, wake) = core.poll();
        assert_eq!((done.len(), done[0].op, wake), (1, Op::Read, core.now));
        let mut ended = 0;
        while ended < 120 {
            ended += core.poll().0.len();
        }
        let bio = core.run(Bio::read(Sector(0), Sectors(8), make_zeroed_segments(4096, &[])));
        assert!(bio.data.iter().all(|b| b.iter().all(|&x| x == 0)));
    }

    /// Discards of pages that were never written complete at once.
    #[test]
    fn discards_of_nothing_are_done_at_once() {
        let mut core = SingleLaneTestCore::over(&MemoryDevice::new(1 << 40).unwrap());
        core.submit((0..100).map(|i| bio_without_data(Op::Discard, i * MAX_ZERO.0, MAX_ZERO.0)).collect());
        assert_eq!(core.poll().0.len(), 100);
    }

    #[test]
    fn sizes_are_bounded() {
        for size in [0, 511, MAX_SIZE + 1, u64::MAX] {
            assert_eq!(MemoryDevice::new(size).err().unwrap().errno, EINVAL);
        }
    }

    /// Two cores create the same pages at the same time, and the data of both is found.
    #[test]
    fn cores_agree_on_pages() {
        let device = MemoryDevice::new(64 * PAGE).unwrap();
        std::thread::scope(|s| {
            for half in 0..2u64 {
                let device = &device;
                s.spawn(move || {
                    let mut core = SingleLaneTestCore::over(device);
                    for page in 0..64 {
                        let mut data = make_zeroed_segments(512, &[]);
                        data.fill(page as u8 + 1);
                        let sector = Sector(page * PAGE / 512 + half);
                        assert_eq!(core.run(Bio::write(sector, Sectors(1), data)).status, Status::Ok);
                    }
                });
            }
        });
        let mut core = SingleLaneTestCore::over(&device);
        for page in 0..64u64 {
            let bio =
                core.run(Bio::read(Sector(page * PAGE / 512), Sectors(2), make_zeroed_segments(1024, &[])));
            assert!(bio.data.iter().all(|b| b.iter().all(|&x| x == page as u8 + 1)), "page {page}");
        }
    }
}
