//! The path checker: failed paths are read from, and reinstated when they answer.
//!
//! The kernel leaves that to a daemon (multipathd). Where upkeep asks for it
//! ([`udm_dm::Upkeep::check_paths`]), a task of the target does the same: the first block of each
//! failed path is read through a lane of the checker's own, first after the interval, then at twice
//! the time before, up to [`BACK_OFF`] times the interval. Any answer but one that blames the path
//! reinstates it. One that fails again before the time is over that its checks had reached goes on
//! from there: a path that works for its first block only is not in use half of the time.
//!
//! The task is in the background: a check that hangs holds up no suspend and no end. While no path
//! is failed it waits for the bell that a failure rings, and costs nothing. While the device is
//! suspended it is stopped, as a suspended device takes no messages.

use super::journal::Back;
use super::state::Shared;
use std::sync::Arc;
use udm_core::{
    Batch, Bio, Buf, Busy, DeviceSlot, Limits, Listener, Nanos, Op, SECTOR_SIZE, Sector, Sectors, Task,
    TaskCx,
};
use udm_dm::target::DeviceRef;

/// How many times the interval may grow.
const BACK_OFF: u64 = 4;

/// See the module.
pub(super) struct Checker {
    shared: Arc<Shared>,
    interval: Nanos,
    paths: Vec<Checked>,
    bell: Option<Listener>,
    /// Bios that have been home, for the next checks.
    spare: Batch,
    stopping: bool,
}

/// A path.
struct Checked {
    /// Gone when the task was stopped, so that nothing is held that nobody needs.
    device: Option<DeviceRef>,
    lane: Option<DeviceSlot>,
    /// When it is checked next; `NEVER` while it works, or a check is under way.
    due: Nanos,
    /// The time between its last two checks.
    wait: Nanos,
    /// When it was last reinstated here.
    back: Option<Nanos>,
    /// How often it had failed when the check under way began.
    asked: Option<u64>,
}

impl Checked {
    /// The path is known to be failed: when it is checked first.
    fn begin(&mut self, interval: Nanos, now: Nanos) {
        let soon = self.back.take().is_some_and(|back| now.since(back) < self.wait);
        self.wait = if soon { self.longer(interval) } else { interval };
        self.due = now + self.wait;
    }

    fn longer(&self, interval: Nanos) -> Nanos {
        Nanos((self.wait.0 * 2).min(interval.0.saturating_mul(BACK_OFF)))
    }

    fn again(&mut self, interval: Nanos, now: Nanos) {
        self.wait = self.longer(interval);
        self.due = now + self.wait;
    }

    /// Lets go of its lane, where nothing is in flight on it.
    fn close(&mut self, cx: &mut dyn TaskCx) {
        if self.asked.is_none()
            && let Some(lane) = self.lane.take()
        {
            cx.close(lane);
        }
    }
}

impl Checker {
    pub(super) fn new(shared: Arc<Shared>, paths: Vec<DeviceRef>, interval: Nanos) -> Checker {
        let checked = |device| Checked {
            device: Some(device),
            lane: None,
            due: Nanos::NEVER,
            wait: Nanos(0),
            back: None,
            asked: None,
        };
        let paths = paths.into_iter().map(checked).collect();
        Checker { shared, interval, paths, bell: None, spare: Batch::new(), stopping: false }
    }

    /// Looks at all paths: checks those that are due, and forgets those that work again.
    fn look(&mut self, cx: &mut dyn TaskCx) {
        let now = cx.now();
        for index in 0..self.paths.len() {
            let view = self.shared.path(index);
            let path = &mut self.paths[index];
            if !view.failed {
                path.due = Nanos::NEVER;
                path.close(cx);
            } else if path.asked.is_some() {
                // Its answer says how it goes on.
            } else if path.due == Nanos::NEVER {
                path.begin(self.interval, now);
            } else if path.due <= now {
                self.check(index, view.fail_count, cx);
            }
        }
        let next = self.paths.iter().map(|path| path.due).min().unwrap_or(Nanos::NEVER);
        cx.wake_at(next);
    }

    /// Reads the first block of a path.
    fn check(&mut self, index: usize, fails: u64, cx: &mut dyn TaskCx) {
        let (path, now) = (&mut self.paths[index], cx.now());
        let Some(device) = path.device.as_ref().map(|device| &device.device) else { return };
        if path.lane.is_none() {
            path.lane = cx.open(device).ok();
        }
        let Some(lane) = path.lane else { return path.again(self.interval, now) };
        let Limits { logical_block, .. } = device.limits();
        let len = u64::from(logical_block).max(SECTOR_SIZE);
        path.asked = Some(fails);
        path.due = Nanos::NEVER;
        let mut bio = self.spare.pop().unwrap_or_default();
        bio.op = Op::Read;
        bio.sector = Sector(0);
        bio.sectors = Sectors::from_bytes(len);
        bio.data = Buf::zeroed(len as usize).into();
        bio.cookie = index as u64;
        cx.submit(lane, bio);
    }

    /// The answer to a check.
    fn answered(&mut self, bio: &Bio, cx: &mut dyn TaskCx) {
        let index = bio.cookie as usize;
        let (path, now) = (&mut self.paths[index], cx.now());
        let asked = path.asked.take();
        if self.stopping {
            return;
        }
        // What it failed of since is not answered by this.
        let same = asked == Some(self.shared.path(index).fail_count);
        if same && !bio.status.is_path_error() && self.shared.reinstate(index, Back::Answers) {
            path.back = Some(now);
            self.shared.journal.event();
            self.shared.journal.kick(&*cx.all_cores());
        } else {
            path.again(self.interval, now);
        }
    }
}

impl Task for Checker {
    fn turn(&mut self, cx: &mut dyn TaskCx) {
        if self.stopping {
            return;
        }
        let bell = self.bell.take().unwrap_or_else(|| cx.listen(&self.shared.bell));
        loop {
            let seen = bell.epoch();
            self.look(cx);
            if bell.is_quiet(seen) {
                break;
            }
        }
        self.bell = Some(bell);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut dyn TaskCx) {
        for bio in done.drain(..) {
            self.answered(&bio, cx);
            self.spare.push(bio);
        }
        match self.stopping {
            true => self.stop(cx),
            false => self.turn(cx),
        }
    }

    fn stop(&mut self, cx: &mut dyn TaskCx) {
        self.stopping = true;
        self.bell = None;
        cx.wake_at(Nanos::NEVER);
        for path in &mut self.paths {
            path.close(cx);
            path.device.take_if(|_| path.asked.is_none());
        }
    }

    fn is_over(&self) -> bool {
        self.stopping && self.paths.iter().all(|path| path.asked.is_none())
    }

    fn busy(&self) -> Busy {
        Busy::Background
    }
}
