//! Control-side I/O without cores.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use udm_core::control_io::RunResult;
use udm_core::{Batch, ControlIo, ControlTransfer, CoreId, CoreState, Cores, Device, Nanos, OwnWork};

/// How often a lane is polled that brings nothing and asks for no time.
const POLLS_MAX: usize = 1000;

/// How many times a lane may ask for, and bring nothing.
const WAITS_MAX: usize = 100_000;

/// Control-side I/O on a core of its own, which nobody else visits. Its time goes on where a lane
/// waits for a time, at once; a device from which nothing comes home does not answer.
pub struct TestControlIo {
    core: RefCell<CoreState>,
    now: Cell<Nanos>,
}

impl Default for TestControlIo {
    fn default() -> TestControlIo {
        TestControlIo::new()
    }
}

impl TestControlIo {
    /// On a core that reaches no others.
    #[must_use]
    pub fn new() -> TestControlIo {
        TestControlIo::on(CoreState::new(CoreId(0), 1, 1, None))
    }

    /// On a core among others: what its lanes send arrives there, and it gets no letters itself.
    #[must_use]
    pub fn with_cores(others: Arc<dyn Cores>, cores: usize) -> TestControlIo {
        TestControlIo::on(CoreState::new(CoreId(0), cores, 1, None).with_cores(others))
    }

    fn on(core: CoreState) -> TestControlIo {
        TestControlIo { core: RefCell::new(core), now: Cell::new(Nanos(0)) }
    }

    /// What time it is there.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.now.get()
    }
}

impl ControlIo for TestControlIo {
    fn run(&self, device: &Arc<dyn Device>, bios: Batch) -> RunResult {
        let mut core = self.core.borrow_mut();
        let mut errand = ControlTransfer::new(&**device, bios);
        let mut lane = device.open(&mut core.cx(self.now.get()))?;
        let (mut batch, mut done) = (Batch::new(), Batch::new());
        let (mut polls, mut waits) = (0, 0);
        // What the lane owes it does before it goes.
        while !errand.is_over() || lane.busy() == OwnWork::Required {
            let mut cx = core.cx(self.now.get());
            while let Some(mut bio) = errand.next() {
                bio.start();
                batch.push(bio);
            }
            if !batch.is_empty() {
                lane.submit(&mut batch, &mut cx);
            }
            lane.poll(&mut done, &mut cx);
            let wake = cx.wake();
            if !done.is_empty() {
                (polls, waits) = (0, 0);
            } else if wake == Nanos::NEVER || wake <= self.now.get() {
                polls += 1;
            } else {
                self.now.set(wake);
                waits += 1;
            }
            if polls > POLLS_MAX || waits > WAITS_MAX {
                // What is in flight stays where it is.
                Box::leak(lane);
                return if errand.is_over() {
                    Ok(errand.finish())
                } else {
                    Err(ControlTransfer::timeout_error())
                };
            }
            for mut bio in done.drain(..) {
                bio.finish();
                errand.add_completed(bio);
            }
        }
        Ok(errand.finish())
    }
}
