//! The turns of hosts: what they send and receive, and how they lose associations.

use super::association::{AdminCommand, AssociationStep, FenceStep, HostAssociation, IoCommand};
use super::disk::stamp_of;
use super::fence::RetryPolicy;
use super::queue::Received;
use super::world::NvmeTargetWorld;
use crate::environment::lock_mutex;
use crate::model::Violation;
use crate::plan::DisturbanceClass;
use std::rc::Rc;
use udm_core::Nanos;
use udm_wire::nvme::{
    Completion, CrossControllerReset, CrossControllerResetStatus, FenceCapabilities, NvmeStatus,
    decode_cross_controller_reset_log,
};

impl NvmeTargetWorld {
    /// Time of the next turn of an association.
    pub(super) fn association_reason(&self, number: usize) -> Nanos {
        let one = &self.associations[number];
        if !one.is_active() || one.is_silent {
            return Nanos::NEVER;
        }
        let net = self.net.borrow();
        let is_moved = one.queues().any(|queue| {
            let link = &net.links[queue.link];
            queue.has_output() || !link.down.is_empty() || link.is_gone() || link.half_shut
        });
        // One that sends nothing by itself has a turn only for its Keep Alive: turns of idle
        // associations were most of the steps of a run.
        let is_busy = match one.step {
            AssociationStep::NeedsQueue => true,
            AssociationStep::Ready => !self.resting,
            _ => false,
        };
        if is_moved || is_busy { one.next } else { one.keep_alive_at.max(one.next) }
    }

    pub(super) fn association_turn(&mut self, number: usize) -> Result<(), Violation> {
        let pause = self.work.pick(&[1_000, 100_000, 3_000_000]);
        self.associations[number].next = self.now + Nanos(1 + self.work.span(pause));
        self.receive(number)?;
        if !self.associations[number].is_active() {
            return Ok(());
        }
        if self.associations[number].step == AssociationStep::NeedsQueue {
            self.connect_io(number);
        }
        let (now, keep_alive) = (self.now, self.hosts[self.associations[number].host].keep_alive);
        let one = &mut self.associations[number];
        if one.keep_alive_at <= now {
            one.keep_alive_at = now + Nanos(keep_alive.0 / 2);
            one.send_admin(AdminCommand::KeepAlive);
        }
        if self.associations[number].step == AssociationStep::Ready && !self.resting {
            self.send_requests(number);
            self.disturb_association(number);
        }
        let one = &mut self.associations[number];
        let mut net = self.net.borrow_mut();
        if !one.is_active() || one.is_silent {
            return Ok(());
        }
        one.admin.flush(&mut net, &mut self.work);
        one.io.iter_mut().for_each(|io| _ = io.flush(&mut net, &mut self.work));
        Ok(())
    }

    fn receive(&mut self, number: usize) -> Result<(), Violation> {
        let one = &mut self.associations[number];
        let net = Rc::clone(&self.net);
        let mut is_open = one.admin.fill(&mut net.borrow_mut());
        is_open &= one.io.as_mut().is_none_or(|io| io.fill(&mut net.borrow_mut()));
        // An answer may end the association.
        while self.associations[number].is_active()
            && let Some(received) = self.associations[number].admin.next()?
        {
            match received {
                Received::Initialized => {}
                Received::Response(completion) => self.admin_answer(number, completion)?,
                Received::Data(id, data) => self.admin_data(number, id, &data)?,
            }
        }
        while self.associations[number].is_active() {
            let Some(io) = &mut self.associations[number].io else { break };
            let Some(received) = io.next()? else { break };
            match received {
                Received::Initialized => {}
                Received::Response(completion) => self.io_answer(number, completion)?,
                Received::Data(id, data) => self.io_data(number, id, &data)?,
            }
        }
        if !is_open && self.associations[number].is_active() {
            if !self.may_close(number) {
                return Err(format!("the target closes association {number}, whose host works"));
            }
            self.lose(number, "the target has closed a connection");
        }
        Ok(())
    }

    /// True if the target may close the connections of an association that the host uses: the
    /// network had an error, or another association was to reset it, and perhaps was lost before
    /// the answer came.
    fn may_close(&self, number: usize) -> bool {
        let (one, net) = (&self.associations[number], self.net.borrow());
        one.may_be_reset || one.queues().any(|queue| net.links[queue.link].faulty)
    }

    fn admin_answer(&mut self, number: usize, completion: Completion) -> Result<(), Violation> {
        let one = &mut self.associations[number];
        let sent = one.admin_commands.remove(&completion.id);
        let sent = sent.ok_or_else(|| format!("an answer to no command: {completion:?}"))?;
        match sent {
            AdminCommand::Reset(victim) => return self.reset_answer(number, victim, completion),
            AdminCommand::ForbiddenReset(victim) if completion.status.is_ok() => {
                return self.forbidden_reset_answer(number, victim);
            }
            _ => {}
        }
        if !completion.status.is_ok() {
            // The controller is about to end.
            return Ok(());
        }
        match sent {
            AdminCommand::Connect => {
                one.controller = completion.result as u16;
                one.keep_alive_at = self.now;
                one.send_admin(AdminCommand::Enable);
            }
            AdminCommand::Enable => one.send_admin(AdminCommand::Status),
            AdminCommand::Status if completion.result & 1 == 1 => one.send_admin(AdminCommand::Identify),
            AdminCommand::Status => one.send_admin(AdminCommand::Status),
            AdminCommand::Mask => {
                one.send_admin(AdminCommand::Event);
                one.step = AssociationStep::NeedsQueue;
            }
            AdminCommand::Event => {
                self.counts.events += 1;
                one.read_page((completion.result >> 16) as u8);
                one.send_admin(AdminCommand::Event);
            }
            AdminCommand::Shutdown => one.send_admin(AdminCommand::ShutdownStatus),
            AdminCommand::ShutdownStatus if completion.result >> 2 & 3 == 2 => {
                self.counts.shutdowns += 1;
                self.lose(number, "it is shut down");
                self.fenced(number, true);
            }
            AdminCommand::ShutdownStatus => one.send_admin(AdminCommand::ShutdownStatus),
            _ => {}
        }
        Ok(())
    }

    fn admin_data(&mut self, number: usize, id: u16, data: &[u8]) -> Result<(), Violation> {
        let one = &mut self.associations[number];
        match one.admin_commands.remove(&id) {
            Some(AdminCommand::Identify) => {
                let bytes = data.try_into().map_err(|_| "Identify without 4096 bytes")?;
                let can = FenceCapabilities::decode(bytes);
                (one.instance, one.quiesce) = (can.instance, Nanos::from_millis(can.quiesce_time_ms.into()));
                one.send_admin(AdminCommand::Mask);
            }
            Some(AdminCommand::ResetLog) => {
                for entry in decode_cross_controller_reset_log(data) {
                    let is_done = entry.status == CrossControllerResetStatus::Succeeded;
                    let victim = self.associations.iter().position(|one| {
                        let instance = one.instance.map(|instance| (instance.id, instance.uniquifier));
                        one.fence == FenceStep::ResetBy(number)
                            && one.step == AssociationStep::Lost
                            && instance == Some((entry.impacted, entry.uniquifier))
                    });
                    if let (true, Some(victim)) = (is_done, victim) {
                        self.counts.late_resets += 1;
                        self.fenced(victim, true);
                    }
                }
            }
            Some(AdminCommand::Page) => {}
            other => return Err(format!("data for {other:?}")),
        }
        Ok(())
    }

    fn reset_answer(
        &mut self,
        number: usize,
        victim: usize,
        completion: Completion,
    ) -> Result<(), Violation> {
        let is_done = completion.result & CrossControllerReset::DONE != 0;
        match (completion.status.is_ok(), is_done) {
            (true, true) => {
                self.counts.resets += 1;
                if self.associations[victim].is_active() {
                    self.lose(victim, "another association has reset it");
                }
                if self.associations[victim].step == AssociationStep::Lost {
                    self.fenced(victim, true);
                }
            }
            (true, false) => {
                if self.associations[victim].is_active() {
                    self.lose(victim, "another association resets it");
                }
                let believes_early =
                    self.hosts[self.associations[victim].host].policy == RetryPolicy::EarlyReset;
                if believes_early && self.associations[victim].step == AssociationStep::Lost {
                    self.fenced(victim, true);
                } else {
                    self.associations[victim].fence = FenceStep::ResetBy(number);
                }
            }
            (false, _) if self.associations[victim].step == AssociationStep::Lost => {
                self.wait_for_fence(victim);
            }
            (false, _) => {}
        }
        Ok(())
    }

    fn io_answer(&mut self, number: usize, completion: Completion) -> Result<(), Violation> {
        let one = &mut self.associations[number];
        let host = one.host;
        let sent = one.io_commands.remove(&completion.id);
        let is_done = completion.status.is_ok();
        match sent.ok_or_else(|| format!("an answer to no command: {completion:?}"))? {
            IoCommand::Connect if is_done => one.step = AssociationStep::Ready,
            // The controller is about to end.
            IoCommand::Connect => {}
            IoCommand::Write { block, stamp } => {
                self.counts.requests += 1;
                self.counts.inaccessible += u64::from(completion.status == NvmeStatus::ANA_INACCESSIBLE);
                let mut disk = lock_mutex(&self.disk);
                self.hosts[host].blocks[block].written(stamp, is_done, &mut disk);
            }
            IoCommand::Read { block, .. } => {
                self.counts.requests += 1;
                self.hosts[host].blocks[block].is_busy = false;
            }
        }
        Ok(())
    }

    fn io_data(&mut self, number: usize, id: u16, data: &[u8]) -> Result<(), Violation> {
        let one = &mut self.associations[number];
        let Some(IoCommand::Read { block, allowed }) = one.io_commands.remove(&id) else {
            return Err("data for no read".into());
        };
        (self.counts.requests, self.counts.compared) = (self.counts.requests + 1, self.counts.compared + 1);
        self.hosts[one.host].blocks[block].was_read(&allowed, stamp_of(data)?)
    }

    fn connect_io(&mut self, number: usize) {
        let (host, controller) = (self.associations[number].host, self.associations[number].controller);
        if let Some(io) = self.connect_queue(host, 1, controller, 0) {
            let one = &mut self.associations[number];
            one.io = Some(io);
            one.io_commands.insert(1, IoCommand::Connect);
            one.step = AssociationStep::ConnectingQueue;
        }
    }

    fn send_requests(&mut self, number: usize) {
        let host = self.associations[number].host;
        for _ in 0..self.work.below(3) {
            if self.associations[number].io_commands.len() >= self.depth {
                return;
            }
            let all = &self.hosts[host].blocks;
            let repeat = (0..all.len()).find(|block| all[*block].must_repeat());
            let block = repeat.unwrap_or(self.work.below(all.len() as u64) as usize);
            let is_write = repeat.is_some() || self.work.one_in(2);
            self.counts.repeated += u64::from(repeat.is_some());
            self.request(number, block, is_write);
        }
    }

    fn request(&mut self, number: usize, block: usize, is_write: bool) {
        let host = &mut self.hosts[self.associations[number].host];
        let (one, model) = (&mut self.associations[number], &mut host.blocks[block]);
        let at = host.first + block;
        if is_write && model.may_write() {
            let stamp = one.next_stamp(number);
            model.write(stamp);
            one.request(at, IoCommand::Write { block, stamp });
        } else if !is_write && !model.is_busy {
            let allowed = model.read();
            one.request(at, IoCommand::Read { block, allowed });
        }
    }

    /// Reads all blocks of all hosts.
    pub(super) fn read_all(&mut self) {
        for host in 0..self.hosts.len() {
            let is_path = |one: &HostAssociation| one.host == host && one.step == AssociationStep::Ready;
            let number = self.associations.iter().position(is_path).expect("the caller has waited for one");
            for block in 0..self.hosts[host].blocks.len() {
                self.request(number, block, false);
            }
        }
    }

    /// Sometimes loses the association, or resets a working one through it.
    fn disturb_association(&mut self, number: usize) {
        let has = |class| !self.plan.without.has(class);
        let (loses, hangs, lies) =
            (has(DisturbanceClass::Lost), has(DisturbanceClass::Hang), has(DisturbanceClass::Nonsense));
        if !self.control.one_in(150) {
            return;
        }
        match self.control.below(10) {
            0..3 if hangs => {
                self.counts.silent += 1;
                self.associations[number].is_silent = true;
                self.lose(number, "it falls silent");
            }
            3..5 if loses => {
                self.counts.cut += 1;
                let (quietly, broken) = (self.control.one_in(2), self.control.one_in(2));
                let links: Vec<usize> = self.associations[number].queues().map(|queue| queue.link).collect();
                // Perhaps only the I/O queue at first.
                let from = if self.control.one_in(4) { links.len() - 1 } else { 0 };
                for link in &links[from..] {
                    self.net.borrow_mut().leave(*link, quietly, broken);
                }
                self.lose(number, "it is cut off");
            }
            5 if loses => {
                let one = &mut self.associations[number];
                one.step = AssociationStep::ShuttingDown;
                if let Some(io) = one.io.take() {
                    self.net.borrow_mut().leave(io.link, false, false);
                }
                one.send_admin(AdminCommand::Shutdown);
                self.say(format!("association {number} shuts down"));
            }
            6 if loses => self.reset_another(number),
            7 if lies => self.ask_forbidden_reset(number),
            8 if lies => self.connect_forbidden_queue(number),
            _ => {}
        }
    }

    /// Resets a working association of the same host, which perhaps does the same.
    fn reset_another(&mut self, number: usize) {
        let host = self.associations[number].host;
        let is_other = |other: &usize| {
            let one = &self.associations[*other];
            *other != number && one.host == host && one.step == AssociationStep::Ready
        };
        let Some(other) = (0..self.associations.len()).find(is_other) else { return };
        let both = if self.control.one_in(2) {
            vec![(number, other), (other, number)]
        } else {
            vec![(number, other)]
        };
        self.counts.mutual += 1;
        for (source, victim) in both {
            let Some(instance) = self.associations[victim].instance else { return };
            self.say(format!("association {source} resets {victim}, which works"));
            self.associations[source].ask_reset(victim, instance);
            self.associations[victim].may_be_reset = true;
        }
    }
}
