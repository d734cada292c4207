//! The difference of two files, as ordered steps. Pure.

use crate::error::VerbError;
use crate::throttle_settings::ThrottleSettings;
use crate::verbs;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use udm_wire::table::TableLine;
use udm_wire::uri::{self, DeviceUri};

/// A device that a file declares.
#[derive(Clone, Debug)]
pub struct DesiredDevice {
    /// Name of the device.
    pub name: String,
    /// The text of its table.
    pub table: String,
    /// Its UUID.
    pub uuid: Option<String>,
    /// If true, clients may not write.
    pub read_only: bool,
    /// The NBD clients that may use it, by names in their certificates, or by `user:NUMBER`; `None`
    /// for all clients.
    pub allow: Option<Arc<[String]>>,
    /// What NBD clients can show about it; empty for nothing.
    pub description: String,
    /// Its limits of requests and bytes per second.
    pub throttle: Option<ThrottleSettings>,
    lines: Vec<TableLine>,
}

impl DesiredDevice {
    /// Parses the table and checks its target types. The devices in the table are not looked up.
    ///
    /// # Errors
    /// The error of the table, with its position.
    pub fn new(
        name: &str,
        table: String,
        uuid: Option<String>,
        read_only: bool,
    ) -> Result<DesiredDevice, VerbError> {
        let lines = verbs::parse_table_or_device_word(name, &table)?;
        Ok(DesiredDevice {
            name: name.to_owned(),
            table,
            uuid,
            read_only,
            allow: None,
            description: String::new(),
            throttle: None,
            lines,
        })
    }

    /// Sets [`DesiredDevice::allow`].
    #[must_use]
    pub fn with_allow(self, allow: Option<Arc<[String]>>) -> DesiredDevice {
        DesiredDevice { allow, ..self }
    }

    /// Sets [`DesiredDevice::description`].
    #[must_use]
    pub fn with_description(self, description: String) -> DesiredDevice {
        DesiredDevice { description, ..self }
    }

    /// Sets [`DesiredDevice::throttle`].
    #[must_use]
    pub fn with_throttle(self, throttle: Option<ThrottleSettings>) -> DesiredDevice {
        DesiredDevice { throttle, ..self }
    }

    /// The lines of its table.
    pub(crate) fn lines(&self) -> &[TableLine] {
        &self.lines
    }

    /// True if both tables have the same words; spacing and comments do not count.
    pub(super) fn has_same_table(&self, other: &DesiredDevice) -> bool {
        let line_count = |wanted: &DesiredDevice| wanted.lines.len();
        let same = |(a, b): (&TableLine, &TableLine)| {
            (a.start, a.len, &a.kind, &a.args) == (b.start, b.len, &b.kind, &b.args)
        };
        line_count(self) == line_count(other) && self.lines.iter().zip(&other.lines).all(same)
    }

    /// Rank among devices that are ready: snapshots come before their origin, and origins before
    /// merges, so that no merge continues before all snapshots of its origin are attached.
    fn rank(&self) -> u8 {
        let has = |kind: &str| self.lines.iter().any(|line| line.kind == kind);
        match () {
            () if has("snapshot-merge") => 3,
            () if has("snapshot-origin") => 2,
            () if has("snapshot") => 1,
            () => 0,
        }
    }

    /// True if it can be created in any order: its table uses no other device, and it is no
    /// snapshot or origin.
    pub(crate) fn stands_alone(&self) -> bool {
        self.rank() == 0 && self.below().next().is_none()
    }

    /// The names of the devices that its table uses.
    fn below(&self) -> impl Iterator<Item = String> + '_ {
        let words = self.lines.iter().flat_map(|line| &line.args).filter(|word| word.starts_with('@'));
        words.filter_map(|word| match uri::parse_device_uri(word) {
            Ok(DeviceUri::Mapped(name)) => Some(name),
            _ => None,
        })
    }
}

/// One step of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanStep {
    /// Removes the device at this index of the old file.
    Remove(usize),
    /// Creates the device at this index of the new file.
    Create(usize),
    /// Replaces the table of the device at the first index, of the old file, by that of the second
    /// index, of the new file.
    Reload(usize, usize),
    /// Sets which clients may use the device at the first index, as at the second index.
    Allow(usize, usize),
    /// Sets the description of the device at the first index, as at the second index.
    Describe(usize, usize),
    /// Sets the limits of requests and bytes per second of the device at the first index, as at the
    /// second index.
    Throttle(usize, usize),
}

/// The difference of two files.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ConfigPlan {
    /// Steps to run in order. Users of a device are removed before it and created after it.
    pub steps: Vec<PlanStep>,
    /// Refused changes: index in the new file, changed key, and reason.
    pub refused: Vec<(usize, &'static str, &'static str)>,
    /// Unchanged devices: index in the old file and in the new one.
    pub unchanged: Vec<(usize, usize)>,
}

/// The plan from the old devices `was` to the new devices `is`.
///
/// # Errors
/// If a device of `is` uses itself or is declared twice.
pub fn plan_config_changes(was: &[&DesiredDevice], is: &[DesiredDevice]) -> Result<ConfigPlan, String> {
    let all: Vec<&DesiredDevice> = is.iter().collect();
    let mut names = HashSet::new();
    if let Some(twice) = all.iter().find(|wanted| !names.insert(wanted.name.as_str())) {
        return Err(format!("{}: it is declared twice", twice.name));
    }
    let (order, circle) = dependency_order(&all);
    if let Some(circle) = circle {
        return Err(circle);
    }
    let before: HashMap<&str, usize> = was.iter().enumerate().map(|(i, w)| (w.name.as_str(), i)).collect();
    let mut plan = ConfigPlan::default();
    let mut changes = Vec::new();
    for place in order {
        let wanted = &is[place];
        let Some(&old) = before.get(wanted.name.as_str()) else {
            changes.push(PlanStep::Create(place));
            continue;
        };
        let had = was[old];
        // Before all else, which may be refused or fail: a name that was removed is out.
        let is_for_others = had.allow != wanted.allow;
        if is_for_others {
            changes.push(PlanStep::Allow(old, place));
        }
        let has_other_description = had.description != wanted.description;
        if has_other_description {
            changes.push(PlanStep::Describe(old, place));
        }
        let has_other_limits = had.throttle != wanted.throttle;
        if has_other_limits {
            changes.push(PlanStep::Throttle(old, place));
        }
        if had.uuid != wanted.uuid {
            let why = "a device keeps its uuid: remove it first";
            plan.refused.push((place, "uuid", why));
        } else if had.read_only != wanted.read_only {
            let why = "clients keep what they were told: remove it first";
            plan.refused.push((place, "readonly", why));
        } else if !had.has_same_table(wanted) {
            changes.push(PlanStep::Reload(old, place));
        } else if !is_for_others && !has_other_description && !has_other_limits {
            plan.unchanged.push((old, place));
        }
    }
    let (early, late) = order_removals(was, |name| !names.contains(name));
    plan.steps = early.into_iter().map(PlanStep::Remove).collect();
    plan.steps.extend(changes);
    plan.steps.extend(late.into_iter().map(PlanStep::Remove));
    Ok(plan)
}

/// Indexes of `devices` in the order in which to create them: used devices before their users, and
/// snapshots before their origin.
pub(crate) fn creation_order(devices: &[DesiredDevice]) -> Vec<usize> {
    dependency_order(&devices.iter().collect::<Vec<_>>()).0
}

/// Orders removals: users come before what they use. Early removals have no users that stay, so
/// their disks are free for new devices. Late removals wait until their users have changed.
fn order_removals(was: &[&DesiredDevice], gone: impl Fn(&str) -> bool) -> (Vec<usize>, Vec<usize>) {
    let (mut early, mut late) = (Vec::new(), Vec::new());
    // Devices that are used by one that stays, or by one that is removed late.
    let mut waits = HashSet::new();
    for &place in dependency_order(was).0.iter().rev() {
        let wanted = was[place];
        let goes = gone(&wanted.name);
        let is_early = goes && !waits.contains(&wanted.name);
        if !is_early {
            waits.extend(wanted.below());
        }
        match (goes, is_early) {
            (true, true) => early.push(place),
            (true, false) => late.push(place),
            _ => {}
        }
    }
    (early, late)
}

/// Indexes in dependency order: used devices before their users, otherwise in the given order.
/// Devices in a cycle and their users come last; the text describes a cycle.
fn dependency_order(all: &[&DesiredDevice]) -> (Vec<usize>, Option<String>) {
    let places: HashMap<&str, usize> = all.iter().enumerate().map(|(i, w)| (w.name.as_str(), i)).collect();
    let below = |place: usize| {
        let mut below: Vec<usize> =
            all[place].below().filter_map(|n| places.get(n.as_str()).copied()).collect();
        below.sort_unstable();
        below.dedup();
        below
    };
    let (mut waits, mut users) = (vec![0_usize; all.len()], vec![Vec::new(); all.len()]);
    for (place, waits) in waits.iter_mut().enumerate() {
        let below = below(place);
        *waits = below.len();
        below.into_iter().for_each(|used| users[used].push(place));
    }
    let ranked = |place: usize| (all[place].rank(), place);
    let mut ready: BTreeSet<(u8, usize)> = (0..all.len()).filter(|&i| waits[i] == 0).map(ranked).collect();
    let mut order = Vec::with_capacity(all.len());
    while let Some((_, place)) = ready.pop_first() {
        order.push(place);
        for &user in &users[place] {
            waits[user] -= 1;
            if waits[user] == 0 {
                ready.insert(ranked(user));
            }
        }
    }
    let left = |place: &usize| waits[*place] > 0;
    let Some(first) = (0..all.len()).find(left) else { return (order, None) };
    // Each remaining device uses another remaining one, so following them finds a cycle.
    let mut way = vec![first];
    let begin = loop {
        let last = way[way.len() - 1];
        let next = below(last).into_iter().find(left).unwrap_or(last);
        match way.iter().position(|&place| place == next) {
            Some(begin) => break begin,
            None => way.push(next),
        }
    };
    let circle = &way[begin..];
    let uses: Vec<String> = (0..circle.len())
        .map(|i| format!("{} uses {}", all[circle[i]].name, all[circle[(i + 1) % circle.len()]].name))
        .collect();
    let why = format!("{}: it depends on itself: {}", all[circle[0]].name, uses.join(", "));
    order.extend((0..all.len()).filter(left));
    (order, Some(why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// `NAME[=BELOW,...][!][/UUID]`: `!` has another table.
    fn wanted(text: &str) -> Vec<DesiredDevice> {
        let one = |text: &str| {
            let (text, uuid) = text.split_once('/').map_or((text, None), |(t, u)| (t, Some(u.to_owned())));
            let (text, size) = text.strip_suffix('!').map_or((text, 8), |text| (text, 16));
            let (name, below) = text.split_once('=').unwrap_or((text, ""));
            let mut table = String::new();
            for (i, used) in below.split(',').filter(|used| !used.is_empty()).enumerate() {
                table += &format!("{} 8 linear @{used} {size}\n", i * 8);
            }
            if table.is_empty() {
                table = format!("0 {size} error\n");
            }
            DesiredDevice::new(name, table, uuid, false).unwrap()
        };
        text.split_whitespace().map(one).collect()
    }

    fn steps(was: &str, is: &str) -> String {
        let (was, is) = (wanted(was), wanted(is));
        let plan = plan_config_changes(&was.iter().collect::<Vec<_>>(), &is).unwrap();
        let steps = plan.steps.iter().map(|step| match step {
            PlanStep::Remove(i) => format!("-{}", was[*i].name),
            PlanStep::Create(i) => format!("+{}", is[*i].name),
            PlanStep::Reload(_, i) => format!("~{}", is[*i].name),
            PlanStep::Allow(_, i) => format!("@{}", is[*i].name),
            PlanStep::Describe(_, i) => format!("\"{}", is[*i].name),
            PlanStep::Throttle(_, i) => format!("%{}", is[*i].name),
        });
        let refused = plan.refused.iter().map(|(i, key, _)| format!("!{} {key}", is[*i].name));
        steps.chain(refused).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn who_is_used_comes_first_and_goes_last() {
        assert_eq!(steps("", "top=mid mid=a,b a b"), "+a +b +mid +top");
        assert_eq!(steps("top=mid mid=a,b a b", ""), "-top -mid -b -a");
        assert_eq!(steps("a b", "b a"), "");
        assert_eq!(steps("a b", "a! b"), "~a");
        assert_eq!(steps("a", "a/u"), "!a uuid");
        // A removed device frees its disk for a new one, unless a device that stays uses it.
        assert_eq!(steps("a", "b"), "-a +b");
        assert_eq!(steps("u=a a", "u=b b"), "+b ~u -a");
        assert_eq!(steps("u=m m=a a", "u=b b"), "+b ~u -m -a");
        // A device that is used but not declared in the file.
        assert_eq!(steps("", "a=other"), "+a");
    }

    #[test]
    fn another_description_is_a_change_of_its_own() {
        let one = |table: &str, description: &str| {
            let wanted = DesiredDevice::new("a", table.into(), None, false).unwrap();
            wanted.with_description(description.into())
        };
        let steps =
            |was: &DesiredDevice, is: DesiredDevice| plan_config_changes(&[was], &[is]).unwrap().steps;
        let was = one("0 8 zero", "a disk");
        assert_eq!(steps(&was, one("0 8 zero", "a disk")), []);
        assert_eq!(steps(&was, one("0 8 zero", "")), [PlanStep::Describe(0, 0)]);
        assert_eq!(
            steps(&was, one("0 8 error", "my disk")),
            [PlanStep::Describe(0, 0), PlanStep::Reload(0, 0)]
        );
    }

    /// Other clients alone change no table, and come before another one. They are not refused with
    /// another change.
    #[test]
    fn other_clients_are_a_change_of_their_own() {
        let one = |table: &str, allow: Option<&[&str]>| {
            let allow = allow.map(|names| names.iter().map(|&name| name.to_owned()).collect());
            DesiredDevice::new("a", table.into(), None, false).unwrap().with_allow(allow)
        };
        let steps =
            |was: &DesiredDevice, is: DesiredDevice| plan_config_changes(&[was], &[is]).unwrap().steps;
        let was = one("0 8 zero", Some(&["alice"]));
        assert_eq!(steps(&was, one("0 8 zero", Some(&["alice"]))), []);
        assert_eq!(steps(&was, one("0 8 zero", Some(&["bob"]))), [PlanStep::Allow(0, 0)]);
        assert_eq!(steps(&was, one("0 8 zero", None)), [PlanStep::Allow(0, 0)]);
        assert_eq!(steps(&was, one("0 8 error", None)), [PlanStep::Allow(0, 0), PlanStep::Reload(0, 0)]);
        let mut is = one("0 8 zero", Some(&["bob"]));
        is.read_only = true;
        let plan = plan_config_changes(&[&was], &[is]).unwrap();
        assert_eq!((plan.steps, plan.refused.len()), (vec![PlanStep::Allow(0, 0)], 1));
    }

    #[test]
    fn snapshots_come_before_what_copies_for_them() {
        let one = |name: &str, table: &str| DesiredDevice::new(name, table.into(), None, false).unwrap();
        let all = [
            one("merge", "0 8 snapshot-merge d a.cow P 8"),
            one("origin", "0 8 snapshot-origin d"),
            one("s", "0 8 snapshot d @store P 8"),
            one("store", "0 8 linear b 0"),
        ];
        let plan = plan_config_changes(&[], &all).unwrap();
        let names = plan.steps.iter().map(|step| match step {
            PlanStep::Create(place) => all[*place].name.as_str(),
            _ => "",
        });
        assert_eq!(names.collect::<Vec<_>>(), ["store", "s", "origin", "merge"]);
    }

    #[test]
    fn a_circle_is_said() {
        let error = |text| plan_config_changes(&[], &wanted(text)).unwrap_err();
        assert_eq!(error("x a=b b=c,x c=a"), "a: it depends on itself: a uses b, b uses c, c uses a");
        assert_eq!(error("t=a a=a"), "a: it depends on itself: a uses a");
        assert_eq!(error("a a"), "a: it is declared twice");
    }

    #[test]
    fn a_table_is_its_words() {
        let of = |table: &str| DesiredDevice::new("a", table.into(), None, false).unwrap();
        assert!(of("0 8 error\n").has_same_table(&of("# none\n0  8\terror  # here\n\n")));
        assert!(!of("0 8 error\n").has_same_table(&of("0 8 zero\n")));
        assert!(!of("0 8 error\n").has_same_table(&of("0 8 error\n8 8 error\n")));
        let unknown = DesiredDevice::new("a", "0 8 error\n8 8 lineal x 0\n".into(), None, false).unwrap_err();
        assert_eq!(unknown.position.map(|p| (p.line, p.column)), Some((2, 5)));
    }

    /// Devices of `0..8`, each over some with lower numbers, so that there is no cycle; in any
    /// order.
    fn files() -> impl Strategy<Value = Vec<DesiredDevice>> {
        let device = (any::<bool>(), any::<u8>(), any::<bool>());
        (proptest::collection::vec(device, 8), any::<bool>()).prop_map(|(devices, reversed)| {
            let there: Vec<bool> = devices.iter().map(|(there, ..)| *there).collect();
            let text = |(i, (_, below, other)): (usize, (bool, u8, bool))| {
                let used = |b: &usize| there[*b] && below >> b & 1 == 1;
                let below: Vec<String> = (0..i).filter(used).map(|b| b.to_string()).collect();
                there[i].then(|| format!("{i}={}{}", below.join(","), if other { "!" } else { "" }))
            };
            let mut texts: Vec<String> = devices.into_iter().enumerate().filter_map(text).collect();
            if reversed {
                texts.reverse();
            }
            wanted(&texts.join(" "))
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Runs the steps in order. No step creates or changes a device over a missing one of the
        /// file, or removes one in use. At the end all declared devices exist.
        #[test]
        fn each_step_can_be_taken(was in files(), is in files()) {
            let plan = plan_config_changes(&was.iter().collect::<Vec<_>>(), &is).unwrap();
            let mut there: HashMap<String, DesiredDevice> = was.iter().map(|w| (w.name.clone(), w.clone())).collect();
            for step in &plan.steps {
                match *step {
                    PlanStep::Remove(i) => {
                        let name = &was[i].name;
                        prop_assert!(there.remove(name).is_some());
                        let users = there.values().filter(|user| user.below().any(|used| used == *name));
                        prop_assert_eq!(users.count(), 0, "{} is used", name);
                    }
                    PlanStep::Create(i) | PlanStep::Reload(_, i) => {
                        let wanted = &is[i];
                        prop_assert_eq!(there.contains_key(&wanted.name), matches!(step, PlanStep::Reload(..)));
                        for used in wanted.below().filter(|used| is.iter().any(|w| w.name == *used)) {
                            prop_assert!(there.contains_key(&used), "{} is missing", used);
                        }
                        there.insert(wanted.name.clone(), wanted.clone());
                    }
                    PlanStep::Allow(..) | PlanStep::Describe(..) | PlanStep::Throttle(..) => {
                        prop_assert!(false, "the files have no clients, descriptions or limits");
                    }
                }
            }
            prop_assert_eq!(there.len(), is.len());
            prop_assert!(is.iter().all(|wanted| wanted.has_same_table(&there[&wanted.name])));
        }
    }
}
