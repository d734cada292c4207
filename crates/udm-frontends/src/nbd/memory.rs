//! Limits the memory that the connections of one core may hold.
//!
//! Each connection may always hold [`FLOOR`] bytes. Memory beyond that comes from the core's
//! budget, a plain counter that the connections of a core share. The connections of one device
//! together may hold at most as much of the budget as they leave to other devices, because a device
//! that hangs never returns its memory. One connection may hold at most as much as it leaves to the
//! others of its device. So a new connection always gets some memory.
//!
//! *Full is not failed*: a connection that needs more memory stops receiving and waits in line. One
//! connection at a time may exceed the budget with one request, if the budget is not exceeded
//! already. So one request of any length can always be completed, and then the next. This right
//! goes to the first in line whose device holds no more than the free budget. Here only the memory
//! of connections with requests in flight at the device counts. Other connections free their memory
//! without the device. So a payload that waits for memory never waits for itself.
//!
//! If the line does not move, a client is stalled. A connection is closed if all of these hold:
//!
//! * Its client has not moved a byte for `stall_max` (divided by the number of waiting
//!   connections), in the middle of a payload or with unread answers.
//! * Others have waited as long.
//! * It holds more than the floor, or has the right to exceed the budget.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::{Rc, Weak};
use udm_core::{DeviceId, Nanos};
use udm_runtime::{FrontCx, FrontKey};

/// Bytes that a connection may always hold: two slabs, headers, and a request of some length.
pub(super) const FLOOR: usize = 640 << 10;

/// Memory that the connections of one device hold beyond their floors.
#[derive(Default)]
struct DeviceConnectionsMemory {
    held: Cell<usize>,
    /// The part held by connections with requests in flight, which a device that hangs keeps.
    in_flight: Cell<usize>,
}

/// Memory of one connection.
#[derive(Clone, Copy, Default)]
pub(super) struct ConnectionHeldMemory {
    /// In bytes, including its floor.
    pub(super) bytes: usize,
    /// A payload is arriving, and it must be possible to complete it.
    pub(super) midway: bool,
    /// Requests are in flight.
    pub(super) in_flight: bool,
}

impl ConnectionHeldMemory {
    fn beyond_floor(self) -> usize {
        self.bytes.saturating_sub(FLOOR)
    }

    /// The part that the device may keep forever.
    fn with_device(self) -> usize {
        if self.in_flight { self.beyond_floor() } else { 0 }
    }
}

impl DeviceConnectionsMemory {
    /// Replaces a connection's part.
    fn change(&self, before: ConnectionHeldMemory, now: ConnectionHeldMemory) {
        self.held.set(self.held.get() - before.beyond_floor() + now.beyond_floor());
        self.in_flight.set(self.in_flight.get() - before.with_device() + now.with_device());
    }
}

/// The memory budget of a core.
pub(super) struct CoreMemoryBudget {
    max: Cell<usize>,
    /// Memory that connections hold beyond their floors.
    used: Cell<usize>,
    /// Connections that wait for memory, the longest waiting first.
    line: RefCell<VecDeque<(FrontKey, Rc<DeviceConnectionsMemory>)>>,
    devices: RefCell<HashMap<DeviceId, Weak<DeviceConnectionsMemory>>>,
    /// The connection that may exceed the budget.
    pass: Cell<Option<FrontKey>>,
    /// Time since which no waiting connection got memory; [`Nanos::NEVER`] if none waits.
    stuck_since: Cell<Nanos>,
}

/// A connection's part of its core's budget.
pub(super) struct ConnectionMemoryLease {
    core: Rc<CoreMemoryBudget>,
    me: FrontKey,
    /// Share of its device; before that, one of its own.
    share: Rc<DeviceConnectionsMemory>,
    held: ConnectionHeldMemory,
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

    /// Bytes of the budget that are free.
    fn free(&self) -> usize {
        self.max.get().saturating_sub(self.used.get())
    }

    /// The first in line that may exceed the budget, if the budget is not exceeded already.
    fn next(&self) -> Option<FrontKey> {
        let line = self.line.borrow();
        line.iter().find(|(_, share)| share.in_flight.get() <= self.free()).map(|(front, _)| *front)
    }

    fn leave(&self, front: FrontKey) {
        self.line.borrow_mut().retain(|(other, _)| *other != front);
    }
}

impl ConnectionMemoryLease {
    /// Creates a connection's part of its core's budget of `max` bytes.
    pub(super) fn new(cx: &mut FrontCx<'_, '_>, max: usize) -> ConnectionMemoryLease {
        let core = cx.local(CoreMemoryBudget::new);
        core.max.set(max);
        ConnectionMemoryLease {
            core,
            me: cx.me(),
            share: Rc::default(),
            held: ConnectionHeldMemory::default(),
            waits: false,
        }
    }

    /// Counts the held memory for `device` from now on.
    pub(super) fn serve(&mut self, device: DeviceId) {
        let mut devices = self.core.devices.borrow_mut();
        devices.retain(|_, share| share.strong_count() > 0);
        let known = devices.get(&device).and_then(Weak::upgrade);
        let share = known.unwrap_or_default();
        devices.insert(device, Rc::downgrade(&share));
        share.change(ConnectionHeldMemory::default(), self.held);
        self.share = share;
    }

    /// Returns the number of bytes that a connection that holds `held` may take in addition.
    pub(super) fn allowance(&self, held: ConnectionHeldMemory) -> usize {
        let core = &*self.core;
        let mine = held.beyond_floor();
        let before = self.held.beyond_floor();
        let free = core.max.get().saturating_sub(core.used.get() - before + mine);
        let with_device = self.share.in_flight.get() - self.held.with_device() + held.with_device();
        if core.pass.get() == Some(self.me) && (held.midway || (free > 0 && with_device <= free)) {
            return usize::MAX;
        }
        // The bytes that all clients of its device may still take. Half of them are left to the
        // device's other clients.
        let room = free.saturating_sub(self.share.held.get() - before + mine) / 2;
        FLOOR.saturating_sub(held.bytes) + room.saturating_sub(mine) / 2
    }

    /// Waits in line. Returns true if that is not necessary, because the connection may exceed the
    /// budget.
    pub(super) fn wait(&mut self, cx: &mut FrontCx<'_, '_>) -> bool {
        let core = &*self.core;
        if !self.waits {
            self.waits = true;
            let mut line = core.line.borrow_mut();
            line.push_back((self.me, self.share.clone()));
            // Others may hold memory of answers that have left, without having seen the completion.
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

    /// Leaves the line, because the connection has the memory that it needs.
    pub(super) fn leave_line(&mut self, cx: &mut FrontCx<'_, '_>) {
        if self.waits {
            self.waits = false;
            self.core.leave(self.me);
            self.core.stuck_since.set(if self.line() == 0 { Nanos::NEVER } else { cx.now() });
            if let Some(next) = self.core.next() {
                cx.schedule(next);
            }
        }
    }

    /// Sets the memory that the connection holds now.
    pub(super) fn set(&mut self, held: ConnectionHeldMemory, cx: &mut FrontCx<'_, '_>) {
        let core = &*self.core;
        let before = std::mem::replace(&mut self.held, held);
        core.used.set(core.used.get() - before.beyond_floor() + held.beyond_floor());
        self.share.change(before, held);
        let mut better =
            held.beyond_floor() < before.beyond_floor() || held.with_device() < before.with_device();
        let over = !held.midway && core.used.get() <= core.max.get();
        if core.pass.get() == Some(self.me) && over {
            core.pass.set(None);
            better = true;
        }
        if better && let Some(next) = core.next() {
            cx.schedule(next);
        }
    }

    /// Returns true while a connection waits for memory, so that memory kept for reuse should be
    /// freed.
    pub(super) fn is_wanted(&self) -> bool {
        self.core.stuck_since.get() != Nanos::NEVER
    }

    /// Number of waiting connections.
    pub(super) fn line(&self) -> usize {
        self.core.line.borrow().len()
    }

    /// Returns true if this connection is the first in line.
    pub(super) fn is_first(&self) -> bool {
        self.core.line.borrow().front().is_some_and(|(front, _)| *front == self.me)
    }

    /// Returns true while this connection waits.
    pub(super) fn waits(&self) -> bool {
        self.waits
    }

    /// Returns true if others have waited too long and this connection holds memory that they could
    /// use.
    pub(super) fn blocks_waiters(&self, wait_limit: Nanos, now: Nanos) -> bool {
        let since = self.core.stuck_since.get();
        since != Nanos::NEVER
            && since + wait_limit <= now
            && (self.held.bytes > FLOOR || self.core.pass.get() == Some(self.me))
    }
}

impl Drop for ConnectionMemoryLease {
    fn drop(&mut self) {
        let core = &*self.core;
        core.used.set(core.used.get() - self.held.beyond_floor());
        self.share.change(self.held, ConnectionHeldMemory::default());
        if core.pass.get() == Some(self.me) {
            core.pass.set(None);
        }
        core.leave(self.me);
    }
}
