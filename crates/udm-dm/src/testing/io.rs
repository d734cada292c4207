//! Control-side I/O without cores.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use udm_core::control_io::ControlIoResult;
use udm_core::{
    Batch, ControlIo, ControlIoBatch, CoreCommandSender, CoreId, CoreLaneState, Device, Nanos, OwnWork,
};

/// Maximum number of polls without a result, if the lane asks for no later time.
const POLLS_MAX: usize = 1000;

/// Maximum number of waits for a time without a result.
const WAITS_MAX: usize = 100_000;

/// Control-side I/O on a core of its own. If a lane waits for a time, the clock advances to this
/// time at once. If nothing completes, the result is the error of a device that does not answer.
pub struct TestControlIo {
    core: RefCell<CoreLaneState>,
    now: Cell<Nanos>,
}

impl Default for TestControlIo {
    fn default() -> TestControlIo {
        TestControlIo::new()
    }
}

impl TestControlIo {
    /// Control-side I/O on a core that reaches no other cores.
    #[must_use]
    pub fn new() -> TestControlIo {
        TestControlIo::on(CoreLaneState::new(CoreId(0), 1, 1, None))
    }

    /// Control-side I/O on a core among others. Messages of its lanes reach the other cores, but it
    /// receives none itself.
    #[must_use]
    pub fn with_cores(others: Arc<dyn CoreCommandSender>, cores: usize) -> TestControlIo {
        TestControlIo::on(CoreLaneState::new(CoreId(0), cores, 1, None).with_cores(others))
    }

    fn on(core: CoreLaneState) -> TestControlIo {
        TestControlIo { core: RefCell::new(core), now: Cell::new(Nanos(0)) }
    }

    /// The current time of this core.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.now.get()
    }
}

impl ControlIo for TestControlIo {
    fn run(&self, device: &Arc<dyn Device>, bios: Batch) -> ControlIoResult {
        let mut core = self.core.borrow_mut();
        let mut transfer = ControlIoBatch::new(&**device, bios);
        let mut lane = device.open(&mut core.cx(self.now.get()))?;
        let (mut batch, mut done) = (Batch::new(), Batch::new());
        let (mut polls, mut waits) = (0, 0);
        // Required own work of the lane is done before the lane is dropped.
        while !transfer.is_over() || lane.own_work() == OwnWork::Required {
            let mut cx = core.cx(self.now.get());
            while let Some(mut bio) = transfer.next() {
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
                // Bios in flight must not be dropped, so the lane is leaked.
                Box::leak(lane);
                return if transfer.is_over() {
                    Ok(transfer.finish())
                } else {
                    Err(ControlIoBatch::timeout_error())
                };
            }
            for mut bio in done.drain(..) {
                bio.finish();
                transfer.add_completed(bio);
            }
        }
        Ok(transfer.finish())
    }
}
