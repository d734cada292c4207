//! The data-path half of a device.

use crate::{Batch, Cx};

/// The data-path half of a device on one core. It is not `Send`: a lane never leaves the core that
/// opened it.
///
/// Rules for the code inside `submit` and `poll`: no lock, no system call but the core's ring, no
/// allocation once warm, no formatting, no clock but [`Cx::now`], which is read once a turn at the
/// most and where somebody asks, shared atomics once a batch and not once a request.
///
/// **Who polls for what ends at once.** A lane need not ask for a poll for what ended inside its
/// `submit`: whoever submits polls behind that. The reactor of a core polls each lane that it has
/// given something in the same turn, and takes another turn behind each in which a bio went down or
/// came back to it; who drives a core himself polls before he parks. A lane polls those below in
/// its own `poll`, so what it sends in its `submit`, in its `drain` (a `poll` follows each) or in
/// its `poll` ahead of that of the lane below is polled for. What it sends in its `poll` behind
/// that is not, and may have ended all the same: it polls again, or asks for a turn
/// ([`Cx::wake_now`]).
pub trait Lane {
    /// Takes every bio in `batch` and leaves it empty. Each comes back from `poll` exactly once,
    /// with its `status` set and every other field as it was given. Full is not failed: a lane that
    /// is full parks what it was given.
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>);

    /// Appends the bios that finished since the last call. Never blocks. A lane that waits for a
    /// time says so with [`Cx::wake_at`] in each call, for as long as it waits.
    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>);

    /// The device above is being suspended: end what is only held back, so that nothing stays in
    /// flight for ever. Called before each `poll` until the lane is empty, and after that not
    /// again. With [`Drain::Flush`] held bios go on their way or fail; with [`Drain::NoFlush`] bios
    /// that have not been started may be handed back in `back`, unchanged: they go down again when
    /// the device resumes, perhaps through another table. A lane that holds nothing back has
    /// nothing to do.
    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        let _ = (how, back, cx);
    }

    /// The table that the lane is opened for is the one in use, and the control half has been told:
    /// what it says now holds for the lane. Called once, before the first `submit`, and for lanes
    /// of targets alone. Nothing can fail here, so nothing is opened. A lane that has nothing to do
    /// for this table gives out the one below, which takes its place.
    fn begin(&mut self, cx: &mut Cx<'_>) -> Option<Box<dyn Lane>> {
        let _ = cx;
        None
    }

    /// How many of the bios that it was given it has given up with their last word still to come:
    /// they are on their way to nobody, and come back when something else is settled. Who counts
    /// what is under way does not count them.
    fn held(&self) -> usize {
        0
    }

    /// What the lane has to do by itself, though nothing from above is in flight. A lane above
    /// passes on the most that one of those below says.
    fn busy(&self) -> OwnWork {
        OwnWork::Idle
    }
}

/// What a lane, or a task, has to do by itself. What is more comes later in this list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum OwnWork {
    /// Nothing: it is not visited.
    #[default]
    Idle,
    /// Something that may be left as it is at any moment (a check, a copy ahead of time): it has
    /// turns for as long as it is there, and nobody waits for it, neither a suspend nor a close nor
    /// the end of the program.
    Background,
    /// Something that must end before it may be let go (a log record): a suspend, a close and the
    /// end of the program wait for it.
    Required,
}

/// The two kinds of suspend (`dmsetup suspend`, `dmsetup suspend --noflush`), and the end of the
/// program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drain {
    /// Everything in flight ends; what can't be served fails.
    Flush,
    /// What is only queued is handed back.
    NoFlush,
    /// The program ends, and nobody will come to serve what waits: as [`Drain::Flush`], and mapped
    /// devices end what is parked in them, suspended or not. Something handed back fails.
    End,
}

impl Drain {
    /// True when what can't be served fails and is not kept.
    #[must_use]
    pub fn fails_held(self) -> bool {
        matches!(self, Drain::Flush | Drain::End)
    }
}
