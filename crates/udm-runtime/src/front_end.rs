//! What a front end is, and what it may touch.

use crate::core_lanes::CoreLanes;
use crate::ring::{Done, RingOp, RingUser};
use crate::subscriptions::Subscriptions;
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use udm_core::{Batch, Bio, CoreId, Cx, Device, DeviceId, DeviceSlot, Nanos, OpenError, OwnWork, OwnerId};

/// Something that makes bios out of requests from outside: a connection, a virtqueue. It belongs to
/// one core for life.
pub trait FrontEnd {
    /// Takes in what arrived and submits bios. Called once right after it was attached, then
    /// whenever one of its ring operations finished, a time it asked for has come, or it was
    /// roused. What it does in a call must be bounded, for the others of its core: what is over
    /// waits for the next turn ([`FrontCx::schedule`]).
    fn gather(&mut self, cx: &mut FrontCx<'_, '_>);

    /// Takes its bios that finished and leaves `done` empty.
    fn complete(&mut self, done: &mut Batch, cx: &mut FrontCx<'_, '_>);

    /// Takes notice of a letter to what it listens to ([`FrontCx::subscribe`]). What it does not know
    /// is not for it.
    fn message(&mut self, message: &(dyn Any + Send), cx: &mut FrontCx<'_, '_>) {
        let _ = (message, cx);
    }

    /// Take no more, finish what is in flight, then be closed.
    fn stop(&mut self, cx: &mut FrontCx<'_, '_>);

    /// True when it is over and nothing of it is in flight: the core drops it.
    fn is_closed(&self) -> bool;

    /// Whether the end of the program waits for it; the same for its whole life.
    fn busy(&self) -> OwnWork {
        OwnWork::Required
    }
}

/// Marks the owners that are front ends. Lanes count theirs from 1 and never get there.
pub(crate) const FRONT: u32 = 1 << 31;

/// What the front ends of a core share, one of each type.
pub(crate) type CoreLocals = HashMap<TypeId, Rc<dyn Any>>;

/// A front end's place on its core, which another may have later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrontKey(usize);

/// What a front end may touch besides itself.
pub struct FrontCx<'a, 'b> {
    pub(crate) cx: &'a mut Cx<'b>,
    pub(crate) devices: &'a mut CoreLanes,
    pub(crate) user: &'a RingUser,
    /// Nobody waits for it: its lanes are its own.
    pub(crate) background: bool,
    pub(crate) owner: OwnerId,
    pub(crate) in_flight: &'a mut usize,
    /// When this front end wants to be called.
    pub(crate) wake: &'a mut Nanos,
    /// Front ends to be called in the next turn.
    pub(crate) scheduled: &'a mut Vec<usize>,
    /// All front ends are to be called in the next turn.
    pub(crate) all_scheduled: &'a mut bool,
    pub(crate) locals: &'a mut CoreLocals,
    /// The CPU time of this core's thread, and how much of it was for nothing, since it span.
    pub(crate) spent: fn() -> Nanos,
    pub(crate) spun: Nanos,
    /// Who listens to what, and what this front end does.
    pub(crate) topics: (&'a mut Subscriptions, &'a mut Vec<DeviceId>),
}

impl FrontCx<'_, '_> {
    /// This core's lane of `device`, opened if it is the first to ask.
    ///
    /// # Errors
    /// As the device says.
    pub fn open(&mut self, device: &Arc<dyn Device>) -> Result<DeviceSlot, OpenError> {
        self.devices.open(device, self.background, self.cx)
    }

    /// Gives the lane up. Nothing of this front end may be in flight on it.
    pub fn close(&mut self, slot: DeviceSlot) {
        self.devices.close(slot);
    }

    /// Queues a bio: it goes down with this turn's batch and comes back through
    /// [`FrontEnd::complete`].
    pub fn submit(&mut self, slot: DeviceSlot, mut bio: Box<Bio>) {
        bio.owner = self.owner;
        bio.started = self.cx.now();
        bio.start();
        *self.in_flight += 1;
        self.devices.push(slot, bio);
    }

    /// Starts a ring operation; `tag` comes back with its result.
    pub fn push(&mut self, tag: u64, op: RingOp) {
        self.user.push(tag, op);
    }

    /// Calls off ring operations: see [`crate::RingUser::cancel`].
    pub fn cancel(&mut self, tag: u64) {
        self.user.cancel(tag);
    }

    /// Appends this front end's finished ring operations.
    pub fn take(&mut self, out: &mut Vec<Done>) {
        self.user.take(out);
    }

    /// Says whether this front end has nothing to do when its sends have left: see
    /// [`crate::RingUser::set_defer_sends`].
    pub fn set_defer_sends(&mut self, patient: bool) {
        self.user.set_defer_sends(patient);
    }

    /// Ring operations of this front end under way.
    #[must_use]
    pub fn ring_in_flight(&self) -> usize {
        self.user.in_flight()
    }

    /// The time, the same for the whole turn.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.cx.now()
    }

    /// Asks for one `gather` at `at` or soon after; a later call replaces it, [`Nanos::NEVER`]
    /// takes it back.
    pub fn wake_at(&mut self, at: Nanos) {
        *self.wake = at;
    }

    /// This front end, as others of its core know it.
    #[must_use]
    pub fn me(&self) -> FrontKey {
        FrontKey((self.owner.0 & !FRONT) as usize)
    }

    /// Has a front end of this core gathered in the next turn, which comes at once. One that is
    /// gone does not mind; nor does one that has its place now.
    pub fn schedule(&mut self, front: FrontKey) {
        self.scheduled.push(front.0);
    }

    /// The same for all front ends of this core.
    pub fn schedule_all(&mut self) {
        *self.all_scheduled = true;
    }

    /// What the front ends of this core share of type `T`, made by the first that asks.
    pub fn local<T: 'static>(&mut self, make: impl FnOnce() -> T) -> Rc<T> {
        let shared = self.locals.entry(TypeId::of::<T>()).or_insert_with(|| Rc::new(make()));
        let Ok(shared) = Rc::clone(shared).downcast::<T>() else { unreachable!("kept by its type") };
        shared
    }

    /// From here on this front end is called with the letters to `topic`, a device or an identity
    /// of its own, that are delivered on this core.
    pub fn subscribe(&mut self, topic: DeviceId) {
        let key = self.me().0;
        self.topics.0.subscribe(topic, key, self.topics.1);
    }

    /// From here on it is not. A letter that is being delivered may still come.
    pub fn unsubscribe(&mut self, topic: DeviceId) {
        let key = self.me().0;
        self.topics.0.unsubscribe(topic, key, self.topics.1);
    }

    /// The CPU time that this core has spent since its thread began, but for what it span. A system
    /// call.
    #[must_use]
    pub fn spent(&self) -> Nanos {
        (self.spent)().since(self.spun)
    }

    /// The core that runs this.
    #[must_use]
    pub fn core(&self) -> CoreId {
        self.cx.core()
    }
}
