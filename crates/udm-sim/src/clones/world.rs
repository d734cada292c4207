//! A world of a clone: cores, disks and the device, which run on one thread in an order drawn from
//! a seed.

use super::counts::CloneCounts;
use super::object_source::{SharedObject, SimObjectDevice};
use crate::cores::TaskPurpose;
use crate::device::next_readback;
use crate::disk::SimDisk;
use crate::environment::{Env, SimPathState, lock_environment};
use crate::front_end::WorkloadDevice;
use crate::machine::Machine;
use crate::model::{RequestRefusalRules, Violation};
use crate::plan::{DisturbanceClass, RunPlan};
use crate::power_cuts::{PowerCutWorld, PowerState};
use crate::register_model::SectorRegisterModel;
use crate::rng::{RngStream, SimRng};
use crate::table_map::ModelTableMap;
use crate::trace::TraceEventKind;
use crate::turn::MachineWorld;
use std::cell::Cell;
use std::sync::{Arc, Mutex};
use udm_core::{BioFlags, Limits, Nanos, Op, Sectors, Status};
use udm_dm::MappedDevice;

/// The disks.
pub(super) const SOURCE: usize = 0;
pub(super) const DESTINATION: usize = 1;
pub(super) const METADATA: usize = 2;

/// Sectors of the metadata device.
const METADATA_SECTORS: u64 = 64;

/// The device as its clients see it.
pub(super) struct CloneVolume {
    pub sectors: u64,
    pub limits: Limits,
    /// Next sector to read back.
    pub check: Cell<u64>,
    /// Start of the region that requests prefer.
    pub hot: u64,
}

impl WorkloadDevice for CloneVolume {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn hot(&self) -> u64 {
        self.hot
    }

    fn next_readback(&self, most: u64) -> Option<(u64, u64)> {
        next_readback(&self.check, self.sectors, most)
    }
}

/// The target of the device.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyTarget {
    Clone,
    /// A clone of an object that a server sends, refuses or changes.
    CloneOfObject,
    Mirror,
    /// A mirror with a log on the metadata device.
    LoggedMirror,
}

impl CopyTarget {
    /// True for a mirror, with a log or without.
    pub(super) fn is_mirror(self) -> bool {
        matches!(self, CopyTarget::Mirror | CopyTarget::LoggedMirror)
    }
}

/// A simulated world of a clone.
pub struct CloneWorld {
    pub(super) target: CopyTarget,
    /// True if the destination is the disk, after the switch of a mirror.
    pub(super) is_switched: bool,
    /// True as long as a mirror may continue from its log: the record of its move says so.
    pub(super) has_log: bool,
    pub(super) machine: Machine,
    /// The object that is the source.
    pub(super) object: Option<Arc<Mutex<SharedObject>>>,
    /// The content of the source.
    source: Vec<u64>,
    pub(super) count: usize,
    pub(super) block: u64,
    pub(super) region: u64,
    pub(super) mapped: Option<Arc<MappedDevice>>,
    pub(super) volume: CloneVolume,
    /// True if requests are sent to the device.
    pub(super) open: bool,
    /// Registers of the device, which have the content of the source in the beginning.
    pub(super) map: Arc<ModelTableMap>,
    /// Time of the last change after which the metadata was writable: twice the step.
    pub(super) writable_since: u64,
    /// True if all regions were hydrated when the device was created.
    pub(super) was_complete: bool,
    /// True if the table is linear.
    pub(super) is_linear: bool,
    pub(super) power: PowerState,
    pub(super) counts: CloneCounts,
}

/// Makes runs of the source blank, and all of the destination, which shows this.
fn make_holes(seed: u64, env: &mut Env) {
    let mut draw = SimRng::new(seed, RngStream::Objects);
    let sectors = env.disks[SOURCE].sectors();
    let mut at = 0;
    while at < sectors {
        let (data, hole) = (draw.below(60), draw.below(60));
        (at + data..(at + data + hole).min(sectors)).for_each(|sector| env.disks[SOURCE].blank(sector));
        at += data + hole + 1;
    }
    let destination = &mut env.disks[DESTINATION];
    (0..sectors).for_each(|sector| destination.blank(sector));
    destination.shows_holes = true;
}

impl CloneWorld {
    pub(super) fn new(plan: &RunPlan, target: CopyTarget) -> Result<CloneWorld, Violation> {
        let on = |class| !plan.without.has(class);
        let mut build = SimRng::new(plan.seed, RngStream::Build);
        let count = plan.cores.unwrap_or(build.pick(&[1, 1, 2, 2, 3]));
        let fails = build.one_in(3) && on(DisturbanceClass::Errors);
        let block = if build.one_in(6) && on(DisturbanceClass::Limits) { 8 } else { 1 };
        let region = build.pick(&[8, 8, 8, 16, 64]);
        let sectors = build.between(60, 600) / block * block;
        let mut env = Env::new(plan.seed, plan.keep_events);
        env.lags = false;
        env.cut_at = plan.cut;
        for index in [SOURCE, DESTINATION, METADATA] {
            let size = if index == METADATA { METADATA_SECTORS } else { sectors };
            let mut disk = SimDisk::new(index, size);
            if index == METADATA {
                (0..size).for_each(|sector| disk.blank(sector));
            }
            (disk.block, disk.log) = (block, index == METADATA);
            disk.volatile = build.below(4) > 0;
            disk.fua = build.one_in(2);
            let most = build.pick(&[8, 64, u64::from(u32::MAX)]);
            let trim = if on(DisturbanceClass::Trim) { build.pick(&[0, 16, 64, 4096]) } else { 0 };
            disk.max = [most, trim, 0];
            disk.start();
            let errors = if index == METADATA { [0, 0, 200, 2000] } else { [0, 200, 1000, 4000] };
            disk.error_one_in = if fails { build.pick(&errors) } else { 0 };
            env.disks.push(disk);
            env.paths.push(SimPathState::draw(index, &mut build, plan.without));
        }
        if target == CopyTarget::CloneOfObject {
            make_holes(plan.seed, &mut env);
        }
        let cells = SectorRegisterModel::new(&[sectors, sectors], |_, at| env.disks[SOURCE].read(at));
        let source = (0..sectors).map(|sector| env.disks[SOURCE].read(sector)).collect();
        let at = (0..sectors).map(|sector| cells.index(DESTINATION, sector)).collect();
        let map = ModelTableMap { cells: at, disks: vec![DESTINATION], ..ModelTableMap::default() };
        let mut world = CloneWorld {
            target,
            is_switched: false,
            has_log: target == CopyTarget::LoggedMirror,
            machine: Machine::new(plan, &mut build, count, env, cells),
            object: None,
            source,
            count,
            block,
            region,
            mapped: None,
            volume: CloneVolume {
                sectors,
                limits: Limits::new(Sectors(sectors)),
                check: Cell::new(u64::MAX),
                hot: 0,
            },
            open: false,
            map: Arc::new(map),
            writable_since: 0,
            was_complete: false,
            is_linear: false,
            power: PowerState::draw(&mut build, on(DisturbanceClass::Paths), fails, 3000),
            counts: CloneCounts::default(),
        };
        if target == CopyTarget::CloneOfObject {
            let (machine, fails) = (&mut world.machine, on(DisturbanceClass::Errors));
            let device = SimObjectDevice::draw(&machine.paths[SOURCE], &machine.env, &mut build, fails);
            world.object = Some(Arc::clone(&device.object));
            machine.fronts[SOURCE] = Arc::new(device);
        }
        world.boot()?;
        Ok(world)
    }

    /// The content of a sector of the source.
    pub(super) fn source_stamp(&self, sector: u64) -> u64 {
        self.source[sector as usize]
    }

    fn rules(&self) -> RequestRefusalRules {
        RequestRefusalRules { block: self.block, read_only: false }
    }

    /// True if one of these disks has failed a request since `start`.
    pub(super) fn is_blamed(&self, disks: &[usize], start: u64) -> bool {
        let env = lock_environment(&self.machine.env);
        disks.iter().any(|disk| env.disks[*disk].blamed.iter().flatten().any(|at| *at >= start))
    }

    /// True if a request that began at `start` may fail.
    fn may_fail(&self, op: Op, status: Status, start: u64) -> bool {
        if self.target.is_mirror() {
            // A destination that fails does no harm, until a write needs both devices.
            let needed: &[usize] = if self.is_linear { &[SOURCE, DESTINATION] } else { &[SOURCE] };
            return self.is_blamed(needed, start) || op == Op::Discard && status == Status::NotSupp;
        }
        let is_metadata_bad = match op {
            // Only metadata that cannot be read fails reads.
            Op::Read => self.is_blamed(&[METADATA], self.writable_since),
            _ => self.is_blamed(&[DESTINATION, METADATA], self.writable_since),
        };
        is_metadata_bad
            || self.is_blamed(&[SOURCE, DESTINATION, METADATA], start)
            // A discard that was held while its table changed.
            || op == Op::Discard && status == Status::NotSupp
    }

    /// Opens the device on every core, and starts requests to it.
    pub(super) fn open(&mut self) -> Result<(), Violation> {
        let Some(mapped) = self.mapped.clone() else { return Ok(()) };
        for core in 0..self.machine.cores.len() {
            let opened = self.machine.open(core, 0, |cx| udm_core::Device::open(&*mapped, cx));
            opened.map_err(|e| format!("the clone can't be opened: {e}"))?;
        }
        self.open = true;
        self.look_at_limits();
        Ok(())
    }

    pub(super) fn look_at_limits(&mut self) {
        if let Some(mapped) = &self.mapped {
            self.volume.limits = udm_core::Device::limits(&**mapped);
        }
    }
}

impl MachineWorld for CloneWorld {
    fn machine(&mut self) -> &mut Machine {
        &mut self.machine
    }

    fn step(&mut self) -> Result<(), Violation> {
        self.one_step()
    }

    /// Hydration is a task, and its requests are requests of devices.
    fn is_internal_io(purpose: TaskPurpose) -> bool {
        purpose == TaskPurpose::TableLoad
    }

    fn gather(&mut self, c: usize, i: usize, now: Nanos) {
        let rules = self.rules();
        let machine = &mut self.machine;
        let open = &mut machine.cores[c].open[i];
        if self.open {
            machine.front.draw(&mut machine.batch, open, &self.volume, machine.reading);
        }
        open.in_flight += machine.batch.len();
        let mut env = lock_environment(&machine.env);
        for bio in &mut machine.batch {
            bio.start();
            (bio.started, bio.owner) = (now, open.owner);
            let maps = std::slice::from_ref(&self.map);
            let id = machine.model.begin(bio, 0, (maps, rules), machine.step, now);
            env.trace.add_submit(now, c as u16, id, 0, bio);
        }
    }

    fn take_back(&mut self, c: usize, i: usize, now: Nanos) -> Result<(), Violation> {
        let rules = self.rules();
        // After an error, the remaining bios stay in the batch, because a bio in flight must not be
        // dropped.
        self.machine.done.reverse();
        while let Some(mut bio) = self.machine.done.pop() {
            bio.finish();
            let impatient = bio.flags.intersects(BioFlags::RAHEAD | BioFlags::NOWAIT);
            let start = self.machine.model.start(&bio);
            let ok = bio.status.is_ok();
            let pardon = !ok && (impatient || self.may_fail(bio.op, bio.status, start));
            let machine = &mut self.machine;
            let open = &mut machine.cores[c].open[i];
            if open.in_flight == 0 {
                return Err("the clone returned more requests than it was given".into());
            }
            open.in_flight -= 1;
            let mut env = lock_environment(&machine.env);
            let id = machine.model.id(&bio);
            env.trace.add(now, c as u16, TraceEventKind::Done, [id, bio.status as u64, 0, 0]);
            match env.dead {
                true => machine.model.abandon(&bio)?,
                false => {
                    machine.totals.requests[bio.op as usize] += 1;
                    machine.model.finish(&bio, rules, pardon, &env).map_err(|e| format!("core {c}: {e}"))?;
                }
            }
            machine.front.put(bio);
        }
        Ok(())
    }

    /// Describes the work that waits, for a person.
    fn waiting(&self) -> String {
        self.machine.describe_waiting(|_| String::new())
    }
}
