//! The data path of an origin that has snapshots.
//!
//! Reads pass. A write passes when each snapshot that is about its chunks has them settled; until
//! then it waits here, while the chunks that are free are copied. Nothing is cut: a write of many
//! chunks waits for all of them, and they are copied as one.

use super::engine::Engine;
use super::map::Place;
use super::settings::OnFull;
use super::state::{Health, Snapshot};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;
use udm_core::bugs::{self, Bug};
use udm_core::{Batch, Bio, Busy, Cx, Drain, Lane, Op, OpenError, Status};
use udm_dm::target::DeviceRef;

/// A write that has to wait.
struct Waiting {
    bio: Box<Bio>,
    /// For each snapshot the epoch whose readers must be over; 0 when it is not known yet, because
    /// chunks of it are not copied.
    epochs: SmallVec<[u64; 2]>,
    /// A store is full, and the write is to fail.
    fails: bool,
}

/// How far a write has come with one snapshot.
enum Step {
    /// It may go.
    Pass,
    /// Its chunks are in the store; readers may be under way.
    Copied,
    /// They are not.
    Wait,
    /// There is no room for them, and it is to fail.
    Fail,
}

/// See the module's documentation.
pub(super) struct OriginLane {
    engine: Engine,
    waiting: VecDeque<Waiting>,
    down: Batch,
    /// Ended here.
    ended: Batch,
}

impl OriginLane {
    /// A lane over `origin` that looks after `snapshots`.
    ///
    /// # Errors
    /// When one of the devices can't be opened on this core.
    pub(super) fn open(
        origin: &DeviceRef,
        snapshots: &[Arc<Snapshot>],
        cx: &mut Cx<'_>,
    ) -> Result<OriginLane, OpenError> {
        let engine = Engine::open(origin, snapshots, cx)?;
        Ok(OriginLane { engine, waiting: VecDeque::new(), down: Batch::new(), ended: Batch::new() })
    }

    /// True when `bio` may go down at once.
    #[inline]
    fn passes(&self, bio: &Bio) -> bool {
        bio.op != Op::Write || self.engine.parts().iter().all(|part| part.snapshot.lets_pass(bio))
    }

    /// Sends what may go of what waits, and begins the copies that it needs.
    fn look(&mut self, cx: &mut Cx<'_>) {
        let mut waiting = std::mem::take(&mut self.waiting);
        for one in &mut waiting {
            for part in 0..self.engine.parts().len() {
                if one.epochs[part] != 0 {
                    continue;
                }
                match self.step(&one.bio, part) {
                    // To be had below.
                    Step::Copied => one.epochs[part] = u64::MAX,
                    Step::Fail => one.fails = true,
                    Step::Pass | Step::Wait => {}
                }
            }
        }
        // One epoch for all of a look: it is taken behind all that was seen.
        for part in 0..self.engine.parts().len() {
            let mut wants = waiting.iter_mut().filter(|one| one.epochs[part] == u64::MAX).peekable();
            if wants.peek().is_some() {
                let epoch = self.engine.parts()[part].snapshot.readers.move_on();
                wants.for_each(|one| one.epochs[part] = epoch);
            }
        }
        for mut one in waiting.drain(..) {
            if one.fails {
                one.bio.end_with(Status::NoSpace);
                self.ended.push(one.bio);
            } else if (0..one.epochs.len()).all(|part| self.may_pass(&one, part)) {
                self.down.push(one.bio);
            } else {
                self.waiting.push_back(one);
            }
        }
        if self.waiting.is_empty() {
            // Keeps its room.
            self.waiting = waiting;
        }
        self.engine.begin(cx);
        if !self.down.is_empty() {
            self.engine.legs.submit(0, &mut self.down, cx);
            cx.wake_now();
        }
    }

    /// How far `bio` has come with snapshot `part`; chunks that nobody copies are claimed.
    fn step(&mut self, bio: &Bio, part: usize) -> Step {
        let snapshot = Arc::clone(&self.engine.parts()[part].snapshot);
        let Some((first, last)) = snapshot.to_copy(bio) else { return Step::Pass };
        if snapshot.health() == Health::Invalidating {
            return Step::Wait;
        }
        let (mut copied, mut settled) = (true, true);
        for chunk in first..=last {
            match snapshot.place(chunk) {
                Place::Settled(_) => {}
                Place::Copied(_) => settled = false,
                Place::Pending => copied = false,
                Place::Free => {
                    copied = false;
                    if let Err(full) = self.engine.claim(part, chunk) {
                        match snapshot.on_full(full) {
                            OnFull::Invalidate => self.engine.lose(part, "Unable to allocate exception"),
                            OnFull::Pause => {}
                            OnFull::Fail => return Step::Fail,
                        }
                        return Step::Wait;
                    }
                }
            }
        }
        match (copied, settled) {
            (true, true) => Step::Pass,
            (true, false) => Step::Copied,
            (false, _) => Step::Wait,
        }
    }

    /// True when snapshot `part` has nothing against the write any more.
    fn may_pass(&self, one: &Waiting, part: usize) -> bool {
        let snapshot = &self.engine.parts()[part].snapshot;
        let Some((first, last)) = snapshot.to_copy(&one.bio) else { return true };
        match one.epochs[part] {
            0 => snapshot.health() == Health::Valid && snapshot.map.are_settled(first, last),
            epoch if bugs::on(Bug::ReaderOvertaken) || snapshot.readers.are_past_or_tell(epoch) => {
                (first..=last).for_each(|chunk| snapshot.map.settle(chunk));
                true
            }
            _ => false,
        }
    }
}

impl Lane for OriginLane {
    /// Those that are leaving are still listed when the lanes are opened that do without them.
    fn begin(&mut self, _: &mut Cx<'_>) -> Option<Box<dyn Lane>> {
        self.engine.keep_active();
        self.engine.parts().is_empty().then(|| self.engine.legs.remove(0))
    }

    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if self.engine.parts().iter().all(|part| part.snapshot.lets_all_pass(batch)) {
            return self.engine.legs.submit(0, batch, cx);
        }
        let parts = self.engine.parts().len();
        for bio in batch.drain(..) {
            if self.passes(&bio) {
                self.down.push(bio);
            } else {
                self.waiting.push_back(Waiting { bio, epochs: SmallVec::from_elem(0, parts), fails: false });
            }
        }
        self.engine.has_news();
        self.look(cx);
        self.rest(cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.engine.poll(done, cx);
        if !self.waiting.is_empty() {
            if self.engine.has_news() {
                self.look(cx);
            }
            self.rest(cx);
        }
        done.append(&mut self.ended);
    }

    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        if how == Drain::NoFlush {
            back.extend(self.waiting.drain(..).map(|one| one.bio));
        }
        self.engine.drain(how, back, cx, |_| {});
    }

    fn busy(&self) -> Busy {
        self.engine.busy()
    }
}

impl OriginLane {
    /// Asks to be woken for what waits.
    fn rest(&mut self, cx: &mut Cx<'_>) {
        if !self.waiting.is_empty() {
            self.engine.wait(cx);
        }
        if !self.ended.is_empty() {
            cx.wake_now();
        }
    }
}
