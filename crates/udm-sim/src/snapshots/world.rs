//! A world of origins and snapshots: cores, disks and devices, which run on one thread in an order
//! drawn from a seed.

use super::counts::SnapshotCounts;
use super::volumes::{OriginOrSnapshot, VolumeErrorReasons};
use crate::cores::TaskPurpose;
use crate::disk::SimDisk;
use crate::environment::{Env, SimPathState, lock_environment};
use crate::machine::Machine;
use crate::model::Violation;
use crate::plan::{DisturbanceClass, RunPlan};
use crate::power_cuts::{PowerCutWorld, PowerState};
use crate::register_model::SectorRegisterModel;
use crate::rng::{RngStream, SimRng};
use crate::run::RunnableWorld;
use crate::table_map::ModelTableMap;
use crate::totals::RunTotals;
use crate::trace::TraceEventKind;
use crate::turn::MachineWorld;
use std::sync::Arc;
use udm_core::{BioFlags, Device as _, Nanos, Op, Status};

/// A simulated world of origins and snapshots.
pub struct SnapshotWorld {
    pub(super) machine: Machine,
    pub(super) sides: Vec<OriginOrSnapshot>,
    pub(super) count: usize,
    /// True if origins are not written, like images of many disks.
    pub(super) images: bool,
    pub(super) power: PowerState,
    pub(super) counts: SnapshotCounts,
    /// Checkpoints held by clients.
    pub(super) held: Vec<super::changed_maps::ClientHeldCheckpoint>,
}

/// Size in sectors of a store with space for a whole origin, for any chunk size.
fn full_store_sectors(origin: u64, block: u64) -> u64 {
    2 * origin + 400 * block
}

/// Returns lines of a few blocks each over the disk of `side`.
fn draw_short_linear_lines(side: usize, sectors: u64, block: u64, chance: &mut SimRng) -> String {
    let most = chance.pick(&[3, 8, 24]);
    let (mut at, mut lines) = (0, Vec::new());
    while at < sectors {
        let len = (block * chance.between(1, most)).min(sectors - at);
        lines.push(format!("{at} {len} linear p{side} {at}\n"));
        at += len;
    }
    lines.concat()
}

impl SnapshotWorld {
    pub(super) fn new(plan: &RunPlan) -> Result<SnapshotWorld, Violation> {
        let on = |class| !plan.without.has(class);
        let mut build = SimRng::new(plan.seed, RngStream::Build);
        let count = plan.cores.unwrap_or(build.pick(&[1, 1, 2, 2, 3]));
        let origins = build.pick(&[1, 1, 2]);
        let stores = build.between(1, 3) as usize;
        let fails = build.one_in(3) && on(DisturbanceClass::Errors);
        let block = if build.one_in(6) && on(DisturbanceClass::Limits) { 8 } else { 1 };
        let stacking = on(DisturbanceClass::Stacks);
        let stacks = build.one_in(4) && stacking;
        let mut env = Env::new(plan.seed, plan.keep_events);
        env.lags = false;
        env.cut_at = plan.cut;
        // A separate random stream, so that worlds of other seeds do not change.
        let mut growth = SimRng::new(plan.seed ^ 0x6772_6f77, RngStream::Build);
        let mut drawn: Vec<(usize, u64, bool)> = Vec::new();
        for side in 0..origins + stores {
            let is_origin = side < origins;
            let most = if build.one_in(8) { 1000 } else { 200 };
            let sectors = build.between(24, most) / block * block;
            let origin = match (is_origin, stacks && side > origins) {
                (true, _) => side,
                // A snapshot of the previous snapshot.
                (false, true) if build.one_in(2) => origins,
                _ => build.below(origins as u64) as usize,
            };
            let small = !is_origin && build.one_in(3) && on(DisturbanceClass::Small);
            let sectors = if is_origin { sectors } else { drawn[origin].1 };
            let size = match (is_origin, small) {
                (true, _) => sectors,
                (false, false) => full_store_sectors(sectors, block),
                // Less than half of the need with the smallest chunks; the store can be enlarged.
                (false, true) => (sectors / build.pick(&[2, 2, 6])).max(6 * block) / block * block,
            };
            let mut disk = SimDisk::new(side, if small { full_store_sectors(sectors, block) } else { size });
            (disk.size, disk.block, disk.log) = (size, block, !is_origin);
            if !is_origin && !small && on(DisturbanceClass::Small) && growth.one_in(3) {
                disk.growth = block * growth.between(1, 40);
                let tight = (sectors / growth.pick(&[2, 2, 6])).max(6 * block) / block * block;
                disk.growth_max = if growth.one_in(3) { tight } else { size };
            }
            disk.volatile = build.below(4) > 0;
            disk.fua = build.one_in(2);
            let most = if is_origin { u64::from(u32::MAX) } else { build.pick(&[8, 64, 4096]) };
            disk.max = [most, if on(DisturbanceClass::Trim) { build.pick(&[0, 16, 4096]) } else { 0 }, 0];
            disk.start();
            disk.error_one_in = if fails { build.pick(&[0, 200, 1000, 4000]) } else { 0 };
            env.disks.push(disk);
            env.paths.push(SimPathState::draw(side, &mut build, plan.without));
            drawn.push((origin, sectors, small));
        }
        // The second half of the registers holds the content below a volume during a merge.
        let sizes = drawn.iter().chain(&drawn).map(|(_, sectors, _)| *sectors);
        let cells = SectorRegisterModel::new(&sizes.collect::<Vec<u64>>(), SimDisk::first_stamp);
        let shown: Vec<u64> = env.disks.iter().map(|disk| disk.size).collect();
        let grows = |disk: &SimDisk| (disk.growth > 0, disk.growth_max < disk.size);
        let grows: Vec<(bool, bool)> = env.disks.iter().map(grows).collect();
        let side = |(i, (origin, sectors, small)): (usize, &(usize, u64, bool))| {
            let mut side = OriginOrSnapshot::new(i, *origin, *sectors, block, &cells);
            (side.small, side.shown, side.stacked) = (*small, shown[i], stacks && i == origins);
            (side.grows, side.tight) = grows[i];
            side
        };
        let sides: Vec<OriginOrSnapshot> = drawn.iter().enumerate().map(side).collect();
        let mut world = SnapshotWorld {
            machine: Machine::new(plan, &mut build, count, env, cells),
            sides,
            count,
            images: build.one_in(6),
            power: PowerState::draw(&mut build, on(DisturbanceClass::Paths), fails, 6000),
            counts: SnapshotCounts { blocks: u64::from(block > 1), ..SnapshotCounts::default() },
            held: Vec::new(),
        };
        let mut floors = SimRng::new(plan.seed ^ 0x666c_6f6f, RngStream::Build);
        for side in 0..world.sides.len() {
            let one = &mut world.sides[side];
            if one.origin == side && stacking && floors.one_in(6) {
                one.floor_lines = Some(draw_short_linear_lines(side, one.sectors, block, &mut floors));
            }
            world.sides[side].base = world.word(side);
        }
        world.boot()?;
        Ok(world)
    }

    /// Number of origins, which are the first volumes.
    pub(super) fn origins(&self) -> usize {
        (0..self.sides.len()).take_while(|&side| self.sides[side].origin == side).count()
    }

    /// The origin on a disk below `side`.
    pub(super) fn root(&self, side: usize) -> usize {
        let origin = self.sides[side].origin;
        if origin == side { side } else { self.root(origin) }
    }

    /// Name in tables of the device below the origin `side`.
    pub(super) fn word(&self, side: usize) -> String {
        match &self.sides[side] {
            one if one.origin != side => format!("@d{side}"),
            one if one.floor_lines.is_some() => format!("@d{}", self.sides.len() + side),
            _ => format!("p{side}"),
        }
    }

    /// Opens the device of `side` on every core, and starts requests to it.
    pub(super) fn open(&mut self, side: usize) -> Result<(), Violation> {
        let Some(door) = self.sides[side].door().cloned() else { return Ok(()) };
        for core in 0..self.machine.cores.len() {
            let opened = self.machine.open(core, side, |cx| door.open(cx));
            opened.map_err(|e| format!("s{side} can't be opened: {e}"))?;
        }
        self.sides[side].open = true;
        self.sides[side].look_at_limits();
        Ok(())
    }

    /// Returns the reasons for which requests of `side` may fail.
    pub(super) fn causes(&self, side: usize) -> VolumeErrorReasons {
        let one = &self.sides[side];
        let mut causes = match one.origin == side {
            true => VolumeErrorReasons { disks: vec![side], lost: false },
            false => {
                let below = self.causes(one.origin);
                let mut disks = below.disks;
                disks.push(side);
                VolumeErrorReasons { disks, lost: below.lost || one.small || self.is_faulty(side) }
            }
        };
        causes.disks.extend(one.merging);
        // A failed merge leaves chunks that must not be written.
        causes.lost |= one.merging.is_some() && (self.is_faulty(side) || one.refused);
        causes
    }

    /// True if a disk that `side` needs has failed a request since the creation of its snapshot.
    pub(super) fn is_faulty(&self, side: usize) -> bool {
        let (one, env) = (&self.sides[side], lock_environment(&self.machine.env));
        let store = one.merging.unwrap_or(side);
        let later = self.sides[store].since;
        let since = if one.origin == side { later } else { later.min(one.since) };
        let mut disks = vec![store];
        let mut at = side;
        loop {
            disks.push(at);
            if self.sides[at].origin == at {
                break;
            }
            at = self.sides[at].origin;
        }
        disks.iter().any(|disk| env.disks[*disk].blamed.iter().flatten().any(|at| *at >= since))
    }

    /// True if a request of `side` that began at `start` may fail with `status`.
    fn may_fail(&self, side: usize, (op, status): (Op, Status), start: u64) -> bool {
        let causes = self.causes(side);
        let full = |snapshot: &OriginOrSnapshot| {
            snapshot.small
                && snapshot.on_full == super::volumes::StoreFullPolicy::Fail
                && snapshot.mapped.is_some()
        };
        let blamed = |env: &Env| {
            causes.disks.iter().any(|d| env.disks[*d].blamed.iter().flatten().any(|at| *at >= start))
        };
        causes.lost
            // A discard that was held while its table changed.
            || op == Op::Discard && status == Status::NotSupp
            || status == Status::NoSpace && self.sides.iter().any(full)
            || blamed(&lock_environment(&self.machine.env))
    }

    /// Returns the maps that a request of `side` may affect. A discard that is passed to the origin
    /// affects all volumes there.
    fn maps(&self, side: usize, op: Op) -> Vec<Arc<ModelTableMap>> {
        let own = &self.sides[side];
        if op != Op::Discard || !own.passes_discards() {
            return vec![Arc::clone(&own.map)];
        }
        let (root, sides) = (self.root(side), self.sides.len());
        let shared = (0..sides).filter(|&other| other != side && self.root(other) == root);
        // The content below a volume during a merge is affected too.
        let all = std::iter::once(side).chain(shared).flat_map(|one| [one, sides + one]);
        let cells = &self.machine.model.cells;
        let anything = |disk: usize| ModelTableMap {
            cells: (0..own.sectors).map(|sector| cells.index(disk, sector)).collect(),
            disks: vec![disk % sides],
            ..ModelTableMap::default()
        };
        all.map(|disk| Arc::new(anything(disk))).collect()
    }
}

impl MachineWorld for SnapshotWorld {
    fn machine(&mut self) -> &mut Machine {
        &mut self.machine
    }

    fn step(&mut self) -> Result<(), Violation> {
        self.one_step()
    }

    /// A merge is a task, and its requests are requests of devices.
    fn is_internal_io(purpose: TaskPurpose) -> bool {
        purpose == TaskPurpose::TableLoad
    }

    fn gather(&mut self, c: usize, i: usize, now: Nanos) {
        let machine = &mut self.machine;
        let open = &mut machine.cores[c].open[i];
        let side = open.device;
        let still = self.images && self.sides[side].origin == side;
        if self.sides[side].open {
            machine.front.draw(&mut machine.batch, open, &self.sides[side], machine.reading || still);
        }
        open.in_flight += machine.batch.len();
        let owner = open.owner;
        for mut bio in std::mem::take(&mut self.machine.batch) {
            bio.start();
            (bio.started, bio.owner) = (now, owner);
            let (maps, rules) = (self.maps(side, bio.op), self.sides[side].rules());
            let machine = &mut self.machine;
            let id = machine.model.begin(&mut bio, side, (&maps, rules), machine.step, now);
            lock_environment(&machine.env).trace.add_submit(now, c as u16, id, side, &bio);
            machine.batch.push(bio);
        }
    }

    fn take_back(&mut self, c: usize, i: usize, now: Nanos) -> Result<(), Violation> {
        let side = self.machine.cores[c].open[i].device;
        // After an error, the remaining bios stay in the batch, because a bio in flight must not be
        // dropped.
        self.machine.done.reverse();
        while let Some(mut bio) = self.machine.done.pop() {
            bio.finish();
            let impatient = bio.flags.intersects(BioFlags::RAHEAD | BioFlags::NOWAIT);
            let start = self.machine.model.start(&bio);
            let ok = bio.status.is_ok();
            let pardon = !ok && (impatient || self.may_fail(side, (bio.op, bio.status), start));
            let rules = self.sides[side].rules();
            let machine = &mut self.machine;
            let open = &mut machine.cores[c].open[i];
            if open.in_flight == 0 {
                return Err(format!("s{side} returned more requests than it was given"));
            }
            open.in_flight -= 1;
            let mut env = lock_environment(&machine.env);
            let id = machine.model.id(&bio);
            env.trace.add(now, c as u16, TraceEventKind::Done, [id, bio.status as u64, 0, 0]);
            match env.dead {
                true => machine.model.abandon(&bio)?,
                false => {
                    machine.totals.requests[bio.op as usize] += 1;
                    let discard = u64::from(ok && bio.op == Op::Discard);
                    self.counts.discards += discard;
                    self.counts.passed_down += discard * u64::from(self.sides[side].passes_discards());
                    self.counts.refused += u64::from(bio.status == Status::NoSpace);
                    machine.model.finish(&bio, rules, pardon, &env).map_err(|e| format!("core {c}: {e}"))?;
                }
            }
            machine.front.put(bio);
        }
        Ok(())
    }

    /// Describes the work that waits, for a person.
    fn waiting(&self) -> String {
        self.machine.describe_waiting(|side| format!(" of s{side}"))
    }
}

impl RunnableWorld for SnapshotWorld {
    fn build(plan: &RunPlan) -> Result<SnapshotWorld, Violation> {
        SnapshotWorld::new(plan)
    }

    fn run(&mut self) -> Result<(), Violation> {
        self.run_all()
    }

    fn count(&self, totals: &mut RunTotals) {
        totals.snap = self.counts;
    }
}
