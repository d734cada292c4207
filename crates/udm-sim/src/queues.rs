//! The queues in front of paths and of mapped devices: which there are, how their settings change,
//! and that none lets more through than it has tags.

use crate::environment::{SharedEnv, lock};
use crate::machine::Machine;
use crate::model::Violation;
use crate::rng::{RngStream, SimRng};
use crate::world::TargetWorld;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use udm_core::{
    Batch, BioFlags, CancelChange, Cx, Device, DeviceId, DiskQueue as _, Drain, Lane, Limits, OpenError,
    OwnWork, QueueChangeCallback, QueueReport,
};
use udm_dm::mapped::MappedDevice;
use udm_queue::{QueuedDevice, TagSet};
use udm_wire::uri::QueueParams;

/// What a queue is in front of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueOwner {
    Path(usize),
    /// A mapped device: it has the queue.
    Mapped(usize),
}

impl fmt::Display for QueueOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            QueueOwner::Path(p) => write!(f, "p{p}"),
            QueueOwner::Mapped(d) => write!(f, "d{d}"),
        }
    }
}

/// A queue.
pub(crate) struct SimQueue {
    of: QueueOwner,
    queued: Arc<dyn Device>,
    /// Changes that were asked for, and those that hold.
    asked: u64,
    hold: Arc<AtomicU64>,
    /// Cancels the last one.
    cancel: Option<CancelChange>,
}

impl SimQueue {
    fn new(of: QueueOwner, queued: Arc<dyn Device>) -> SimQueue {
        SimQueue { of, queued, asked: 0, hold: Arc::default(), cancel: None }
    }

    fn change(&mut self, name: &str, value: &str) -> bool {
        let of_then = Arc::clone(&self.hold);
        let then: QueueChangeCallback = Box::new(move || _ = of_then.fetch_add(1, Ordering::Relaxed));
        // Some can't be, and while one is under way there is no other.
        let queue = self.queued.queue();
        let changed = queue.map(|queue| queue.change(&[(name.into(), value.into())], then));
        let Some(Ok(cancel)) = changed else { return false };
        self.cancel = Some(cancel);
        self.asked += 1;
        true
    }

    /// Cancels the last change, if it does not hold yet; was there one?
    fn cancel(&mut self) -> bool {
        let cancel = self.cancel.take();
        let waits = self.hold.load(Ordering::Relaxed) != self.asked;
        if let Some(cancel) = cancel.filter(|_| waits) {
            cancel();
            self.asked -= 1;
        }
        waits
    }
}

/// How many requests a queue may let through.
fn most(report: &QueueReport) -> u64 {
    let number = |name| report.numbers.iter().find(|(known, _)| *known == name).map_or(0, |(_, n)| *n);
    number("nr_hw_queues") * number("queue_depth")
}

impl Machine {
    /// Puts queues in front of paths, which `cores` cores will use. In half of the worlds they
    /// share their tags.
    pub(crate) fn make_queues(&mut self, queues: &[(usize, QueueParams)], cores: usize) {
        let mut chance = SimRng::new(self.plan.seed, RngStream::Shared);
        let shares = !queues.is_empty() && chance.one_in(2);
        let set = shares.then(|| TagSet::new(chance.pick(&[0, 1, 2]), chance.pick(&[1, 2, 4, 8, 16])));
        if let Some(set) = &set {
            let paths = queues.iter().map(|(path, _)| *path).collect();
            lock(&self.env).shared = Some((paths, set.all(cores)));
            self.totals.shared_tags += 1;
        }
        for (path, params) in queues {
            let front = &mut self.fronts[*path];
            let queued = Arc::new(match &set {
                Some(set) => QueuedDevice::sharing(Arc::clone(front), params, true, Arc::clone(set)),
                None => QueuedDevice::new(Arc::clone(front), params),
            });
            lock(&self.env).paths[*path].most = most(&queued.report(cores));
            *front = queued;
            self.queues.push(SimQueue::new(QueueOwner::Path(*path), Arc::clone(front)));
        }
    }

    /// Changes a setting of a queue, by chance, whatever is under way. Queues of devices stay as
    /// they are where they are `wide`, but for their order.
    pub(crate) fn change_queue(&mut self, wide: bool) {
        let chance = &mut self.control;
        let nth = chance.below(self.queues.len() as u64) as usize;
        let (name, value) = match chance.below(4) {
            0 => ("scheduler", chance.pick(&["none", "mq-deadline"])),
            1 => ("nomerges", chance.pick(&["0", "1", "2"])),
            2 => ("fifo_batch", chance.pick(&["1", "16"])),
            _ => ("nr_requests", chance.pick(&["4", "16", "64"])),
        };
        let queue = &mut self.queues[nth];
        if chance.one_in(3) && queue.cancel() {
            lock(&self.env).say(format!("the change of the queue of {} is cancelled", queue.of));
            return;
        }
        // What is read to see whether a slow path is put out waits for no tag.
        let wide = wide && matches!(queue.of, QueueOwner::Mapped(_));
        let may = !wide || matches!(name, "scheduler" | "fifo_batch");
        let changed = may && queue.change(name, value);
        self.totals.queue_changes += u64::from(changed);
        lock(&self.env).say(format!("the queue of {} has {name}={value}: {changed}", queue.of));
    }

    /// At rest every change holds.
    pub(crate) fn changes_hold(&self) -> Result<(), Violation> {
        let lags = |queue: &&SimQueue| queue.hold.load(Ordering::Relaxed) != queue.asked;
        match self.queues.iter().find(lags) {
            Some(SimQueue { of, .. }) => {
                Err(format!("at rest, a change of the queue of {of} does not hold yet"))
            }
            None => Ok(()),
        }
    }
}

impl TargetWorld {
    /// Has device `i` make itself a queue, where the blueprint says so and its table is for one.
    /// What it gives back is to be true while nothing may pass.
    pub(crate) fn give_queue(&mut self, i: usize, mapped: &MappedDevice) -> Arc<AtomicBool> {
        let stands = Arc::new(AtomicBool::new(true));
        let Some((_, params)) = self.blueprint.own_queues.iter().find(|(d, _)| *d == i) else {
            return stands;
        };
        let (params, cores, env) = (params.clone(), self.blueprint.cores, self.machine.env.clone());
        let inside = Arc::<AtomicU64>::default();
        let of_count = Arc::clone(&stands);
        mapped.set_queue_factory(Box::new(move |bare| {
            let (inside, stands, env) = (Arc::clone(&inside), Arc::clone(&of_count), env.clone());
            // What it may have is asked of the queue: of one like it, since it is not there yet.
            let most = most(&QueuedDevice::new(Arc::clone(&bare), &params).report(cores));
            let counted =
                CountedDevice { bare, count: InFlightCounter { device: i, inside, stands, most, env } };
            Arc::new(QueuedDevice::of_device(Arc::new(counted), &params)) as Arc<dyn Device>
        }));
        stands
    }

    /// Answers of device `i` may still be on their way when it is suspended: a task has them.
    pub(crate) fn answers_travel(&self, i: usize) -> bool {
        self.machine.cores.len() > 1 && self.blueprint.own_queues.iter().any(|(d, _)| *d == i)
    }

    /// The queue that device `i` has made itself is one whose settings change.
    pub(crate) fn take_queue(&mut self, i: usize) {
        let queues = &mut self.machine.queues;
        queues.retain(|queue| queue.of != QueueOwner::Mapped(i));
        let mapped = self.devices[i].mapped();
        if let Some(queue) = mapped.own_queue() {
            queues.push(SimQueue::new(QueueOwner::Mapped(i), queue));
            self.machine.totals.own_queues += 1;
        }
    }
}

/// A mapped device behind its queue, where what comes through is counted.
struct CountedDevice {
    bare: Arc<dyn Device>,
    count: InFlightCounter,
}

/// How many requests a device has, on all cores.
#[derive(Clone)]
struct InFlightCounter {
    device: usize,
    inside: Arc<AtomicU64>,
    /// Nothing may pass.
    stands: Arc<AtomicBool>,
    most: u64,
    env: SharedEnv,
}

struct CountedLane {
    below: Box<dyn Lane>,
    count: InFlightCounter,
}

impl Device for CountedDevice {
    fn id(&self) -> DeviceId {
        self.bare.id()
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        Ok(Box::new(CountedLane { below: self.bare.open(cx)?, count: self.count.clone() }))
    }

    fn limits(&self) -> Limits {
        self.bare.limits()
    }
}

impl InFlightCounter {
    fn less(&self, n: usize) {
        self.inside.fetch_sub(n as u64, Ordering::Relaxed);
    }
}

impl Lane for CountedLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let InFlightCounter { device, inside, most, env, .. } = &self.count;
        let n = batch.len() as u64;
        if inside.fetch_add(n, Ordering::Relaxed) + n > *most {
            let what = || format!("d{device} was given more than the {most} that its own queue has tags for");
            lock(env).violate(what);
        }
        self.below.submit(batch, cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let from = done.len();
        self.below.poll(done, cx);
        self.count.less(done.len() - from);
        let impatient = BioFlags::RAHEAD | BioFlags::NOWAIT;
        let mut ended =
            done[from..].iter().filter(|bio| bio.status.is_ok() || !bio.flags.intersects(impatient));
        if self.count.stands.load(Ordering::Relaxed) && ended.next().is_some() {
            let mut env = lock(&self.count.env);
            if !env.dead {
                env.violate(|| format!("d{} has ended a request while it is suspended", self.count.device));
            }
        }
    }

    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        let from = back.len();
        self.below.drain(how, back, cx);
        self.count.less(back.len() - from);
    }

    fn busy(&self) -> OwnWork {
        self.below.busy()
    }
}
