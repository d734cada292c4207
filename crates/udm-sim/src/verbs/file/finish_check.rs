//! Check of the report of a reconfigure: the changes made, and a reason for each change not made.

use super::{AppliedDevice, DeclaredDevice, ReconfigureAction, RunningReconfigure, has_cycle};
use crate::model::Violation;
use crate::path::NO_LANE;
use crate::verbs::backends::NOT_NOW;
use crate::verbs::model::RegistryModel;
use crate::verbs::verb_jobs::{ControlVerbJob, RefusalReasonCounts, VerbOutcome};
use std::collections::BTreeSet;
use udm_core::DeviceId;
use udm_core::errno::{self, EBUSY, EINTR, EINVAL, ENOENT, ENXIO};

impl RegistryModel {
    /// Checks the result of the reconfigure `job`. Returns true if a step may have been cancelled.
    pub(in crate::verbs) fn reconfigured(
        &mut self,
        job: &ControlVerbJob,
        outcome: &VerbOutcome,
        trouble: RefusalReasonCounts,
    ) -> Result<bool, Violation> {
        let Some(under) = self.config.under.take_if(|under| under.job == job.id) else {
            return Err(format!("a reconfigure ended before it read the file: {outcome:?}"));
        };
        let reply = match outcome {
            Err(e) if under.refused && e.error.errno == EINVAL => return Ok(false),
            Ok(reply) if !under.refused => reply,
            _ => return Err(format!("{outcome:?} of a reconfigure, refused: {}", under.refused)),
        };
        let wrong = |what: &str| Err(format!("a reconfigure said {reply:?}: {what}; {:?}", under.plan));
        if reply[0] != under.unchanged.to_string() {
            return wrong("the number of unchanged devices is wrong");
        }
        let parts = |line: &String| {
            let mut parts = line.splitn(3, '\t').map(String::from);
            Some((ReconfigureAction::of(&parts.next()?)?, parts.next()?, parts.next()?))
        };
        let Some(changes) = reply[1..].iter().map(parts).collect::<Option<Vec<_>>>() else {
            return wrong("unknown change");
        };
        let mut made: Vec<_> = changes.iter().map(|(what, name, _)| (name.clone(), *what)).collect();
        let mut plan = under.plan.clone();
        made.sort();
        plan.sort();
        if made != plan || !under.is_in_order(&changes) {
            return wrong("these are not the expected changes, or they are not in order");
        }
        let there = |id: &DeviceId| self.view.get(*id).is_some();
        if under.resting.iter().any(there) {
            return wrong("it left a device suspended");
        }
        if under.loaded.keys().any(there) {
            return wrong("a table of its own is left in an inactive slot");
        }
        let mut claimed = BTreeSet::new();
        for (what, name, error) in &changes {
            let place = self.config.applied.iter().position(|one| one.wanted.name == *name);
            let id = place.map(|place| self.config.applied[place].id);
            let wanted = under.wish.iter().find(|wanted| wanted.name == *name);
            // A renamed device may have been taken over by either name. The report decides.
            let may_be =
                |names: &[String]| names.contains(name) && (error.is_empty() || names == [name.as_str()]);
            let taken_over = || {
                let all = under.swapped.iter().filter(|(id, names)| !claimed.contains(*id) && may_be(names));
                all.min_by_key(|(_, names)| names.len()).map(|(id, _)| *id)
            };
            let done = match what {
                ReconfigureAction::Create => under.created.get(name).copied().or_else(taken_over),
                ReconfigureAction::Reload => id.filter(|id| under.swapped.contains_key(id)),
                ReconfigureAction::Remove if error.is_empty() => id.filter(|id| self.view.get(*id).is_none()),
                ReconfigureAction::Remove => id.filter(|id| under.removed.contains(id)),
                ReconfigureAction::Uuid | ReconfigureAction::ReadOnly => None,
            };
            let refused = matches!(what, ReconfigureAction::Uuid | ReconfigureAction::ReadOnly);
            if under.dry || refused {
                if error.is_empty() == refused {
                    return wrong("the report does not match the result");
                }
                continue;
            }
            let by_others = done.is_some_and(|id| under.by_others.contains(&id));
            let done = done.filter(|_| !by_others || error.is_empty());
            if done.is_some() != error.is_empty() {
                return wrong(&format!("{name}: the change was not made"));
            }
            let Some(done) = done else {
                if !self.is_cause(&under, job, (*what, name, id, wanted), error, trouble) {
                    return wrong(&format!("{name}: there is no reason for this error"));
                }
                continue;
            };
            claimed.insert(done);
            match (place, wanted) {
                (Some(place), Some(wanted)) => self.config.applied[place].wanted = wanted.clone(),
                (Some(place), None) => drop(self.config.applied.remove(place)),
                (None, Some(wanted)) => {
                    self.config.applied.push(AppliedDevice { wanted: wanted.clone(), id: done });
                }
                (None, None) => {}
            }
        }
        Ok(job.hung_up || !under.leaving.is_empty())
    }

    /// True if there is a reason for `error`.
    fn is_cause(
        &self,
        under: &RunningReconfigure,
        job: &ControlVerbJob,
        (what, name, id, wanted): (ReconfigureAction, &str, Option<DeviceId>, Option<&DeclaredDevice>),
        error: &str,
        trouble: RefusalReasonCounts,
    ) -> bool {
        let known = [EINTR, EBUSY, ENXIO, ENOENT, EINVAL, NOT_NOW, NO_LANE];
        let Some(errno) = known.into_iter().find(|errno| error.ends_with(&errno::describe_errno(*errno)))
        else {
            return false;
        };
        let is = |set: &BTreeSet<DeviceId>| id.is_some_and(|id| set.contains(&id));
        let text = wanted.map_or("", |wanted| wanted.table.as_str());
        let uuid = wanted.and_then(|wanted| wanted.uuid.as_ref());
        let taken = what == ReconfigureAction::Create
            && (under.taken.contains(name) || uuid.is_some_and(|uuid| under.taken.contains(uuid)));
        let gone = id.is_some_and(|id| self.view.get(id).is_none());
        let slots = id.and_then(|id| self.view.get(id)).map(|seen| [seen.live, seen.inactive]);
        let stacked = slots.iter().flatten().flatten().any(|t| !self.tables.all[*t].uses.is_empty());
        let stacks = stacked || text.contains('@') || text.contains("254:");
        match errno {
            EINTR => job.hung_up || taken || is(&under.leaving),
            EBUSY if what == ReconfigureAction::Remove => stacks || is(&under.open) || is(&under.leaving),
            EBUSY => stacks || taken || is(&under.occupied),
            ENXIO => gone || taken || ["253:", "254:"].iter().any(|word| text.contains(word)),
            ENOENT => text.contains('@'),
            EINVAL => stacks || taken || id.is_some_and(|id| self.is_of_another_kind(id, text)),
            NOT_NOW => trouble.failed > under.trouble.failed,
            _ => trouble.refused > under.trouble.refused,
        }
    }
}

impl RunningReconfigure {
    /// Checks the order of changes: a lower device is created before, and removed after, the
    /// devices that use it.
    fn is_in_order(&self, changes: &[(ReconfigureAction, String, String)]) -> bool {
        let comes =
            |what: ReconfigureAction| matches!(what, ReconfigureAction::Create | ReconfigureAction::Reload);
        let wanted = |name: &str| self.wish.iter().find(|wanted| wanted.name == name);
        // After renames, the previous declarations may have a cycle by their names, and then have
        // no order.
        let had: Vec<DeclaredDevice> = self.was.iter().map(|one| one.wanted.clone()).collect();
        let ordered = !has_cycle(&had);
        let was = |name: &str| self.was.iter().map(|one| &one.wanted).find(|wanted| wanted.name == name);
        changes.iter().enumerate().all(|(i, (what, name, _))| {
            changes[i + 1..].iter().all(|(later, other, _)| {
                let early = comes(*what) && comes(*later) && wanted(name).is_some_and(|w| w.uses(other));
                let gone = (*what, *later) == (ReconfigureAction::Remove, ReconfigureAction::Remove);
                !(early || gone && ordered && was(other).is_some_and(|w| w.uses(name)))
            })
        })
    }
}
