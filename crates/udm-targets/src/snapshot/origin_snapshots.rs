//! An origin and all that have to do with its snapshots: what every name of its disk shares.
//!
//! A lane of a `snapshot-origin` looks after the snapshots that are listed when it is opened. So a
//! snapshot that becomes live, or goes, has the devices with such lanes renewed in the same change
//! ([`udm_dm::target::Target::dependents`]): all of them stand still while it happens.

use super::args;
use super::binding::SnapshotBinding;
use super::state::Snapshot;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use udm_core::{Device, DeviceId, SharedDiskState};
use udm_dm::MappedDevice;
use udm_dm::target::{DeviceRef, TargetHost};

/// See the module's documentation.
#[derive(Default)]
pub(super) struct OriginSnapshots {
    members: Mutex<OriginMembers>,
    preresume_lock: Mutex<()>,
}

#[derive(Default)]
struct OriginMembers {
    /// The tables with a snapshot of the origin, live or not.
    bindings: Vec<Weak<SnapshotBinding>>,
    /// What lanes of the origin look after, those with the largest chunks first.
    listed: Vec<Arc<Snapshot>>,
    /// The devices with an origin's target.
    origin_devices: Vec<Weak<dyn TargetHost>>,
    /// What was read of stores and is not in use yet.
    read_tickets: Vec<Weak<StoreReadTicket>>,
}

/// What was read of a store for a table that is loaded.
pub(super) struct StoreReadTicket {
    store: DeviceRef,
    /// Another table has had the store in use since it was begun: it is not what is there.
    is_stale: AtomicBool,
}

impl StoreReadTicket {
    /// True when the store has to be read again.
    pub(super) fn is_stale(&self) -> bool {
        self.is_stale.load(Ordering::Relaxed)
    }
}

impl OriginSnapshots {
    /// That of `origin`.
    pub(super) fn of(origin: &DeviceRef) -> Arc<OriginSnapshots> {
        origin.device.shared_disk_state().map(SharedDiskState::get_or_default).unwrap_or_default()
    }

    fn members(&self) -> MutexGuard<'_, OriginMembers> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held while a table is asked whether it can have its store: one at a time.
    pub(super) fn preresume_lock(&self) -> MutexGuard<'_, ()> {
        self.preresume_lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tables with a snapshot of the origin.
    pub(super) fn bindings(&self) -> Vec<Arc<SnapshotBinding>> {
        self.members().bindings.iter().filter_map(Weak::upgrade).collect()
    }

    /// Those with one on `store`. Who has handed his over is no longer one of them.
    pub(super) fn on_store(&self, store: &DeviceRef) -> Vec<Arc<SnapshotBinding>> {
        let mut bindings = self.bindings();
        bindings.retain(|binding| binding.is_on(store) && !binding.is_released() && !binding.is_orphan());
        bindings
    }

    /// A table is about to read `store`.
    pub(super) fn read(&self, store: &DeviceRef) -> Arc<StoreReadTicket> {
        let read_ticket =
            Arc::new(StoreReadTicket { store: store.clone(), is_stale: AtomicBool::new(false) });
        let mut members = self.members();
        members.read_tickets.retain(|known| known.strong_count() > 0);
        members.read_tickets.push(Arc::downgrade(&read_ticket));
        read_ticket
    }

    /// `store` is in use: whatever was read of it before, but for `own`, is not what is there from
    /// now on.
    pub(super) fn invalidate_reads(&self, store: &DeviceRef, own: &Arc<StoreReadTicket>) {
        let members = self.members();
        let others =
            members.read_tickets.iter().filter_map(Weak::upgrade).filter(|one| !Arc::ptr_eq(one, own));
        for read_ticket in others.filter(|one| args::is_same_disk(&one.store, store)) {
            read_ticket.is_stale.store(true, Ordering::Relaxed);
        }
    }

    /// The stores of all tables with a snapshot, live or not: what lanes of the origin may open.
    pub(super) fn stores(&self) -> Vec<DeviceRef> {
        let bindings = self.bindings();
        let held = bindings.iter().filter(|binding| !binding.is_released() && !binding.is_orphan());
        held.map(|binding| binding.line.store.clone()).collect()
    }

    /// Another table with a snapshot.
    pub(super) fn join(&self, binding: &Arc<SnapshotBinding>) {
        let mut members = self.members();
        members.bindings.retain(|known| known.strong_count() > 0);
        members.bindings.push(Arc::downgrade(binding));
    }

    /// Lanes of the origin that are opened from now on look after `snapshot`.
    pub(super) fn list(&self, snapshot: &Arc<Snapshot>) {
        let mut members = self.members();
        if members.listed.iter().any(|known| Arc::ptr_eq(known, snapshot)) {
            return;
        }
        let at = members.listed.partition_point(|known| known.chunk >= snapshot.chunk);
        members.listed.insert(at, Arc::clone(snapshot));
    }

    /// And from now on they don't.
    pub(super) fn unlist(&self, snapshot: &Arc<Snapshot>) {
        self.members().listed.retain(|known| !Arc::ptr_eq(known, snapshot));
    }

    /// What lanes of the origin look after.
    pub(super) fn listed(&self) -> Vec<Arc<Snapshot>> {
        self.members().listed.clone()
    }

    /// True when lanes of the origin have nothing to look after.
    pub(super) fn is_empty(&self) -> bool {
        self.members().listed.is_empty()
    }

    /// A device has a table with the origin's target.
    pub(super) fn add_origin_device(&self, notify: &Arc<dyn TargetHost>) {
        let mut members = self.members();
        members.origin_devices.retain(|known| known.strong_count() > 0);
        members.origin_devices.push(Arc::downgrade(notify));
    }

    /// The devices with such a table, but for `except`.
    pub(super) fn origin_devices(&self, except: Option<DeviceId>) -> Vec<Arc<MappedDevice>> {
        let origin_devices: Vec<_> = self.members().origin_devices.iter().filter_map(Weak::upgrade).collect();
        let mut found: Vec<Arc<MappedDevice>> = Vec::new();
        for device in origin_devices.iter().filter_map(|notify| notify.mapped()) {
            if Some(device.id()) != except && !found.iter().any(|known| known.id() == device.id()) {
                found.push(device);
            }
        }
        found
    }
}
