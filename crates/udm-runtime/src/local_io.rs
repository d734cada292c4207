//! Control I/O on the core of the calling thread, for library mode.

use crate::{CoreOptions, LocalCore, ProcessCores};
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;
use udm_core::control_io::ControlIoResult;
use udm_core::{Batch, ControlIo, ControlIoBatch, CoreId, Device, DeviceControlError, Nanos, OwnWork, errno};

/// Timeout of a run.
const RUN_TIMEOUT: Duration = Duration::from_secs(30);

/// Control I/O on the calling thread's core, which runs turns meanwhile. Its other open lanes
/// receive messages, but are not polled.
pub struct LocalControlIo<'a> {
    core: RefCell<&'a mut LocalCore>,
    timeout: Duration,
}

impl<'a> LocalControlIo<'a> {
    /// Uses `core`. A run fails after `timeout`.
    #[must_use]
    pub fn new(core: &'a mut LocalCore, timeout: Duration) -> LocalControlIo<'a> {
        LocalControlIo { core: RefCell::new(core), timeout }
    }
}

impl ControlIo for LocalControlIo<'_> {
    fn run(&self, device: &Arc<dyn Device>, bios: Batch) -> ControlIoResult {
        let mut core = self.core.borrow_mut();
        let mut transfer = ControlIoBatch::new(&**device, bios);
        let mut lane = core.open(&**device)?;
        let (mut batch, mut done) = (Batch::new(), Batch::new());
        let timeout = Nanos(u64::try_from(self.timeout.as_nanos()).unwrap_or(u64::MAX));
        let until = core.clock() + timeout;
        while !transfer.is_over() || lane.own_work() == OwnWork::Required {
            while let Some(mut bio) = transfer.next() {
                bio.start();
                batch.push(bio);
            }
            core.turn(|cx| {
                if !batch.is_empty() {
                    lane.submit(&mut batch, cx);
                }
                lane.poll(&mut done, cx);
                cx.wake_at(until);
            });
            if done.is_empty() && core.clock() < until {
                core.park();
            } else if done.is_empty() {
                // The lane keeps its bios in flight, so it is leaked.
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

/// Control I/O on a temporary core per run, for tables that are loaded before any core exists.
/// Messages to lanes of other cores do not reach it.
#[derive(Clone, Copy, Debug, Default)]
pub struct TemporaryCoreIo;

impl ControlIo for TemporaryCoreIo {
    fn run(&self, device: &Arc<dyn Device>, bios: Batch) -> ControlIoResult {
        let options = CoreOptions { ring_optional: true, ..CoreOptions::default() };
        let attached =
            ProcessCores::new(1).and_then(|core_set| LocalCore::attach(&core_set, CoreId(0), options));
        let mut core = attached.map_err(|e| {
            DeviceControlError::new(e.raw_os_error().unwrap_or(errno::EIO), format!("a core: {e}"))
        })?;
        let done = LocalControlIo::new(&mut core, RUN_TIMEOUT).run(device, bios);
        if done.is_err() {
            // Bios may be in flight in its ring.
            Box::leak(Box::new(core));
        }
        done
    }
}
