//! Preemption of turns: at an access to state shared by cores, the messages of another core are
//! delivered and its lanes are polled.
//!
//! At most one core preempts at each point, and it runs to the end. It starts no new requests, and
//! its completed bios are handled after the turn that it preempted. Of its tasks only owner lanes
//! run.

use crate::cores::{SimCoreInboxes, TaskPurpose};
use crate::environment::{SharedEnv, lock_environment};
use crate::machine::SimCore;
use crate::rng::SimRng;
use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use udm_core::Nanos;

/// The cores that wait while another core has its turn.
pub(crate) struct PausedCores {
    /// All cores except the one with the turn.
    pub(crate) cores: Vec<SimCore>,
    /// Index of the core with the turn.
    pub(crate) turn: usize,
    pub(crate) env: SharedEnv,
    pub(crate) inboxes: Arc<SimCoreInboxes>,
    pub(crate) chance: SimRng,
    /// Number of preemptions.
    pub(crate) acted: u64,
    /// True for a purpose whose tasks open lanes that get no requests of devices.
    pub(crate) is_internal_io: fn(TaskPurpose) -> bool,
}

thread_local! {
    static OTHERS: RefCell<Option<PausedCores>> = const { RefCell::new(None) };
}

/// Enables preemption on this thread.
pub(crate) fn enable_preemption(others: PausedCores) {
    // Cores left by a failed run cannot be dropped, because they have bios in flight.
    let _ = ManuallyDrop::new(OTHERS.replace(Some(others)));
    #[cfg(feature = "interleave")]
    udm_core::interleave::set_interleave_hook(Some(preempt));
}

/// Disables preemption, and returns the cores.
pub(crate) fn disable_preemption() -> Option<PausedCores> {
    #[cfg(feature = "interleave")]
    udm_core::interleave::set_interleave_hook(None);
    OTHERS.take()
}

/// Lets another core run, by chance.
#[cfg(feature = "interleave")]
fn preempt() {
    let Some(others) = OTHERS.take() else { return };
    // After a panic the cores must not be dropped, because they have bios in flight.
    let mut others = ManuallyDrop::new(others);
    if others.chance.one_in(4) {
        others.act();
    }
    OTHERS.set(Some(ManuallyDrop::into_inner(others)));
}

#[cfg_attr(not(feature = "interleave"), expect(dead_code, reason = "used only with preemption"))]
impl PausedCores {
    fn act(&mut self) {
        let now = lock_environment(&self.env).now;
        let number = |place: usize| if place < self.turn { place } else { place + 1 };
        let reason = |place: usize| {
            let lanes = self.cores[place].open.iter().map(|o| o.wake).min().unwrap_or(Nanos::NEVER);
            let tasks = self.cores[place].tasks.iter().filter(|task| task.is_owner_lane());
            let tasks = tasks.map(|task| task.reason()).min().unwrap_or(Nanos::NEVER);
            lanes.min(tasks).min(self.inboxes.next(number(place)))
        };
        let ready: Vec<usize> = (0..self.cores.len()).filter(|&place| reason(place) <= now).collect();
        if ready.is_empty() {
            return;
        }
        let place = self.chance.pick(&ready);
        let c = number(place);
        self.set_turn(now, c);
        let core = &mut self.cores[place];
        core.deliver(&self.inboxes, c, 4);
        let SimCore { open, state, tasks, .. } = core;
        for open in open.iter_mut().filter(|open| open.has_messages || open.wake <= now) {
            open.has_messages = false;
            let mut cx = state.cx(now);
            cx.set_current_target(Some(open.wake_target()));
            open.lane.poll(&mut open.completed, &mut cx);
            open.wake = cx.wake();
        }
        // Other tasks run only in their own turns.
        lock_environment(&self.env).task = Some(TaskPurpose::OwnerLane).filter(|&p| (self.is_internal_io)(p));
        tasks.retain_mut(|task| !task.is_owner_lane() || task.reason() > now || !task.turn(state, now));
        lock_environment(&self.env).task = None;
        self.acted += 1;
        self.set_turn(now, self.turn);
    }

    fn set_turn(&self, now: Nanos, core: usize) {
        lock_environment(&self.env).core = core as u16;
        self.inboxes.set_turn(now, Some(core));
    }
}
