//! A world of the NBD client: cores with lanes of exports, and the servers. It runs on one thread
//! in an order drawn from a seed.

use super::conn::ServerConn;
use super::counts::NbdClientCounts;
use super::servers::{ExportDescription, SimServer};
use crate::counts::CombinedRunHash;
use crate::environment::lock_mutex;
use crate::model::Violation;
use crate::nbd::clock;
use crate::nbd::net::{SimNetwork, SimSockets};
use crate::plan::{DisturbanceClass, RunPlan};
use crate::remote_disk::disk::ServerDisk;
use crate::remote_disk::machine::{MachineSettings, RemoteDiskMachine};
use crate::remote_disk::run::RemoteDiskWorld;
use crate::remote_disk::shared::lock_front_end_state;
use crate::rng::{RngStream, SimRng};
use rustix::net::SocketAddrAny;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use udm_backends::nbd::{
    FenceDone, NbdSocketAndFenceOps, ServerAddress, SocketOps, create_simulated_nbd_device,
};
use udm_core::Nanos;
use udm_targets::multipath::PathWatchOptions;
use udm_wire::nbd::ExportFlags;
use udm_wire::uri::{self, DeviceUri, NbdUri, ReplyDeadlineSetting, ServerStoppedProof, SilentServerPolicy};

/// Time after the end of a connection from which its server executes nothing that came over it, for
/// `fence=wait`. See `actions`.
const SELF_FENCED: Nanos = Nanos(30_000_000_000);

/// The attempts of one core to connect to one server.
#[derive(Clone, Copy, Default)]
pub(super) struct ConnectAttempts {
    /// The last attempt: its connection and its time.
    pub(super) last: Option<(usize, Nanos)>,
    /// Number of consecutive attempts before the last one without an answered request.
    pub(super) failed: u32,
}

/// A simulated world of the NBD client.
pub struct NbdClientWorld {
    pub(super) machine: RemoteDiskMachine,
    pub(super) servers: Vec<SimServer>,
    /// Description of each export by its servers; `disks` has its disk.
    pub(super) says: Vec<ExportDescription>,
    pub(super) disks: Vec<ServerDisk>,
    pub(super) conns: Vec<ServerConn>,
    /// Running fence commands.
    pub(super) fences: RunningFenceCommands,
    /// The settings of the paths for silent servers.
    pub(super) silence: SilentServerPolicy,
    /// Connect attempts, by core and server.
    pub(super) attempts: Vec<Vec<ConnectAttempts>>,
    /// Time of the last completed handshake with each server.
    pub(super) handshake_at: Vec<Nanos>,
    /// Time at which each server last had answered all writes of an abandoned connection.
    pub(super) last_reply_at: Vec<Nanos>,
    /// Connections whose server has sent the whole handshake.
    pub(super) handshaken: BTreeSet<usize>,
    /// Connections on which a request was answered.
    pub(super) answered: BTreeSet<usize>,
    /// One of this many power cuts is performed.
    pub(super) spared: u64,
    pub(super) counts: NbdClientCounts,
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
        let settings = MachineSettings {
            cores: count,
            paths: servers.len(),
            letter: 'n',
            net,
            fault_interval: [40, 150, 600],
            log: "udm_backends::nbd",
        };
        let machine = RemoteDiskMachine::new(plan, settings, &mut build)?;
        let mut world = NbdClientWorld {
            machine,
            handshake_at: vec![Nanos(0); servers.len()],
            last_reply_at: vec![Nanos(0); servers.len()],
            handshaken: BTreeSet::new(),
            answered: BTreeSet::new(),
            attempts: vec![vec![ConnectAttempts::default(); servers.len()]; count],
            servers,
            says,
            disks,
            conns: Vec::new(),
            fences: RunningFenceCommands::default(),
            silence,
            spared: build.pick(&[8, 8, 1]),
            counts: NbdClientCounts::default(),
        };
        world.boot(&mut build)?;
        Ok(world)
    }

    /// Creates the cores, the devices and the front ends.
    fn boot(&mut self, build: &mut SimRng) -> Result<(), Violation> {
        self.machine.add_cores(self.attempts.len(), build);
        let dialled = self.machine.net.borrow().dialled.clone();
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
            self.machine.paths.push(create_simulated_nbd_device(
                uri,
                ServerAddress::Unix(server_socket_path(server)),
                export,
                sockets,
            ));
        }
        let is_late = self.silence.deadline != ReplyDeadlineSetting::Never;
        for export in 0..self.says.len() {
            let paths: Vec<usize> =
                (0..self.servers.len()).filter(|&s| self.servers[s].export == export).collect();
            let sectors = self.says[export].size / 512;
            let draw_watch = |_: &mut SimRng| PathWatchOptions::default();
            self.add_device((export, sectors), &paths, is_late, draw_watch, build)?;
        }
        self.machine.attach_front_ends();
        self.machine.calm = false;
        Ok(())
    }

    pub(super) fn counts(&self) -> NbdClientCounts {
        let (net, shared) = (self.machine.net.borrow(), lock_front_end_state(&self.machine.shared));
        NbdClientCounts {
            steps: self.machine.step,
            requests: shared.model.requests,
            errors: shared.model.errors,
            compared: shared.model.compared,
            cuts: net.cut,
            failed: net.failed,
            lost: net.lost,
            called_off: self.machine.called_off,
            rests: self.machine.rests,
            memory: self.machine.memory,
            full: net.full,
            simulated: self.machine.now.0,
            hash: CombinedRunHash(shared.trace.hash()),
            ..self.counts
        }
    }

    /// Maximum memory of udm in bytes, without the memory of requests. A lane has up to five
    /// connections, each with two buffers of 256 KiB in use and 1 MiB kept. A front end keeps the
    /// memory of its profile.
    pub(super) fn memory_max(&self) -> i64 {
        // A checker has its own lanes.
        let lanes = self.servers.len() * (self.machine.cores.len() + 1);
        let requests = self.machine.profile.depth.max(4) * self.machine.devices.len() * (1 << 20);
        (lanes * 5 * (1536 << 10) + self.machine.cores.len() * (self.machine.profile.keep + requests + 4096))
            as i64
    }
}
