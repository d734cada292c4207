//! `null:SIZE,...`: a device that does nothing, with null_blk's parameter names.
//!
//! Parameters:
//!
//! | parameter | meaning |
//! |---|---|
//! | `size`, `bs`, `max_sectors` | the [`Limits`] |
//! | `irqmode` | 0 and 1: a request completes at the next poll; 2: `completion_nsec` after it was submitted |
//! | `submit_queues`, `hw_queue_depth` | requests in flight: `hw_queue_depth` per queue. Each core has a lane of its own. More queues than cores count as one queue per core. With fewer queues, the lanes divide their depth. Further requests are queued |
//! | `queue_mode` | always 2 (multi-queue), as in the kernel: a request-based device, which multipath's `queue_mode` requires |
//! | `memory_backed` | written data can be read: it is stored as by `mem:` |
//! | `mbps`, `badblocks`, `timeout`, `requeue`, `init_hctx` | injected faults: [`InjectedFaults`] |
//! | `cache_size` | written data is in a cache that a power cut empties: [`CachedMemory`] |
//! | `discard`, `fua` | announced, as null_blk does. As there, `discard` and `cache_size` require `memory_backed` |
//!
//! **Data.** Without `memory_backed`, the device drops the data of writes and fills the data of
//! reads with zeroes. null_blk does not touch the data of reads. But a front end reuses buffers for
//! several clients, and a client must not read the data that another client wrote. For a bio
//! without data, such as those of the bench, this costs one test.

use crate::cache::{CACHE_PAGE, CachedMemory};
use crate::faults::InjectedFaults;
use crate::mem::{MAX_ZERO, SparseMemory};
use std::collections::VecDeque;
use std::sync::Arc;
use udm_core::{
    Batch, Bio, BioProgress, CpuBioHandler, CpuBudgetedQueue, Cx, Device, DeviceControlError, DeviceId,
    ExtentKind, Extents, Lane, Limits, Nanos, Op, PowerSwitch, SECTOR_SIZE, Sector, Sectors, SharedDiskState,
    Status, move_batch,
};
use udm_wire::uri::NullParams;

pub(crate) struct NullBlockDevice {
    id: DeviceId,
    params: NullParams,
    backing: NullBackingStore,
    /// Used only if nothing is stored; otherwise the state of the memory is used.
    shared_disk_state: SharedDiskState,
    faults: Option<InjectedFaults>,
}

/// Storage of written data.
#[derive(Clone)]
enum NullBackingStore {
    Discarded,
    Memory(Arc<SparseMemory>),
    CachedMemory(Arc<CachedMemory>),
}

impl NullBackingStore {
    fn store(&self) -> Option<&SparseMemory> {
        match self {
            NullBackingStore::Discarded => None,
            NullBackingStore::Memory(store) => Some(store),
            NullBackingStore::CachedMemory(cached) => Some(&cached.store),
        }
    }
}

impl NullBlockDevice {
    /// Creates a device with these parameters.
    ///
    /// # Errors
    /// With `memory_backed`, EINVAL for a size that no memory device has.
    pub(crate) fn new(params: &NullParams) -> Result<NullBlockDevice, DeviceControlError> {
        let backing = match (params.memory_backed, params.cache_size / CACHE_PAGE) {
            (false, _) => NullBackingStore::Discarded,
            (true, 0) => NullBackingStore::Memory(Arc::new(SparseMemory::new(params.size)?)),
            (true, pages) => NullBackingStore::CachedMemory(Arc::new(CachedMemory::new(params.size, pages)?)),
        };
        let (id, shared_disk_state, faults) =
            (DeviceId::new(), SharedDiskState::stateless(), InjectedFaults::new(&params.faults));
        Ok(NullBlockDevice { id, params: params.clone(), backing, shared_disk_state, faults })
    }

    /// Creates a lane with `depth` tags.
    fn lane(&self, depth: usize) -> Box<dyn Lane> {
        let p = &self.params;
        let work = CpuBudgetedQueue::new(NullBioHandler {
            backing: self.backing.clone(),
            size: self.limits().size,
            discards: p.discard,
        });
        if p.irqmode >= 2 {
            let delay = Nanos(p.completion_nsec);
            return Box::new(NullTimerLane {
                work,
                served: Batch::new(),
                depth,
                delay,
                running: VecDeque::new(),
                waiting: VecDeque::new(),
            });
        }
        let (ready, waiting) = (Batch::new(), VecDeque::new());
        Box::new(NullPolledLane { work, depth, ready, waiting, queued: false })
    }
}

impl Device for NullBlockDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let p = &self.params;
        let (queues, depth) = (p.submit_queues as usize, p.hw_queue_depth as usize);
        let depth = match p.queue {
            // The queue in front of the device limits the requests in flight.
            Some(_) => usize::MAX,
            None => depth.min((queues * depth).div_ceil(cx.cores())).max(1),
        };
        let delay = Nanos(if p.irqmode >= 2 { p.completion_nsec } else { 0 });
        match &self.faults {
            // The faulty lane limits the requests in flight.
            Some(faults) => faults.open(depth, delay, cx, |_| Ok(self.lane(usize::MAX))),
            None => Ok(self.lane(depth)),
        }
    }

    fn limits(&self) -> Limits {
        let p = &self.params;
        let block = u64::from(p.bs);
        let zero = if p.memory_backed { MAX_ZERO } else { Sectors(u64::from(u32::MAX)) };
        let base = Limits::new(Sectors::from_bytes(p.size / block * block));
        Limits {
            logical_block: p.bs,
            physical_block: p.bs,
            io_min: p.bs,
            max_sectors: p.max_sectors.map_or(base.max_sectors, |n| Sectors(u64::from(n).max(block / 512))),
            max_discard: if p.discard { zero } else { Sectors::ZERO },
            max_write_zeroes: zero,
            write_cache: p.cache_size > 0,
            fua: p.fua,
            ..base
        }
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        match &self.backing {
            NullBackingStore::Discarded => out.push(len, ExtentKind::Data),
            NullBackingStore::Memory(store) => store.extents(from, len, out, |_| false),
            NullBackingStore::CachedMemory(cached) => {
                cached.store.extents(from, len, out, |range| cached.has(range));
            }
        }
    }

    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        Some(self.backing.store().map_or(&self.shared_disk_state, |store| &store.shared_disk_state))
    }

    fn power(&self) -> Option<&dyn PowerSwitch> {
        match &self.backing {
            NullBackingStore::CachedMemory(cached) => Some(&**cached),
            NullBackingStore::Discarded | NullBackingStore::Memory(_) => None,
        }
    }
}

struct NullBioHandler {
    backing: NullBackingStore,
    size: Sectors,
    discards: bool,
}

impl NullBioHandler {
    /// Completes `bio` with success if that needs no work, and returns true. Without a store, only
    /// these need work: reads with data, discards, and ranges beyond the end. For them it returns
    /// false.
    #[inline(always)]
    fn complete_inline(&self, bio: &mut Bio) -> bool {
        let fills = bio.op == Op::Read && !bio.data.is_empty();
        let end = bio.sector.0.wrapping_add(bio.sectors.0);
        let fits = (bio.sector.0 <= end) & (end <= self.size.0) & (bio.op != Op::Discard);
        let complete_inline = fits & !fills;
        if complete_inline {
            bio.end_with(Status::Ok);
        }
        complete_inline
    }
}

impl CpuBioHandler for NullBioHandler {
    #[inline]
    fn cost(&self, bio: &Bio) -> u64 {
        match &self.backing {
            NullBackingStore::Discarded if bio.op == Op::Read && !bio.data.is_empty() => {
                bio.sectors.0.saturating_mul(SECTOR_SIZE)
            }
            NullBackingStore::Discarded => 0,
            NullBackingStore::Memory(_) => SparseMemory::cost(bio),
            NullBackingStore::CachedMemory(cached) => cached.cost(bio),
        }
    }

    #[inline]
    fn length(&self, bio: &Bio) -> u64 {
        match &self.backing {
            NullBackingStore::Discarded | NullBackingStore::Memory(_) => {
                bio.sectors.0.saturating_mul(SECTOR_SIZE)
            }
            NullBackingStore::CachedMemory(cached) => cached.length(bio),
        }
    }

    /// Serves a part of one request. Without a store it moves no data, but zeroes the data of a
    /// read, because its buffer may hold data of an earlier request.
    #[inline]
    fn serve(&mut self, bio: &mut Bio, part: &mut BioProgress) -> Status {
        match &self.backing {
            _ if bio.op == Op::Discard && !self.discards => Status::NotSupp,
            NullBackingStore::Discarded
                if bio.sector.0.checked_add(bio.sectors.0).is_none_or(|end| end > self.size.0) =>
            {
                Status::IoErr
            }
            NullBackingStore::Discarded if bio.op == Op::Read && !bio.data.is_empty() => {
                let now = part.now();
                bio.data.fill_at(part.done as usize, now as usize, 0);
                part.advance(now);
                Status::Ok
            }
            NullBackingStore::Discarded => {
                part.finish();
                Status::Ok
            }
            NullBackingStore::Memory(store) => store.serve(bio, part),
            NullBackingStore::CachedMemory(cached) => cached.serve(bio, part),
        }
    }
}

/// Lane for irqmode 0 and 1: a request completes at the next poll.
struct NullPolledLane {
    work: CpuBudgetedQueue<NullBioHandler>,
    depth: usize,
    ready: Batch,
    waiting: VecDeque<Box<Bio>>,
    /// A bio waits in `waiting` or in `work`.
    queued: bool,
}

impl Lane for NullPolledLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let fits = !self.queued && self.ready.len() + batch.len() <= self.depth;
        if fits && self.complete_inline(batch) {
            move_batch(batch, &mut self.ready);
        } else {
            self.submit_work(batch, cx);
        }
        // Completed bios need a poll, and no external event will cause one.
        cx.wake_now();
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        move_batch(&mut self.ready, done);
        if self.queued {
            self.run_pending(cx);
        }
    }
}

impl NullPolledLane {
    /// Completes all of `batch`. Returns false if a bio in it needs work.
    #[inline(always)]
    fn complete_inline(&self, batch: &mut Batch) -> bool {
        let server = self.work.server();
        matches!(server.backing, NullBackingStore::Discarded)
            && batch.iter_mut().all(|bio| server.complete_inline(bio))
    }

    #[inline(never)]
    fn submit_work(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.work.take(batch, cx);
        self.waiting.extend(batch.drain(..));
        self.start();
    }

    #[cold]
    fn run_pending(&mut self, cx: &mut Cx<'_>) {
        let mut served = Batch::new();
        self.work.run_pending(&mut served, cx);
        self.waiting.extend(served);
        self.start();
        cx.wake_now();
    }

    /// Moves as many waiting bios to `ready` as the depth allows.
    fn start(&mut self) {
        let room = self.depth - self.ready.len();
        self.ready.extend(self.waiting.drain(..room.min(self.waiting.len())));
        self.queued = !self.waiting.is_empty() || !self.work.is_idle();
    }
}

/// Lane for irqmode 2: a request completes `delay` after its start. All delays are equal, so
/// requests complete in the order of their starts.
struct NullTimerLane {
    work: CpuBudgetedQueue<NullBioHandler>,
    /// Bios served in the current call.
    served: Batch,
    depth: usize,
    delay: Nanos,
    running: VecDeque<(Nanos, Box<Bio>)>,
    waiting: VecDeque<Box<Bio>>,
}

impl Lane for NullTimerLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.work.take(batch, cx);
        self.waiting.extend(batch.drain(..));
        self.start(cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        while self.running.front().is_some_and(|(due, _)| *due <= cx.now()) {
            done.extend(self.running.pop_front().map(|(_, bio)| bio));
        }
        self.work.run_pending(&mut self.served, cx);
        self.waiting.extend(self.served.drain(..));
        self.start(cx);
    }
}

impl NullTimerLane {
    fn start(&mut self, cx: &mut Cx<'_>) {
        let room = self.depth - self.running.len();
        let due = cx.now() + self.delay;
        self.running.extend(self.waiting.drain(..room.min(self.waiting.len())).map(|bio| (due, bio)));
        if let Some((due, _)) = self.running.front() {
            cx.wake_at(*due);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{SingleLaneTestCore, make_zeroed_segments};
    use udm_core::Sector;

    fn null(words: &str) -> NullBlockDevice {
        let udm_wire::uri::DeviceUri::Null(params) =
            udm_wire::uri::parse_device_uri(&format!("null:{words}")).unwrap()
        else {
            panic!("not null: {words}")
        };
        NullBlockDevice::new(&params).unwrap()
    }

    fn bios(n: usize) -> Batch {
        (0..n as u64).map(|i| Bio::read(Sector(i), Sectors(1), Default::default())).collect()
    }

    #[test]
    fn done_at_the_next_poll_in_order_of_depth() {
        for irqmode in 0..2 {
            let device = null(&format!("size=1M,hw_queue_depth=4,irqmode={irqmode}"));
            let mut core = SingleLaneTestCore::over(&device);
            assert_eq!(core.submit(bios(3)), core.now);
            assert_eq!(core.poll().0.len(), 3);
            core.submit(bios(10));
            let sizes: Vec<_> = (0..4).map(|_| core.poll().0.len()).collect();
            assert_eq!(sizes, [4, 4, 2, 0], "what is beyond the depth is parked");
            assert_eq!(core.poll().1, Nanos::NEVER);
        }
    }

    #[test]
    fn lanes_share_the_depth_of_fewer_queues() {
        for (queues, cores, want) in [(1, 1, 64), (1, 2, 32), (2, 2, 64), (4, 2, 64), (1, 100, 1)] {
            let device = null(&format!("size=1M,submit_queues={queues},hw_queue_depth=64"));
            let mut core = SingleLaneTestCore::one_of(&device, cores);
            core.submit(bios(100));
            assert_eq!(core.poll().0.len(), want, "{queues} queues, {cores} cores");
            while !core.poll().0.is_empty() {}
        }
    }

    #[test]
    fn the_timer_holds_requests_for_completion_nsec() {
        let mut core =
            SingleLaneTestCore::over(&null("size=1M,hw_queue_depth=2,irqmode=2,completion_nsec=1000"));
        assert_eq!(core.submit(bios(3)), Nanos(1001));
        core.now = Nanos(1000);
        let (done, wake) = core.poll();
        assert_eq!((done.len(), wake), (0, Nanos(1001)));
        core.now = Nanos(1500);
        let (done, wake) = core.poll();
        assert_eq!((done.len(), wake), (2, Nanos(2500)), "the third starts when there is room");
        core.now = Nanos(2500);
        let (done, wake) = core.poll();
        assert_eq!((done.len(), wake), (1, Nanos::NEVER));
    }

    /// Data that another client left in a recycled buffer never reaches a reader.
    #[test]
    fn reads_with_data_are_zeroes() {
        let mut core = SingleLaneTestCore::over(&null("size=1M"));
        let mut data = make_zeroed_segments(1024, &[100]);
        data.fill(0x55);
        let bio = core.run(Bio::read(Sector(0), Sectors(2), data));
        assert!(bio.data.iter().all(|b| b.iter().all(|&x| x == 0)));
        let mut data = make_zeroed_segments(512, &[]);
        data.fill(0x55);
        let bio = core.run(Bio::write(Sector(0), Sectors(1), data));
        assert!(bio.data.iter().all(|b| b.iter().all(|&x| x == 0x55)), "a write's data stays as it is");
    }

    #[test]
    fn a_failed_bio_comes_back_clean() {
        let mut core = SingleLaneTestCore::over(&null("size=1M"));
        let mut bio = bios(1).pop().unwrap();
        bio.end_with(Status::IoErr);
        assert_eq!(core.run(bio).status, Status::Ok);
    }

    #[test]
    fn memory_backed_remembers() {
        let mut core = SingleLaneTestCore::over(&null("size=1M,memory_backed=1"));
        let mut data = make_zeroed_segments(512, &[]);
        data.fill(9);
        core.run(Bio::write(Sector(5), Sectors(1), data));
        let bio = core.run(Bio::read(Sector(5), Sectors(1), make_zeroed_segments(512, &[])));
        assert!(bio.data.iter().all(|b| b.iter().all(|&x| x == 9)));
    }

    #[test]
    fn parameters_show_in_the_limits() {
        let l = null("size=1M,bs=4096,max_sectors=64,memory_backed=1,discard=1").limits();
        assert_eq!((l.size, l.logical_block, l.max_sectors), (Sectors(2048), 4096, Sectors(64)));
        assert!(l.request_stackable && l.max_discard > Sectors::ZERO);
        assert_eq!(null("size=1M").limits().max_discard, Sectors::ZERO);
    }
}
