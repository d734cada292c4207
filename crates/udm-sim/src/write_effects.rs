//! What a request does to its disk, and when: at once, in parts, when it ends, or after it has
//! failed.

use crate::disk::SimDisk;
use crate::environment::Env;
use crate::path::PathRequest;
use crate::stamp;
use udm_core::{BioFlags, Nanos, Op};

/// A write that has failed and takes effect all the same, later.
pub struct LateWrite {
    /// When.
    pub due: Nanos,
    disk: usize,
    /// Sectors and what they will hold.
    sectors: Vec<(u64, u64)>,
}

/// The most that a write may lag behind its error, in ns.
const LATE_MAX: u64 = 50_000_000;

/// A write that ended with an error: what of it has not taken effect may do so later. Only where
/// nobody sends it again: that the first try is over when a path returns it is what a path
/// promises.
pub(crate) fn schedule_late_write(env: &mut Env, disk: usize, slot: &PathRequest) {
    let left = slot.bio.sectors.0 - slot.applied;
    let disk_is_log = env.disks[disk].log;
    if slot.bio.op != Op::Write || left == 0 || env.calm || !env.lags || disk_is_log || !env.chance.one_in(3)
    {
        return;
    }
    let (start, applied) = (slot.bio.sector.0, slot.applied);
    let due = env.now + Nanos(1 + env.chance.below(LATE_MAX));
    let mut sectors = Vec::new();
    stamp::sectors(&slot.bio.data, |i, bytes| {
        if let Some(stamp) = stamp::of(bytes).filter(|_| i >= applied) {
            sectors.push((start + i, stamp));
        }
    });
    env.late.push(LateWrite { due, disk, sectors });
}

/// Lets the late writes that are due by `now` take effect; what each put where, for the model.
pub(crate) fn land(env: &mut Env, now: Nanos) -> Vec<(usize, u64, u64)> {
    let mut landed = Vec::new();
    let Env { late, disks, seen, .. } = env;
    late.retain(|l| {
        if l.due > now {
            return true;
        }
        for (sector, stamp) in &l.sectors {
            disks[l.disk].write(*sector, *stamp, false);
            landed.push((l.disk, *sector, *stamp));
        }
        seen.landed += 1;
        false
    });
    landed
}

impl LateWrite {
    /// Is `stamp` still to come?
    #[must_use]
    pub fn has(&self, stamp: u64) -> bool {
        self.sectors.iter().any(|(_, s)| *s == stamp)
    }
}

/// Lets sectors up to `upto` of the request take effect.
pub(crate) fn apply(env: &mut Env, index: usize, slot: &mut PathRequest, upto: u64, path: usize) {
    let from = std::mem::replace(&mut slot.applied, upto);
    if from >= upto {
        return;
    }
    let Env { disks, chance, violation, .. } = env;
    let disk: &mut SimDisk = &mut disks[index];
    let bio = &mut slot.bio;
    if bio.end().0 > disk.sectors() {
        return; // reported when it came in
    }
    let start = bio.sector.0;
    let durable = bio.flags.contains(BioFlags::FUA) && disk.fua;
    match bio.op {
        // A part that takes effect now is read now: later writes don't change it.
        Op::Read => {
            stamp::write(&mut bio.data, from..upto, |i| disk.read(start + i));
            for i in from..upto {
                if let Some(bytes) = disk.nonuniform_bytes(start + i) {
                    stamp::put(&mut bio.data, i, bytes);
                }
            }
        }
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
pub(crate) fn succeed(env: &mut Env, disk: usize, slot: &PathRequest) {
    if slot.bio.op == Op::Flush {
        env.disks[disk].flush(slot.mark);
    }
}

/// The power failed while this was in flight: any of its sectors may have reached the medium.
pub(crate) fn tear_write(env: &mut Env, index: usize, slot: &mut PathRequest) {
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
