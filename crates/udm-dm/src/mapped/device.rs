//! The control half of a mapped device: its names, its two slots, its state and its events.
//!
//! `load` fills the inactive slot; `resume` makes the inactive table live ([`super::transition`]).
//! The data path uses only the event counter. No device below is called under the lock.

use super::host::WeakTargetHost;
use super::lane::{MappedLane, PreparedTableLane};
use super::names::DeviceNameAndUuid;
use super::queue::LazyRequestQueue;
use super::stack::{self, DeviceStackWalk};
use super::transition::DeviceTransition;
use crate::device_events::{DeviceEventDetails, EventSink};
use crate::device_ref::LowerLimits;
use crate::error::TargetError;
use crate::table::Table;
use crate::target::{DmQueueMode, SettingsOutsideTable, TargetHostServices};
use crate::throttle::DeviceThrottle;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use udm_core::{
    BioTaskHandle, ChangeTrackingCheckpoint, Cx, DevNo, Device, DeviceControlError, DeviceId, DiskQueue,
    ExtentKind, Extents, Lane, Limits, Nanos, RangeChangeStatus, Sector, Sectors, SharedDiskState,
    StackedDevice,
};

/// Wakes a thread when a [`DeviceTransition`] can take its next step, or an event was raised.
pub type TransitionWakeFn = Arc<dyn Fn() + Send + Sync>;

/// A mapped device: name, number, two table slots, state and event counter.
pub struct MappedDevice {
    id: DeviceId,
    number: DevNo,
    me: Weak<MappedDevice>,
    pub(super) names: Arc<Mutex<DeviceNameAndUuid>>,
    state: Mutex<MappedDeviceState>,
    /// Devices whose tables use this device.
    pub(super) parents: Mutex<HashMap<DeviceId, Weak<dyn Device>>>,
    pub(super) events: Arc<WeakTargetHost>,
    shared_disk_state: SharedDiskState,
    pub(super) queue: LazyRequestQueue,
    pub(super) throttle: Arc<DeviceThrottle>,
}

/// A table in use, and its generation. The generation identifies the resume that made the table
/// live, so lanes can recognize commands for older tables.
#[derive(Clone)]
pub(super) struct TableWithGeneration {
    pub table: Arc<Table>,
    pub generation: u64,
}

#[derive(Default)]
pub(super) struct MappedDeviceState {
    pub live: Option<TableWithGeneration>,
    pub inactive: Option<Arc<Table>>,
    /// The table that the cores are opening for a resume.
    pub preparing: Option<TableWithGeneration>,
    /// The previous live table, while cores may still have lanes of it.
    pub leaving: Option<TableWithGeneration>,
    pub suspended: bool,
    /// The live table must be renewed before it continues, because a partner changed while the
    /// device was suspended.
    pub stale: bool,
    /// A [`DeviceTransition`] is running.
    pub changing: bool,
    /// Settings for the targets that no table holds.
    pub target_settings: Option<SettingsOutsideTable>,
    /// The running tasks of the live table.
    pub tasks: Vec<BioTaskHandle>,
    /// The last generation that was assigned; 0 means no table.
    pub generation: u64,
    /// Kind of the device, fixed by the first load.
    kind: Option<DmQueueMode>,
}

impl MappedDeviceState {
    pub fn live_generation(&self) -> u64 {
        self.live.as_ref().map_or(0, |slot| slot.generation)
    }

    /// Every table that may have open lanes now, or after the inactive table is resumed. A table
    /// that is being renewed counts twice. `preparing` is the table that the cores are about to
    /// open. `inactive` is the table in the inactive slot, or the one about to be there.
    fn tables(
        &self,
        preparing: Option<&TableWithGeneration>,
        inactive: Option<&Arc<Table>>,
    ) -> Vec<Arc<Table>> {
        let is_prepared = |table: &Arc<Table>| preparing.is_some_and(|slot| Arc::ptr_eq(&slot.table, table));
        let slots = [self.live.as_ref(), preparing, self.leaving.as_ref()].into_iter().flatten();
        let waits = inactive.filter(|table| !is_prepared(table));
        slots.map(|slot| &slot.table).chain(waits).cloned().collect()
    }

    /// True if `table` is already live, so that it would replace itself.
    pub fn is_renewal(&self, table: &Arc<Table>) -> bool {
        self.live.as_ref().is_some_and(|live| Arc::ptr_eq(&live.table, table))
    }
}

/// State of a device, as `info` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name of the device.
    pub name: String,
    /// Uuid of the device, if one was set.
    pub uuid: Option<String>,
    /// Number of the device.
    pub number: DevNo,
    /// True if the state is SUSPENDED, false if it is ACTIVE.
    pub suspended: bool,
    /// True if there is a live table.
    pub live: bool,
    /// True if there is an inactive table.
    pub inactive: bool,
    /// Event counter of the device.
    pub event_nr: u32,
    /// Size of the live table; 0 without one.
    pub size: Sectors,
    /// Number of targets of the live table.
    pub targets: usize,
    /// Number of targets of the inactive table.
    pub inactive_targets: usize,
    /// True if the limits make the device read-only.
    pub read_only: bool,
}

impl MappedDevice {
    /// Creates a device without a table: its size is 0, and all I/O fails with EIO.
    ///
    /// # Errors
    /// An invalid name or uuid.
    pub fn new(name: &str, uuid: Option<&str>, number: DevNo) -> Result<Arc<MappedDevice>, TargetError> {
        let id = DeviceId::new();
        let names = Arc::new(Mutex::new(DeviceNameAndUuid::new(name, uuid)?));
        Ok(Arc::new_cyclic(|me| MappedDevice {
            id,
            number,
            me: Weak::clone(me),
            names: Arc::clone(&names),
            state: Mutex::default(),
            parents: Mutex::default(),
            events: WeakTargetHost::new(id, number, names, Weak::clone(me)),
            shared_disk_state: SharedDiskState::default(),
            queue: LazyRequestQueue::default(),
            throttle: Arc::default(),
        }))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, MappedDeviceState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Puts `table` into the inactive slot and drops the table that was there. Every load runs all
    /// checks of the first load.
    ///
    /// # Errors
    /// * sizes or alignment that no longer fit
    /// * a table that maps this device, directly or through other devices
    /// * a table of another kind than the device
    /// * a disk that a target needs alone and another device has
    ///
    /// On an error, the slot is unchanged.
    pub fn load(&self, table: Arc<Table>) -> Result<(), TargetError> {
        let live = self.state().live.clone();
        let kept = live.as_ref().and_then(|slot| slot.table.immutable_type());
        if let Some(kept) =
            kept.filter(|&k| table.immutable_type() != Some(k) && table.kind() != DmQueueMode::Any)
        {
            return Err(TargetError::new(format!("can't replace immutable target type {kept}")));
        }
        table.check(LowerLimits::NOW)?;
        let mut walk = DeviceStackWalk::default();
        let replaced = {
            let _shape = stack::lock_device_stack_for_load();
            let tables = {
                let state = self.state();
                state.tables(state.preparing.as_ref(), Some(&table))
            };
            walk.check(self, &tables, &table)?;
            table.claim(self.id, self.number)?;
            self.set_kind(table.kind())?;
            if self.state().kind == Some(DmQueueMode::Request) {
                self.queue.begin(self.id, &self.me);
            }
            for entry in table.targets() {
                let notify: Arc<dyn TargetHostServices> = Arc::<WeakTargetHost>::clone(&self.events);
                entry.target.attach(notify);
            }
            // The partners of this table now open more devices than before.
            let partners = table.partners();
            partners.iter().try_for_each(|partner| walk.check_partner(partner))?;
            partners
                .iter()
                .flat_map(|partner| partner.slots().into_iter().map(move |table| (partner, table)))
                .for_each(|(partner, table)| partner.register_with_lower(&table));
            self.register_with_lower(&table);
            self.state().inactive.replace(table)
        };
        // Dropping a table closes devices, so no lock may be held here.
        drop((walk, replaced));
        Ok(())
    }

    /// From now on the cores open `slot`, and so do new lanes. The checks of the load run again,
    /// because the devices below may have changed. `below` has the limits that devices below get in
    /// the same change. A renewed table keeps its limits, as a table that continues after a suspend
    /// does.
    pub(super) fn prepare(
        &self,
        slot: &TableWithGeneration,
        below: LowerLimits<'_>,
    ) -> Result<(), TargetError> {
        if !self.state().is_renewal(&slot.table) {
            slot.table.check(below)?;
        }
        let mut walk = DeviceStackWalk::default();
        let _shape = stack::lock_device_stack_for_load();
        let tables = {
            let state = self.state();
            state.tables(Some(slot), state.inactive.as_ref())
        };
        walk.check(self, &tables, &slot.table)?;
        self.state().preparing = Some(slot.clone());
        Ok(())
    }

    /// The tables of all slots.
    pub(super) fn slots(&self) -> Vec<Arc<Table>> {
        let state = self.state();
        state.tables(state.preparing.as_ref(), state.inactive.as_ref())
    }

    /// Registers this device as a parent of the devices that `table` opens.
    fn register_with_lower(&self, table: &Table) {
        for used in table.opened() {
            if let Some(stacked) = used.device.stacked() {
                let me: Weak<dyn Device> = Weak::<MappedDevice>::clone(&self.me);
                stacked.add_parent(self.id, me);
            }
        }
    }

    /// Fixes the kind of the device at the first load.
    fn set_kind(&self, new: DmQueueMode) -> Result<(), TargetError> {
        let mut state = self.state();
        match state.kind {
            // A table whose targets fit every kind makes a bio-based device (kernel).
            None => state.kind = Some(if new == DmQueueMode::Any { DmQueueMode::Bio } else { new }),
            Some(old) if new != DmQueueMode::Any && new != old => {
                let (old, new) = (old.number(), new.number());
                return Err(TargetError::new(format!(
                    "can't change device type (old={old} vs new={new}) after initial table load."
                )));
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// Suspends the device: new bios wait. Bios that targets hold back fail; with `noflush`, they
    /// wait too. A second suspend succeeds. The caller must step the change to its end.
    ///
    /// # Errors
    /// EBUSY if another change is running.
    pub fn suspend(
        self: &Arc<Self>,
        noflush: bool,
        wake: TransitionWakeFn,
    ) -> Result<DeviceTransition, TargetError> {
        DeviceTransition::suspend(self, noflush, wake)
    }

    /// Resumes the device, with the inactive table if there is one. An active device is suspended
    /// while the tables are swapped. Bios that targets hold back go to the new table. The caller
    /// must step the change to its end.
    ///
    /// # Errors
    /// EBUSY if another change is running.
    pub fn resume(self: &Arc<Self>, wake: TransitionWakeFn) -> Result<DeviceTransition, TargetError> {
        DeviceTransition::resume(self, true, wake)
    }

    /// As [`MappedDevice::resume`]. Without `noflush`, bios that the old table holds back fail, as
    /// in the kernel's `dmsetup resume` of an active device.
    ///
    /// # Errors
    /// EBUSY if another change is running.
    pub fn resume_with(
        self: &Arc<Self>,
        noflush: bool,
        wake: TransitionWakeFn,
    ) -> Result<DeviceTransition, TargetError> {
        DeviceTransition::resume(self, noflush, wake)
    }

    /// Sets the settings for targets that no table holds, from the next load and resume on.
    pub fn set_target_settings(&self, settings: SettingsOutsideTable) {
        self.state().target_settings = Some(settings);
    }

    /// The settings for targets that no table holds; `None` if none were set.
    pub fn target_settings(&self) -> Option<SettingsOutsideTable> {
        self.state().target_settings.clone()
    }

    /// Sets the clock with which the device measures durations. Only the first call has an effect.
    pub fn set_clock(&self, clock: fn() -> Nanos) {
        let _ = self.events.clock.set(clock);
    }

    /// Drops the inactive table.
    pub fn clear(&self) {
        let dropped = self.state().inactive.take();
        drop(dropped);
    }

    /// Drops the inactive table only if it is still `loaded`, not a table that another client
    /// loaded since.
    pub fn clear_own(&self, loaded: &Arc<Table>) {
        let is_own = |waits: &mut Arc<Table>| Arc::ptr_eq(waits, loaded);
        let dropped = self.state().inactive.take_if(is_own);
        drop(dropped);
    }

    /// Number of the device.
    #[must_use]
    pub fn number(&self) -> DevNo {
        self.number
    }

    /// The event counter; it only increases, modulo 2^32.
    #[must_use]
    pub fn event_nr(&self) -> u32 {
        self.events.count.load(Ordering::Acquire)
    }

    /// Sets the event counter to that of the same device in another process.
    pub fn set_event_nr(&self, event_nr: u32) {
        self.events.count.store(event_nr, Ordering::Release);
    }

    /// Sets `hook` to be called after each event. Any thread, also a core, may call it, so it
    /// should only wake another thread. Only the first call has an effect.
    pub fn on_event(&self, hook: TransitionWakeFn) {
        let _ = self.events.hook.set(hook);
    }

    /// Sets the receiver of device events. Any thread, also a core, may call it. Only the first
    /// call has an effect.
    pub fn set_event_sink(&self, event_sink: EventSink) {
        let _ = self.events.event_sink.set(event_sink);
    }

    /// Sends an event that does not come from a target of the device.
    pub fn emit_event(&self, change: &dyn Fn() -> DeviceEventDetails) {
        self.events.emit(change);
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

    /// True while a suspend, a resume or a removal of the device is running.
    #[must_use]
    pub fn is_changing(&self) -> bool {
        self.state().changing
    }

    /// State of the device, as `info` shows it.
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

    /// The output of `dmsetup table` for the live or the inactive table; empty without one.
    #[must_use]
    pub fn table_text(&self, inactive: bool) -> String {
        let table = if inactive { self.inactive() } else { self.live() };
        table.map_or_else(String::new, |table| table.text())
    }

    /// The output of `dmsetup status`; empty without a live table.
    #[must_use]
    pub fn status_text(&self) -> String {
        self.live().map_or_else(String::new, |table| table.status())
    }
}

impl Device for MappedDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        match self.queue.front_queue() {
            Some(queue) => queue.open(cx),
            None => self.open_unqueued(cx),
        }
    }

    fn queue(&self) -> Option<&dyn DiskQueue> {
        self.queue.front_queue()?.queue()
    }

    fn limits(&self) -> Limits {
        self.live().map_or(Limits::new(Sectors::ZERO), |table| table.limits())
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let live = self.live();
        // The device may have shrunk since the caller read its size.
        let known = live.as_ref().map_or(0, |table| table.limits().size.0.saturating_sub(from.0)).min(len.0);
        if let Some(table) = live.filter(|_| known > 0) {
            table.extents(from, Sectors(known), out);
        }
        out.push(Sectors(len.0 - known), ExtentKind::Data);
    }

    fn checkpoints(&self) -> Vec<ChangeTrackingCheckpoint> {
        self.live().map_or_else(Vec::new, |table| table.checkpoints())
    }

    fn changed(
        &self,
        since: &ChangeTrackingCheckpoint,
        from: Sector,
        len: Sectors,
        out: &mut Extents<RangeChangeStatus>,
    ) {
        let live = self.live();
        let known = live.as_ref().map_or(0, |table| table.limits().size.0.saturating_sub(from.0)).min(len.0);
        if let Some(table) = live.filter(|_| known > 0) {
            table.changed(since, from, Sectors(known), out);
        }
        out.push(Sectors(len.0 - known), RangeChangeStatus::Changed);
    }

    fn retry_now(&self) {
        let live = self.live();
        live.iter().flat_map(|table| table.devices()).for_each(|used| used.device.retry_now());
    }

    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        Some(&self.shared_disk_state)
    }

    fn stacked(&self) -> Option<&dyn StackedDevice> {
        Some(self)
    }
}

impl MappedDevice {
    /// Opens a lane that bypasses the queue.
    pub(super) fn open_unqueued(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        // The inbox is opened before the state is read. A command sent before the inbox opened is
        // then already part of the state. A command that repeats the state does no harm.
        let inbox = cx.open_inbox(self.id);
        let (live, preparing, suspended) = {
            let state = self.state();
            (state.live.clone(), state.preparing.clone(), state.suspended)
        };
        let open = |slot: Option<TableWithGeneration>, cx: &mut Cx<'_>| {
            slot.map(|slot| PreparedTableLane::new(&slot, cx)).transpose()
        };
        let (live, prepared) = (open(live, cx)?, open(preparing, cx)?);
        Ok(Box::new(MappedLane::new(inbox, live, prepared, suspended, Arc::clone(&self.throttle), cx)))
    }
}
