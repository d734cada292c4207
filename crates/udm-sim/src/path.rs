//! A path to a simulated disk, as a device with a lane per core.
//!
//! The time at which a request takes effect is random: at once, at its completion, or partly at
//! once and partly at its completion. Requests complete in any order. Some complete within their
//! submit, which asks for no poll. In a path that hangs, requests complete only when the world
//! releases them. A request that fails may have taken effect wholly or partly. A lane may be full:
//! it queues further requests, and hands them back to a suspend without flush.

use crate::cores::TaskPurpose;
use crate::environment::{Env, PathMode, SharedEnv, lock_environment};
use crate::helper_threads::{BlockingHelperJob, HelperRequest, SimInvalidStoreMark};
use crate::path_faults;
use crate::stamp;
use crate::trace::{TraceEventKind, pack_op_and_flags, pack_sector_range};
use crate::write_effects;
use slab::Slab;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use udm_core::{
    Batch, Bio, BioFlags, Cx, Device, DeviceControlError, DeviceId, DrainMode, ExtentKind, Extents,
    GrowResultCallback, GrowthPolicy, Lane, Limits, Nanos, Op, Sector, Sectors, SharedDiskState, Status,
};

/// The control half of a path.
pub struct SimPath {
    id: DeviceId,
    index: usize,
    env: SharedEnv,
    shared_disk_state: Arc<SharedDiskState>,
}

impl SimPath {
    /// Creates path `index` of `env`.
    #[must_use]
    pub fn new(env: &SharedEnv, index: usize) -> SimPath {
        let state = lock_environment(env);
        let shared_disk_state = state.disks[state.paths[index].disk].shared_disk_state.clone();
        SimPath { id: DeviceId::new(), index, env: env.clone(), shared_disk_state }
    }
}

impl SimPath {
    /// Access to the marks of the store on its disk.
    pub(crate) fn mark(&self) -> Arc<SimInvalidStoreMark> {
        let disk = lock_environment(&self.env).paths[self.index].disk;
        Arc::new(SimInvalidStoreMark { disk, env: self.env.clone() })
    }
}

impl Device for SimPath {
    /// No path shrinks, but a third of them say so, to test that the checks of store ends do no
    /// harm.
    fn may_shrink(&self) -> bool {
        self.index % 3 == 2
    }

    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, _: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let mut env = lock_environment(&self.env);
        let (checks, is_owner_lane) =
            (env.task == Some(TaskPurpose::PathCheck), env.task == Some(TaskPurpose::OwnerLane));
        let beside = env.task.is_some() && !is_owner_lane;
        let counted = !beside && !is_owner_lane;
        if !checks && !is_owner_lane && env.refuses_open() {
            env.say(format!("p{} can't be opened", self.index));
            return Err(DeviceControlError::new(NO_LANE, format!("p{} has no lane left", self.index)));
        }
        env.paths[self.index].lanes += usize::from(counted);
        drop(env);
        Ok(Box::new(PathLane {
            index: self.index,
            checks,
            beside,
            counted,
            env: self.env.clone(),
            slots: Slab::new(),
            due: BinaryHeap::new(),
            ended: Vec::new(),
            hung: Vec::new(),
            waiting: VecDeque::new(),
            count: 0,
            released: 0,
        }))
    }

    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        Some(&self.shared_disk_state)
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let env = lock_environment(&self.env);
        let disk = &env.disks[env.paths[self.index].disk];
        for sector in from.0..from.0 + len.0 {
            let is_hole = disk.shows_holes && disk.is_blank(sector);
            out.push(Sectors(1), if is_hole { ExtentKind::Hole } else { ExtentKind::Data });
        }
    }

    fn growth(&self) -> Option<GrowthPolicy> {
        let env = lock_environment(&self.env);
        let disk = &env.disks[env.paths[self.index].disk];
        (disk.growth > 0)
            .then_some(GrowthPolicy { step: Sectors(disk.growth), max: Sectors(disk.growth_max) })
    }

    /// The callback may run within the call.
    fn grow(&self, size: Sectors, then: GrowResultCallback) {
        let mut env = lock_environment(&self.env);
        let (disk, most) =
            (env.paths[self.index].disk, env.chance.pick(&[0, 1, 10_000, 10_000_000, 3_000_000_000]));
        if most == 0 && !env.dead {
            env.disks[disk].grow(size.0);
            drop(env);
            return then(Ok(()));
        }
        let at = Nanos(env.now.0 + env.chance.below(most));
        env.asked.push(HelperRequest { at, disk, what: BlockingHelperJob::Grow(size.0, then) });
    }

    fn limits(&self) -> Limits {
        let env = lock_environment(&self.env);
        let disk = &env.disks[env.paths[self.index].disk];
        Limits {
            logical_block: disk.block as u32 * 512,
            physical_block: disk.block as u32 * 512,
            max_sectors: Sectors(disk.max[0]),
            max_discard: Sectors(disk.max[1]),
            max_write_zeroes: Sectors(disk.max[2]),
            write_cache: disk.volatile,
            fua: disk.fua,
            read_only: disk.read_only,
            ..Limits::new(Sectors(disk.size))
        }
    }
}

/// Errno of an open that fails. Nothing else in the world returns this errno.
pub const NO_LANE: i32 = udm_core::errno::ENOMEM;

/// A request in flight in a path.
pub(crate) struct PathRequest {
    pub(crate) bio: Box<Bio>,
    /// Status with which the request will complete if the path works.
    fate: Status,
    /// Sectors that already took effect.
    pub(crate) applied: u64,
    /// Number of the last write that a flush covers.
    pub(crate) mark: u64,
    /// Number of power cuts when the request arrived.
    crashes: u64,
    /// Number of failures of the path when the request arrived.
    fails: u64,
    /// True for a check of a path that was considered good, by a task that continues.
    well: bool,
    /// Arrival time.
    at: Nanos,
}

struct PathLane {
    index: usize,
    /// True if the requests are path checks.
    checks: bool,
    /// True if the requests are not those of a device. They may arrive on a failed path or under a
    /// suspended device, and no target counts them.
    beside: bool,
    /// True if the lane belongs to the devices in use.
    counted: bool,
    env: SharedEnv,
    slots: Slab<PathRequest>,
    due: BinaryHeap<Reverse<(Nanos, u64, usize)>>,
    /// Requests that completed within their submit. The submitter must poll without being asked.
    ended: Vec<usize>,
    /// Requests that hang.
    hung: Vec<usize>,
    /// Requests that wait for room, each with the number of power cuts at its arrival.
    waiting: VecDeque<(Box<Bio>, u64)>,
    count: u64,
    /// Number of releases of the path when this lane last checked.
    released: u64,
}

impl Lane for PathLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let env = self.env.clone();
        let mut env = lock_environment(&env);
        for bio in batch.drain(..) {
            self.check(&bio, &mut env);
            track_write_on_path(self.index, self.beside, &bio, &mut env, true);
            let path = &mut env.paths[self.index];
            path.in_flight += u64::from(!self.beside);
            if path.in_flight > path.most {
                let (p, most) = (self.index, path.most);
                env.violate(|| {
                    format!("path p{p} was given more than the {most} that its queue has tags for")
                });
            }
            if let Some((sharing, most)) = &env.shared {
                let most = *most;
                let all: u64 = sharing.iter().map(|path| env.paths[*path].in_flight).sum();
                if all > most && sharing.contains(&self.index) {
                    env.violate(|| format!("disks have {all} requests, and share {most} tags"));
                }
            }
            let crashes = env.crashes;
            self.waiting.push_back((bio, crashes));
        }
        self.begin(&mut env);
        drop(env);
        self.ask(cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let due = self.due.peek().is_some_and(|Reverse((at, ..))| *at <= cx.now());
        if !due && self.ended.is_empty() && self.hung.is_empty() && self.waiting.is_empty() {
            return self.ask(cx);
        }
        let env = self.env.clone();
        let mut env = lock_environment(&env);
        for key in std::mem::take(&mut self.ended) {
            let slot = self.slots.remove(key);
            done.push(self.finish(slot, &mut env));
        }
        self.release(&mut env);
        while let Some(Reverse((at, _, key))) = self.due.peek().copied() {
            if at > cx.now() {
                break;
            }
            self.due.pop();
            let slot = self.slots.remove(key);
            done.push(self.finish(slot, &mut env));
        }
        self.begin(&mut env);
        drop(env);
        if !self.ended.is_empty() {
            // The request has waited in the lane, so its submitter does not poll.
            cx.wake_now();
        }
        self.ask(cx);
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, _: &mut Cx<'_>) {
        if how == DrainMode::NoFlush && !self.waiting.is_empty() {
            let mut env = lock_environment(&self.env);
            env.paths[self.index].in_flight -= if self.beside { 0 } else { self.waiting.len() as u64 };
            env.seen.handed_back += self.waiting.len() as u64;
            for (bio, _) in &self.waiting {
                track_write_on_path(self.index, self.beside, bio, &mut env, false);
            }
            back.extend(self.waiting.drain(..).map(|(bio, _)| bio));
        }
    }
}

impl Drop for PathLane {
    fn drop(&mut self) {
        lock_environment(&self.env).paths[self.index].lanes -= usize::from(self.counted);
    }
}

impl PathLane {
    fn ask(&self, cx: &mut Cx<'_>) {
        if let Some(Reverse((at, ..))) = self.due.peek() {
            cx.wake_at(*at);
        }
    }

    /// Starts waiting requests while there is room.
    fn begin(&mut self, env: &mut Env) {
        let room = env.paths[self.index].room;
        while self.slots.len() < room || env.dead {
            let Some((bio, crashes)) = self.waiting.pop_front() else { return };
            self.begin_one(bio, crashes, env);
        }
        env.seen.full += u64::from(!self.waiting.is_empty());
    }

    fn begin_one(&mut self, bio: Box<Bio>, crashes: u64, env: &mut Env) {
        let (fate, due) = path_faults::draw_result(env, self.index, &bio);
        let disk = env.paths[self.index].disk;
        let (at, core) = (env.now, env.core);
        let args = [
            self.index as u64,
            pack_op_and_flags(bio.op, bio.flags.bits()),
            pack_sector_range(bio.sector.0, bio.sectors.0),
            due.0,
        ];
        env.trace.add(at, core, TraceEventKind::PathIn, args);
        let (mark, fails) = (env.disks[disk].mark(), env.paths[self.index].fails);
        if self.checks {
            let path = &mut env.paths[self.index];
            path.checks += 1;
            path.asked_at.get_or_insert(at);
            if std::mem::replace(&mut path.check_by, Nanos::NEVER) < at {
                let p = self.index;
                env.violate(|| format!("path p{p} has failed, and is checked late"));
            }
        }
        let well = self.checks && !env.task_stops && !env.paths[self.index].failed;
        if well {
            let path = &mut env.paths[self.index];
            (path.checked_at, path.check_counts) = (Some(env.now), true);
        }
        let mut slot = PathRequest { bio, fate, applied: 0, mark, crashes, fails, well, at };
        let now = match env.chance.below(4) {
            0 | 1 => 0,
            2 if env.torn => env.chance.below(slot.bio.sectors.0 + 1),
            _ => slot.bio.sectors.0,
        };
        if !env.dead && !is_disk_refusal_status(fate) {
            if slot.bio.flags.contains(BioFlags::PREFLUSH) {
                env.disks[disk].flush(mark);
            }
            write_effects::apply_bio_up_to_sector(env, disk, &mut slot, now, self.index);
        }
        let changes = slot.bio.op.is_write() || slot.bio.op == Op::Flush;
        self.count += 1;
        let key = self.slots.insert(slot);
        if due == Nanos::NEVER {
            env.seen.hangs += 1;
            self.hung.push(key);
        } else if due == env.now {
            env.seen.prompt += 1;
            self.ended.push(key);
        } else {
            self.due.push(Reverse((due, self.count, key)));
        }
        if changes {
            env.changed();
        }
    }

    /// Completes requests that hung, after the path was released: with success or a timeout.
    fn release(&mut self, env: &mut Env) {
        let released = env.paths[self.index].released;
        if std::mem::replace(&mut self.released, released) == released {
            return;
        }
        for key in self.hung.drain(..) {
            self.slots[key].fate = if env.chance.one_in(2) { Status::Ok } else { Status::Timeout };
            if let Some(status) = path_faults::find_disk_limit_refusal(env, self.index, &self.slots[key].bio)
            {
                self.slots[key].fate = status;
            }
            self.count += 1;
            self.due.push(Reverse((env.now, self.count, key)));
        }
    }

    /// Checks the promises of the upper layers to the path.
    fn check(&self, bio: &Bio, env: &mut Env) {
        let p = self.index;
        let what = || format!("{} {}", crate::trace::op_name(bio.op), range_text(bio));
        if env.paths[p].suspended_users > 0 && !env.dead && !self.beside {
            env.violate(|| format!("path p{p} was given a {} while the device above is suspended", what()));
        }
        let known = env.current_poll.is_none_or(|poll| poll != env.paths[p].failed_in);
        if env.paths[p].failed && known && env.is_exact(p) && !env.dead && !self.beside {
            env.violate(|| format!("path p{p} has failed, and was given a {}", what()));
        }
        if !bio.is_in_flight() {
            env.violate(|| format!("path p{p} was given a {} that was not started", what()));
        }
        let disk = &env.disks[env.paths[p].disk];
        let (size, block, most) = (disk.size, disk.block, disk.most(bio.op));
        if bio.op != Op::Flush {
            let (at, len) = (bio.sector.0, bio.sectors.0);
            // After a power cut the disk may have lost its growth.
            let outside = at.checked_add(len).is_none_or(|end| end > size) && !env.dead;
            if len == 0 || outside {
                env.violate(|| format!("path p{p} was given a {} outside of its {size} sectors", what()));
            }
            if at % block != 0 || len % block != 0 {
                env.violate(|| format!("path p{p} was given a {} that is not whole blocks", what()));
            }
            if len > most {
                env.violate(|| format!("path p{p} was given a {} longer than its limit of {most}", what()));
            }
        }
        if bio.op.has_data() && bio.data.len() as u64 != bio.sectors.bytes() {
            env.violate(|| format!("path p{p} was given a {} with {} bytes of data", what(), bio.data.len()));
        }
        if bio.op == Op::Flush && (bio.sectors != Sectors::ZERO || bio.sector.0 != 0) {
            env.violate(|| format!("path p{p} was given a {} with a range", what()));
        }
    }

    fn finish(&mut self, mut slot: PathRequest, env: &mut Env) -> Box<Bio> {
        track_write_on_path(self.index, self.beside, &slot.bio, env, false);
        let state = &mut env.paths[self.index];
        state.in_flight -= u64::from(!self.beside);
        state.checks -= usize::from(self.checks);
        state.asked_at.take_if(|_| state.checks == 0);
        let (disk, mode) = (state.disk, state.mode);
        if env.dead || slot.crashes != env.crashes {
            if env.dead && slot.crashes != env.crashes {
                write_effects::tear_write(env, disk, &mut slot);
            }
            slot.fate = Status::Ok;
        } else {
            if mode == PathMode::Down && slot.fate.is_ok() && !env.calm {
                slot.fate = Status::Transport;
            }
            let all = slot.bio.sectors.0;
            let target = match slot.fate {
                Status::Ok => all,
                fate if is_disk_refusal_status(fate) => 0,
                _ => env.chance.between(slot.applied, all),
            };
            write_effects::apply_bio_up_to_sector(env, disk, &mut slot, target, self.index);
            if slot.fate.is_ok() {
                write_effects::apply_success_effects(env, disk, &slot);
            } else if !self.checks {
                if !self.beside {
                    env.blame(self.index, slot.fate);
                }
                let again = !self.beside && slot.fate.is_path_error() && env.paths[self.index].retried;
                if !(again || is_disk_refusal_status(slot.fate)) {
                    write_effects::schedule_late_write(env, disk, &slot);
                }
            }
            if !self.beside {
                env.paths[self.index].served.count(&slot.bio, slot.fate);
            }
        }
        if self.checks && !env.task_stops {
            let path = &mut env.paths[self.index];
            let behind = slot.fails + 1 == path.fails && slot.at == path.checked_out;
            let (since, bad) = (path.fails == slot.fails || behind, slot.fate.is_path_error());
            path.answered |= since && !bad;
            path.doubted |= since && bad;
            // A check that began before the last failure of the path does not count.
            path.must_fail |=
                path.fails == slot.fails && bad && slot.well && path.check_counts && !path.failed;
            path.checked_at.take_if(|_| since);
        }
        let bio = &mut slot.bio;
        if bio.op.is_write() || bio.op == Op::Flush {
            env.changed();
        }
        let args = [
            self.index as u64,
            pack_op_and_flags(bio.op, bio.flags.bits()),
            pack_sector_range(bio.sector.0, bio.sectors.0),
            slot.fate as u64,
        ];
        let (at, core) = (env.now, env.core);
        env.trace.add(at, core, TraceEventKind::PathOut, args);
        bio.end_with(slot.fate);
        slot.bio
    }
}

/// True if the disk refused the request without reading its data.
fn is_disk_refusal_status(fate: Status) -> bool {
    matches!(fate, Status::ReadOnly | Status::NotSupp)
}

fn range_text(bio: &Bio) -> String {
    format!("{}+{}", bio.sector, bio.sectors)
}

/// Records that `path` has a write, or no longer has it. A write may be on one path at a time.
fn track_write_on_path(path: usize, beside: bool, bio: &Bio, env: &mut Env, now: bool) {
    if beside || bio.op != Op::Write || !env.paths[path].retried {
        return;
    }
    let mut first = [0; udm_core::SECTOR_SIZE as usize];
    bio.data.copy_to(&mut first);
    let Some(stamp) = stamp::read_sector_stamp(&first) else { return };
    let key = (env.paths[path].disk, stamp);
    if !now {
        env.writing.remove(&key);
    } else if let Some(other) = env.writing.insert(key, path).filter(|_| !env.dead) {
        env.violate(|| format!("path p{path} was given a write that p{other} still has"));
    }
}
