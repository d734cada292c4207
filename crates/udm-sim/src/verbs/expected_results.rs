//! The permitted results of verbs.

use super::backends::{NAMES as DISKS, NOT_NOW, canonicalize_device_name};
use super::model::RegistryModel;
use super::multipath;
use super::observation::ListedDevice;
use super::verb_jobs::{ControlVerb, ControlVerbJob, RefusalReasonCounts, VerbOutcome, VerbProgress};
use crate::model::Violation;
use crate::path::NO_LANE;
use udm_control::registry::OPENED_MAJOR;
use udm_core::errno::{EBUSY, EINTR, EINVAL, ENOENT, ENXIO};
use udm_core::{DevNo, DeviceId};

/// A message that multipath targets accept.
pub(super) const FAIL_PATH: &str = "fail_path";

/// The message that cancels `remove --deferred`.
pub(super) const KEEP: &str = "@cancel_deferred_remove";

impl RegistryModel {
    /// Records that `job` begins while `others` are in progress. Returns its progress, and whether
    /// another verb is about to change one of its devices.
    pub(super) fn begin(
        &mut self,
        job: &ControlVerbJob,
        others: &mut [ControlVerbJob],
        trouble: RefusalReasonCounts,
    ) -> (VerbProgress, bool) {
        let mut began = VerbProgress {
            targets: Vec::new(),
            minor: None,
            look: self.looks,
            must: None,
            may: Vec::new(),
            trouble,
            waited: Vec::new(),
            kept: false,
            reached: Vec::new(),
            swapped: false,
            loaded: false,
        };
        if let Some((name, uuid)) = job.verb.makes() {
            let words = || [Some(name), uuid.as_ref()].into_iter().flatten();
            let same = |word: &String, name: &String, uuid: &Option<String>| {
                word == name || Some(word) == uuid.as_ref()
            };
            let taken = words().any(|word| {
                self.view.0.iter().any(|seen| same(word, &seen.name, &seen.uuid))
                    || self.hidden.iter().any(|hidden| same(word, &hidden.name, &hidden.uuid))
            });
            if taken {
                began.must = Some(EBUSY);
            } else {
                let minor = self.free();
                began.minor = Some(minor);
                began.must = multipath::expected_multipath_verb_errno(&job.verb);
                self.making(name, uuid.as_ref(), minor);
            }
            return (began, false);
        }
        if let ControlVerb::Reconfigure { dry_run: true } = job.verb {
            self.config.dry.insert(job.id);
        }
        if let ControlVerb::Rename { to, uuid, .. } = &job.verb {
            let has = |name: &str, id: Option<&String>| if *uuid { id == Some(to) } else { name == to };
            let taken = self.view.0.iter().any(|seen| has(&seen.name, seen.uuid.as_ref()))
                || self.hidden.iter().any(|hidden| has(&hidden.name, hidden.uuid.as_ref()));
            if taken {
                began.must = Some(EBUSY);
                return (began, false);
            }
        }
        for word in job.verb.words() {
            match self.view.meant(word) {
                Some(seen) => began.targets.push(seen.id),
                None => {
                    let hidden = self.hidden.iter().any(|hidden| hidden.is_called(word));
                    began.must = Some(if hidden { EBUSY } else { ENXIO });
                    began.targets.clear();
                    return (began, false);
                }
            }
        }
        if let (ControlVerb::Remove { how, .. }, Some(seen)) =
            (&job.verb, began.targets.first().and_then(|id| self.view.get(*id)))
            && seen.open > 0
            && !how.force
            && !how.deferred
        {
            began.must = Some(EBUSY);
        }
        if let (ControlVerb::Rename { uuid: true, .. }, Some(seen)) =
            (&job.verb, began.targets.first().and_then(|id| self.view.get(*id)))
            && seen.uuid.is_some()
        {
            began.must = Some(EINVAL);
        }
        began.may.extend(self.beside_file(&job.verb, &began.targets));
        began.see(&self.view);
        let mut met = false;
        for other in others {
            let Some(with) = &mut other.began else { continue };
            if !with.targets.iter().any(|id| began.targets.contains(id)) {
                continue;
            }
            met = true;
            if verb_cancels_other_verb(&job.verb, &other.verb) {
                with.may.push(EINTR);
            }
            if verb_cancels_other_verb(&other.verb, &job.verb) {
                began.may.push(EINTR);
            }
        }
        (began, met)
    }

    /// Checks the result of `job`. `trouble` counts the disturbances up to now.
    pub(super) fn end(
        &self,
        job: &ControlVerbJob,
        was: &super::observation::ListedDevices,
        outcome: &VerbOutcome,
        trouble: RefusalReasonCounts,
    ) -> Result<(), Violation> {
        let Some(began) = &job.began else { return Err(format!("{:?} ended before it began", job.verb)) };
        let wrong = |what: &str| {
            let reply = outcome.as_ref().map_or_else(ToString::to_string, |_| "done".into());
            Err(format!("{:?}: {reply}: {what}", job.verb))
        };
        let errno = outcome.as_ref().err().map(|e| e.error.errno);
        if let Some(must) = began.must {
            return match errno == Some(must) {
                true => Ok(()),
                false => wrong(&format!("it must be refused with {must}")),
            };
        }
        if let ControlVerb::Wait { event, .. } = job.verb {
            return self.waited(job, began, event, outcome).or_else(|what| wrong(&what));
        }
        let now = |id: &DeviceId| self.view.get(*id);
        let seen: Vec<Option<&ListedDevice>> = began.targets.iter().map(now).collect();
        let Some(errno) = errno else {
            return self.did(job, began, &seen, outcome, trouble).or_else(|what| wrong(&what));
        };
        if !matches!(job.verb, ControlVerb::Remove { .. }) && (began.swapped || began.loaded) {
            return wrong("refused, but the change was made");
        }
        if let ControlVerb::Suspend { .. } = job.verb
            && began.targets.iter().any(|id| self.suspended_by(*id) == Some(job.id))
        {
            return wrong("refused, but a device was left suspended");
        }
        // A table that is no longer in its slot may still become live.
        let waited = || began.waited.iter().filter_map(|(_, table)| *table);
        let there = || seen.iter().flatten().flat_map(|seen| [seen.live, seen.inactive]).flatten();
        let tables = || there().chain(waited());
        let stacked = || tables().any(|table| !self.tables.all[table].uses.is_empty());
        let logs = |text: &str| text.contains("log-writes");
        let changes = matches!(
            job.verb,
            ControlVerb::Create { .. }
                | ControlVerb::Multipath { .. }
                | ControlVerb::Suspend { .. }
                | ControlVerb::Resume { .. }
                | ControlVerb::Remove { .. }
        );
        let waits = matches!(
            job.verb,
            ControlVerb::Suspend { .. } | ControlVerb::Resume { .. } | ControlVerb::Remove { .. }
        );
        let table = job.verb.table();
        let open = |view: &super::observation::ListedDevices| {
            began.targets.iter().any(|id| view.get(*id).is_some_and(|seen| seen.open > 0))
        };
        let fine = began.may.contains(&errno)
            || match errno {
                EINTR if matches!(job.verb, ControlVerb::Multipath { .. }) => job.hung_up,
                EINTR => waits && self.may_be_called_off(job),
                ENXIO => seen.iter().any(Option::is_none),
                EBUSY if matches!(job.verb, ControlVerb::Remove { .. }) => open(was) || open(&self.view),
                EBUSY if matches!(job.verb, ControlVerb::Message { .. }) => {
                    seen.iter().flatten().any(|seen| seen.suspended)
                }
                EBUSY | EINVAL
                    if matches!(job.verb, ControlVerb::Resume { .. } | ControlVerb::Remove { .. }) =>
                {
                    stacked() || tables().any(|table| logs(&self.tables.all[table].text))
                }
                EINVAL if matches!(job.verb, ControlVerb::Message { .. }) => !self.takes(job, &seen),
                ENOENT if matches!(job.verb, ControlVerb::Message { .. }) => !self.takes(job, &seen),
                NO_LANE => changes && trouble.refused > began.trouble.refused,
                _ => false,
            }
            || table.is_some_and(|text| match errno {
                NOT_NOW => trouble.failed > began.trouble.failed,
                ENOENT => text.contains('@'),
                EBUSY => text.contains('@') || text.contains("254:") || logs(text),
                ENXIO => text.contains("253:") || text.contains("254:"),
                EINVAL if matches!(job.verb, ControlVerb::Multipath { .. }) => {
                    text.contains('@') || multipath::has_duplicate_path(text)
                }
                EINVAL => {
                    let other = began.targets.iter().any(|id| self.is_of_another_kind(*id, text));
                    other || ["nonsense", "@", "254:"].iter().any(|word| text.contains(word))
                }
                _ => false,
            });
        if fine { Ok(()) } else { wrong("there is no reason for that") }
    }

    /// True if `job` was or may have been cancelled.
    pub(super) fn may_be_called_off(&self, job: &ControlVerbJob) -> bool {
        let Some(began) = &job.began else { return false };
        let leaves = |id: &DeviceId| self.view.get(*id).is_none_or(|seen| seen.deferred);
        job.hung_up || began.kept || began.may.contains(&EINTR) || began.targets.iter().any(leaves)
    }

    /// True if the device accepts the message of `job`.
    fn takes(&self, job: &ControlVerbJob, seen: &[Option<&ListedDevice>]) -> bool {
        let ControlVerb::Message { text, .. } = &job.verb else { return false };
        if text == KEEP {
            return true;
        }
        let live = seen.iter().flatten().filter_map(|seen| seen.live).next();
        let Some(live) = live.map(|live| &self.tables.all[live]) else { return false };
        let word = text.strip_prefix(FAIL_PATH).unwrap_or_default().trim();
        let is = |number: &DevNo| self.leads(word, &number.to_string(), 0);
        live.text.contains("multipath") && live.devices().iter().any(|(number, _)| is(number))
    }

    /// True if the word `asked` of a table leads to the device of `number`, or did at any time
    /// since the inspection `since`.
    pub(super) fn leads(&self, asked: &str, number: &str, since: u64) -> bool {
        match asked.strip_prefix('@') {
            Some(name) => self.view.meant(number).is_some_and(|seen| self.names.was(seen, name, since)),
            None if DISKS.contains(&asked) => {
                let opened = number.parse().ok().filter(|number: &DevNo| number.major == OPENED_MAJOR);
                let known = opened.and_then(|number| self.numbers.get(&number.minor));
                known.is_some_and(|(uri, _)| uri == canonicalize_device_name(asked))
            }
            None => false,
        }
    }

    /// Checks the state after `job` has succeeded.
    fn did(
        &self,
        job: &ControlVerbJob,
        began: &VerbProgress,
        seen: &[Option<&ListedDevice>],
        outcome: &VerbOutcome,
        trouble: RefusalReasonCounts,
    ) -> Result<(), Violation> {
        let all = |so: &dyn Fn(&ListedDevice) -> bool| seen.iter().all(|seen| seen.is_some_and(so));
        let reply = outcome.as_ref().map(Vec::as_slice).unwrap_or_default();
        let text = |slot: Option<usize>| slot.map_or("", |table| self.tables.all[table].text.as_str());
        let fine = match &job.verb {
            ControlVerb::Create { name, table, .. } => {
                let made = self.view.meant(name).filter(|seen| Some(seen.minor) == began.minor);
                made.is_some_and(|seen| {
                    !seen.suspended
                        && seen.inactive.is_none()
                        && text_matches_requested_table(table.as_deref(), text(seen.live), began.look, self)
                })
            }
            ControlVerb::Multipath { name, paths, policy, .. } => {
                let made = self.view.meant(name).filter(|seen| Some(seen.minor) == began.minor);
                let moved = trouble.moved > began.trouble.moved;
                made.is_some_and(|seen| {
                    let asked = (paths.as_str(), policy.as_deref(), began.look);
                    !seen.suspended
                        && seen.inactive.is_none()
                        && self.is_multipath(text(seen.live), asked, moved)
                })
            }
            // Checked in `event_waits` and `file`.
            ControlVerb::Wait { .. } | ControlVerb::Reconfigure { .. } => false,
            ControlVerb::Load { table, .. } => {
                began.loaded
                    && all(&|seen| {
                        text_matches_requested_table(Some(table), text(seen.inactive), began.look, self)
                    })
            }
            ControlVerb::Clear { .. } => all(&|seen| seen.inactive.is_none()),
            ControlVerb::Suspend { .. } => all(&|seen| seen.suspended),
            ControlVerb::Resume { .. } => began.targets.iter().all(|id| began.reached.contains(id)),
            ControlVerb::Remove { how, .. } => {
                let id = began.targets[0];
                match seen[0] {
                    Some(seen) => how.deferred && (began.kept || seen.deferred && seen.open > 0),
                    None => !self.hidden.iter().any(|hidden| hidden.is(id)),
                }
            }
            ControlVerb::Message { text: word, .. } if word == KEEP => all(&|seen| !seen.deferred),
            ControlVerb::Message { .. } => self.takes(job, seen),
            ControlVerb::Rename { to, uuid: false, .. } => all(&|seen| seen.name == *to),
            ControlVerb::Rename { to, uuid: true, .. } => all(&|seen| seen.uuid.as_ref() == Some(to)),
            ControlVerb::Look { .. } => {
                let is = |reply: &str, slot| multipath::reply_matches_table(reply, text(slot));
                all(&|seen| is(&reply[1], seen.live) && is(&reply[2], seen.inactive))
            }
        };
        let texts =
            || self.view.0.iter().map(|seen| [text(seen.live), text(seen.inactive)]).collect::<Vec<_>>();
        if fine { Ok(()) } else { Err(format!("{reply:?}: wrong state: {:?}, {:?}", self.view.0, texts())) }
    }
}

/// True if `text` is the table `asked`, with numbers for the names that devices had since the
/// inspection `since`.
pub(super) fn text_matches_requested_table(
    asked: Option<&str>,
    text: &str,
    since: u64,
    model: &RegistryModel,
) -> bool {
    let (mut asked, mut text) = (asked.unwrap_or_default().split_whitespace(), text.split_whitespace());
    loop {
        match (asked.next(), text.next()) {
            (None, None) => return true,
            (Some(asked), Some(text)) if asked == text || model.leads(asked, text, since) => {}
            _ => return false,
        }
    }
}

/// True if a verb like `one` cancels verbs like `other` that wait for the same device.
fn verb_cancels_other_verb(one: &ControlVerb, other: &ControlVerb) -> bool {
    let force = |verb: &ControlVerb| matches!(verb, ControlVerb::Remove { how, .. } if how.force);
    match one {
        ControlVerb::Resume { .. } => matches!(other, ControlVerb::Suspend { .. }),
        ControlVerb::Remove { .. } => {
            matches!(other, ControlVerb::Suspend { .. } | ControlVerb::Resume { .. }) || force(other)
        }
        _ => false,
    }
}
