//! Control-side I/O by the cores: each run is a task on one of them, and the thread that loads the
//! table waits for its answer.
//!
//! Contract: the thread waits for a limited time. What is in flight then stays with the task, on
//! its core, until it comes home, and nothing more is sent. The task is in the background, with a
//! lane of its own: nobody waits for it, and the end of the program ends it.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;
use udm_core::control_io::{Answer, run_task};
use udm_core::{Batch, ControlIo, Cores, Device, Errand};

/// How long a run may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// I/O of the thread that loads a table, by the cores.
pub struct CoresIo<'a> {
    cores: &'a dyn Cores,
    patience: Duration,
}

impl<'a> CoresIo<'a> {
    /// By `cores`, which take turns.
    #[must_use]
    pub fn new(cores: &'a dyn Cores) -> CoresIo<'a> {
        CoresIo { cores, patience: PATIENCE }
    }

    /// With another limit on how long a run may take (30 s).
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> CoresIo<'a> {
        CoresIo { patience, ..self }
    }
}

impl ControlIo for CoresIo<'_> {
    fn run(&self, device: &Arc<dyn Device>, bios: Batch) -> Answer {
        let (tell, told) = sync_channel(1);
        // Whoever asked may have given up.
        let tell = move |answer| drop(tell.try_send(answer));
        // Dropping it stops the task.
        let _task = self.cores.start(run_task(device, bios, tell));
        match told.recv_timeout(self.patience) {
            Ok(done) => done,
            Err(RecvTimeoutError::Timeout) => Err(Errand::no_answer()),
            Err(RecvTimeoutError::Disconnected) => Err(Errand::called_off()),
        }
    }
}
