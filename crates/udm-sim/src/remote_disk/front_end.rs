//! The front end of a core: it sends random requests to its devices, and checks the results.

use super::shared::{FrontEndSharedState, FrontEndSharedStateRef, WorkloadPhase, lock_front_end_state};
use crate::plan::{DisturbanceClass, ExcludedDisturbances, RunPlan};
use crate::rng::SimRng;
use crate::trace::TraceEventKind;
use std::any::Any;
use std::sync::Arc;
use udm_core::{
    Batch, Bio, BioFlags, BioTaskLaneId, BufPool, Device, DeviceId, Nanos, Op, Sector, Sectors, Segments,
};
use udm_runtime::{FrontCx, FrontEnd};

/// Longest request in sectors. A stamp has ten bits for the sector within the request.
const LONGEST: u64 = 1000;

/// Reads in flight per device while all data is read back.
const CHECKS: usize = 4;

/// Kind of load of a front end.
#[derive(Clone, Copy)]
pub(crate) struct LoadProfile {
    /// Maximum number of requests in flight per device.
    pub(crate) depth: usize,
    /// Time between two bursts, in ns.
    pub(crate) pause: u64,
    /// Percentage of reads among reads and writes.
    pub(crate) reads: u64,
    /// Percentage of flushes.
    pub(crate) flushes: u64,
    /// One of this many writes has a preflush.
    pub(crate) preflushes: u64,
    /// One of this many requests may have any length.
    pub(crate) longs: u64,
    /// Bytes of memory kept for reuse.
    pub(crate) keep: usize,
    pub(crate) without: ExcludedDisturbances,
}

impl LoadProfile {
    /// Draws the load of a run.
    pub(super) fn draw(plan: &RunPlan, build: &mut SimRng) -> LoadProfile {
        LoadProfile {
            depth: plan.depth.unwrap_or(build.pick(&[1, 4, 16, 64])),
            pause: build.pick(&[1_000, 100_000, 10_000_000]),
            reads: build.pick(&[20, 50, 80]),
            flushes: build.pick(&[6, 6, 1]),
            preflushes: build.pick(&[10, 10, 2]),
            longs: build.pick(&[32, 32, 4]),
            keep: 4 << 20,
            without: plan.without,
        }
    }
}

/// The front end of a core.
pub(crate) struct SimFrontEnd {
    shared: FrontEndSharedStateRef,
    profile: LoadProfile,
    devices: Vec<Arc<dyn Device>>,
    slots: Vec<BioTaskLaneId>,
    /// Requests in flight, by device.
    in_flight: Vec<usize>,
    /// Address of messages from the world.
    topic: DeviceId,
    next: Nanos,
    bufs: BufPool,
    bios: Batch,
    is_closed: bool,
}

impl SimFrontEnd {
    pub(crate) fn new(
        shared: FrontEndSharedStateRef,
        profile: LoadProfile,
        devices: Vec<Arc<dyn Device>>,
        topic: DeviceId,
    ) -> SimFrontEnd {
        SimFrontEnd {
            shared,
            profile,
            in_flight: vec![0; devices.len()],
            devices,
            slots: Vec::new(),
            topic,
            next: Nanos(0),
            bufs: BufPool::new(profile.keep),
            bios: Batch::new(),
            is_closed: false,
        }
    }

    fn open(&mut self, cx: &mut FrontCx<'_, '_>) {
        cx.subscribe(self.topic);
        for device in &self.devices[self.slots.len()..] {
            match cx.open(device) {
                Ok(slot) => self.slots.push(slot),
                Err(e) => {
                    let wrong = format!("a device can't be opened: {e}");
                    lock_front_end_state(&self.shared).wrong.get_or_insert(wrong);
                }
            }
        }
    }

    fn go_on(&mut self, cx: &mut FrontCx<'_, '_>) {
        if self.is_closed {
            return;
        }
        self.open(cx);
        let (shared, now) = (self.shared.clone(), cx.now());
        let mut shared = lock_front_end_state(&shared);
        match shared.phase {
            WorkloadPhase::Work if self.next <= now => {
                for device in 0..self.slots.len() {
                    let room = self.profile.depth.saturating_sub(self.in_flight[device]) as u64;
                    for _ in 0..(1 + shared.work.below(8)).min(room) {
                        let bio = self.draw(device, &mut shared);
                        self.send(device, bio, &mut shared, cx);
                    }
                }
                self.next = now + Nanos(1 + shared.work.span(self.profile.pause));
                cx.wake_at(self.next);
            }
            WorkloadPhase::Work => cx.wake_at(self.next),
            WorkloadPhase::Rest => cx.wake_at(Nanos::NEVER),
            WorkloadPhase::Check => {
                for device in 0..self.slots.len() {
                    while self.in_flight[device] < CHECKS
                        && let Some((sector, len)) = shared.model.next_readback(device)
                    {
                        let bio = self.make(Op::Read, BioFlags::empty(), sector, len, &mut shared);
                        self.send(device, bio, &mut shared, cx);
                    }
                }
            }
            WorkloadPhase::Close => {
                cx.wake_at(Nanos::NEVER);
                if self.in_flight.iter().all(|n| *n == 0) {
                    self.slots.drain(..).for_each(|slot| cx.close(slot));
                    self.is_closed = true;
                    shared.closed += 1;
                }
            }
        }
    }

    fn send(
        &mut self,
        device: usize,
        mut bio: Box<Bio>,
        shared: &mut FrontEndSharedState,
        cx: &mut FrontCx<'_, '_>,
    ) {
        let id = shared.model.begin(device, &mut bio, shared.step, cx.now());
        let (core, now) = (cx.core().0, cx.now());
        shared.trace.add_submit(now, core, id, device, &bio);
        self.in_flight[device] += 1;
        cx.submit(self.slots[device], bio);
    }

    fn draw(&mut self, device: usize, shared: &mut FrontEndSharedState) -> Box<Bio> {
        let limits = shared.model.exports[device].limits;
        let without = self.profile.without;
        let c = &mut shared.work;
        let LoadProfile { reads, flushes, preflushes, longs, .. } = self.profile;
        let read = c.below(100) < reads;
        let op = match c.below(100) {
            n if n < flushes && !without.has(DisturbanceClass::Flush) => Op::Flush,
            6..10 if !without.has(DisturbanceClass::Trim) && limits.max_discard.0 > 0 => Op::Discard,
            10..15 if !without.has(DisturbanceClass::Trim) && limits.max_write_zeroes.0 > 0 => {
                Op::WriteZeroes
            }
            _ if read => Op::Read,
            _ => Op::Write,
        };
        if op == Op::Flush {
            return self.make(op, BioFlags::empty(), 0, 0, shared);
        }
        let mut flags = BioFlags::empty();
        if op != Op::Read && !without.has(DisturbanceClass::Flush) {
            flags.set(BioFlags::FUA, limits.fua && c.one_in(10));
            flags.set(BioFlags::PREFLUSH, op == Op::Write && limits.write_cache && c.one_in(preflushes));
        }
        flags.set(BioFlags::NOUNMAP, op == Op::WriteZeroes && c.one_in(3));
        let long = c.one_in(longs) && !without.has(DisturbanceClass::Long);
        let most = match c.below(64) {
            _ if long => LONGEST,
            0..5 => 64,
            5..24 => 1,
            _ => 8,
        };
        let block = u64::from(limits.logical_block) / udm_core::SECTOR_SIZE;
        let most = most.min(limits.max_for(op).0).min(limits.size.0);
        let len = c.between(1, most).next_multiple_of(block).min(limits.max_for(op).0).min(limits.size.0);
        let room = limits.size.0 - len;
        let near = if c.one_in(4) { room } else { room.min(48) };
        let mut sector = c.below(near + 1) / block * block;
        if !without.has(DisturbanceClass::Wild) && c.one_in(200) {
            sector = if c.one_in(2) { room + block } else { c.any() >> 16 };
        }
        self.make(op, flags, sector, len, shared)
    }

    fn make(
        &mut self,
        op: Op,
        flags: BioFlags,
        sector: u64,
        len: u64,
        shared: &mut FrontEndSharedState,
    ) -> Box<Bio> {
        let mut bio = self.bios.pop().unwrap_or_default();
        (bio.op, bio.flags, bio.sector, bio.sectors) = (op, flags, Sector(sector), Sectors(len));
        if op.has_data() {
            let bytes = Sectors(len).bytes() as usize;
            let pieces = !self.profile.without.has(DisturbanceClass::Pieces) && shared.work.one_in(16);
            let cut = if pieces { shared.work.below(bytes as u64) as usize } else { 0 };
            bio.data = Segments::from(self.bufs.get(bytes - cut));
            if cut > 0 {
                bio.data.push(self.bufs.get(cut));
            }
        }
        bio
    }
}

impl FrontEnd for SimFrontEnd {
    fn gather(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.go_on(cx);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut FrontCx<'_, '_>) {
        for mut bio in done.drain(..) {
            let mut shared = lock_front_end_state(&self.shared);
            let (core, now, step) = (cx.core().0, cx.now(), shared.step);
            shared.trace.add(now, core, TraceEventKind::Done, [bio.cookie, bio.status as u64, 0, 0]);
            let quiet = shared.phase == WorkloadPhase::Check;
            match shared.model.end(&bio, step, quiet) {
                Ok(device) => self.in_flight[device] -= 1,
                Err(wrong) => {
                    shared.wrong.get_or_insert(wrong);
                }
            }
            // After an error the front end pauses, because a lane that backs off fails requests at
            // once.
            if !bio.status.is_ok() {
                self.next = self.next.max(now + Nanos(shared.work.span(20_000_000)));
            }
            drop(shared);
            std::mem::take(&mut bio.data).into_iter().for_each(|buf| self.bufs.put(buf));
            self.bios.push(bio);
        }
        self.go_on(cx);
    }

    fn message(&mut self, _: &(dyn Any + Send), cx: &mut FrontCx<'_, '_>) {
        self.next = cx.now();
        self.go_on(cx);
    }

    fn stop(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.go_on(cx);
    }

    fn is_closed(&self) -> bool {
        self.is_closed
    }
}
