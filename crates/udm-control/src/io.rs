//! Control-side I/O by the cores: each run is a task on one of them, and the thread that loads the
//! table waits for its answer.
//!
//! Contract: the thread waits for a limited time, and until the load is called off. What is in
//! flight then stays with the task, on its core, until it comes home, and nothing more is sent. The
//! task is in the background, with a lane of its own: nobody waits for it, and the end of the
//! program ends it.

use crate::verbs::CancelToken;
use crate::wait_hook;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, TryRecvError, sync_channel};
use std::time::{Duration, Instant};
use udm_core::control_io::{RunHandle, RunResult};
use udm_core::{Batch, ControlIo, ControlTransfer, Cores, Device, OpenError};

/// How long a run may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// How often a thread that waits looks whether it still has to.
const STEP: Duration = Duration::from_millis(50);

/// I/O of the thread that loads a table, by the cores.
pub struct CoresIo<'a> {
    cores: &'a dyn Cores,
    patience: Duration,
    cancel_token: Option<&'a CancelToken>,
}

impl<'a> CoresIo<'a> {
    /// By `cores`, which take turns.
    #[must_use]
    pub fn new(cores: &'a dyn Cores) -> CoresIo<'a> {
        CoresIo { cores, patience: PATIENCE, cancel_token: None }
    }

    /// With another limit on how long a run may take (30 s).
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> CoresIo<'a> {
        CoresIo { patience, ..self }
    }

    /// Until `cancel_token` is called: what it is called with is the error of the run that waits then, and
    /// of each that comes later.
    #[must_use]
    pub fn until(self, cancel_token: &'a CancelToken) -> CoresIo<'a> {
        CoresIo { cancel_token: Some(cancel_token), ..self }
    }

    fn called_off(&self) -> Result<(), OpenError> {
        let reason = self.cancel_token.and_then(CancelToken::reason);
        reason.map_or(Ok(()), |why| Err(OpenError::new(why.errno, why.reason.clone())))
    }
}

impl ControlIo for CoresIo<'_> {
    fn run(&self, device: &Arc<dyn Device>, bios: Batch) -> RunResult {
        let (tell, told) = sync_channel(1);
        // Whoever asked may have given up.
        let tell = move |answer| drop(tell.try_send(answer));
        self.called_off()?;
        let _run = RunHandle::new(device, bios, tell, |task| self.cores.start(task))?;
        let end = Instant::now() + self.patience;
        loop {
            if wait_hook::has_wait_hook() {
                match told.try_recv() {
                    Ok(answer) => return answer,
                    Err(TryRecvError::Disconnected) => return Err(ControlTransfer::shutdown_error()),
                    Err(TryRecvError::Empty) => {}
                }
                self.called_off()?;
                wait_hook::run_wait_hook();
                continue;
            }
            let left = end.saturating_duration_since(Instant::now());
            match told.recv_timeout(left.min(STEP)) {
                Ok(answer) => return answer,
                Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                    return Err(ControlTransfer::timeout_error());
                }
                Err(RecvTimeoutError::Timeout) => self.called_off()?,
                Err(RecvTimeoutError::Disconnected) => return Err(ControlTransfer::shutdown_error()),
            }
        }
    }
}
