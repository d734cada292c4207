//! Rules for clients that wait for events of a device: each event ends the wait, and nothing else
//! does.

use super::model::RegistryModel;
use super::verb_jobs::{ControlVerb, ControlVerbJob, VerbOutcome, VerbProgress};
use crate::model::Violation;
use udm_core::errno::{EINTR, ENXIO};

impl RegistryModel {
    /// True if the device of `began` was removed.
    fn is_gone(&self, began: &VerbProgress) -> bool {
        let gone = |id| self.view.get(id).is_none() && !self.hidden.iter().any(|hidden| hidden.is(id));
        began.targets.first().is_some_and(|id| gone(*id))
    }

    /// Checks that no client waits for an event that has occurred.
    pub(super) fn check_waits(&self, jobs: &[ControlVerbJob]) -> Result<(), Violation> {
        for job in jobs.iter().filter(|job| job.waits_for_event()) {
            let (ControlVerb::Wait { word, event }, Some(began)) = (&job.verb, &job.began) else { continue };
            let seen = began.targets.first().and_then(|id| self.view.get(*id));
            if let Some(seen) = seen.filter(|seen| seen.events != *event) {
                let events = seen.events;
                return Err(format!(
                    "{word} has event {events}, but a client that waits after {event} is not woken"
                ));
            }
            if self.is_gone(began) {
                return Err(format!(
                    "{word} is removed, but a client that waits for its events is not woken"
                ));
            }
        }
        Ok(())
    }

    /// Checks the result of `job`, which waited for events after number `event`.
    pub(super) fn waited(
        &self,
        job: &ControlVerbJob,
        began: &VerbProgress,
        event: u32,
        outcome: &VerbOutcome,
    ) -> Result<(), Violation> {
        let known = |id| self.view.get(id).or_else(|| self.gone.get(&id));
        let Some(last) = began.targets.first().and_then(|id| known(*id)) else {
            return Err("the device was never listed".into());
        };
        let (is_gone, now) = (self.is_gone(began), last.events);
        let fine = match outcome {
            Ok(reply) => {
                let reply = reply.first().and_then(|reply| reply.parse().ok());
                match is_gone {
                    // The removal is an event.
                    true => last.live.is_some() && reply == Some(now + 1),
                    false => reply == Some(now) && now != event,
                }
            }
            Err(e) if e.error.errno == ENXIO => is_gone && last.live.is_none(),
            Err(e) => e.error.errno == EINTR && job.hung_up,
        };
        if fine { Ok(()) } else { Err(format!("wrong result: removed {is_gone}, {last:?}, {now} events")) }
    }
}
