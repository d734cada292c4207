//! A run of control I/O as a task of a core.

use super::ControlIoBatch;
use crate::errno::EBUSY;
use crate::{
    Batch, BioTask, BioTaskCx, BioTaskFactory, BioTaskHandle, BioTaskLaneId, Device, DeviceControlError,
    OwnWork,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Result of a run.
pub type ControlIoResult = Result<Batch, DeviceControlError>;

/// Maximum number of concurrent runs per disk: a disk that hangs blocks a few loads, not all.
const RUNS_MAX: usize = 4;

/// A run in progress. Dropping the handle stops its task: no more bios are sent, and bios in flight
/// stay with the task until they complete. Until then no other run on the disk begins, since a late
/// write must not overwrite a newer one.
#[must_use = "the run is stopped when this is dropped"]
pub struct ControlIoRunGuard {
    /// Alive while bios may be in flight.
    run: Weak<()>,
    disk: Option<Arc<DiskControlIoRuns>>,
    _task: BioTaskHandle,
}

/// The runs of one disk.
#[derive(Default)]
struct DiskControlIoRuns(Mutex<ControlIoRunLists>);

#[derive(Default)]
struct ControlIoRunLists {
    in_progress: Vec<Weak<()>>,
    /// Runs whose handle was dropped.
    abandoned: Vec<Weak<()>>,
}

impl DiskControlIoRuns {
    fn known(&self) -> MutexGuard<'_, ControlIoRunLists> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ControlIoRunLists { in_progress, abandoned } = &mut *known;
        [in_progress, abandoned].into_iter().for_each(|list| list.retain(|run| run.strong_count() > 0));
        known
    }

    /// Adds a run, if one more may begin.
    fn begin(&self, run: Weak<()>) -> Result<(), DeviceControlError> {
        let mut known = self.known();
        if !known.abandoned.is_empty() {
            return Err(DeviceControlError::new(EBUSY, "the store has not answered an earlier load yet"));
        }
        if known.in_progress.len() >= RUNS_MAX {
            return Err(DeviceControlError::new(EBUSY, "other loads wait for the store"));
        }
        known.in_progress.push(run);
        Ok(())
    }
}

impl ControlIoRunGuard {
    /// Runs `bios` on `device` in a task that `start` starts. The core of the task calls `reply`
    /// with the result, or at once if the task is stopped.
    ///
    /// # Errors
    /// EBUSY if an earlier run on the disk was abandoned and has not completed, or if too many runs
    /// wait for the disk.
    pub fn new(
        device: &Arc<dyn Device>,
        bios: Batch,
        reply: impl FnOnce(ControlIoResult) + Send + 'static,
        start: impl FnOnce(BioTaskFactory) -> BioTaskHandle,
    ) -> Result<ControlIoRunGuard, DeviceControlError> {
        let disk = device
            .shared_disk_state()
            .map(|shared_disk_state| shared_disk_state.get_or_default::<DiskControlIoRuns>());
        let token = Arc::new(());
        let run = Arc::downgrade(&token);
        disk.as_ref().map_or(Ok(()), |disk| disk.begin(Weak::clone(&run)))?;
        let task = ControlIoTask {
            transfer: Some(ControlIoBatch::new(&**device, bios)),
            device: Arc::clone(device),
            slot: None,
            reply: Some(Box::new(reply)),
            token: Some((token, disk.clone())),
        };
        Ok(ControlIoRunGuard { run, disk, _task: start(Box::new(move || Box::new(task))) })
    }
}

impl Drop for ControlIoRunGuard {
    fn drop(&mut self) {
        if let Some(disk) = &self.disk {
            disk.known().abandoned.push(Weak::clone(&self.run));
        }
    }
}

type ControlIoCallback = Box<dyn FnOnce(ControlIoResult) + Send>;

struct ControlIoTask {
    device: Arc<dyn Device>,
    slot: Option<BioTaskLaneId>,
    /// `None` when the run is over.
    transfer: Option<ControlIoBatch>,
    /// `None` when the reply has been sent.
    reply: Option<ControlIoCallback>,
    /// Held while bios may be in flight.
    token: Option<(Arc<()>, Option<Arc<DiskControlIoRuns>>)>,
}

impl ControlIoTask {
    fn reply(&mut self, answer: ControlIoResult) {
        if let Some(reply) = self.reply.take() {
            reply(answer);
        }
    }

    /// Sends bios as far as limits allow, and finishes the run once all have completed.
    fn go_on(&mut self, cx: &mut dyn BioTaskCx) {
        let Some(transfer) = &mut self.transfer else { return };
        if let Some(slot) = self.slot {
            while let Some(bio) = transfer.next() {
                cx.submit(slot, bio);
            }
        }
        if transfer.is_over() {
            if let Some(slot) = self.slot.take() {
                cx.close(slot);
            }
            self.token = None;
            if let Some(transfer) = self.transfer.take() {
                self.reply(Ok(transfer.finish()));
            }
        }
    }
}

impl BioTask for ControlIoTask {
    fn turn(&mut self, cx: &mut dyn BioTaskCx) {
        let waits = self.transfer.as_ref().is_some_and(|transfer| !transfer.is_over());
        if waits && self.slot.is_none() && self.reply.is_some() {
            match cx.open(&self.device) {
                Ok(slot) => self.slot = Some(slot),
                Err(error) => {
                    (self.transfer, self.token) = (None, None);
                    self.reply(Err(error));
                }
            }
        }
        self.go_on(cx);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut dyn BioTaskCx) {
        for bio in done.drain(..) {
            if let Some(transfer) = &mut self.transfer {
                transfer.add_completed(bio);
            }
        }
        self.go_on(cx);
    }

    fn stop(&mut self, cx: &mut dyn BioTaskCx) {
        self.reply(Err(ControlIoBatch::shutdown_error()));
        if let Some(transfer) = &mut self.transfer {
            transfer.cancel();
        }
        self.go_on(cx);
    }

    fn is_over(&self) -> bool {
        self.transfer.is_none()
    }

    /// Background: the task has its own lane, and no other work waits for it.
    fn own_work(&self) -> OwnWork {
        OwnWork::Background
    }
}
