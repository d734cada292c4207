//! Control-side I/O on the cores: each run is a task on a core, and the thread that loads the table
//! waits for its result.
//!
//! Contract: the thread waits for a limited time, and until the load is cancelled. Requests in
//! flight then stay with the task on its core until they complete, and no more are sent. The task
//! runs in the background, with a lane of its own, and ends with the program.

use crate::verbs::CancelToken;
use crate::wait_hook;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, TryRecvError, sync_channel};
use std::time::{Duration, Instant};
use udm_core::control_io::{ControlIoResult, ControlIoRunGuard};
use udm_core::{Batch, ControlIo, ControlIoBatch, CoreCommandSender, Device, DeviceControlError};

/// Time limit of a run.
const PATIENCE: Duration = Duration::from_secs(30);

/// Interval in which a waiting thread checks for a cancellation.
const STEP: Duration = Duration::from_millis(50);

/// I/O for a thread that loads a table, run by the cores.
pub struct TableLoadControlIo<'a> {
    cores: &'a dyn CoreCommandSender,
    patience: Duration,
    cancel_token: Option<&'a CancelToken>,
}

impl<'a> TableLoadControlIo<'a> {
    /// I/O on `cores`, which must be running.
    #[must_use]
    pub fn new(cores: &'a dyn CoreCommandSender) -> TableLoadControlIo<'a> {
        TableLoadControlIo { cores, patience: PATIENCE, cancel_token: None }
    }

    /// Changes the time limit of a run (30 s).
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> TableLoadControlIo<'a> {
        TableLoadControlIo { patience, ..self }
    }

    /// Cancels I/O with `cancel_token`: the current run and all later ones fail with its error.
    #[must_use]
    pub fn until(self, cancel_token: &'a CancelToken) -> TableLoadControlIo<'a> {
        TableLoadControlIo { cancel_token: Some(cancel_token), ..self }
    }

    fn check_cancelled(&self) -> Result<(), DeviceControlError> {
        let reason = self.cancel_token.and_then(CancelToken::reason);
        reason.map_or(Ok(()), |why| Err(DeviceControlError::new(why.errno, why.reason.clone())))
    }
}

impl ControlIo for TableLoadControlIo<'_> {
    fn run(&self, device: &Arc<dyn Device>, bios: Batch) -> ControlIoResult {
        let (sender, receiver) = sync_channel(1);
        // The waiting thread may have given up.
        let tell = move |answer| drop(sender.try_send(answer));
        self.check_cancelled()?;
        let _run = ControlIoRunGuard::new(device, bios, tell, |task| self.cores.start(task))?;
        let end = Instant::now() + self.patience;
        loop {
            if wait_hook::has_wait_hook() {
                match receiver.try_recv() {
                    Ok(answer) => return answer,
                    Err(TryRecvError::Disconnected) => return Err(ControlIoBatch::shutdown_error()),
                    Err(TryRecvError::Empty) => {}
                }
                self.check_cancelled()?;
                wait_hook::run_wait_hook();
                continue;
            }
            let left = end.saturating_duration_since(Instant::now());
            match receiver.recv_timeout(left.min(STEP)) {
                Ok(answer) => return answer,
                Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                    return Err(ControlIoBatch::timeout_error());
                }
                Err(RecvTimeoutError::Timeout) => self.check_cancelled()?,
                Err(RecvTimeoutError::Disconnected) => return Err(ControlIoBatch::shutdown_error()),
            }
        }
    }
}
