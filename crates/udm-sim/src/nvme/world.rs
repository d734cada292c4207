//! The world: cores, the target, its disk and hosts, on one thread in an order drawn from a seed.

use super::association::{AssociationStep, HostAssociation};
use super::counts::NvmeTargetCounts;
use super::disk::{DiskContent, FencedDisk};
use super::fence::RetryPolicy;
use super::forbidden::ForbiddenConnect;
use super::host::{BlockModel, SimHost};
use super::queue::HostQueue;
use crate::counts::CombinedRunHash;
use crate::environment::lock_mutex;
use crate::model::Violation;
use crate::nbd::clock;
use crate::nbd::net::SimNetwork;
use crate::nbd::ring_core::{SteppedRingCore, count_ring_operations};
use crate::plan::{DisturbanceClass, RunPlan};
use crate::rng::{RngStream, SimRng};
use crate::trace::Trace;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use udm_core::Nanos;
use udm_frontends::nbd::{Export, Exports};
use udm_frontends::nvme::{NvmeServer, NvmeServerOptions};
use udm_runtime::{CoreStateAfterStep, ProcessCores};
use udm_wire::nvme::{AnaState, ConnectCommand, ConnectData};

pub(super) const SUBSYSTEM: &str = "nqn.2026-11.org.example:disks";

/// The quiesce time of the target; the disk is faster.
const QUIESCE_MS: u16 = 2000;

/// Maximum number of steps until an awaited event.
const STEPS_MAX: u64 = 200_000;

/// Associations of a host.
const PATHS: usize = 2;

/// A world of the NVMe/TCP target.
pub struct NvmeTargetWorld {
    pub(super) plan: RunPlan,
    pub(super) trace: Trace,
    pub(super) now: Nanos,
    pub(super) step: u64,
    pub(super) disk: Arc<Mutex<DiskContent>>,
    pub(super) hosts: Vec<SimHost>,
    /// All associations so far; the index is the number in stamps.
    pub(super) associations: Vec<HostAssociation>,
    /// Connects that the target must refuse, and that have no answer.
    pub(super) forbidden_connects: Vec<ForbiddenConnect>,
    pub(super) net: Rc<RefCell<SimNetwork>>,
    pub(super) server: Option<NvmeServer>,
    pub(super) schedule: SimRng,
    pub(super) work: SimRng,
    pub(super) control: SimRng,
    /// No new requests, and nothing is disturbed.
    pub(super) resting: bool,
    /// No new associations.
    is_ending: bool,
    pub(super) counts: NvmeTargetCounts,
    pub(super) depth: usize,
    core_set: Arc<ProcessCores>,
    cores: Vec<SteppedRingCore>,
    exports: Arc<Exports>,
    /// When the ANA state becomes optimized again.
    ana_until: Nanos,
    /// Memory in use before the target was created, in bytes.
    base: i64,
}

impl NvmeTargetWorld {
    pub(super) fn new(plan: &RunPlan, policy: Option<RetryPolicy>) -> Result<NvmeTargetWorld, Violation> {
        let failed = |error: std::io::Error| error.to_string();
        let mut build = SimRng::new(plan.seed, RngStream::Build);
        let base = udm_buf::slab_count::thread_live_slab_bytes();
        let (count, hosts) = (plan.cores.unwrap_or(build.pick(&[1, 2, 3])), build.between(1, 2) as usize);
        let blocks = build.between(2, 8) as usize;
        let longest = Nanos(build.pick(&[1_000_000, 300_000_000, 1_800_000_000]));
        let disk_chance = SimRng::new(plan.seed, RngStream::Disks);
        let disk = Arc::new(Mutex::new(DiskContent::new(hosts * blocks, longest, disk_chance)));
        let mut net = SimNetwork::new(SimRng::new(plan.seed, RngStream::SimNetwork));
        net.cuts = !plan.without.has(DisturbanceClass::Cuts);
        net.fails = if plan.without.has(DisturbanceClass::Lost) { 0 } else { build.pick(&[0, 0, 3000]) };
        let net = Rc::new(RefCell::new(net));
        clock::set_simulated_clock(Nanos(1), Nanos(0));
        let core_set = ProcessCores::new(count).map_err(failed)?;
        let mut schedule = SimRng::new(plan.seed, RngStream::Schedule);
        let latency = build.pick(&[100, 10_000, 1_000_000]);
        let new_core = |id| SteppedRingCore::new(&core_set, id, &net, latency, &mut schedule);
        let cores = (0..count).map(new_core).collect();
        let exports = Arc::new(Exports::new());
        let export = Export::new("disk", "", false, Arc::new(FencedDisk::new(&disk)));
        exports.add(export.map_err(|error| error.to_string())?).map_err(|error| error.to_string())?;
        let options = NvmeServerOptions {
            subsystem: SUBSYSTEM.into(),
            quiesce_time_ms: QUIESCE_MS,
            instance_key: [plan.seed as u8; 32],
            ..NvmeServerOptions::default()
        };
        let server = NvmeServer::stepped(&core_set, &exports, options).map_err(failed)?;
        let policies = [RetryPolicy::Reset, RetryPolicy::Reset, RetryPolicy::Wait];
        let host = |index: usize| SimHost {
            name: format!("nqn.2014-08.org.example:host{index}"),
            policy: policy.unwrap_or_else(|| build.pick(&policies)),
            keep_alive: Nanos::from_millis(1000 * build.between(1, 3)),
            first: index * blocks,
            blocks: vec![BlockModel::default(); blocks],
        };
        Ok(NvmeTargetWorld {
            trace: Trace::new(plan.keep_events),
            now: Nanos(1),
            step: 0,
            disk,
            hosts: (0..hosts).map(host).collect(),
            associations: Vec::new(),
            forbidden_connects: Vec::new(),
            net,
            server: Some(server),
            schedule,
            work: SimRng::new(plan.seed, RngStream::Work),
            control: SimRng::new(plan.seed, RngStream::Control),
            resting: false,
            is_ending: false,
            counts: NvmeTargetCounts::default(),
            depth: plan.depth.unwrap_or(4),
            core_set,
            cores,
            exports,
            ana_until: Nanos::NEVER,
            base,
            plan: plan.clone(),
        })
    }

    pub(super) fn counts(&self) -> NvmeTargetCounts {
        NvmeTargetCounts {
            steps: self.step,
            landed: lock_mutex(&self.disk).landed,
            associations: self.associations.len() as u64,
            simulated: self.now.0,
            hash: CombinedRunHash(self.trace.hash()),
            ..self.counts
        }
    }

    pub(super) fn say(&mut self, text: impl Into<String>) {
        self.trace.say(self.now, text.into());
    }

    /// Runs all steps of the plan, lets everything settle, reads all data, and shuts down.
    pub(super) fn run(&mut self) -> Result<(), Violation> {
        while self.step < self.plan.steps {
            self.disturb();
            self.one_step()?;
        }
        self.resting = true;
        self.say("a rest");
        lock_mutex(&self.disk).calm = true;
        self.net.borrow_mut().calm = true;
        self.set_ana_state(AnaState::Optimized);
        let is_settled = |world: &NvmeTargetWorld| {
            world.hosts.iter().flat_map(|host| &host.blocks).all(BlockModel::is_settled)
        };
        self.step_until("the end of all requests", |world| {
            let is_idle = |one: &HostAssociation| one.step == AssociationStep::Ready || !one.is_active();
            let has_path = |host| {
                let is_path = |one: &HostAssociation| one.host == host && one.step == AssociationStep::Ready;
                world.associations.iter().any(is_path)
            };
            is_settled(world)
                && world.associations.iter().all(is_idle)
                && (0..world.hosts.len()).all(has_path)
        })?;
        self.read_all();
        self.step_until("all data", is_settled)?;
        self.end()
    }

    /// Disconnects all hosts, and checks that nothing of them is left.
    fn end(&mut self) -> Result<(), Violation> {
        self.is_ending = true;
        for number in 0..self.associations.len() {
            self.close(number);
        }
        self.forbidden_connects
            .drain(..)
            .for_each(|one| self.net.borrow_mut().leave(one.link(), false, true));
        self.step_until("the end of the controllers", |world| {
            let stats = world.server.as_ref().map(NvmeServer::stats).unwrap_or_default();
            (stats.controllers, stats.connections, stats.orphans) == (0, 0, 0)
        })?;
        self.core_set.end();
        self.core_set.stop(Nanos(20_000_000_000));
        self.step_until("the end of the cores", |world| world.cores.iter().all(|core| core.over))?;
        let (operations, requests) = (count_ring_operations(&self.cores), lock_mutex(&self.disk).in_flight);
        if operations + requests > 0 {
            return Err(format!(
                "at the end, {operations} operations and {requests} requests are in progress"
            ));
        }
        if let Some(export) = self.exports.all().iter().find(|export| export.users() > 0) {
            return Err(format!("all hosts are gone, and {} use {}", export.users(), export.name()));
        }
        self.cores.clear();
        self.server = None;
        match udm_buf::slab_count::thread_live_slab_bytes() - self.base {
            0 => Ok(()),
            live => Err(format!("the target has ended, but {live} bytes of its memory are allocated")),
        }
    }

    fn step_until(&mut self, what: &str, done: impl Fn(&NvmeTargetWorld) -> bool) -> Result<(), Violation> {
        let from = self.step;
        while !done(self) {
            if self.step - from > STEPS_MAX {
                return Err(format!("{what} does not come"));
            }
            self.one_step()?;
        }
        Ok(())
    }

    /// Changes ANA states, in storms, and connects hosts.
    fn disturb(&mut self) {
        if self.plan.without.has(DisturbanceClass::Paths) || !self.control.one_in(400) {
            return;
        }
        let states = [AnaState::NonOptimized, AnaState::Inaccessible, AnaState::Optimized];
        for _ in 0..self.control.between(1, 8) {
            let state = self.control.pick(&states);
            self.set_ana_state(state);
        }
        self.ana_until = self.now + Nanos(self.control.between(1, 50_000_000));
    }

    fn set_ana_state(&mut self, state: AnaState) {
        self.say(format!("the ANA state is {state:?}"));
        let server = self.server.as_ref().expect("there is a target until the end");
        server.set_ana_state(None, None, state).expect("all ports");
    }

    fn set_turn(&mut self, core: Option<usize>) {
        self.now = self.now + Nanos(1);
        clock::set_simulated_clock(self.now, core.map_or(Nanos(0), |core| self.cores[core].spent));
    }

    fn one_step(&mut self) -> Result<(), Violation> {
        self.step += 1;
        self.set_turn(None);
        if self.ana_until <= self.now {
            self.ana_until = Nanos::NEVER;
            self.set_ana_state(AnaState::Optimized);
        }
        self.connect_hosts();
        self.advance_fences()?;
        self.advance_forbidden_connects()?;
        let mut next = self.ana_until.min(self.next_fence());
        for core in &self.cores {
            next = next.min(core.outside.borrow_mut().go_on());
        }
        let mut ready = Vec::new();
        for (core, stepped) in self.cores.iter().enumerate() {
            let at = stepped.reason();
            next = next.min(at);
            ready.extend((at <= self.now).then_some((true, core)));
        }
        for number in 0..self.associations.len() {
            let at = self.association_reason(number);
            next = next.min(at);
            ready.extend((at <= self.now).then_some((false, number)));
        }
        if ready.is_empty() {
            if next == Nanos::NEVER {
                return Err("nothing moves any more".into());
            }
            self.now = self.now.max(next);
            return Ok(());
        }
        match self.schedule.pick(&ready) {
            (true, core) => self.core_turn(core)?,
            (false, number) => self.association_turn(number)?,
        }
        lock_mutex(&self.disk).violation.take().map_or(Ok(()), Err)
    }

    fn core_turn(&mut self, core: usize) -> Result<(), Violation> {
        self.set_turn(Some(core));
        let mut rest = self.cores[core].core.step();
        for _ in 0..self.schedule.below(4) {
            if rest != CoreStateAfterStep::None {
                break;
            }
            self.set_turn(Some(core));
            rest = self.cores[core].core.step();
        }
        let took = self.cores[core].end_turn(rest, clock::now(), &mut self.schedule);
        self.now = self.now + took;
        let wrong = self.cores[core].outside.borrow_mut().wrong.take();
        self.net.borrow_mut().look();
        wrong.map_or(Ok(()), Err)
    }

    /// Connects hosts that have too few associations.
    fn connect_hosts(&mut self) {
        let hosts = if self.is_ending { 0 } else { self.hosts.len() };
        for host in 0..hosts {
            let active = self.associations.iter().filter(|one| one.host == host && one.is_active()).count();
            if active < PATHS && (active == 0 || self.control.one_in(50)) {
                let milliseconds = self.hosts[host].keep_alive.0 / 1_000_000;
                if let Some(admin) = self.connect_queue(host, 0, 0xffff, milliseconds as u32) {
                    let number = self.associations.len();
                    self.say(format!("association {number} of host {host}"));
                    self.associations.push(HostAssociation::new(host, admin, self.now));
                }
            }
        }
    }

    /// Connects a queue of a host.
    pub(super) fn connect_queue(
        &mut self,
        host: usize,
        queue: u16,
        controller: u16,
        keep_alive_ms: u32,
    ) -> Option<HostQueue> {
        let room = self.work.pick(&[100, 4096, 64 << 10]);
        let (link, fd) = self.net.borrow_mut().connect(room).ok()?;
        self.server.as_ref()?.adopt(fd).ok()?;
        let connect =
            ConnectCommand { format: 0, queue, queue_size: 31, no_flow_control: true, keep_alive_ms };
        let data = ConnectData {
            host_id: [host as u8; 16],
            controller,
            subsystem: SUBSYSTEM.into(),
            host: self.hosts[host].name.clone(),
        };
        Some(HostQueue::new(link, &connect, &data))
    }
}
