//! Turns inside of turns: at a point where lanes of several cores meet, another core has its mail
//! delivered and its lanes polled.
//!
//! That is one preemption at each point and no more: what the other does, it does whole. It asks
//! for nothing new meanwhile, and what comes back to it is looked at behind the turn that it was
//! in. Of its tasks those act that have one order for all cores.

use crate::cores::{SimCores, TaskPurpose};
use crate::environment::{SharedEnv, lock};
use crate::machine::SimCore;
use crate::rng::SimRng;
use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use udm_core::Nanos;

/// A core that has its turn is taken out of the world; the others wait here.
pub(crate) struct PausedCores {
    /// All but it.
    pub(crate) cores: Vec<SimCore>,
    /// Its number.
    pub(crate) turn: usize,
    pub(crate) env: SharedEnv,
    pub(crate) inboxes: Arc<SimCores>,
    pub(crate) chance: SimRng,
    /// How often one of them acted.
    pub(crate) acted: u64,
    /// What a task for this opens gets no requests of devices.
    pub(crate) is_internal_io: fn(TaskPurpose) -> bool,
}

thread_local! {
    static OTHERS: RefCell<Option<PausedCores>> = const { RefCell::new(None) };
}

/// The points of this thread are met from now on.
pub(crate) fn begin(others: PausedCores) {
    // What a run that failed has left can't be dropped: bios are in flight in it.
    let _ = ManuallyDrop::new(OTHERS.replace(Some(others)));
    #[cfg(feature = "interleave")]
    udm_core::interleave::set(Some(preempt));
}

/// Back to whole turns.
pub(crate) fn end() -> Option<PausedCores> {
    #[cfg(feature = "interleave")]
    udm_core::interleave::set(None);
    OTHERS.take()
}

/// One of the others acts, now and then.
#[cfg(feature = "interleave")]
fn preempt() {
    let Some(others) = OTHERS.take() else { return };
    // Where it panics the others are not taken apart: bios are in flight in them.
    let mut others = ManuallyDrop::new(others);
    if others.chance.one_in(4) {
        others.act();
    }
    OTHERS.set(Some(ManuallyDrop::into_inner(others)));
}

#[cfg_attr(not(feature = "interleave"), expect(dead_code, reason = "nobody meets anybody then"))]
impl PausedCores {
    fn act(&mut self) {
        let now = lock(&self.env).now;
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
        for open in open.iter_mut().filter(|open| open.mail || open.wake <= now) {
            open.mail = false;
            let mut cx = state.cx(now);
            cx.visit(Some(open.visit()));
            open.lane.poll(&mut open.completed, &mut cx);
            open.wake = cx.wake();
        }
        // Others are looked at behind their turn.
        lock(&self.env).task = Some(TaskPurpose::OwnerLane).filter(|&p| (self.is_internal_io)(p));
        tasks.retain_mut(|task| !task.is_owner_lane() || task.reason() > now || !task.turn(state, now));
        lock(&self.env).task = None;
        self.acted += 1;
        self.set_turn(now, self.turn);
    }

    fn set_turn(&self, now: Nanos, core: usize) {
        lock(&self.env).core = core as u16;
        self.inboxes.set_turn(now, Some(core));
    }
}
