//! Two cores in library mode, each a thread with a ring. The caller's thread gives them requests
//! and commands. The memory of the requests is their own, or shared.

use super::{DeviceWorld, HANG};
use crate::lane_driver::LaneDriver;
use crate::{DeviceFacts, TestRequest, TestRequestResult};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use udm_core::{CoreCommandSender as _, CoreId, Cx, Device, DeviceId, LaneCommand};
use udm_dm::{DeviceTransition, TargetError};
use udm_runtime::{CoreOptions, LocalCore, ProcessCores};

const CORES: usize = 2;

/// A job for a core.
enum CoreJob {
    Requests(Vec<TestRequest>),
    Reopen,
    Quiet,
    Close,
}

/// A message from a core.
enum CoreReply {
    Answer(u64, TestRequestResult),
    /// The lane is open, idle or closed.
    Done,
}

struct CoreThread {
    jobs: Sender<CoreJob>,
    news: Receiver<CoreReply>,
    thread: Option<JoinHandle<()>>,
    given: u64,
    collected: u64,
    answers: BTreeMap<u64, TestRequestResult>,
}

pub(super) struct ThreadedWorld {
    core_set: Arc<ProcessCores>,
    /// An ID without a device: a command for it only wakes the cores.
    nobody: DeviceId,
    facts: DeviceFacts,
    cores: Vec<CoreThread>,
}

impl ThreadedWorld {
    pub(super) fn new(device: &Arc<dyn Device>, facts: DeviceFacts, foreign: bool) -> ThreadedWorld {
        let core_set = ProcessCores::new(CORES).expect("a cluster");
        let cores = (0..CORES).map(|core| CoreThread::start(&core_set, core, device, foreign)).collect();
        let mut threads = ThreadedWorld { core_set, nobody: DeviceId::new(), facts, cores };
        threads.cores.iter_mut().for_each(CoreThread::done);
        threads
    }

    fn ask(&self, core: usize, job: CoreJob) {
        // The panic of a core is raised when its replies are received.
        let _ = self.cores[core].jobs.send(job);
        self.core_set.broadcast(self.nobody, LaneCommand::Kick);
    }

    fn step(&self, change: &mut DeviceTransition, timeout: Duration) -> Option<Result<(), TargetError>> {
        let end = Instant::now() + timeout;
        loop {
            match change.step(&*self.core_set) {
                None if Instant::now() < end => std::thread::sleep(Duration::from_micros(200)),
                result => return result,
            }
        }
    }
}

impl CoreThread {
    fn start(
        core_set: &Arc<ProcessCores>,
        core: usize,
        device: &Arc<dyn Device>,
        foreign: bool,
    ) -> CoreThread {
        let ((jobs, job_box), (news_box, news)) = (channel(), channel());
        let (core_set, device) = (core_set.clone(), device.clone());
        let thread = std::thread::spawn(move || {
            run_core_thread(&core_set, core, device, foreign, &job_box, &news_box);
        });
        CoreThread { jobs, news, thread: Some(thread), given: 0, collected: 0, answers: BTreeMap::new() }
    }

    fn receive(&mut self, timeout: Duration) -> Option<CoreReply> {
        match self.news.recv_timeout(timeout) {
            Ok(news) => Some(news),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => self.ended(),
        }
    }

    /// Panics after the thread ended; with the panic of the thread, if it had one.
    fn ended(&mut self) -> ! {
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            _ => panic!("the core's thread has ended"),
        }
    }

    fn answered(&mut self, news: CoreReply) -> bool {
        match news {
            CoreReply::Answer(tag, answer) => {
                assert!(self.answers.insert(tag, answer).is_none(), "answered twice");
                false
            }
            CoreReply::Done => true,
        }
    }

    fn done(&mut self) {
        loop {
            let news = self.receive(HANG).expect("hung: a lane does not open, become idle or close");
            if self.answered(news) {
                return;
            }
        }
    }

    fn open_requests(&self) -> u64 {
        self.given - self.collected - self.answers.len() as u64
    }
}

/// The thread of a core.
fn run_core_thread(
    core_set: &Arc<ProcessCores>,
    core: usize,
    device: Arc<dyn Device>,
    foreign: bool,
    jobs: &Receiver<CoreJob>,
    news: &Sender<CoreReply>,
) {
    let mut local = LocalCore::attach(core_set, CoreId(core as u16), CoreOptions::default()).expect("a core");
    let open = |cx: &mut Cx<'_>| {
        LaneDriver::open(&device, foreign, cx).unwrap_or_else(|e| panic!("cannot be opened: {e}"))
    };
    let mut driver = local.turn(open);
    let _ = news.send(CoreReply::Done);
    let mut answers = Vec::new();
    let mut resting: Option<CoreJob> = None;
    loop {
        let moved = local.turn(|cx| driver.turn(&mut answers, cx));
        for (tag, answer) in answers.drain(..) {
            let _ = news.send(CoreReply::Answer(tag, answer));
        }
        // The turn takes the message that announces a job, so jobs are read after it. The message
        // of a later job ends `park`.
        match jobs.try_recv() {
            Ok(CoreJob::Requests(requests)) => {
                local.turn(|cx| driver.give(requests, cx.now()));
                continue;
            }
            Ok(job) => resting = Some(job),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => return,
        }
        if moved {
            continue;
        }
        // In library mode, the driver of a lane polls it while it is busy.
        let at_rest = driver.in_flight() == 0 && !driver.is_busy();
        match if at_rest { resting.take() } else { None } {
            Some(CoreJob::Close) => break,
            Some(CoreJob::Reopen) => {
                drop(driver);
                driver = local.turn(open);
                let _ = news.send(CoreReply::Done);
            }
            Some(_) => {
                for _ in 0..3 {
                    let moved = local.turn(|cx| driver.turn(&mut answers, cx));
                    assert!(!moved && answers.is_empty(), "an idle lane returned something");
                }
                let _ = news.send(CoreReply::Done);
            }
            None => local.park(),
        }
    }
    drop(driver);
    drop(device);
    local.detach();
    let _ = news.send(CoreReply::Done);
}

impl DeviceWorld for ThreadedWorld {
    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    fn handles(&self) -> usize {
        CORES
    }

    fn submit(&mut self, handle: usize, requests: Vec<TestRequest>) {
        self.cores[handle].given += requests.len() as u64;
        self.ask(handle, CoreJob::Requests(requests));
    }

    fn collect(&mut self, handle: usize) -> Vec<TestRequestResult> {
        let core = &mut self.cores[handle];
        while core.open_requests() > 0 {
            let Some(news) = core.receive(HANG) else { panic!("hung: {} requests", core.open_requests()) };
            core.answered(news);
        }
        core.collected = core.given;
        std::mem::take(&mut core.answers).into_values().collect()
    }

    fn settle(&mut self) -> usize {
        std::thread::sleep(Duration::from_millis(20));
        for core in &mut self.cores {
            while let Some(news) = core.receive(Duration::ZERO) {
                core.answered(news);
            }
        }
        self.cores.iter().map(|core| core.open_requests() as usize).sum()
    }

    fn change(&mut self, mut change: DeviceTransition) -> Result<(), TargetError> {
        self.step(&mut change, HANG).expect("hung: a change")
    }

    fn begin_change(&mut self, change: &mut DeviceTransition) -> bool {
        self.step(change, Duration::from_millis(20)).is_some()
    }

    fn cores(&self) -> Arc<dyn udm_core::CoreCommandSender> {
        self.core_set.clone()
    }

    fn call_off(&mut self, change: &mut DeviceTransition) {
        change.cancel(&*self.core_set);
    }

    fn reopen(&mut self) {
        (0..CORES).for_each(|core| self.ask(core, CoreJob::Reopen));
        self.cores.iter_mut().for_each(|core| {
            core.done();
            (core.given, core.collected) = (0, 0);
        });
    }

    fn quiet(&mut self) {
        (0..CORES).for_each(|core| self.ask(core, CoreJob::Quiet));
        self.cores.iter_mut().for_each(CoreThread::done);
    }

    fn close(&mut self) {
        (0..CORES).for_each(|core| self.ask(core, CoreJob::Close));
        for core in &mut self.cores {
            core.done();
            if let Some(Err(panic)) = core.thread.take().map(JoinHandle::join) {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

impl Drop for ThreadedWorld {
    fn drop(&mut self) {
        // After a failure elsewhere: closes the channels, so that the threads end.
        for core in &mut self.cores {
            let (closed, _) = channel();
            core.jobs = closed;
        }
        self.core_set.broadcast(self.nobody, LaneCommand::Kick);
    }
}
