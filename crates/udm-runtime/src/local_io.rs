//! Control-side I/O where the thread that loads a table is a core itself.

use crate::{Cluster, CoreOptions, LocalCore};
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;
use udm_core::control_io::Answer;
use udm_core::{Batch, Busy, ControlIo, CoreId, Device, Errand, Nanos, OpenError, errno};

/// How long a run may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Control-side I/O on the calling thread's core, which takes turns meanwhile. Other lanes that it
/// has open are told of letters, and not polled.
pub struct LocalIo<'a> {
    core: RefCell<&'a mut LocalCore>,
    patience: Duration,
}

impl<'a> LocalIo<'a> {
    /// On `core`. A run may take as long as `patience`.
    #[must_use]
    pub fn new(core: &'a mut LocalCore, patience: Duration) -> LocalIo<'a> {
        LocalIo { core: RefCell::new(core), patience }
    }
}

impl ControlIo for LocalIo<'_> {
    fn run(&self, device: &Arc<dyn Device>, bios: Batch) -> Answer {
        let mut core = self.core.borrow_mut();
        let mut errand = Errand::new(&**device, bios);
        let mut lane = core.open(&**device)?;
        let (mut batch, mut done) = (Batch::new(), Batch::new());
        let patience = Nanos(u64::try_from(self.patience.as_nanos()).unwrap_or(u64::MAX));
        let until = core.clock() + patience;
        while !errand.is_over() || lane.busy() == Busy::Owed {
            while let Some(mut bio) = errand.next() {
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
                // What is in flight stays where it is.
                Box::leak(lane);
                return if errand.is_over() { Ok(errand.finish()) } else { Err(Errand::no_answer()) };
            }
            for mut bio in done.drain(..) {
                bio.finish();
                errand.bring(bio);
            }
        }
        Ok(errand.finish())
    }
}

/// Control-side I/O on a core that is there for each run alone: for those who make tables before
/// there is any core. Letters to the lanes of other cores do not reach it.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrivateIo;

impl ControlIo for PrivateIo {
    fn run(&self, device: &Arc<dyn Device>, bios: Batch) -> Answer {
        let options = CoreOptions { ring_optional: true, ..CoreOptions::default() };
        let attached = Cluster::new(1).and_then(|cluster| LocalCore::attach(&cluster, CoreId(0), options));
        let mut core = attached
            .map_err(|e| OpenError::new(e.raw_os_error().unwrap_or(errno::EIO), format!("a core: {e}")))?;
        let done = LocalIo::new(&mut core, PATIENCE).run(device, bios);
        if done.is_err() {
            // Something may be in flight in its ring.
            Box::leak(Box::new(core));
        }
        done
    }
}
