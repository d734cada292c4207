//! A world of the NBD server: cores, disks, devices, the server and its clients. It runs on one
//! thread in an order drawn from a seed.

use super::client::SimNbdClient;
use super::clock;
use super::counts::NbdServerCounts;
use super::handshake::export_name;
use super::model::{ExportedDeviceModel, NbdServerModel, ServerErrorReasons};
use super::net::SimNetwork;
use super::ring_core::{NumberedPathResolver, RunningDeviceChange, SteppedRingCore};
use crate::counts::CombinedRunHash;
use crate::disk::SimDisk;
use crate::environment::{Env, SharedEnv, SimPathState, lock_environment};
use crate::model::Violation;
use crate::path::SimPath;
use crate::plan::{DisturbanceClass, RunPlan};
use crate::rng::{RngStream, SimRng};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use udm_core::{DevNo, Nanos};
use udm_dm::{MappedDevice, Table};
use udm_frontends::nbd::{Export, Exports, NbdServer, NbdServerLimits};
use udm_runtime::{ProcessCores, TemporaryCoreIo};

/// A device with an export, while the power is on.
pub(super) struct ExportedDevice {
    /// The table, over the paths with the numbers of its disks.
    pub(super) table: String,
    pub(super) mapped: Option<Arc<MappedDevice>>,
    pub(super) change: Option<RunningDeviceChange>,
    pub(super) suspended: bool,
}

/// A simulated world of the NBD server.
pub struct NbdServerWorld {
    pub(super) plan: RunPlan,
    pub(super) env: SharedEnv,
    pub(super) paths: Vec<Arc<SimPath>>,
    pub(super) devices: Vec<ExportedDevice>,
    /// Device and read-only flag of each export.
    pub(super) exports: Vec<(usize, bool)>,
    pub(super) list: Arc<Exports>,
    pub(super) core_set: Arc<ProcessCores>,
    pub(super) server: Option<NbdServer>,
    pub(super) options: NbdServerLimits,
    pub(super) cores: Vec<SteppedRingCore>,
    pub(super) net: Rc<RefCell<SimNetwork>>,
    pub(super) clients: Vec<SimNbdClient>,
    pub(super) model: NbdServerModel,
    pub(super) schedule: SimRng,
    pub(super) work: SimRng,
    pub(super) control: SimRng,
    pub(super) step: u64,
    /// Step in which a byte was last sent to or by a client.
    pub(super) moved_at: u64,
    pub(super) count: usize,
    pub(super) clients_max: usize,
    /// Longest request in bytes.
    pub(super) longest: u64,
    pub(super) depth: usize,
    pub(super) pause: u64,
    pub(super) latency: u64,
    /// True if requests may fail and paths may hang.
    pub(super) fails: bool,
    pub(super) resting: bool,
    pub(super) ending: bool,
    pub(super) dead: bool,
    pub(super) restores: Vec<(Nanos, usize)>,
    pub(super) resumes: Vec<(Nanos, usize)>,
    pub(super) rest_at: u64,
    /// Memory in use before the server was created, in bytes.
    pub(super) base: i64,
    /// Number of turns of cores.
    pub(super) turns: u64,
    pub(super) counts: NbdServerCounts,
}

impl NbdServerWorld {
    pub(super) fn new(plan: &RunPlan) -> Result<NbdServerWorld, Violation> {
        let mut build = SimRng::new(plan.seed, RngStream::Build);
        let count = plan.cores.unwrap_or(build.pick(&[1, 1, 2, 2, 3]));
        let unit: u64 = build.pick(&[1, 8, 8, 512, 512]);
        let fails = build.one_in(3) && !plan.without.has(DisturbanceClass::Errors);
        let mut env = Env::new(plan.seed, plan.keep_events);
        (env.torn, env.lags) = (!plan.without.has(DisturbanceClass::Torn), false);
        let (mut devices, mut shown) = (Vec::new(), Vec::new());
        let long = unit == 512 && !plan.without.has(DisturbanceClass::Long) && build.one_in(2);
        for device in 0..build.pick(&[1, 1, 2]) {
            let block: u64 = build.pick(&[1, 1, 8]);
            // Large enough for long requests, and small enough that requests overlap.
            let sectors = match unit {
                1 => 8 * build.between(1, 3),
                8 => 8 * build.between(2, 16),
                _ if long => 8 * build.between(128, 1024),
                _ => 8 * build.between(8, 64),
            };
            let (first, kind) = (env.disks.len(), build.below(4));
            let disks = if kind == 0 { 2 } else { 1 };
            let most = build.pick(&[u64::from(u32::MAX), 64, 8 * block.max(1)]);
            let discards = !plan.without.has(DisturbanceClass::Trim) && build.below(3) > 0;
            let zeroes = build.pick(&[0, u64::from(u32::MAX), 16]);
            let (volatile, fua) = (build.below(4) > 0, build.one_in(2));
            for disk in first..first + disks {
                let mut made = SimDisk::new(disk, sectors);
                made.log = true;
                (0..sectors).for_each(|sector| made.blank(sector));
                (made.volatile, made.fua, made.block) = (volatile, fua, block);
                made.max = [most, if discards { most } else { 0 }, zeroes];
                made.start();
                made.error_one_in = if fails { build.pick(&[0, 100, 1000]) } else { 0 };
                env.disks.push(made);
                let latency = build.pick(&[2_000, 20_000, 200_000, 2_000_000]);
                let mut path = SimPathState::healthy(disk, latency);
                if !plan.without.has(DisturbanceClass::Full) {
                    path.room = build.pick(&[usize::MAX, usize::MAX, 2, 16]);
                }
                path.prompt = !plan.without.has(DisturbanceClass::Prompt) && build.one_in(3);
                env.paths.push(path);
            }
            let table = match kind {
                0 => format!("0 {sectors} linear p{first} 0\n{sectors} {sectors} linear p{} 0", first + 1),
                1 => format!("0 {sectors} linear p{first} 0\n{sectors} {sectors} zero"),
                _ => format!("0 {sectors} linear p{first} 0"),
            };
            let size = if kind < 2 { 2 * sectors } else { sectors } * 512;
            let zero_from = if kind == 1 { sectors * 512 } else { size };
            shown.push(ExportedDeviceModel { size, zero_from, block: block * 512, discards });
            devices.push(ExportedDevice { table, mapped: None, change: None, suspended: false });
            let _ = device;
        }
        let mut exports: Vec<(usize, bool)> = (0..devices.len()).map(|device| (device, false)).collect();
        if build.one_in(2) {
            exports.push((build.below(devices.len() as u64) as usize, build.one_in(2)));
        }
        let longest = match (unit, long) {
            (512, true) => build.pick(&[256, 1024, 2048]) << 10,
            (512, false) => 64 << 10,
            _ => 512 * unit.max(4),
        };
        let mut net = SimNetwork::new(SimRng::new(plan.seed, RngStream::SimNetwork));
        net.cuts = !plan.without.has(DisturbanceClass::Cuts);
        net.fails = if plan.without.has(DisturbanceClass::Lost) { 0 } else { build.pick(&[0, 0, 500, 3000]) };
        let options = NbdServerLimits {
            requests_max: build.pick(&[1, 4, 64, 1024]),
            bytes_max: build.pick(&[4 << 10, 64 << 10, 1 << 20, 64 << 20]),
            core_bytes_max: build.pick(&[1 << 10, 512 << 10, 4 << 20, 256 << 20]),
            stall_max: Duration::from_millis(build.pick(&[500, 5000])),
            ..NbdServerLimits::default()
        };
        let all = env.paths.len();
        let env = Arc::new(Mutex::new(env));
        let paths = (0..all).map(|p| Arc::new(SimPath::new(&env, p))).collect();
        let mut world = NbdServerWorld {
            paths,
            devices,
            exports,
            list: Arc::new(Exports::new()),
            core_set: ProcessCores::new(count).map_err(|e| e.to_string())?,
            server: None,
            options,
            cores: Vec::new(),
            net: Rc::new(RefCell::new(net)),
            clients: Vec::new(),
            model: NbdServerModel::new(shown, unit),
            schedule: SimRng::new(plan.seed, RngStream::Schedule),
            work: SimRng::new(plan.seed, RngStream::Work),
            control: SimRng::new(plan.seed, RngStream::Control),
            step: 0,
            moved_at: 0,
            count,
            clients_max: build.pick(&[1, 2, 4, 8]),
            longest,
            depth: plan.depth.unwrap_or(build.pick(&[1, 4, 16, 32])),
            pause: build.pick(&[1_000, 30_000, 1_000_000]),
            latency: build.pick(&[100, 10_000, 1_000_000]),
            fails,
            resting: false,
            ending: false,
            dead: false,
            restores: Vec::new(),
            resumes: Vec::new(),
            rest_at: 500 + build.span(1500),
            base: udm_buf::slab_count::thread_live_slab_bytes(),
            turns: 0,
            counts: NbdServerCounts::default(),
            plan: plan.clone(),
            env,
        };
        world.boot()?;
        Ok(world)
    }

    /// Creates the cores, the devices and the server, as after power-on.
    pub(super) fn boot(&mut self) -> Result<(), Violation> {
        let failed = |e: std::io::Error| e.to_string();
        self.base = udm_buf::slab_count::thread_live_slab_bytes();
        self.core_set = ProcessCores::new(self.count).map_err(failed)?;
        self.list = Arc::new(Exports::new());
        self.set_turn(None);
        for id in 0..self.count {
            let core = SteppedRingCore::new(&self.core_set, id, &self.net, self.latency, &mut self.schedule);
            self.cores.push(core);
        }
        for device in 0..self.devices.len() {
            let number = DevNo { major: 253, minor: device as u32 };
            let mapped = MappedDevice::new(&format!("d{device}"), None, number).map_err(|e| e.to_string())?;
            let words = &self.devices[device].table;
            let lines = udm_wire::table::parse_table(words).map_err(|e| format!("{words}: {e}"))?;
            let paths = self.paths.iter().map(|path| path.clone() as _).collect();
            let mut names = NumberedPathResolver { letter: 'p', paths };
            let table = Table::build(udm_targets::TARGETS, &lines, &mut names, &TemporaryCoreIo, self.count)
                .map_err(|e| format!("{words}: {e}"))?;
            mapped.load(table).map_err(|e| e.to_string())?;
            self.devices[device].mapped = Some(mapped);
            self.resume(device)?;
            self.step_until("a device that is resumed", |world| world.devices[device].change.is_none())?;
        }
        for (nth, (device, read_only)) in self.exports.clone().into_iter().enumerate() {
            let Some(mapped) = self.devices[device].mapped.clone() else { continue };
            let export = Export::new(export_name(nth), "", read_only, mapped).map_err(|e| e.to_string())?;
            self.list.add(export).map_err(|e| e.to_string())?;
        }
        let server = NbdServer::stepped(&self.core_set, self.list.clone(), self.options.clone());
        self.server = Some(server.map_err(failed)?);
        Ok(())
    }

    pub(super) fn counts(&self) -> NbdServerCounts {
        let (net, env) = (self.net.borrow(), lock_environment(&self.env));
        NbdServerCounts {
            steps: self.step,
            requests: self.model.requests,
            errors: self.model.errors,
            compared: self.model.compared,
            statuses: self.model.statuses,
            extended: self.model.extended,
            cuts: net.cut,
            failed: net.failed,
            full: net.full,
            faults: env.faults,
            simulated: env.now.0,
            hash: CombinedRunHash(env.trace.hash()),
            ..self.counts
        }
    }

    pub(super) fn say(&self, text: impl Into<String>) {
        lock_environment(&self.env).say(text);
    }

    pub(super) fn excuses(&self) -> ServerErrorReasons {
        let env = lock_environment(&self.env);
        ServerErrorReasons { faults: env.faults, ending: self.ending || self.dead }
    }

    /// Sets the clocks for a turn of core `c`, or of the control side.
    pub(super) fn set_turn(&mut self, c: Option<usize>) -> Nanos {
        let mut env = lock_environment(&self.env);
        // All turns have different times.
        env.now = env.now + Nanos(1);
        env.step = self.step;
        env.core = c.map_or(crate::trace::NO_CORE, |c| c as u16);
        clock::set_simulated_clock(env.now, c.map_or(Nanos(0), |c| self.cores[c].spent));
        env.now
    }

    /// Number of clients that consider themselves connected.
    pub(super) fn alive(&self) -> usize {
        self.clients.iter().filter(|client| !client.is_over()).count()
    }

    /// Maximum memory of the server in bytes, according to its options. One request may exceed the
    /// budget, with the longest size of this world.
    pub(super) fn memory_max(&self, connections: usize) -> i64 {
        // Buffers are powers of two. Partly covered blocks need additional reads.
        let request = (self.longest as usize + (64 << 10)).next_power_of_two();
        let per_core = self.options.core_bytes_max + request;
        (self.count * per_core + connections * (640 << 10) + self.count * 4096) as i64
    }
}
