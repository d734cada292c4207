//! A disk in memory that fails or holds requests when a test asks for it.

use super::lock_test_mutex;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use udm_core::{
    Batch, Bio, BioFlags, Cx, Device, DeviceControlError, DeviceId, DrainMode, ExtentKind, Extents,
    GrowResultCallback, Lane, Limits, Op, SECTOR_SIZE, Sector, Sectors, SharedDiskState, Status,
};

/// A request that the disk executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedTestDiskRequest {
    /// The operation.
    pub op: Op,
    /// Flags of the request.
    pub flags: BioFlags,
    /// First sector.
    pub sector: u64,
    /// Length in sectors.
    pub sectors: u64,
}

type TestDiskStatusFn = Box<dyn FnMut(&Bio) -> Status + Send>;

#[derive(Default)]
struct InMemoryTestDiskState {
    /// The content; `None` for a disk that stores nothing.
    bytes: Option<Vec<u8>>,
    verdict: Option<TestDiskStatusFn>,
    holding: bool,
    permits: usize,
    reverse: bool,
    hand_back: bool,
    waiting: usize,
    refuse: Option<DeviceControlError>,
    opened: usize,
    retries: usize,
    log: Vec<LoggedTestDiskRequest>,
    growths: VecDeque<(Sectors, GrowResultCallback)>,
    /// Holes as the disk reports them: first sector and end, in order.
    holes: Vec<(u64, u64)>,
}

/// A disk in memory. A request takes effect when it completes: in the first `poll` after its
/// submission, unless the disk holds it.
pub struct TestDisk {
    id: DeviceId,
    shared_disk_state: SharedDiskState,
    limits: Mutex<Limits>,
    state: Arc<Mutex<InMemoryTestDiskState>>,
}

impl TestDisk {
    /// A disk of `sectors` zeroed sectors.
    #[must_use]
    pub fn new(sectors: u64) -> Arc<TestDisk> {
        let bytes = vec![0; usize::try_from(sectors * SECTOR_SIZE).expect("a disk that fits memory")];
        TestDisk::make(Limits::new(Sectors(sectors)), Some(bytes))
    }

    /// A disk with `limits` that stores nothing. Reads leave their data unchanged.
    #[must_use]
    pub fn null(limits: Limits) -> Arc<TestDisk> {
        TestDisk::make(limits, None)
    }

    fn make(limits: Limits, bytes: Option<Vec<u8>>) -> Arc<TestDisk> {
        let state = InMemoryTestDiskState { bytes, ..InMemoryTestDiskState::default() };
        Arc::new(TestDisk {
            id: DeviceId::new(),
            shared_disk_state: SharedDiskState::default(),
            limits: Mutex::new(limits),
            state: Arc::new(Mutex::new(state)),
        })
    }

    fn state(&self) -> MutexGuard<'_, InMemoryTestDiskState> {
        lock_test_mutex(&self.state)
    }

    /// Changes the limits that the disk reports from now on.
    pub fn set_limits(&self, change: impl FnOnce(&mut Limits)) {
        change(&mut lock_test_mutex(&self.limits));
    }

    /// From now on every request fails with `status`, without effect. [`Status::Ok`] heals the
    /// disk.
    pub fn fail(&self, status: Status) {
        self.state().verdict = if status.is_ok() { None } else { Some(Box::new(move |_| status)) };
    }

    /// From now on `verdict` decides the status of each request. A request takes effect only if the
    /// status is [`Status::Ok`].
    pub fn set_verdict(&self, verdict: impl FnMut(&Bio) -> Status + Send + 'static) {
        self.state().verdict = Some(Box::new(verdict));
    }

    /// From now on the disk reports these holes: first sector and end, in order.
    pub fn set_holes(&self, holes: &[(u64, u64)]) {
        self.state().holes = holes.to_vec();
    }

    /// While true, the disk holds all requests. False releases them.
    pub fn hold(&self, hold: bool) {
        let mut state = self.state();
        state.holding = hold;
        state.permits = 0;
    }

    /// Lets `n` more requests complete while the disk holds.
    pub fn release(&self, n: usize) {
        self.state().permits += n;
    }

    /// If true, the newest request completes first.
    pub fn reverse(&self, reverse: bool) {
        self.state().reverse = reverse;
    }

    /// If true, a no-flush drain hands held requests back and a flushing drain fails them, as a
    /// multipath without paths does.
    pub fn hand_back(&self, hand_back: bool) {
        self.state().hand_back = hand_back;
    }

    /// If set, opening a lane fails with `error`.
    pub fn refuse(&self, error: Option<DeviceControlError>) {
        self.state().refuse = error;
    }

    /// Number of requests that the disk has taken and not completed.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.state().waiting
    }

    /// Number of open lanes.
    #[must_use]
    pub fn opened(&self) -> usize {
        self.state().opened
    }

    /// Number of calls of [`Device::retry_now`].
    #[must_use]
    pub fn retries(&self) -> usize {
        self.state().retries
    }

    /// Number of grow requests that wait for an answer.
    #[must_use]
    pub fn growths(&self) -> usize {
        self.state().growths.len()
    }

    /// Answers the oldest grow request. Without `refuse`, the disk grows to the requested size;
    /// otherwise the request fails with this error. Returns the requested size.
    ///
    /// # Panics
    /// If there is no grow request.
    pub fn grow_now(&self, refuse: Option<DeviceControlError>) -> Sectors {
        let (size, then) = self.state().growths.pop_front().expect("somebody has asked");
        if refuse.is_none() {
            lock_test_mutex(&self.limits).size = size;
            if let Some(bytes) = &mut self.state().bytes {
                bytes.resize((size.0 * SECTOR_SIZE) as usize, 0);
            }
        }
        then(refuse.map_or(Ok(()), Err));
        size
    }

    /// Takes the log of executed requests.
    #[must_use]
    pub fn take_log(&self) -> Vec<LoggedTestDiskRequest> {
        std::mem::take(&mut self.state().log)
    }

    /// The bytes of `sectors` sectors from `sector`.
    ///
    /// # Panics
    /// If the disk stores nothing or is shorter.
    #[must_use]
    pub fn bytes(&self, sector: u64, sectors: u64) -> Vec<u8> {
        let state = self.state();
        let bytes = state.bytes.as_ref().expect("a disk that stores");
        bytes[(sector * SECTOR_SIZE) as usize..((sector + sectors) * SECTOR_SIZE) as usize].to_vec()
    }

    /// Writes `data` at `sector` without a lane.
    ///
    /// # Panics
    /// If the disk stores nothing or is shorter.
    pub fn put(&self, sector: u64, data: &[u8]) {
        let at = (sector * SECTOR_SIZE) as usize;
        self.state().bytes.as_mut().expect("a disk that stores")[at..at + data.len()].copy_from_slice(data);
    }
}

impl Device for TestDisk {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, _cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let mut state = self.state();
        if let Some(error) = state.refuse.clone() {
            return Err(error);
        }
        state.opened += 1;
        Ok(Box::new(TestDiskLane { state: Arc::clone(&self.state), queue: VecDeque::new() }))
    }

    fn retry_now(&self) {
        self.state().retries += 1;
    }

    fn limits(&self) -> Limits {
        *lock_test_mutex(&self.limits)
    }

    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        Some(&self.shared_disk_state)
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let (mut at, end) = (from.0, from.0 + len.0);
        for &(start, until) in &self.state().holes {
            let (start, until) = (start.clamp(at, end), until.clamp(at, end));
            out.push(Sectors(start - at), ExtentKind::Data);
            out.push(Sectors(until - start), ExtentKind::Hole);
            at = until;
        }
        out.push(Sectors(end - at), ExtentKind::Data);
    }

    /// Queues the request until [`TestDisk::grow_now`].
    fn grow(&self, size: Sectors, then: GrowResultCallback) {
        self.state().growths.push_back((size, then));
    }
}

struct TestDiskLane {
    state: Arc<Mutex<InMemoryTestDiskState>>,
    queue: VecDeque<Box<Bio>>,
}

impl InMemoryTestDiskState {
    fn act(&mut self, bio: &mut Bio) {
        self.log.push(LoggedTestDiskRequest {
            op: bio.op,
            flags: bio.flags,
            sector: bio.sector.0,
            sectors: bio.sectors.0,
        });
        bio.status = self.verdict.as_mut().map_or(Status::Ok, |v| v(bio));
        let Some(bytes) = self.bytes.as_mut().filter(|_| bio.status.is_ok()) else { return };
        let range = bio.sector.bytes() as usize..bio.end().bytes() as usize;
        assert!(range.end <= bytes.len(), "a request beyond the end: {bio:?}");
        match bio.op {
            Op::Read => assert_eq!(bio.data.copy_from(&bytes[range.clone()]), range.len()),
            Op::Write => assert_eq!(bio.data.copy_to(&mut bytes[range.clone()]), range.len()),
            Op::Discard | Op::WriteZeroes => bytes[range].fill(0),
            Op::Flush => {}
        }
    }
}

impl Lane for TestDiskLane {
    fn submit(&mut self, batch: &mut Batch, _cx: &mut Cx<'_>) {
        lock_test_mutex(&self.state).waiting += batch.len();
        for bio in &*batch {
            assert!(bio.is_in_flight(), "a bio that was not started: {bio:?}");
        }
        self.queue.extend(batch.drain(..));
    }

    fn poll(&mut self, done: &mut Batch, _cx: &mut Cx<'_>) {
        let mut state = lock_test_mutex(&self.state);
        while !self.queue.is_empty() {
            if state.holding {
                if state.permits == 0 {
                    return;
                }
                state.permits -= 1;
            }
            let next = if state.reverse { self.queue.pop_back() } else { self.queue.pop_front() };
            let mut bio = next.expect("the queue is not empty");
            state.waiting -= 1;
            state.act(&mut bio);
            done.push(bio);
        }
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, _cx: &mut Cx<'_>) {
        let mut state = lock_test_mutex(&self.state);
        if !state.hand_back {
            return;
        }
        match how {
            DrainMode::NoFlush => {
                state.waiting -= self.queue.len();
                back.extend(self.queue.drain(..));
            }
            DrainMode::Flush | DrainMode::End => {
                state.verdict = Some(Box::new(|_| Status::IoErr));
                state.holding = false;
            }
        }
    }
}

impl Drop for TestDiskLane {
    fn drop(&mut self) {
        lock_test_mutex(&self.state).opened -= 1;
    }
}
