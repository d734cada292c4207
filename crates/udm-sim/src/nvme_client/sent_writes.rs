//! Which controller has each write. A write may be at two controllers only if the first one can
//! execute it no more.

use super::conn::DiskCommand;
use crate::model::Violation;
use crate::remote_disk::model::RemoteDiskModel;
use std::collections::BTreeMap;

/// The controllers that have received writes.
#[derive(Default)]
pub(super) struct SentWrites {
    /// The last controller, by the stamp of the first sector of a write.
    controllers: BTreeMap<u64, usize>,
}

/// Number of the request of a stamp.
fn request_of(stamp: u64) -> u64 {
    stamp >> 10
}

impl SentWrites {
    /// Records that `controller` has received a write with these stamps.
    pub(super) fn note(&mut self, controller: usize, stamps: &[u64]) {
        stamps.first().map(|stamp| self.controllers.insert(*stamp, controller));
    }

    /// Checks a write that lands after the end of its controller or connection: the initiator still
    /// waits for it, and has not sent it to another controller.
    ///
    /// # Errors
    /// The write was sent elsewhere, or has completed.
    pub(super) fn check_late(&self, job: &DiskCommand, model: &RemoteDiskModel) -> Result<(), Violation> {
        let Some(stamp) = job.stamps.first() else { return Ok(()) };
        let (request, had) = (request_of(*stamp), job.controller);
        match (model.submitted_at(request), self.controllers.get(stamp)) {
            (None, _) => Err(format!("write {request} lands late from controller {had}, and has completed")),
            (_, Some(has)) if *has != had => {
                Err(format!("write {request} lands late from controller {had}, and controller {has} has it"))
            }
            _ => Ok(()),
        }
    }

    /// Drops what is not needed any more.
    pub(super) fn forget(&mut self, model: &RemoteDiskModel) {
        self.controllers.retain(|stamp, _| model.submitted_at(request_of(*stamp)).is_some());
    }
}
