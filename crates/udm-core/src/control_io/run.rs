//! A run as a task of a core.

use super::Errand;
use crate::{Batch, Busy, Device, DeviceSlot, MakeTask, OpenError, Task, TaskCx};
use std::sync::Arc;

/// What comes of a run.
pub type Answer = Result<Batch, OpenError>;

/// A task that does `bios` on `device` and tells what came of it, on its core. When it is stopped
/// it tells so at once, and is over when what is in flight is home.
pub fn run_task(
    device: &Arc<dyn Device>,
    bios: Batch,
    tell: impl FnOnce(Answer) + Send + 'static,
) -> MakeTask {
    let (errand, device) = (Errand::new(&**device, bios), Arc::clone(device));
    let run = Run { device, slot: None, errand: Some(errand), tell: Some(Box::new(tell)) };
    Box::new(move || Box::new(run))
}

type Tell = Box<dyn FnOnce(Answer) + Send>;

struct Run {
    device: Arc<dyn Device>,
    slot: Option<DeviceSlot>,
    /// `None` when it is over.
    errand: Option<Errand>,
    /// `None` when nobody waits any more.
    tell: Option<Tell>,
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
                    self.errand = None;
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
        self.tell(Err(Errand::called_off()));
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
