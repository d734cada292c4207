//! udm's own NVMe/TCP target as the other end: its cores, its disk, and the wires to it.
//!
//! The process can be stopped, and the network can be cut off, break at any byte, or flip bits
//! where digests protect them. A command at the disk needs less than the quiesce time. So a stop is
//! short while commands are at the disk: the target trusts in this.

use super::description::NamespaceDescription;
use super::world::SUBSYSTEM;
use crate::environment::lock_mutex;
use crate::model::Violation;
use crate::nbd::net::SimNetwork;
use crate::nbd::ring_core::SteppedRingCore;
use crate::remote_disk::disk::ServerDisk;
use crate::remote_disk::shared::{FrontEndSharedStateRef, lock_front_end_state};
use crate::rng::{RngStream, SimRng};
use crate::stamp;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use udm_core::{
    Batch, Bio, BioFlags, Cx, Device, DeviceControlError, DeviceId, Lane, Limits, Nanos, Op, Sectors, Status,
};
use udm_frontends::nbd::{Export, Exports};
use udm_frontends::nvme::{NvmeServer, NvmeServerOptions};
use udm_runtime::ProcessCores;
use udm_wire::nvme::AnaState;

/// The quiesce time of the target, and the longest time of a request at its disk.
const QUIESCE_MS: u16 = 2000;
const LONGEST: u64 = 1_200_000_000;
/// The longest stop while commands are at the disk.
const SHORT_STOP: Nanos = Nanos::from_millis(50);

/// Maximum number of bytes that a wire keeps on their way.
const WIRE_MAX: usize = 64 << 10;

/// State of the disk that the lanes of the target share.
pub(super) struct OwnDiskState {
    content: Arc<Mutex<ServerDisk>>,
    shared: FrontEndSharedStateRef,
    /// Index of the namespace.
    namespace: usize,
    limits: Limits,
    chance: SimRng,
    /// One of this many requests fails; 0 for none.
    fails: u64,
    in_flight: usize,
    calm: bool,
}

/// Where a target of udm is in the world.
pub(super) struct OwnTargetPlace {
    pub(super) target: usize,
    pub(super) namespace: usize,
    /// One of this many requests at its disk fails; 0 for none.
    pub(super) fails: u64,
}

/// udm's own target.
pub(super) struct OwnTarget {
    core_set: Arc<ProcessCores>,
    pub(super) cores: Vec<SteppedRingCore>,
    server: Option<NvmeServer>,
    /// The device of the disk.
    device: DeviceId,
    disk: Arc<Mutex<OwnDiskState>>,
}

/// A connection between the initiator and the target, each with its own end in the network.
pub(super) struct Wire {
    /// Index of the target.
    pub(super) target: usize,
    pub(super) initiator_link: usize,
    pub(super) target_link: usize,
    /// Bytes that each end has sent.
    sent: [u64; 2],
    /// The target learns that the initiator has closed the connection.
    notices_close: bool,
    /// One of this many moves flips a bit; 0 for none.
    flips: u64,
    pub(super) next: Nanos,
    pub(super) is_over: bool,
}

impl OwnTarget {
    pub(super) fn new(
        OwnTargetPlace { target, namespace, fails }: OwnTargetPlace,
        description: &NamespaceDescription,
        content: &Arc<Mutex<ServerDisk>>,
        shared: &FrontEndSharedStateRef,
        net: &Rc<RefCell<SimNetwork>>,
        build: &mut SimRng,
    ) -> Result<OwnTarget, Violation> {
        let failed = |error: std::io::Error| error.to_string();
        let block = description.block * udm_core::SECTOR_SIZE;
        let limit = |has| if has { Sectors(1 << 12) } else { Sectors::ZERO };
        let limits = Limits {
            logical_block: block as u32,
            physical_block: block as u32,
            io_min: block as u32,
            write_cache: description.write_cache,
            fua: true,
            max_discard: limit(description.discard),
            max_write_zeroes: limit(description.write_zeroes),
            ..Limits::new(Sectors(description.sectors))
        };
        let disk = OwnDiskState {
            content: Arc::clone(content),
            shared: Arc::clone(shared),
            namespace,
            limits,
            chance: SimRng::new(build.any(), RngStream::Disks),
            fails,
            in_flight: 0,
            calm: true,
        };
        let disk = Arc::new(Mutex::new(disk));
        let count = build.pick(&[1, 1, 2]);
        let core_set = ProcessCores::new(count).map_err(failed)?;
        let latency = build.pick(&[100, 10_000, 1_000_000]);
        let cores = (0..count).map(|id| SteppedRingCore::new(&core_set, id, net, latency, build)).collect();
        let exports = Arc::new(Exports::new());
        let id = DeviceId::new();
        let device = Arc::new(OwnDisk { id, state: Arc::clone(&disk) });
        let name = format!("disk{namespace}");
        let export = Export::new(name, "", false, device).map_err(|error| error.to_string())?;
        exports.add(export).map_err(|error| error.to_string())?;
        let options = NvmeServerOptions {
            subsystem: SUBSYSTEM.into(),
            last_controller: 1000 * target as u16,
            quiesce_time_ms: QUIESCE_MS,
            instance_key: [target as u8; 32],
            ..NvmeServerOptions::default()
        };
        let server = NvmeServer::stepped(&core_set, &exports, options).map_err(failed)?;
        Ok(OwnTarget { core_set, cores, server: Some(server), device: id, disk })
    }

    /// The longest stop that the disk permits now; `None` if any is permitted.
    pub(super) fn stop_max(&self) -> Option<Nanos> {
        (lock_mutex(&self.disk).in_flight > 0).then_some(SHORT_STOP)
    }

    /// Accepts a connection. Returns the target's end in the network.
    pub(super) fn accept(&self, net: &mut SimNetwork, room: usize) -> Result<usize, Violation> {
        let server = self.server.as_ref().ok_or("the target has ended")?;
        let (link, fd) = net.connect(room).map_err(|error| error.to_string())?;
        server.adopt(fd).map_err(|error| error.to_string())?;
        Ok(link)
    }

    pub(super) fn set_ana_state(&self, state: AnaState) {
        if let Some(server) = &self.server {
            server.set_ana_state(None, None, state).expect("all ports and devices");
        }
    }

    /// Adds sectors to the disk, and tells the target.
    pub(super) fn grow(&self, sectors: u64) {
        let mut disk = lock_mutex(&self.disk);
        disk.limits.size += Sectors(sectors);
        drop(disk);
        self.server.iter().for_each(|server| server.refresh_hook()(self.device));
    }

    /// Begins to stop the target.
    pub(super) fn stop(&mut self) {
        self.core_set.end();
        self.core_set.stop(Nanos(60_000_000_000));
    }

    /// Drops the target, whose cores have ended.
    pub(super) fn clear(&mut self) {
        self.cores.clear();
        self.server = None;
    }

    /// With `calm`, requests are fast and do not fail.
    pub(super) fn set_calm(&self, calm: bool) {
        lock_mutex(&self.disk).calm = calm;
    }

    /// Number of requests at the disk.
    pub(super) fn in_flight(&self) -> usize {
        lock_mutex(&self.disk).in_flight
    }
}

impl Wire {
    pub(super) fn new(
        target: usize,
        (initiator_link, target_link): (usize, usize),
        (notices_close, flips): (bool, u64),
        now: Nanos,
    ) -> Wire {
        Wire {
            target,
            initiator_link,
            target_link,
            sent: [0, 0],
            notices_close,
            flips,
            next: now,
            is_over: false,
        }
    }

    /// Time of the next move.
    pub(super) fn reason(&self, net: &SimNetwork) -> Nanos {
        let (a, b) = (&net.links[self.initiator_link], &net.links[self.target_link]);
        let moves =
            !a.down.is_empty() && b.up.len() < WIRE_MAX || !b.down.is_empty() && a.up.len() < WIRE_MAX;
        let ends = a.broken || b.broken || b.is_gone() || b.half_shut;
        let is_closed = (a.shut || a.half_shut) && self.notices_close;
        match !self.is_over && (moves || ends || is_closed) {
            true => self.next,
            false => Nanos::NEVER,
        }
    }

    /// Moves bytes, or the end of the connection. Returns true if a bit was flipped.
    pub(super) fn turn(&mut self, net: &mut SimNetwork, chance: &mut SimRng, now: Nanos) -> bool {
        self.next = now + Nanos(1 + chance.span(20_000));
        let (a, b) = (&net.links[self.initiator_link], &net.links[self.target_link]);
        let is_broken = a.broken || b.broken;
        let is_lost = (a.shut || a.half_shut) && (self.notices_close || b.is_gone());
        if is_broken || is_lost || b.is_gone() || b.half_shut {
            let is_reset = is_broken || chance.one_in(2);
            // Bytes on their way arrive before an orderly end.
            if !is_reset {
                self.carry(0, net, chance);
                self.carry(1, net, chance);
            }
            net.leave(self.initiator_link, true, is_reset);
            net.leave(self.target_link, true, is_reset);
            self.is_over = true;
            return false;
        }
        if a.shut {
            net.links[self.target_link].down.clear();
        }
        self.carry(0, net, chance) | self.carry(1, net, chance)
    }

    /// Moves bytes of the initiator (0) or of the target (1).
    fn carry(&mut self, side: usize, net: &mut SimNetwork, chance: &mut SimRng) -> bool {
        let links = [self.initiator_link, self.target_link];
        let (from, to) = (links[side], links[1 - side]);
        let room = WIRE_MAX.saturating_sub(net.links[to].up.len());
        let most = net.links[from].down.len().min(room) as u64;
        if most == 0 {
            return false;
        }
        let is_cut = net.is_cutting() && chance.one_in(2);
        let n = if is_cut { chance.between(1, most) } else { most };
        let mut bytes: Vec<u8> = net.links[from].down.drain(..n as usize).collect();
        // The first PDU of each side, of 128 bytes, has no digest.
        let flips = self.sent[side] >= 128 && !net.calm && chance.one_in(self.flips);
        if flips {
            let at = chance.below(n) as usize;
            bytes[at] ^= 1 << chance.below(8);
        }
        self.sent[side] += n;
        net.links[to].up.extend(bytes);
        flips
    }
}

/// The disk as a device of the target.
struct OwnDisk {
    id: DeviceId,
    state: Arc<Mutex<OwnDiskState>>,
}

impl Device for OwnDisk {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, _: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(OwnDiskLane { state: Arc::clone(&self.state), requests: Vec::new() }))
    }

    fn limits(&self) -> Limits {
        lock_mutex(&self.state).limits
    }
}

struct DiskRequest {
    bio: Box<Bio>,
    lands: Option<Nanos>,
    completes: Nanos,
    status: Status,
}

struct OwnDiskLane {
    state: Arc<Mutex<OwnDiskState>>,
    requests: Vec<DiskRequest>,
}

impl OwnDiskState {
    /// Draws when a request lands and completes, and its result.
    fn draw(&mut self, now: Nanos) -> (Option<Nanos>, Nanos, Status) {
        let most = match self.chance.below(16) {
            _ if self.calm => 1_000,
            0 => LONGEST,
            1..4 => LONGEST / 20,
            _ => 200_000,
        };
        let completes = self.chance.between(1, most);
        let lands = now + Nanos(self.chance.below(completes + 1));
        let mut status = Status::Ok;
        if !self.calm && self.chance.one_in(self.fails) {
            status = self.chance.pick(&[Status::Medium, Status::Transport, Status::IoErr, Status::NoSpace]);
            let mut shared = lock_front_end_state(&self.shared);
            shared.model.exports[self.namespace].said_no += 1;
            shared.model.exports[self.namespace].trouble(now);
        }
        let lands = (status.is_ok() || self.chance.one_in(2)).then_some(lands);
        (lands, now + Nanos(completes), status)
    }

    fn land(&mut self, bio: &mut Bio) {
        let range = (bio.sector.0, bio.sector.0 + bio.sectors.0);
        let mut stamps = Vec::new();
        if bio.op == Op::Write {
            stamp::for_each_sector_stamp(&bio.data, |_, found| stamps.push(found.unwrap_or(u64::MAX)));
        }
        let durable = bio.flags.contains(BioFlags::FUA) || !self.limits.write_cache;
        let mut disk = lock_mutex(&self.content);
        let read = disk.carry_out(bio.op, range, &stamps, durable, &mut self.chance);
        if bio.op == Op::Read {
            bio.data.copy_from(&super::pdus::bytes_of(&read));
        }
    }
}

impl Lane for OwnDiskLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let mut state = lock_mutex(&self.state);
        for bio in batch.drain(..) {
            let (lands, completes, status) = state.draw(cx.now());
            state.in_flight += 1;
            self.requests.push(DiskRequest { bio, lands, completes, status });
        }
        cx.wake_now();
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let now = cx.now();
        let mut state = lock_mutex(&self.state);
        for request in &mut self.requests {
            if request.lands.is_some_and(|at| at <= now) {
                request.lands = None;
                state.land(&mut request.bio);
            }
        }
        for mut request in self.requests.extract_if(.., |request| request.completes <= now) {
            state.in_flight -= 1;
            request.bio.end_with(request.status);
            done.push(request.bio);
        }
        let next = self.requests.iter().map(|request| request.lands.unwrap_or(request.completes)).min();
        next.into_iter().for_each(|at| cx.wake_at(at));
    }
}
