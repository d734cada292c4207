//! What the connections of one core may hold of memory.
//!
//! Each connection may always have [`FLOOR`]; what it holds beyond that comes out of the core's
//! budget, a plain counter that the connections of a core share. The connections of one device
//! together may not hold more of the budget than they leave to those of others, for what a device
//! has that hangs, it has for good; and none of them more than it leaves to the others of its
//! device. So however greedy some are, a newcomer finds something.
//!
//! *Full is not failed*: a connection that needs more than it may have receives no more, and waits
//! in line. The first in line whose device leaves to others what lies with it may pass the budget
//! with one request, when it is not passed already, and nobody else until it is kept again: so one
//! request, however long, can always be finished, and with it the next. What lies with a device is
//! what connections hold that have requests under way there. Others of its connections give theirs
//! back without it: a payload that waits for memory to arrive in must not wait for itself.
//!
//! A line that does not move is somebody's fault: a connection whose own client has not moved a
//! byte for `stall_max` (shared among those that wait), in the middle of a payload or with answers
//! it does not take, is closed when others have waited as long and it holds more than the floor.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::{Rc, Weak};
use udm_core::bugs::{self, Bug};
use udm_core::{DeviceId, Nanos};
use udm_runtime::{FrontCx, FrontKey};

/// What a connection may always hold, in bytes: two slabs, headers, and a request of some length.
pub(super) const FLOOR: usize = 640 << 10;

/// What connections of one device hold beyond their floors.
#[derive(Default)]
struct DeviceShare {
    held: Cell<usize>,
    /// Of that, what connections hold with requests under way: what a device that hangs keeps.
    under_way: Cell<usize>,
}

/// What one connection holds.
#[derive(Clone, Copy, Default)]
pub(super) struct HeldMemory {
    /// In bytes, with its floor.
    pub(super) bytes: usize,
    /// A payload is on its way that it must be able to finish.
    pub(super) midway: bool,
    /// Requests of it are under way.
    pub(super) under_way: bool,
}

impl HeldMemory {
    fn beyond_floor(self) -> usize {
        self.bytes.saturating_sub(FLOOR)
    }

    /// What of it may lie with its device for good.
    fn with_device(self) -> usize {
        if self.under_way { self.beyond_floor() } else { 0 }
    }
}

impl DeviceShare {
    /// Counts a connection's part anew.
    fn change(&self, before: HeldMemory, now: HeldMemory) {
        self.held.set(self.held.get() - before.beyond_floor() + now.beyond_floor());
        self.under_way.set(self.under_way.get() - before.with_device() + now.with_device());
    }
}

/// A core's budget.
pub(super) struct CoreMemoryBudget {
    max: Cell<usize>,
    /// What connections hold beyond their floors.
    used: Cell<usize>,
    /// Connections that need more than they may have, the longest waiting first.
    line: RefCell<VecDeque<(FrontKey, Rc<DeviceShare>)>>,
    devices: RefCell<HashMap<DeviceId, Weak<DeviceShare>>>,
    /// Who may pass the budget.
    pass: Cell<Option<FrontKey>>,
    /// Since when nobody in line got on; [`Nanos::NEVER`] when nobody waits.
    stuck_since: Cell<Nanos>,
}

/// A connection's part of it.
pub(super) struct MemoryLease {
    core: Rc<CoreMemoryBudget>,
    me: FrontKey,
    /// Its device's; its own before it has one.
    share: Rc<DeviceShare>,
    held: HeldMemory,
    waits: bool,
}

impl CoreMemoryBudget {
    fn new() -> CoreMemoryBudget {
        CoreMemoryBudget {
            max: Cell::new(0),
            used: Cell::new(0),
            line: RefCell::default(),
            devices: RefCell::default(),
            pass: Cell::new(None),
            stuck_since: Cell::new(Nanos::NEVER),
        }
    }

    /// What nobody has.
    fn free(&self) -> usize {
        self.max.get().saturating_sub(self.used.get())
    }

    /// The first in line that may pass the budget, when it is kept.
    fn next(&self) -> Option<FrontKey> {
        let line = self.line.borrow();
        line.iter().find(|(_, share)| share.under_way.get() <= self.free()).map(|(front, _)| *front)
    }

    fn leave(&self, front: FrontKey) {
        self.line.borrow_mut().retain(|(other, _)| *other != front);
    }
}

impl MemoryLease {
    /// A connection's part of the budget of its core, which is `max` bytes.
    pub(super) fn new(cx: &mut FrontCx<'_, '_>, max: usize) -> MemoryLease {
        let core = cx.local(CoreMemoryBudget::new);
        core.max.set(max);
        MemoryLease { core, me: cx.me(), share: Rc::default(), held: HeldMemory::default(), waits: false }
    }

    /// From now on what it holds is for requests to `device`.
    pub(super) fn serve(&mut self, device: DeviceId) {
        let mut devices = self.core.devices.borrow_mut();
        devices.retain(|_, share| share.strong_count() > 0);
        let known = devices.get(&device).and_then(Weak::upgrade);
        let share = known.unwrap_or_default();
        devices.insert(device, Rc::downgrade(&share));
        share.change(HeldMemory::default(), self.held);
        self.share = share;
    }

    /// What a connection that holds `held` may have besides, in bytes.
    pub(super) fn allowance(&self, held: HeldMemory) -> usize {
        let core = &*self.core;
        let mine = held.beyond_floor();
        let before = self.held.beyond_floor();
        let free = core.max.get().saturating_sub(core.used.get() - before + mine);
        let with_device = self.share.under_way.get() - self.held.with_device() + held.with_device();
        if core.pass.get() == Some(self.me) && (held.midway || (free > 0 && with_device <= free)) {
            return usize::MAX;
        }
        // What its device may have besides, half of which it leaves to the device's other clients.
        let room = free.saturating_sub(self.share.held.get() - before + mine) / 2;
        FLOOR.saturating_sub(held.bytes) + room.saturating_sub(mine) / 2
    }

    /// Waits in line for more than there is. True when there is no need: it is the first, and may
    /// pass the budget.
    pub(super) fn wait(&mut self, cx: &mut FrontCx<'_, '_>) -> bool {
        let core = &*self.core;
        if !self.waits {
            self.waits = true;
            let mut line = core.line.borrow_mut();
            line.push_back((self.me, self.share.clone()));
            // Others may have memory in answers that have left, and have not heard of it.
            cx.schedule(self.me);
            if line.len() == 1 {
                core.stuck_since.set(cx.now());
            }
        }
        let may =
            core.pass.get().is_none() && core.used.get() <= core.max.get() && core.next() == Some(self.me);
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
            if !bugs::on(Bug::LineKept) {
                self.core.leave(self.me);
            }
            self.core.stuck_since.set(if self.line() == 0 { Nanos::NEVER } else { cx.now() });
            if let Some(next) = self.core.next() {
                cx.schedule(next);
            }
        }
    }

    /// What it holds now.
    pub(super) fn set(&mut self, held: HeldMemory, cx: &mut FrontCx<'_, '_>) {
        let core = &*self.core;
        let before = std::mem::replace(&mut self.held, held);
        let counted = if bugs::on(Bug::BudgetKept) {
            held.beyond_floor().max(before.beyond_floor())
        } else {
            held.beyond_floor()
        };
        core.used.set(core.used.get() - before.beyond_floor() + counted);
        self.share.change(before, held);
        let mut better =
            held.beyond_floor() < before.beyond_floor() || held.with_device() < before.with_device();
        let over = !held.midway && core.used.get() <= core.max.get();
        if core.pass.get() == Some(self.me) && over && !bugs::on(Bug::PassKept) {
            core.pass.set(None);
            better = true;
        }
        if better && let Some(next) = core.next() {
            cx.schedule(next);
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
        self.core.line.borrow().front().is_some_and(|(front, _)| *front == self.me)
    }

    /// True while this connection waits.
    pub(super) fn waits(&self) -> bool {
        self.waits
    }

    /// True when others have waited too long, and this connection holds what they could have.
    pub(super) fn blocks_waiters(&self, patience: Nanos, now: Nanos) -> bool {
        let since = self.core.stuck_since.get();
        since != Nanos::NEVER
            && since + patience <= now
            && (self.held.bytes > FLOOR || self.core.pass.get() == Some(self.me))
    }
}

impl Drop for MemoryLease {
    fn drop(&mut self) {
        let core = &*self.core;
        core.used.set(core.used.get() - self.held.beyond_floor());
        self.share.change(self.held, HeldMemory::default());
        if core.pass.get() == Some(self.me) {
            core.pass.set(None);
        }
        core.leave(self.me);
    }
}
