//! What has to be proved before a write that was not answered is sent elsewhere.
//!
//! A server may write what it was sent long after its client gave the connection up: one that was
//! stopped finds the bytes in its socket when it goes on, whatever became of our end of it. So such
//! writes are *held* ([`super::abandoned`]) until one of these is true:
//!
//! * the server answers: the write is done;
//! * it closes the connection (`fence=closed`). That proves it of a process that was killed, as its
//!   system calls have ended by then, and of a server that waits for what it has begun before it
//!   closes;
//! * so much time has passed (`fence=wait:TIME`);
//! * a command has ended with status 0 (`fence=exec:PATH`). Whoever gives one promises: what was,
//!   or still is, sent on a connection that was there when the command began is written no more. A
//!   close proves nothing then, and nobody connects while the command runs: it may kill whoever
//!   listens.
//!
//! A connection is there when its handshake is over, and not before: one that was begun before the
//! command and answered behind it leads to a server that the command knows nothing of. So runs are
//! numbered, and a connection notes at that moment how many there have been.
//!
//! All lanes of all exports that have one address and one command share its runs ([`FenceCommandRuns`]): a
//! second one would end the server that the first has started. The lock is taken only by those that
//! hold writes, when they begin to, when the bell rings and when a time is over.

use super::remote_export::RemoteExport;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use udm_core::{Nanos, WaitQueue};
use udm_wire::uri::{Fence, TimeSpan};

/// How soon a command that failed is run again: at first, and at the most.
const BACK_OFF: Nanos = Nanos(500_000_000);
const BACK_OFF_MAX: Nanos = Nanos(30_000_000_000);

/// What all lanes of an export know of it.
pub(super) struct ExportFence {
    runs: Arc<FenceCommandRuns>,
    /// Writes that are held, in all lanes.
    held: AtomicUsize,
    /// Connections that were given up with such and that our system has lost: nobody will hear that
    /// they are closed.
    unheard: AtomicUsize,
}

/// The runs of a command for an address.
pub(crate) struct FenceCommandRuns {
    /// Rung when a run has ended.
    bell: Arc<WaitQueue>,
    /// Writes that are held, and connections that were given up with such.
    held: AtomicUsize,
    abandoned: AtomicUsize,
    /// How many runs have begun, and the number of the last that succeeded; 0 before the first.
    begun: AtomicU64,
    fenced: AtomicU64,
    run: Mutex<RunState>,
}

impl Default for FenceCommandRuns {
    fn default() -> FenceCommandRuns {
        FenceCommandRuns {
            bell: Arc::new(WaitQueue::new()),
            held: AtomicUsize::new(0),
            abandoned: AtomicUsize::new(0),
            begun: AtomicU64::new(0),
            fenced: AtomicU64::new(0),
            run: Mutex::default(),
        }
    }
}

impl FenceCommandRuns {
    /// How many have begun: what a connection notes when its handshake is over.
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(SeqCst)
    }

    fn run(&self) -> MutexGuard<'_, RunState> {
        self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs of the command.
#[derive(Default)]
struct RunState {
    under_way: bool,
    /// How often it has failed since it last succeeded, and how.
    failures: u32,
    error: String,
    /// When it may be run again; `None` while nobody has looked since it failed.
    next: Option<Nanos>,
}

/// What a lane that holds writes finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FenceStatus {
    /// They can be delivered no more.
    FenceDone,
    /// The command runs, and the bell is rung behind it.
    FenceCommandRuns,
    /// It failed, and is run again at that time, when somebody looks.
    Again(Nanos),
}

impl ExportFence {
    pub(super) fn new(runs: Arc<FenceCommandRuns>) -> ExportFence {
        ExportFence { runs, held: AtomicUsize::new(0), unheard: AtomicUsize::new(0) }
    }

    /// Rung when a run has ended.
    pub(super) fn bell(&self) -> &Arc<WaitQueue> {
        &self.runs.bell
    }

    /// How many runs have begun: see [`FenceCommandRuns::begun`].
    pub(super) fn runs(&self) -> u64 {
        self.runs.begun()
    }

    /// True when nothing of a connection that has noted `runs` can be delivered any more.
    pub(super) fn covers(&self, runs: u64) -> bool {
        runs < self.runs.fenced.load(SeqCst)
    }

    /// A connection was given up with `writes` that are held.
    pub(super) fn hold(&self, writes: usize) {
        self.held.fetch_add(writes, SeqCst);
        self.runs.held.fetch_add(writes, SeqCst);
        self.runs.abandoned.fetch_add(1, SeqCst);
    }

    /// Nothing will be heard any more of a connection that has such.
    pub(super) fn lose(&self) {
        self.unheard.fetch_add(1, SeqCst);
    }

    /// `writes` of them are held no more.
    pub(super) fn settled(&self, writes: usize) {
        self.held.fetch_sub(writes, SeqCst);
        self.runs.held.fetch_sub(writes, SeqCst);
    }

    /// A connection has none left; `lost` when [`ExportFence::lose`] was told of it.
    pub(super) fn release(&self, lost: bool) {
        self.runs.abandoned.fetch_sub(1, SeqCst);
        self.unheard.fetch_sub(usize::from(lost), SeqCst);
    }

    /// True while a command may kill whoever listens.
    pub(super) fn is_under_way(&self) -> bool {
        self.runs.abandoned.load(SeqCst) > 0 || self.runs.run().under_way
    }

    /// A lane that has a connection which noted `runs`, with held writes, looks at `now` whether
    /// they can be delivered any more, and has `command` run where nobody has.
    pub(super) fn look(server: &Arc<RemoteExport>, command: &Path, runs: u64, now: Nanos) -> FenceStatus {
        let this = &server.fencing.runs;
        let mut run = this.run();
        if server.fencing.covers(runs) {
            return FenceStatus::FenceDone;
        }
        if run.under_way {
            return FenceStatus::FenceCommandRuns;
        }
        if run.failures > 0 {
            let shift = run.failures.min(16) - 1;
            let back_off = Nanos(BACK_OFF.0 << shift).min(BACK_OFF_MAX);
            let next = *run.next.get_or_insert(now + back_off);
            if now < next {
                return FenceStatus::Again(next);
            }
        }
        run.under_way = true;
        let number = this.begun.fetch_add(1, SeqCst) + 1;
        drop(run);
        let of = Arc::clone(server);
        let then = move |result| of.fencing.runs.ended(number, result, &of);
        server.sockets.fence(command, &server.uri.plain(), Box::new(then));
        FenceStatus::FenceCommandRuns
    }

    /// Why writes wait, in one line; `None` when none do.
    pub(super) fn waits(&self, fence: &Fence) -> Option<String> {
        let held = self.held.load(SeqCst);
        (held > 0).then(|| format!("{held} writes wait until {}", self.until(fence)))
    }

    /// What held writes wait for.
    pub(super) fn until(&self, fence: &Fence) -> String {
        match fence {
            Fence::Closed => {
                let lost = match self.unheard.load(SeqCst) {
                    0 => String::new(),
                    n => format!(" ({n} connections were lost here, and nobody will hear)"),
                };
                format!("the server answers or closes the connection{lost}")
            }
            Fence::Wait(time) => format!("the server answers or {} have passed", TimeSpan(*time)),
            Fence::Exec(command) => {
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
    /// Run `number` has ended.
    fn ended(&self, number: u64, result: Result<(), String>, server: &RemoteExport) {
        let mut run = self.run();
        let (uri, held) = (server.uri.plain(), self.held.load(SeqCst));
        run.under_way = false;
        run.next = None;
        match result {
            Ok(()) => {
                run.failures = 0;
                self.fenced.fetch_max(number, SeqCst);
                tracing::warn!("{uri}: fenced: {held} writes that waited go elsewhere");
            }
            Err(why) => {
                run.failures = run.failures.saturating_add(1);
                tracing::warn!("{uri}: fence: {why}: {held} writes wait, and it is run again");
                run.error = why;
            }
        }
        drop(run);
        self.bell.wake_up();
    }
}

#[cfg(test)]
#[path = "fence_tests.rs"]
mod tests;
