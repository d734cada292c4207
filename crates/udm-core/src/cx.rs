//! All that a lane may touch besides itself.

use crate::{
    CoreId, Cores, DeviceId, LaneCommand, LaneInbox, LaneInboxes, Nanos, OwnerId, TURN_BUDGET, TaskFactory,
    TaskHandle, WakeTarget,
};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::any::Any;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

/// What a core keeps for its lanes, over its whole life. A runtime core, a caller's own thread and
/// a simulated core each have one.
pub struct CoreState {
    id: CoreId,
    cores: usize,
    others: Arc<dyn Cores>,
    owners: u32,
    ports: LaneInboxes,
    rng: SmallRng,
    io: Option<Rc<dyn Any>>,
}

impl CoreState {
    /// The state of core `id` of `cores`, with chance drawn from `seed`. `io` is what the backends
    /// of this world do I/O with (the core's ring); they know its type.
    #[must_use]
    pub fn new(id: CoreId, cores: usize, seed: u64, io: Option<Rc<dyn Any>>) -> CoreState {
        CoreState {
            id,
            cores,
            others: Arc::new(IsolatedCore),
            owners: 0,
            ports: LaneInboxes::default(),
            rng: SmallRng::seed_from_u64(seed),
            io,
        }
    }

    /// The same core, with the inboxes of all: without them its lanes reach nobody, which is enough
    /// for one core that is visited by hand.
    #[must_use]
    pub fn with_cores(mut self, others: Arc<dyn Cores>) -> CoreState {
        self.others = others;
        self
    }

    /// The inboxes of all cores.
    #[must_use]
    pub fn others(&self) -> &Arc<dyn Cores> {
        &self.others
    }

    /// A new owner id, unique on this core.
    pub fn new_owner(&mut self) -> OwnerId {
        self.owners += 1;
        OwnerId(self.owners)
    }

    /// A context for one turn at the time `now`.
    pub fn cx(&mut self, now: Nanos) -> Cx<'_> {
        Cx { now: Cell::new(now), clock: || Nanos(0), wake: Nanos::NEVER, work: TURN_BUDGET, state: self }
    }

    /// A context for one turn that has its time from `clock`, read when somebody first asks. Where
    /// lanes have no use for it the clock is not read at all: on some machines that takes longer
    /// than all that they do for a request.
    pub fn cx_by(&mut self, clock: fn() -> Nanos) -> Cx<'_> {
        Cx { clock, ..self.cx(UNREAD) }
    }

    /// Where commands to the lanes of this core are delivered.
    pub fn ports(&mut self) -> &mut LaneInboxes {
        &mut self.ports
    }

    /// This core.
    #[must_use]
    pub fn id(&self) -> CoreId {
        self.id
    }
}

/// The inboxes of a core that has none.
struct IsolatedCore;

impl Cores for IsolatedCore {
    fn broadcast(&self, _: DeviceId, _: LaneCommand) {}
    fn wake_up(&self, _: CoreId, _: DeviceId) {}
    fn start(&self, _: TaskFactory) -> TaskHandle {
        TaskHandle::new(drop)
    }
}

/// No time yet: earlier than any that a clock says.
const UNREAD: Nanos = Nanos(0);

/// The context of one turn of a core: all that a lane may touch besides itself. The runtime hands
/// it in; so does the simulator.
pub struct Cx<'a> {
    /// The time; [`UNREAD`] until somebody asks.
    now: Cell<Nanos>,
    clock: fn() -> Nanos,
    wake: Nanos,
    /// Bytes that lanes may still touch by themselves.
    work: u64,
    state: &'a mut CoreState,
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

    /// The core that runs this.
    #[must_use]
    pub fn core(&self) -> CoreId {
        self.state.id
    }

    /// How many cores there are.
    #[must_use]
    pub fn cores(&self) -> usize {
        self.state.cores
    }

    /// The inboxes of all cores.
    #[must_use]
    pub fn all_cores(&self) -> &Arc<dyn Cores> {
        &self.state.others
    }

    /// Says who is visited from here on, and who was: see [`LaneInboxes::visit`].
    pub fn visit(&mut self, visit: Option<WakeTarget>) -> Option<WakeTarget> {
        self.state.ports.visit(visit)
    }

    /// Who is visited now.
    #[must_use]
    pub fn current_target(&self) -> Option<WakeTarget> {
        self.state.ports.current_target()
    }

    /// Someone who has mail and was not visited for it.
    pub fn take_woken(&mut self) -> Option<WakeTarget> {
        self.state.ports.take_woken()
    }

    /// Asks for a `poll` at `at` or soon after. Holds for this turn only: whoever waits asks again
    /// in each `poll`.
    pub fn wake_at(&mut self, at: Nanos) {
        self.wake = self.wake.min(at);
    }

    /// Asks for a `poll` at once: as [`Cx::wake_at`] the time that it is, which nobody has to know
    /// for it.
    #[inline]
    pub fn wake_now(&mut self) {
        self.wake = self.wake.min(self.now.get());
    }

    /// The earliest time asked for in this turn, which may be long past; [`Nanos::NEVER`] when
    /// nobody asked.
    #[must_use]
    pub fn wake(&self) -> Nanos {
        self.wake
    }

    /// Bytes of memory that lanes may still touch by their own work in this turn: see
    /// [`crate::Work`].
    #[must_use]
    pub fn cpu_budget(&self) -> u64 {
        self.work
    }

    /// Says what is left of it.
    pub fn set_cpu_budget(&mut self, bytes: u64) {
        self.work = bytes;
    }

    /// A new owner id, unique on this core.
    pub fn new_owner(&mut self) -> OwnerId {
        self.state.new_owner()
    }

    /// Opens a port: commands for `device` reach its holder on this core.
    pub fn open_inbox(&mut self, device: DeviceId) -> Rc<LaneInbox> {
        self.state.ports.open(device)
    }

    /// Chance, from the core's seed.
    pub fn rng(&mut self) -> &mut SmallRng {
        &mut self.state.rng
    }

    /// What this world does I/O with. `None` where there is nothing but lanes.
    #[must_use]
    pub fn io(&self) -> Option<Rc<dyn Any>> {
        self.state.io.clone()
    }
}
