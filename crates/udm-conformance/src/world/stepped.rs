//! Two cores on the calling thread. As in the runtime, a core is polled after a submission, after
//! progress, after a command, and at the time for which one of its lanes asked. So a lane that
//! waits without asking for a poll is detected.

use super::DeviceWorld;
use crate::lane_driver::LaneDriver;
use crate::{DeviceFacts, TestRequest, TestRequestResult};
use std::collections::BTreeMap;
use std::sync::Arc;
use udm_core::{CoreCommandSender, Device, Nanos};
use udm_dm::testing::SteppedTestCores;
use udm_dm::{DeviceTransition, TargetError};

const CORES: usize = 2;

/// Turns without an answer after which a request counts as hung. A delay asks for at most one turn
/// per millisecond.
const TURNS_MAX: usize = 20_000;

pub(super) struct SteppedWorld {
    world: SteppedTestCores,
    device: Arc<dyn Device>,
    facts: DeviceFacts,
    drivers: Vec<LaneDriver>,
    /// The time of the next turn of each core.
    due: Vec<Nanos>,
    answers: Vec<BTreeMap<u64, TestRequestResult>>,
    /// The tag of the first request that was not collected.
    first: Vec<u64>,
}

impl SteppedWorld {
    pub(super) fn new(device: &Arc<dyn Device>, facts: DeviceFacts) -> SteppedWorld {
        let mut world = SteppedTestCores::new(CORES);
        world.now = Nanos(1_000_000);
        let mut stepped = SteppedWorld {
            world,
            device: device.clone(),
            facts,
            drivers: Vec::new(),
            due: vec![Nanos::NEVER; CORES],
            answers: vec![BTreeMap::new(); CORES],
            first: vec![0; CORES],
        };
        stepped.open();
        stepped
    }

    fn open(&mut self) {
        for core in 0..CORES {
            let device = &self.device;
            let driver = self.world.turn(core, |cx| LaneDriver::open(device, false, cx));
            self.drivers.push(driver.unwrap_or_else(|e| panic!("core {core} can't open the device: {e}")));
        }
    }

    fn in_flight(&self) -> usize {
        self.drivers.iter().map(LaneDriver::in_flight).sum()
    }

    /// Runs one turn of each core that is due. If none is due, time advances to the next one.
    /// Returns false if no core needs a turn.
    fn round(&mut self) -> bool {
        // A message wakes its core.
        for core in 0..CORES {
            if self.world.has_messages(core) {
                self.due[core] = self.world.now;
            }
        }
        let next = self.due.iter().copied().min().unwrap_or(Nanos::NEVER);
        if next == Nanos::NEVER {
            return false;
        }
        self.world.now = self.world.now.max(next);
        for core in 0..CORES {
            if self.due[core] <= self.world.now {
                self.turn(core);
            }
        }
        self.world.now = self.world.now + Nanos(100);
        true
    }

    fn turn(&mut self, core: usize) {
        self.world.wake = Nanos::NEVER;
        let mut answers = Vec::new();
        let driver = &mut self.drivers[core];
        let moved = self.world.turn(core, |cx| driver.turn(&mut answers, cx));
        self.answers[core].extend(answers);
        self.due[core] = if moved { self.world.now } else { self.world.wake };
    }

    /// Makes each core due.
    fn kick(&mut self) {
        self.due.fill(self.world.now);
    }
}

impl DeviceWorld for SteppedWorld {
    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    fn handles(&self) -> usize {
        CORES
    }

    fn submit(&mut self, handle: usize, requests: Vec<TestRequest>) {
        self.drivers[handle].give(requests, self.world.now);
        self.due[handle] = self.world.now;
    }

    fn collect(&mut self, handle: usize) -> Vec<TestRequestResult> {
        for _ in 0..TURNS_MAX {
            if self.drivers[handle].in_flight() == 0 {
                let answers = std::mem::take(&mut self.answers[handle]);
                let first = self.first[handle];
                self.first[handle] += answers.len() as u64;
                assert!(answers.keys().copied().eq(first..self.first[handle]), "each request has one answer");
                return answers.into_values().collect();
            }
            let waits = self.drivers[handle].in_flight();
            assert!(
                self.round(),
                "{waits} requests are in flight on core {handle}, and no lane asks for a poll"
            );
        }
        panic!("hung: {} requests in flight on core {handle}", self.drivers[handle].in_flight());
    }

    fn settle(&mut self) -> usize {
        for _ in 0..200 {
            if !self.round() {
                break;
            }
        }
        self.in_flight()
    }

    fn change(&mut self, mut change: DeviceTransition) -> Result<(), TargetError> {
        let inboxes = self.world.cores();
        for _ in 0..TURNS_MAX {
            if let Some(result) = change.step(&*inboxes) {
                return result;
            }
            self.round();
        }
        panic!("hung: a change with {} requests in flight", self.in_flight());
    }

    fn begin_change(&mut self, change: &mut DeviceTransition) -> bool {
        let inboxes = self.world.cores();
        for _ in 0..200 {
            if change.step(&*inboxes).is_some() {
                return true;
            }
            self.round();
        }
        false
    }

    fn cores(&self) -> Arc<dyn CoreCommandSender> {
        self.world.cores()
    }

    fn call_off(&mut self, change: &mut DeviceTransition) {
        change.cancel(&*self.world.cores());
    }

    fn reopen(&mut self) {
        assert_eq!(self.in_flight(), 0);
        self.close();
        self.answers.iter_mut().for_each(BTreeMap::clear);
        self.first.fill(0);
        self.due.fill(Nanos::NEVER);
        self.open();
    }

    fn quiet(&mut self) {
        assert_eq!(self.in_flight(), 0);
        // A lane may have work of its own, even at its begin. This work ends by itself.
        self.kick();
        for _ in 0..TURNS_MAX {
            if !self.round() {
                break;
            }
        }
        for core in 0..CORES {
            assert!(!self.drivers[core].is_busy(), "core {core} is busy and asks for no poll");
            self.turn(core);
            assert_eq!(self.due[core], Nanos::NEVER, "an idle lane asks for a poll");
        }
    }

    fn close(&mut self) {
        for _ in 0..TURNS_MAX {
            if !self.drivers.iter().any(LaneDriver::is_busy) {
                break;
            }
            self.kick();
            self.round();
        }
        for core in (0..self.drivers.len()).rev() {
            let driver = self.drivers.pop();
            // Lanes are dropped on their core.
            self.world.turn(core, |_| drop(driver));
        }
    }
}
