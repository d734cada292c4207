//! The outside of the lanes: the clock, the disks, the paths to them, and what went wrong.
//!
//! One [`Env`] to a world, behind a mutex that only one thread ever takes: paths are devices, and devices must be `Sync`.

use crate::chance::{Chance, Stream};
use crate::disk::Disk;
use crate::trace::Trace;
use std::sync::{Arc, Mutex, MutexGuard};
use udm_core::{Nanos, Status};

/// How a path behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// As it should.
    Up,
    /// Refuses everything, soon.
    Down,
    /// Answers late: this many times the usual latency.
    Slow(u64),
    /// Takes requests and says nothing, until they time out.
    Silent,
    /// Refuses every other request or so.
    Flapping,
}

/// A way to a disk: what a table names.
pub struct PathState {
    /// To which disk.
    pub disk: usize,
    /// How it behaves.
    pub mode: Mode,
    /// Mean latency in ns.
    pub latency: u64,
    /// How long a silent path keeps a request, in ns.
    pub patience: u64,
    /// Requests inside, on all cores.
    pub in_flight: u64,
    /// How many suspended devices are above: nothing may arrive while there is one.
    pub barred: u32,
    /// Which multipath target uses it.
    pub access: Option<usize>,
    /// What that target must think of it: failed.
    pub failed: bool,
    /// How often that target must have failed it.
    pub fails: u64,
}

/// What a multipath target must think of its paths: the model of its counters.
pub struct Access {
    /// The disk behind all of them.
    pub disk: usize,
    /// Its paths.
    pub paths: Vec<usize>,
    /// `queue_if_no_path` is on.
    pub queue: bool,
    /// Its device is being suspended, or is: held requests may fail.
    pub suspending: bool,
    /// In use; not the target of a table that was swapped out.
    pub live: bool,
}

/// See the module.
pub struct Env {
    /// Simulated time.
    pub now: Nanos,
    /// Turns so far: the unit of "before" and "after" in the model.
    pub step: u64,
    /// The core whose turn it is, or [`crate::trace::NO_CORE`].
    pub core: u16,
    /// What happened.
    pub trace: Trace,
    /// The disks.
    pub disks: Vec<Disk>,
    /// The paths.
    pub paths: Vec<PathState>,
    /// The multipath targets.
    pub accesses: Vec<Access>,
    /// Chance for disks and paths.
    pub chance: Chance,
    /// Nothing fails any more: the world is brought to rest.
    pub calm: bool,
    /// The power is off: requests come back, and change nothing.
    pub dead: bool,
    /// Writes reach the medium in parts.
    pub torn: bool,
    /// How often the power went off.
    pub crashes: u64,
    /// Requests that disks and paths failed.
    pub faults: u64,
    /// The first thing that was wrong.
    pub violation: Option<String>,
}

/// The shared outside.
pub type SharedEnv = Arc<Mutex<Env>>;

/// Takes the outside. There is one thread, so nobody waits.
pub fn lock(env: &SharedEnv) -> MutexGuard<'_, Env> {
    env.lock().unwrap_or_else(|e| e.into_inner())
}

impl Env {
    /// An outside without disks.
    #[must_use]
    pub fn new(seed: u64, keep_events: usize) -> Env {
        Env {
            now: Nanos(1_000_000_000),
            step: 0,
            core: crate::trace::NO_CORE,
            trace: Trace::new(keep_events),
            disks: Vec::new(),
            paths: Vec::new(),
            accesses: Vec::new(),
            chance: Chance::new(seed, Stream::Disk),
            calm: false,
            dead: false,
            torn: true,
            crashes: 0,
            faults: 0,
            violation: None,
        }
    }

    /// Notes what went wrong; the first counts.
    pub fn violate(&mut self, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(what());
        }
    }

    /// Adds words to the trace.
    pub fn say(&mut self, text: impl Into<String>) {
        let now = self.now;
        self.trace.say(now, text.into());
    }

    /// "After everything that began in this step".
    #[must_use]
    pub fn ending(&self) -> u64 {
        2 * self.step + 1
    }

    /// A path returned `status`: the multipath target above, if any, must fail it.
    pub fn blame(&mut self, path: usize, status: Status) {
        self.faults += 1;
        let ending = self.ending();
        let disk = self.paths[path].disk;
        self.disks[disk].blamed[status as usize] = Some(ending);
        if status.is_path_error() && self.paths[path].access.is_some() {
            self.fail(path);
        }
    }

    /// Marks a path failed, if it is not.
    pub fn fail(&mut self, path: usize) {
        let state = &mut self.paths[path];
        if !state.failed {
            state.failed = true;
            state.fails += 1;
            let disk = state.disk;
            self.recheck(disk);
        }
    }

    /// Marks a path usable.
    pub fn reinstate(&mut self, path: usize) {
        self.paths[path].failed = false;
        let disk = self.paths[path].disk;
        self.recheck(disk);
    }

    /// Forgets what was thought of the paths of `access`: its table is new.
    pub fn refresh(&mut self, access: usize) {
        let paths = self.accesses[access].paths.clone();
        self.accesses[access].live = true;
        for p in paths {
            self.paths[p].access = Some(access);
            self.paths[p].failed = false;
            self.paths[p].fails = 0;
        }
        let disk = self.accesses[access].disk;
        self.recheck(disk);
    }

    /// Works out anew whether requests for `disk` may fail for want of a path.
    pub fn recheck(&mut self, disk: usize) {
        let bare = self.accesses.iter().any(|a| {
            a.live
                && a.disk == disk
                && (!a.queue || a.suspending)
                && a.paths.iter().all(|p| self.paths[*p].failed)
        });
        let ending = self.ending();
        last_seen(&mut self.disks[disk].no_path, bare, ending);
    }
}

/// Keeps in `slot` when something was last so: for ever as long as it `is`.
pub fn last_seen(slot: &mut Option<u64>, is: bool, ending: u64) {
    match (is, *slot) {
        (true, _) => *slot = Some(u64::MAX),
        (false, Some(u64::MAX)) => *slot = Some(ending),
        (false, _) => {}
    }
}
