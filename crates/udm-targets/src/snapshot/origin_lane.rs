//! The data path of an origin that has snapshots.
//!
//! Reads pass. A write passes if its chunks are settled in each snapshot that covers them.
//! Otherwise it waits here while free chunks are copied. Writes are not split: a write of many
//! chunks waits for all of them, and they are copied together.

use super::copy_engine::ChunkCopyEngine;
use super::exception_map::ChunkState;
use super::growth::StoreFullReason;
use super::settings::FullStoreWritePolicy;
use super::state::{Snapshot, SnapshotHealth};
use smallvec::SmallVec;
use std::sync::Arc;
use udm_core::{Batch, Bio, Cx, DeviceControlError, DrainMode, Lane, Op, OwnWork, Status};
use udm_dm::target::ResolvedDevice;

/// A write that must wait.
struct WaitingOriginWrite {
    bio: Box<Bio>,
    /// For each snapshot, the epoch whose readers must have completed; 0 if it is not known yet
    /// because chunks are not copied.
    epochs: SmallVec<[u64; 2]>,
    /// The write's free chunks have been claimed.
    has_claimed: bool,
    /// The write waits, or may wait, for another lane.
    waits_for_others: bool,
    /// A store is full and its policy is to fail the write.
    fails: bool,
}

impl WaitingOriginWrite {
    fn new(bio: Box<Bio>, parts: usize) -> WaitingOriginWrite {
        let epochs = SmallVec::from_elem(0, parts);
        WaitingOriginWrite { bio, epochs, has_claimed: false, waits_for_others: false, fails: false }
    }

    /// True if snapshot `part` no longer holds the write back.
    fn may_pass(&mut self, engine: &ChunkCopyEngine, part: usize) -> bool {
        let snapshot = &engine.parts()[part].snapshot;
        let Some((first, last)) = snapshot.to_copy(&self.bio) else { return true };
        match self.epochs[part] {
            0 => snapshot.health() == SnapshotHealth::Valid && snapshot.map.are_settled(first, last),
            epoch if snapshot.readers.are_past_or_notify(epoch) => {
                snapshot.map.settle(first, last);
                true
            }
            _ => {
                self.waits_for_others = true;
                false
            }
        }
    }
}

/// Marks an epoch that must be obtained.
const UNKNOWN: u64 = u64::MAX;

/// The progress of a write with one snapshot.
enum OriginWriteProgress {
    /// The write may pass.
    Pass,
    /// The write's chunks are in the store; reads of the origin may be in flight.
    Copied,
    /// The write's chunks are not in the store yet.
    Wait,
    /// The store has no room, and the write must fail.
    Fail,
}

/// The lane of an origin with snapshots.
pub(super) struct OriginLane {
    engine: ChunkCopyEngine,
    waiting: Vec<WaitingOriginWrite>,
    /// Some waiting write waits, or may wait, for other lanes.
    waits_for_others: bool,
    down: Batch,
    /// Bios completed here, for the next poll.
    ended: Batch,
}

impl OriginLane {
    /// A lane over `origin` that copies for `snapshots`.
    ///
    /// # Errors
    /// If a device cannot be opened on this core.
    pub(super) fn open(
        origin: &ResolvedDevice,
        snapshots: &[Arc<Snapshot>],
        cx: &mut Cx<'_>,
    ) -> Result<OriginLane, DeviceControlError> {
        let engine = ChunkCopyEngine::open(origin, snapshots, cx)?;
        Ok(OriginLane {
            engine,
            waiting: Vec::new(),
            waits_for_others: false,
            down: Batch::new(),
            ended: Batch::new(),
        })
    }

    /// True if `bio` may pass at once.
    #[inline]
    fn passes(&self, bio: &Bio) -> bool {
        bio.op != Op::Write || self.engine.parts().iter().all(|part| part.snapshot.lets_pass(bio))
    }

    /// Sends waiting writes that may pass, and starts the copies that the others need. Returns true
    /// if a bio was sent.
    fn look(&mut self, cx: &mut Cx<'_>) -> bool {
        let parts = self.engine.parts().len();
        let mut waiting = std::mem::take(&mut self.waiting);
        for part in 0..parts {
            let mut wants = false;
            for one in waiting.iter_mut().filter(|one| one.epochs[part] == 0) {
                match self.step(one, part) {
                    OriginWriteProgress::Copied => {
                        one.epochs[part] = UNKNOWN;
                        wants = true;
                    }
                    OriginWriteProgress::Fail => one.fails = true,
                    OriginWriteProgress::Pass | OriginWriteProgress::Wait => {}
                }
            }
            if wants {
                // One epoch for all writes of this round, obtained after all chunk states were
                // read.
                let epoch = self.engine.parts()[part].snapshot.readers.advance_epoch();
                let wants = waiting.iter_mut().filter(|one| one.epochs[part] == UNKNOWN);
                wants.for_each(|one| one.epochs[part] = epoch);
            }
        }
        let (engine, mut waits_for_others) = (&self.engine, false);
        let go = waiting.extract_if(.., |one| {
            one.has_claimed = true;
            let goes = one.fails || (0..parts).all(|part| one.may_pass(engine, part));
            waits_for_others |= !goes && one.waits_for_others;
            goes
        });
        for mut one in go {
            if one.fails {
                one.bio.end_with(Status::NoSpace);
                self.ended.push(one.bio);
            } else {
                self.down.push(one.bio);
            }
        }
        (self.waiting, self.waits_for_others) = (waiting, waits_for_others);
        self.engine.begin(cx);
        let any = !self.down.is_empty();
        if any {
            self.engine.children.submit(0, &mut self.down, cx);
            cx.wake_now();
        }
        any
    }

    /// The progress of a write with snapshot `part`. Free chunks are claimed.
    fn step(&mut self, one: &mut WaitingOriginWrite, part: usize) -> OriginWriteProgress {
        let snapshot = &self.engine.parts()[part].snapshot;
        let Some((first, last)) = snapshot.to_copy(&one.bio) else { return OriginWriteProgress::Pass };
        // Any lane may write the records.
        one.waits_for_others |= snapshot.commits.is_some();
        if snapshot.health() == SnapshotHealth::Invalidating {
            one.waits_for_others = true;
            return OriginWriteProgress::Wait;
        }
        let (mut copied, mut settled) = (true, true);
        for chunk in first..=last {
            match self.engine.parts()[part].snapshot.place(chunk) {
                ChunkState::Settled(_) => {}
                ChunkState::Copied(_) => settled = false,
                ChunkState::Pending => {
                    copied = false;
                    one.waits_for_others |= !one.has_claimed;
                }
                ChunkState::Free => {
                    copied = false;
                    match self.engine.claim(part, chunk) {
                        Ok(true) => {}
                        Ok(false) => one.waits_for_others = true,
                        Err(full) => {
                            one.waits_for_others = true;
                            return self.is_full(part, full);
                        }
                    }
                }
            }
        }
        match (copied, settled) {
            (true, true) => OriginWriteProgress::Pass,
            (true, false) => OriginWriteProgress::Copied,
            (false, _) => OriginWriteProgress::Wait,
        }
    }

    /// Handles a copy without room in the store.
    #[cold]
    fn is_full(&mut self, part: usize, full: StoreFullReason) -> OriginWriteProgress {
        match self.engine.parts()[part].snapshot.on_full(full) {
            FullStoreWritePolicy::Invalidate => self.engine.lose(part, "Unable to allocate exception"),
            FullStoreWritePolicy::Pause => {}
            FullStoreWritePolicy::Fail => {
                self.engine.parts()[part].snapshot.notify_without_room();
                return OriginWriteProgress::Fail;
            }
        }
        OriginWriteProgress::Wait
    }
}

impl Lane for OriginLane {
    /// Snapshots that are about to be removed are still listed when the new lanes are opened.
    fn begin(&mut self, _: &mut Cx<'_>) -> Option<Box<dyn Lane>> {
        self.engine.keep_active();
        self.engine.parts().is_empty().then(|| self.engine.children.remove(0))
    }

    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if self.engine.parts().iter().all(|part| part.snapshot.lets_anything_pass()) {
            self.engine.children.submit(0, batch, cx);
        } else {
            self.submit_looked(batch, cx);
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        // Usually all bios pass and nothing is copied.
        let calm = self.waiting.is_empty() && self.ended.is_empty();
        if !(calm && self.engine.poll_through(done, cx)) {
            self.poll_all(done, cx);
        }
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        if how == DrainMode::NoFlush {
            back.extend(self.waiting.drain(..).map(|one| one.bio));
        }
        self.engine.drain(how, back, cx, |_| {});
    }

    fn own_work(&self) -> OwnWork {
        self.engine.own_work()
    }
}

impl OriginLane {
    /// Submits a batch that may have writes that must wait.
    #[inline(never)]
    fn submit_looked(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if self.engine.parts().iter().all(|part| part.snapshot.lets_all_pass(batch)) {
            self.engine.children.submit(0, batch, cx);
        } else {
            self.submit_some(batch, cx);
        }
    }

    /// Submits a batch with writes that must wait.
    #[inline(never)]
    fn submit_some(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let parts = self.engine.parts().len();
        for bio in batch.drain(..) {
            if self.passes(&bio) {
                self.down.push(bio);
            } else {
                self.waiting.push(WaitingOriginWrite::new(bio, parts));
            }
        }
        self.engine.has_news(true);
        self.look(cx);
        self.rest(cx);
    }

    #[inline(never)]
    fn poll_all(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.engine.poll(done, cx);
        if !self.waiting.is_empty() {
            if self.engine.has_news(self.waits_for_others) && self.look(cx) {
                // They may have completed already.
                self.engine.poll(done, cx);
            }
            self.rest(cx);
        }
        done.append(&mut self.ended);
    }

    /// Registers for a wakeup if writes wait.
    fn rest(&mut self, cx: &mut Cx<'_>) {
        if !self.waiting.is_empty() {
            self.engine.wait(self.waits_for_others, cx);
        }
        if !self.ended.is_empty() {
            cx.wake_now();
        }
    }
}
