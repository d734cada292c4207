//! The interface of targets with paths to the control half: reports and commands.

use crate::error::TargetError;
use crate::mapped::MappedDevice;
use crate::table::Table;
use udm_core::{CoreCommandSender, DevNo, Nanos, Op, Status};

/// A target whose devices are paths to one disk, each with a state of its own.
pub trait MultipathTarget {
    /// The paths, in the order of the table, and their counters.
    fn path_reports(&self) -> Vec<PathReport>;

    /// Goes on from the counters that the same paths had in another process: reports and `status`
    /// add them. `before` has the paths in the order of the table; if these are others, nothing
    /// changes. Paths that were failed there must be failed here already. Only the first call has
    /// an effect.
    fn continue_path_counters(&self, before: &[PathReport]);

    /// State of the path maintenance; `None` without maintenance.
    fn path_maintenance_report(&self) -> Option<QueueingAndFailbackReport>;

    /// Fails or reinstates each path over device `number`, for an administrator.
    ///
    /// # Errors
    /// EINVAL if there is no such path.
    fn command_path(&self, number: DevNo, command: PathCommand) -> Result<(), TargetError>;
}

impl Table {
    /// The paths of the targets and their counters; empty without a target that has paths.
    #[must_use]
    pub fn path_reports(&self) -> Vec<PathReport> {
        let targets = self.targets().iter().filter_map(|entry| entry.target.as_multipath());
        targets.flat_map(|target| target.path_reports()).collect()
    }

    /// As [`MultipathTarget::continue_path_counters`]. A target with paths is alone in its table.
    pub fn continue_path_counters(&self, before: &[PathReport]) {
        let target = self.targets().iter().find_map(|entry| entry.target.as_multipath());
        target.inspect(|target| target.continue_path_counters(before));
    }
}

impl MappedDevice {
    /// Fails or reinstates each path over device `number`, for an administrator, and makes all
    /// lanes poll once. The command goes to the target at sector 0, because a target with paths is
    /// alone in its table.
    ///
    /// # Errors
    /// EINVAL if there is no such path, or the target has no paths; EBUSY while suspended.
    pub fn command_path(
        &self,
        number: DevNo,
        command: PathCommand,
        cores: &dyn CoreCommandSender,
    ) -> Result<(), TargetError> {
        self.with_target(0, cores, |target| {
            let no_paths = || TargetError::new(format!("Target type {} has no paths", target.type_name()));
            target.as_multipath().ok_or_else(no_paths)?.command_path(number, command)
        })
    }
}

/// Status and counters of a path. Counters start when the table is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathReport {
    /// Number of the path's device.
    pub number: DevNo,
    /// The word that names the device in the table.
    pub name: String,
    /// The path group, from 1.
    pub group: usize,
    /// True if the path is failed.
    pub failed: bool,
    /// How often the path failed.
    pub fail_count: u64,
    /// How long the path has been in its state, usable or failed; 0 if the device has no clock.
    pub in_state: Nanos,
    /// Total time that the path was failed, including the current failure.
    pub failed_for: Nanos,
    /// Bios in flight on the path, as of the last poll of each core.
    pub in_flight: u64,
    /// Result of the last check of the path.
    pub check: PathCheckResult,
    /// Why no check reinstates the path, in a few words; `None` if a check may.
    pub held: Option<String>,
    /// Priority of the path, if a prioritizer sets it.
    pub prio: Option<u32>,
    /// Bios that completed on the path, with or without an error.
    pub bios: u64,
    /// Bytes of these bios.
    pub bytes: u64,
    /// Completed bios and their bytes per operation, in the order of [`Op::ALL`].
    pub ops: [(u64, u64); Op::ALL.len()],
    /// Bios that completed with a path error.
    pub errors: u64,
    /// Bios that completed with any error, by status. A status without bios is left out.
    pub errors_by: Vec<(Status, u64)>,
    /// Bios that the path got after another path had failed them.
    pub retries: u64,
    /// True if the path is ejected because it is slow.
    pub ejected: bool,
    /// How often the path was ejected.
    pub ejections: u64,
    /// Counters of the path watch; `None` without one.
    pub watch: Option<PathLatencyAndHedgeReport>,
}

/// Counters of the watch of a path, since the table was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathLatencyAndHedgeReport {
    /// Writes and flushes past their deadline that still wait for the path.
    pub waiting: u64,
    /// Reads past their deadline that were sent to another path.
    pub abandoned_reads: u64,
    /// Completions of the path that no request waited for any more.
    pub late_completions: u64,
    /// Reads that were sent without a copy because memory was short. They must wait for the path as
    /// writes do.
    pub uncopied_reads: u64,
    /// Reads of this path that were also sent to another path.
    pub hedges: u64,
    /// Hedges that completed first on the other path.
    pub hedges_won: u64,
    /// Hedges that completed first on this path.
    pub hedges_wasted: u64,
    /// Reads that were hedged late or not at all, because the hedge budget was used up.
    pub hedges_refused: u64,
    /// Hedges beyond the budget, because the path answered nothing at all.
    pub free_hedges: u64,
    /// Latency histogram of reads: upper bound and count of each bucket that is not empty.
    pub latency: Vec<(Nanos, u64)>,
    /// Sum of the latencies of these reads.
    pub time: Nanos,
}

/// Current state of the maintenance of a multipath target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueingAndFailbackReport {
    /// True if requests without a path are queued. For a suspended device, the value from its
    /// resume on.
    pub queueing: bool,
    /// How long requests are still queued, if no path is left and the time is bounded.
    pub fails_in: Option<Nanos>,
    /// The group, from 1, to which a failback is planned, and the time until then.
    pub failback: Option<(usize, Nanos)>,
    /// The group, from 1, that an administrator selected, while it is used although another group
    /// is better.
    pub manual_group: Option<usize>,
}

/// A command of an administrator for a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathCommand {
    /// Fails the path until a command or message reinstates it; checks do not.
    Fail,
    /// Reinstates the path.
    Reinstate,
}

/// Result of a path check, as a state of multipath-tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PathCheckResult {
    /// Not checked yet.
    #[default]
    Unchecked,
    /// The path answers.
    Up,
    /// The path answers with path errors.
    Down,
    /// The path does not answer.
    Timeout,
    /// The path answers, but is not reinstated yet because it keeps failing.
    Delayed,
}

impl PathCheckResult {
    /// All states, in order of their numbers.
    pub const ALL: [PathCheckResult; 5] = [
        PathCheckResult::Unchecked,
        PathCheckResult::Up,
        PathCheckResult::Down,
        PathCheckResult::Timeout,
        PathCheckResult::Delayed,
    ];

    /// The state as multipath-tools prints it.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            PathCheckResult::Unchecked => "undef",
            PathCheckResult::Up => "ready",
            PathCheckResult::Down => "faulty",
            PathCheckResult::Timeout => "i/o timeout",
            PathCheckResult::Delayed => "delayed",
        }
    }
}
