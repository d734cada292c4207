//! What the tests of targets share: disks in memory that fail and hold on demand, cores stepped by hand, a resolver of fixed names.
//!
//! Not part of the crate's interface. Locks and allocates freely: it stands in for what is below and above the data path, not for the data path.

use crate::target::{DeviceRef, LookupError, Resolver};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use udm_core::{
    Batch, Bio, BioFlags, Buf, CoreId, CoreState, Cores, Cx, DevNo, Device, DeviceId, Drain, Lane,
    LaneCommand, Limits, Nanos, Op, OpenError, SECTOR_SIZE, Sector, Sectors, Status,
};

/// What a disk was asked to do, in the order in which it did it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The operation.
    pub op: Op,
    /// Its flags.
    pub flags: BioFlags,
    /// First sector.
    pub sector: u64,
    /// Length in sectors.
    pub sectors: u64,
}

type Verdict = Box<dyn FnMut(&Bio) -> Status + Send>;

#[derive(Default)]
struct DiskState {
    /// `None` for a disk that stores nothing.
    bytes: Option<Vec<u8>>,
    verdict: Option<Verdict>,
    holding: bool,
    permits: usize,
    reverse: bool,
    hand_back: bool,
    waiting: usize,
    refuse: Option<OpenError>,
    opened: usize,
    log: Vec<Seen>,
}

/// A disk in memory. Requests take effect when they finish: in the first `poll` behind their submission, unless the disk is told to hold them.
pub struct TestDisk {
    id: DeviceId,
    limits: Mutex<Limits>,
    state: Arc<Mutex<DiskState>>,
}

impl TestDisk {
    /// A disk of `sectors` zeroed sectors.
    #[must_use]
    pub fn new(sectors: u64) -> Arc<TestDisk> {
        let bytes = vec![0; usize::try_from(sectors * SECTOR_SIZE).expect("a disk that fits memory")];
        TestDisk::make(Limits::new(Sectors(sectors)), Some(bytes))
    }

    /// A disk with `limits` that stores nothing; reads leave their data alone.
    #[must_use]
    pub fn null(limits: Limits) -> Arc<TestDisk> {
        TestDisk::make(limits, None)
    }

    fn make(limits: Limits, bytes: Option<Vec<u8>>) -> Arc<TestDisk> {
        let state = DiskState { bytes, ..DiskState::default() };
        Arc::new(TestDisk {
            id: DeviceId::new(),
            limits: Mutex::new(limits),
            state: Arc::new(Mutex::new(state)),
        })
    }

    fn state(&self) -> MutexGuard<'_, DiskState> {
        lock(&self.state)
    }

    /// Changes the limits that it reports from now on.
    pub fn set_limits(&self, change: impl FnOnce(&mut Limits)) {
        change(&mut lock(&self.limits));
    }

    /// Every request ends with `status` from now on, without effect; [`Status::Ok`] heals the disk.
    pub fn fail(&self, status: Status) {
        self.state().verdict = if status.is_ok() { None } else { Some(Box::new(move |_| status)) };
    }

    /// Each request ends with what `verdict` says of it; without effect unless that is [`Status::Ok`].
    pub fn judge(&self, verdict: impl FnMut(&Bio) -> Status + Send + 'static) {
        self.state().verdict = Some(Box::new(verdict));
    }

    /// While true, requests stay in the disk. False lets all go.
    pub fn hold(&self, hold: bool) {
        let mut state = self.state();
        state.holding = hold;
        state.permits = 0;
    }

    /// Lets `n` more requests finish while the disk holds.
    pub fn release(&self, n: usize) {
        self.state().permits += n;
    }

    /// Finishes the newest request first.
    pub fn reverse(&self, reverse: bool) {
        self.state().reverse = reverse;
    }

    /// While true, requests that are held are handed back by a no-flush drain and failed by a flushing one, as a multipath
    /// without paths does.
    pub fn hand_back(&self, hand_back: bool) {
        self.state().hand_back = hand_back;
    }

    /// Lanes opened from now on fail to open with `error`.
    pub fn refuse(&self, error: Option<OpenError>) {
        self.state().refuse = error;
    }

    /// How many requests it has taken and not finished.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.state().waiting
    }

    /// How many lanes are open.
    #[must_use]
    pub fn opened(&self) -> usize {
        self.state().opened
    }

    /// Takes the list of what it was asked to do.
    #[must_use]
    pub fn take_log(&self) -> Vec<Seen> {
        std::mem::take(&mut self.state().log)
    }

    /// The bytes of `sectors` sectors from `sector`.
    ///
    /// # Panics
    /// When the disk stores nothing or is shorter.
    #[must_use]
    pub fn bytes(&self, sector: u64, sectors: u64) -> Vec<u8> {
        let state = self.state();
        let bytes = state.bytes.as_ref().expect("a disk that stores");
        bytes[(sector * SECTOR_SIZE) as usize..((sector + sectors) * SECTOR_SIZE) as usize].to_vec()
    }

    /// Puts `data` at `sector` behind the back of every lane.
    ///
    /// # Panics
    /// When the disk stores nothing or is shorter.
    pub fn put(&self, sector: u64, data: &[u8]) {
        let at = (sector * SECTOR_SIZE) as usize;
        self.state().bytes.as_mut().expect("a disk that stores")[at..at + data.len()].copy_from_slice(data);
    }
}

impl Device for TestDisk {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, _cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        let mut state = self.state();
        if let Some(error) = state.refuse.clone() {
            return Err(error);
        }
        state.opened += 1;
        Ok(Box::new(DiskLane { state: Arc::clone(&self.state), queue: VecDeque::new() }))
    }

    fn limits(&self) -> Limits {
        *lock(&self.limits)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

struct DiskLane {
    state: Arc<Mutex<DiskState>>,
    queue: VecDeque<Box<Bio>>,
}

impl DiskState {
    fn act(&mut self, bio: &mut Bio) {
        self.log.push(Seen { op: bio.op, flags: bio.flags, sector: bio.sector.0, sectors: bio.sectors.0 });
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

impl Lane for DiskLane {
    fn submit(&mut self, batch: &mut Batch, _cx: &mut Cx<'_>) {
        lock(&self.state).waiting += batch.len();
        for bio in &*batch {
            assert!(bio.is_in_flight(), "a bio that was not started: {bio:?}");
        }
        self.queue.extend(batch.drain(..));
    }

    fn poll(&mut self, done: &mut Batch, _cx: &mut Cx<'_>) {
        let mut state = lock(&self.state);
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

    fn drain(&mut self, how: Drain, back: &mut Batch, _cx: &mut Cx<'_>) {
        let mut state = lock(&self.state);
        if !state.hand_back {
            return;
        }
        match how {
            Drain::NoFlush => {
                state.waiting -= self.queue.len();
                back.extend(self.queue.drain(..));
            }
            Drain::Flush => {
                state.verdict = Some(Box::new(|_| Status::IoErr));
                state.holding = false;
            }
        }
    }
}

impl Drop for DiskLane {
    fn drop(&mut self) {
        lock(&self.state).opened -= 1;
    }
}

/// Cores on one thread, stepped by hand.
pub struct TestWorld {
    cores: Vec<CoreState>,
    mail: Arc<TestCores>,
    /// The time, for the test to move on.
    pub now: Nanos,
    /// When the lanes asked to be polled next, over all steps since the test last set it to [`Nanos::NEVER`].
    pub wake: Nanos,
}

/// The inboxes of a [`TestWorld`].
#[derive(Default)]
pub struct TestCores {
    boxes: Vec<Mutex<VecDeque<(DeviceId, LaneCommand)>>>,
}

impl Cores for TestCores {
    fn broadcast(&self, device: DeviceId, command: LaneCommand) {
        for inbox in &self.boxes {
            lock(inbox).push_back((device, command.clone()));
        }
    }
}

impl TestWorld {
    /// A world of `cores` cores at time 0.
    #[must_use]
    pub fn new(cores: usize) -> TestWorld {
        let state = |n: usize| CoreState::new(CoreId(n as u16), cores, n as u64, None);
        let boxes = (0..cores).map(|_| Mutex::default()).collect();
        TestWorld {
            cores: (0..cores).map(state).collect(),
            mail: Arc::new(TestCores { boxes }),
            now: Nanos(0),
            wake: Nanos::NEVER,
        }
    }

    /// Its inboxes, for those that send commands.
    #[must_use]
    pub fn cores(&self) -> Arc<TestCores> {
        Arc::clone(&self.mail)
    }

    /// Runs one turn of `core`, which first delivers the commands that wait for it.
    pub fn turn<R>(&mut self, core: usize, f: impl FnOnce(&mut Cx<'_>) -> R) -> R {
        self.deliver(core);
        let mut cx = self.cores[core].cx(self.now);
        let result = f(&mut cx);
        self.wake = self.wake.min(cx.wake());
        result
    }

    /// Delivers the commands that wait for `core` to its lanes' ports.
    pub fn deliver(&mut self, core: usize) {
        loop {
            let next = lock(&self.mail.boxes[core]).pop_front();
            let Some((device, command)) = next else { return };
            self.cores[core].ports().deliver(device, &command);
        }
    }

    /// Opens `device` on `core`.
    ///
    /// # Errors
    /// The device's own.
    pub fn open(&mut self, core: usize, device: &dyn Device) -> Result<Box<dyn Lane>, OpenError> {
        self.turn(core, |cx| device.open(cx))
    }

    /// Starts `bios` and submits them as one batch.
    pub fn submit(&mut self, core: usize, lane: &mut dyn Lane, bios: impl IntoIterator<Item = Box<Bio>>) {
        let mut batch: Batch = bios.into_iter().collect();
        for bio in &mut batch {
            bio.start();
        }
        self.turn(core, |cx| lane.submit(&mut batch, cx));
        assert!(batch.is_empty(), "submit leaves the batch empty");
    }

    /// Polls once; what came back is home.
    pub fn poll(&mut self, core: usize, lane: &mut dyn Lane) -> Batch {
        let mut done = Batch::new();
        self.turn(core, |cx| lane.poll(&mut done, cx));
        for bio in &mut done {
            bio.finish();
        }
        done
    }

    /// Submits `bio` alone and polls until it is back.
    ///
    /// # Panics
    /// When it is not back after a thousand polls, or another came back.
    pub fn run(&mut self, core: usize, lane: &mut dyn Lane, bio: Box<Bio>) -> Box<Bio> {
        self.submit(core, lane, [bio]);
        for _ in 0..1000 {
            let mut done = self.poll(core, lane);
            assert!(done.len() <= 1, "one bio went down, {} came back", done.len());
            if let Some(bio) = done.pop() {
                return bio;
            }
        }
        panic!("the bio did not come back");
    }
}

/// A bio without data.
#[must_use]
pub fn bare(op: Op, sector: u64, sectors: u64) -> Box<Bio> {
    let mut bio = Bio::new();
    (bio.op, bio.sector, bio.sectors) = (op, Sector(sector), Sectors(sectors));
    bio
}

/// A read into a buffer of 0xee.
#[must_use]
pub fn read(sector: u64, sectors: u64) -> Box<Bio> {
    let mut buf = Buf::zeroed((sectors * SECTOR_SIZE) as usize);
    buf.fill(0xee);
    Bio::read(Sector(sector), Sectors(sectors), buf.into())
}

/// A write whose sector `i` is full of `fill + i`.
#[must_use]
pub fn write(sector: u64, sectors: u64, fill: u8) -> Box<Bio> {
    let mut buf = Buf::zeroed((sectors * SECTOR_SIZE) as usize);
    for (i, bytes) in buf.chunks_mut(SECTOR_SIZE as usize).enumerate() {
        bytes.fill(fill.wrapping_add(i as u8));
    }
    Bio::write(Sector(sector), Sectors(sectors), buf.into())
}

/// The data of `bio` in one piece.
#[must_use]
pub fn data(bio: &Bio) -> Vec<u8> {
    let mut bytes = vec![0; bio.data.len()];
    bio.data.copy_to(&mut bytes);
    bytes
}

/// A resolver of fixed names.
#[derive(Default)]
pub struct TestResolver {
    names: BTreeMap<String, (DevNo, Arc<dyn Device>)>,
}

impl TestResolver {
    /// A resolver that knows nothing.
    #[must_use]
    pub fn new() -> TestResolver {
        TestResolver::default()
    }

    /// The devices of the machine on which the bad tables were recorded: `/dev/nullb0` to `/dev/nullb3` (253:0 to 253:3),
    /// 2097152 sectors each.
    #[must_use]
    pub fn recorded() -> TestResolver {
        let mut resolver = TestResolver::new();
        for minor in 0..4 {
            let disk = TestDisk::null(Limits::new(Sectors(2_097_152)));
            resolver.add(&format!("/dev/nullb{minor}"), DevNo { major: 253, minor }, disk);
        }
        resolver
    }

    /// Makes `device` known by `name` and by its number.
    pub fn add(&mut self, name: &str, number: DevNo, device: Arc<dyn Device>) {
        self.names.insert(number.to_string(), (number, Arc::clone(&device)));
        self.names.insert(name.to_owned(), (number, device));
    }
}

impl Resolver for TestResolver {
    fn get(&mut self, word: &str) -> Result<DeviceRef, LookupError> {
        match self.names.get(word) {
            Some((number, device)) => {
                Ok(DeviceRef { number: *number, name: word.to_owned(), device: Arc::clone(device) })
            }
            // What the kernel says of numbers without a device, and of paths without a file.
            None if word.parse::<DevNo>().is_ok() => Err(LookupError { errno: 6, reason: String::new() }),
            None => Err(LookupError { errno: 2, reason: String::new() }),
        }
    }
}
