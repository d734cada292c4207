//! How mapped devices lie on each other: no circles, and an end to how deep and how wide.
//!
//! Calls go down as deep as devices lie on each other, and a device that two lines of a table name
//! has two lanes below each lane of that table, so lanes can double with each level. Both are
//! bounded when a table is loaded, for the device and for all that lie on it, so opening a lane
//! never fails for it. Counted are the tables of all slots, because the lanes of several are open
//! while tables change places.
//!
//! Only a load makes a stack larger. Loads look and act one at a time ([`lock_stack`]), over all devices
//! of the process; nothing that could block is done meanwhile. The walks keep their own lists
//! instead of calling themselves, and look at each device once.

use super::MappedDevice;
use crate::error::TargetError;
use crate::table::Table;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use udm_core::errno::{ELOOP, EMLINK};
use udm_core::{Device, DeviceId, StackedDevice};

/// How many mapped devices may lie on each other. Calls go down that deep.
pub const DEPTH_MAX: usize = 32;

/// How many lanes one device may open on a core, its own and all below. More than any stack that
/// does work needs (a thousand lines over ten levels are eleven thousand), and few enough that a
/// core opens them in some tens of milliseconds.
pub const LANES_MAX: u64 = 16384;

/// Held while a load looks at the stack and takes its place in it.
pub(super) fn lock_stack() -> MutexGuard<'static, ()> {
    static STACK: Mutex<()> = Mutex::new(());
    STACK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The devices directly below one, as often as it uses them.
type LowerDevices = Rc<[Arc<dyn Device>]>;

/// A walk over the stack. It keeps every device that it met: the last hold on one closes files,
/// which is for after [`lock_stack`] is let go.
#[derive(Default)]
pub(super) struct StackWalk {
    below: HashMap<DeviceId, LowerDevices>,
    above: Vec<Arc<dyn Device>>,
    sizes: HashMap<DeviceId, StackSize>,
}

/// What a device is with all below it.
#[derive(Clone, Copy)]
struct StackSize {
    depth: usize,
    lanes: u64,
}

/// A device whose size is being worked out: what lies below, and how much of it is done.
struct SizeFrame {
    id: DeviceId,
    below: LowerDevices,
    done: usize,
    size: StackSize,
}

impl SizeFrame {
    fn new(id: DeviceId, below: LowerDevices) -> SizeFrame {
        SizeFrame { id, below, done: 0, size: StackSize { depth: 0, lanes: 1 } }
    }
}

impl StackWalk {
    /// Checks `device` with `tables` in its slots, of which `new` is to come.
    ///
    /// # Errors
    /// `new` maps the device itself, directly or through others; a stack that it is part of would
    /// be too deep or too wide.
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

    /// Checks `device`, whose table opens more than it did: another that is to come is its partner.
    ///
    /// # Errors
    /// As [`StackWalk::check`]'s.
    pub fn check_dependent(&mut self, device: &MappedDevice) -> Result<(), TargetError> {
        let (all_above, tables) = (self.collect_ancestors(device), device.slots());
        for used in tables.iter().flat_map(|table| table.opened()) {
            if used.device.id() == device.id() || all_above.contains(&used.device.id()) {
                let reason = format!("{} is on top of {} already", used.current_name(), device.name());
                return Err(TargetError::new("Device lookup failed").because(reason));
            }
        }
        self.check_size(device, &tables, all_above)
    }

    /// Checks how deep and wide the stacks are that `device` is part of, with `tables` in its
    /// slots.
    fn check_size(
        &mut self,
        device: &MappedDevice,
        tables: &[Arc<Table>],
        all_above: HashSet<DeviceId>,
    ) -> Result<(), TargetError> {
        let below = tables.iter().flat_map(|table| table.opened()).map(|used| used.device).collect();
        self.below.insert(device.id(), below);
        let all = std::iter::once(device.id()).chain(all_above);
        let sizes: Vec<StackSize> = all.map(|id| self.size(id)).collect();
        let depth = sizes.iter().map(|size| size.depth).max().unwrap_or(0);
        let lanes = sizes.iter().map(|size| size.lanes).max().unwrap_or(0);
        if depth > DEPTH_MAX {
            let reason = format!("{depth} mapped devices would lie on top of each other, {DEPTH_MAX} can");
            return Err(TargetError::errno(ELOOP).because(reason));
        }
        if lanes > LANES_MAX {
            let reason = format!(
                "{lanes} lanes of the stack would be open on a core, {LANES_MAX} can: name a mapped device in fewer lines, resume or \
                 clear tables that wait"
            );
            return Err(TargetError::errno(EMLINK).because(reason));
        }
        Ok(())
    }

    fn below(&mut self, device: &dyn Device) -> Option<LowerDevices> {
        let stacked = device.stacked()?;
        let below = self.below.entry(device.id()).or_insert_with(|| stacked.below().into());
        Some(Rc::clone(below))
    }

    /// Every device that lies on `device`, directly or through others.
    fn collect_ancestors(&mut self, device: &MappedDevice) -> HashSet<DeviceId> {
        let mut found = HashSet::new();
        let mut look = vec![(device.id(), device.above())];
        while let Some((id, above)) = look.pop() {
            for next in above {
                // What was said when it was loaded is true only as long as it has that table.
                let is_over = self.below(&*next).is_some_and(|below| below.iter().any(|b| b.id() == id));
                if is_over && found.insert(next.id()) {
                    look.push((next.id(), next.stacked().map(StackedDevice::above).unwrap_or_default()));
                }
                self.above.push(next);
            }
        }
        found
    }

    /// The size of a mapped device whose neighbours below are known, from the bottom up. There is
    /// no circle: no load has let one in.
    fn size(&mut self, top: DeviceId) -> StackSize {
        if let Some(size) = self.sizes.get(&top) {
            return *size;
        }
        let mut levels = vec![SizeFrame::new(top, Rc::clone(&self.below[&top]))];
        while let Some(mut level) = levels.pop() {
            let next = loop {
                let Some(next) = level.below.get(level.done) else { break None };
                let size = match self.sizes.get(&next.id()) {
                    Some(size) => *size,
                    None if next.stacked().is_none() => StackSize { depth: 0, lanes: 1 },
                    None => break Some(Arc::clone(next)),
                };
                level.done += 1;
                level.size.depth = level.size.depth.max(size.depth);
                level.size.lanes = level.size.lanes.saturating_add(size.lanes);
            };
            let Some(next) = next else {
                self.sizes.insert(level.id, StackSize { depth: level.size.depth + 1, ..level.size });
                continue;
            };
            // This one goes on when what lies below it is done.
            levels.push(level);
            if let Some(below) = self.below(&*next) {
                levels.push(SizeFrame::new(next.id(), below));
            }
        }
        self.sizes[&top]
    }
}

/// True when one of the devices below `device`, or it itself, is `wanted`.
#[must_use]
pub fn depends_on(device: &Arc<dyn Device>, mut wanted: impl FnMut(&dyn Device) -> bool) -> bool {
    // No circle: no load has let one in. Many ways may lead to one device.
    let (mut seen, mut look) = (HashSet::new(), vec![Arc::clone(device)]);
    while let Some(next) = look.pop() {
        if wanted(&*next) {
            return true;
        }
        let below = next.stacked().map(|stacked| stacked.below()).unwrap_or_default();
        look.extend(below.into_iter().filter(|device| seen.insert(device.id())));
    }
    false
}
