//! What the worlds of clients of remote disks have in common: cores with lanes over a simulated
//! ring and network, and devices over the lanes.

use super::front_end::{LoadProfile, SimFrontEnd};
use super::model::RemoteDiskModel;
use super::shared::{FrontEndSharedState, FrontEndSharedStateRef, WorkloadPhase, lock_front_end_state};
use crate::counts::MaxOverRuns;
use crate::log_capture;
use crate::model::Violation;
use crate::nbd::clock;
use crate::nbd::net::SimNetwork;
use crate::nbd::ring_core::{
    NumberedPathResolver, RunningDeviceChange, SteppedRingCore, count_ring_operations,
};
use crate::plan::RunPlan;
use crate::rng::{RngStream, SimRng};
use crate::trace::{NO_CORE, Trace, TraceEventKind};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use tracing::subscriber::DefaultGuard;
use udm_core::{CoreId, DevNo, Device, DeviceId, Nanos};
use udm_dm::{MappedDevice, Table};
use udm_runtime::{CoreStateAfterStep, ProcessCores, TemporaryCoreIo};
use udm_targets::multipath::{PathMaintenanceSettings, PathWatchOptions};
use udm_wire::multipath_conf::MultipathSettings;

/// The device of a remote disk.
pub(crate) struct DeviceOverRemoteDisk {
    /// The device that front ends open.
    pub(crate) device: Arc<dyn Device>,
    /// The mapped device, if the disk is used through multipath.
    pub(crate) mapped: Option<Arc<MappedDevice>>,
    pub(crate) change: Option<RunningDeviceChange>,
    /// True if udm itself checks failed paths.
    pub(crate) checks: bool,
}

/// What a kind of world decides about its machine.
pub(crate) struct MachineSettings {
    pub(crate) cores: usize,
    /// Number of servers, which are the paths.
    pub(crate) paths: usize,
    /// First letter of the names of paths.
    pub(crate) letter: char,
    pub(crate) net: SimNetwork,
    /// Average numbers of steps between faults, of which one is drawn.
    pub(crate) fault_interval: [u64; 3],
    /// Module whose log is captured.
    pub(crate) log: &'static str,
}

/// Cores with lanes of remote disks, on one thread in an order drawn from a seed.
pub(crate) struct RemoteDiskMachine {
    pub(crate) plan: RunPlan,
    pub(crate) shared: FrontEndSharedStateRef,
    pub(crate) now: Nanos,
    pub(crate) core_set: Arc<ProcessCores>,
    pub(crate) cores: Vec<SteppedRingCore>,
    pub(crate) net: Rc<RefCell<SimNetwork>>,
    /// The paths, by server.
    pub(crate) paths: Vec<Arc<dyn Device>>,
    letter: char,
    pub(crate) devices: Vec<DeviceOverRemoteDisk>,
    /// Connects that wait for their server, with their time.
    pub(crate) pending_connects: Vec<(usize, Nanos)>,
    /// Number of connections that were seen.
    pub(crate) seen: usize,
    /// By server: the lines about its loss since its last connection.
    down: Vec<BTreeSet<String>>,
    /// Address of messages to the front ends.
    topic: DeviceId,
    pub(crate) profile: LoadProfile,
    pub(crate) schedule: SimRng,
    pub(crate) control: SimRng,
    /// Random choices of the servers.
    pub(crate) chance: SimRng,
    pub(crate) step: u64,
    pub(crate) moved_at: u64,
    pub(super) rest_at: u64,
    /// Nothing fails any more.
    pub(crate) calm: bool,
    /// End of the idle time at quiescence. Cleared when no event is left before it.
    pub(crate) idle_until: Option<Nanos>,
    /// Average number of steps between faults.
    pub(crate) fault_interval: u64,
    pub(crate) turns: u64,
    /// Time at which the last turn of a core ended, without its CPU time.
    pub(crate) ended_turn: Nanos,
    /// Failures that end a connection, as far as they are recorded.
    lost: u64,
    /// Times at which all trouble ended.
    pub(crate) rests: u64,
    /// Operations that udm has cancelled.
    pub(crate) called_off: u64,
    /// Memory of udm in bytes, at most.
    pub(crate) memory: MaxOverRuns,
    /// Memory in use before the cores were created, in bytes.
    pub(super) base: i64,
    /// Guard of the log capture, dropped at the end.
    _lines: DefaultGuard,
}

impl RemoteDiskMachine {
    pub(crate) fn new(
        plan: &RunPlan,
        settings: MachineSettings,
        build: &mut SimRng,
    ) -> Result<RemoteDiskMachine, Violation> {
        let profile = LoadProfile::draw(plan, build);
        let shared = FrontEndSharedState {
            step: 0,
            trace: Trace::new(plan.keep_events),
            model: RemoteDiskModel::default(),
            work: SimRng::new(plan.seed, RngStream::Work),
            phase: WorkloadPhase::Work,
            closed: 0,
            wrong: None,
        };
        Ok(RemoteDiskMachine {
            shared: Arc::new(Mutex::new(shared)),
            now: Nanos(1_000_000_000),
            core_set: ProcessCores::new(settings.cores).map_err(|e| e.to_string())?,
            cores: Vec::new(),
            net: Rc::new(RefCell::new(settings.net)),
            paths: Vec::new(),
            letter: settings.letter,
            devices: Vec::new(),
            pending_connects: Vec::new(),
            seen: 0,
            down: vec![BTreeSet::new(); settings.paths],
            topic: DeviceId::new(),
            profile,
            schedule: SimRng::new(plan.seed, RngStream::Schedule),
            control: SimRng::new(plan.seed, RngStream::Control),
            chance: SimRng::new(plan.seed, RngStream::Disks),
            step: 0,
            moved_at: 0,
            rest_at: 500 + build.span(1500),
            calm: true,
            idle_until: None,
            fault_interval: build.pick(&settings.fault_interval),
            turns: 0,
            ended_turn: Nanos(0),
            lost: 0,
            rests: 0,
            called_off: 0,
            memory: MaxOverRuns::default(),
            base: udm_buf::slab_count::thread_live_slab_bytes(),
            _lines: log_capture::capture_log(settings.log),
            plan: plan.clone(),
        })
    }

    /// Creates the cores.
    pub(crate) fn add_cores(&mut self, count: usize, build: &mut SimRng) {
        self.set_turn(None);
        let latency = build.pick(&[100, 10_000, 1_000_000]);
        for id in 0..count {
            self.cores.push(SteppedRingCore::new(&self.core_set, id, &self.net, latency, &mut self.schedule));
        }
    }

    /// Creates a front end on each core.
    pub(crate) fn attach_front_ends(&self) {
        for core in 0..self.cores.len() {
            let (shared, profile, topic) = (self.shared.clone(), self.profile, self.topic);
            let devices: Vec<_> = self.devices.iter().map(|used| used.device.clone()).collect();
            let make = move || Box::new(SimFrontEnd::new(shared, profile, devices, topic)) as _;
            self.core_set.attach(CoreId(core as u16), Box::new(make));
        }
    }

    /// Builds the device of disk `number`, which has these paths: one of them alone, or multipath.
    /// Returns whether it queues requests while there is no path.
    pub(super) fn build_device(
        &self,
        number: usize,
        sectors: u64,
        paths: &[usize],
        draw_watch: impl FnOnce(&mut SimRng) -> PathWatchOptions,
        build: &mut SimRng,
    ) -> Result<(DeviceOverRemoteDisk, bool), Violation> {
        let alone = paths.len() == 1 && build.one_in(2);
        let holds = !alone && build.below(3) > 0;
        if alone {
            let device = self.paths[paths[0]].clone();
            return Ok((DeviceOverRemoteDisk { device, mapped: None, change: None, checks: false }, holds));
        }
        let wrong = |e: &dyn std::fmt::Display| format!("d{number}: {e}");
        let features = if holds { "1 queue_if_no_path" } else { "0" };
        let selector =
            build.pick(&["round-robin", "queue-length", "service-time", "historical-service-time"]);
        let groups = if build.one_in(3) { paths.chunks(1).collect() } else { vec![paths] };
        let mut words = format!("0 {sectors} multipath {features} 0 {} 1", groups.len());
        for group in groups {
            words += &format!(" {selector} 0 {} 0", group.len());
            group.iter().for_each(|path| words += &format!(" {}{path}", self.letter));
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
        let watch = draw_watch(build);
        PathMaintenanceSettings { paths: checks.then(|| Arc::new(settings)), watch }.set(&mapped);
        let lines = udm_wire::table::parse_table(&words).map_err(|e| wrong(&e))?;
        let mut names = self.path_names();
        let table =
            Table::build(udm_targets::TARGETS, &lines, &mut names, &TemporaryCoreIo, self.cores.len())
                .map_err(|e| wrong(&e))?;
        mapped.load(table).map_err(|e| wrong(&e))?;
        self.say(format!("d{number}: {words}"));
        let device = mapped.clone();
        Ok((DeviceOverRemoteDisk { device, mapped: Some(mapped), change: None, checks }, holds))
    }

    fn path_names(&self) -> NumberedPathResolver {
        NumberedPathResolver { letter: self.letter, paths: self.paths.clone() }
    }

    pub(crate) fn say(&self, text: impl Into<String>) {
        lock_front_end_state(&self.shared).say(text);
    }

    /// Records a fault of disk `disk`.
    pub(crate) fn note_trouble(&self, disk: usize, text: &str) {
        let mut shared = lock_front_end_state(&self.shared);
        shared.model.exports[disk].trouble(self.now);
        shared.say(text);
    }

    /// Sets the clocks for a turn of core `c`, or of the control side.
    pub(crate) fn set_turn(&mut self, c: Option<usize>) {
        // All turns have different times.
        self.now = self.now + Nanos(1);
        clock::set_simulated_clock(self.now, c.map_or(Nanos(0), |c| self.cores[c].spent));
    }

    /// Completes operations of the rings. Returns the time of the next completion.
    pub(crate) fn advance_rings(&mut self) -> Nanos {
        let next = self.cores.iter().map(|core| core.outside.borrow_mut().go_on()).min();
        next.unwrap_or(Nanos::NEVER)
    }

    /// Records network failures as faults of all disks.
    pub(crate) fn note_failures(&mut self) {
        let (lost, now) = (self.net.borrow().lost, self.now);
        if lost > std::mem::replace(&mut self.lost, lost) {
            let mut shared = lock_front_end_state(&self.shared);
            shared.model.exports.iter_mut().for_each(|export| export.trouble(now));
        }
    }

    /// Runs a turn of core `c`. Returns the connections on which it has received and sent bytes.
    pub(crate) fn core_turn(&mut self, c: usize) -> Result<Vec<(usize, u64, u64)>, Violation> {
        self.set_turn(Some(c));
        self.turns += 1;
        let mut rest = self.cores[c].core.step();
        for _ in 0..self.schedule.below(4) {
            if rest != CoreStateAfterStep::None {
                break;
            }
            self.note_failures();
            self.set_turn(Some(c));
            rest = self.cores[c].core.step();
        }
        let now = self.now;
        self.ended_turn = now;
        let core = &mut self.cores[c];
        let took = core.end_turn(rest, now, &mut self.schedule);
        self.now = now + took;
        let wrong = core.outside.borrow_mut().wrong.take();
        wrong.map_or(Ok(()), Err)?;
        let mut shared = lock_front_end_state(&self.shared);
        shared.trace.add(now, c as u16, TraceEventKind::Turn, [core.wake.0, 0, 0, 0]);
        let mut net = self.net.borrow_mut();
        let moved = net.take_moved();
        for (l, received, sent) in &moved {
            self.moved_at = self.step;
            shared.trace.add(now, c as u16, TraceEventKind::Bytes, [*l as u64, *received, *sent, 0]);
        }
        net.adopt();
        net.look();
        Ok(moved)
    }

    /// Checks the memory of udm against its limit in bytes.
    pub(crate) fn check_memory(&mut self, max: i64) -> Result<(), Violation> {
        let live = udm_buf::slab_count::thread_live_slab_bytes() - self.base;
        self.memory.see(live.max(0) as u64);
        match live > max {
            true => Err(format!("{live} bytes of memory are allocated, the maximum is {max}")),
            false => Ok(()),
        }
    }

    /// The path that a line of the log names: its number follows `word`.
    pub(crate) fn path_of_line(line: &str, word: &str) -> Result<usize, Violation> {
        let number = line.split(word).nth(1).and_then(|rest| {
            let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            rest[..end].parse::<usize>().ok()
        });
        number.ok_or_else(|| format!("a line of no path: {line}"))
    }

    /// Checks a line about a loss or a return: a path must be reported as lost once for each
    /// `reason`, until it is connected again.
    pub(crate) fn check_loss_line(&mut self, path: usize, line: &str, reason: &str) -> Result<(), Violation> {
        let is_new = match line.strip_suffix(": connected again") {
            Some(_) => !std::mem::take(&mut self.down[path]).is_empty(),
            None => self.down[path].insert(reason.to_owned()),
        };
        match is_new {
            true => Ok(()),
            false => Err(format!("{}{path} is lost, or there again, twice: {line}", self.letter)),
        }
    }

    /// Describes the work that waits, for a person.
    pub(crate) fn waiting(&self) -> String {
        let shared = lock_front_end_state(&self.shared);
        let changing = self.devices.iter().filter(|device| device.change.is_some()).count();
        let in_flight = count_ring_operations(&self.cores);
        let (oldest, n) = (shared.model.oldest(), shared.model.in_flight());
        let states: Vec<_> =
            self.devices.iter().filter_map(|device| Some(device.mapped.as_ref()?.status_text())).collect();
        format!("{oldest} of {n}, {in_flight} operations, {changing} devices change: {}", states.join("; "))
    }

    /// Advances the clock to the time of an event.
    pub(crate) fn jump_to(&mut self, next: Nanos) {
        if next > self.now {
            self.now = next;
            let args = [next.0, 0, 0, 0];
            lock_front_end_state(&self.shared).trace.add(next, NO_CORE, TraceEventKind::Jump, args);
        }
    }

    /// Sets the phase of the front ends, and notifies them.
    pub(crate) fn set_phase(&mut self, phase: WorkloadPhase) {
        self.set_turn(None);
        lock_front_end_state(&self.shared).phase = phase;
        for core in 0..self.cores.len() {
            self.core_set.send_message(CoreId(core as u16), self.topic, Box::new(()));
        }
    }

    /// Number of requests in flight.
    pub(super) fn requests_in_flight(&self) -> usize {
        lock_front_end_state(&self.shared).model.in_flight()
    }

    /// Continues the change of `device`.
    pub(crate) fn go_on_changing(&mut self, device: usize) -> Result<(), Violation> {
        self.set_turn(None);
        let change = self.devices[device].change.as_mut();
        let Some(outcome) = change.and_then(|change| change.step(&self.core_set)) else { return Ok(()) };
        self.devices[device].change = None;
        outcome.map_err(|e| format!("a change of d{device} failed: {e}"))
    }

    /// Reinstates failed paths of `device` by message: all of them, or those that are well. Paths
    /// that udm checks itself are skipped. Returns the number of failed paths, and those that are
    /// reinstated.
    pub(crate) fn reinstate(
        &mut self,
        device: usize,
        is_meant: impl Fn(usize) -> bool,
    ) -> Result<(u64, Vec<usize>), Violation> {
        let (mut failed, mut reinstated) = (0, Vec::new());
        let Some(mapped) = self.devices[device].mapped.clone() else { return Ok((failed, reinstated)) };
        let Some(table) = mapped.live() else { return Ok((failed, reinstated)) };
        for report in table.path_reports().iter().filter(|report| report.failed) {
            failed += 1;
            let path = report.number.minor as usize;
            if self.devices[device].checks || !is_meant(path) {
                continue;
            }
            self.set_turn(None);
            let words = ["reinstate_path".to_owned(), report.name.clone()];
            mapped
                .message(0, &words, &mut self.path_names(), &*self.core_set)
                .map_err(|e| format!("d{device}: reinstate_path {}: {e}", report.name))?;
            self.say(format!("d{device}: {} is reinstated", report.name));
            reinstated.push(path);
        }
        Ok((failed, reinstated))
    }
}
