//! A mapped device of the world, with the model's state of it.

use crate::dust_model::DustLine;
use crate::expected_limits::ExpectedLimits;
use crate::front_end::WorkloadDevice;
use crate::model::RequestRefusalRules;
use crate::table_map::ModelTableMap;
use crate::tables::TableSpec;
use crate::throttles::ThrottleRecord;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use udm_core::{Cx, Device as _, DeviceControlError, Lane, Limits};
use udm_dm::{mapped::DeviceSetTransition, mapped::MappedDevice, table::Table};
use udm_wire::multipath_conf::MultipathSettings;

/// Phase of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DevicePhase {
    /// The device is active.
    Live,
    /// A suspend is in progress.
    Suspending,
    /// The device is suspended.
    Suspended,
    /// A resume is in progress. True if the device was live before.
    Resuming(bool),
}

impl DevicePhase {
    pub(crate) fn doing(self) -> &'static str {
        match self {
            DevicePhase::Live => "in use",
            DevicePhase::Suspending => "being suspended",
            DevicePhase::Suspended => "suspended",
            DevicePhase::Resuming(_) => "being resumed",
        }
    }
}

/// A table in the inactive slot.
pub(crate) struct InactiveTable {
    pub(crate) spec: TableSpec,
    pub(crate) map: Arc<ModelTableMap>,
    pub(crate) access: Option<usize>,
    pub(crate) table: Weak<Table>,
    /// Limits that the table must have, as of the check after which the cores open it.
    pub(crate) expected: Option<ExpectedLimits>,
}

/// A suspend or resume in progress, of one or several devices.
pub(crate) struct RunningSuspendOrResume {
    pub(crate) devices: Vec<usize>,
    pub(crate) changes: DeviceSetTransition,
    pub(crate) woken: Arc<AtomicBool>,
    pub(crate) cancelled: bool,
    /// True once a device uses its new table. From then on the change cannot be cancelled.
    pub(crate) past: bool,
}

/// Returns the next range, of at most `most` sectors, that was not read back yet. `check` is the
/// first sector not read back, and `size` the end.
pub(crate) fn next_readback(check: &Cell<u64>, size: u64, most: u64) -> Option<(u64, u64)> {
    let at = check.get();
    if at >= size {
        return None;
    }
    let len = most.min(size - at);
    check.set(at + len);
    Some((at, len))
}

impl WorkloadDevice for MappedDeviceWithModel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn hot(&self) -> u64 {
        self.hot
    }

    fn next_readback(&self, most: u64) -> Option<(u64, u64)> {
        next_readback(&self.check, self.limits.size.0, most)
    }
}

/// A mapped device, with the model's state of it.
pub struct MappedDeviceWithModel {
    /// Multipath settings of the device.
    pub settings: Arc<MultipathSettings>,
    /// True if a path watch may fail its paths, so the model does not know their state.
    pub watched: bool,
    /// Numbers of hedges and of ejected paths already counted for the live table.
    pub(crate) hedged: [u64; 2],
    pub(crate) mapped: Arc<MappedDevice>,
    /// The live table.
    pub spec: TableSpec,
    pub(crate) maps: Vec<Arc<ModelTableMap>>,
    pub(crate) limits: Limits,
    pub(crate) loaded: Option<InactiveTable>,
    /// Set only by [`MappedDeviceWithModel::enter`].
    pub(crate) phase: DevicePhase,
    /// True if the device is suspended. Shared with the model of its own queue.
    pub(crate) stands: Arc<AtomicBool>,
    pub(crate) running: Option<Rc<RefCell<RunningSuspendOrResume>>>,
    /// The live table at the start of the resume in progress.
    pub(crate) before: Option<Arc<ModelTableMap>>,
    /// Index of its multipath target in [`crate::environment::Env::accesses`].
    pub access: Option<usize>,
    pub(crate) free_access: Option<usize>,
    pub(crate) hot: u64,
    /// The dust lines of the live table.
    pub(crate) dust: Vec<DustLine>,
    /// Expected limits of the live table.
    pub(crate) expected: ExpectedLimits,
    /// The limits of its requests per second, and what it answered since.
    pub(crate) throttled: Option<ThrottleRecord>,
    /// Number of events that it must have raised, and of further events that it may have raised.
    pub(crate) events: (u64, u64),
    /// First sector that was not read back since the last crash.
    pub(crate) check: Cell<u64>,
}

impl MappedDeviceWithModel {
    /// True if the model does not know the state of its paths.
    pub(crate) fn is_loose(&self) -> bool {
        self.spec.is_loose() || self.watched
    }

    /// Opens a lane of the device.
    pub fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        self.mapped.open(cx)
    }

    /// The tables through which a request that is made now may go.
    #[must_use]
    pub fn maps(&self) -> &[Arc<ModelTableMap>] {
        &self.maps
    }

    /// The tables through which a new request may go, and the rules for requests that must be
    /// refused.
    pub(crate) fn ways(&self) -> (&[Arc<ModelTableMap>], RequestRefusalRules) {
        let ExpectedLimits { block, read_only, .. } = self.expected;
        (&self.maps, RequestRefusalRules { block, read_only })
    }

    /// Enters `phase`.
    pub(crate) fn enter(&mut self, phase: DevicePhase) {
        self.phase = phase;
        self.stands.store(phase == DevicePhase::Suspended, Ordering::Relaxed);
    }

    /// True if the device is suspended.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        self.phase == DevicePhase::Suspended
    }

    /// True if a suspend or a resume is in progress.
    #[must_use]
    pub fn is_changing(&self) -> bool {
        self.running.is_some()
    }

    /// True if the change in progress was woken.
    #[must_use]
    pub fn is_woken(&self) -> bool {
        self.running.as_ref().is_some_and(|r| r.borrow().woken.load(Ordering::Relaxed))
    }

    /// True if the device is live and no change is in progress.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.phase == DevicePhase::Live
    }

    /// Describes the change in progress, for a person.
    #[must_use]
    pub fn doing(&self) -> &'static str {
        self.phase.doing()
    }

    /// The device under test.
    #[must_use]
    pub fn mapped(&self) -> &Arc<MappedDevice> {
        &self.mapped
    }
}
