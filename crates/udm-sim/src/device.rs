//! A mapped device of the world, and what the model knows of it.

use crate::dust_model::DustLine;
use crate::expected_limits::ExpectedLimits;
use crate::front_end::RequestTarget;
use crate::model::RefusalRules;
use crate::table_map::TableMap;
use crate::tables::TableSpec;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use udm_core::{Cx, Device as _, Lane, Limits, OpenError};
use udm_dm::{mapped::DeviceSetTransition, mapped::MappedDevice, table::Table};
use udm_wire::multipath_conf::MultipathSettings;

/// Where a device stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DevicePhase {
    /// In use.
    Live,
    /// A suspend is under way.
    Suspending,
    /// Nothing passes.
    Suspended,
    /// A resume is under way; of a device that was live, or not.
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
    pub(crate) map: Arc<TableMap>,
    pub(crate) access: Option<usize>,
    pub(crate) table: Weak<Table>,
    /// What it must be able to take, as of the check behind which the cores are told to open it.
    pub(crate) expected: Option<ExpectedLimits>,
}

/// A suspend or resume under way, of one device or several.
pub(crate) struct RunningChange {
    pub(crate) devices: Vec<usize>,
    pub(crate) changes: DeviceSetTransition,
    pub(crate) woken: Arc<AtomicBool>,
    pub(crate) cancelled: bool,
    /// Some device goes on with its new table: from here on nothing can be called off.
    pub(crate) past: bool,
}

/// The next range of at most `most` sectors up to `size` that was not read back yet; `check` is the
/// first of them.
pub(crate) fn next_readback(check: &Cell<u64>, size: u64, most: u64) -> Option<(u64, u64)> {
    let at = check.get();
    if at >= size {
        return None;
    }
    let len = most.min(size - at);
    check.set(at + len);
    Some((at, len))
}

impl RequestTarget for ModelledDevice {
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

/// A mapped device, and what the model knows of it.
pub struct ModelledDevice {
    /// What is done for it besides its requests.
    pub settings: Arc<MultipathSettings>,
    /// Its paths are watched, and fail for being silent: what it must think of them is not known
    /// here.
    pub watched: bool,
    /// Hedges and slow paths put out of use that were counted, of the table in use.
    pub(crate) hedged: [u64; 2],
    pub(crate) mapped: Arc<MappedDevice>,
    /// The table in use.
    pub spec: TableSpec,
    pub(crate) maps: Vec<Arc<TableMap>>,
    pub(crate) limits: Limits,
    pub(crate) loaded: Option<InactiveTable>,
    /// See [`ModelledDevice::enter`].
    pub(crate) phase: DevicePhase,
    /// Nothing passes: for what is behind its own queue.
    pub(crate) stands: Arc<AtomicBool>,
    pub(crate) running: Option<Rc<RefCell<RunningChange>>>,
    /// The table in use when the resume under way began.
    pub(crate) before: Option<Arc<TableMap>>,
    /// Which multipath target of the outside it is.
    pub access: Option<usize>,
    pub(crate) spare: Option<usize>,
    pub(crate) hot: u64,
    /// The dust lines of its table.
    pub(crate) dust: Vec<DustLine>,
    /// What its table can take.
    pub(crate) expected: ExpectedLimits,
    /// Events that it must have raised, and those that it may have raised besides.
    pub(crate) events: (u64, u64),
    /// First sector that was not read back yet since the last crash.
    pub(crate) check: Cell<u64>,
}

impl ModelledDevice {
    /// What it must think of its paths is not known here.
    pub(crate) fn is_loose(&self) -> bool {
        self.spec.is_loose() || self.watched
    }

    /// Opens a lane.
    pub fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        self.mapped.open(cx)
    }

    /// The tables that a request made now may go through.
    #[must_use]
    pub fn maps(&self) -> &[Arc<TableMap>] {
        &self.maps
    }

    /// The same, and what it must refuse.
    pub(crate) fn ways(&self) -> (&[Arc<TableMap>], RefusalRules) {
        let ExpectedLimits { block, read_only, .. } = self.expected;
        (&self.maps, RefusalRules { block, read_only })
    }

    /// It stands in `phase` from now on.
    pub(crate) fn enter(&mut self, phase: DevicePhase) {
        self.phase = phase;
        self.stands.store(phase == DevicePhase::Suspended, Ordering::Relaxed);
    }

    /// Nothing passes.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        self.phase == DevicePhase::Suspended
    }

    /// A suspend or a resume is under way.
    #[must_use]
    pub fn is_changing(&self) -> bool {
        self.running.is_some()
    }

    /// Something under way can go on.
    #[must_use]
    pub fn is_woken(&self) -> bool {
        self.running.as_ref().is_some_and(|r| r.borrow().woken.load(Ordering::Relaxed))
    }

    /// In use, with nothing under way.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.phase == DevicePhase::Live
    }

    /// What is under way, for a person.
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
