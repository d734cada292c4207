//! The reactor: the loop of a core that serves front ends.
//!
//! A turn handles messages, gathers from front ends, submits to and polls the lanes, and completes
//! to the front ends. After a turn in which nothing moved, `park` submits to the ring and waits for
//! it. Idle parts are not called. A front end gathers if one of its ring operations completed. A
//! lane is polled while it has bios in flight, and once per turn with a message for it.

use crate::core_lanes::CoreLanes;
use crate::core_set::CoreMessage;
use crate::front_end::{FRONT, FrontCx, FrontEnd, FrontEndSharedValues};
use crate::in_flight_report::CoreWorkInFlightReport;
use crate::local::{CoreClockFunctions, LocalCore, PolledInput};
use crate::ring::RingUser;
use crate::subscriptions::MessageTopicSubscribers;
use slab::Slab;
use std::any::Any;
use udm_core::{Batch, BioOwnerId, Cx, DeviceId, Nanos, OwnWork, PolledUnitId};

struct AttachedFrontEnd {
    /// `None` during a call of the front end.
    front: Option<Box<dyn FrontEnd>>,
    /// Nothing waits for this front end.
    background: bool,
    user: RingUser,
    done: Batch,
    in_flight: usize,
    wake: Nanos,
    /// The front end is asked for input until the core sleeps.
    polls_input: bool,
    /// Topics to which the front end subscribes.
    topics: Vec<DeviceId>,
}

/// A core that serves front ends.
pub(crate) struct Reactor {
    core: LocalCore,
    inner: CoreFrontEnds,
    /// The last turn left its ring operations to the next turn.
    held_back: bool,
}

/// The step after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReactorTurnOutcome {
    /// Run another turn at once.
    RunAgain,
    /// Nothing moved: the core may sleep.
    Sleep,
    /// The core exits.
    Exited,
}

/// The tasks of the control half in library mode, in which the thread drives its own lanes.
#[derive(Default)]
pub(crate) struct LibraryModeTaskRunner {
    inner: Option<Box<CoreFrontEnds>>,
    ending: bool,
}

impl LibraryModeTaskRunner {
    /// Runs one turn with the new messages. Costs one test if there is nothing to do.
    pub(crate) fn turn(&mut self, messages: &mut Vec<CoreMessage>, ring: &crate::Ring, cx: &mut Cx<'_>) {
        if self.inner.is_none() && messages.is_empty() {
            return;
        }
        let inner = self.inner.get_or_insert_with(|| Box::new(CoreFrontEnds::new()));
        ring.take_ready(&mut inner.ready);
        if self.ending {
            inner.end(cx);
        }
        // After a turn in which something moved, another turn follows.
        if inner.turn(std::mem::take(messages), ring, cx) {
            cx.wake_now();
        } else if inner.fronts.is_empty() && inner.devices.is_empty() {
            self.inner = None;
        }
    }

    /// From the next turn on, tasks stop and end when their bios have completed.
    pub(crate) fn end(&mut self) {
        self.ending = true;
    }

    /// True if a task has bios in flight.
    pub(crate) fn has_in_flight(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.devices.has_in_flight())
    }
}

impl Drop for LibraryModeTaskRunner {
    fn drop(&mut self) {
        // Bios in flight cannot be dropped, so they are leaked.
        if self.has_in_flight() {
            self.inner.take().map(Box::leak);
        }
    }
}

#[derive(Default)]
struct CoreFrontEnds {
    devices: CoreLanes,
    fronts: Slab<AttachedFrontEnd>,
    /// Wake targets with ring completions.
    ready: Vec<PolledUnitId>,
    done: Batch,
    /// Front ends with bios to complete.
    touched: Vec<usize>,
    /// Front ends to gather in the next turn.
    scheduled: Vec<usize>,
    all_scheduled: bool,
    /// Front ends that are asked for input until the core sleeps.
    polled: Vec<usize>,
    /// The front ends of `scheduled` while they run.
    running: Vec<usize>,
    /// Values that the front ends share.
    locals: FrontEndSharedValues,
    topics: MessageTopicSubscribers,
    /// The list of subscribers during their calls.
    listeners: Vec<usize>,
    /// The clocks of the core, and its total spin time.
    time: CoreClockFunctions,
    spin_time: Nanos,
    /// The earliest time that a front end asked for.
    wake: Nanos,
    /// Front ends refuse new requests.
    ending: bool,
    /// Time limit of the exit.
    stopping: Option<Nanos>,
}

impl Reactor {
    pub(crate) fn new(mut core: LocalCore) -> Reactor {
        core.serve();
        let inner = CoreFrontEnds { time: core.time(), ..CoreFrontEnds::new() };
        Reactor { core, inner, held_back: false }
    }

    /// Serves until it is stopped.
    pub(crate) fn run(mut self) {
        loop {
            match self.step() {
                ReactorTurnOutcome::RunAgain => {}
                ReactorTurnOutcome::Sleep => self.core.park_with(&mut self.inner),
                ReactorTurnOutcome::Exited => return self.stop_receiving(),
            }
        }
    }

    /// Runs a turn and submits to the ring if necessary.
    pub(crate) fn step(&mut self) -> ReactorTurnOutcome {
        let ring = self.core.ring().expect("a reactor's core has a ring").clone();
        let inner = &mut self.inner;
        ring.take_ready(&mut inner.ready);
        let messages = std::mem::take(&mut self.core.other);
        inner.spin_time = self.core.spin_time();
        let moved = self.core.turn_without_enter(|cx| inner.turn(messages, &ring, cx));
        // Messages that arrived in this turn are handled in the next turn, at once.
        if !self.core.other.is_empty() {
            self.core.submit_and_reap();
            return ReactorTurnOutcome::RunAgain;
        }
        if let Some(until) = self.inner.stopping
            && (self.inner.is_idle() || until <= self.core.clock())
        {
            return ReactorTurnOutcome::Exited;
        }
        // After a turn in which something moved, the next turn mostly finds nothing to do and
        // parks. This submits and waits in one system call. So the ring operations of a turn may
        // wait for the next turn, but no longer.
        self.held_back = moved && !self.held_back;
        if !moved {
            return ReactorTurnOutcome::Sleep;
        }
        if !self.held_back {
            self.core.submit_and_reap();
        }
        ReactorTurnOutcome::RunAgain
    }

    /// Exits the core. Work in flight keeps its memory, which belongs to the kernel or to a lane,
    /// until the program ends.
    pub(crate) fn stop_receiving(self) {
        if self.inner.is_idle() && self.inner.fronts.is_empty() {
            self.core.stop_receiving();
        } else {
            // Background work is in flight, or the time limit has passed.
            Box::leak(Box::new(self));
        }
    }

    /// The core that the reactor drives.
    pub(crate) fn core(&mut self) -> &mut LocalCore {
        &mut self.core
    }

    /// As [`LocalCore::prepare_sleep`], with the input of the front ends.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        self.core.prepare_sleep(&mut self.inner)
    }
}

impl CoreFrontEnds {
    fn new() -> CoreFrontEnds {
        CoreFrontEnds { wake: Nanos::NEVER, ..CoreFrontEnds::default() }
    }

    /// Runs one turn; returns true if something moved.
    fn turn(&mut self, messages: Vec<CoreMessage>, ring: &crate::Ring, cx: &mut Cx<'_>) -> bool {
        let mut moved = !self.ready.is_empty() || !messages.is_empty();
        for message in messages {
            match message {
                CoreMessage::Attach(make) => self.attach(make(), ring.user(), cx),
                CoreMessage::Message(device, message) => self.message(device, &*message, cx),
                CoreMessage::End => self.end(cx),
                CoreMessage::Stop(limit) => {
                    self.end(cx);
                    self.stopping.get_or_insert(cx.now() + limit);
                    self.wake = self.wake.min(cx.now() + limit);
                }
                CoreMessage::Report(to) => {
                    let mut report = CoreWorkInFlightReport {
                        front_ends: self.awaited(),
                        ..CoreWorkInFlightReport::default()
                    };
                    self.devices.report(&mut report);
                    // The receiver may have timed out.
                    let _ = to.try_send(report);
                }
                CoreMessage::RegisterFile(file, to) => {
                    let _ = to.try_send(ring.register_file(&file));
                }
                CoreMessage::Command(..) | CoreMessage::Wake(_) => {
                    unreachable!("the core delivers commands and wakes before")
                }
            }
        }
        while let Some(target) = cx.take_woken() {
            moved = true;
            self.run_target(target, cx);
        }
        while let Some(target) = self.ready.pop() {
            self.run_target(target, cx);
        }
        self.has_input(false);
        std::mem::swap(&mut self.scheduled, &mut self.running);
        if std::mem::take(&mut self.all_scheduled) {
            self.running.clear();
            self.running.extend(self.fronts.iter().map(|(key, _)| key));
        }
        for i in 0..self.running.len() {
            moved = true;
            self.call(self.running[i], cx, |front, _, fcx| front.gather(fcx));
        }
        self.running.clear();
        if self.wake != Nanos::NEVER && self.wake <= cx.now() {
            moved = true;
            self.wake_due(cx);
        }
        moved |= self.devices.run(&mut self.done, cx);
        self.distribute(cx);
        if self.wake != Nanos::NEVER {
            cx.wake_at(self.wake);
        }
        if !self.scheduled.is_empty() || self.all_scheduled {
            cx.wake_now();
        }
        moved
    }

    /// Marks a lane for a poll in this turn, or calls a front end.
    fn run_target(&mut self, target: PolledUnitId, cx: &mut Cx<'_>) {
        match target.0 & FRONT {
            0 => self.devices.run_target(target),
            _ => self.call((target.0 & !FRONT) as usize, cx, |front, _, fcx| front.gather(fcx)),
        }
    }

    fn attach(&mut self, front: Box<dyn FrontEnd>, user: RingUser, cx: &mut Cx<'_>) {
        let background = front.own_work() < OwnWork::Required;
        let attached = AttachedFrontEnd {
            front: Some(front),
            background,
            user,
            done: Batch::new(),
            in_flight: 0,
            wake: Nanos::NEVER,
            polls_input: false,
            topics: Vec::new(),
        };
        let key = self.fronts.insert(attached);
        self.fronts[key].user.set_wake_target(Some(PolledUnitId(FRONT | key as u32)));
        self.call(key, cx, |front, _, fcx| front.gather(fcx));
        if self.ending {
            self.call(key, cx, |front, _, fcx| front.stop(fcx));
        }
    }

    /// Stops the front ends, and makes the lanes end the bios that they hold back.
    fn end(&mut self, cx: &mut Cx<'_>) {
        if !std::mem::replace(&mut self.ending, true) {
            self.devices.end();
            let keys: Vec<usize> = self.fronts.iter().map(|(k, _)| k).collect();
            for key in keys {
                self.call(key, cx, |front, _, fcx| front.stop(fcx));
            }
        }
    }

    fn message(&mut self, device: DeviceId, message: &(dyn Any + Send), cx: &mut Cx<'_>) {
        // A copy, since front ends may subscribe or unsubscribe during the calls.
        let mut keys = std::mem::take(&mut self.listeners);
        keys.extend_from_slice(self.topics.listeners(device));
        for key in keys.drain(..) {
            self.call(key, cx, |front, _, fcx| front.message(message, fcx));
        }
        self.listeners = keys;
    }

    /// Number of front ends that the exit waits for: also those of a background task that has work
    /// to complete after its stop.
    fn awaited(&self) -> usize {
        let is_required = |attached: &AttachedFrontEnd| {
            attached.front.as_ref().is_some_and(|front| front.own_work() >= OwnWork::Required)
        };
        let is_awaited = |attached: &AttachedFrontEnd| !attached.background || is_required(attached);
        self.fronts.iter().filter(|(_, attached)| is_awaited(attached)).count()
    }

    fn is_idle(&self) -> bool {
        self.awaited() == 0 && self.devices.is_idle()
    }

    fn wake_due(&mut self, cx: &mut Cx<'_>) {
        let due: Vec<usize> =
            self.fronts.iter().filter(|(_, f)| f.wake <= cx.now()).map(|(k, _)| k).collect();
        for key in due {
            self.fronts[key].wake = Nanos::NEVER;
            self.call(key, cx, |front, _, fcx| front.gather(fcx));
        }
        self.wake = self.fronts.iter().map(|(_, f)| f.wake).min().unwrap_or(Nanos::NEVER);
        if let Some(deadline) = self.stopping {
            self.wake = self.wake.min(deadline);
        }
    }

    /// Returns completed bios to their owners.
    fn distribute(&mut self, cx: &mut Cx<'_>) {
        for mut bio in self.done.drain(..) {
            bio.finish();
            let key = (bio.owner.0 & !FRONT) as usize;
            let front = &mut self.fronts[key];
            front.in_flight -= 1;
            if front.done.is_empty() {
                self.touched.push(key);
            }
            front.done.push(bio);
        }
        while let Some(key) = self.touched.pop() {
            self.call(key, cx, |front, done, fcx| front.complete(done, fcx));
        }
    }

    fn call(
        &mut self,
        key: usize,
        cx: &mut Cx<'_>,
        f: impl FnOnce(&mut dyn FrontEnd, &mut Batch, &mut FrontCx<'_, '_>),
    ) {
        let Some(attached) = self.fronts.get_mut(key) else { return };
        let mut front = attached.front.take().expect("front ends do not call each other");
        let mut done = std::mem::take(&mut attached.done);
        let polled_before = attached.polls_input;
        cx.set_current_target(Some(PolledUnitId(FRONT | key as u32)));
        let mut fcx = FrontCx {
            background: attached.background,
            cx,
            devices: &mut self.devices,
            user: &attached.user,
            owner: BioOwnerId(FRONT | key as u32),
            in_flight: &mut attached.in_flight,
            wake: &mut attached.wake,
            scheduled: &mut self.scheduled,
            polls_input: &mut attached.polls_input,
            all_scheduled: &mut self.all_scheduled,
            locals: &mut self.locals,
            cpu_time: self.time.cpu_time,
            spin_time: self.spin_time,
            topics: (&mut self.topics, &mut attached.topics),
        };
        f(&mut *front, &mut done, &mut fcx);
        fcx.cx.set_current_target(None);
        attached.done = done;
        if attached.polls_input != polled_before {
            set_polled(&mut self.polled, key, attached.polls_input);
        }
        self.wake = self.wake.min(attached.wake);
        if let Some(deadline) = self.stopping {
            self.wake = self.wake.min(deadline);
        }
        if front.is_closed() && attached.in_flight == 0 {
            let topics = std::mem::take(&mut attached.topics);
            self.topics.forget(key, &topics);
            set_polled(&mut self.polled, key, false);
            self.fronts.remove(key);
        } else {
            attached.front = Some(front);
        }
    }
}

/// Adds `key` to the front ends that are asked for input, or removes it.
fn set_polled(polled: &mut Vec<usize>, key: usize, polls: bool) {
    polled.retain(|other| *other != key);
    if polls {
        polled.push(key);
    }
}

impl PolledInput for CoreFrontEnds {
    fn has_input(&mut self, sleeps: bool) -> bool {
        for key in &self.polled {
            let front = self.fronts[*key].front.as_mut().expect("no front end runs while the core waits");
            if front.has_input(sleeps) {
                self.scheduled.push(*key);
            }
        }
        if sleeps && self.scheduled.is_empty() {
            // A completion of the ring calls each of them.
            self.polled.drain(..).for_each(|key| self.fronts[key].polls_input = false);
        }
        !self.scheduled.is_empty()
    }
}
