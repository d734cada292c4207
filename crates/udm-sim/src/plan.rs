//! The plan of a run: a seed, and the disturbances to leave out.

use std::fmt;
use std::str::FromStr;

/// A class of disturbance, which can be left out to shrink a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DisturbanceClass {
    /// Power cuts and restarts.
    Crash,
    /// Devices that are removed and created again.
    Remove,
    /// Paths that fail, become slow or silent, and recover.
    Paths,
    /// Errors of the disks themselves.
    Errors,
    /// Suspend and resume.
    Suspend,
    /// New tables.
    Reload,
    /// Suspends and resumes that are cancelled.
    Cancel,
    /// Messages to multipath targets.
    Messages,
    /// Messages to cores that arrive late.
    Delay,
    /// Requests that take effect partly.
    Torn,
    /// Flushes, FUA and preflush.
    Flush,
    /// Discards and write-zeroes.
    Trim,
    /// Requests long enough to be split.
    Long,
    /// Lanes that are closed and opened again.
    Reopen,
    /// Data in several pieces.
    Pieces,
    /// Paths that hang until the world releases them.
    Hang,
    /// Lanes that are full for a while.
    Full,
    /// Requests that complete within their submit.
    Prompt,
    /// Lanes that cannot be opened.
    Opens,
    /// Disks that are or become read-only, grow or have lower limits, and blocks of 4 KiB.
    Limits,
    /// Multipath over mapped devices, and snapshots of snapshots.
    Stacks,
    /// Bad blocks.
    Dust,
    /// Targets that drop writes and change data on purpose.
    Lossy,
    /// Writes that take effect after they failed.
    Late,
    /// Invalid requests: beyond the end, partial blocks, or writes to a read-only device.
    Wild,
    /// Snapshots that are merged into their origins.
    Merge,
    /// Stores that become full.
    Small,
    /// Cores that run in the middle of another core's turn. This needs the feature `interleave`.
    Between,
    /// Short reads and writes of connections.
    Cuts,
    /// Failing operations of connections, and clients that vanish without a close.
    Lost,
    /// Clients that do not read or write for a while.
    Stalls,
    /// Clients that send invalid data.
    Nonsense,
    /// Connections that move to other cores.
    Moves,
    /// The path watch.
    Watch,
    /// Queues in front of disks.
    Queues,
    /// Limits of the requests and bytes per second of devices.
    Throttles,
}

impl DisturbanceClass {
    /// All classes.
    pub const ALL: [DisturbanceClass; 36] = [
        DisturbanceClass::Crash,
        DisturbanceClass::Remove,
        DisturbanceClass::Paths,
        DisturbanceClass::Errors,
        DisturbanceClass::Suspend,
        DisturbanceClass::Reload,
        DisturbanceClass::Cancel,
        DisturbanceClass::Messages,
        DisturbanceClass::Delay,
        DisturbanceClass::Torn,
        DisturbanceClass::Flush,
        DisturbanceClass::Trim,
        DisturbanceClass::Long,
        DisturbanceClass::Reopen,
        DisturbanceClass::Pieces,
        DisturbanceClass::Hang,
        DisturbanceClass::Full,
        DisturbanceClass::Prompt,
        DisturbanceClass::Opens,
        DisturbanceClass::Limits,
        DisturbanceClass::Stacks,
        DisturbanceClass::Dust,
        DisturbanceClass::Lossy,
        DisturbanceClass::Late,
        DisturbanceClass::Wild,
        DisturbanceClass::Merge,
        DisturbanceClass::Small,
        DisturbanceClass::Between,
        DisturbanceClass::Cuts,
        DisturbanceClass::Lost,
        DisturbanceClass::Stalls,
        DisturbanceClass::Nonsense,
        DisturbanceClass::Moves,
        DisturbanceClass::Watch,
        DisturbanceClass::Queues,
        DisturbanceClass::Throttles,
    ];

    /// Name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DisturbanceClass::Crash => "crash",
            DisturbanceClass::Remove => "remove",
            DisturbanceClass::Paths => "paths",
            DisturbanceClass::Errors => "errors",
            DisturbanceClass::Suspend => "suspend",
            DisturbanceClass::Reload => "reload",
            DisturbanceClass::Cancel => "cancel",
            DisturbanceClass::Messages => "messages",
            DisturbanceClass::Delay => "delay",
            DisturbanceClass::Torn => "torn",
            DisturbanceClass::Flush => "flush",
            DisturbanceClass::Trim => "trim",
            DisturbanceClass::Long => "long",
            DisturbanceClass::Reopen => "reopen",
            DisturbanceClass::Pieces => "pieces",
            DisturbanceClass::Hang => "hang",
            DisturbanceClass::Full => "full",
            DisturbanceClass::Prompt => "prompt",
            DisturbanceClass::Opens => "opens",
            DisturbanceClass::Limits => "limits",
            DisturbanceClass::Stacks => "stacks",
            DisturbanceClass::Dust => "dust",
            DisturbanceClass::Lossy => "lossy",
            DisturbanceClass::Late => "late",
            DisturbanceClass::Wild => "wild",
            DisturbanceClass::Merge => "merge",
            DisturbanceClass::Small => "small",
            DisturbanceClass::Between => "between",
            DisturbanceClass::Cuts => "cuts",
            DisturbanceClass::Lost => "lost",
            DisturbanceClass::Stalls => "stalls",
            DisturbanceClass::Nonsense => "nonsense",
            DisturbanceClass::Moves => "moves",
            DisturbanceClass::Watch => "watch",
            DisturbanceClass::Queues => "queues",
            DisturbanceClass::Throttles => "throttles",
        }
    }
}

impl fmt::Display for DisturbanceClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DisturbanceClass {
    type Err = String;
    fn from_str(s: &str) -> Result<DisturbanceClass, String> {
        let known = || DisturbanceClass::ALL.map(DisturbanceClass::name).join(", ");
        DisturbanceClass::ALL
            .into_iter()
            .find(|c| c.name() == s)
            .ok_or_else(|| format!("no class {s:?}; the classes are {}", known()))
    }
}

/// A set of excluded classes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExcludedDisturbances(u64);

impl ExcludedDisturbances {
    /// Returns the set with `class` added.
    #[must_use]
    pub fn and(self, class: DisturbanceClass) -> ExcludedDisturbances {
        ExcludedDisturbances(self.0 | 1 << class as u8)
    }

    /// Returns the set of all classes.
    #[must_use]
    pub fn all() -> ExcludedDisturbances {
        DisturbanceClass::ALL.into_iter().fold(ExcludedDisturbances::default(), ExcludedDisturbances::and)
    }

    /// True if `class` is excluded.
    #[must_use]
    pub fn has(self, class: DisturbanceClass) -> bool {
        self.0 & 1 << class as u8 != 0
    }

    /// The excluded classes.
    pub fn list(self) -> impl Iterator<Item = DisturbanceClass> {
        DisturbanceClass::ALL.into_iter().filter(move |c| self.has(*c))
    }
}

/// A run. The same plan gives the same run, event for event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunPlan {
    /// Seed of all random choices.
    pub seed: u64,
    /// Number of steps.
    pub steps: u64,
    /// Number of cores; drawn if `None`.
    pub cores: Option<usize>,
    /// Maximum number of requests per core and device; drawn if `None`.
    pub depth: Option<usize>,
    /// The excluded disturbances.
    pub without: ExcludedDisturbances,
    /// Number of events that the trace keeps.
    pub keep_events: usize,
    /// True for a world of origins and their snapshots.
    pub snapshots: bool,
    /// True if disks that no multipath target uses are null devices with faults.
    pub faulty: bool,
    /// Number of the start or completion of a write or flush at which the power is cut. The cuts
    /// that the seed draws remain.
    pub cut: Option<u64>,
    /// Number of working paths of a fixed world with one multipath device, for measurements.
    pub bench: Option<usize>,
}

impl RunPlan {
    /// Plan of `seed` for `steps` steps, with all disturbances.
    #[must_use]
    pub fn new(seed: u64, steps: u64) -> RunPlan {
        RunPlan {
            seed,
            steps,
            cores: None,
            depth: None,
            without: ExcludedDisturbances::default(),
            keep_events: 512,
            snapshots: false,
            faulty: false,
            cut: None,
            bench: None,
        }
    }

    /// Plan of `seed` in a world of origins and their snapshots.
    #[must_use]
    pub fn snapshots(seed: u64, steps: u64) -> RunPlan {
        RunPlan { snapshots: true, ..RunPlan::new(seed, steps) }
    }

    /// Command-line options that repeat this run.
    #[must_use]
    pub fn options(&self) -> String {
        let mut text = format!("--seed {} --steps {}", self.seed, self.steps);
        if self.snapshots {
            text += " --snapshots";
        }
        if let Some(paths) = self.bench {
            text += &format!(" --bench {paths}");
        }
        if self.faulty {
            text += " --faulty";
        }
        if let Some(cut) = self.cut {
            text += &format!(" --cut {cut}");
        }
        if let Some(cores) = self.cores {
            text += &format!(" --cores {cores}");
        }
        if let Some(depth) = self.depth {
            text += &format!(" --depth {depth}");
        }
        let names: Vec<_> = self.without.list().map(DisturbanceClass::name).collect();
        if !names.is_empty() {
            text += &format!(" --without {}", names.join(","));
        }
        text
    }
}
