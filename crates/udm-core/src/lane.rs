//! The lane: the data-path half of a device on one core.

use crate::{Batch, Cx};

/// The data-path half of a device on one core. It is not `Send`: a lane never leaves the core that
/// opened it.
///
/// Rules for code in `submit` and `poll`: no lock, no system call but the core's ring, no
/// allocation once warm, no formatting. The only clock is [`Cx::now`], read at most once per turn
/// and only on demand. Shared atomics are touched once per batch, not once per request.
///
/// **Polls after a submit.** The caller always polls after `submit` and after `drain`: the reactor
/// polls each lane that got bios in the same turn, and runs another turn if any bio moved; in
/// library mode the caller polls before it sleeps. A lane polls its lower lanes in its own `poll`.
/// So bios that it submits in `submit`, in `drain`, or in `poll` before it polls the lower lane,
/// are polled. In exactly one case the lane must poll again or call [`Cx::wake_now`]: it submits to
/// a lower lane in `poll` after polling that lane. Such bios may have completed at once.
pub trait Lane {
    /// Takes all bios of `batch` and leaves it empty. `poll` returns each bio exactly once, with
    /// `status` set and all other fields as [`Bio`](crate::Bio) describes. Full is not failed: a
    /// lane that is full queues the bios.
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>);

    /// Appends the bios that completed since the last call. Never blocks. A lane that waits for a
    /// time calls [`Cx::wake_at`] in each poll, as long as it waits.
    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>);

    /// Ends bios that the lane only holds back, because the device above is being suspended. Called
    /// before each `poll` until the lane is empty, then no more. With [`DrainMode::Flush`], held
    /// bios are sent or fail. With [`DrainMode::NoFlush`], bios that have not been started may be
    /// handed back in `back`, unchanged; they are submitted again when the device resumes, perhaps
    /// to another table. A lane that holds nothing back does nothing.
    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        let _ = (how, back, cx);
    }

    /// Begins the use of the lane: its table is live, and the control half has been notified, so
    /// the state of the control half now applies to the lane. Called once, before the first
    /// `submit`, only for lanes of targets. It cannot fail, so it must not open anything. A lane
    /// with nothing to do for this table returns its lower lane, which replaces it.
    fn begin(&mut self, cx: &mut Cx<'_>) -> Option<Box<dyn Lane>> {
        let _ = cx;
        None
    }

    /// Number of submitted bios that are held writes: a server has not answered them and may still
    /// carry them out. They come back once their outcome is known. Counts of bios in flight exclude
    /// them.
    fn held_writes(&self) -> usize {
        0
    }

    /// Own work of the lane, which may exist with no bio from above in flight. A lane with lower
    /// lanes returns the maximum of theirs and its own.
    fn own_work(&self) -> OwnWork {
        OwnWork::Idle
    }
}

/// Own work of a lane or a task, in ascending order of urgency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum OwnWork {
    /// No own work: the lane is not polled for it.
    #[default]
    Idle,
    /// Work that may be abandoned at any moment (a check, a copy ahead of time). The lane is polled
    /// for it, but no suspend, no close and no program end waits for it.
    Background,
    /// Work that must complete (a log record). A suspend, a close and the program end wait for it.
    Required,
}

/// The two kinds of suspend (`dmsetup suspend`, `dmsetup suspend --noflush`), and the end of the
/// program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainMode {
    /// Everything in flight completes; bios that cannot be served fail.
    Flush,
    /// Bios that are only queued are handed back.
    NoFlush,
    /// The program ends: as [`DrainMode::Flush`], and mapped devices fail their queued bios even if
    /// they are suspended. A bio that is handed back fails.
    End,
}

impl DrainMode {
    /// True if bios that cannot be served fail instead of being kept.
    #[must_use]
    pub fn fails_held(self) -> bool {
        matches!(self, DrainMode::Flush | DrainMode::End)
    }
}
