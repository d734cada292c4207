//! The queues in front of paths and of mapped devices, changes of their settings, and a check that
//! no queue passes more requests than it has tags.

use crate::environment::{SharedEnv, lock_environment};
use crate::machine::Machine;
use crate::model::Violation;
use crate::rng::{RngStream, SimRng};
use crate::world::MappedDeviceStackWorld;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use udm_core::{
    Batch, BioFlags, Cx, Device, DeviceControlError, DeviceId, DiskQueue as _, DrainMode, Lane, Limits,
    OwnWork, QueueChangeCallback, QueueChangeCancelFn, QueueReport,
};
use udm_dm::mapped::MappedDevice;
use udm_queue::{QueuedDevice, SharedTagSet};
use udm_wire::uri::QueueParams;

/// The device below a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceBelowQueue {
    Path(usize),
    /// A mapped device, which owns the queue.
    Mapped(usize),
}

impl fmt::Display for DeviceBelowQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceBelowQueue::Path(p) => write!(f, "p{p}"),
            DeviceBelowQueue::Mapped(d) => write!(f, "d{d}"),
        }
    }
}

/// A queue under test.
pub(crate) struct QueueUnderTest {
    of: DeviceBelowQueue,
    queued: Arc<dyn Device>,
    /// Number of requested changes; `hold` counts those in effect.
    asked: u64,
    hold: Arc<AtomicU64>,
    /// Cancels the last change.
    cancel: Option<QueueChangeCancelFn>,
}

impl QueueUnderTest {
    fn new(of: DeviceBelowQueue, queued: Arc<dyn Device>) -> QueueUnderTest {
        QueueUnderTest { of, queued, asked: 0, hold: Arc::default(), cancel: None }
    }

    fn change(&mut self, name: &str, value: &str) -> bool {
        let of_then = Arc::clone(&self.hold);
        let then: QueueChangeCallback = Box::new(move || _ = of_then.fetch_add(1, Ordering::Relaxed));
        // Some changes are refused, and only one can be in progress.
        let queue = self.queued.queue();
        let changed = queue.map(|queue| queue.change(&[(name.into(), value.into())], then));
        let Some(Ok(cancel)) = changed else { return false };
        self.cancel = Some(cancel);
        self.asked += 1;
        true
    }

    /// Cancels the last change if it is not in effect yet. Returns true if there was one.
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

/// Maximum number of requests that a queue may pass.
fn queue_in_flight_limit(report: &QueueReport) -> u64 {
    let number = |name| report.numbers.iter().find(|(known, _)| *known == name).map_or(0, |(_, n)| *n);
    number("nr_hw_queues") * number("queue_depth")
}

impl Machine {
    /// Puts queues in front of paths that `cores` cores will use. In half of the worlds the queues
    /// share tags.
    pub(crate) fn make_queues(&mut self, queues: &[(usize, QueueParams)], cores: usize) {
        let mut chance = SimRng::new(self.plan.seed, RngStream::Shared);
        let shares = !queues.is_empty() && chance.one_in(2);
        let set = shares.then(|| SharedTagSet::new(chance.pick(&[0, 1, 2]), chance.pick(&[1, 2, 4, 8, 16])));
        if let Some(set) = &set {
            let paths = queues.iter().map(|(path, _)| *path).collect();
            lock_environment(&self.env).shared = Some((paths, set.all(cores)));
            self.totals.shared_tags += 1;
        }
        for (path, params) in queues {
            let front = &mut self.fronts[*path];
            let queued = Arc::new(match &set {
                Some(set) => QueuedDevice::sharing(Arc::clone(front), params, true, Arc::clone(set)),
                None => QueuedDevice::new(Arc::clone(front), params),
            });
            lock_environment(&self.env).paths[*path].most = queue_in_flight_limit(&queued.report(cores));
            *front = queued;
            self.queues.push(QueueUnderTest::new(DeviceBelowQueue::Path(*path), Arc::clone(front)));
        }
    }

    /// Changes a random setting of a queue, even while a change is in progress. If `wide`, queues
    /// of devices change only their request order.
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
            lock_environment(&self.env).say(format!("the change of the queue of {} is cancelled", queue.of));
            return;
        }
        // A read for the test of slow paths must not wait for a tag.
        let wide = wide && matches!(queue.of, DeviceBelowQueue::Mapped(_));
        let may = !wide || matches!(name, "scheduler" | "fifo_batch");
        let changed = may && queue.change(name, value);
        self.totals.queue_changes += u64::from(changed);
        lock_environment(&self.env).say(format!("the queue of {} has {name}={value}: {changed}", queue.of));
    }

    /// Checks, in the quiescent world, that all changes are in effect.
    pub(crate) fn changes_hold(&self) -> Result<(), Violation> {
        let lags = |queue: &&QueueUnderTest| queue.hold.load(Ordering::Relaxed) != queue.asked;
        match self.queues.iter().find(lags) {
            Some(QueueUnderTest { of, .. }) => {
                Err(format!("at rest, a change of the queue of {of} is not in effect yet"))
            }
            None => Ok(()),
        }
    }
}

impl MappedDeviceStackWorld {
    /// Gives device `i` a queue of its own, if the blueprint has one and the table is
    /// request-based. The returned flag must be true while the device is suspended.
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
            // The queue does not exist yet, so the limit is read from one with the same settings.
            let most = queue_in_flight_limit(&QueuedDevice::new(Arc::clone(&bare), &params).report(cores));
            let counted = InFlightCountingDevice {
                bare,
                count: InFlightCounter { device: i, inside, stands, most, env },
            };
            Arc::new(QueuedDevice::of_device(Arc::new(counted), &params)) as Arc<dyn Device>
        }));
        stands
    }

    /// True if completions of device `i` may still be in transit after a suspend, because an owner
    /// lane sends them.
    pub(crate) fn answers_travel(&self, i: usize) -> bool {
        self.machine.cores.len() > 1 && self.blueprint.own_queues.iter().any(|(d, _)| *d == i)
    }

    /// Registers the own queue of device `i` for changes of settings.
    pub(crate) fn take_queue(&mut self, i: usize) {
        let queues = &mut self.machine.queues;
        queues.retain(|queue| queue.of != DeviceBelowQueue::Mapped(i));
        let mapped = self.devices[i].mapped();
        if let Some(queue) = mapped.own_queue() {
            queues.push(QueueUnderTest::new(DeviceBelowQueue::Mapped(i), queue));
            self.machine.totals.own_queues += 1;
        }
    }
}

/// A mapped device below its queue that counts requests.
struct InFlightCountingDevice {
    bare: Arc<dyn Device>,
    count: InFlightCounter,
}

/// Counter of requests of a device, on all cores.
#[derive(Clone)]
struct InFlightCounter {
    device: usize,
    inside: Arc<AtomicU64>,
    /// True while the device is suspended.
    stands: Arc<AtomicBool>,
    most: u64,
    env: SharedEnv,
}

struct CountedLane {
    below: Box<dyn Lane>,
    count: InFlightCounter,
}

impl Device for InFlightCountingDevice {
    fn id(&self) -> DeviceId {
        self.bare.id()
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
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
            lock_environment(env).violate(what);
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
            let mut env = lock_environment(&self.count.env);
            if !env.dead {
                env.violate(|| format!("d{} has ended a request while it is suspended", self.count.device));
            }
        }
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        let from = back.len();
        self.below.drain(how, back, cx);
        self.count.less(back.len() - from);
    }

    fn own_work(&self) -> OwnWork {
        self.below.own_work()
    }
}
