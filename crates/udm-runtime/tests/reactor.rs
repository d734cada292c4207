//! Front ends on real cores: an echo over a socket through a device that completes a turn later,
//! commands to lanes, and a clean stop.

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;
use udm_core::{
    AckOnLastDrop, Batch, Bio, BioPool, BioTask, BioTaskCx, Buf, CoreCommandSender, CoreId, Cx, Device,
    DeviceControlError, DeviceId, DrainMode, Lane, LaneCommand, LaneInbox, Limits, Nanos, OwnWork, Sectors,
    Segments,
};
use udm_runtime::{
    BioTaskLaneId, CoreOptions, FrontCx, FrontEnd, LocalCore, ProcessCores, RingCompletion, RingOp, Runtime,
    RuntimeOptions,
};

/// Completes each bio after 100 µs; holds bios while suspended.
struct DelayedDevice(DeviceId);

struct DelayedLane {
    queue: Vec<(Nanos, Box<Bio>)>,
    inbox: Rc<LaneInbox>,
    ack: Option<AckOnLastDrop>,
    suspended: bool,
}

impl Device for DelayedDevice {
    fn id(&self) -> DeviceId {
        self.0
    }
    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(DelayedLane {
            queue: Vec::new(),
            inbox: cx.open_inbox(self.0),
            ack: None,
            suspended: false,
        }))
    }
    fn limits(&self) -> Limits {
        Limits::new(Sectors(8))
    }
}

impl DelayedLane {
    fn messages(&mut self) {
        while let Some(command) = self.inbox.take() {
            match command {
                LaneCommand::Suspend { ack, .. } => {
                    self.suspended = true;
                    self.ack = Some(ack);
                }
                LaneCommand::Resume { .. } => self.suspended = false,
                _ => {}
            }
        }
        self.ack = None;
    }
}

impl Lane for DelayedLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.queue.extend(batch.drain(..).map(|b| (cx.now() + Nanos(100_000), b)));
    }
    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.messages();
        if self.suspended {
            return;
        }
        let mut wait = Vec::new();
        for (at, bio) in self.queue.drain(..) {
            if at <= cx.now() {
                done.push(bio);
            } else {
                cx.wake_at(at);
                wait.push((at, bio));
            }
        }
        self.queue = wait;
    }
}

/// Echoes each received byte after a bio to the device.
struct EchoFrontEnd {
    fd: Arc<OwnedFd>,
    device: Arc<dyn Device>,
    slot: Option<BioTaskLaneId>,
    pool: BioPool,
    done: Vec<RingCompletion>,
    out: usize,
    sending: usize,
    closed: bool,
}

impl EchoFrontEnd {
    fn receive(&self, cx: &mut FrontCx<'_, '_>) {
        cx.push(0, RingOp::Recv { fd: self.fd.clone(), data: Buf::zeroed(64).into() });
    }
}

impl FrontEnd for EchoFrontEnd {
    fn gather(&mut self, cx: &mut FrontCx<'_, '_>) {
        let Some(slot) = self.slot else {
            self.slot = Some(cx.open(&self.device).unwrap());
            return self.receive(cx);
        };
        let mut done = std::mem::take(&mut self.done);
        cx.take(&mut done);
        for d in done.drain(..) {
            if d.tag == 1 {
                self.sending -= 1;
                continue;
            }
            let n = d.result.unwrap_or(0) as usize;
            if n == 0 {
                self.closed = true;
                continue;
            }
            for _ in 0..n {
                let bio = self.pool.get().unwrap();
                self.out += 1;
                cx.submit(slot, bio);
            }
            self.receive(cx);
        }
        self.done = done;
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut FrontCx<'_, '_>) {
        for bio in done.drain(..) {
            self.out -= 1;
            self.pool.put(bio);
            let mut b = Buf::zeroed(1);
            b[0] = b'x';
            self.sending += 1;
            cx.push(1, RingOp::Send { fd: self.fd.clone(), data: Segments::from(b), whole: true });
        }
    }

    fn stop(&mut self, _cx: &mut FrontCx<'_, '_>) {
        rustix::net::shutdown(&*self.fd, rustix::net::Shutdown::Read).unwrap();
    }

    fn is_closed(&self) -> bool {
        self.closed && self.out == 0 && self.sending == 0
    }
}

fn runtime(cores: usize) -> Runtime {
    Runtime::start(&RuntimeOptions {
        cpus: vec![None; cores],
        poll: false,
        spin_max: Duration::from_micros(50),
    })
    .unwrap()
}

fn echo(runtime: &Runtime, core: u16, device: &Arc<dyn Device>) -> UnixStream {
    let (a, b) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    let device = device.clone();
    runtime.attach(
        CoreId(core),
        Box::new(move || {
            Box::new(EchoFrontEnd {
                fd: Arc::new(b),
                device,
                slot: None,
                pool: BioPool::new(1024),
                done: Vec::new(),
                out: 0,
                sending: 0,
                closed: false,
            })
        }),
    );
    let s = UnixStream::from(a);
    s.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    s
}

#[test]
fn many_front_ends_on_two_cores() {
    let runtime = runtime(2);
    let device: Arc<dyn Device> = Arc::new(DelayedDevice(DeviceId::new()));
    let mut socks: Vec<_> = (0..20).map(|i| echo(&runtime, i % 2, &device)).collect();
    let mut byte = [0; 7];
    for _ in 0..50 {
        for s in &mut socks {
            s.write_all(b"abcdefg").unwrap();
        }
        for s in &mut socks {
            s.read_exact(&mut byte).unwrap();
            assert_eq!(&byte, b"xxxxxxx");
        }
    }
    drop(socks);
    runtime.stop();
}

#[test]
fn commands_reach_idle_and_busy_lanes() {
    let runtime = runtime(2);
    let device: Arc<dyn Device> = Arc::new(DelayedDevice(DeviceId::new()));
    let mut socks: Vec<_> = (0..2).map(|i| echo(&runtime, i, &device)).collect();
    let (tx, rx) = mpsc::channel();
    let ack = |what: &'static str| {
        let tx = tx.clone();
        AckOnLastDrop::new(move || {
            let _ = tx.send(what);
        })
    };
    let mut byte = [0; 1];
    for _ in 0..20 {
        for s in &mut socks {
            s.write_all(b"a").unwrap();
            s.read_exact(&mut byte).unwrap();
        }
        runtime
            .core_set()
            .broadcast(device.id(), LaneCommand::Suspend { how: DrainMode::Flush, ack: ack("suspended") });
        assert_eq!(rx.recv_timeout(Duration::from_secs(10)), Ok("suspended"));
        for s in &mut socks {
            s.write_all(b"a").unwrap();
        }
        runtime.core_set().broadcast(device.id(), LaneCommand::Resume { generation: 0, ack: ack("resumed") });
        assert_eq!(rx.recv_timeout(Duration::from_secs(10)), Ok("resumed"));
        for s in &mut socks {
            s.read_exact(&mut byte).unwrap();
        }
    }
    // Stops with clients still connected.
    runtime.stop();
}

#[test]
fn a_local_core_sleeps_and_wakes() {
    let core_set = ProcessCores::new(1).unwrap();
    let device = DelayedDevice(DeviceId::new());
    let mut core = LocalCore::attach(&core_set, CoreId(0), CoreOptions::default()).unwrap();
    let mut lane = core.open(&device).unwrap();
    let (mut batch, mut done) = (Batch::new(), Batch::new());
    for _ in 0..100 {
        let mut bio = Bio::new();
        bio.start();
        batch.push(bio);
        for _ in 0..10_000 {
            core.turn(|cx| {
                lane.submit(&mut batch, cx);
                lane.poll(&mut done, cx);
            });
            if !done.is_empty() {
                break;
            }
            core.park();
        }
        done.pop().expect("it came back").finish();
    }
    let other = core_set.clone();
    let (id, (tx, rx)) = (device.id(), mpsc::channel::<()>());
    let t = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        let ack = AckOnLastDrop::new(move || drop(tx));
        other.broadcast(id, LaneCommand::Suspend { how: DrainMode::NoFlush, ack });
        // This thread's ack is dropped now. The core may have acknowledged long before, so it needs
        // one more wakeup.
        other.broadcast(id, LaneCommand::Kick);
    });
    while rx.try_recv() != Err(mpsc::TryRecvError::Disconnected) {
        core.park();
        core.turn(|cx| lane.poll(&mut done, cx));
    }
    t.join().unwrap();
    assert!(LocalCore::attach(&core_set, CoreId(1), CoreOptions::default()).is_err());
}

/// Reads again and again until it is stopped.
struct ReadingTask {
    device: Arc<dyn Device>,
    slot: Option<BioTaskLaneId>,
    reads: mpsc::Sender<()>,
    stopping: bool,
    in_flight: bool,
}

impl BioTask for ReadingTask {
    fn turn(&mut self, cx: &mut dyn BioTaskCx) {
        if self.in_flight || self.stopping {
            return;
        }
        let slot = *self.slot.get_or_insert_with(|| cx.open(&self.device).unwrap());
        cx.submit(slot, Bio::new());
        self.in_flight = true;
        let _ = self.reads.send(());
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut dyn BioTaskCx) {
        done.clear();
        self.in_flight = false;
        self.turn(cx);
    }

    fn stop(&mut self, _: &mut dyn BioTaskCx) {
        self.stopping = true;
    }

    fn is_over(&self) -> bool {
        self.stopping && !self.in_flight
    }

    fn own_work(&self) -> OwnWork {
        OwnWork::Background
    }
}

/// A thread that leaves its core stops the tasks there and waits for their bios: a lane that is
/// left behind would keep its device for ever.
#[test]
fn a_detached_core_leaves_no_task_behind() {
    let core_set = ProcessCores::new(1).unwrap();
    let device: Arc<dyn Device> = Arc::new(DelayedDevice(DeviceId::new()));
    let mut core = LocalCore::attach(&core_set, CoreId(0), CoreOptions::default()).unwrap();
    let (reads, begun) = mpsc::channel();
    let task_device = Arc::clone(&device);
    let handle = core_set.start(Box::new(move || {
        Box::new(ReadingTask { device: task_device, slot: None, reads, stopping: false, in_flight: false })
    }));
    for _ in 0..10_000 {
        core.turn(|_| ());
        if begun.try_recv().is_ok() {
            break;
        }
        core.park();
    }
    assert_eq!(Arc::strong_count(&device), 2, "of the test and of the task");
    core.detach();
    assert_eq!(Arc::strong_count(&device), 1, "the task is over");
    drop(handle);
}
