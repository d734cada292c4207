//! Messages to lanes: how the control half changes the data path without a lock.
//!
//! A command goes to every core ([`Cores::broadcast`]), there to the [`Port`] of each lane of the device, and the lane finds it at its next
//! `submit` or `poll` by one test of a plain flag. The answer is an [`Ack`]: a token of which every receiver holds a clone; when the last
//! clone is dropped, all have done what was asked. A core with no lane of the device drops its clone at once.

use crate::{Device, DeviceId, Drain};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex};

/// Something for the lanes of a mapped device to do. See the state machine in udm-dm, `mapped/lane.rs`.
#[derive(Clone)]
pub enum LaneCommand {
    /// Open the lane of `table`, without using it yet. A failure goes into `failure`.
    Prepare {
        /// The new table.
        table: Arc<dyn Device>,
        /// Which load it is; a `Resume` with the same number uses it.
        generation: u64,
        /// Where an error is put.
        failure: Failure,
        /// Dropped when done.
        ack: Ack,
    },
    /// Drop the lane that a `Prepare` opened: the resume was called off.
    Unprepare {
        /// Which load it was.
        generation: u64,
        /// Dropped when done.
        ack: Ack,
    },
    /// Park new bios; drop the token when nothing is in flight any more.
    Suspend {
        /// What to do with bios that are held back.
        how: Drain,
        /// Dropped when the lane is empty.
        ack: Ack,
    },
    /// Take the table of `generation` (prepared before, or the one in use) and let parked bios go.
    Resume {
        /// The table to use.
        generation: u64,
        /// Dropped when done.
        ack: Ack,
    },
    /// Nothing but a `poll`: something that lanes wait for has changed.
    Kick,
}

/// All cores, for those that send them commands.
pub trait Cores: Send + Sync {
    /// Delivers `command` to the lanes of `device` on every core.
    fn broadcast(&self, device: DeviceId, command: LaneCommand);

    /// Keeps a lane of `device` open on one core until [`Cores::release`], and polls it: a device that has something to do has a lane to do it with, though nobody
    /// uses it. A failure goes into `failure`; `ack` is dropped when the lane is open, or can't be. Where lanes are always open there is
    /// nothing to do.
    fn hold(&self, device: Arc<dyn Device>, failure: Failure, ack: Ack) {
        let _ = (device, failure, ack);
    }

    /// Lets go of what one [`Cores::hold`] of `device` keeps. A lane with work of its own ends that first.
    fn release(&self, device: DeviceId) {
        let _ = device;
    }
}

/// A token held by everyone who has yet to answer. The last drop runs the callback.
#[derive(Clone)]
pub struct Ack(#[expect(dead_code, reason = "held for its drop")] Arc<AckInner>);

struct AckInner(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Ack {
    /// A token whose last drop runs `then`, on whichever thread drops it.
    pub fn new(then: impl FnOnce() + Send + Sync + 'static) -> Ack {
        Ack(Arc::new(AckInner(Some(Box::new(then)))))
    }
}

impl Drop for AckInner {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then();
        }
    }
}

/// Where the lanes put the first error of a command.
#[derive(Clone, Default)]
pub struct Failure(Arc<Mutex<Option<crate::OpenError>>>);

impl Failure {
    /// Keeps `error` unless there is one already. Control path: opening a lane.
    pub fn set(&self, error: crate::OpenError) {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(error);
    }

    /// Takes the error out.
    #[must_use]
    pub fn take(&self) -> Option<crate::OpenError> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).take()
    }
}

/// A lane's letter box. The flag is a plain cell: a core's commands are delivered by the core itself.
#[derive(Default)]
pub struct Port {
    flag: Cell<bool>,
    queue: RefCell<VecDeque<LaneCommand>>,
}

impl Port {
    /// True when something is in it. One load of an unshared byte.
    #[must_use]
    pub fn has_mail(&self) -> bool {
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

/// The letter boxes of a core.
#[derive(Default)]
pub struct Ports {
    map: HashMap<DeviceId, Vec<Weak<Port>>>,
}

impl Ports {
    /// A new box for a lane of `device`; it is closed by dropping it.
    pub fn open(&mut self, device: DeviceId) -> Rc<Port> {
        let port = Rc::new(Port::default());
        let list = self.map.entry(device).or_default();
        if list.len() == list.capacity() {
            // Not each time: a device may have thousands of lanes on a core.
            list.retain(|p| p.strong_count() > 0);
        }
        list.push(Rc::downgrade(&port));
        port
    }

    /// Puts `command` into each box of `device`. The caller then polls its lanes once.
    pub fn deliver(&mut self, device: DeviceId, command: &LaneCommand) {
        let Some(list) = self.map.get_mut(&device) else { return };
        list.retain(|p| match p.upgrade() {
            Some(port) => {
                port.queue.borrow_mut().push_back(command.clone());
                port.flag.set(true);
                true
            }
            None => false,
        });
        if list.is_empty() {
            self.map.remove(&device);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn the_last_drop_acknowledges() {
        static DONE: AtomicUsize = AtomicUsize::new(0);
        let ack = Ack::new(|| {
            DONE.fetch_add(1, Ordering::SeqCst);
        });
        let id = DeviceId::new();
        let mut ports = Ports::default();
        let (a, b) = (ports.open(id), ports.open(id));
        ports.deliver(id, &LaneCommand::Suspend { how: Drain::Flush, ack: ack.clone() });
        drop(ack);
        assert!(a.has_mail() && b.has_mail());
        drop(a.take());
        assert_eq!(DONE.load(Ordering::SeqCst), 0);
        drop(b);
        assert_eq!(DONE.load(Ordering::SeqCst), 1, "a closed port answers too");
        assert!(!a.has_mail());
    }

    #[test]
    fn a_device_without_lanes_answers_at_once() {
        static DONE: AtomicUsize = AtomicUsize::new(0);
        let ack = Ack::new(|| {
            DONE.fetch_add(1, Ordering::SeqCst);
        });
        let mut ports = Ports::default();
        let command = LaneCommand::Suspend { how: Drain::Flush, ack };
        ports.deliver(DeviceId::new(), &command);
        drop(command);
        assert_eq!(DONE.load(Ordering::SeqCst), 1);
    }
}
