//! A run as a task of a core.

use super::Errand;
use crate::errno::EBUSY;
use crate::{Batch, Busy, Device, DeviceSlot, MakeTask, OpenError, Task, TaskCx, TaskHandle};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What comes of a run.
pub type Answer = Result<Batch, OpenError>;

/// How many runs of a disk may be under way: what hangs holds up a few loads, and not all.
const RUNS_MAX: usize = 4;

/// A run on its way, from outside. Dropping it stops the task: nothing more is sent, and what is in
/// flight stays with it until it comes home. For as long as it has not, no other run on that disk
/// begins: a write that comes late must not undo one that came after it.
#[must_use = "the run is stopped when this is dropped"]
pub struct Started {
    /// There for as long as something may be in flight.
    run: Weak<()>,
    disk: Option<Arc<Runs>>,
    _task: TaskHandle,
}

/// The runs of one disk.
#[derive(Default)]
struct Runs(Mutex<Known>);

#[derive(Default)]
struct Known {
    under_way: Vec<Weak<()>>,
    /// Those of them that nobody waits for any more.
    given_up: Vec<Weak<()>>,
}

impl Runs {
    fn known(&self) -> MutexGuard<'_, Known> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Known { under_way, given_up } = &mut *known;
        [under_way, given_up].into_iter().for_each(|list| list.retain(|run| run.strong_count() > 0));
        known
    }

    /// Takes another run in, if there may be one.
    fn begin(&self, run: Weak<()>) -> Result<(), OpenError> {
        let mut known = self.known();
        if !known.given_up.is_empty() {
            return Err(OpenError::new(EBUSY, "the store has not answered an earlier load yet"));
        }
        if known.under_way.len() >= RUNS_MAX {
            return Err(OpenError::new(EBUSY, "other loads wait for the store"));
        }
        known.under_way.push(run);
        Ok(())
    }
}

impl Started {
    /// Has `start` start a task that does `bios` on `device` and tells what came of it, on its
    /// core. When it is stopped it tells so at once.
    ///
    /// # Errors
    /// EBUSY when an earlier run on that disk was given up and is not home yet, and when too many
    /// wait for it.
    pub fn new(
        device: &Arc<dyn Device>,
        bios: Batch,
        tell: impl FnOnce(Answer) + Send + 'static,
        start: impl FnOnce(MakeTask) -> TaskHandle,
    ) -> Result<Started, OpenError> {
        let disk = device.commons().map(|commons| commons.common::<Runs>());
        let token = Arc::new(());
        let run = Arc::downgrade(&token);
        disk.as_ref().map_or(Ok(()), |disk| disk.begin(Weak::clone(&run)))?;
        let task = Run {
            errand: Some(Errand::new(&**device, bios)),
            device: Arc::clone(device),
            slot: None,
            tell: Some(Box::new(tell)),
            token: Some((token, disk.clone())),
        };
        Ok(Started { run, disk, _task: start(Box::new(move || Box::new(task))) })
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(disk) = &self.disk {
            disk.known().given_up.push(Weak::clone(&self.run));
        }
    }
}

type Tell = Box<dyn FnOnce(Answer) + Send>;

struct Run {
    device: Arc<dyn Device>,
    slot: Option<DeviceSlot>,
    /// `None` when it is over.
    errand: Option<Errand>,
    /// `None` when nobody waits any more.
    tell: Option<Tell>,
    /// For as long as something may be in flight.
    token: Option<(Arc<()>, Option<Arc<Runs>>)>,
}

impl Run {
    fn tell(&mut self, answer: Answer) {
        if let Some(tell) = self.tell.take() {
            tell(answer);
        }
    }

    /// Sends what may go, and ends when all is home.
    fn go_on(&mut self, cx: &mut dyn TaskCx) {
        let Some(errand) = &mut self.errand else { return };
        if let Some(slot) = self.slot {
            while let Some(bio) = errand.next() {
                cx.submit(slot, bio);
            }
        }
        if errand.is_over() {
            if let Some(slot) = self.slot.take() {
                cx.close(slot);
            }
            self.token = None;
            if let Some(errand) = self.errand.take() {
                self.tell(Ok(errand.finish()));
            }
        }
    }
}

impl Task for Run {
    fn turn(&mut self, cx: &mut dyn TaskCx) {
        let waits = self.errand.as_ref().is_some_and(|errand| !errand.is_over());
        if waits && self.slot.is_none() && self.tell.is_some() {
            match cx.open(&self.device) {
                Ok(slot) => self.slot = Some(slot),
                Err(error) => {
                    (self.errand, self.token) = (None, None);
                    self.tell(Err(error));
                }
            }
        }
        self.go_on(cx);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut dyn TaskCx) {
        for bio in done.drain(..) {
            if let Some(errand) = &mut self.errand {
                errand.bring(bio);
            }
        }
        self.go_on(cx);
    }

    fn stop(&mut self, cx: &mut dyn TaskCx) {
        self.tell(Err(Errand::ends()));
        if let Some(errand) = &mut self.errand {
            errand.call_off();
        }
        self.go_on(cx);
    }

    fn is_over(&self) -> bool {
        self.errand.is_none()
    }

    /// In the background: it has a lane of its own, and nobody waits for it.
    fn busy(&self) -> Busy {
        Busy::Background
    }
}
