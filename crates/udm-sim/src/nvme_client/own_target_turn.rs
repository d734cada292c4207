//! The turns of udm's own targets and of the wires to them, their beginning and their end.

use super::own_target::{OwnTarget, Wire};
use super::world::NvmeClientWorld;
use crate::model::Violation;
use crate::nbd::ring_core::count_ring_operations;
use crate::plan::DisturbanceClass;
use crate::remote_disk::machine::RemoteDiskMachine;
use crate::remote_disk::run::RemoteDiskWorld;
use crate::remote_disk::shared::lock_front_end_state;
use udm_backends::nvme::KnownNamespace;
use udm_core::Nanos;
use udm_runtime::CoreStateAfterStep;
use udm_wire::nvme::host::{AdminEvent, AssociationFacts, HostAdmin};

impl NvmeClientWorld {
    /// True if the targets of a namespace are udm's own.
    pub(super) fn has_own_targets(&self, namespace: usize) -> bool {
        self.targets.iter().any(|target| target.namespace == namespace && target.own.is_some())
    }

    /// What the initiator knows of a namespace when it is opened on target `t`.
    pub(super) fn read_facts(&mut self, t: usize) -> Result<KnownNamespace, Violation> {
        let target = &self.targets[t];
        if target.own.is_none() {
            let namespace = target.description.facts(&self.namespaces[target.namespace])?;
            let queues = target.description.queues.min(self.options.queues);
            return Ok(KnownNamespace { namespace, queues });
        }
        self.machine.net.borrow_mut().calm = true;
        let facts = self.read_own_facts(t)?;
        self.machine.net.borrow_mut().calm = false;
        Ok(KnownNamespace { namespace: facts.namespace, queues: facts.queues })
    }

    fn read_own_facts(&mut self, t: usize) -> Result<AssociationFacts, Violation> {
        let net = self.machine.net.clone();
        let own = self.targets[t].own.as_ref().ok_or("a target that is not udm's")?;
        let link = own.accept(&mut net.borrow_mut(), 1 << 20)?;
        let mut admin = HostAdmin::new(self.options.clone());
        for _ in 0..10_000 {
            net.borrow_mut().links[link].up.extend(admin.take_out());
            self.machine.now = self.machine.now + Nanos(100_000);
            self.machine.set_turn(None);
            self.advance_own_rings();
            for c in 0..self.targets[t].own_cores().count() {
                self.own_core_turn(t, c)?;
            }
            let bytes: Vec<u8> = net.borrow_mut().links[link].down.drain(..).collect();
            let mut input = &bytes[..];
            while let Some(event) = admin.take(&mut input).map_err(|error| error.to_string())? {
                match event {
                    AdminEvent::Ready(facts) => {
                        net.borrow_mut().leave(link, true, false);
                        return Ok(*facts);
                    }
                    AdminEvent::NotReady => admin.ask_status(),
                    _ => {}
                }
            }
        }
        Err(format!("t{t} does not say what it is"))
    }

    /// Completes operations of the rings of udm's own targets. Returns the time of the next
    /// completion.
    pub(super) fn advance_own_rings(&mut self) -> Nanos {
        let own = self.targets.iter().flat_map(|target| &target.own);
        let cores = own.flat_map(|own| &own.cores);
        cores.map(|core| core.outside.borrow_mut().go_on()).min().unwrap_or(Nanos::NEVER)
    }

    /// A turn of core `c` of target `t`.
    pub(super) fn own_core_turn(&mut self, t: usize, c: usize) -> Result<(), Violation> {
        self.machine.now = self.machine.now + Nanos(1);
        let now = self.machine.now;
        let NvmeClientWorld { targets, machine: RemoteDiskMachine { schedule, net, .. }, .. } = self;
        let Some(own) = &mut targets[t].own else { return Ok(()) };
        let core = &mut own.cores[c];
        crate::nbd::clock::set_simulated_clock(now, core.spent);
        let mut rest = core.core.step();
        if rest == CoreStateAfterStep::None && schedule.one_in(2) {
            rest = core.core.step();
        }
        let took = core.end_turn(rest, now, schedule);
        self.machine.now = now + took;
        let wrong = core.outside.borrow_mut().wrong.take();
        let mut net = net.borrow_mut();
        net.take_moved();
        net.look();
        wrong.map_or(Ok(()), Err)
    }

    /// Connects the initiator's connection `link` with target `t`.
    pub(super) fn connect_wire(&mut self, t: usize, link: usize) {
        let (without, calm, digests) = (self.machine.plan.without, self.machine.calm, self.options.digests);
        let room = self.machine.chance.pick(&[100, 4096, 64 << 10, 1 << 20]);
        let notices = without.has(DisturbanceClass::Late) || self.machine.chance.one_in(2);
        // Only what both digests protect.
        let may_flip = digests.header && digests.data && !calm && !without.has(DisturbanceClass::Nonsense);
        let flips = if may_flip { self.machine.chance.pick(&[0, 50, 500]) } else { 0 };
        let accepted =
            self.targets[t].own.as_ref().map(|own| own.accept(&mut self.machine.net.borrow_mut(), room));
        match accepted {
            Some(Ok(other)) => {
                self.wires.push(Wire::new(t, (link, other), (notices, flips), self.machine.now));
            }
            // There are too many connections.
            _ => self.machine.net.borrow_mut().leave(link, true, true),
        }
    }

    pub(super) fn wire_turn(&mut self, w: usize) {
        self.machine.set_turn(None);
        let (now, net) = (self.machine.now, self.machine.net.clone());
        let wire = &mut self.wires[w];
        let is_flipped = wire.turn(&mut net.borrow_mut(), &mut self.machine.chance, now);
        let (namespace, is_over) = (self.targets[wire.target].namespace, wire.is_over);
        if is_flipped || is_over {
            self.counts.flipped += u64::from(is_flipped);
            let link = wire.initiator_link;
            let mut shared = lock_front_end_state(&self.machine.shared);
            // The target answers with an error.
            shared.model.exports[namespace].said_no += u64::from(is_flipped);
            shared.model.exports[namespace].trouble(now);
            let what = if is_flipped { "a bit is flipped" } else { "the end of the wire" };
            shared.say(format!("connection {link}: {what}"));
        }
    }

    /// Stops udm's own targets, and checks that nothing of them is left.
    pub(super) fn end_own_targets(&mut self) -> Result<(), Violation> {
        self.targets.iter_mut().flat_map(|target| &mut target.own).for_each(OwnTarget::stop);
        let is_over = |target: &super::target::SimTarget| target.own_cores().all(|(_, core)| core.over);
        self.step_until("the end of the targets", |world| world.targets.iter().all(is_over))?;
        for own in self.targets.iter_mut().flat_map(|target| &mut target.own) {
            let (operations, requests) = (count_ring_operations(&own.cores), own.in_flight());
            if operations + requests > 0 {
                return Err(format!("at the end, {operations} operations and {requests} requests are left"));
            }
            own.clear();
        }
        Ok(())
    }
}
