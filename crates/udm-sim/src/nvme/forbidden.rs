//! What a host must not get: resets of controllers that are not its own, the queue of another host,
//! and a queue that is connected already. The target refuses each, and harms nobody.

use super::association::{AdminCommand, AssociationStep, HostAssociation};
use super::queue::{HostQueue, Received};
use super::world::NvmeTargetWorld;
use crate::model::Violation;
use udm_wire::nvme::ControllerInstance;

/// Maximum number of forbidden connects at a time.
const CONNECTS_MAX: usize = 2;

/// A Connect command that the target must refuse, on a connection of its own.
pub(super) struct ForbiddenConnect {
    queue: HostQueue,
    /// The association whose I/O queue is asked for.
    victim: usize,
    /// The queue belongs to another host. If not, it is free once its association is lost.
    is_of_other_host: bool,
}

impl ForbiddenConnect {
    pub(super) fn link(&self) -> usize {
        self.queue.link
    }
}

impl NvmeTargetWorld {
    /// An association that works, of another host than `host`.
    fn other_hosts_association(&self, host: usize) -> Option<usize> {
        let is_other = |one: &HostAssociation| one.host != host && one.step == AssociationStep::Ready;
        self.associations.iter().position(is_other)
    }

    /// Asks for a reset of a controller of another host, of this one, or of one that the target has
    /// never had.
    pub(super) fn ask_forbidden_reset(&mut self, number: usize) {
        let (host, own) = (self.associations[number].host, self.associations[number].instance);
        let other = self.other_hosts_association(host);
        let foreign = |own: ControllerInstance| ControllerInstance {
            id: self.work.pick(&[own.id.wrapping_add(1000), own.id]),
            random: own.random ^ 1 << 40,
            ..own
        };
        let (victim, impacted) = match self.control.below(3) {
            0 if other.is_some() => (other, other.and_then(|other| self.associations[other].instance)),
            1 => (None, own),
            _ => (None, own.map(foreign)),
        };
        let Some(impacted) = impacted else { return };
        self.counts.forbidden += 1;
        self.say(format!("association {number} asks for a reset of {impacted:?}, which is forbidden"));
        self.associations[number].send_reset(impacted, AdminCommand::ForbiddenReset(victim));
    }

    /// Checks the answer to a forbidden reset. A controller of another host that is gone may be
    /// reported as reset.
    pub(super) fn forbidden_reset_answer(
        &self,
        number: usize,
        victim: Option<usize>,
    ) -> Result<(), Violation> {
        let works = |victim: usize| self.associations[victim].step == AssociationStep::Ready;
        match victim.is_none_or(works) {
            true => Err(format!("association {number} has reset a controller that it must not reset")),
            false => Ok(()),
        }
    }

    /// Connects an I/O queue that is connected already, for its own host or as another one.
    pub(super) fn connect_forbidden_queue(&mut self, number: usize) {
        if self.forbidden_connects.len() >= CONNECTS_MAX {
            return;
        }
        let host = self.associations[number].host;
        let other = self.other_hosts_association(host).filter(|_| self.control.one_in(2));
        let (victim, is_of_other_host) = (other.unwrap_or(number), other.is_some());
        let queue = if is_of_other_host { self.control.between(1, 2) as u16 } else { 1 };
        let controller = self.associations[victim].controller;
        if let Some(queue) = self.connect_queue(host, queue, controller, 0) {
            self.counts.forbidden += 1;
            self.say(format!("host {host} connects a queue of association {victim}, which is forbidden"));
            self.forbidden_connects.push(ForbiddenConnect { queue, victim, is_of_other_host });
        }
    }

    /// Continues the forbidden connects, and checks their answers.
    pub(super) fn advance_forbidden_connects(&mut self) -> Result<(), Violation> {
        let (net, associations) = (&self.net, &self.associations);
        let mut wrong = None;
        self.forbidden_connects.retain_mut(|one| {
            let mut net = net.borrow_mut();
            one.queue.flush(&mut net, &mut self.work);
            let is_open = one.queue.fill(&mut net);
            let mut received = one.queue.next();
            if matches!(received, Ok(Some(Received::Initialized))) {
                received = one.queue.next();
            }
            let received = match received {
                Ok(None) if is_open => return true,
                Ok(received) => received,
                Err(why) => {
                    wrong = Some(why);
                    None
                }
            };
            if let Some(Received::Response(completion)) = received {
                let is_in_use = associations[one.victim].step == AssociationStep::Ready;
                if completion.status.is_ok() && (one.is_of_other_host || is_in_use) {
                    wrong = Some(format!("a queue of association {} is connected twice", one.victim));
                }
            }
            net.leave(one.queue.link, false, true);
            false
        });
        wrong.map_or(Ok(()), Err)
    }
}
