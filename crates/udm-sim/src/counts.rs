//! Counters of runs: their sums, and the report of each kind of world.

use crate::plan::{DisturbanceClass, ExcludedDisturbances};

/// A count that can be summed over several runs.
pub trait AccumulateRuns {
    /// Adds the count of another run.
    fn add(&mut self, more: &Self);
}

impl AccumulateRuns for u64 {
    fn add(&mut self, more: &u64) {
        *self += more;
    }
}

impl<const N: usize> AccumulateRuns for [u64; N] {
    fn add(&mut self, more: &[u64; N]) {
        self.iter_mut().zip(more).for_each(|(all, more)| *all += more);
    }
}

impl AccumulateRuns for bool {
    fn add(&mut self, more: &bool) {
        *self |= more;
    }
}

/// The maximum of a value over all runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MaxOverRuns(pub u64);

impl MaxOverRuns {
    /// Raises the maximum to `n` if `n` is larger.
    pub fn see(&mut self, n: u64) {
        self.0 = self.0.max(n);
    }
}

impl AccumulateRuns for MaxOverRuns {
    fn add(&mut self, more: &MaxOverRuns) {
        self.see(more.0);
    }
}

/// Hash of the hashes of all runs, in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CombinedRunHash(pub u64);

impl AccumulateRuns for CombinedRunHash {
    fn add(&mut self, more: &CombinedRunHash) {
        self.0 = self.0.rotate_left(1) ^ more.0;
    }
}

/// Defines a struct of counters that implements [`AccumulateRuns`].
macro_rules! counts {
    ($(#[$about:meta])* pub struct $name:ident { $($(#[$doc:meta])* pub $field:ident: $of:ty,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default)]
        pub struct $name {
            $($(#[$doc])* pub $field: $of,)*
        }

        impl $crate::counts::AccumulateRuns for $name {
            fn add(&mut self, more: &$name) {
                $($crate::counts::AccumulateRuns::add(&mut self.$field, &more.$field);)*
            }
        }
    };
}

pub(crate) use counts;

/// Name, class and count of a disturbance.
pub type DisturbanceCount = (&'static str, Option<DisturbanceClass>, u64);

/// Report of runs of one kind of world.
#[derive(Clone, Debug)]
pub struct RunReport {
    /// Steps taken.
    pub steps: u64,
    /// Completed requests, or verbs.
    pub requests: u64,
    /// Simulated time in ns.
    pub simulated: u64,
    /// The reason why the runs tested nothing, if they did.
    pub nothing: Option<&'static str>,
    /// All disturbances that many runs must have.
    pub disturbances: Vec<DisturbanceCount>,
    /// Text of the coverage, several lines.
    pub coverage: String,
}

impl RunReport {
    /// Disturbances that were not excluded and never occurred, because the runs were too short.
    #[must_use]
    pub fn uncovered(&self, without: ExcludedDisturbances) -> Vec<&'static str> {
        let is_in = |class: Option<DisturbanceClass>| class.is_none_or(|class| !without.has(class));
        let missing = self.disturbances.iter().filter(|(_, class, n)| *n == 0 && is_in(*class));
        missing.map(|(name, ..)| *name).collect()
    }
}

/// Collects the disturbances of a report.
pub(crate) fn collect_disturbances(
    all: impl IntoIterator<Item = (&'static str, DisturbanceClass, u64)>,
) -> Vec<DisturbanceCount> {
    all.into_iter().map(|(name, class, n)| (name, Some(class), n)).collect()
}

/// Formats a list of counts for a person.
pub(crate) fn format_counts<N: std::fmt::Display>(all: impl IntoIterator<Item = (N, u64)>) -> String {
    all.into_iter().map(|(name, n)| format!("{} {name}", format_count(n))).collect::<Vec<_>>().join(", ")
}

/// Formats counts of disturbances for a person.
pub(crate) fn format_disturbance_counts<C>(all: impl IntoIterator<Item = (&'static str, C, u64)>) -> String {
    format_counts(all.into_iter().map(|(name, _, n)| (name, n)))
}

/// Formats a number for a person.
#[must_use]
pub fn format_count(n: u64) -> String {
    match n {
        0..10_000 => n.to_string(),
        10_000..10_000_000 => format!("{:.1} k", n as f64 / 1e3),
        _ => format!("{:.1} M", n as f64 / 1e6),
    }
}
