//! What a run is made of: a seed and what is left out.

use std::fmt;
use std::str::FromStr;

/// A class of disturbance, to be left out when a failure is being shrunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Disturbance {
    /// Crashes and restarts.
    Crash,
    /// Devices removed and made again.
    Remove,
    /// Paths that go down, slow, silent, and come back.
    Paths,
    /// Errors of the disks' own.
    Errors,
    /// Suspend and resume.
    Suspend,
    /// New tables.
    Reload,
    /// Suspends and resumes that are called off.
    Cancel,
    /// Messages to multipath targets.
    Messages,
    /// Commands that take long to arrive.
    Delay,
    /// Requests that take effect in parts.
    Torn,
    /// Flush, FUA and flush-before.
    Flush,
    /// Discard and write-zeroes.
    Trim,
    /// Requests long enough to be split.
    Long,
    /// Lanes closed and opened again.
    Reopen,
    /// Data in several pieces.
    Pieces,
    /// Paths that say nothing until the world lets go of them.
    Hang,
    /// Lanes that are full for a while.
    Full,
    /// Requests done in the submit that brings them.
    Prompt,
    /// Lanes that can't be opened.
    Opens,
    /// Disks that are or become read-only, grow, or take shorter requests, and blocks of 4 KiB.
    Limits,
    /// Multipath over mapped devices, and snapshots of snapshots.
    Stacks,
    /// Bad blocks.
    Dust,
    /// Writes dropped and data changed on purpose.
    Lossy,
    /// Writes that take effect after their error.
    Late,
    /// Requests that nobody should make: beyond the end, across blocks, to what is read-only.
    Wild,
    /// Snapshots brought back into their origins.
    Merge,
    /// Stores that become full.
    Small,
    /// Cores that act in the middle of another's turn. For builds with the feature `interleave`.
    Between,
    /// Reads and writes of connections that are cut short.
    Cuts,
    /// Operations on connections that fail, and clients that are gone without a word.
    Lost,
    /// Clients that neither read nor write for a while.
    Stalls,
    /// Clients that send nonsense.
    Nonsense,
    /// Clients that go on on other cores.
    Moves,
    /// Paths that are watched.
    Watch,
    /// Queues in front of disks.
    Queues,
}

impl Disturbance {
    /// Every class.
    pub const ALL: [Disturbance; 35] = [
        Disturbance::Crash,
        Disturbance::Remove,
        Disturbance::Paths,
        Disturbance::Errors,
        Disturbance::Suspend,
        Disturbance::Reload,
        Disturbance::Cancel,
        Disturbance::Messages,
        Disturbance::Delay,
        Disturbance::Torn,
        Disturbance::Flush,
        Disturbance::Trim,
        Disturbance::Long,
        Disturbance::Reopen,
        Disturbance::Pieces,
        Disturbance::Hang,
        Disturbance::Full,
        Disturbance::Prompt,
        Disturbance::Opens,
        Disturbance::Limits,
        Disturbance::Stacks,
        Disturbance::Dust,
        Disturbance::Lossy,
        Disturbance::Late,
        Disturbance::Wild,
        Disturbance::Merge,
        Disturbance::Small,
        Disturbance::Between,
        Disturbance::Cuts,
        Disturbance::Lost,
        Disturbance::Stalls,
        Disturbance::Nonsense,
        Disturbance::Moves,
        Disturbance::Watch,
        Disturbance::Queues,
    ];

    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Disturbance::Crash => "crash",
            Disturbance::Remove => "remove",
            Disturbance::Paths => "paths",
            Disturbance::Errors => "errors",
            Disturbance::Suspend => "suspend",
            Disturbance::Reload => "reload",
            Disturbance::Cancel => "cancel",
            Disturbance::Messages => "messages",
            Disturbance::Delay => "delay",
            Disturbance::Torn => "torn",
            Disturbance::Flush => "flush",
            Disturbance::Trim => "trim",
            Disturbance::Long => "long",
            Disturbance::Reopen => "reopen",
            Disturbance::Pieces => "pieces",
            Disturbance::Hang => "hang",
            Disturbance::Full => "full",
            Disturbance::Prompt => "prompt",
            Disturbance::Opens => "opens",
            Disturbance::Limits => "limits",
            Disturbance::Stacks => "stacks",
            Disturbance::Dust => "dust",
            Disturbance::Lossy => "lossy",
            Disturbance::Late => "late",
            Disturbance::Wild => "wild",
            Disturbance::Merge => "merge",
            Disturbance::Small => "small",
            Disturbance::Between => "between",
            Disturbance::Cuts => "cuts",
            Disturbance::Lost => "lost",
            Disturbance::Stalls => "stalls",
            Disturbance::Nonsense => "nonsense",
            Disturbance::Moves => "moves",
            Disturbance::Watch => "watch",
            Disturbance::Queues => "queues",
        }
    }
}

impl fmt::Display for Disturbance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Disturbance {
    type Err = String;
    fn from_str(s: &str) -> Result<Disturbance, String> {
        let known = || Disturbance::ALL.map(Disturbance::name).join(", ");
        Disturbance::ALL
            .into_iter()
            .find(|c| c.name() == s)
            .ok_or_else(|| format!("no class {s:?}; there are {}", known()))
    }
}

/// Classes left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExcludedDisturbances(u64);

impl ExcludedDisturbances {
    /// Leaves out `class` too.
    #[must_use]
    pub fn and(self, class: Disturbance) -> ExcludedDisturbances {
        ExcludedDisturbances(self.0 | 1 << class as u8)
    }

    /// Everything is left out.
    #[must_use]
    pub fn all() -> ExcludedDisturbances {
        Disturbance::ALL.into_iter().fold(ExcludedDisturbances::default(), ExcludedDisturbances::and)
    }

    /// Is `class` left out?
    #[must_use]
    pub fn has(self, class: Disturbance) -> bool {
        self.0 & 1 << class as u8 != 0
    }

    /// What is left out.
    pub fn list(self) -> impl Iterator<Item = Disturbance> {
        Disturbance::ALL.into_iter().filter(move |c| self.has(*c))
    }
}

/// A run. The same plan gives the same run, event for event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunPlan {
    /// Where all chance comes from.
    pub seed: u64,
    /// How many steps to take.
    pub steps: u64,
    /// How many cores; drawn when `None`.
    pub cores: Option<usize>,
    /// How many requests each core may have in flight on a device; drawn when `None`.
    pub depth: Option<usize>,
    /// What is left out.
    pub without: ExcludedDisturbances,
    /// How many events the trace keeps.
    pub keep_events: usize,
    /// A world of origins and their snapshots.
    pub snapshots: bool,
    /// Disks that no multipath target uses are null devices with faults.
    pub faulty: bool,
    /// The power is cut with this write or flush of those that disks begin or end, besides the cuts
    /// that the seed draws.
    pub cut: Option<u64>,
    /// A fixed world of one multipath device over this many healthy paths, for measuring.
    pub bench: Option<usize>,
}

impl RunPlan {
    /// The run of `seed` for `steps` steps, with everything in it.
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

    /// The run of `seed` in a world of origins and their snapshots.
    #[must_use]
    pub fn snapshots(seed: u64, steps: u64) -> RunPlan {
        RunPlan { snapshots: true, ..RunPlan::new(seed, steps) }
    }

    /// The options of the program that repeat it.
    #[must_use]
    pub fn options(&self) -> String {
        let mut text = format!("--seed {} --steps {}", self.seed, self.steps);
        if self.snapshots {
            text += " --snapshots";
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
        let names: Vec<_> = self.without.list().map(Disturbance::name).collect();
        if !names.is_empty() {
            text += &format!(" --without {}", names.join(","));
        }
        text
    }
}
