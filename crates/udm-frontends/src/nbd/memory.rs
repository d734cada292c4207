//! What the connections of one core may hold of memory.
//!
//! Each connection may always have [`FLOOR`]; what it holds beyond that comes out of the core's budget, a plain counter that the connections of
//! a core share. None may hold more of the budget than it leaves to the others, so that however greedy some are, a newcomer finds something.
//! *Full is not failed*: a connection that needs more than it may have receives no more, and waits in line. The first in line may pass the
//! budget, when it is not passed already, and nobody else until it is kept again: so one request, however long, can always be finished, and
//! with it the next.
//!
//! A line that does not move is somebody's fault: a connection whose own client has not moved a byte for `stall_max` (shared among those that wait), in the
//! middle of a payload or with answers it does not take, is closed when others have waited as long and it holds more than the floor.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use udm_core::Nanos;
use udm_runtime::{FrontCx, FrontKey};

/// What a connection may always hold, in bytes: two slabs, headers, and a request of some length.
pub(super) const FLOOR: usize = 640 << 10;

/// A core's budget.
pub(super) struct CoreMemory {
    max: Cell<usize>,
    /// What connections hold beyond their floors.
    used: Cell<usize>,
    /// Connections that need more than they may have, the longest waiting first.
    line: RefCell<VecDeque<FrontKey>>,
    /// Who may pass the budget.
    pass: Cell<Option<FrontKey>>,
    /// Since when nobody in line got on; [`Nanos::NEVER`] when nobody waits.
    stuck_since: Cell<Nanos>,
}

/// A connection's part of it.
pub(super) struct Holding {
    core: Rc<CoreMemory>,
    me: FrontKey,
    held: usize,
    waits: bool,
}

fn beyond_floor(held: usize) -> usize {
    held.saturating_sub(FLOOR)
}

impl CoreMemory {
    fn new() -> CoreMemory {
        CoreMemory {
            max: Cell::new(0),
            used: Cell::new(0),
            line: RefCell::default(),
            pass: Cell::new(None),
            stuck_since: Cell::new(Nanos::NEVER),
        }
    }
}

impl Holding {
    /// A connection's part of the budget of its core, which is `max` bytes.
    pub(super) fn new(cx: &mut FrontCx<'_, '_>, max: usize) -> Holding {
        let core = cx.local(CoreMemory::new);
        core.max.set(max);
        Holding { core, me: cx.me(), held: 0, waits: false }
    }

    /// What a connection that holds `held` bytes may have besides; `midway` while a payload is on its way that it must be able to finish.
    pub(super) fn allowance(&self, held: usize, midway: bool) -> usize {
        let core = &*self.core;
        let mine = beyond_floor(held);
        let others = core.used.get() - beyond_floor(self.held);
        if core.pass.get() == Some(self.me) && (midway || others + mine <= core.max.get()) {
            return usize::MAX;
        }
        let free = core.max.get().saturating_sub(others + mine);
        FLOOR.saturating_sub(held) + free.saturating_sub(mine) / 2
    }

    /// Waits in line for more than there is. True when there is no need: it is the first, and may pass the budget.
    pub(super) fn wait(&mut self, cx: &mut FrontCx<'_, '_>) -> bool {
        let core = &*self.core;
        let mut line = core.line.borrow_mut();
        if !self.waits {
            self.waits = true;
            line.push_back(self.me);
            if line.len() == 1 {
                core.stuck_since.set(cx.now());
            }
        }
        let may =
            line.front() == Some(&self.me) && core.pass.get().is_none() && core.used.get() <= core.max.get();
        drop(line);
        if may {
            core.pass.set(Some(self.me));
            self.leave_line(cx);
        }
        may
    }

    /// It has what it needs.
    pub(super) fn leave_line(&mut self, cx: &mut FrontCx<'_, '_>) {
        if self.waits {
            self.waits = false;
            let mut line = self.core.line.borrow_mut();
            line.retain(|&front| front != self.me);
            self.core.stuck_since.set(if line.is_empty() { Nanos::NEVER } else { cx.now() });
            if let Some(&first) = line.front() {
                cx.rouse(first);
            }
        }
    }

    /// It holds `held` bytes now; `midway` while a payload is on its way that it must be able to finish.
    pub(super) fn set(&mut self, held: usize, midway: bool, cx: &mut FrontCx<'_, '_>) {
        let core = &*self.core;
        let (before, now) = (beyond_floor(self.held), beyond_floor(held));
        self.held = held;
        core.used.set(core.used.get() - before + now);
        let mut better = now < before;
        if core.pass.get() == Some(self.me) && !midway && core.used.get() <= core.max.get() {
            core.pass.set(None);
            better = true;
        }
        if better && let Some(&first) = core.line.borrow().front() {
            cx.rouse(first);
        }
    }

    /// True while somebody waits for memory: what is only kept is wanted.
    pub(super) fn is_wanted(&self) -> bool {
        self.core.stuck_since.get() != Nanos::NEVER
    }

    /// How many wait.
    pub(super) fn line(&self) -> usize {
        self.core.line.borrow().len()
    }

    /// True when this connection is the first of them.
    pub(super) fn is_first(&self) -> bool {
        self.core.line.borrow().front() == Some(&self.me)
    }

    /// True while this connection waits.
    pub(super) fn waits(&self) -> bool {
        self.waits
    }

    /// True when others have waited too long, and this connection holds what they could have.
    pub(super) fn is_in_the_way(&self, patience: Nanos, now: Nanos) -> bool {
        let since = self.core.stuck_since.get();
        since != Nanos::NEVER
            && since + patience <= now
            && (self.held > FLOOR || self.core.pass.get() == Some(self.me))
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        let core = &*self.core;
        core.used.set(core.used.get() - beyond_floor(self.held));
        if core.pass.get() == Some(self.me) {
            core.pass.set(None);
        }
        core.line.borrow_mut().retain(|&front| front != self.me);
    }
}
