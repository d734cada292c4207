//! The work of a merge: one unit of records after the other, from the last record backwards.
//!
//! ```text
//!  pick a unit ──► mark it, wait for writes ──► copy ──► flush the origin ──► clear its records
//!  ──► forget it
//! ```
//!
//! The chunks of a unit may be anywhere; consecutive chunks are copied as one run. The records of a
//! unit are cleared with one write, after a flush has made the chunks durable in the origin. So a
//! crash leaves each chunk in the store or in the origin, or equal in both.

use super::{MergeOriginCowDevice, MergeShared, MergeStoreFlushDevice, MergeUnit, MergeUnitStartDecision};
use crate::snapshot::copy_jobs::{block_sectors, max_copy_piece_size};
use std::sync::{Arc, PoisonError};
use udm_core::{
    Batch, Bio, BioFlags, BioTask, BioTaskCx, BioTaskLaneId, Buf, Op, OwnWork, SECTOR_SIZE, Sector, Sectors,
    Segments, WaitQueueSubscription,
};
use udm_dm::EventKind;
use udm_wire::cow::{ExceptionStoreLayout, RECORD_LEN, SnapshotException};

/// Maximum bytes of a unit; a unit has at least one chunk.
const UNIT_BYTES_MAX: u64 = 1 << 20;

/// Maximum bytes and pieces of a unit in flight.
const IN_FLIGHT_MAX: u64 = 1 << 20;
const PIECES_MAX: usize = 64;

/// Maximum bytes of records read and written at once.
const RECORDS_MAX: u64 = 4096;

/// The step of the task.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MergeStep {
    /// Begins a unit, if there is one.
    StartUnit,
    /// Reads the last records.
    Read,
    /// Waits until no write of the unit's chunks is in flight.
    Settle(u64),
    /// Copies the chunks.
    Copy,
    /// Flushes the origin.
    Flush,
    /// Reads the records again, to clear those of the unit.
    ReadAgain,
    /// Clears the records.
    Clear,
    /// Nothing is left, or something failed.
    Idle,
}

/// The lanes of the task.
#[derive(Clone, Copy)]
struct MergeTaskLanes {
    origin: BioTaskLaneId,
    store: BioTaskLaneId,
}

/// The task that merges one snapshot.
pub(super) struct MergeTask {
    shared: Arc<MergeShared>,
    layout: ExceptionStoreLayout,
    lanes: Option<MergeTaskLanes>,
    wait_handle: Option<WaitQueueSubscription>,
    step: MergeStep,
    unit: MergeUnit,
    /// Index of the run that is being read, and the sectors read of it.
    run: usize,
    at: u64,
    in_flight: usize,
    /// Bytes of pieces in flight.
    bytes: u64,
    failed: bool,
    stopping: bool,
}

impl MergeTask {
    pub(super) fn new(shared: Arc<MergeShared>) -> MergeTask {
        let layout = ExceptionStoreLayout::new(shared.binding.snapshot.chunk);
        MergeTask {
            shared,
            layout,
            lanes: None,
            wait_handle: None,
            step: MergeStep::StartUnit,
            unit: MergeUnit::default(),
            run: 0,
            at: 0,
            in_flight: 0,
            bytes: 0,
            failed: false,
            stopping: false,
        }
    }

    /// Position of the last `count` records: the first sector and length of the bytes to read, and
    /// the index of the first record in them. At most as many records as a unit has.
    fn window(&self, count: u64) -> (Sector, Sectors, usize) {
        let last = self.shared.left() - 1;
        let per_area = self.layout.records();
        let (area, place) = (last / per_area, last % per_area);
        let unit = self.layout.chunk().bytes().min(RECORDS_MAX);
        let per_unit = unit / RECORD_LEN as u64;
        let begin = place - place % per_unit;
        let sector = self.layout.area(area) * u64::from(self.layout.chunk().sectors())
            + begin * RECORD_LEN as u64 / SECTOR_SIZE;
        (Sector(sector), Sectors(unit / SECTOR_SIZE), (place + 1 - begin - count) as usize)
    }

    /// Runs the steps until the task must wait.
    fn go_on(&mut self, cx: &mut dyn BioTaskCx) {
        loop {
            let Some(lanes) = self.lanes(cx) else { return };
            match self.step {
                MergeStep::StartUnit => {
                    if self.stopping || self.shared.left() == 0 {
                        return self.rest(cx);
                    }
                    let wait_handle = self
                        .wait_handle
                        .take()
                        .unwrap_or_else(|| cx.subscribe(&self.shared.binding.snapshot.wait_queue));
                    let seen = wait_handle.epoch();
                    let (begin, quiet) = (self.shared.begin(), wait_handle.register_wait(seen));
                    self.wait_handle = Some(wait_handle);
                    match begin {
                        MergeUnitStartDecision::Go => {}
                        MergeUnitStartDecision::Wait if quiet => return,
                        MergeUnitStartDecision::Wait => continue,
                        MergeUnitStartDecision::Stop => return self.rest(cx),
                    }
                    let left = self.shared.uncommitted.lock().unwrap_or_else(PoisonError::into_inner).take();
                    match left {
                        Some(unit) => {
                            self.unit = unit;
                            self.read_records(MergeStep::ReadAgain, lanes, cx);
                        }
                        None => self.read_records(MergeStep::Read, lanes, cx),
                    }
                }
                MergeStep::Settle(epoch) => {
                    let wait_handle = self
                        .wait_handle
                        .take()
                        .unwrap_or_else(|| cx.subscribe(&self.shared.binding.snapshot.wait_queue));
                    let seen = wait_handle.epoch();
                    let settled = self.shared.binding.snapshot.readers.are_past_or_notify(epoch);
                    let quiet = settled || wait_handle.register_wait(seen);
                    self.wait_handle = Some(wait_handle);
                    if !settled {
                        if quiet {
                            return;
                        }
                        continue;
                    }
                    self.step = MergeStep::Copy;
                }
                MergeStep::Copy => {
                    while !self.failed && self.read_piece(lanes, cx) {}
                    if self.in_flight > 0 {
                        return;
                    }
                    if self.failed {
                        return self.fail(true, cx);
                    }
                    self.step = MergeStep::Flush;
                    let mut bio = Bio::new();
                    bio.op = Op::Flush;
                    self.submit(lanes.origin, bio, cx);
                }
                _ if self.in_flight > 0 => return,
                MergeStep::Idle => return,
                MergeStep::Read | MergeStep::Flush | MergeStep::ReadAgain | MergeStep::Clear => return,
            }
            if self.in_flight > 0 && self.step != MergeStep::Copy {
                return;
            }
        }
    }

    fn lanes(&mut self, cx: &mut dyn BioTaskCx) -> Option<MergeTaskLanes> {
        if self.lanes.is_none() && self.step != MergeStep::Idle {
            let binding = &self.shared.binding;
            let opened = cx.open(&MergeOriginCowDevice::device(binding)).and_then(|origin| {
                match cx.open(&MergeStoreFlushDevice::device(binding)) {
                    Ok(store) => Ok(MergeTaskLanes { origin, store }),
                    Err(error) => {
                        cx.close(origin);
                        Err(error)
                    }
                }
            });
            match opened {
                Ok(lanes) => self.lanes = Some(lanes),
                Err(error) => {
                    tracing::error!("shutting down merge: {error}");
                    self.report();
                    self.step = MergeStep::Idle;
                }
            }
        }
        self.lanes
    }

    fn submit(&mut self, lane: BioTaskLaneId, bio: Box<Bio>, cx: &mut dyn BioTaskCx) {
        self.in_flight += 1;
        cx.submit(lane, bio);
    }

    fn read_records(&mut self, step: MergeStep, lanes: MergeTaskLanes, cx: &mut dyn BioTaskCx) {
        self.step = step;
        let (sector, sectors, _) = self.window(1);
        let data = Buf::zeroed(sectors.bytes() as usize);
        self.submit(lanes.store, Bio::read(sector, sectors, data.into()), cx);
    }

    /// Picks the unit of the last records and marks its chunks.
    fn pick(&mut self, data: &Segments) {
        let (_, _, last) = self.window(1);
        let mut bytes = vec![0; data.len()];
        data.copy_to(&mut bytes);
        let snapshot = &self.shared.binding.snapshot;
        let most = (UNIT_BYTES_MAX / snapshot.chunk.bytes()).max(1);
        let mut unit = MergeUnit::default();
        for index in (0..=last).rev() {
            let Some(SnapshotException { old, new }) = SnapshotException::decode(&bytes, index) else {
                break;
            };
            let is_known = snapshot.place(old).store_chunk() == Some(new) && !unit.has(old);
            if unit.len() == most || !is_known {
                break;
            }
            unit.add(old, new);
        }
        if unit.len() == 0 {
            // Another program has changed the store.
            self.failed = true;
            return;
        }
        for (old, new) in unit.chunks() {
            snapshot.map.unsettle(old, new);
        }
        (self.unit, self.run, self.at) = (unit, 0, 0);
        self.step = MergeStep::Settle(snapshot.readers.advance_epoch());
    }

    /// Reads the next piece of the unit. Returns false if there is none, or enough is in flight.
    fn read_piece(&mut self, lanes: MergeTaskLanes, cx: &mut dyn BioTaskCx) -> bool {
        let binding = &self.shared.binding;
        let (snapshot, store) = (&binding.snapshot, binding.line.store.device.limits());
        let block = block_sectors(&store);
        let most = max_copy_piece_size(&[binding.line.origin.device.limits(), store]);
        let Some(run) = self.unit.runs.get(self.run) else { return false };
        if self.in_flight == PIECES_MAX || self.bytes >= IN_FLIGHT_MAX {
            return false;
        }
        let start = snapshot.start_of(run.old);
        let end = snapshot.start_of(run.old + run.len).min(snapshot.origin_size());
        let left = end.saturating_sub(start + self.at);
        if left == 0 {
            (self.run, self.at) = (self.run + 1, 0);
            return true;
        }
        let wanted = most.0.min(left);
        // The store is read in whole blocks.
        let sectors = Sectors(wanted.next_multiple_of(block));
        let from = Sector(snapshot.start_of(run.new) + self.at);
        let mut bio = Bio::read(from, sectors, Buf::zeroed(sectors.bytes() as usize).into());
        // The destination sector in the origin.
        bio.cookie = start + self.at;
        self.at += wanted;
        self.bytes += sectors.bytes();
        self.submit(lanes.store, bio, cx);
        true
    }

    fn came_back(&mut self, mut bio: Box<Bio>, lanes: MergeTaskLanes, cx: &mut dyn BioTaskCx) {
        self.in_flight -= 1;
        if !bio.status.is_ok() {
            return self.came_back_bad(&bio, cx);
        }
        match (self.step, bio.op) {
            (MergeStep::Read, _) => {
                self.pick(&bio.data);
                if self.failed {
                    self.fail(false, cx);
                }
            }
            (MergeStep::Copy, Op::Read) if !self.failed => {
                bio.op = Op::Write;
                bio.sector = Sector(bio.cookie);
                let left = self.shared.binding.snapshot.origin_size().saturating_sub(bio.sector.0);
                if bio.sectors.0 > left {
                    self.bytes -= Sectors(bio.sectors.0 - left).bytes();
                    bio.sectors = Sectors(left);
                    let mut whole = vec![0; bio.data.len()];
                    bio.data.copy_to(&mut whole);
                    let mut part = Buf::zeroed(bio.sectors.bytes() as usize);
                    part.copy_from_slice(&whole[..bio.sectors.bytes() as usize]);
                    bio.data = part.into();
                }
                self.submit(lanes.origin, bio, cx);
            }
            (MergeStep::Copy, Op::Write) => self.bytes -= bio.sectors.bytes(),
            (MergeStep::Flush, _) => self.read_records(MergeStep::ReadAgain, lanes, cx),
            (MergeStep::ReadAgain, _) => self.clear(bio, lanes, cx),
            (MergeStep::Clear, _) => self.forget(),
            _ => {}
        }
    }

    fn came_back_bad(&mut self, bio: &Bio, cx: &mut dyn BioTaskCx) {
        let what = match (self.step, bio.op) {
            (MergeStep::Flush, _) => "Flush after merge failed",
            (MergeStep::Clear | MergeStep::ReadAgain | MergeStep::Read, _) => "Error in the exception store",
            (_, Op::Read) => "Read error",
            _ => "Write error",
        };
        if !self.failed {
            tracing::error!("{what}: shutting down merge: {}", bio.status);
        }
        self.failed = true;
        match self.step {
            MergeStep::Copy => self.bytes -= bio.sectors.bytes(),
            // The chunks and their records are unchanged.
            MergeStep::Flush => self.fail(true, cx),
            MergeStep::Read => self.fail(false, cx),
            _ => {
                *self.shared.uncommitted.lock().unwrap_or_else(PoisonError::into_inner) =
                    Some(self.unit.clone());
                self.fail(false, cx);
            }
        }
    }

    /// Clears the records of the unit, which is durable in the origin.
    fn clear(&mut self, mut bio: Box<Bio>, lanes: MergeTaskLanes, cx: &mut dyn BioTaskCx) {
        self.step = MergeStep::Clear;
        let (sector, sectors, first) = self.window(self.unit.len());
        let mut buf = Buf::zeroed(sectors.bytes() as usize);
        bio.data.copy_to(&mut buf);
        let at = first * RECORD_LEN;
        buf[at..at + self.unit.len() as usize * RECORD_LEN].fill(0);
        bio.data = buf.into();
        (bio.op, bio.sector, bio.sectors) = (Op::Write, sector, sectors);
        bio.flags = BioFlags::PREFLUSH | BioFlags::FUA | BioFlags::META;
        self.submit(lanes.store, bio, cx);
    }

    /// Removes the unit from the map: its chunks are only in the origin now.
    fn forget(&mut self) {
        let snapshot = &self.shared.binding.snapshot;
        self.unit.chunks().for_each(|(old, _)| snapshot.map.forget(old));
        if let Some(commits) = &snapshot.commits {
            commits.take_back(self.unit.len());
        }
        self.step = MergeStep::StartUnit;
        self.shared.end();
        if self.shared.left() == 0 {
            snapshot.emit(EventKind::MergeDone, "all of the snapshot is in its origin");
            snapshot.event();
        }
    }

    /// Stops the merge until the next resume. If `back` is set, the chunks of the unit are
    /// unchanged and are settled again.
    fn fail(&mut self, back: bool, cx: &mut dyn BioTaskCx) {
        if back {
            let map = &self.shared.binding.snapshot.map;
            self.unit.chunks().for_each(|(chunk, _)| map.settle(chunk, chunk));
        }
        self.report();
        self.shared.end();
        self.rest(cx);
    }

    fn report(&self) {
        self.shared.failed.store(true, std::sync::atomic::Ordering::Release);
        let snapshot = &self.shared.binding.snapshot;
        snapshot.emit(EventKind::MergeFailed, "the merge has stopped: an I/O error");
        snapshot.event();
    }

    fn rest(&mut self, cx: &mut dyn BioTaskCx) {
        self.step = MergeStep::Idle;
        self.wait_handle = None;
        if let Some(MergeTaskLanes { origin, store }) = self.lanes.take() {
            cx.close(origin);
            cx.close(store);
        }
    }
}

impl BioTask for MergeTask {
    fn turn(&mut self, cx: &mut dyn BioTaskCx) {
        self.go_on(cx);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut dyn BioTaskCx) {
        for bio in done.drain(..) {
            match self.lanes {
                Some(lanes) => self.came_back(bio, lanes, cx),
                None => debug_assert!(false, "lanes are open while something is in flight"),
            }
        }
        self.go_on(cx);
    }

    fn stop(&mut self, cx: &mut dyn BioTaskCx) {
        self.stopping = true;
        if self.step == MergeStep::StartUnit {
            self.rest(cx);
        }
    }

    fn is_over(&self) -> bool {
        self.stopping && self.step == MergeStep::Idle && self.in_flight == 0
    }

    fn own_work(&self) -> OwnWork {
        OwnWork::Background
    }
}
