//! A world of the NBD client: cores with lanes of exports, and the servers. It runs on one thread
//! in an order drawn from a seed.

use super::conn::ServerConn;
use super::counts::NbdClientCounts;
use super::servers::{ExportDescription, SimServer};
use crate::counts::CombinedRunHash;
use crate::environment::lock_mutex;
use crate::log_capture;
use crate::model::Violation;
use crate::nbd::clock;
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
use rustix::net::SocketAddrAny;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use tracing::subscriber::DefaultGuard;
use udm_backends::nbd::{
    FenceDone, NbdSocketAndFenceOps, ServerAddress, SocketOps, create_simulated_nbd_device,
};
use udm_core::{CoreId, DevNo, Device, DeviceId, Nanos};
use udm_dm::{MappedDevice, Table};
use udm_runtime::{ProcessCores, TemporaryCoreIo};
use udm_targets::multipath::PathMaintenanceSettings;
use udm_wire::multipath_conf::MultipathSettings;
use udm_wire::nbd::ExportFlags;
use udm_wire::uri::{self, DeviceUri, NbdUri, ReplyDeadlineSetting, ServerStoppedProof, SilentServerPolicy};

/// Time after the end of a connection from which its server executes nothing that came over it, for
/// `fence=wait`. See `actions`.
const SELF_FENCED: Nanos = Nanos(30_000_000_000);

/// The device of an export.
pub(super) struct DeviceOverExport {
    /// The device that front ends open.
    pub(super) device: Arc<dyn Device>,
    /// The mapped device, if the export is used through multipath.
    pub(super) mapped: Option<Arc<MappedDevice>>,
    pub(super) change: Option<RunningDeviceChange>,
    /// True if udm itself checks failed paths.
    pub(super) checks: bool,
}

/// The attempts of one core to connect to one server.
#[derive(Clone, Copy, Default)]
pub(super) struct ConnectAttempts {
    /// The last attempt: its connection and its time.
    pub(super) last: Option<(usize, Nanos)>,
    /// Number of consecutive attempts before the last one without an answered request.
    pub(super) vain: u32,
}

/// A simulated world of the NBD client.
pub struct NbdClientWorld {
    pub(super) plan: RunPlan,
    pub(super) shared: FrontEndSharedStateRef,
    pub(super) now: Nanos,
    pub(super) core_set: Arc<ProcessCores>,
    pub(super) cores: Vec<SteppedRingCore>,
    pub(super) net: Rc<RefCell<SimNetwork>>,
    pub(super) servers: Vec<SimServer>,
    /// Description of each export by its servers; `disks` has its disk.
    pub(super) says: Vec<ExportDescription>,
    pub(super) disks: Vec<ServerDisk>,
    pub(super) devices: Vec<DeviceOverExport>,
    /// The paths, by server.
    pub(super) paths: Vec<Arc<dyn Device>>,
    pub(super) conns: Vec<ServerConn>,
    /// Connects that wait for their server, with their time.
    pub(super) callers: Vec<(usize, Nanos)>,
    /// Running fence commands.
    pub(super) fences: RunningFenceCommands,
    /// The settings of the paths for silent servers.
    pub(super) silence: SilentServerPolicy,
    /// Number of connections that were checked.
    pub(super) seen: usize,
    /// Connect attempts, by core and server.
    pub(super) attempts: Vec<Vec<ConnectAttempts>>,
    /// Time of the last completed handshake with each server.
    pub(super) shaken: Vec<Nanos>,
    /// Time at which each server last had answered all writes of an abandoned connection.
    pub(super) last_reply_at: Vec<Nanos>,
    /// Connections whose server has sent the whole handshake.
    pub(super) greeted: BTreeSet<usize>,
    /// Connections on which a request was answered.
    pub(super) answered: BTreeSet<usize>,
    /// By server: the lines about its loss since its last connection.
    pub(super) down: Vec<BTreeSet<String>>,
    /// Address of messages to the front ends.
    pub(super) topic: DeviceId,
    pub(super) manner: LoadProfile,
    pub(super) schedule: SimRng,
    pub(super) control: SimRng,
    /// Random choices of the servers.
    pub(super) chance: SimRng,
    pub(super) step: u64,
    pub(super) moved_at: u64,
    pub(super) rest_at: u64,
    pub(super) calm: bool,
    /// End of the idle time at quiescence. Cleared when no event is left before it.
    pub(super) alone_until: Option<Nanos>,
    /// Average number of steps between faults.
    pub(super) rough: u64,
    /// One of this many power cuts is performed.
    pub(super) spared: u64,
    pub(super) turns: u64,
    /// Memory in use before the cores were created, in bytes.
    pub(super) base: i64,
    pub(super) counts: NbdClientCounts,
    /// Guard of the log capture, dropped at the end.
    _lines: DefaultGuard,
}

/// Sockets and fence commands of the lanes of a server.
struct SimSocketFactory {
    sockets: SimSockets,
    fences: RunningFenceCommands,
}

/// A running fence command.
pub(super) struct RunningFenceCommand {
    pub(super) server: usize,
    /// Time of its end.
    pub(super) due: Nanos,
    pub(super) then: FenceDone,
}

/// The running fence commands.
pub(super) type RunningFenceCommands = Arc<Mutex<Vec<RunningFenceCommand>>>;

impl SocketOps for SimSocketFactory {
    fn open(&self, address: &ServerAddress) -> io::Result<(OwnedFd, SocketAddrAny)> {
        self.sockets.open(address)
    }

    fn reset(&self, socket: &OwnedFd) {
        self.sockets.reset(socket);
    }
}

impl NbdSocketAndFenceOps for SimSocketFactory {
    fn fence(&self, _: &Path, _: &NbdUri, then: FenceDone) {
        let due = clock::now() + Nanos(1_000_000);
        lock_mutex(&self.fences).push(RunningFenceCommand { server: self.sockets.server, due, then });
    }
}

fn server_socket_path(server: usize) -> PathBuf {
    format!("/n{server}").into()
}

impl NbdClientWorld {
    pub(super) fn new(plan: &RunPlan) -> Result<NbdClientWorld, Violation> {
        let without = plan.without;
        let mut build = SimRng::new(plan.seed, RngStream::Build);
        let count = plan.cores.unwrap_or(build.pick(&[1, 1, 2, 2, 3]));
        let (mut servers, mut says, mut disks) = (Vec::new(), Vec::new(), Vec::new());
        for export in 0..build.pick(&[1, 1, 2]) {
            let long = !without.has(DisturbanceClass::Long) && build.one_in(3);
            let sectors = 8 * if long { build.between(128, 300) } else { build.between(8, 32) };
            says.push(ExportDescription::draw(&mut build, sectors, without));
            disks.push(ServerDisk::new(export, sectors));
            for _ in 0..build.pick(&[1, 2, 2, 2, 3, 3]) {
                servers.push(SimServer::new(export, build.pick(&[2_000, 50_000, 1_000_000])));
            }
        }
        let mut net = SimNetwork::new(SimRng::new(plan.seed, RngStream::SimNetwork));
        net.cuts = !without.has(DisturbanceClass::Cuts);
        net.fails = if without.has(DisturbanceClass::Lost) { 0 } else { build.pick(&[0, 500, 3000]) };
        let silence = SilentServerPolicy {
            deadline: match build.pick(&[None, Some(200), Some(200), Some(3_000)]) {
                None => ReplyDeadlineSetting::Never,
                Some(ms) => ReplyDeadlineSetting::After(Nanos::from_millis(ms)),
            },
            fence: match build.below(3) {
                0 => ServerStoppedProof::Closed,
                1 => ServerStoppedProof::Wait(SELF_FENCED),
                _ => ServerStoppedProof::Exec("/fence".into()),
            },
        };
        // With `fence=closed` only a close proves a connection dead, so writes of a connection that
        // timed out would wait forever.
        net.gives_up = silence.fence != ServerStoppedProof::Closed;
        let manner = LoadProfile {
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
        let mut world = NbdClientWorld {
            shared: Arc::new(Mutex::new(shared)),
            now: Nanos(1_000_000_000),
            core_set: ProcessCores::new(count).map_err(|e| e.to_string())?,
            cores: Vec::new(),
            net: Rc::new(RefCell::new(net)),
            down: vec![BTreeSet::new(); servers.len()],
            shaken: vec![Nanos(0); servers.len()],
            last_reply_at: vec![Nanos(0); servers.len()],
            greeted: BTreeSet::new(),
            answered: BTreeSet::new(),
            attempts: vec![vec![ConnectAttempts::default(); servers.len()]; count],
            servers,
            says,
            disks,
            devices: Vec::new(),
            paths: Vec::new(),
            conns: Vec::new(),
            callers: Vec::new(),
            fences: RunningFenceCommands::default(),
            silence,
            seen: 0,
            topic: DeviceId::new(),
            manner,
            schedule: SimRng::new(plan.seed, RngStream::Schedule),
            control: SimRng::new(plan.seed, RngStream::Control),
            chance: SimRng::new(plan.seed, RngStream::Disks),
            step: 0,
            moved_at: 0,
            rest_at: 500 + build.span(1500),
            calm: true,
            alone_until: None,
            rough: build.pick(&[40, 150, 600]),
            spared: build.pick(&[8, 8, 1]),
            turns: 0,
            base: udm_buf::slab_count::thread_live_slab_bytes(),
            counts: NbdClientCounts::default(),
            _lines: log_capture::capture_log("udm_backends::nbd"),
            plan: plan.clone(),
        };
        world.boot(&mut build)?;
        Ok(world)
    }

    /// Creates the cores, the devices and the front ends.
    fn boot(&mut self, build: &mut SimRng) -> Result<(), Violation> {
        self.set_turn(None);
        let latency = build.pick(&[100, 10_000, 1_000_000]);
        for id in 0..self.attempts.len() {
            self.cores.push(SteppedRingCore::new(&self.core_set, id, &self.net, latency, &mut self.schedule));
        }
        let dialled = self.net.borrow().dialled.clone();
        for (server, of) in self.servers.iter().enumerate() {
            let word = format!("nbd+unix:///?socket={}", server_socket_path(server).display());
            let Ok(DeviceUri::Nbd(mut uri)) = uri::parse_device_uri(&word) else {
                return Err(format!("no URI: {word}"));
            };
            uri.silence = self.silence.clone();
            // The servers of an export share one disk with one cache. So a flush on any connection
            // covers the writes of all connections, whether the servers announce this or not. The
            // paths need the option for it.
            let several = self.servers.iter().filter(|other| other.export == of.export).count() > 1;
            uri.multi_conn = several && self.says[of.export].flags.contains(ExportFlags::SEND_FLUSH);
            let sockets = SimSockets { dialled: dialled.clone(), server };
            let sockets = Box::new(SimSocketFactory { sockets, fences: self.fences.clone() });
            let export = self.says[of.export].export();
            self.paths.push(create_simulated_nbd_device(
                uri,
                ServerAddress::Unix(server_socket_path(server)),
                export,
                sockets,
            ));
        }
        for export in 0..self.says.len() {
            let paths: Vec<usize> =
                (0..self.servers.len()).filter(|&s| self.servers[s].export == export).collect();
            let alone = paths.len() == 1 && build.one_in(2);
            let holds = !alone && build.below(3) > 0;
            let used = match alone {
                true => DeviceOverExport {
                    device: self.paths[paths[0]].clone(),
                    mapped: None,
                    change: None,
                    checks: false,
                },
                false => self.multipath(export, &paths, holds, build)?,
            };
            let limits = used.device.limits();
            self.devices.push(used);
            lock_front_end_state(&self.shared).model.exports.push(ExportModel::new(export, limits, holds));
            self.resume(export)?;
            // A table has its limits only when it is live.
            let limits = self.devices[export].device.limits();
            let mut export_of = ExportModel::new(export, limits, holds);
            export_of.late = self.silence.deadline != ReplyDeadlineSetting::Never;
            lock_front_end_state(&self.shared).model.exports[export] = export_of;
        }
        for core in 0..self.cores.len() {
            let (shared, manner, topic) = (self.shared.clone(), self.manner, self.topic);
            let devices: Vec<_> = self.devices.iter().map(|used| used.device.clone()).collect();
            let make = move || Box::new(SimFrontEnd::new(shared, manner, devices, topic)) as _;
            self.core_set.attach(CoreId(core as u16), Box::new(make));
        }
        self.calm = false;
        Ok(())
    }

    fn multipath(
        &self,
        export: usize,
        paths: &[usize],
        holds: bool,
        build: &mut SimRng,
    ) -> Result<DeviceOverExport, Violation> {
        let wrong = |e: &dyn std::fmt::Display| format!("d{export}: {e}");
        let features = if holds { "1 queue_if_no_path" } else { "0" };
        let selector =
            build.pick(&["round-robin", "queue-length", "service-time", "historical-service-time"]);
        let sectors = self.says[export].size / 512;
        let groups = if build.one_in(3) { paths.chunks(1).collect() } else { vec![paths] };
        let mut words = format!("0 {sectors} multipath {features} 0 {} 1", groups.len());
        for group in groups {
            words += &format!(" {selector} 0 {} 0", group.len());
            group.iter().for_each(|path| words += &format!(" n{path}"));
        }
        let number = DevNo { major: 253, minor: export as u32 };
        let mapped = MappedDevice::new(&format!("d{export}"), None, number).map_err(|e| wrong(&e))?;
        let checks = build.one_in(2);
        let interval = Nanos::from_millis(build.between(50, 2000));
        let settings = MultipathSettings {
            polling_interval: interval,
            // Long, because a core wakes for each check while the world is quiescent.
            max_polling_interval: Nanos(60_000_000_000),
            ..MultipathSettings::every(1)
        };
        let paths = checks.then(|| Arc::new(settings));
        PathMaintenanceSettings { paths, ..PathMaintenanceSettings::default() }.set(&mapped);
        let lines = udm_wire::table::parse_table(&words).map_err(|e| wrong(&e))?;
        let mut names = NumberedPathResolver { letter: 'n', paths: self.paths.clone() };
        let table =
            Table::build(udm_targets::TARGETS, &lines, &mut names, &TemporaryCoreIo, self.cores.len())
                .map_err(|e| wrong(&e))?;
        mapped.load(table).map_err(|e| wrong(&e))?;
        lock_front_end_state(&self.shared).say(format!("d{export}: {words}"));
        Ok(DeviceOverExport { device: mapped.clone(), mapped: Some(mapped), change: None, checks })
    }

    fn resume(&mut self, device: usize) -> Result<(), Violation> {
        let Some(mapped) = self.devices[device].mapped.clone() else { return Ok(()) };
        let change = RunningDeviceChange::start(|wake| mapped.resume(wake));
        let change = change.map_err(|e| format!("d{device}: {e}"))?;
        self.devices[device].change = Some(change);
        self.step_until("a device that is resumed", |world| world.devices[device].change.is_none())
    }

    pub(super) fn counts(&self) -> NbdClientCounts {
        let (net, shared) = (self.net.borrow(), lock_front_end_state(&self.shared));
        NbdClientCounts {
            steps: self.step,
            requests: shared.model.requests,
            errors: shared.model.errors,
            compared: shared.model.compared,
            cuts: net.cut,
            failed: net.failed,
            lost: net.lost,
            full: net.full,
            simulated: self.now.0,
            hash: CombinedRunHash(shared.trace.hash()),
            ..self.counts
        }
    }

    pub(super) fn say(&self, text: impl Into<String>) {
        lock_front_end_state(&self.shared).say(text);
    }

    /// Sets the clocks for a turn of core `c`, or of the control side.
    pub(super) fn set_turn(&mut self, c: Option<usize>) {
        // All turns have different times.
        self.now = self.now + Nanos(1);
        clock::set_simulated_clock(self.now, c.map_or(Nanos(0), |c| self.cores[c].spent));
    }

    /// Maximum memory of udm in bytes, without the memory of requests. A lane has up to five
    /// connections, each with two buffers of 256 KiB in use and 1 MiB kept. A front end keeps the
    /// memory of its profile.
    pub(super) fn memory_max(&self) -> i64 {
        // A checker has its own lanes.
        let lanes = self.servers.len() * (self.cores.len() + 1);
        let requests = self.manner.depth.max(4) * self.devices.len() * (1 << 20);
        (lanes * 5 * (1536 << 10) + self.cores.len() * (self.manner.keep + requests + 4096)) as i64
    }
}
