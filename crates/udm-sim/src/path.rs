//! A path to a simulated disk, as a device with a lane per core.
//!
//! When a request takes effect is chance: at once, when it ends, or its first sectors at once and the rest when it ends. Requests end in
//! any order. One that fails may have taken effect, whole or in part, but has none once it is back.

use crate::disk::Disk;
use crate::env::{Env, Mode, SharedEnv, lock};
use crate::stamp;
use crate::trace::{Kind, op_bits, range};
use slab::Slab;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use udm_core::{
    Batch, Bio, BioFlags, Cx, Device, DeviceId, Lane, Limits, Nanos, Op, OpenError, Sectors, Status,
};

/// The control half of a path.
pub struct SimPath {
    id: DeviceId,
    index: usize,
    limits: Limits,
    env: SharedEnv,
}

impl SimPath {
    /// Path `index` of `env`.
    #[must_use]
    pub fn new(env: &SharedEnv, index: usize) -> SimPath {
        let outside = lock(env);
        let disk = &outside.disks[outside.paths[index].disk];
        let limits = Limits {
            max_sectors: Sectors(disk.max[0]),
            max_discard: Sectors(disk.max[1]),
            max_write_zeroes: Sectors(disk.max[2]),
            write_cache: disk.volatile,
            fua: disk.fua,
            ..Limits::new(Sectors(disk.sectors()))
        };
        drop(outside);
        SimPath { id: DeviceId::new(), index, limits, env: env.clone() }
    }
}

impl Device for SimPath {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, _: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        Ok(Box::new(PathLane {
            index: self.index,
            limits: self.limits,
            env: self.env.clone(),
            slots: Slab::new(),
            due: BinaryHeap::new(),
            count: 0,
        }))
    }

    fn limits(&self) -> Limits {
        self.limits
    }
}

/// A request inside a path.
struct Slot {
    bio: Box<Bio>,
    /// How it will end, if the path lives.
    fate: Status,
    /// Sectors that took effect already.
    applied: u64,
    /// What a flush covers.
    mark: u64,
    /// Crashes seen when it came.
    crashes: u64,
}

struct PathLane {
    index: usize,
    limits: Limits,
    env: SharedEnv,
    slots: Slab<Slot>,
    due: BinaryHeap<Reverse<(Nanos, u64, usize)>>,
    count: u64,
}

impl Lane for PathLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let env = self.env.clone();
        let mut env = lock(&env);
        for bio in batch.drain(..) {
            self.check(&bio, &mut env);
            let (fate, due) = fate(&mut env, self.index, &bio);
            let state = &mut env.paths[self.index];
            state.in_flight += 1;
            let disk = state.disk;
            let (at, core) = (env.now, env.core);
            let args = [
                self.index as u64,
                op_bits(bio.op, bio.flags.bits()),
                range(bio.sector.0, bio.sectors.0),
                due.0,
            ];
            env.trace.add(at, core, Kind::PathIn, args);
            let (crashes, mark) = (env.crashes, env.disks[disk].mark());
            let mut slot = Slot { bio, fate, applied: 0, mark, crashes };
            let now = match env.chance.below(4) {
                0 | 1 => 0,
                2 if env.torn => env.chance.below(slot.bio.sectors.0 + 1),
                _ => slot.bio.sectors.0,
            };
            if !env.dead {
                if slot.bio.flags.contains(BioFlags::PREFLUSH) {
                    env.disks[disk].flush(mark);
                }
                apply(&mut env, disk, &mut slot, now, self.index);
            }
            self.count += 1;
            let key = self.slots.insert(slot);
            self.due.push(Reverse((due, self.count, key)));
        }
        self.ask(cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        if self.due.peek().is_some_and(|Reverse((at, ..))| *at <= cx.now) {
            let env = self.env.clone();
            let mut env = lock(&env);
            while let Some(Reverse((at, _, key))) = self.due.peek().copied() {
                if at > cx.now {
                    break;
                }
                self.due.pop();
                let slot = self.slots.remove(key);
                done.push(self.finish(slot, &mut env));
            }
        }
        self.ask(cx);
    }
}

impl PathLane {
    fn ask(&self, cx: &mut Cx<'_>) {
        if let Some(Reverse((at, ..))) = self.due.peek() {
            cx.wake_at(*at);
        }
    }

    /// The layers above promise what a path may rely on.
    fn check(&self, bio: &Bio, env: &mut Env) {
        let p = self.index;
        let what = || format!("{} {}", crate::trace::op_name(bio.op), range_text(bio));
        if env.paths[p].barred > 0 && !env.dead {
            env.violate(|| format!("path p{p} was given a {} while the device above is suspended", what()));
        }
        if env.paths[p].failed && env.paths[p].access.is_some() && !env.dead {
            env.violate(|| format!("path p{p} has failed, and was given a {}", what()));
        }
        if !bio.is_in_flight() {
            env.violate(|| format!("path p{p} was given a {} that nobody started", what()));
        }
        if let Err(status) = self.limits.check(bio.op, bio.sector, bio.sectors) {
            env.violate(|| format!("path p{p} was given a {} against its limits: {status}", what()));
        }
        if bio.sectors > self.limits.max_for(bio.op) {
            env.violate(|| format!("path p{p} was given a {} longer than its limit", what()));
        }
        if bio.op.has_data() && bio.data.len() as u64 != bio.sectors.bytes() {
            env.violate(|| format!("path p{p} was given a {} with {} bytes of data", what(), bio.data.len()));
        }
        if bio.op == Op::Flush && (bio.sectors != Sectors::ZERO || bio.sector.0 != 0) {
            env.violate(|| format!("path p{p} was given a {} with a range", what()));
        }
    }

    fn finish(&mut self, mut slot: Slot, env: &mut Env) -> Box<Bio> {
        let state = &mut env.paths[self.index];
        state.in_flight -= 1;
        let (disk, mode) = (state.disk, state.mode);
        if env.dead || slot.crashes != env.crashes {
            if env.dead && slot.crashes != env.crashes {
                tear(env, disk, &mut slot);
            }
            slot.fate = Status::Ok;
        } else {
            if mode == Mode::Down && slot.fate.is_ok() && !env.calm {
                slot.fate = Status::Transport;
            }
            let all = slot.bio.sectors.0;
            let target = match slot.fate.is_ok() {
                true => all,
                false => env.chance.between(slot.applied, all),
            };
            apply(env, disk, &mut slot, target, self.index);
            if slot.fate.is_ok() {
                settle(env, disk, &slot);
            } else {
                env.blame(self.index, slot.fate);
            }
        }
        let bio = &mut slot.bio;
        let args = [
            self.index as u64,
            op_bits(bio.op, bio.flags.bits()),
            range(bio.sector.0, bio.sectors.0),
            slot.fate as u64,
        ];
        let (at, core) = (env.now, env.core);
        env.trace.add(at, core, Kind::PathOut, args);
        bio.end_with(slot.fate);
        slot.bio
    }
}

fn range_text(bio: &Bio) -> String {
    format!("{}+{}", bio.sector, bio.sectors)
}

/// How and when a request will end.
fn fate(env: &mut Env, index: usize, bio: &Bio) -> (Status, Nanos) {
    let state = &env.paths[index];
    let (mode, patience, latency, disk) = (state.mode, state.patience, state.latency, state.disk);
    if env.calm || env.dead {
        return (Status::Ok, env.now + Nanos(1 + env.chance.below(20_000)));
    }
    let usual = |env: &mut Env, times: u64| Nanos(env.now.0 + 1 + env.chance.span(latency) * times);
    let refused = |env: &mut Env| {
        let status = env.chance.pick(&[Status::Offline, Status::Transport, Status::IoErr, Status::Resource]);
        (status, Nanos(env.now.0 + env.chance.below(20_000)))
    };
    let own = |env: &mut Env| match env.chance.one_in(env.disks[disk].error_one_in) {
        false => Status::Ok,
        true if bio.op == Op::Read || bio.op == Op::Flush => env.chance.pick(&[
            Status::Medium,
            Status::IoErr,
            Status::Timeout,
            Status::Target,
            Status::Protection,
        ]),
        true => env.chance.pick(&[
            Status::Medium,
            Status::NoSpace,
            Status::IoErr,
            Status::Timeout,
            Status::DevResource,
        ]),
    };
    match mode {
        Mode::Down => refused(env),
        Mode::Flapping if env.chance.one_in(2) => refused(env),
        Mode::Up | Mode::Flapping => (own(env), usual(env, 1)),
        Mode::Slow(times) => (own(env), usual(env, times)),
        Mode::Silent => (Status::Timeout, env.now + Nanos(patience)),
    }
}

/// Lets sectors up to `upto` of the request take effect.
fn apply(env: &mut Env, index: usize, slot: &mut Slot, upto: u64, path: usize) {
    let from = std::mem::replace(&mut slot.applied, upto);
    if from >= upto {
        return;
    }
    let Env { disks, chance, violation, .. } = env;
    let disk: &mut Disk = &mut disks[index];
    let bio = &mut slot.bio;
    if bio.end().0 > disk.sectors() {
        return; // reported when it came in
    }
    let start = bio.sector.0;
    let durable = bio.flags.contains(BioFlags::FUA) && disk.fua;
    match bio.op {
        // A part that takes effect now is read now: later writes don't change it.
        Op::Read => stamp::write(&mut bio.data, from..upto, |i| disk.read(start + i)),
        Op::Write => stamp::sectors(&bio.data, |i, bytes| {
            if (from..upto).contains(&i) {
                match disk.stamp(bytes) {
                    Some(s) => disk.write(start + i, s, durable),
                    None if violation.is_none() => {
                        *violation =
                            Some(format!("path p{path} was given mixed content for sector {}", start + i));
                    }
                    None => {}
                }
            }
        }),
        Op::WriteZeroes => (from..upto).for_each(|i| disk.write(start + i, 0, durable)),
        Op::Discard => (from..upto).for_each(|i| disk.discard(start + i, chance)),
        Op::Flush => {}
    }
}

/// What only a request that succeeds does.
fn settle(env: &mut Env, disk: usize, slot: &Slot) {
    if slot.bio.op == Op::Flush {
        env.disks[disk].flush(slot.mark);
    }
}

/// The power failed while this was in flight: any of its sectors may have reached the medium.
fn tear(env: &mut Env, index: usize, slot: &mut Slot) {
    if !slot.bio.op.is_write() {
        return;
    }
    let Env { disks, chance, .. } = env;
    let disk = &mut disks[index];
    let start = slot.bio.sector.0;
    let (from, end) = (slot.applied, slot.bio.sectors.0);
    match slot.bio.op {
        Op::Write => stamp::sectors(&slot.bio.data, |i, bytes| {
            let lands = i >= from && chance.one_in(2);
            if let Some(s) = disk.stamp(bytes).filter(|_| lands) {
                disk.write(start + i, s, true);
            }
        }),
        Op::WriteZeroes => {
            for i in from..end {
                if chance.one_in(2) {
                    disk.write(start + i, 0, true);
                }
            }
        }
        _ => {}
    }
}
