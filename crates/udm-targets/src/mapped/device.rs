//! The control half of a mapped device: its names, its two slots, its state and its events.
//!
//! `load` fills the inactive slot; `resume` makes it the live one ([`super::change`]). Nothing here is touched by the data path but the event
//! counter, and that only when something has happened. The lock is held for moments and never while a device below is called.

use super::change::Change;
use super::lane::MappedLane;
use super::names::Names;
use crate::error::TargetError;
use crate::table::Table;
use crate::target::{DeviceRef, Kind, Notify};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use udm_core::{Cores, Cx, DevNo, Device, DeviceId, Lane, LaneCommand, Limits, OpenError, Sectors};

/// Called when there is something to do: a [`Change`] can take its next step, an event was raised. It only wakes; it must not call back.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// How many mapped devices may lie on top of each other. Calls go down that deep.
pub const DEPTH_MAX: usize = 32;

/// A mapped device. See the module's documentation.
pub struct MappedDevice {
    id: DeviceId,
    number: DevNo,
    pub(super) names: Arc<Mutex<Names>>,
    state: Mutex<State>,
    pub(super) events: Arc<Events>,
}

/// A table in use, and which resume made it so: lanes tell commands for it from older ones by the number.
#[derive(Clone)]
pub(super) struct Slot {
    pub table: Arc<Table>,
    pub generation: u64,
}

#[derive(Default)]
pub(super) struct State {
    pub live: Option<Slot>,
    pub inactive: Option<Arc<Table>>,
    /// What a resume is having the cores open.
    pub preparing: Option<Slot>,
    pub suspended: bool,
    /// A [`Change`] is under way.
    pub changing: bool,
    /// The last generation given out; 0 is no table.
    pub generation: u64,
    /// Fixed by the first load.
    kind: Option<Kind>,
}

impl State {
    pub fn live_generation(&self) -> u64 {
        self.live.as_ref().map_or(0, |slot| slot.generation)
    }
}

/// What `info` shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The name.
    pub name: String,
    /// The uuid, if one was set.
    pub uuid: Option<String>,
    /// The number.
    pub number: DevNo,
    /// State SUSPENDED, else ACTIVE.
    pub suspended: bool,
    /// There is a live table.
    pub live: bool,
    /// There is an inactive table.
    pub inactive: bool,
    /// The event counter.
    pub event_nr: u32,
    /// Size of the device: of its live table, 0 without one.
    pub size: Sectors,
    /// Targets of the live table.
    pub targets: usize,
    /// Targets of the inactive table.
    pub inactive_targets: usize,
    /// Limits make the device read-only.
    pub read_only: bool,
}

/// What targets hold of the device: no more than this, so that a table does not keep its own device alive.
pub(super) struct Events {
    id: DeviceId,
    number: DevNo,
    names: Arc<Mutex<Names>>,
    count: AtomicU32,
    hook: OnceLock<Wake>,
}

impl Notify for Events {
    fn event(&self) {
        // Release pairs with the acquire in `event_nr`: who sees the number sees what it is about.
        self.count.fetch_add(1, Ordering::Release);
        if let Some(hook) = self.hook.get() {
            hook();
        }
    }

    fn device(&self) -> String {
        // Cores ask, and they wait for no lock.
        self.names.try_lock().map_or_else(|_| self.number.to_string(), |names| names.name().to_owned())
    }

    fn kick(&self, cores: &dyn Cores) {
        cores.broadcast(self.id, LaneCommand::Kick);
    }
}

impl MappedDevice {
    /// A device without a table: size 0, all I/O EIO.
    ///
    /// # Errors
    /// What is wrong with the name or the uuid.
    pub fn new(name: &str, uuid: Option<&str>, number: DevNo) -> Result<Arc<MappedDevice>, TargetError> {
        let id = DeviceId::new();
        let names = Arc::new(Mutex::new(Names::new(name, uuid)?));
        Ok(Arc::new(MappedDevice {
            id,
            number,
            names: Arc::clone(&names),
            state: Mutex::default(),
            events: Arc::new(Events { id, number, names, count: AtomicU32::new(0), hook: OnceLock::new() }),
        }))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Puts `table` into the inactive slot, in the place of what is there. Everything that the first load checks is checked at each.
    ///
    /// # Errors
    /// Sizes and alignment that no longer fit; a table that maps this device, directly or through others; one of another kind than the device
    /// is. The slot is as it was then.
    pub fn load(&self, table: Arc<Table>) -> Result<(), TargetError> {
        let live = self.state().live.clone();
        let kept = live.as_ref().and_then(|slot| slot.table.immutable_type());
        if let Some(kept) = kept.filter(|&k| table.immutable_type() != Some(k) && table.kind() != Kind::Any) {
            return Err(TargetError::new(format!("can't replace immutable target type {kept}")));
        }
        self.check(&table)?;
        self.set_kind(table.kind())?;
        for entry in table.targets() {
            let notify: Arc<dyn Notify> = Arc::<Events>::clone(&self.events);
            entry.target.attach(notify);
        }
        let replaced = self.state().inactive.replace(table);
        // Dropping a table closes devices: not under the lock.
        drop(replaced);
        Ok(())
    }

    /// The first load fixes the kind of the device.
    fn set_kind(&self, new: Kind) -> Result<(), TargetError> {
        let mut state = self.state();
        match state.kind {
            // A table that fits everywhere makes a bio-based device (kernel).
            None => state.kind = Some(if new == Kind::Any { Kind::Bio } else { new }),
            Some(old) if new != Kind::Any && new != old => {
                let (old, new) = (old.number(), new.number());
                return Err(TargetError::new(format!(
                    "can't change device type (old={old} vs new={new}) after initial table load."
                )));
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// What can change between load and resume: sizes of the devices below, and what they map.
    pub(super) fn check(&self, table: &Table) -> Result<(), TargetError> {
        // Devices that were looked at once and do not lead here need no second look.
        let mut seen = BTreeSet::new();
        let mut loops = |d: &DeviceRef| {
            if seen.insert(d.device.id()) {
                d.device.add_below(&mut seen);
            }
            seen.contains(&self.id)
        };
        for (line, entry) in table.targets().iter().enumerate() {
            let devices = entry.target.devices();
            if let Some(used) = devices.iter().find(|used| loops(&used.device)) {
                let text = format!("{}: Device lookup failed", entry.target.type_name());
                let reason = format!("{} is on top of {} already", used.device.name, self.name());
                return Err(TargetError { line: Some(line), ..TargetError::new(text).because(reason) });
            }
        }
        if table.depth() >= DEPTH_MAX {
            let reason = format!("more than {DEPTH_MAX} mapped devices on top of each other");
            return Err(TargetError::errno(40).because(reason));
        }
        table.check()
    }

    /// Suspends: new bios wait; held ones fail, or with `noflush` wait as well. A second suspend is a success. Step the change to its end.
    ///
    /// # Errors
    /// EBUSY while another change is under way.
    pub fn suspend(self: &Arc<Self>, noflush: bool, wake: Wake) -> Result<Change, TargetError> {
        Change::suspend(self, noflush, wake)
    }

    /// Resumes, with the inactive table if there is one. A device that is not suspended is, for as long as the tables change places; bios that are
    /// only held meanwhile go to the new table. Step the change to its end.
    ///
    /// # Errors
    /// EBUSY while another change is under way.
    pub fn resume(self: &Arc<Self>, wake: Wake) -> Result<Change, TargetError> {
        Change::resume(self, true, wake)
    }

    /// As [`MappedDevice::resume`]; without `noflush`, bios that the old table holds back fail, as in the kernel's `dmsetup resume` of
    /// a device that was not suspended before.
    ///
    /// # Errors
    /// EBUSY while another change is under way.
    pub fn resume_with(self: &Arc<Self>, noflush: bool, wake: Wake) -> Result<Change, TargetError> {
        Change::resume(self, noflush, wake)
    }

    /// Drops the inactive table.
    pub fn clear(&self) {
        let dropped = self.state().inactive.take();
        drop(dropped);
    }

    /// The number.
    #[must_use]
    pub fn number(&self) -> DevNo {
        self.number
    }

    /// The event counter: it only grows, modulo 2^32.
    #[must_use]
    pub fn event_nr(&self) -> u32 {
        self.events.count.load(Ordering::Acquire)
    }

    /// Has `hook` called after each event, from whatever thread raised it, cores included: it should do no more than wake another. The first hook
    /// stays.
    pub fn on_event(&self, hook: Wake) {
        let _ = self.events.hook.set(hook);
    }

    /// The live table.
    #[must_use]
    pub fn live(&self) -> Option<Arc<Table>> {
        self.state().live.as_ref().map(|slot| Arc::clone(&slot.table))
    }

    /// The inactive table.
    #[must_use]
    pub fn inactive(&self) -> Option<Arc<Table>> {
        self.state().inactive.clone()
    }

    /// True between suspend and resume.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        self.state().suspended
    }

    /// What `info` shows.
    #[must_use]
    pub fn info(&self) -> DeviceInfo {
        let (live, inactive) = (self.live(), self.inactive());
        let limits = self.limits();
        DeviceInfo {
            name: self.name(),
            uuid: self.uuid(),
            number: self.number,
            suspended: self.is_suspended(),
            live: live.is_some(),
            inactive: inactive.is_some(),
            event_nr: self.event_nr(),
            size: limits.size,
            targets: live.map_or(0, |t| t.targets().len()),
            inactive_targets: inactive.map_or(0, |t| t.targets().len()),
            read_only: limits.read_only,
        }
    }

    /// What `dmsetup table` prints of the live or the inactive table; empty without one.
    #[must_use]
    pub fn table_text(&self, inactive: bool) -> String {
        let table = if inactive { self.inactive() } else { self.live() };
        table.map_or_else(String::new, |table| table.text())
    }

    /// What `dmsetup status` prints; empty without a live table.
    #[must_use]
    pub fn status_text(&self) -> String {
        self.live().map_or_else(String::new, |table| table.status())
    }
}

impl Device for MappedDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        if self.depth() > DEPTH_MAX {
            return Err(OpenError::new(40, "too many mapped devices on top of each other"));
        }
        // The port comes first: a command that is too early for it came before the state that is read next, and one that repeats
        // that state does no harm.
        let port = cx.open_port(self.id);
        let (live, preparing, suspended) = {
            let state = self.state();
            (state.live.clone(), state.preparing.clone(), state.suspended)
        };
        let open = |slot: Option<Slot>, cx: &mut Cx<'_>| match slot {
            Some(slot) => Ok(Some((slot.generation, slot.table.open(cx)?))),
            None => Ok(None),
        };
        let (live, prepared) = (open(live, cx)?, open(preparing, cx)?);
        Ok(Box::new(MappedLane::new(port, live, prepared, suspended)))
    }

    fn limits(&self) -> Limits {
        self.live().map_or(Limits::new(Sectors::ZERO), |table| table.limits())
    }

    fn add_below(&self, seen: &mut BTreeSet<DeviceId>) {
        // Both slots: a load that would close a circle at a later resume is refused now.
        for table in [self.live(), self.inactive()].into_iter().flatten() {
            table.add_below(seen);
        }
    }

    fn depth(&self) -> usize {
        let tables = [self.live(), self.inactive()];
        1 + tables.into_iter().flatten().map(|table| table.depth()).max().unwrap_or(0)
    }
}
