//! What a target with paths says of them.

use std::sync::Arc;
use udm_core::{DevNo, Nanos, Op, Status};
use udm_wire::multipath_conf::MultipathSettings;

/// A path and what it has served since the table was loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathReport {
    /// The device's number.
    pub number: DevNo,
    /// The word that the table used.
    pub name: String,
    /// Its group, from 1.
    pub group: usize,
    /// Out of use.
    pub failed: bool,
    /// How often it failed.
    pub fail_count: u64,
    /// How long it has been in use, or failed; zero where the device has no clock.
    pub in_state: Nanos,
    /// How long it was failed in all, this time included.
    pub failed_for: Nanos,
    /// Bios that it has, as of the last poll of each core.
    pub in_flight: u64,
    /// What its last check has found.
    pub check: PathCheckState,
    /// Why no check reinstates it, in a few words; `None` where one may.
    pub held: Option<String>,
    /// What it is worth, where something says so.
    pub prio: Option<u32>,
    /// Bios that came back from it, well or not.
    pub bios: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The same by operation, in the order of [`Op::ALL`]: bios and bytes.
    pub ops: [(u64, u64); Op::ALL.len()],
    /// Those that came back with an error that blames the path.
    pub errors: u64,
    /// All that came back with an error, by status; a status that none had is left out.
    pub errors_by: Vec<(Status, u64)>,
    /// Bios that it was given after another path had failed them.
    pub retries: u64,
    /// Out of use for being slow.
    pub ejected: bool,
    /// How often it was.
    pub ejections: u64,
    /// What a watch has counted; `None` without one.
    pub watch: Option<PathWatchReport>,
}

/// What the watch over a path has counted since the table was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathWatchReport {
    /// Writes and flushes that are past their deadline and still wait for the path.
    pub waiting: u64,
    /// Reads that were past their deadline and went elsewhere.
    pub given_up: u64,
    /// Answers that came when nobody waited for them any more.
    pub late: u64,
    /// Reads that went down without a copy, for want of memory: they have to wait as writes do.
    pub bare: u64,
    /// Reads of the path that were sent to another one too.
    pub hedges: u64,
    /// Those that were answered there first.
    pub won: u64,
    /// Those that were not.
    pub wasted: u64,
    /// Reads that were sent to another one late or not at all, since the budget was used up.
    pub refused: u64,
    /// Hedges past the budget, for a path that answered nothing at all.
    pub free: u64,
    /// How many reads took how long: the end of each step that has some, and how many.
    pub latency: Vec<(Nanos, u64)>,
    /// How long they took together.
    pub time: Nanos,
}

/// How a multipath target is looked after, as of now.
#[derive(Clone, Debug, PartialEq)]
pub struct PathMaintenanceReport {
    /// What is in force.
    pub settings: Arc<MultipathSettings>,
    /// Whether requests without a path wait; of a suspended device, from its resume on.
    pub queueing: bool,
    /// How long they wait yet, where the last path has gone and that is bounded.
    pub fails_in: Option<Nanos>,
    /// The group that is gone back to, from 1, and how long until then.
    pub back: Option<(usize, Nanos)>,
    /// The group, from 1, that a person has switched to, while it is used though another is better.
    pub by_hand: Option<usize>,
}

/// What an administrator has done to a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathCommand {
    /// It is failed until it is reinstated by command or message: no check does it.
    Fail,
    /// It is reinstated.
    Reinstate,
}

/// What a check of a path has found, in multipath-tools' states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PathCheckState {
    /// Nothing yet.
    #[default]
    Unchecked,
    /// It answers.
    Up,
    /// It answers with errors that blame it.
    Down,
    /// It does not answer.
    Timeout,
    /// It answers, and is held back: it keeps failing.
    Delayed,
}

impl PathCheckState {
    /// Each, by its number.
    pub const ALL: [PathCheckState; 5] = [
        PathCheckState::Unchecked,
        PathCheckState::Up,
        PathCheckState::Down,
        PathCheckState::Timeout,
        PathCheckState::Delayed,
    ];

    /// As multipath-tools prints it.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            PathCheckState::Unchecked => "undef",
            PathCheckState::Up => "ready",
            PathCheckState::Down => "faulty",
            PathCheckState::Timeout => "i/o timeout",
            PathCheckState::Delayed => "delayed",
        }
    }
}
