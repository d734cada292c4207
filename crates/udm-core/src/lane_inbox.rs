//! Where mail for lanes arrives on a core, and who is to be visited for it.
//!
//! A core visits what has something to do, and a letter is something for those that it concerns
//! alone: a port remembers in whose visit it was opened, and mail for it marks that one. So a
//! letter costs a core with thousands of lanes no more than one with few.

use crate::{DeviceId, LaneCommand};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::{Rc, Weak};

/// A lane's letter box. The flag is a plain cell: a core's commands are delivered by the core
/// itself.
#[derive(Default)]
pub struct LaneInbox {
    visit: Option<WakeTarget>,
    flag: Cell<bool>,
    queue: RefCell<VecDeque<LaneCommand>>,
}

impl LaneInbox {
    /// True when something is in it. One load of an unshared byte.
    #[must_use]
    pub fn has_messages(&self) -> bool {
        self.flag.get()
    }

    /// The oldest command.
    pub fn take(&self) -> Option<LaneCommand> {
        let mut queue = self.queue.borrow_mut();
        let command = queue.pop_front();
        self.flag.set(!queue.is_empty());
        command
    }
}

/// What a core visits: the lane of a whole stack, or what stands on top of one. The core numbers
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WakeTarget(pub u32);

/// The letter boxes of a core.
#[derive(Default)]
pub struct LaneInboxes {
    map: HashMap<DeviceId, Vec<Weak<LaneInbox>>>,
    /// Who is being visited: ports opened now are somewhere in it.
    current_target: Option<WakeTarget>,
    /// Who has mail, each as often as it came.
    woken: Vec<WakeTarget>,
}

impl LaneInboxes {
    /// A new box for a lane of `device`; it is closed by dropping it.
    pub fn open(&mut self, device: DeviceId) -> Rc<LaneInbox> {
        if self.map.len() == self.map.capacity() {
            // Nobody writes to a bell that is gone. Not each time, so there is room for as many.
            self.map.retain(|_, list| list.iter().any(|port| port.strong_count() > 0));
            self.map.reserve(self.map.len() + 1);
        }
        let port = Rc::new(LaneInbox { visit: self.current_target, ..LaneInbox::default() });
        let list = self.map.entry(device).or_default();
        if list.len() == list.capacity() {
            // Not each time: a device may have thousands of lanes on a core.
            list.retain(|p| p.strong_count() > 0);
        }
        list.push(Rc::downgrade(&port));
        port
    }

    /// Puts `command` into each box of `device`, and marks who is to be visited for it.
    pub fn deliver(&mut self, device: DeviceId, command: &LaneCommand) {
        self.each(device, |port| {
            port.queue.borrow_mut().push_back(command.clone());
            port.flag.set(true);
        });
    }

    /// Marks who has a box of `device`.
    pub fn wake_up(&mut self, device: DeviceId) {
        self.each(device, |_| {});
    }

    fn each(&mut self, device: DeviceId, put: impl Fn(&LaneInbox)) {
        let Some(list) = self.map.get_mut(&device) else { return };
        list.retain(|p| match p.upgrade() {
            Some(port) => {
                put(&port);
                self.woken.extend(port.visit);
                true
            }
            None => false,
        });
        if list.is_empty() {
            self.map.remove(&device);
        }
    }

    /// Says who is visited from here on, and who was; boxes that it opens are its own. Cores that
    /// visit all there is whenever something came need not say.
    pub fn visit(&mut self, visit: Option<WakeTarget>) -> Option<WakeTarget> {
        std::mem::replace(&mut self.current_target, visit)
    }

    /// Who is visited now.
    #[must_use]
    pub fn current_target(&self) -> Option<WakeTarget> {
        self.current_target
    }

    /// Someone who has mail and was not visited for it.
    pub fn take_woken(&mut self) -> Option<WakeTarget> {
        self.woken.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Ack, Drain};
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn the_last_drop_acknowledges() {
        static DONE: AtomicUsize = AtomicUsize::new(0);
        let ack = Ack::new(|| {
            DONE.fetch_add(1, Ordering::SeqCst);
        });
        let id = DeviceId::new();
        let mut ports = LaneInboxes::default();
        let (a, b) = (ports.open(id), ports.open(id));
        ports.deliver(id, &LaneCommand::Suspend { how: Drain::Flush, ack: ack.clone() });
        drop(ack);
        assert!(a.has_messages() && b.has_messages());
        drop(a.take());
        assert_eq!(DONE.load(Ordering::SeqCst), 0);
        drop(b);
        assert_eq!(DONE.load(Ordering::SeqCst), 1, "a closed port answers too");
        assert!(!a.has_messages());
    }

    #[test]
    fn a_device_without_lanes_answers_at_once() {
        static DONE: AtomicUsize = AtomicUsize::new(0);
        let ack = Ack::new(|| {
            DONE.fetch_add(1, Ordering::SeqCst);
        });
        let mut ports = LaneInboxes::default();
        let command = LaneCommand::Suspend { how: Drain::Flush, ack };
        ports.deliver(DeviceId::new(), &command);
        drop(command);
        assert_eq!(DONE.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn devices_that_come_and_go_leave_nothing() {
        let mut ports = LaneInboxes::default();
        let stays: Vec<_> = (0..10).map(|_| DeviceId::new()).map(|id| (id, ports.open(id))).collect();
        for _ in 0..10_000 {
            drop(ports.open(DeviceId::new()));
        }
        assert!(ports.map.len() < 100, "{} are known", ports.map.len());
        for (id, port) in stays {
            ports.deliver(id, &LaneCommand::Kick);
            assert!(port.has_messages());
        }
    }

    #[test]
    fn mail_marks_those_that_it_is_for() {
        let mut ports = LaneInboxes::default();
        let ids: Vec<DeviceId> = (0..100).map(|_| DeviceId::new()).collect();
        let shared = DeviceId::new();
        let mut held = Vec::new();
        for (n, id) in ids.iter().enumerate() {
            ports.visit(Some(WakeTarget(n as u32)));
            held.push(ports.open(*id));
            if n % 50 == 7 {
                held.push(ports.open(shared));
            }
        }
        ports.visit(None);
        held.push(ports.open(shared));
        ports.deliver(ids[3], &LaneCommand::Kick);
        assert_eq!((ports.take_woken(), ports.take_woken()), (Some(WakeTarget(3)), None));
        ports.wake_up(shared);
        assert_eq!((ports.take_woken(), ports.take_woken()), (Some(WakeTarget(57)), Some(WakeTarget(7))));
        assert_eq!(ports.take_woken(), None, "who is visited anyhow is not marked");
        assert!(held.iter().filter(|port| port.has_messages()).count() == 1, "a bell is no letter");
        held.clear();
        ports.wake_up(shared);
        assert_eq!(ports.take_woken(), None, "whose port is gone is not marked");
    }
}
