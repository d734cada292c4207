//! The paths of multipath targets.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A path of a multipath target, with counters since its table was loaded. Counters only grow: a
/// rate is the difference of two readings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MultipathPathReport {
    /// Start of the target on the device.
    pub start_bytes: u64,
    /// Number of the path's device.
    pub number: String,
    /// The path's device as written in the table.
    pub name: String,
    /// Path group, from 1.
    pub group: u64,
    /// "active" or "failed".
    pub state: String,
    /// Time since the path is in this state.
    pub state_ns: u64,
    /// Total time in which the path was failed, including the current failure.
    pub failed_ns: u64,
    /// Number of times the path failed.
    pub failures: u64,
    /// Result of the last path check, in multipath-tools' words: "ready", "faulty", "i/o timeout",
    /// "delayed" (the path answers, but is not reinstated yet), "undef" (not checked yet).
    #[serde(default)]
    pub checker: String,
    /// Why path checks do not reinstate the path: "by command", a change of its device since the
    /// table was loaded, or for how long it is held back because it keeps failing. Null if checks
    /// may reinstate it.
    #[serde(default)]
    pub held: Option<String>,
    /// Priority of the path; null if unknown.
    #[serde(default)]
    pub priority: Option<u32>,
    /// Requests in flight on the path, as of the last update of each core.
    pub in_flight: u64,
    /// Requests that the path completed, with or without error, by operation: "read", "write",
    /// "flush", "discard" and "write-zeroes".
    pub served: BTreeMap<String, RequestAndByteCount>,
    /// Requests that the path completed with an error, by the kernel's name of the error. Errors
    /// that did not occur are left out.
    pub errors: BTreeMap<String, u64>,
    /// Requests that the path got after another path had failed them.
    pub retries: u64,
    /// True while the path is ejected: not used, because it is slow.
    #[serde(default)]
    pub ejected: bool,
    /// Number of times the path was ejected.
    #[serde(default)]
    pub ejections: u64,
    /// Counters of the path watch; null without one.
    pub watch: Option<PathLatencyAndHedgeCounters>,
}

/// Which paths of a device get requests: the paths that have not failed, except an ejected one
/// whose group has another usable path.
#[must_use]
pub fn usable_path_flags(paths: &[MultipathPathReport]) -> Vec<bool> {
    let up = |path: &MultipathPathReport| path.state == "active";
    let group = |path: &MultipathPathReport| (path.start_bytes, path.group);
    let other = |path: &MultipathPathReport| {
        paths.iter().any(|one| group(one) == group(path) && up(one) && !one.ejected)
    };
    paths.iter().map(|path| up(path) && !(path.ejected && other(path))).collect()
}

/// How the paths of a multipath target are maintained, and their current state.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PathMaintenanceStatus {
    /// What happens to requests without a usable path, as in multipath.conf: "fail", "queue", or
    /// the number of checks for which they are queued. Null if table and messages decide.
    pub no_path_retry: Option<String>,
    /// True if requests without a usable path are queued at the moment, by whatever setting. For a
    /// suspended device: true if they will be queued after its resume.
    pub queueing: bool,
    /// Time until queued requests fail; null if there is a usable path or no limit.
    pub queueing_left_ns: Option<u64>,
    /// When the device goes back to the best group, as in multipath.conf: "manual", "immediate",
    /// "followover", or a number of seconds.
    pub failback: String,
    /// The group, from 1, to which a delayed failback will switch; null if none is pending.
    pub failback_group: Option<u64>,
    /// Time until the delayed failback; null if none is pending.
    pub failback_left_ns: Option<u64>,
    /// The group, from 1, that an administrator switched to. It is used until none of its paths
    /// works, even if another group is better. Null if there is none, or if it is the best group.
    #[serde(default)]
    pub group_by_hand: Option<u64>,
}

/// Counters of the path watch since the table was loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PathLatencyAndHedgeCounters {
    /// Writes and flushes that are past their deadline and still wait for the path.
    pub waiting: u64,
    /// Reads that passed their deadline and were sent to another path.
    pub given_up: u64,
    /// Answers that came after their request was completed otherwise.
    pub late: u64,
    /// Reads that were sent without a copy, because memory was short. Like writes, they must wait
    /// for the path.
    pub uncopied: u64,
    /// Hedged reads: reads of this path that were also sent to another path.
    pub hedges: u64,
    /// Hedged reads that the other path answered first.
    pub hedges_won: u64,
    /// Hedged reads that the other path did not answer first.
    pub hedges_wasted: u64,
    /// Reads that were not hedged, or hedged late, because the budget was used up.
    pub hedges_refused: u64,
    /// Hedged reads beyond the budget, for a path that did not answer anything.
    pub hedges_free: u64,
    /// Latency histogram of reads: each step counts reads faster than its limit and not faster than
    /// the limit of the step before.
    pub latency: Vec<PathLatencyBucket>,
    /// Total time of all reads.
    #[serde(default)]
    pub latency_sum_ns: u64,
}

/// One step of a latency histogram.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PathLatencyBucket {
    /// Upper limit of the time.
    pub below_ns: u64,
    /// Number of reads.
    pub reads: u64,
}

/// A number of requests and their bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RequestAndByteCount {
    /// Number of requests.
    pub requests: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// An administrator's command for a path. Unlike a multipath message, path checks do not reinstate
/// a path that it failed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FailOrReinstatePathRequest {
    /// The path's device: its number, major:minor, as in the status, or a word as in a table.
    pub path: String,
    /// "fail" or "reinstate".
    pub action: String,
    /// Absolute path of the base directory of a relative path. Without it, a relative path is
    /// refused.
    #[serde(default)]
    pub folder: Option<String>,
}
