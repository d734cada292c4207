//! The expected table of a multipath device over given paths.

use super::backends::canonicalize_device_name;
use super::model::RegistryModel;
use super::verb_jobs::ControlVerb;
use udm_core::errno::EINVAL;

/// Names of grouping policies, and an invalid one.
pub(super) const POLICIES: [&str; 4] = ["failover", "multibus", "group_by_prio", "nonsense"];

/// Returns the error with which `verb` must end for any paths.
pub(super) fn expected_multipath_verb_errno(verb: &ControlVerb) -> Option<i32> {
    let ControlVerb::Multipath { paths, policy, .. } = verb else { return None };
    let wrong = paths.is_empty() || policy.as_deref() == Some("nonsense");
    wrong.then_some(EINVAL)
}

/// True if `paths` has one path twice, under any of its names.
pub(super) fn has_duplicate_path(paths: &str) -> bool {
    let words: Vec<&str> = paths.split_whitespace().map(canonicalize_device_name).collect();
    words.iter().enumerate().any(|(i, word)| words[..i].contains(word))
}

/// True if `reply` may be shown for the table `text`. The number of the current group may differ.
pub(super) fn reply_matches_table(reply: &str, text: &str) -> bool {
    reply == text || path_groups(reply).is_some_and(|shown| Some(shown) == path_groups(text))
}

/// Returns the paths of each group of a multipath table of one line.
fn path_groups(text: &str) -> Option<Vec<Vec<&str>>> {
    let mut words = text.split_whitespace();
    (words.next()? == "0" && words.next()?.parse::<u64>().is_ok() && words.next()? == "multipath")
        .then_some(())?;
    let some = |words: &mut std::str::SplitWhitespace<'_>| words.next()?.parse::<usize>().ok();
    for _ in ["features", "a hardware handler"] {
        let count = some(&mut words)?;
        (0..count).try_for_each(|_| words.next().map(drop))?;
    }
    let (count, _first) = (some(&mut words)?, words.next()?);
    let mut groups = Vec::new();
    for _ in 0..count {
        let _selector = words.next()?;
        let args = some(&mut words)?;
        (0..args).try_for_each(|_| words.next().map(drop))?;
        let (paths, args) = (some(&mut words)?, some(&mut words)?);
        let mut group = Vec::new();
        for _ in 0..paths {
            group.push(words.next()?);
            (0..args).try_for_each(|_| words.next().map(drop))?;
        }
        groups.push(group);
    }
    words.next().is_none().then_some(groups)
}

impl RegistryModel {
    /// True if `text` is the table of a device over `paths`, grouped by `policy`, resolved since
    /// the inspection `since`. All paths must differ, unless a name has `moved` meanwhile.
    pub(super) fn is_multipath(
        &self,
        text: &str,
        (paths, policy, since): (&str, Option<&str>, u64),
        moved: bool,
    ) -> bool {
        let Some(groups) = path_groups(text) else { return false };
        let asked: Vec<&str> = paths.split_whitespace().collect();
        let all: Vec<&str> = groups.concat();
        let one_each = all.iter().enumerate().all(|(i, path)| !all[..i].contains(path));
        // All paths have the same priority.
        let grouped = match policy {
            None | Some("failover") => groups.iter().all(|group| group.len() == 1),
            _ => groups.len() == 1,
        };
        let leads = |(asked, is): (&&str, &&str)| asked == is || self.leads(asked, is, since);
        grouped && all.len() == asked.len() && asked.iter().zip(&all).all(leads) && (one_each || moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_read() {
        let text =
            "0 64 multipath 1 queue_if_no_path 0 2 1 service-time 0 2 1 253:0 1 253:1 1 x 1 y 1 0 253:2";
        assert_eq!(path_groups(text).unwrap(), vec![vec!["253:0", "253:1"], vec!["253:2"]]);
        assert!(path_groups(&format!("{text} more")).is_none() && path_groups("0 8 zero").is_none());
        assert!(has_duplicate_path("/sim/a /sim/link") && !has_duplicate_path("/sim/a /sim/b"));
    }
}
