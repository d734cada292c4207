//! Lane inboxes of a core, and the lane stacks to poll for new messages.
//!
//! A core polls only lane stacks that have work. An inbox remembers the wake target for which it
//! was opened, and a message marks only that target. So the cost of a message does not depend on
//! the number of lanes on the core.

use crate::{DeviceId, LaneCommand};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::{Rc, Weak};

/// The inbox of a lane. Its flag is a plain cell, since the lane's own core delivers the messages.
#[derive(Default)]
pub struct LaneInbox {
    target: Option<PolledUnitId>,
    flag: Cell<bool>,
    queue: RefCell<VecDeque<LaneCommand>>,
}

impl LaneInbox {
    /// True if a command waits. Costs one load of an unshared byte.
    #[must_use]
    pub fn has_messages(&self) -> bool {
        self.flag.get()
    }

    /// Takes the oldest command.
    pub fn take(&self) -> Option<LaneCommand> {
        let mut queue = self.queue.borrow_mut();
        let command = queue.pop_front();
        self.flag.set(!queue.is_empty());
        command
    }
}

/// A unit that the core polls: a whole lane stack, or the front end on top of one. The core assigns
/// the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolledUnitId(pub u32);

/// The lane inboxes of a core.
#[derive(Default)]
pub struct LaneInboxes {
    map: HashMap<DeviceId, Vec<Weak<LaneInbox>>>,
    /// The wake target that runs now; new inboxes belong to it.
    current_target: Option<PolledUnitId>,
    /// Wake targets with messages, once per message.
    woken: Vec<PolledUnitId>,
}

impl LaneInboxes {
    /// Opens an inbox for a lane of `device`. Dropping it closes it.
    pub fn open(&mut self, device: DeviceId) -> Rc<LaneInbox> {
        if self.map.len() == self.map.capacity() {
            // Nothing sends to a dropped wait queue, so its entry is only removed here. The reserve
            // doubles the capacity, so the scan is rare.
            self.map.retain(|_, list| list.iter().any(|inbox| inbox.strong_count() > 0));
            self.map.reserve(self.map.len() + 1);
        }
        let inbox = Rc::new(LaneInbox { target: self.current_target, ..LaneInbox::default() });
        let list = self.map.entry(device).or_default();
        if list.len() == list.capacity() {
            // Only if full: a device may have thousands of lanes on a core.
            list.retain(|p| p.strong_count() > 0);
        }
        list.push(Rc::downgrade(&inbox));
        inbox
    }

    /// Puts `command` into each inbox of `device`, and marks the wake targets of these inboxes.
    pub fn deliver(&mut self, device: DeviceId, command: &LaneCommand) {
        self.each(device, |inbox| {
            inbox.queue.borrow_mut().push_back(command.clone());
            inbox.flag.set(true);
        });
    }

    /// Marks the wake targets of the inboxes of `device`, without a command.
    pub fn wake_up(&mut self, device: DeviceId) {
        self.each(device, |_| {});
    }

    fn each(&mut self, device: DeviceId, put: impl Fn(&LaneInbox)) {
        let Some(list) = self.map.get_mut(&device) else { return };
        list.retain(|p| match p.upgrade() {
            Some(inbox) => {
                put(&inbox);
                self.woken.extend(inbox.target);
                true
            }
            None => false,
        });
        if list.is_empty() {
            self.map.remove(&device);
        }
    }

    /// Sets the wake target that runs from now on, and returns the previous one. Inboxes opened
    /// from now on belong to it. A core that polls everything after each message need not call
    /// this.
    pub fn set_current_target(&mut self, target: Option<PolledUnitId>) -> Option<PolledUnitId> {
        std::mem::replace(&mut self.current_target, target)
    }

    /// The wake target that runs now.
    #[must_use]
    pub fn current_target(&self) -> Option<PolledUnitId> {
        self.current_target
    }

    /// Takes a wake target that has a message.
    pub fn take_woken(&mut self) -> Option<PolledUnitId> {
        self.woken.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AckOnLastDrop, DrainMode};
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn the_last_drop_acknowledges() {
        static DONE: AtomicUsize = AtomicUsize::new(0);
        let ack = AckOnLastDrop::new(|| {
            DONE.fetch_add(1, Ordering::SeqCst);
        });
        let id = DeviceId::new();
        let mut inboxes = LaneInboxes::default();
        let (a, b) = (inboxes.open(id), inboxes.open(id));
        inboxes.deliver(id, &LaneCommand::Suspend { how: DrainMode::Flush, ack: ack.clone() });
        drop(ack);
        assert!(a.has_messages() && b.has_messages());
        drop(a.take());
        assert_eq!(DONE.load(Ordering::SeqCst), 0);
        drop(b);
        assert_eq!(DONE.load(Ordering::SeqCst), 1, "dropping an inbox drops its acks");
        assert!(!a.has_messages());
    }

    #[test]
    fn a_device_without_lanes_answers_at_once() {
        static DONE: AtomicUsize = AtomicUsize::new(0);
        let ack = AckOnLastDrop::new(|| {
            DONE.fetch_add(1, Ordering::SeqCst);
        });
        let mut inboxes = LaneInboxes::default();
        let command = LaneCommand::Suspend { how: DrainMode::Flush, ack };
        inboxes.deliver(DeviceId::new(), &command);
        drop(command);
        assert_eq!(DONE.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn devices_that_come_and_go_leave_nothing() {
        let mut inboxes = LaneInboxes::default();
        let stays: Vec<_> = (0..10).map(|_| DeviceId::new()).map(|id| (id, inboxes.open(id))).collect();
        for _ in 0..10_000 {
            drop(inboxes.open(DeviceId::new()));
        }
        assert!(inboxes.map.len() < 100, "{} are known", inboxes.map.len());
        for (id, inbox) in stays {
            inboxes.deliver(id, &LaneCommand::Kick);
            assert!(inbox.has_messages());
        }
    }

    #[test]
    fn mail_marks_those_that_it_is_for() {
        let mut inboxes = LaneInboxes::default();
        let ids: Vec<DeviceId> = (0..100).map(|_| DeviceId::new()).collect();
        let shared = DeviceId::new();
        let mut held = Vec::new();
        for (n, id) in ids.iter().enumerate() {
            inboxes.set_current_target(Some(PolledUnitId(n as u32)));
            held.push(inboxes.open(*id));
            if n % 50 == 7 {
                held.push(inboxes.open(shared));
            }
        }
        inboxes.set_current_target(None);
        held.push(inboxes.open(shared));
        inboxes.deliver(ids[3], &LaneCommand::Kick);
        assert_eq!((inboxes.take_woken(), inboxes.take_woken()), (Some(PolledUnitId(3)), None));
        inboxes.wake_up(shared);
        assert_eq!(
            (inboxes.take_woken(), inboxes.take_woken()),
            (Some(PolledUnitId(57)), Some(PolledUnitId(7)))
        );
        assert_eq!(inboxes.take_woken(), None, "an inbox without a wake target marks nothing");
        assert!(held.iter().filter(|inbox| inbox.has_messages()).count() == 1, "a wakeup is not a command");
        held.clear();
        inboxes.wake_up(shared);
        assert_eq!(inboxes.take_woken(), None, "a dropped inbox marks nothing");
    }
}
