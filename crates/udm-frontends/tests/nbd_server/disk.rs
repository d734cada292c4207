//! A memory disk for tests that can be slow, answer out of order, fail, and hold requests.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use udm_core::errno::ENXIO;
use udm_core::{
    Batch, Bio, BioFlags, Cx, Device, DeviceControlError, DeviceId, ExtentKind, Extents, Lane, Limits, Nanos,
    Op, Sector, Sectors, Status,
};

/// Time at which bios are completed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CompletionOrder {
    /// In the turn in which they are submitted.
    AtOnce,
    /// Later, a few at a time, in any order.
    Shuffled,
}

pub struct TestDisk {
    id: DeviceId,
    limits: Limits,
    shared: Arc<DiskShared>,
}

struct DiskShared {
    data: Mutex<Vec<u8>>,
    seen: Mutex<Vec<(Op, BioFlags)>>,
    order: CompletionOrder,
    /// The logical block size, set when the first lane is opened.
    block: AtomicUsize,
    zeroes: bool,
    discards: bool,
    bad: Sector,
    closed: AtomicBool,
    /// Block-status queries hang.
    dumb: AtomicBool,
    held: AtomicUsize,
    /// The only core that can open the disk.
    only_on: Option<u16>,
}

impl TestDisk {
    /// Creates a disk of `size` bytes, filled with a pattern ([`pattern`]). Its last sector can be
    /// neither read nor written.
    pub fn new(size: u64, order: CompletionOrder) -> TestDisk {
        let sectors = Sectors::from_bytes(size);
        let shared = DiskShared {
            data: Mutex::new((0..size).map(pattern).collect()),
            seen: Mutex::default(),
            order,
            block: AtomicUsize::new(512),
            zeroes: true,
            discards: true,
            bad: Sector(sectors.0 - 1),
            closed: AtomicBool::new(false),
            dumb: AtomicBool::new(false),
            held: AtomicUsize::new(0),
            only_on: None,
        };
        TestDisk { id: DeviceId::new(), limits: Limits::new(sectors), shared: Arc::new(shared) }
    }

    /// Removes the support of write-zeroes.
    pub fn without_zeroes(mut self) -> TestDisk {
        Arc::get_mut(&mut self.shared).unwrap().zeroes = false;
        self
    }

    /// Fails discards, although the limits announce them: as a device whose table changed after its
    /// clients connected.
    pub fn without_discards(mut self) -> TestDisk {
        Arc::get_mut(&mut self.shared).unwrap().discards = false;
        self
    }

    /// Lets only core `core` open the disk.
    pub fn only_on(mut self, core: u16) -> TestDisk {
        Arc::get_mut(&mut self.shared).unwrap().only_on = Some(core);
        self
    }

    pub fn limits_mut(&mut self) -> &mut Limits {
        &mut self.limits
    }

    /// Holds all requests until `release_requests`.
    pub fn hold_requests(&self) {
        self.shared.closed.store(true, Ordering::Release);
    }

    pub fn release_requests(&self) {
        self.shared.closed.store(false, Ordering::Release);
    }

    /// Lets block-status queries hang, or answers them again.
    pub fn ignore_extent_queries(&self, dumb: bool) {
        self.shared.dumb.store(dumb, Ordering::Release);
    }

    /// Number of bios that have not completed.
    pub fn held(&self) -> usize {
        self.shared.held.load(Ordering::Acquire)
    }

    /// Requests to the disk since the last call.
    pub fn seen(&self) -> Vec<(Op, BioFlags)> {
        std::mem::take(&mut self.shared.seen.lock().unwrap())
    }
}

/// Byte `at` of a new disk.
pub fn pattern(at: u64) -> u8 {
    (at / 512 * 7 + at % 253) as u8
}

impl Device for TestDisk {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        if self.shared.only_on.is_some_and(|core| core != cx.core().0) {
            return Err(DeviceControlError::new(ENXIO, "not on this core"));
        }
        self.shared.block.store(self.limits.logical_block as usize, Ordering::Release);
        Ok(Box::new(DiskLane { shared: self.shared.clone(), held: Batch::new() }))
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    /// Every third run of 8 sectors is a hole, even if it was written.
    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        while self.shared.dumb.load(Ordering::Acquire) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let mut at = from.0;
        while at < from.0 + len.0 {
            let now = (8 - at % 8).min(from.0 + len.0 - at);
            out.push(Sectors(now), if at / 8 % 3 == 2 { ExtentKind::Hole } else { ExtentKind::Data });
            at += now;
        }
    }
}

struct DiskLane {
    shared: Arc<DiskShared>,
    held: Batch,
}

impl DiskShared {
    fn act(&self, bio: &mut Bio) -> Status {
        self.seen.lock().unwrap().push((bio.op, bio.flags));
        if bio.op == Op::Flush {
            return Status::Ok;
        }
        let data = &mut *self.data.lock().unwrap();
        let range = bio.sector.bytes() as usize..bio.end().bytes() as usize;
        assert!(range.end <= data.len() && !range.is_empty(), "{bio:?} is out of range");
        let block = self.block.load(Ordering::Acquire);
        assert!(range.start.is_multiple_of(block) && range.end.is_multiple_of(block), "{bio:?} cuts a block");
        match bio.op {
            Op::WriteZeroes if !self.zeroes => return Status::NotSupp,
            Op::Discard if !self.discards => return Status::NotSupp,
            Op::Read | Op::Write => assert_eq!(bio.data.len(), range.len(), "{bio:?}"),
            _ => assert!(bio.data.is_empty(), "{bio:?}"),
        }
        // A disk that fails half-way has changed the buffer.
        let fails = range.end > self.bad.bytes() as usize && bio.op.has_data();
        match bio.op {
            Op::Read => drop(bio.data.copy_from(&data[range])),
            Op::Write if !fails => drop(bio.data.copy_to(&mut data[range])),
            Op::WriteZeroes => data[range].fill(0),
            _ => {}
        }
        if fails { Status::Medium } else { Status::Ok }
    }
}

impl Lane for DiskLane {
    fn submit(&mut self, batch: &mut Batch, _: &mut Cx<'_>) {
        self.shared.held.fetch_add(batch.len(), Ordering::AcqRel);
        self.held.append(batch);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let closed = self.shared.closed.load(Ordering::Acquire);
        let all = self.held.len();
        let n = match self.shared.order {
            _ if closed => 0,
            CompletionOrder::AtOnce => all,
            CompletionOrder::Shuffled => all.div_ceil(3),
        };
        for _ in 0..n {
            let at = if self.shared.order == CompletionOrder::Shuffled {
                rand::RngExt::random_range(cx.rng(), 0..self.held.len())
            } else {
                0
            };
            let mut bio = self.held.remove(at);
            let status = self.shared.act(&mut bio);
            bio.end_with(status);
            done.push(bio);
        }
        self.shared.held.fetch_sub(n, Ordering::AcqRel);
        if !self.held.is_empty() {
            cx.wake_at(cx.now() + Nanos(if closed { 1_000_000 } else { 20_000 }));
        }
    }
}
