//! The effects of requests on a disk: at once, in parts, at completion, or after a failure.

use crate::disk::SimDisk;
use crate::environment::Env;
use crate::path::PathRequest;
use crate::stamp;
use udm_core::{BioFlags, Nanos, Op};

/// A failed write that takes effect later.
pub struct LateWrite {
    /// Time of the effect.
    pub due: Nanos,
    disk: usize,
    /// The sectors, with their new stamps.
    sectors: Vec<(u64, u64)>,
}

/// Maximum delay of a write's effect after its error, in ns.
const LATE_MAX: u64 = 50_000_000;

/// Schedules a late effect of a failed write, by chance, if the write is not retried. When a path
/// completes a write with an error, a retry must not race with the first attempt.
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
    stamp::for_each_sector(&slot.bio.data, |i, bytes| {
        if let Some(stamp) = stamp::read_sector_stamp(bytes).filter(|_| i >= applied) {
            sectors.push((start + i, stamp));
        }
    });
    env.late.push(LateWrite { due, disk, sectors });
}

/// Applies the late writes due by `now`. Returns disk, sector and stamp of each effect for the
/// model.
pub(crate) fn apply_due_late_writes(env: &mut Env, now: Nanos) -> Vec<(usize, u64, u64)> {
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
    /// True if the effect of `stamp` is still pending.
    #[must_use]
    pub fn has(&self, stamp: u64) -> bool {
        self.sectors.iter().any(|(_, s)| *s == stamp)
    }
}

/// Applies the sectors of a request up to `upto`.
pub(crate) fn apply_bio_up_to_sector(
    env: &mut Env,
    index: usize,
    slot: &mut PathRequest,
    upto: u64,
    path: usize,
) {
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
        // A part that takes effect now is read now. Later writes do not change it.
        Op::Read => {
            stamp::fill_sectors_with_stamps(&mut bio.data, from..upto, |i| disk.read(start + i));
            for i in from..upto {
                if let Some(bytes) = disk.nonuniform_bytes(start + i) {
                    stamp::copy_bytes_to_sector(&mut bio.data, i, bytes);
                }
            }
        }
        Op::Write => stamp::for_each_sector(&bio.data, |i, bytes| {
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

/// Applies the effects that only a successful request has.
pub(crate) fn apply_success_effects(env: &mut Env, disk: usize, slot: &PathRequest) {
    if slot.bio.op == Op::Flush {
        env.disks[disk].flush(slot.mark);
    }
}

/// Applies random sectors of a write that was in flight when the power was cut.
pub(crate) fn tear_write(env: &mut Env, index: usize, slot: &mut PathRequest) {
    if !slot.bio.op.is_write() {
        return;
    }
    let Env { disks, chance, .. } = env;
    let disk = &mut disks[index];
    let start = slot.bio.sector.0;
    let (from, end) = (slot.applied, slot.bio.sectors.0);
    match slot.bio.op {
        Op::Write => stamp::for_each_sector(&slot.bio.data, |i, bytes| {
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
