//! Conditions under which an unanswered write may fail, so that it can be sent elsewhere.
//!
//! A server may execute a write long after its client abandoned the connection. For example, a
//! server that was stopped finds the bytes in its socket when it continues. So such writes are
//! *held* ([`super::abandoned`]) until one of these is true:
//!
//! * The server answers: the write is done.
//! * The server closes the connection (`fence=closed`). For a killed process this is a proof,
//!   because its system calls have ended by then. It is also a proof for a server that completes
//!   its requests before it closes.
//! * A time has passed (`fence=wait:TIME`).
//! * A command has ended with status 0 (`fence=exec:PATH`). The command must guarantee that nothing
//!   is written any more that was sent on a connection that existed when the command began. With a
//!   command, a close proves nothing. No lane connects while the command runs, because it may kill
//!   the server that listens.
//!
//! A connection exists from the end of its handshake. A connection that was started before the
//! command and answered after it leads to a new server, which the command does not cover. So runs
//! are numbered, and a connection notes the number of runs at that moment.
//!
//! All lanes of all exports with the same address and command share its runs
//! ([`FenceCommandRuns`]): a second run would kill the server that the first has started. The lock
//! is taken only by lanes with held writes: when they begin to hold them, when a run ends, and when
//! a time has passed.

use super::remote_export::RemoteExport;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use udm_core::{Nanos, WaitQueue};
use udm_wire::uri::{ServerStoppedProof, TimeSpan};

/// Wait before a failed command is run again: at first, and at most.
const BACK_OFF: Nanos = Nanos(500_000_000);
const BACK_OFF_MAX: Nanos = Nanos(30_000_000_000);

/// Fence state of an export, shared by all its lanes.
pub(super) struct ExportFence {
    runs: Arc<FenceCommandRuns>,
    /// Number of held writes of all lanes.
    held: AtomicUsize,
    /// Number of abandoned connections with held writes that ended with an error of this system.
    /// The server's close of such a connection cannot be detected.
    unheard: AtomicUsize,
}

/// The runs of a command for an address.
pub(crate) struct FenceCommandRuns {
    /// Woken when a run has ended.
    wait_queue: Arc<WaitQueue>,
    /// Number of held writes, and of abandoned connections with held writes.
    held: AtomicUsize,
    abandoned: AtomicUsize,
    /// Number of runs that have begun, and the number of the last run that succeeded; 0 before the
    /// first.
    begun: AtomicU64,
    fenced: AtomicU64,
    run: Mutex<FenceCommandRunState>,
}

impl Default for FenceCommandRuns {
    fn default() -> FenceCommandRuns {
        FenceCommandRuns {
            wait_queue: Arc::new(WaitQueue::new()),
            held: AtomicUsize::new(0),
            abandoned: AtomicUsize::new(0),
            begun: AtomicU64::new(0),
            fenced: AtomicU64::new(0),
            run: Mutex::default(),
        }
    }
}

impl FenceCommandRuns {
    /// Number of runs that have begun. A connection notes it when its handshake ends.
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(SeqCst)
    }

    fn run(&self) -> MutexGuard<'_, FenceCommandRunState> {
        self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// State of the current or last run.
#[derive(Default)]
struct FenceCommandRunState {
    running: bool,
    /// Failures since the last success, and the last error.
    failures: u32,
    error: String,
    /// Earliest time of the next run; `None` until a lane checks after a failure.
    next: Option<Nanos>,
}

/// Fence state for a lane with held writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FenceStatus {
    /// The server cannot execute the writes any more.
    Done,
    /// The command runs. The wait queue is woken when it ends.
    Running,
    /// The command failed. A check at this time runs it again.
    Again(Nanos),
}

impl ExportFence {
    pub(super) fn new(runs: Arc<FenceCommandRuns>) -> ExportFence {
        ExportFence { runs, held: AtomicUsize::new(0), unheard: AtomicUsize::new(0) }
    }

    /// Wait queue that is woken when a run has ended.
    pub(super) fn wait_queue(&self) -> &Arc<WaitQueue> {
        &self.runs.wait_queue
    }

    /// Number of runs that have begun ([`FenceCommandRuns::begun`]).
    pub(super) fn runs(&self) -> u64 {
        self.runs.begun()
    }

    /// Returns true if the server cannot execute any more what was sent on a connection that noted
    /// `runs`.
    pub(super) fn covers(&self, runs: u64) -> bool {
        runs < self.runs.fenced.load(SeqCst)
    }

    /// Records that a connection was abandoned with `writes` held writes.
    pub(super) fn add_held_writes(&self, writes: usize) {
        self.held.fetch_add(writes, SeqCst);
        self.runs.held.fetch_add(writes, SeqCst);
        self.runs.abandoned.fetch_add(1, SeqCst);
    }

    /// Records that a connection with held writes ended with an error of this system.
    pub(super) fn add_lost_connection(&self) {
        self.unheard.fetch_add(1, SeqCst);
    }

    /// Records that `writes` writes are not held any more.
    pub(super) fn remove_held_writes(&self, writes: usize) {
        self.held.fetch_sub(writes, SeqCst);
        self.runs.held.fetch_sub(writes, SeqCst);
    }

    /// Records that a connection has no held writes left. `lost` is true if
    /// [`ExportFence::add_lost_connection`] was called for it.
    pub(super) fn release(&self, lost: bool) {
        self.runs.abandoned.fetch_sub(1, SeqCst);
        self.unheard.fetch_sub(usize::from(lost), SeqCst);
    }

    /// Returns true while a command may kill the server that listens.
    pub(super) fn is_running(&self) -> bool {
        self.runs.abandoned.load(SeqCst) > 0 || self.runs.run().running
    }

    /// Checks at `now` whether the held writes of a connection that noted `runs` can still be
    /// executed. Starts `command` if it does not run.
    pub(super) fn check(server: &Arc<RemoteExport>, command: &Path, runs: u64, now: Nanos) -> FenceStatus {
        let this = &server.fencing.runs;
        let mut run = this.run();
        if server.fencing.covers(runs) {
            return FenceStatus::Done;
        }
        if run.running {
            return FenceStatus::Running;
        }
        if run.failures > 0 {
            let shift = run.failures.min(16) - 1;
            let back_off = Nanos(BACK_OFF.0 << shift).min(BACK_OFF_MAX);
            let next = *run.next.get_or_insert(now + back_off);
            if now < next {
                return FenceStatus::Again(next);
            }
        }
        run.running = true;
        let number = this.begun.fetch_add(1, SeqCst) + 1;
        drop(run);
        let of = Arc::clone(server);
        let then = move |result| of.fencing.runs.ended(number, result, &of);
        server.sockets.fence(command, &server.uri.plain(), Box::new(then));
        FenceStatus::Running
    }

    /// Returns the reason why writes are held, in one line; `None` if none are.
    pub(super) fn stall_reason(&self, fence: &ServerStoppedProof) -> Option<String> {
        let held = self.held.load(SeqCst);
        (held > 0).then(|| format!("{held} writes wait until {}", self.until(fence)))
    }

    /// Returns the text of what held writes wait for.
    pub(super) fn until(&self, fence: &ServerStoppedProof) -> String {
        match fence {
            ServerStoppedProof::Closed => {
                let lost = match self.unheard.load(SeqCst) {
                    0 => String::new(),
                    n => format!(" ({n} connections were lost on this side, so a close cannot be seen)"),
                };
                format!("the server answers or closes the connection{lost}")
            }
            ServerStoppedProof::Wait(time) => {
                format!("the server answers or {} have passed", TimeSpan(*time))
            }
            ServerStoppedProof::Exec(command) => {
                let run = self.runs.run();
                let failed = match run.failures {
                    0 => String::new(),
                    n => format!(" (failed {n} times: {})", run.error),
                };
                format!("the server answers or is fenced by {}{failed}", command.display())
            }
        }
    }
}

impl FenceCommandRuns {
    /// Handles the end of run `number`.
    fn ended(&self, number: u64, result: Result<(), String>, server: &RemoteExport) {
        let mut run = self.run();
        let (uri, held) = (server.uri.plain(), self.held.load(SeqCst));
        run.running = false;
        run.next = None;
        match result {
            Ok(()) => {
                run.failures = 0;
                self.fenced.fetch_max(number, SeqCst);
                tracing::warn!("{uri}: fenced: waiting writes that fail over: {held}");
            }
            Err(why) => {
                run.failures = run.failures.saturating_add(1);
                tracing::warn!("{uri}: fence: {why}: {held} writes wait, and the command is run again");
                run.error = why;
            }
        }
        drop(run);
        self.wait_queue.wake_up();
    }
}

#[cfg(test)]
#[path = "fence_tests.rs"]
mod tests;
