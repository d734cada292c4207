//! The outside of the lanes: the clock, the disks, the paths to them, and what went wrong.
//!
//! One [`Env`] to a world, behind a mutex that only one thread ever takes: paths are devices, and
//! devices must be `Sync`.

use crate::beside::{HelperRequest, StoreMarkRecord};
use crate::cores::TaskPurpose;
use crate::counts::counts;
use crate::disk::SimDisk;
use crate::plan::{Disturbance, ExcludedDisturbances};
use crate::rng::{RngStream, SimRng};
use crate::trace::Trace;
use crate::write_effects::LateWrite;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use udm_core::{Bio, Nanos, Status};

/// How long a checker may take to see that it has something to do.
pub const CHECK_SLACK: Nanos = Nanos::from_millis(100);

/// How a path behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathMode {
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
    /// Takes requests, and none comes back before the world lets go of them.
    Hung,
}

/// A way to a disk: what a table names.
pub struct PathState {
    /// To which disk.
    pub disk: usize,
    /// How it behaves.
    pub mode: PathMode,
    /// Mean latency in ns.
    pub latency: u64,
    /// What a request takes longer while nothing fails.
    pub drag: Nanos,
    /// How long a silent path keeps a request, in ns.
    pub silent_timeout: u64,
    /// A lane takes so many requests; more wait inside of it.
    pub room: usize,
    /// Some requests are done at once, in the submit, and no poll is asked for.
    pub prompt: bool,
    /// How often what hung was let go of.
    pub released: u64,
    /// Lanes open, on all cores.
    pub lanes: usize,
    /// What a multipath target above must have counted.
    pub served: PathCounters,
    /// A path error on it is tried elsewhere.
    pub retried: bool,
    /// Requests inside, on all cores.
    pub in_flight: u64,
    /// It may never have more.
    pub most: u64,
    /// How many suspended devices are above: nothing may arrive while there is one.
    pub suspended_users: u32,
    /// Which multipath target uses it.
    pub access: Option<usize>,
    /// What that target must think of it: failed.
    pub failed: bool,
    /// How often that target must have failed it.
    pub fails: u64,
    /// In which visit with others in between it last failed.
    pub failed_in: u64,
    /// It has answered a check that began since it failed.
    pub answered: bool,
    /// It has given a bad answer to a check that began since it last failed: its target may fail it
    /// for that, and must where it thought well of it when the check began.
    pub doubted: bool,
    /// See `doubted`.
    pub must_fail: bool,
    /// When the check that is under way began, while it was thought well of.
    pub checked_at: Option<Nanos>,
    /// When the oldest that may be under way began, whatever was thought of it.
    pub asked_at: Option<Nanos>,
    /// The device has been in use since then: what that check finds has to be acted on.
    pub check_counts: bool,
    /// Checks under way.
    pub checks: usize,
    /// It has failed: by when it must be checked.
    pub check_by: Nanos,
    /// When it last came back.
    pub back: Option<Nanos>,
    /// When a check had it failed: one that begins in the same turn begins behind that.
    pub checked_out: Nanos,
}

impl PathState {
    /// A healthy way to `disk`, with requests that take about `latency` ns.
    #[must_use]
    pub fn healthy(disk: usize, latency: u64) -> PathState {
        PathState {
            disk,
            mode: PathMode::Up,
            latency,
            drag: Nanos(0),
            silent_timeout: 1_000_000_000,
            room: usize::MAX,
            prompt: false,
            released: 0,
            lanes: 0,
            served: PathCounters::default(),
            retried: false,
            in_flight: 0,
            most: u64::MAX,
            suspended_users: 0,
            access: None,
            failed: false,
            fails: 0,
            failed_in: 0,
            answered: false,
            doubted: false,
            must_fail: false,
            checked_at: None,
            asked_at: None,
            check_counts: false,
            checks: 0,
            check_by: Nanos::NEVER,
            back: None,
            checked_out: Nanos::NEVER,
        }
    }

    /// What checks have found need not be acted on any more.
    pub fn forget_checks(&mut self) {
        (self.must_fail, self.check_counts, self.check_by) = (false, false, Nanos::NEVER);
    }

    /// A path to `disk` with nothing in it, drawn.
    pub(crate) fn draw(disk: usize, build: &mut SimRng, without: ExcludedDisturbances) -> PathState {
        let latency = build.pick(&[2_000, 20_000, 100_000, 1_000_000]);
        PathState {
            silent_timeout: build.between(50, 3000) * 1_000_000,
            room: match without.has(Disturbance::Full) {
                true => usize::MAX,
                false => build.pick(&[usize::MAX, usize::MAX, usize::MAX, 1, 2, 16]),
            },
            prompt: !without.has(Disturbance::Prompt) && build.one_in(3),
            ..PathState::healthy(disk, latency)
        }
    }
}

/// What came back from a path since its multipath target was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathCounters {
    /// Requests.
    pub bios: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Those with an error that blames the path.
    pub errors: u64,
}

impl PathCounters {
    /// `bio` came back with `status`.
    pub fn count(&mut self, bio: &Bio, status: Status) {
        self.bios += 1;
        self.bytes += bio.sectors.bytes();
        self.errors += u64::from(status.is_path_error());
    }
}

/// What a multipath target must think of its paths: the model of its counters.
pub struct MultipathState {
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
    /// Its paths are mapped devices, which fail requests for reasons of their own: what it must
    /// think of them is not known here.
    pub has_unknown_paths: bool,
    /// Requests without a path wait for a time, and then fail.
    pub retries: bool,
    /// How soon a path that failed is checked, and how late at the most: that is for one that did
    /// not stay up for so long.
    pub intervals: (Nanos, Nanos),
    /// Paths that requests failed since its device was last at rest.
    pub lost: u64,
}

counts! {
    /// How often things happened that a verdict tells of.
    pub struct EnvCounters {
        /// Requests done in their submit.
        pub prompt: u64,
        /// Requests that nothing was heard of until the path was let go.
        pub hangs: u64,
        /// Times that a lane was full.
        pub full: u64,
        /// Requests that a lane handed back to a suspend, unstarted.
        pub handed_back: u64,
        /// Writes that took effect after their error.
        pub landed: u64,
        /// Lanes that could not be opened.
        pub refused: u64,
        /// Requests that failed for the faults of a null device.
        pub injected: u64,
    }
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
    pub disks: Vec<SimDisk>,
    /// The paths.
    pub paths: Vec<PathState>,
    /// The paths that share tags, and how many tags.
    pub(crate) shared: Option<(Vec<usize>, u64)>,
    /// The multipath targets.
    pub accesses: Vec<MultipathState>,
    /// Chance for disks and paths.
    pub chance: SimRng,
    /// Nothing fails any more: the world is brought to rest.
    pub calm: bool,
    /// The power is off: requests come back, and change nothing.
    pub dead: bool,
    /// Writes reach the medium in parts.
    pub torn: bool,
    /// Writes that fail may take effect later.
    pub lags: bool,
    /// How often the power went off.
    pub crashes: u64,
    /// Writes and flushes that disks have begun or ended.
    pub changes: u64,
    /// With which of these it goes off.
    pub cut_at: Option<u64>,
    /// What threads beside the cores are at.
    pub asked: Vec<HelperRequest>,
    /// The marks of stores, by disk.
    pub marks: BTreeMap<usize, StoreMarkRecord>,
    /// The writes that paths of multipath targets have, by their first stamp: on which path.
    pub writing: BTreeMap<(usize, u64), usize>,
    /// A task has its turn, for this: what it opens gets no requests of devices.
    pub task: Option<TaskPurpose>,
    /// That task is to stop, or has been told: it draws no conclusions.
    pub task_stops: bool,
    /// How long a target waits for the answer to a check.
    pub check_timeout: Nanos,
    /// The visit under way, where others may act in the middle of it: a path that fails then is
    /// found out about behind it.
    pub visit: Option<u64>,
    /// Requests that disks and paths failed.
    pub faults: u64,
    /// What happened that is counted for the verdict.
    pub seen: EnvCounters,
    /// Writes that have failed and are still to take effect.
    pub late: Vec<LateWrite>,
    /// The next open but so many fails.
    pub open_fails: Option<u64>,
    /// The first thing that was wrong.
    pub violation: Option<String>,
}

/// The shared outside.
pub type SharedEnv = Arc<Mutex<Env>>;

/// Takes the outside. There is one thread, so nobody waits: who would has taken it twice.
pub fn lock(env: &SharedEnv) -> MutexGuard<'_, Env> {
    match env.try_lock() {
        Ok(env) => env,
        Err(TryLockError::Poisoned(e)) => e.into_inner(),
        Err(TryLockError::WouldBlock) => panic!("the outside is taken twice"),
    }
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
            shared: None,
            accesses: Vec::new(),
            chance: SimRng::new(seed, RngStream::Disks),
            calm: false,
            dead: false,
            torn: true,
            lags: true,
            crashes: 0,
            changes: 0,
            cut_at: None,
            asked: Vec::new(),
            marks: BTreeMap::new(),
            writing: BTreeMap::new(),
            task: None,
            task_stops: false,
            check_timeout: Nanos::NEVER,
            visit: None,
            faults: 0,
            seen: EnvCounters::default(),
            late: Vec::new(),
            open_fails: None,
            violation: None,
        }
    }

    /// A disk has begun or ended a write or a flush.
    pub fn changed(&mut self) {
        self.changes += 1;
        if self.cut_at == Some(self.changes) && !self.dead {
            self.cut_power();
        }
    }

    /// The power fails: caches are lost, and what is in flight is there, or not, or in part.
    pub fn cut_power(&mut self) {
        self.say("the power fails");
        self.crashes += 1;
        self.dead = true;
        self.late.clear();
        let Env { disks, chance, marks, .. } = self;
        disks.iter_mut().for_each(|d| d.crash(chance));
        // One that was not kept yet is, or is not.
        marks.retain(|_, mark| mark.lasts || chance.one_in(2));
        marks.values_mut().for_each(|mark| mark.lasts = true);
    }

    /// Is this open one that fails?
    pub fn refuses_open(&mut self) -> bool {
        let fails = self.open_fails == Some(0);
        self.open_fails = self.open_fails.and_then(|n| n.checked_sub(1));
        self.seen.refused += u64::from(fails);
        fails
    }

    /// Is the write of `stamp`, which has failed, still to take effect?
    #[must_use]
    pub fn is_late(&self, stamp: u64) -> bool {
        self.late.iter().any(|late| late.has(stamp))
    }

    /// A multipath target uses path `p` itself, so that what it must think of it is known.
    #[must_use]
    pub fn is_exact(&self, p: usize) -> bool {
        self.paths[p].access.is_some_and(|a| !self.accesses[a].has_unknown_paths)
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

    /// From now on there is a reason for requests to fail with `status`.
    pub fn excuse(&mut self, disk: usize, status: Status) {
        self.disks[disk].blamed[status as usize] = Some(self.ending());
    }

    /// A path returned `status`: the multipath target above, if any, must fail it.
    pub fn blame(&mut self, path: usize, status: Status) {
        self.faults += 1;
        self.excuse(self.paths[path].disk, status);
        if let Some(access) = self.paths[path].access.filter(|_| status.is_path_error()) {
            self.accesses[access].lost += u64::from(self.fail(path));
        }
    }

    /// Marks a path failed; false if it was, or if nobody here knows.
    pub fn fail(&mut self, path: usize) -> bool {
        let Some(access) = self.paths[path].access.filter(|_| self.is_exact(path)) else { return false };
        let ((first, most), now) = (self.accesses[access].intervals, self.now);
        let state = &mut self.paths[path];
        if state.failed {
            return false;
        }
        state.failed = true;
        state.failed_in = self.visit.unwrap_or(0);
        state.answered = false;
        (state.doubted, state.checked_at) = (false, None);
        state.forget_checks();
        if state.checks == 0 && state.back.is_none_or(|back| now.since(back) >= most) {
            state.check_by = now + first + CHECK_SLACK;
        }
        state.fails += 1;
        state.checked_out = Nanos::NEVER;
        let disk = state.disk;
        self.recheck(disk);
        true
    }

    /// Marks a path usable; false if it was.
    pub fn reinstate(&mut self, path: usize) -> bool {
        let was = std::mem::replace(&mut self.paths[path].failed, false);
        (self.paths[path].back, self.paths[path].check_by) = (Some(self.now), Nanos::NEVER);
        let disk = self.paths[path].disk;
        self.recheck(disk);
        was
    }

    /// Forgets what was thought of the paths of `access`: its table is new.
    pub fn refresh(&mut self, access: usize) {
        let paths = self.accesses[access].paths.clone();
        self.accesses[access].live = true;
        for p in paths {
            self.paths[p].access = Some(access);
            self.paths[p].failed = false;
            self.paths[p].fails = 0;
            (self.paths[p].doubted, self.paths[p].checked_at) = (false, None);
            self.paths[p].forget_checks();
            self.paths[p].served = PathCounters::default();
        }
        let disk = self.accesses[access].disk;
        self.recheck(disk);
    }

    /// Works out anew whether requests for `disk` may fail for want of a path.
    pub fn recheck(&mut self, disk: usize) {
        let bare = self.accesses.iter().any(|a| {
            a.live
                && a.disk == disk
                && (!a.queue || a.suspending || a.retries)
                && (a.has_unknown_paths || a.paths.iter().all(|p| self.paths[*p].failed))
        });
        let ending = self.ending();
        record_last_seen(&mut self.disks[disk].no_path, bare, ending);
    }
}

/// Keeps in `slot` when something was last so: for ever as long as it `is`.
pub fn record_last_seen(slot: &mut Option<u64>, is: bool, ending: u64) {
    match (is, *slot) {
        (true, _) => *slot = Some(u64::MAX),
        (false, Some(u64::MAX)) => *slot = Some(ending),
        (false, _) => {}
    }
}
