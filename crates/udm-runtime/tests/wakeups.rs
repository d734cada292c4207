//! On a core with thousands of lanes, a message and a wakeup poll only the lanes that they concern.

use rustix::fs::FlockOperation;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use udm_core::{
    Batch, CoreCommandSender, CoreId, Cx, Device, DeviceControlError, DeviceId, Lane, LaneCommand, LaneInbox,
    Limits, OwnWork, Sectors, WaitQueue, WaitQueueSubscription,
};
use udm_runtime::{FrontCx, FrontEnd, Runtime, RuntimeOptions};

const LANES: usize = 5000;

/// Counts its polls, subscribes to the wait queue of its group, and reports a fixed amount of own
/// work.
struct PollCounter {
    id: DeviceId,
    polls: AtomicUsize,
    wait_queue: Arc<WaitQueue>,
    busy: OwnWork,
    /// The lane waits for its wait queue, from its first poll on.
    waits: bool,
}

struct CountingLane {
    device: Arc<PollCounter>,
    _inbox: Rc<LaneInbox>,
    wait_handle: WaitQueueSubscription,
}

struct CountingDevice(Arc<PollCounter>);

impl Device for CountingDevice {
    fn id(&self) -> DeviceId {
        self.0.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let inbox = cx.open_inbox(self.0.id);
        Ok(Box::new(CountingLane {
            device: self.0.clone(),
            _inbox: inbox,
            wait_handle: self.0.wait_queue.subscribe(cx),
        }))
    }

    fn limits(&self) -> Limits {
        Limits::new(Sectors(8))
    }
}

impl Lane for CountingLane {
    fn submit(&mut self, _: &mut Batch, _: &mut Cx<'_>) {}

    fn poll(&mut self, _: &mut Batch, cx: &mut Cx<'_>) {
        self.device.polls.fetch_add(1, Ordering::Relaxed);
        if self.device.waits {
            self.wait_handle.wait(self.wait_handle.epoch(), cx);
        }
    }

    fn own_work(&self) -> OwnWork {
        self.device.busy
    }
}

/// Opens lanes of all devices.
struct OpeningFrontEnd(Vec<Arc<dyn Device>>, mpsc::Sender<()>, bool);

impl FrontEnd for OpeningFrontEnd {
    fn gather(&mut self, cx: &mut FrontCx<'_, '_>) {
        for device in self.0.drain(..) {
            cx.open(&device).unwrap();
        }
        self.1.send(()).unwrap();
    }

    fn complete(&mut self, _: &mut Batch, _: &mut FrontCx<'_, '_>) {}

    fn stop(&mut self, _: &mut FrontCx<'_, '_>) {
        self.2 = true;
    }

    fn is_closed(&self) -> bool {
        self.2
    }
}

fn runtime() -> Runtime {
    let spin_max = Duration::from_micros(50);
    Runtime::start(&RuntimeOptions { cpus: vec![None], poll: false, spin_max }).unwrap()
}

fn open(runtime: &Runtime, devices: &[Arc<PollCounter>]) {
    let (tx, rx) = mpsc::channel();
    let opened = devices.iter().map(|d| Arc::new(CountingDevice(d.clone())) as Arc<dyn Device>).collect();
    runtime.attach(CoreId(0), Box::new(move || Box::new(OpeningFrontEnd(opened, tx, false))));
    rx.recv_timeout(Duration::from_secs(60)).unwrap();
}

/// Messages are handled in order: when the core has reported its work in flight, it has polled for
/// all earlier messages.
fn polls(runtime: &Runtime, devices: &[Arc<PollCounter>]) -> Vec<usize> {
    assert_eq!(runtime.core_set().in_flight_report(Duration::from_secs(60)).unanswered, 0);
    devices.iter().map(|d| d.polls.swap(0, Ordering::Relaxed)).collect()
}

#[test]
fn messages_and_wakeups_run_only_their_lanes() {
    let wait_queues: Vec<Arc<WaitQueue>> = (0..LANES / 2).map(|_| Arc::new(WaitQueue::new())).collect();
    let counted = |n: usize| {
        let wait_queue = wait_queues[n / 2].clone();
        let (id, waits) = (DeviceId::new(), n / 2 != 1000);
        Arc::new(PollCounter { id, polls: AtomicUsize::new(0), wait_queue, busy: OwnWork::Idle, waits })
    };
    let devices: Vec<_> = (0..LANES).map(counted).collect();
    let runtime = runtime();
    open(&runtime, &devices);
    polls(&runtime, &devices);
    let visited = |polls: Vec<usize>| -> Vec<(usize, usize)> {
        polls.into_iter().enumerate().filter(|(_, polls)| *polls > 0).collect()
    };
    runtime.core_set().broadcast(devices[4321].id, LaneCommand::Kick);
    assert_eq!(visited(polls(&runtime, &devices)), [(4321, 1)], "a command");
    // Both subscribers wait since they were opened.
    wait_queues[2160].wake_up();
    assert_eq!(visited(polls(&runtime, &devices)), [(4320, 1), (4321, 1)], "a wakeup");
    wait_queues[1000].wake_up();
    assert_eq!(visited(polls(&runtime, &devices)), [], "a wakeup without waiters");
    runtime.stop();
}

/// A lane with background work gets turns, and the stop does not wait for it.
#[test]
fn background_work_does_not_delay_stop() {
    let wait_queue = Arc::new(WaitQueue::new());
    let counted = |busy| {
        let id = DeviceId::new();
        Arc::new(PollCounter {
            id,
            polls: AtomicUsize::new(0),
            wait_queue: wait_queue.clone(),
            busy,
            waits: true,
        })
    };
    let devices = [counted(OwnWork::Background), counted(OwnWork::Idle)];
    let runtime = runtime();
    open(&runtime, &devices);
    for device in &devices {
        runtime.core_set().broadcast(device.id, LaneCommand::Kick);
    }
    polls(&runtime, &devices);
    let under_way = runtime.core_set().in_flight_report(Duration::from_secs(60));
    assert!(under_way.busy.is_empty() && under_way.requests.is_empty(), "{under_way:?}");
    let polls = polls(&runtime, &devices);
    assert!(polls[0] > 0 && polls[1] == 0, "background work runs in each turn: {polls:?}");
    let stopping = runtime.stop_within(Duration::from_secs(600));
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while !stopping.is_over() {
        assert!(std::time::Instant::now() < end, "the stop waits for background work");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A file that is registered with the rings stays open until the last operation of each has ended,
/// also if everybody else has closed it: its lock is free only then.
#[test]
fn a_registered_file_outlives_its_last_descriptor() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let open = || std::fs::File::open(file.path()).unwrap();
    let locked = open();
    rustix::fs::flock(&locked, FlockOperation::NonBlockingLockExclusive).unwrap();
    let runtime = runtime();
    let descriptor = Arc::new(OwnedFd::from(locked));
    runtime.core_set().register_file(&descriptor, Duration::from_secs(60)).unwrap();
    let again = runtime.core_set().register_file(&descriptor, Duration::from_secs(60));
    assert_eq!(again.unwrap_err().kind(), std::io::ErrorKind::ResourceBusy);
    drop(descriptor);
    let is_free = || rustix::fs::flock(open(), FlockOperation::NonBlockingLockShared).is_ok();
    assert!(!is_free(), "the ring has the file open");
    runtime.stop();
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while !is_free() {
        assert!(std::time::Instant::now() < end, "the lock is never released");
        std::thread::sleep(Duration::from_millis(5));
    }
}
