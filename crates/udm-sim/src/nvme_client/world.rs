//! A world of the NVMe initiator: cores with lanes of namespaces, and the targets. It runs on one
//! thread in an order drawn from a seed.

use super::conn::ControllerConn;
use super::counts::NvmeClientCounts;
use super::description::{ControllerDescription, NamespaceDescription};
use super::own_target::{OwnTarget, OwnTargetPlace, Wire};
use super::sent_writes::SentWrites;
use super::target::{SimController, SimTarget, TargetAvailability};
use crate::counts::CombinedRunHash;
use crate::model::Violation;
use crate::nbd::net::{SimNetwork, SimSockets};
use crate::plan::{DisturbanceClass, RunPlan};
use crate::remote_disk::disk::ServerDisk;
use crate::remote_disk::machine::{MachineSettings, RemoteDiskMachine};
use crate::remote_disk::run::RemoteDiskWorld;
use crate::remote_disk::shared::lock_front_end_state;
use crate::rng::{RngStream, SimRng};
use std::sync::{Arc, Mutex};
use udm_backends::nvme::{ControllerResets, ServerAddress, create_simulated_nvme_path};
use udm_core::Nanos;
use udm_targets::multipath::PathWatchOptions;
use udm_wire::nvme::AnaState;
use udm_wire::nvme::host::{HostDigests, HostOptions};
use udm_wire::uri::{NvmeUri, ReplyDeadlineSetting};

pub(super) const SUBSYSTEM: &str = "nqn.2026-11.org.example:disks";

/// A simulated world of the NVMe initiator.
pub struct NvmeClientWorld {
    pub(super) machine: RemoteDiskMachine,
    pub(super) options: HostOptions,
    pub(super) namespaces: Vec<NamespaceDescription>,
    pub(super) disks: Vec<Arc<Mutex<ServerDisk>>>,
    pub(super) targets: Vec<SimTarget>,
    pub(super) controllers: Vec<SimController>,
    pub(super) conns: Vec<ControllerConn>,
    pub(super) writes: SentWrites,
    /// The connections to udm's own targets.
    pub(super) wires: Vec<Wire>,
    pub(super) counts: NvmeClientCounts,
}

/// The initiator's parameters, the same on all paths.
fn draw_uri(build: &mut SimRng) -> NvmeUri {
    NvmeUri {
        digests: HostDigests { header: build.one_in(2), data: build.one_in(2) },
        kato: Nanos::from_millis(build.pick(&[500, 1000, 5000])),
        deadline: match build.pick(&[None, Some(200), Some(3_000)]) {
            None => ReplyDeadlineSetting::Never,
            Some(ms) => ReplyDeadlineSetting::After(Nanos::from_millis(ms)),
        },
        fence_delay: build.one_in(2).then_some(Nanos::from_millis(700)),
        ..NvmeUri::new("t", 4420, SUBSYSTEM, 1)
    }
}

impl NvmeClientWorld {
    pub(super) fn new(plan: &RunPlan) -> Result<NvmeClientWorld, Violation> {
        let without = plan.without;
        let mut build = SimRng::new(plan.seed, RngStream::Build);
        let count = plan.cores.unwrap_or(build.pick(&[1, 1, 2, 2, 3]));
        let (mut namespaces, mut disks, mut targets) = (Vec::new(), Vec::new(), Vec::new());
        // Namespaces whose targets are udm's own.
        let mut own = Vec::new();
        for number in 0..build.pick(&[1, 1, 2]) {
            let long = !without.has(DisturbanceClass::Long) && build.one_in(3);
            let sectors = 8 * if long { build.between(128, 300) } else { build.between(8, 32) };
            namespaces.push(NamespaceDescription::draw(&mut build, number as u8, sectors, without));
            disks.push(Arc::new(Mutex::new(ServerDisk::new(number, sectors))));
            let description = ControllerDescription::draw(&mut build, count);
            for _ in 0..build.pick(&[1, 2, 2, 2, 3]) {
                targets.push(SimTarget {
                    namespace: number,
                    description: description.clone(),
                    mode: TargetAvailability::Up,
                    other: None,
                    until: Nanos(0),
                    ana: AnaState::Optimized,
                    ana_changes: 0,
                    ana_until: Nanos::NEVER,
                    stalled_since: None,
                    jobs: Vec::new(),
                    latency: build.pick(&[2_000, 50_000, 1_000_000]),
                    quiesce: Nanos(0),
                    own: None,
                });
            }
            own.push(build.one_in(3));
        }
        let uri = draw_uri(&mut build);
        for target in &mut targets {
            target.quiesce = target.description.quiesce(uri.fence_delay.unwrap_or(Nanos(0)));
        }
        let mut net = SimNetwork::new(SimRng::new(plan.seed, RngStream::SimNetwork));
        net.cuts = !without.has(DisturbanceClass::Cuts);
        net.fails = if without.has(DisturbanceClass::Lost) { 0 } else { build.pick(&[0, 1000, 5000]) };
        let settings = MachineSettings {
            cores: count,
            paths: targets.len(),
            letter: 't',
            net,
            fault_interval: [100, 400, 1500],
            log: "udm_backends::nvme",
        };
        let machine = RemoteDiskMachine::new(plan, settings, &mut build)?;
        let options = HostOptions {
            host: "nqn.2014-08.org.example:host".into(),
            host_id: [7; 16],
            subsystem: SUBSYSTEM.into(),
            nsid: 1,
            digests: uri.digests,
            kato_ms: (uri.kato.0 / 1_000_000) as u32,
            queues: 2 * count as u16 + 2,
            secrets: None,
        };
        let mut world = NvmeClientWorld {
            machine,
            options,
            namespaces,
            disks,
            targets,
            controllers: Vec::new(),
            conns: Vec::new(),
            writes: SentWrites::default(),
            wires: Vec::new(),
            counts: NvmeClientCounts::default(),
        };
        world.add_own_targets(&own, &mut build)?;
        world.boot(&uri, count, &mut build)?;
        Ok(world)
    }

    /// Replaces the targets of the namespaces in `own` by udm's own ones.
    fn add_own_targets(&mut self, own: &[bool], build: &mut SimRng) -> Result<(), Violation> {
        self.machine.set_turn(None);
        let fails =
            if self.machine.plan.without.has(DisturbanceClass::Errors) { 0 } else { build.pick(&[0, 100]) };
        for t in 0..self.targets.len() {
            let number = self.targets[t].namespace;
            if own[number] {
                let disk = &self.disks[number];
                let place = OwnTargetPlace { target: t, namespace: number, fails };
                let target = OwnTarget::new(
                    place,
                    &self.namespaces[number],
                    disk,
                    &self.machine.shared,
                    &self.machine.net,
                    build,
                )?;
                self.targets[t].own = Some(target);
                self.targets[t].description.has_ana = true;
            }
        }
        Ok(())
    }

    /// Creates the cores, the devices and the front ends.
    fn boot(&mut self, uri: &NvmeUri, cores: usize, build: &mut SimRng) -> Result<(), Violation> {
        self.machine.add_cores(cores, build);
        let resets = Arc::new(ControllerResets::default());
        for number in 0..self.targets.len() {
            let known = self.read_facts(number)?;
            let dialled = self.machine.net.borrow().dialled.clone();
            self.machine.paths.push(create_simulated_nvme_path(
                &resets,
                NvmeUri { host: format!("t{number}"), ..uri.clone() },
                ServerAddress::Tcp(([127, 0, 0, 1], 4420 + number as u16).into()),
                self.options.clone(),
                known,
                Box::new(SimSockets { dialled, server: number }),
            ));
        }
        let without = self.machine.plan.without;
        let draw_watch = |build: &mut SimRng| match !without.has(DisturbanceClass::Watch) && build.one_in(3) {
            true => PathWatchOptions {
                deadline: build.pick(&[None, Some(200), Some(1000)]).map(Nanos::from_millis),
                hedge_reads: build.below(3) > 0,
                eject_slow: build.one_in(2),
            },
            false => PathWatchOptions::default(),
        };
        for number in 0..self.namespaces.len() {
            let is_path = |t: &usize| self.targets[*t].namespace == number;
            let paths: Vec<usize> = (0..self.targets.len()).filter(is_path).collect();
            let sectors = self.namespaces[number].sectors;
            // A Keep Alive or a request may be late because the world is busy.
            self.add_device((number, sectors), &paths, true, draw_watch, build)?;
        }
        self.machine.attach_front_ends();
        self.machine.calm = false;
        Ok(())
    }

    pub(super) fn counts(&self) -> NvmeClientCounts {
        let (net, shared) = (self.machine.net.borrow(), lock_front_end_state(&self.machine.shared));
        NvmeClientCounts {
            steps: self.machine.step,
            requests: shared.model.requests,
            errors: shared.model.errors,
            compared: shared.model.compared,
            lost: net.lost,
            rests: self.machine.rests,
            memory: self.machine.memory,
            cuts: net.cut,
            failed: net.failed,
            simulated: self.machine.now.0,
            hash: CombinedRunHash(shared.trace.hash()),
            ..self.counts
        }
    }

    /// The keep-alive timeout that the initiator asks for.
    pub(super) fn kato(&self) -> Nanos {
        Nanos::from_millis(self.options.kato_ms.into())
    }

    /// Maximum memory of udm in bytes, without the memory of requests. A lane has one connection
    /// with two buffers of 256 KiB in use and 1 MiB kept, and perhaps a cancelled one. A front end
    /// keeps the memory of its profile.
    pub(super) fn memory_max(&self) -> i64 {
        // A checker and the owner of a shared queue have their own lanes.
        let lanes = self.targets.len() * (self.machine.cores.len() + 2);
        let requests = self.machine.profile.depth.max(4) * self.machine.devices.len() * (1 << 20);
        // udm's own targets have limits of their own.
        let own = self.targets.iter().filter(|target| target.own.is_some()).count() * (256 << 20);
        (own + lanes * 3 * (1536 << 10)
            + self.machine.cores.len() * (self.machine.profile.keep + requests + 4096)) as i64
    }
}
