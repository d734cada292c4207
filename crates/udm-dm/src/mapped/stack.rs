//! Limits of stacks of mapped devices: no cycles, and bounded depth and width.
//!
//! Calls nest as deep as the stack. A device that two lines of a table name has two lanes below
//! each lane of the table, so the number of lanes can double per level. Each load checks both
//! limits, for the device and all devices above it. So opening a lane never fails because of them.
//! The tables of all slots count, because lanes of several tables are open during a swap.
//!
//! Only a load makes a stack larger. Loads check and register one at a time
//! ([`lock_device_stack_for_load`]), for all devices of the process. Nothing under this lock
//! blocks. The walks use explicit lists instead of recursion, and visit each device once.

use super::MappedDevice;
use crate::error::TargetError;
use crate::table::Table;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use udm_core::errno::{ELOOP, EMLINK};
use udm_core::{Device, DeviceId, StackedDevice};

/// Maximum depth of a stack of mapped devices, and so of nested calls.
pub const DEPTH_MAX: usize = 32;

/// Maximum number of lanes that one device may open on a core, including all lanes below. A useful
/// stack needs fewer: a thousand lines over ten levels are 11,000 lanes. A core opens this many in
/// some tens of milliseconds.
pub const LANES_MAX: u64 = 16384;

/// Locks the stack while a load checks it and registers its table.
pub(super) fn lock_device_stack_for_load() -> MutexGuard<'static, ()> {
    static STACK: Mutex<()> = Mutex::new(());
    STACK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The devices directly below a device; a device appears once per use.
type DirectLowerDevices = Rc<[Arc<dyn Device>]>;

/// A walk over the stack. It keeps a reference to every device that it met. Dropping the last
/// reference closes files, which must happen after [`lock_device_stack_for_load`] is released.
#[derive(Default)]
pub(super) struct DeviceStackWalk {
    below: HashMap<DeviceId, DirectLowerDevices>,
    above: Vec<Arc<dyn Device>>,
    sizes: HashMap<DeviceId, StackDepthAndLaneCount>,
}

/// Depth and lanes of a device, including all devices below.
#[derive(Clone, Copy)]
struct StackDepthAndLaneCount {
    depth: usize,
    lanes: u64,
}

/// A device whose size is being computed: the devices below, and how many of them are counted.
struct DeviceStackDfsFrame {
    id: DeviceId,
    below: DirectLowerDevices,
    done: usize,
    size: StackDepthAndLaneCount,
}

impl DeviceStackDfsFrame {
    fn new(id: DeviceId, below: DirectLowerDevices) -> DeviceStackDfsFrame {
        DeviceStackDfsFrame { id, below, done: 0, size: StackDepthAndLaneCount { depth: 0, lanes: 1 } }
    }
}

impl DeviceStackWalk {
    /// Checks `device` with `tables` in its slots; `new` is the table that is loaded.
    ///
    /// # Errors
    /// `new` maps the device itself, directly or through others; a stack would be too deep or too
    /// wide.
    pub fn check(
        &mut self,
        device: &MappedDevice,
        tables: &[Arc<Table>],
        new: &Table,
    ) -> Result<(), TargetError> {
        let all_above = self.collect_ancestors(device);
        for (line, entry) in new.targets().iter().enumerate() {
            let on_top = |id| id == device.id() || all_above.contains(&id);
            let used = entry.target.devices().into_iter().map(|used| used.device);
            let mut devices = used.chain(entry.target.extra_devices());
            if let Some(used) = devices.find(|used| on_top(used.device.id())) {
                let text = format!("{}: Device lookup failed", entry.target.type_name());
                let reason = format!("{} is on top of {} already", used.name, device.name());
                return Err(TargetError { line: Some(line), ..TargetError::new(text).because(reason) });
            }
        }
        self.check_size(device, tables, all_above)
    }

    /// Checks `device`, the partner of a table that is loaded: its lanes will open more devices.
    ///
    /// # Errors
    /// As [`DeviceStackWalk::check`].
    pub fn check_partner(&mut self, device: &MappedDevice) -> Result<(), TargetError> {
        let (all_above, tables) = (self.collect_ancestors(device), device.slots());
        for used in tables.iter().flat_map(|table| table.opened()) {
            if used.device.id() == device.id() || all_above.contains(&used.device.id()) {
                let reason = format!("{} is on top of {} already", used.current_name(), device.name());
                return Err(TargetError::new("Device lookup failed").because(reason));
            }
        }
        self.check_size(device, &tables, all_above)
    }

    /// Checks the depth and width of all stacks that contain `device`, with `tables` in its slots.
    fn check_size(
        &mut self,
        device: &MappedDevice,
        tables: &[Arc<Table>],
        all_above: HashSet<DeviceId>,
    ) -> Result<(), TargetError> {
        let below = tables.iter().flat_map(|table| table.opened()).map(|used| used.device).collect();
        self.below.insert(device.id(), below);
        let all = std::iter::once(device.id()).chain(all_above);
        let sizes: Vec<StackDepthAndLaneCount> = all.map(|id| self.size(id)).collect();
        let depth = sizes.iter().map(|size| size.depth).max().unwrap_or(0);
        let lanes = sizes.iter().map(|size| size.lanes).max().unwrap_or(0);
        if depth > DEPTH_MAX {
            let reason =
                format!("the stack would be {depth} mapped devices deep, the maximum is {DEPTH_MAX}");
            return Err(TargetError::errno(ELOOP).because(reason));
        }
        if lanes > LANES_MAX {
            let reason = format!(
                "the stack would have {lanes} open lanes on a core, the maximum is {LANES_MAX}: name a mapped \
                 device in fewer lines, or resume or clear inactive tables"
            );
            return Err(TargetError::errno(EMLINK).because(reason));
        }
        Ok(())
    }

    fn below(&mut self, device: &dyn Device) -> Option<DirectLowerDevices> {
        let stacked = device.stacked()?;
        let below = self.below.entry(device.id()).or_insert_with(|| stacked.children().into());
        Some(Rc::clone(below))
    }

    /// All devices above `device`, directly or through others.
    fn collect_ancestors(&mut self, device: &MappedDevice) -> HashSet<DeviceId> {
        let mut found = HashSet::new();
        let mut look = vec![(device.id(), device.parents())];
        while let Some((id, above)) = look.pop() {
            for next in above {
                // The registration of a parent is valid only while a table of the parent uses the
                // device.
                let is_over = self.below(&*next).is_some_and(|below| below.iter().any(|b| b.id() == id));
                if is_over && found.insert(next.id()) {
                    look.push((next.id(), next.stacked().map(StackedDevice::parents).unwrap_or_default()));
                }
                self.above.push(next);
            }
        }
        found
    }

    /// The size of a mapped device, computed from the bottom up. `below` must contain the device.
    /// There are no cycles, because no load accepts one.
    fn size(&mut self, top: DeviceId) -> StackDepthAndLaneCount {
        if let Some(size) = self.sizes.get(&top) {
            return *size;
        }
        let mut levels = vec![DeviceStackDfsFrame::new(top, Rc::clone(&self.below[&top]))];
        while let Some(mut level) = levels.pop() {
            let next = loop {
                let Some(next) = level.below.get(level.done) else { break None };
                let size = match self.sizes.get(&next.id()) {
                    Some(size) => *size,
                    None if next.stacked().is_none() => StackDepthAndLaneCount { depth: 0, lanes: 1 },
                    None => break Some(Arc::clone(next)),
                };
                level.done += 1;
                level.size.depth = level.size.depth.max(size.depth);
                level.size.lanes = level.size.lanes.saturating_add(size.lanes);
            };
            let Some(next) = next else {
                self.sizes
                    .insert(level.id, StackDepthAndLaneCount { depth: level.size.depth + 1, ..level.size });
                continue;
            };
            // Continued when the size of `next` is known.
            levels.push(level);
            if let Some(below) = self.below(&*next) {
                levels.push(DeviceStackDfsFrame::new(next.id(), below));
            }
        }
        self.sizes[&top]
    }
}

/// True if `wanted` accepts `device` or one of the devices below it.
#[must_use]
pub fn device_stack_contains(device: &Arc<dyn Device>, mut wanted: impl FnMut(&dyn Device) -> bool) -> bool {
    // There are no cycles, because no load accepts one. Several paths may lead to one device.
    let (mut seen, mut look) = (HashSet::new(), vec![Arc::clone(device)]);
    while let Some(next) = look.pop() {
        if wanted(&*next) {
            return true;
        }
        let below = next.stacked().map(|stacked| stacked.children()).unwrap_or_default();
        look.extend(below.into_iter().filter(|device| seen.insert(device.id())));
    }
    false
}

impl StackedDevice for MappedDevice {
    fn name(&self) -> String {
        MappedDevice::name(self)
    }

    fn uuid(&self) -> Option<String> {
        MappedDevice::uuid(self)
    }

    fn children(&self) -> Vec<Arc<dyn Device>> {
        self.slots().iter().flat_map(|table| table.opened()).map(|used| used.device).collect()
    }

    fn parents(&self) -> Vec<Arc<dyn Device>> {
        self.lock_parents().values().filter_map(Weak::upgrade).collect()
    }

    fn add_parent(&self, id: DeviceId, parent: Weak<dyn Device>) {
        let mut parents = self.lock_parents();
        if parents.len() == parents.capacity() {
            // Only when the map is full, because one device may have thousands of parents.
            parents.retain(|_, known| known.strong_count() > 0);
        }
        parents.insert(id, parent);
    }
}

impl MappedDevice {
    fn lock_parents(&self) -> MutexGuard<'_, HashMap<DeviceId, Weak<dyn Device>>> {
        self.parents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
