//! The priorities of paths and groups.

use std::collections::VecDeque;
use udm_core::Nanos;
use udm_wire::multipath_conf::grouping::derive_prio_from_path_name;
use udm_wire::multipath_conf::{MultipathSettings, PathPrioritizer};

/// A latency of 100 s or more, in µs, has priority 1, as in multipath-tools.
const LATENCY_MAX: f64 = 1e8;

/// The priorities of the paths of a device.
pub(super) struct PathPriorities {
    rule: PathPrioritizer,
    /// The priority of each path by its name.
    weights: Vec<u32>,
    /// What the devices report (ANA). As with `detect_prio` of multipath-tools, it replaces the
    /// constant priority.
    reported: Vec<Option<u32>>,
    /// The latencies of the last checks of each path.
    took: Vec<VecDeque<Nanos>>,
}

impl PathPriorities {
    pub fn new<'a>(settings: &MultipathSettings, names: impl Iterator<Item = &'a str>) -> PathPriorities {
        let weight = |name: &str| derive_prio_from_path_name(&settings.prio, name).unwrap_or(0);
        let weights: Vec<u32> = names.map(weight).collect();
        PathPriorities {
            rule: settings.prio.clone(),
            took: vec![VecDeque::new(); weights.len()],
            reported: vec![None; weights.len()],
            weights,
        }
    }

    /// The device of a path reports this priority.
    pub fn report(&mut self, path: usize, priority: Option<u32>) {
        self.reported[path] = priority;
    }

    /// A check of a path succeeded in time `took`.
    pub fn answered(&mut self, path: usize, took: Nanos) {
        let PathPrioritizer::Latency { checks, .. } = self.rule else { return };
        let last = &mut self.took[path];
        last.push_back(took);
        if last.len() > checks as usize {
            last.pop_front();
        }
    }

    /// The priority of a path; `None` if it is not known yet.
    pub fn of(&self, path: usize) -> Option<u32> {
        let base = match self.rule {
            PathPrioritizer::Const => return self.reported[path].or(Some(self.weights[path])),
            PathPrioritizer::Weighted(_) => return Some(self.weights[path]),
            PathPrioritizer::Latency { base, .. } => base,
        };
        let took = &self.took[path];
        let sum: f64 = took.iter().map(|took| took.0 as f64 / 1000.0).sum();
        let log = |us: f64| us.clamp(1.0, LATENCY_MAX).ln() / base.ln();
        (!took.is_empty()).then(|| (log(LATENCY_MAX) - log(sum / took.len() as f64) + 1.0) as u32)
    }
}

/// The rank of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupRank {
    /// The paths are held back because of errors; the group is used only if there is no other.
    pub marginal: bool,
    /// The mean priority of the paths in use.
    pub prio: u32,
    /// The number of paths in use.
    pub up: usize,
}

impl GroupRank {
    /// The rank of a group from the priorities of its paths in use; `None` is an unknown priority.
    pub fn new(marginal: bool, prios: impl Iterator<Item = Option<u32>>) -> GroupRank {
        let (mut sum, mut known, mut up) = (0u64, 0, 0);
        for prio in prios {
            up += 1;
            if let Some(prio) = prio {
                (sum, known) = (sum + u64::from(prio), known + 1);
            }
        }
        GroupRank { marginal, prio: sum.checked_div(known).unwrap_or(0) as u32, up }
    }
}

/// The best group that has a path in use. Groups that are not marginal come first, then higher
/// priority, then more paths, then the lower index.
pub(super) fn best_group(groups: &[GroupRank]) -> Option<usize> {
    let key = |rank: &GroupRank| (!rank.marginal, rank.prio, rank.up);
    let usable = groups.iter().enumerate().filter(|(_, rank)| rank.up > 0);
    usable.rev().max_by_key(|(_, rank)| key(rank)).map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(prios: &[u32]) -> GroupRank {
        GroupRank::new(false, prios.iter().copied().map(Some))
    }

    #[test]
    fn d06_the_best_group() {
        let (high, low) = (group(&[50, 10]), group(&[10, 10, 10]));
        assert_eq!((high.prio, low.prio), (30, 10));
        assert_eq!(best_group(&[high, low]), Some(0));
        assert_eq!(best_group(&[low, high]), Some(1));
        assert_eq!(best_group(&[group(&[10]), low]), Some(1), "more paths");
        assert_eq!(best_group(&[low, low]), Some(0), "the first of equals");
        assert_eq!(
            best_group(&[GroupRank { marginal: true, ..high }, low]),
            Some(1),
            "a marginal one comes last"
        );
        assert_eq!(best_group(&[GroupRank { marginal: true, ..high }, group(&[])]), Some(0));
        assert_eq!(best_group(&[group(&[]), group(&[])]), None);
        assert_eq!(
            GroupRank::new(false, [None, Some(7)].into_iter()),
            GroupRank { marginal: false, prio: 7, up: 2 }
        );
    }

    #[test]
    fn priorities_by_name_and_by_latency() {
        let names = ["disk-a", "disk-b", "other"];
        let mut settings = MultipathSettings::every(5);
        let mut prios = PathPriorities::new(&settings, names.into_iter());
        assert_eq!(prios.of(2), Some(1), "const");
        prios.report(2, Some(50));
        prios.report(0, None);
        assert_eq!([0, 2].map(|path| prios.of(path)), [Some(1), Some(50)], "the device reports one");
        settings.prio = PathPrioritizer::Weighted(vec![("*-a".into(), 50), ("disk*".into(), 10)]);
        let mut prios = PathPriorities::new(&settings, names.into_iter());
        prios.report(1, Some(50));
        assert_eq!([0, 1, 2].map(|path| prios.of(path)), [Some(50), Some(10), Some(0)]);
        settings.prio = PathPrioritizer::Latency { checks: 2, base: 10.0 };
        let mut prios = PathPriorities::new(&settings, names.into_iter());
        assert_eq!(prios.of(0), None, "nothing is known yet");
        for (path, us) in [(0, 100), (1, 100_000), (2, 0)] {
            prios.answered(path, Nanos(us * 1000));
        }
        assert_eq!([0, 1, 2].map(|path| prios.of(path)), [Some(7), Some(4), Some(9)]);
        prios.answered(0, Nanos(100_000_000));
        prios.answered(0, Nanos(100_000_000));
        assert_eq!(prios.of(0), Some(4), "the last two count");
    }
}
