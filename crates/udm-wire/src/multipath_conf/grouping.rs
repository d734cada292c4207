//! Creates multipath tables from paths, by the grouping policies of multipath-tools.

use super::{MultipathSettings, NoPathRetry, PathPrioritizer, matches_pattern};
use crate::words;

/// Options for the table of a device that is created from paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MultipathTableOptions {
    /// `path_grouping_policy`.
    pub policy: GroupingPolicy,
    /// `path_selector`: its name, a count, and as many arguments.
    pub selector: String,
    /// `features`: the words after their count.
    pub features: Vec<String>,
    /// `rr_min_io_rq`: the argument of each path, a number of requests.
    pub min_io: u32,
}

impl Default for MultipathTableOptions {
    /// The defaults of multipath-tools.
    fn default() -> MultipathTableOptions {
        MultipathTableOptions {
            policy: GroupingPolicy::Failover,
            selector: "service-time 0".into(),
            features: Vec::new(),
            min_io: 1,
        }
    }
}

/// `path_grouping_policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupingPolicy {
    /// One group per path.
    Failover,
    /// All paths in one group.
    Multibus,
    /// One group per priority.
    GroupByPrio,
}

impl GroupingPolicy {
    /// The policy with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<GroupingPolicy> {
        Some(match name {
            "failover" => GroupingPolicy::Failover,
            "multibus" => GroupingPolicy::Multibus,
            "group_by_prio" => GroupingPolicy::GroupByPrio,
            _ => return None,
        })
    }
}

/// The priority of a path that follows from its name; `None` if only checks can tell it.
pub fn derive_prio_from_path_name(prio: &PathPrioritizer, name: &str) -> Option<u32> {
    match prio {
        PathPrioritizer::Const => Some(1),
        PathPrioritizer::Weighted(weights) => Some(
            weights.iter().find(|(pattern, _)| matches_pattern(pattern, name)).map_or(0, |(_, prio)| *prio),
        ),
        PathPrioritizer::Latency { .. } => None,
    }
}

/// The table of a device of `sectors` sectors over `paths`, as text. Groups are ordered by
/// priority, then by their number of paths, then in the given order.
///
/// # Errors
/// If `group_by_prio` is used with priorities that only checks can tell.
pub fn build_multipath_table(
    settings: &MultipathSettings,
    sectors: u64,
    paths: &[String],
) -> Result<String, &'static str> {
    let MultipathTableOptions { policy, selector, features, min_io } = &settings.grouping;
    let mut groups: Vec<(u32, Vec<&String>)> = Vec::new();
    for path in paths {
        let known = derive_prio_from_path_name(&settings.prio, path);
        let prio = match policy {
            GroupingPolicy::GroupByPrio => {
                known.ok_or("group_by_prio needs priorities that are known at creation")?
            }
            _ => known.unwrap_or(0),
        };
        let with = groups.iter_mut().find(|(group, _)| match policy {
            GroupingPolicy::Failover => false,
            GroupingPolicy::Multibus => true,
            GroupingPolicy::GroupByPrio => *group == prio,
        });
        match with {
            Some((_, group)) => group.push(path),
            None => groups.push((prio, vec![path])),
        }
    }
    groups.sort_by_key(|(prio, group)| (std::cmp::Reverse(*prio), std::cmp::Reverse(group.len())));
    let mut features = features.clone();
    if settings.no_path_retry == Some(NoPathRetry::Fail) {
        features.retain(|word| word != "queue_if_no_path");
    }
    let queues = matches!(settings.no_path_retry, Some(NoPathRetry::Queue | NoPathRetry::Checks(_)));
    if queues && !features.iter().any(|word| word == "queue_if_no_path") {
        features.insert(0, "queue_if_no_path".into());
    }
    let mut table = format!("0 {sectors} multipath {}", features.len());
    features.iter().for_each(|word| table.extend([" ", word]));
    table += &format!(" 0 {} {}", groups.len(), usize::from(!groups.is_empty()));
    for (_, group) in &groups {
        table += &format!(" {selector} {} 1", group.len());
        // As in multipath-tools: one argument per path. The io-affinity selector takes it for the
        // path's cores.
        let arg = if selector.starts_with("io-affinity ") { 1 } else { *min_io };
        group.iter().for_each(|path| table += &format!(" {} {arg}", words::escape_table_word(path)));
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_grouped_as_by_multipath_tools() {
        let weights =
            || PathPrioritizer::Weighted(vec![("b*".into(), 50), ("d".into(), 50), ("c".into(), 70)]);
        let of = |policy, prio, paths: &str| {
            let grouping = MultipathTableOptions { policy, ..MultipathTableOptions::default() };
            let settings = MultipathSettings { prio, grouping, ..MultipathSettings::every(5) };
            let paths: Vec<String> = paths.split(' ').map(String::from).collect();
            build_multipath_table(&settings, 8, &paths)
        };
        let rows = [
            (
                GroupingPolicy::Failover,
                PathPrioritizer::Const,
                "0 2 1 service-time 0 1 1 a 1 service-time 0 1 1 b 1",
            ),
            (GroupingPolicy::Failover, weights(), "0 2 1 service-time 0 1 1 b 1 service-time 0 1 1 a 1"),
            (GroupingPolicy::Multibus, weights(), "0 1 1 service-time 0 2 1 a 1 b 1"),
            (GroupingPolicy::GroupByPrio, PathPrioritizer::Const, "0 1 1 service-time 0 2 1 a 1 b 1"),
            (GroupingPolicy::GroupByPrio, weights(), "0 2 1 service-time 0 1 1 b 1 service-time 0 1 1 a 1"),
        ];
        for (policy, prio, want) in rows {
            assert_eq!(of(policy, prio, "a b").unwrap(), format!("0 8 multipath 0 {want}"), "{policy:?}");
        }
        let four = "0 3 1 service-time 0 1 1 c 1 service-time 0 2 1 b 1 d 1 service-time 0 1 1 a 1";
        assert_eq!(
            of(GroupingPolicy::GroupByPrio, weights(), "a b c d").unwrap(),
            format!("0 8 multipath 0 {four}")
        );
        let latency = || PathPrioritizer::Latency { checks: 20, base: 10.0 };
        assert!(of(GroupingPolicy::GroupByPrio, latency(), "a b").is_err());
        assert!(of(GroupingPolicy::Multibus, latency(), "a b").is_ok());
    }

    #[test]
    fn each_path_has_its_count_of_requests() {
        let of = |selector: &str| {
            let grouping = MultipathTableOptions {
                selector: selector.into(),
                min_io: 7,
                ..MultipathTableOptions::default()
            };
            let settings = MultipathSettings { grouping, ..MultipathSettings::every(5) };
            build_multipath_table(&settings, 8, &["8:0".to_owned()]).unwrap()
        };
        assert_eq!(of("round-robin 0"), "0 8 multipath 0 0 1 1 round-robin 0 1 1 8:0 7");
        assert_eq!(of("io-affinity 0"), "0 8 multipath 0 0 1 1 io-affinity 0 1 1 8:0 1", "a mask of cores");
    }

    #[test]
    fn features_and_names() {
        let grouping = MultipathTableOptions {
            policy: GroupingPolicy::Multibus,
            selector: "historical-service-time 1 900".into(),
            features: vec!["queue_mode".into(), "bio".into()],
            min_io: 1,
        };
        let mut settings = MultipathSettings { grouping, ..MultipathSettings::every(5) };
        let paths = ["/a b".to_owned()];
        let group = "historical-service-time 1 900 1 1 /a\\ b 1";
        assert_eq!(
            build_multipath_table(&settings, 8, &paths).unwrap(),
            format!("0 8 multipath 2 queue_mode bio 0 1 1 {group}")
        );
        for rule in [NoPathRetry::Queue, NoPathRetry::Checks(3)] {
            settings.no_path_retry = Some(rule);
            let features = "3 queue_if_no_path queue_mode bio";
            assert_eq!(
                build_multipath_table(&settings, 8, &paths).unwrap(),
                format!("0 8 multipath {features} 0 1 1 {group}")
            );
        }
    }
}
