//! The interface of front ends, and their context.

use crate::core_lanes::CoreLanes;
use crate::ring::{RingCompletion, RingOp, RingUser};
use crate::subscriptions::MessageTopicSubscribers;
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use udm_core::{
    Batch, Bio, BioOwnerId, BioTaskLaneId, CoreId, Cx, Device, DeviceControlError, DeviceId, Nanos, OwnWork,
};

/// A front end makes bios out of requests from outside, such as those of a connection or a
/// virtqueue. It belongs to one core for its whole life.
pub trait FrontEnd {
    /// Handles new input and submits bios. Called once after the front end is attached, then after
    /// each completion of a ring operation, at a requested time, and when scheduled. The work of a
    /// call must be bounded, since it delays the others of the core; the rest waits for the next
    /// turn ([`FrontCx::schedule`]).
    fn gather(&mut self, cx: &mut FrontCx<'_, '_>);

    /// Takes the completed bios of this front end and leaves `done` empty.
    fn complete(&mut self, done: &mut Batch, cx: &mut FrontCx<'_, '_>);

    /// Handles a message to a topic of this front end ([`FrontCx::subscribe`]). Unknown messages
    /// are ignored.
    fn message(&mut self, message: &(dyn Any + Send), cx: &mut FrontCx<'_, '_>) {
        let _ = (message, cx);
    }

    /// Stops the front end: it refuses new requests, completes those in flight, then is closed.
    fn stop(&mut self, cx: &mut FrontCx<'_, '_>);

    /// Looks for input that no ring operation reports, such as new entries of a ring in shared
    /// memory. Returns true if there is any; a `gather` follows. Called in each turn after
    /// [`FrontCx::poll_input`] and while the core spins, so it must be cheap. With `sleeps`, the
    /// core is about to sleep: the front end first asks the other side for a notification that
    /// completes a ring operation, and then looks. If no front end has input, the polling ends.
    fn has_input(&mut self, sleeps: bool) -> bool {
        let _ = sleeps;
        false
    }

    /// True if the front end has ended and has nothing in flight. The core then drops it.
    fn is_closed(&self) -> bool;

    /// Whether the program end waits for the front end; constant for its whole life.
    fn own_work(&self) -> OwnWork {
        OwnWork::Required
    }
}

/// Marks owner ids of front ends. Owner ids of lanes count from 1 and never reach this bit.
pub(crate) const FRONT: u32 = 1 << 31;

/// Values shared by the front ends of a core, one per type.
pub(crate) type FrontEndSharedValues = HashMap<TypeId, Rc<dyn Any>>;

/// The slot of a front end on its core. Another front end may reuse it later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrontKey(usize);

/// The context of a front end: everything outside itself that it may touch.
pub struct FrontCx<'a, 'b> {
    pub(crate) cx: &'a mut Cx<'b>,
    pub(crate) devices: &'a mut CoreLanes,
    pub(crate) user: &'a RingUser,
    /// Nothing waits for this front end, so it has its own lanes.
    pub(crate) background: bool,
    pub(crate) owner: BioOwnerId,
    pub(crate) in_flight: &'a mut usize,
    /// The next time at which to call this front end.
    pub(crate) wake: &'a mut Nanos,
    /// Front ends to call in the next turn.
    pub(crate) scheduled: &'a mut Vec<usize>,
    /// The front end is asked for input until the core sleeps.
    pub(crate) polls_input: &'a mut bool,
    /// If true, all front ends are called in the next turn.
    pub(crate) all_scheduled: &'a mut bool,
    pub(crate) locals: &'a mut FrontEndSharedValues,
    /// CPU time of this core's thread, and its total spin time.
    pub(crate) cpu_time: fn() -> Nanos,
    pub(crate) spin_time: Nanos,
    /// The subscriptions of the core, and the topics of this front end.
    pub(crate) topics: (&'a mut MessageTopicSubscribers, &'a mut Vec<DeviceId>),
}

impl FrontCx<'_, '_> {
    /// Returns this core's lane of `device`, and opens it if necessary.
    ///
    /// # Errors
    /// The error of the device.
    pub fn open(&mut self, device: &Arc<dyn Device>) -> Result<BioTaskLaneId, DeviceControlError> {
        self.devices.open(device, self.background, self.cx)
    }

    /// Closes a lane. The front end must have nothing in flight on it.
    pub fn close(&mut self, slot: BioTaskLaneId) {
        self.devices.close(slot);
    }

    /// Queues a bio: it is submitted with this turn's batch and completes through
    /// [`FrontEnd::complete`].
    pub fn submit(&mut self, slot: BioTaskLaneId, mut bio: Box<Bio>) {
        bio.owner = self.owner;
        bio.started = self.cx.now();
        bio.start();
        *self.in_flight += 1;
        self.devices.push(slot, bio);
    }

    /// Queues a ring operation; its result carries `tag`.
    pub fn push(&mut self, tag: u64, op: RingOp) {
        self.user.push(tag, op);
    }

    /// Cancels ring operations; see [`crate::RingUser::cancel`].
    pub fn cancel(&mut self, tag: u64) {
        self.user.cancel(tag);
    }

    /// Appends the completed ring operations of this front end.
    pub fn take(&mut self, out: &mut Vec<RingCompletion>) {
        self.user.take(out);
    }

    /// Sets whether completions of sends may be reported late; see
    /// [`crate::RingUser::set_defer_sends`].
    pub fn set_defer_sends(&mut self, defers_sends: bool) {
        self.user.set_defer_sends(defers_sends);
    }

    /// Number of ring operations of this front end in flight.
    #[must_use]
    pub fn ring_in_flight(&self) -> usize {
        self.user.in_flight()
    }

    /// The time, the same for the whole turn.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.cx.now()
    }

    /// Asks for one `gather` at `at` or soon after. A later call replaces the time;
    /// [`Nanos::NEVER`] cancels it.
    pub fn wake_at(&mut self, at: Nanos) {
        *self.wake = at;
    }

    /// The key of this front end on its core.
    #[must_use]
    pub fn me(&self) -> FrontKey {
        FrontKey((self.owner.0 & !FRONT) as usize)
    }

    /// Schedules a `gather` of a front end of this core in the next turn, which follows at once.
    /// Ignored if the front end is closed; harmless if another one has its slot.
    pub fn schedule(&mut self, front: FrontKey) {
        self.scheduled.push(front.0);
    }

    /// Makes the core ask this front end for input ([`FrontEnd::has_input`]) until it sleeps next.
    pub fn poll_input(&mut self) {
        *self.polls_input = true;
    }

    /// Schedules a `gather` of all front ends of this core.
    pub fn schedule_all(&mut self) {
        *self.all_scheduled = true;
    }

    /// Returns the value of type `T` that the front ends of this core share; the first call creates
    /// it.
    pub fn local<T: 'static>(&mut self, make: impl FnOnce() -> T) -> Rc<T> {
        let shared = self.locals.entry(TypeId::of::<T>()).or_insert_with(|| Rc::new(make()));
        let Ok(shared) = Rc::clone(shared).downcast::<T>() else { unreachable!("stored by its type") };
        shared
    }

    /// Subscribes to messages for `topic` on this core. A topic is a device or any other id.
    pub fn subscribe(&mut self, topic: DeviceId) {
        let key = self.me().0;
        self.topics.0.subscribe(topic, key, self.topics.1);
    }

    /// Ends a subscription. A message that is being delivered may still arrive.
    pub fn unsubscribe(&mut self, topic: DeviceId) {
        let key = self.me().0;
        self.topics.0.unsubscribe(topic, key, self.topics.1);
    }

    /// CPU time of this core since its thread began, without spinning. Costs a system call.
    #[must_use]
    pub fn cpu_time(&self) -> Nanos {
        (self.cpu_time)().since(self.spin_time)
    }

    /// The core that runs this turn.
    #[must_use]
    pub fn core(&self) -> CoreId {
        self.cx.core()
    }
}
