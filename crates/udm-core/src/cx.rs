//! The context of a core's turn: everything outside itself that a lane may touch.

use crate::{
    BioOwnerId, BioTaskFactory, BioTaskHandle, CoreCommandSender, CoreId, DeviceId, LaneCommand, LaneInbox,
    LaneInboxes, Nanos, PolledUnitId, TURN_BUDGET,
};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::any::Any;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

/// State that a core keeps for its lanes. A runtime core, a caller's own thread and a simulated
/// core each have one.
pub struct CoreLaneState {
    id: CoreId,
    cores: usize,
    others: Arc<dyn CoreCommandSender>,
    owners: u32,
    inboxes: LaneInboxes,
    rng: SmallRng,
    io: Option<Rc<dyn Any>>,
}

impl CoreLaneState {
    /// Creates the state of core `id` of `cores`, with random numbers from `seed`. `io` is the I/O
    /// interface of the backends (the core's ring); they know its type.
    #[must_use]
    pub fn new(id: CoreId, cores: usize, seed: u64, io: Option<Rc<dyn Any>>) -> CoreLaneState {
        CoreLaneState {
            id,
            cores,
            others: Arc::new(NullCoreCommandSender),
            owners: 0,
            inboxes: LaneInboxes::default(),
            rng: SmallRng::seed_from_u64(seed),
            io,
        }
    }

    /// Adds access to all cores. Without it, lanes can wake no other core, which is enough for a
    /// single core that is polled by hand.
    #[must_use]
    pub fn with_cores(mut self, others: Arc<dyn CoreCommandSender>) -> CoreLaneState {
        self.others = others;
        self
    }

    /// All cores.
    #[must_use]
    pub fn others(&self) -> &Arc<dyn CoreCommandSender> {
        &self.others
    }

    /// A new owner id, unique on this core.
    pub fn new_owner(&mut self) -> BioOwnerId {
        self.owners += 1;
        BioOwnerId(self.owners)
    }

    /// A context for one turn at the time `now`.
    pub fn cx(&mut self, now: Nanos) -> Cx<'_> {
        Cx { now: Cell::new(now), clock: || Nanos(0), wake: Nanos::NEVER, work: TURN_BUDGET, state: self }
    }

    /// A context for one turn that reads the time from `clock` when a lane first asks. If no lane
    /// asks, the clock is not read: on some machines a reading costs more than all work of the
    /// lanes for a request.
    pub fn cx_by(&mut self, clock: fn() -> Nanos) -> Cx<'_> {
        Cx { clock, ..self.cx(UNREAD) }
    }

    /// The lane inboxes of this core.
    pub fn inboxes(&mut self) -> &mut LaneInboxes {
        &mut self.inboxes
    }

    /// The id of this core.
    #[must_use]
    pub fn id(&self) -> CoreId {
        self.id
    }
}

/// Access to no core at all.
struct NullCoreCommandSender;

impl CoreCommandSender for NullCoreCommandSender {
    fn broadcast(&self, _: DeviceId, _: LaneCommand) {}
    fn wake_up(&self, _: CoreId, _: DeviceId) {}
    fn start(&self, _: BioTaskFactory) -> BioTaskHandle {
        BioTaskHandle::new(drop)
    }
}

/// The clock has not been read: earlier than any time of a clock.
const UNREAD: Nanos = Nanos(0);

/// The context of one turn of a core, passed to lanes by the runtime or the simulator.
pub struct Cx<'a> {
    /// The time; [`UNREAD`] until a lane asks.
    now: Cell<Nanos>,
    clock: fn() -> Nanos,
    wake: Nanos,
    /// Rest of the CPU budget of this turn, in bytes.
    work: u64,
    state: &'a mut CoreLaneState,
}

impl Cx<'_> {
    /// The time, the same for the whole turn.
    #[must_use]
    pub fn now(&self) -> Nanos {
        if self.now.get() == UNREAD {
            self.now.set((self.clock)());
        }
        self.now.get()
    }

    /// The core that runs this turn.
    #[must_use]
    pub fn core(&self) -> CoreId {
        self.state.id
    }

    /// Number of cores.
    #[must_use]
    pub fn cores(&self) -> usize {
        self.state.cores
    }

    /// All cores.
    #[must_use]
    pub fn all_cores(&self) -> &Arc<dyn CoreCommandSender> {
        &self.state.others
    }

    /// Sets the wake target that runs from now on and returns the previous one; see
    /// [`LaneInboxes::set_current_target`].
    pub fn set_current_target(&mut self, target: Option<PolledUnitId>) -> Option<PolledUnitId> {
        self.state.inboxes.set_current_target(target)
    }

    /// The wake target that runs now.
    #[must_use]
    pub fn current_target(&self) -> Option<PolledUnitId> {
        self.state.inboxes.current_target()
    }

    /// Takes a wake target that has a message and has not run since.
    pub fn take_woken(&mut self) -> Option<PolledUnitId> {
        self.state.inboxes.take_woken()
    }

    /// Asks for a `poll` at `at` or soon after. Valid for this turn only: a lane that still waits
    /// asks again in each `poll`.
    pub fn wake_at(&mut self, at: Nanos) {
        self.wake = self.wake.min(at);
    }

    /// Asks for a `poll` at once. Equal to [`Cx::wake_at`] with the current time, without reading
    /// the clock.
    #[inline]
    pub fn wake_now(&mut self) {
        self.wake = self.wake.min(self.now.get());
    }

    /// The earliest time asked for in this turn, which may be past; [`Nanos::NEVER`] if no lane
    /// asked.
    #[must_use]
    pub fn wake(&self) -> Nanos {
        self.wake
    }

    /// Bytes of memory that lanes may still touch by CPU in this turn; see
    /// [`crate::CpuBudgetedQueue`].
    #[must_use]
    pub fn cpu_budget(&self) -> u64 {
        self.work
    }

    /// Sets the rest of the CPU budget.
    pub fn set_cpu_budget(&mut self, bytes: u64) {
        self.work = bytes;
    }

    /// A new owner id, unique on this core.
    pub fn new_owner(&mut self) -> BioOwnerId {
        self.state.new_owner()
    }

    /// Opens a lane inbox for commands to `device` on this core.
    pub fn open_inbox(&mut self, device: DeviceId) -> Rc<LaneInbox> {
        self.state.inboxes.open(device)
    }

    /// Random numbers from the core's seed.
    pub fn rng(&mut self) -> &mut SmallRng {
        &mut self.state.rng
    }

    /// The I/O interface of this core. `None` if lanes run without one.
    #[must_use]
    pub fn io(&self) -> Option<Rc<dyn Any>> {
        self.state.io.clone()
    }
}
