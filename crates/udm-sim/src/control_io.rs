//! Control-side I/O of a simulated load. Reads and writes of target constructors go through a task
//! on one of the cores, as in a server. The world makes steps meanwhile.

use crate::cores::SimCoreInboxes;
use crate::environment::lock_environment;
use crate::model::Violation;
use crate::turn::MachineWorld;
use crate::world::MappedDeviceStackWorld;
use std::cell::{Cell, RefCell};
use std::sync::{Arc, Mutex, PoisonError};
use udm_core::control_io::{ControlIoResult, ControlIoRunGuard};
use udm_core::{Batch, ControlIo, ControlIoBatch, Device, DeviceControlError, Nanos, errno};

/// Maximum duration of one operation, in simulated time.
const TIMEOUT: Nanos = Nanos::from_millis(30_000);

/// Maximum number of steps of one operation.
const STEPS_MAX: u64 = 20_000;

/// Control-side I/O of `world` while a table is loaded.
pub struct SimTableLoadIo<'a, W = MappedDeviceStackWorld> {
    world: RefCell<&'a mut W>,
    wrong: RefCell<Option<Violation>>,
    failed: Cell<bool>,
}

impl<'a, W: MachineWorld> SimTableLoadIo<'a, W> {
    /// Creates control-side I/O on the cores of `world`.
    #[must_use]
    pub fn new(world: &'a mut W) -> SimTableLoadIo<'a, W> {
        SimTableLoadIo { world: RefCell::new(world), wrong: RefCell::default(), failed: Cell::new(false) }
    }

    /// Checks that the world found no violation during the I/O.
    ///
    /// # Errors
    /// The violation.
    pub fn verdict(&self) -> Result<(), Violation> {
        self.wrong.take().map_or(Ok(()), Err)
    }

    /// True if an operation failed, as disks may fail. A refusal of the table is then allowed.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed.get()
    }

    fn wait(&self, result: &Mutex<Option<ControlIoResult>>) -> ControlIoResult {
        let mut world = self.world.borrow_mut();
        let machine = world.machine();
        let (from, first) = (lock_environment(&machine.env).now, machine.step);
        let was = std::mem::replace(&mut machine.loading, true);
        let answer = loop {
            if let Some(answer) = result.lock().unwrap_or_else(PoisonError::into_inner).take() {
                break answer;
            }
            let machine = world.machine();
            let now = lock_environment(&machine.env).now;
            if now.since(from) > TIMEOUT || machine.step - first > STEPS_MAX {
                break Err(ControlIoBatch::timeout_error());
            }
            if let Err(wrong) = world.step() {
                *self.wrong.borrow_mut() = Some(wrong);
                break Err(DeviceControlError::new(errno::EIO, "the world is wrong"));
            }
        };
        let machine = world.machine();
        machine.loading = was;
        machine.set_turn(None);
        answer
    }
}

impl<W: MachineWorld> ControlIo for SimTableLoadIo<'_, W> {
    fn run(&self, device: &Arc<dyn Device>, bios: Batch) -> ControlIoResult {
        let result = Arc::new(Mutex::new(None));
        let to_set = Arc::clone(&result);
        let set = move |answer| *to_set.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
        let inboxes: Arc<SimCoreInboxes> = Arc::clone(&self.world.borrow_mut().machine().inboxes);
        let started = ControlIoRunGuard::new(device, bios, set, |task| inboxes.start_io(&**device, task));
        let answer = match &started {
            Ok(_) => self.wait(&result),
            Err(error) => Err(error.clone()),
        };
        let failed = answer.as_ref().map_or(true, |bios| bios.iter().any(|bio| !bio.status.is_ok()));
        self.failed.set(self.failed.get() | failed);
        answer
    }
}
