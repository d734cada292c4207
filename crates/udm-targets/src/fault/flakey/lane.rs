//! The data path of a flakey target.
//!
//! A request that must be corrupted is sent as a clone. A read is sent with its own data, which is
//! corrupted on completion. A write is sent with a corrupted copy, and its own data is kept in the
//! note.

use super::features::{FlakeyFeatures, FlakeyWriteAction, PROBABILITY_BASE};
use super::{FREE_COPY_BYTES, FlakeyTarget, UpDownSchedule};
use crate::fault::SectorOffsetLane;
use crate::fault::clone_table::InFlightBioClones;
use rand::RngExt;
use std::sync::Arc;
use udm_core::{Batch, Bio, BufPool, Cx, DeviceControlError, DrainMode, Lane, Op, OwnWork, Segments, Status};

pub(super) struct FlakeyLane {
    under: SectorOffsetLane,
    phases: Arc<UpDownSchedule>,
    features: FlakeyFeatures,
    /// The note is the data of a write whose clone carries a copy.
    clones: InFlightBioClones<Segments>,
    copies: BufPool,
    /// Bios that failed or were dropped in `submit`; the next `poll` returns them.
    ended: Batch,
    /// Scratch for a batch; empty between calls.
    scratch: Batch,
}

/// The action on a request while the device is down.
enum FlakeyDownBioAction {
    Pass,
    Corrupt,
    End(Status),
}

fn set_byte(data: &mut Segments, at: usize, value: u8) {
    data.copy_from_at(at, &[value]);
}

/// Corrupts the data as the features require. A random number is drawn for every request that
/// random corruption could affect.
fn corrupt_data(features: &FlakeyFeatures, probability: u32, bio: &mut Bio, cx: &mut Cx<'_>) {
    if let Some((at, value)) = features.corrupt_byte(bio) {
        set_byte(&mut bio.data, at, value);
    }
    let len = bio.data.len();
    if probability > 0 && len > 0 && cx.rng().random_range(0..PROBABILITY_BASE) < probability {
        let (at, value) = (cx.rng().random_range(0..len), cx.rng().random());
        set_byte(&mut bio.data, at, value);
    }
}

impl FlakeyLane {
    pub(super) fn open(target: &FlakeyTarget, cx: &mut Cx<'_>) -> Result<FlakeyLane, DeviceControlError> {
        Ok(FlakeyLane {
            under: target.under.open(cx)?,
            phases: Arc::clone(&target.phases),
            features: target.features,
            clones: InFlightBioClones::new(cx),
            copies: BufPool::new(FREE_COPY_BYTES),
            ended: Batch::new(),
            scratch: Batch::new(),
        })
    }

    fn fault_action(&self, bio: &Bio) -> FlakeyDownBioAction {
        let may_corrupt = |probability| probability > 0 || self.features.corrupt_byte(bio).is_some();
        match (bio.op, self.features.writes) {
            (Op::Read, _) if self.features.error_reads => FlakeyDownBioAction::End(Status::IoErr),
            (Op::Read, _) if may_corrupt(self.features.random_read) => FlakeyDownBioAction::Corrupt,
            (Op::Read, _) => FlakeyDownBioAction::Pass,
            (_, FlakeyWriteAction::Drop) => FlakeyDownBioAction::End(Status::Ok),
            (_, FlakeyWriteAction::Fail) => FlakeyDownBioAction::End(Status::IoErr),
            (Op::Write, FlakeyWriteAction::Pass) if may_corrupt(self.features.random_write) => {
                FlakeyDownBioAction::Corrupt
            }
            (_, FlakeyWriteAction::Pass) => FlakeyDownBioAction::Pass,
        }
    }

    fn clone_to_corrupt(&mut self, mut bio: Box<Bio>, cx: &mut Cx<'_>) -> Box<Bio> {
        if bio.op == Op::Read || bio.data.is_empty() {
            return self.clones.begin(bio, Segments::new());
        }
        let mut copy = self.copies.get(bio.data.len());
        bio.data.copy_to(&mut copy);
        let data = std::mem::replace(&mut bio.data, copy.into());
        let mut clone = self.clones.begin(bio, data);
        corrupt_data(&self.features, self.features.random_write, &mut clone, cx);
        clone
    }

    /// Returns the request of a clone that was handed back unstarted, as it was submitted.
    fn restore_unstarted(&mut self, clone: Box<Bio>) -> Box<Bio> {
        let (mut bio, data) = self.clones.end(clone);
        if !data.is_empty() {
            for copy in std::mem::replace(&mut bio.data, data) {
                self.copies.put(copy);
            }
        }
        bio
    }

    /// Returns the request of a completed clone.
    fn restore_completed(&mut self, clone: Box<Bio>, cx: &mut Cx<'_>) -> Box<Bio> {
        let mut bio = self.restore_unstarted(clone);
        if bio.op == Op::Read && bio.status.is_ok() {
            corrupt_data(&self.features, self.features.random_read, &mut bio, cx);
        }
        bio
    }
}

impl Lane for FlakeyLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if !self.phases.is_down(cx.now()) {
            self.under.submit(batch, cx);
            return;
        }
        let mut down = std::mem::take(&mut self.scratch);
        for mut bio in batch.drain(..) {
            match self.fault_action(&bio) {
                FlakeyDownBioAction::Pass => down.push(bio),
                FlakeyDownBioAction::Corrupt => down.push(self.clone_to_corrupt(bio, cx)),
                FlakeyDownBioAction::End(status) => {
                    bio.end_with(status);
                    self.ended.push(bio);
                }
            }
        }
        self.under.submit(&mut down, cx);
        self.scratch = down;
        if !self.ended.is_empty() {
            // The ended bios need a poll, and no external event will cause one.
            cx.wake_now();
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        done.append(&mut self.ended);
        if self.clones.is_empty() {
            self.under.poll(done, cx);
            return;
        }
        let mut home = std::mem::take(&mut self.scratch);
        self.under.poll(&mut home, cx);
        for bio in home.drain(..) {
            done.push(if self.clones.is_mine(&bio) { self.restore_completed(bio, cx) } else { bio });
        }
        self.scratch = home;
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        let mut home = std::mem::take(&mut self.scratch);
        self.under.drain(how, &mut home, cx);
        for bio in home.drain(..) {
            back.push(if self.clones.is_mine(&bio) { self.restore_unstarted(bio) } else { bio });
        }
        self.scratch = home;
    }

    fn own_work(&self) -> OwnWork {
        self.under.own_work()
    }
}
