//! When a host may repeat the unanswered writes of a lost association through another one.

use super::association::{AssociationStep, FenceStep, IoCommand};
use super::world::NvmeTargetWorld;
use crate::environment::lock_mutex;
use crate::model::Violation;
use crate::plan::DisturbanceClass;
use udm_core::Nanos;
use udm_wire::nvme::host::WriteFence;

/// The rule by which a host repeats writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryPolicy {
    /// After a Cross-Controller Reset; if it is refused, as [`RetryPolicy::Wait`].
    Reset,
    /// As [`RetryPolicy::Reset`], but the host takes a reset in progress for a complete one. This
    /// is how a target looks that answers before the requests have left the disk.
    EarlyReset,
    /// After two keep-alive timeouts and the quiesce time.
    Wait,
    /// At once, as Linux until TP8028. Writes may land late.
    AtOnce,
}

impl NvmeTargetWorld {
    /// The association is lost: its unanswered writes may land until it is fenced.
    pub(super) fn lose(&mut self, number: usize, why: &str) {
        self.say(format!("association {number} is lost: {why}"));
        let one = &mut self.associations[number];
        let host = one.host;
        one.step = AssociationStep::Lost;
        for sent in std::mem::take(&mut one.io_commands).into_values() {
            match sent {
                IoCommand::Connect => {}
                IoCommand::Write { block, .. } => self.hosts[host].blocks[block].lose(number, true),
                IoCommand::Read { block, .. } => self.hosts[host].blocks[block].lose(number, false),
            }
        }
        one.admin_commands.clear();
        match self.hosts[host].policy {
            RetryPolicy::Reset | RetryPolicy::EarlyReset => {
                self.associations[number].fence = FenceStep::Needed;
            }
            RetryPolicy::Wait => self.wait_for_fence(number),
            RetryPolicy::AtOnce => self.associations[number].fence = FenceStep::Until(self.now),
        }
    }

    pub(super) fn wait_for_fence(&mut self, number: usize) {
        let keep_alive = self.hosts[self.associations[number].host].keep_alive;
        let one = &mut self.associations[number];
        // A host that has not read the quiesce time yet has sent no write either.
        let fence = WriteFence { kato: keep_alive, is_traffic_based: false, quiesce: one.quiesce };
        one.fence = FenceStep::Until(fence.ends_at(self.now, self.now));
    }

    /// The host may repeat the writes of a lost association. `is_promised` if the target has said
    /// so, or its times have passed.
    pub(super) fn fenced(&mut self, number: usize, is_promised: bool) {
        self.say(format!("association {number} is fenced"));
        if is_promised {
            lock_mutex(&self.disk).fenced.insert(number);
        }
        let host = self.associations[number].host;
        self.hosts[host].blocks.iter_mut().for_each(|block| block.fenced(number));
        let is_late = !self.plan.without.has(DisturbanceClass::Late) && self.control.one_in(2);
        if is_promised && is_late && self.associations[number].is_silent {
            self.deliver_late(number);
        } else {
            self.close(number);
        }
    }

    /// The network delivers what a silent host had sent, and then the end of its connections.
    fn deliver_late(&mut self, number: usize) {
        let one = &mut self.associations[number];
        one.step = AssociationStep::Over;
        let mut net = self.net.borrow_mut();
        for queue in [Some(&mut one.admin), one.io.as_mut()].into_iter().flatten() {
            self.counts.late += u64::from(queue.flush_all(&mut net));
            net.leave(queue.link, false, false);
        }
    }

    /// Closes the connections of an association for good.
    pub(super) fn close(&mut self, number: usize) {
        let one = &mut self.associations[number];
        one.step = AssociationStep::Over;
        for queue in one.queues() {
            self.net.borrow_mut().leave(queue.link, false, true);
        }
    }

    /// Time at which the next lost association is fenced by a time.
    pub(super) fn next_fence(&self) -> Nanos {
        let lost = self.associations.iter().filter(|one| one.step == AssociationStep::Lost);
        let until = lost.filter_map(|one| match one.fence {
            FenceStep::Until(at) => Some(at),
            _ => None,
        });
        until.min().unwrap_or(Nanos::NEVER)
    }

    /// Checks that the keep-alive timer has ended a silent association whose time is over.
    fn check_silent_host(&self, number: usize) -> Result<(), Violation> {
        let (one, net) = (&self.associations[number], self.net.borrow());
        let is_open = |link: usize| !(net.links[link].is_gone() || net.links[link].half_shut);
        match one.is_silent && one.queues().any(|queue| is_open(queue.link)) {
            true => Err(format!("association {number} is silent for its whole fence, and is not dropped")),
            false => Ok(()),
        }
    }

    /// Continues the fences of lost associations.
    pub(super) fn advance_fences(&mut self) -> Result<(), Violation> {
        for number in 0..self.associations.len() {
            let one = &self.associations[number];
            if one.step != AssociationStep::Lost {
                continue;
            }
            let host = one.host;
            match one.fence {
                FenceStep::Until(at) if at <= self.now => {
                    let is_promised = self.hosts[host].policy != RetryPolicy::AtOnce;
                    if is_promised {
                        self.check_silent_host(number)?;
                    }
                    self.counts.waits += u64::from(is_promised);
                    self.fenced(number, is_promised);
                }
                FenceStep::Until(_) => {}
                // The association that was asked is lost too.
                FenceStep::ResetBy(by) if !self.associations[by].is_active() => {
                    self.associations[number].fence = FenceStep::Needed;
                }
                FenceStep::ResetBy(_) => {}
                FenceStep::Needed => {
                    let Some(instance) = one.instance else {
                        // Nothing was sent over it yet.
                        self.fenced(number, false);
                        continue;
                    };
                    let can = |by: &usize| {
                        let other = &self.associations[*by];
                        let is_ready = other.step == AssociationStep::Ready && !other.is_silent;
                        *by != number && other.host == host && is_ready && !other.awaits_reset(number)
                    };
                    if let Some(by) = (0..self.associations.len()).find(can) {
                        self.associations[number].fence = FenceStep::ResetBy(by);
                        self.associations[by].ask_reset(number, instance);
                    }
                }
            }
        }
        Ok(())
    }
}
