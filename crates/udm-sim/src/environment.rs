//! The environment of the lanes: the clock, the disks, the paths to them, and the violations found.
//!
//! Each world has one [`Env`], in a mutex that only one thread ever locks. The mutex is needed
//! because paths are devices, and devices must be `Sync`.

use crate::cores::TaskPurpose;
use crate::counts::counts;
use crate::disk::SimDisk;
use crate::helper_threads::{HelperRequest, InvalidStoreMarkRecord};
use crate::plan::{DisturbanceClass, ExcludedDisturbances};
use crate::rng::{RngStream, SimRng};
use crate::trace::Trace;
use crate::write_effects::LateWrite;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use udm_core::{Bio, Nanos, Status};

/// Time that a checker may need to notice a change.
pub const CHECK_SLACK: Nanos = Nanos::from_millis(100);

/// Behaviour of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathMode {
    /// The path works.
    Up,
    /// The path fails all requests soon.
    Down,
    /// The path completes requests late: after this many times the usual latency.
    Slow(u64),
    /// The path takes requests and does not complete them before they time out.
    Silent,
    /// The path fails about every other request.
    Flapping,
    /// The path takes requests and does not complete them before the world releases it.
    Hung,
}

/// A path to a disk, as tables name it.
pub struct SimPathState {
    /// Index of the disk.
    pub disk: usize,
    /// Behaviour of the path.
    pub mode: PathMode,
    /// Mean latency in ns.
    pub latency: u64,
    /// Additional latency, while no fault is active.
    pub drag: Nanos,
    /// Time for which a silent path holds a request, in ns.
    pub silent_timeout: u64,
    /// Maximum number of requests that the path serves per lane. More requests wait in the lane.
    pub room: usize,
    /// True if some requests complete within the submit, without a request for a poll.
    pub prompt: bool,
    /// How often hung requests were released.
    pub released: u64,
    /// Open lanes, on all cores.
    pub lanes: usize,
    /// Counters that a multipath target above must show.
    pub served: PathCounters,
    /// True if a path error of this path is retried on another one.
    pub retried: bool,
    /// Requests in flight, on all cores.
    pub in_flight: u64,
    /// Maximum number of requests in flight.
    pub most: u64,
    /// Number of suspended devices above. While it is not 0, no request may arrive.
    pub suspended_users: u32,
    /// Index of the multipath target that uses the path.
    pub access: Option<usize>,
    /// True if that target must consider the path failed.
    pub failed: bool,
    /// How often that target must have failed the path.
    pub fails: u64,
    /// Number of the interrupted poll in which the path last failed.
    pub failed_in: u64,
    /// True if the path answered a check that began after its last failure.
    pub answered: bool,
    /// True if a check that began after the last failure had a bad result. The target may then fail
    /// the path.
    pub doubted: bool,
    /// True if the target must fail the path for a bad check: it considered the path good when the
    /// check began.
    pub must_fail: bool,
    /// Start of the check in progress, if the path was considered good at that time.
    pub checked_at: Option<Nanos>,
    /// Start of the oldest check that may be in progress, in any state of the path.
    pub asked_at: Option<Nanos>,
    /// True if the device has been active since `asked_at`, so the result of that check must take
    /// effect.
    pub check_counts: bool,
    /// Checks in progress.
    pub checks: usize,
    /// Time by which the failed path must be checked.
    pub check_by: Nanos,
    /// When the path last returned.
    pub back: Option<Nanos>,
    /// When a check last failed the path. A check that begins in the same turn begins after that.
    pub checked_out: Nanos,
}

impl SimPathState {
    /// Returns a working path to `disk` with a latency of about `latency` ns.
    #[must_use]
    pub fn healthy(disk: usize, latency: u64) -> SimPathState {
        SimPathState {
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

    /// Forgets the results of checks, so the target need not act on them.
    pub fn forget_checks(&mut self) {
        (self.must_fail, self.check_counts, self.check_by) = (false, false, Nanos::NEVER);
    }

    /// Draws an idle path to `disk`.
    pub(crate) fn draw(disk: usize, build: &mut SimRng, without: ExcludedDisturbances) -> SimPathState {
        let latency = build.pick(&[2_000, 20_000, 100_000, 1_000_000]);
        SimPathState {
            silent_timeout: build.between(50, 3000) * 1_000_000,
            room: match without.has(DisturbanceClass::Full) {
                true => usize::MAX,
                false => build.pick(&[usize::MAX, usize::MAX, usize::MAX, 1, 2, 16]),
            },
            prompt: !without.has(DisturbanceClass::Prompt) && build.one_in(3),
            ..SimPathState::healthy(disk, latency)
        }
    }
}

/// Counters of a path since its multipath target was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathCounters {
    /// Completed requests.
    pub bios: u64,
    /// Bytes of completed requests.
    pub bytes: u64,
    /// Completed requests with a path error.
    pub errors: u64,
}

impl PathCounters {
    /// Counts `bio`, which completed with `status`.
    pub fn count(&mut self, bio: &Bio, status: Status) {
        self.bios += 1;
        self.bytes += bio.sectors.bytes();
        self.errors += u64::from(status.is_path_error());
    }
}

/// The model of a multipath target: the state that it must have.
pub struct MultipathModel {
    /// The disk below all paths.
    pub disk: usize,
    /// The paths.
    pub paths: Vec<usize>,
    /// True if `queue_if_no_path` is on.
    pub queue: bool,
    /// True if the device is suspending or suspended, so held requests may fail.
    pub suspending: bool,
    /// True if the table is live, false if it was replaced.
    pub live: bool,
    /// True if paths are mapped devices, which may fail requests on their own. The model does not
    /// know the state of such paths.
    pub has_unknown_paths: bool,
    /// True if requests without a path wait for a limited time and then fail.
    pub retries: bool,
    /// Shortest and longest delay until a failed path is checked. The longest is for a path that
    /// failed again within that time.
    pub intervals: (Nanos, Nanos),
    /// Paths that failed because of requests since the device was last quiescent.
    pub lost: u64,
}

counts! {
    /// Counters of events in the environment, for the report.
    pub struct EnvCounters {
        /// Requests that completed within their submit.
        pub prompt: u64,
        /// Requests that hung until the path was released.
        pub hangs: u64,
        /// How often a lane was full.
        pub full: u64,
        /// Requests that a lane handed back unstarted to a suspend.
        pub handed_back: u64,
        /// Failed writes that took effect later.
        pub landed: u64,
        /// Opens of lanes that failed.
        pub refused: u64,
        /// Requests that failed because of the faults of a null device.
        pub injected: u64,
    }
}

/// The simulated environment: clock, disks, paths, trace and violations.
pub struct Env {
    /// Simulated time.
    pub now: Nanos,
    /// Turns so far: the time unit of the model.
    pub step: u64,
    /// The core that has the turn, or [`crate::trace::NO_CORE`].
    pub core: u16,
    /// Trace of events.
    pub trace: Trace,
    /// The disks.
    pub disks: Vec<SimDisk>,
    /// The paths.
    pub paths: Vec<SimPathState>,
    /// The paths that share tags, and the number of tags.
    pub(crate) shared: Option<(Vec<usize>, u64)>,
    /// The models of multipath targets.
    pub accesses: Vec<MultipathModel>,
    /// Random numbers for disks and paths.
    pub chance: SimRng,
    /// True if no faults are injected any more, because the world is being quiesced.
    pub calm: bool,
    /// True if the power is off: requests complete and change nothing.
    pub dead: bool,
    /// True if writes reach the medium in parts.
    pub torn: bool,
    /// True if failed writes may take effect later.
    pub lags: bool,
    /// Number of power cuts.
    pub crashes: u64,
    /// Number of starts and completions of writes and flushes on disks.
    pub changes: u64,
    /// Value of `changes` at which the power is cut.
    pub cut_at: Option<u64>,
    /// Requests of helper threads in progress.
    pub asked: Vec<HelperRequest>,
    /// The recorded marks of invalid stores, by disk.
    pub marks: BTreeMap<usize, InvalidStoreMarkRecord>,
    /// Path of each write in flight on a multipath device, by disk and first stamp.
    pub writing: BTreeMap<(usize, u64), usize>,
    /// Purpose of the task that has the turn. Lanes that it opens get no requests of devices.
    pub task: Option<TaskPurpose>,
    /// True if this task is to stop, so its results have no effect.
    pub task_stops: bool,
    /// Time that a target waits for the result of a check.
    pub check_timeout: Nanos,
    /// Number of the poll in progress that other cores may interrupt. A path that fails meanwhile
    /// is noticed after the poll.
    pub current_poll: Option<u64>,
    /// Requests that disks and paths failed.
    pub faults: u64,
    /// Counters of events, for the report.
    pub seen: EnvCounters,
    /// Failed writes that are still to take effect.
    pub late: Vec<LateWrite>,
    /// Number of opens that succeed before the next one fails.
    pub open_fails: Option<u64>,
    /// The first violation.
    pub violation: Option<String>,
}

/// The environment, shared by all parts of a world.
pub type SharedEnv = Arc<Mutex<Env>>;

/// Locks a mutex that only one thread uses.
pub(crate) fn lock_mutex<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks the environment. The world has one thread, so waiting would mean a second lock by the same
/// thread.
///
/// # Panics
/// If the environment is already locked.
pub fn lock_environment(env: &SharedEnv) -> MutexGuard<'_, Env> {
    match env.try_lock() {
        Ok(env) => env,
        Err(TryLockError::Poisoned(e)) => e.into_inner(),
        Err(TryLockError::WouldBlock) => panic!("the environment is locked twice"),
    }
}

impl Env {
    /// Creates an environment without disks.
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
            current_poll: None,
            faults: 0,
            seen: EnvCounters::default(),
            late: Vec::new(),
            open_fails: None,
            violation: None,
        }
    }

    /// Counts the start or completion of a write or flush on a disk.
    pub fn changed(&mut self) {
        self.changes += 1;
        if self.cut_at == Some(self.changes) && !self.dead {
            self.cut_power();
        }
    }

    /// Cuts the power. Cached data is lost, and writes in flight take effect wholly, partly or not
    /// at all.
    pub fn cut_power(&mut self) {
        self.say("the power fails");
        self.crashes += 1;
        self.dead = true;
        self.late.clear();
        let Env { disks, chance, marks, .. } = self;
        disks.iter_mut().for_each(|d| d.crash(chance));
        // A mark that was not durable yet is lost by chance.
        marks.retain(|_, mark| mark.lasts || chance.one_in(2));
        marks.values_mut().for_each(|mark| mark.lasts = true);
    }

    /// Counts an open of a lane. Returns true if it must fail.
    pub fn refuses_open(&mut self) -> bool {
        let fails = self.open_fails == Some(0);
        self.open_fails = self.open_fails.and_then(|n| n.checked_sub(1));
        self.seen.refused += u64::from(fails);
        fails
    }

    /// True if the write of `stamp` has failed and is still to take effect.
    #[must_use]
    pub fn is_late(&self, stamp: u64) -> bool {
        self.late.iter().any(|late| late.has(stamp))
    }

    /// True if a multipath target uses path `p` directly, so the model knows the state of the path.
    #[must_use]
    pub fn is_exact(&self, p: usize) -> bool {
        self.paths[p].access.is_some_and(|a| !self.accesses[a].has_unknown_paths)
    }

    /// Records a violation. Only the first one is kept.
    pub fn violate(&mut self, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(what());
        }
    }

    /// Returns the violation, and forgets it.
    pub(crate) fn verdict(&mut self) -> Result<(), String> {
        self.violation.take().map_or(Ok(()), Err)
    }

    /// Adds a line to the trace.
    pub fn say(&mut self, text: impl Into<String>) {
        let now = self.now;
        self.trace.say(now, text.into());
    }

    /// Returns a time after the start of all requests that began in this step.
    #[must_use]
    pub fn ending(&self) -> u64 {
        2 * self.step + 1
    }

    /// Records that requests to `disk` may fail with `status` from now on.
    pub fn excuse(&mut self, disk: usize, status: Status) {
        self.disks[disk].blamed[status as usize] = Some(self.ending());
    }

    /// Records that a path returned `status`. A multipath target above must fail the path for a
    /// path error.
    pub fn blame(&mut self, path: usize, status: Status) {
        self.faults += 1;
        self.excuse(self.paths[path].disk, status);
        if let Some(access) = self.paths[path].access.filter(|_| status.is_path_error()) {
            self.accesses[access].lost += u64::from(self.fail(path));
        }
    }

    /// Marks a path failed. Returns false if it already was, or if the model does not know its
    /// state.
    pub fn fail(&mut self, path: usize) -> bool {
        let Some(access) = self.paths[path].access.filter(|_| self.is_exact(path)) else { return false };
        let ((first, most), now) = (self.accesses[access].intervals, self.now);
        let state = &mut self.paths[path];
        if state.failed {
            return false;
        }
        state.failed = true;
        state.failed_in = self.current_poll.unwrap_or(0);
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

    /// Marks a path usable. Returns false if it already was.
    pub fn reinstate(&mut self, path: usize) -> bool {
        let was = std::mem::replace(&mut self.paths[path].failed, false);
        (self.paths[path].back, self.paths[path].check_by) = (Some(self.now), Nanos::NEVER);
        let disk = self.paths[path].disk;
        self.recheck(disk);
        was
    }

    /// Resets the state of the paths of `access`, because its table is new.
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

    /// Determines again whether requests to `disk` may fail because there is no path.
    pub fn recheck(&mut self, disk: usize) {
        let bare = self.accesses.iter().any(|a| {
            a.live
                && a.disk == disk
                && (!a.queue || a.suspending || a.retries)
                && (a.has_unknown_paths || a.paths.iter().all(|p| self.paths[*p].failed))
        });
        let ending = self.ending();
        record_condition_last_held(&mut self.disks[disk].no_path, bare, ending);
    }
}

/// Records in `slot` when a condition last held. While it `is` true, the time is `u64::MAX`.
pub fn record_condition_last_held(slot: &mut Option<u64>, is: bool, ending: u64) {
    match (is, *slot) {
        (true, _) => *slot = Some(u64::MAX),
        (false, Some(u64::MAX)) => *slot = Some(ending),
        (false, _) => {}
    }
}
