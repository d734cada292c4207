//! A world of the NVMe initiator: cores with lanes of namespaces, and the targets. It runs on one
//! thread in an order drawn from a seed.

use super::conn::ControllerConn;
use super::counts::NvmeClientCounts;
use super::description::{ControllerDescription, NamespaceDescription};
use super::own_target::{OwnTarget, OwnTargetPlace, Wire};
use super::sent_writes::SentWrites;
use super::target::{SimController, SimTarget, TargetAvailability};
use crate::counts::CombinedRunHash;
use crate::log_capture;
use crate::model::Violation;
use crate::nbd::net::{SimNetwork, SimSockets};
use crate::nbd::ring_core::{NumberedPathResolver, RunningDeviceChange, SteppedRingCore};
use crate::plan::{DisturbanceClass, RunPlan};
use crate::remote_disk::disk::ServerDisk;
use crate::remote_disk::front_end::{LoadProfile, SimFrontEnd};
use crate::remote_disk::model::{ExportModel, RemoteDiskModel};
use crate::remote_disk::shared::{
    FrontEndSharedState, FrontEndSharedStateRef, WorkloadPhase, lock_front_end_state,
};
use crate::rng::{RngStream, SimRng};
use crate::trace::Trace;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use tracing::subscriber::DefaultGuard;
use udm_backends::nvme::{ControllerResets, ServerAddress, create_simulated_nvme_path};
use udm_core::{CoreId, DevNo, Device, DeviceId, Nanos};
use udm_dm::{MappedDevice, Table};
use udm_runtime::{ProcessCores, TemporaryCoreIo};
use udm_targets::multipath::{PathMaintenanceSettings, PathWatchOptions};
use udm_wire::multipath_conf::MultipathSettings;
use udm_wire::nvme::AnaState;
use udm_wire::nvme::host::{HostDigests, HostOptions};
use udm_wire::uri::{NvmeUri, ReplyDeadlineSetting};

pub(super) const SUBSYSTEM: &str = "nqn.2026-11.org.example:disks";

/// The device of a namespace.
pub(super) struct DeviceOverNamespace {
    /// The device that front ends open.
    pub(super) device: Arc<dyn Device>,
    /// The mapped device, if the namespace is used through multipath.
    pub(super) mapped: Option<Arc<MappedDevice>>,
    pub(super) change: Option<RunningDeviceChange>,
    /// True if udm itself checks failed paths.
    pub(super) checks: bool,
}

/// A simulated world of the NVMe initiator.
pub struct NvmeClientWorld {
    pub(super) plan: RunPlan,
    pub(super) shared: FrontEndSharedStateRef,
    pub(super) now: Nanos,
    pub(super) core_set: Arc<ProcessCores>,
    pub(super) cores: Vec<SteppedRingCore>,
    pub(super) net: Rc<RefCell<SimNetwork>>,
    pub(super) options: HostOptions,
    pub(super) namespaces: Vec<NamespaceDescription>,
    pub(super) disks: Vec<Arc<Mutex<ServerDisk>>>,
    pub(super) targets: Vec<SimTarget>,
    pub(super) controllers: Vec<SimController>,
    pub(super) conns: Vec<ControllerConn>,
    pub(super) writes: SentWrites,
    /// The connections to udm's own targets.
    pub(super) wires: Vec<Wire>,
    /// The paths, by target.
    pub(super) paths: Vec<Arc<dyn Device>>,
    pub(super) devices: Vec<DeviceOverNamespace>,
    /// Connects that wait for their target, with their time.
    pub(super) callers: Vec<(usize, Nanos)>,
    /// Number of connections that were seen.
    pub(super) seen: usize,
    /// By target: the lines about its loss since its last connection.
    pub(super) down: Vec<BTreeSet<String>>,
    /// Address of messages to the front ends.
    pub(super) topic: DeviceId,
    pub(super) profile: LoadProfile,
    pub(super) schedule: SimRng,
    pub(super) control: SimRng,
    /// Random choices of the targets.
    pub(super) chance: SimRng,
    pub(super) step: u64,
    pub(super) moved_at: u64,
    pub(super) rest_at: u64,
    pub(super) calm: bool,
    /// End of the idle time at quiescence. Cleared when no event is left before it.
    pub(super) alone_until: Option<Nanos>,
    /// Average number of steps between faults.
    pub(super) rough: u64,
    pub(super) turns: u64,
    /// Memory in use before the cores were created, in bytes.
    pub(super) base: i64,
    pub(super) counts: NvmeClientCounts,
    /// Guard of the log capture, dropped at the end.
    _lines: DefaultGuard,
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
        let profile = LoadProfile {
            depth: plan.depth.unwrap_or(build.pick(&[1, 4, 16, 64])),
            pause: build.pick(&[1_000, 100_000, 10_000_000]),
            reads: build.pick(&[20, 50, 80]),
            flushes: build.pick(&[6, 6, 1]),
            preflushes: build.pick(&[10, 10, 2]),
            longs: build.pick(&[32, 32, 4]),
            keep: 4 << 20,
            without,
        };
        let shared = FrontEndSharedState {
            step: 0,
            trace: Trace::new(plan.keep_events),
            model: RemoteDiskModel::default(),
            work: SimRng::new(plan.seed, RngStream::Work),
            phase: WorkloadPhase::Work,
            closed: 0,
            wrong: None,
        };
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
            shared: Arc::new(Mutex::new(shared)),
            now: Nanos(1_000_000_000),
            core_set: ProcessCores::new(count).map_err(|e| e.to_string())?,
            cores: Vec::new(),
            net: Rc::new(RefCell::new(net)),
            options,
            namespaces,
            disks,
            down: vec![BTreeSet::new(); targets.len()],
            targets,
            controllers: Vec::new(),
            conns: Vec::new(),
            writes: SentWrites::default(),
            wires: Vec::new(),
            paths: Vec::new(),
            devices: Vec::new(),
            callers: Vec::new(),
            seen: 0,
            topic: DeviceId::new(),
            profile,
            schedule: SimRng::new(plan.seed, RngStream::Schedule),
            control: SimRng::new(plan.seed, RngStream::Control),
            chance: SimRng::new(plan.seed, RngStream::Disks),
            step: 0,
            moved_at: 0,
            rest_at: 500 + build.span(1500),
            calm: true,
            alone_until: None,
            rough: build.pick(&[100, 400, 1500]),
            turns: 0,
            base: udm_buf::slab_count::thread_live_slab_bytes(),
            counts: NvmeClientCounts::default(),
            _lines: log_capture::capture_log("udm_backends::nvme"),
            plan: plan.clone(),
        };
        world.add_own_targets(&own, &mut build)?;
        world.boot(&uri, count, &mut build)?;
        Ok(world)
    }

    /// Replaces the targets of the namespaces in `own` by udm's own ones.
    fn add_own_targets(&mut self, own: &[bool], build: &mut SimRng) -> Result<(), Violation> {
        self.set_turn(None);
        let fails = if self.plan.without.has(DisturbanceClass::Errors) { 0 } else { build.pick(&[0, 100]) };
        for t in 0..self.targets.len() {
            let number = self.targets[t].namespace;
            if own[number] {
                let disk = &self.disks[number];
                let place = OwnTargetPlace { target: t, namespace: number, fails };
                let target =
                    OwnTarget::new(place, &self.namespaces[number], disk, &self.shared, &self.net, build)?;
                self.targets[t].own = Some(target);
                self.targets[t].description.has_ana = true;
            }
        }
        Ok(())
    }

    /// Creates the cores, the devices and the front ends.
    fn boot(&mut self, uri: &NvmeUri, cores: usize, build: &mut SimRng) -> Result<(), Violation> {
        self.set_turn(None);
        let latency = build.pick(&[100, 10_000, 1_000_000]);
        for id in 0..cores {
            self.cores.push(SteppedRingCore::new(&self.core_set, id, &self.net, latency, &mut self.schedule));
        }
        let resets = Arc::new(ControllerResets::default());
        for number in 0..self.targets.len() {
            let known = self.read_facts(number)?;
            let dialled = self.net.borrow().dialled.clone();
            self.paths.push(create_simulated_nvme_path(
                &resets,
                NvmeUri { host: format!("t{number}"), ..uri.clone() },
                ServerAddress::Tcp(([127, 0, 0, 1], 4420 + number as u16).into()),
                self.options.clone(),
                known,
                Box::new(SimSockets { dialled, server: number }),
            ));
        }
        for number in 0..self.namespaces.len() {
            let is_path = |t: &usize| self.targets[*t].namespace == number;
            let paths: Vec<usize> = (0..self.targets.len()).filter(is_path).collect();
            let alone = paths.len() == 1 && build.one_in(2);
            let holds = !alone && build.below(3) > 0;
            let used = match alone {
                true => DeviceOverNamespace {
                    device: self.paths[paths[0]].clone(),
                    mapped: None,
                    change: None,
                    checks: false,
                },
                false => self.multipath(number, &paths, holds, build)?,
            };
            let limits = used.device.limits();
            self.devices.push(used);
            lock_front_end_state(&self.shared).model.exports.push(ExportModel::new(number, limits, holds));
            self.resume(number)?;
            // A table has its limits only when it is live.
            let limits = self.devices[number].device.limits();
            let mut model = ExportModel::new(number, limits, holds);
            // A Keep Alive or a request may be late because the world is busy.
            model.late = true;
            lock_front_end_state(&self.shared).model.exports[number] = model;
        }
        for core in 0..self.cores.len() {
            let (shared, profile, topic) = (self.shared.clone(), self.profile, self.topic);
            let devices: Vec<_> = self.devices.iter().map(|used| used.device.clone()).collect();
            let make = move || Box::new(SimFrontEnd::new(shared, profile, devices, topic)) as _;
            self.core_set.attach(CoreId(core as u16), Box::new(make));
        }
        self.calm = false;
        Ok(())
    }

    fn multipath(
        &self,
        number: usize,
        paths: &[usize],
        holds: bool,
        build: &mut SimRng,
    ) -> Result<DeviceOverNamespace, Violation> {
        let wrong = |e: &dyn std::fmt::Display| format!("d{number}: {e}");
        let features = if holds { "1 queue_if_no_path" } else { "0" };
        let selector =
            build.pick(&["round-robin", "queue-length", "service-time", "historical-service-time"]);
        let sectors = self.namespaces[number].sectors;
        let groups = if build.one_in(3) { paths.chunks(1).collect() } else { vec![paths] };
        let mut words = format!("0 {sectors} multipath {features} 0 {} 1", groups.len());
        for group in groups {
            words += &format!(" {selector} 0 {} 0", group.len());
            group.iter().for_each(|path| words += &format!(" t{path}"));
        }
        let dev = DevNo { major: 253, minor: number as u32 };
        let mapped = MappedDevice::new(&format!("d{number}"), None, dev).map_err(|e| wrong(&e))?;
        let checks = build.one_in(2);
        let settings = MultipathSettings {
            polling_interval: Nanos::from_millis(build.between(50, 2000)),
            // Long, because a core wakes for each check while the world is quiescent.
            max_polling_interval: Nanos(60_000_000_000),
            ..MultipathSettings::every(1)
        };
        let watched = !self.plan.without.has(DisturbanceClass::Watch) && build.one_in(3);
        let watch = match watched {
            true => PathWatchOptions {
                deadline: build.pick(&[None, Some(200), Some(1000)]).map(Nanos::from_millis),
                hedge_reads: build.below(3) > 0,
                eject_slow: build.one_in(2),
            },
            false => PathWatchOptions::default(),
        };
        PathMaintenanceSettings { paths: checks.then(|| Arc::new(settings)), watch }.set(&mapped);
        let lines = udm_wire::table::parse_table(&words).map_err(|e| wrong(&e))?;
        let mut names = NumberedPathResolver { letter: 't', paths: self.paths.clone() };
        let table =
            Table::build(udm_targets::TARGETS, &lines, &mut names, &TemporaryCoreIo, self.cores.len())
                .map_err(|e| wrong(&e))?;
        mapped.load(table).map_err(|e| wrong(&e))?;
        lock_front_end_state(&self.shared).say(format!("d{number}: {words}"));
        Ok(DeviceOverNamespace { device: mapped.clone(), mapped: Some(mapped), change: None, checks })
    }

    fn resume(&mut self, device: usize) -> Result<(), Violation> {
        let Some(mapped) = self.devices[device].mapped.clone() else { return Ok(()) };
        let change = RunningDeviceChange::start(|wake| mapped.resume(wake));
        let change = change.map_err(|e| format!("d{device}: {e}"))?;
        self.devices[device].change = Some(change);
        self.step_until("a device that is resumed", |world| world.devices[device].change.is_none())
    }

    pub(super) fn counts(&self) -> NvmeClientCounts {
        let (net, shared) = (self.net.borrow(), lock_front_end_state(&self.shared));
        NvmeClientCounts {
            steps: self.step,
            requests: shared.model.requests,
            errors: shared.model.errors,
            compared: shared.model.compared,
            cuts: net.cut,
            failed: net.failed,
            simulated: self.now.0,
            hash: CombinedRunHash(shared.trace.hash()),
            ..self.counts
        }
    }

    pub(super) fn say(&self, text: impl Into<String>) {
        lock_front_end_state(&self.shared).say(text);
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
        let lanes = self.targets.len() * (self.cores.len() + 2);
        let requests = self.profile.depth.max(4) * self.devices.len() * (1 << 20);
        // udm's own targets have limits of their own.
        let own = self.targets.iter().filter(|target| target.own.is_some()).count() * (256 << 20);
        (own + lanes * 3 * (1536 << 10) + self.cores.len() * (self.profile.keep + requests + 4096)) as i64
    }
}
