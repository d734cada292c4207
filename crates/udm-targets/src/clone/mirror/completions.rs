//! Completions of a mirror's lane: what follows a step of a write.

use super::lane::MirrorLane;
use super::log::writer::LogWriteEnd;
use super::steps::MirrorStep;
use crate::clone::engine::DESTINATION;
use crate::clone::state::CopyFailure;
use udm_core::{Batch, Bio, Buf, Op, Segments, Status};

impl MirrorLane {
    /// Takes the requests of the engine, and the next steps of tracked requests.
    pub(super) fn came_back(&mut self, done: &mut Batch, from: usize) -> bool {
        let mut at = from;
        let mut any = false;
        while at < done.len() {
            if self.is_own(&done[at]) {
                let mut bio = done.swap_remove(at);
                bio.finish();
                self.complete_own(bio);
                any = true;
                continue;
            }
            let Some(step) = self.tracked.take(&mut done[at]) else {
                at += 1;
                continue;
            };
            any = true;
            match self.next_step(&mut done[at], step) {
                Some(next) => {
                    let mut bio = done.swap_remove(at);
                    bio.status = Status::Ok;
                    self.send(bio, next);
                }
                None => {
                    self.unlock(&done[at]);
                    at += 1;
                }
            }
        }
        self.progress |= any;
        any
    }

    /// The step after `step`; `None` if the request is done.
    fn next_step(&mut self, bio: &mut Bio, step: MirrorStep) -> Option<MirrorStep> {
        let is_ok = bio.status.is_ok();
        let goes_on = is_ok && !self.state.is_degraded();
        match step {
            MirrorStep::Source => {
                if !is_ok && bio.op != Op::Flush {
                    self.state.fail_source(bio.status);
                }
                return goes_on.then_some(MirrorStep::Destination);
            }
            MirrorStep::OverwriteSource { region } if goes_on => {
                return Some(MirrorStep::OverwriteDestination { region });
            }
            MirrorStep::OverwriteSource { region } => self.engine.end_claim(region, false),
            MirrorStep::OverwriteDestination { region } => {
                self.engine.end_claim(region, is_ok);
                if !is_ok {
                    // The region is not copied, so the source alone has to have it.
                    let failure = CopyFailure { device: DESTINATION, status: bio.status, region };
                    self.copies().set_copy_failure(failure);
                    bio.status = Status::Ok;
                }
            }
            MirrorStep::ClaimedSource => {
                let regions = self.regions_of(bio);
                if goes_on && regions.clone().any(|region| self.copies().map.is_hydrated(region)) {
                    return Some(MirrorStep::ClaimedDestination);
                }
                if !is_ok {
                    self.state.fail_source(bio.status);
                }
                self.release_claims(regions);
            }
            MirrorStep::ClaimedDestination => {
                self.end_on_destination(bio);
                self.release_claims(self.regions_of(bio));
            }
            MirrorStep::Destination if bio.status == Status::NotSupp && bio.op == Op::Discard => {
                bio.status = Status::Ok;
            }
            MirrorStep::Destination if bio.status == Status::NotSupp && bio.op == Op::WriteZeroes => {
                bio.op = Op::Write;
                bio.data = Buf::zeroed(bio.sectors.bytes() as usize).into();
                return Some(MirrorStep::ZeroFill);
            }
            MirrorStep::Destination => self.end_on_destination(bio),
            MirrorStep::ZeroFill => {
                (bio.op, bio.data) = (Op::WriteZeroes, Segments::default());
                self.end_on_destination(bio);
            }
        }
        None
    }

    fn end_on_destination(&self, bio: &mut Bio) {
        if !bio.status.is_ok() && self.state.fail_destination(bio.status) {
            bio.status = Status::Ok;
        }
    }

    /// Takes a request of the engine or of the writer of the log.
    fn complete_own(&mut self, bio: Box<Bio>) {
        let Some(writer) = self.writer.as_mut().filter(|_| bio.owner == self.log_owner) else {
            return self.engine.complete(bio);
        };
        match writer.complete(bio) {
            LogWriteEnd::Unfinished => {}
            LogWriteEnd::Done => self.wake_due = true,
            LogWriteEnd::Failed(status) => self.state.report_log_failure(status),
        }
    }

    /// Restores a request that a child handed back. It is sent again as a new one, to both devices.
    pub(super) fn hand_back(&mut self, step: MirrorStep, bio: &mut Bio) {
        match step {
            MirrorStep::OverwriteSource { region } | MirrorStep::OverwriteDestination { region } => {
                self.engine.end_claim(region, false);
            }
            MirrorStep::ClaimedSource | MirrorStep::ClaimedDestination => {
                self.release_claims(self.regions_of(bio));
            }
            MirrorStep::ZeroFill => (bio.op, bio.data) = (Op::WriteZeroes, Segments::default()),
            MirrorStep::Source | MirrorStep::Destination => {}
        }
        self.unlock(bio);
    }
}
