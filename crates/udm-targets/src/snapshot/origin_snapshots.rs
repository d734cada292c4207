//! An origin and its snapshots: the state shared by all names of the origin's disk.
//!
//! A lane of a `snapshot-origin` copies for the snapshots that are listed when the lane is opened.
//! So a change that adds or removes a snapshot also renews the devices with such lanes
//! ([`udm_dm::target::Target::partners`]). All of them are quiesced during the change.

use super::args;
use super::binding::SnapshotTableBinding;
use super::state::Snapshot;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use udm_core::{Device, DeviceId, SharedDiskState};
use udm_dm::MappedDevice;
use udm_dm::target::{ResolvedDevice, TargetHostServices};

/// The snapshots, tables and devices of one origin.
#[derive(Default)]
pub(super) struct OriginSnapshots {
    members: Mutex<OriginTablesAndSnapshots>,
    preresume_lock: Mutex<()>,
}

#[derive(Default)]
struct OriginTablesAndSnapshots {
    /// The tables with a snapshot of the origin, live or not.
    bindings: Vec<Weak<SnapshotTableBinding>>,
    /// The snapshots that lanes of the origin copy for, largest chunks first.
    listed: Vec<Arc<Snapshot>>,
    /// The devices with a `snapshot-origin` or `snapshot-merge` target of the origin.
    origin_devices: Vec<Weak<dyn TargetHostServices>>,
    /// Tickets of stores that were read and are not in use yet.
    read_tickets: Vec<Weak<LoadedStoreValidity>>,
}

/// A ticket for the contents of a store that were read when a table was loaded.
pub(super) struct LoadedStoreValidity {
    store: ResolvedDevice,
    /// Another table has used the store since it was read, so the contents are out of date.
    is_stale: AtomicBool,
}

impl LoadedStoreValidity {
    /// True if the store must be read again.
    pub(super) fn is_stale(&self) -> bool {
        self.is_stale.load(Ordering::Relaxed)
    }
}

impl OriginSnapshots {
    /// The shared state of `origin`.
    pub(super) fn of(origin: &ResolvedDevice) -> Arc<OriginSnapshots> {
        origin.device.shared_disk_state().map(SharedDiskState::get_or_default).unwrap_or_default()
    }

    fn members(&self) -> MutexGuard<'_, OriginTablesAndSnapshots> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held while `preresume` checks a store: one table at a time.
    pub(super) fn preresume_lock(&self) -> MutexGuard<'_, ()> {
        self.preresume_lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tables with a snapshot of the origin.
    pub(super) fn bindings(&self) -> Vec<Arc<SnapshotTableBinding>> {
        self.members().bindings.iter().filter_map(Weak::upgrade).collect()
    }

    /// The tables with a snapshot on `store`, without released tables.
    pub(super) fn on_store(&self, store: &ResolvedDevice) -> Vec<Arc<SnapshotTableBinding>> {
        let mut bindings = self.bindings();
        bindings.retain(|binding| binding.is_on(store) && !binding.is_released() && !binding.is_orphan());
        bindings
    }

    /// Creates a ticket for a table that is about to read `store`.
    pub(super) fn read(&self, store: &ResolvedDevice) -> Arc<LoadedStoreValidity> {
        let read_ticket =
            Arc::new(LoadedStoreValidity { store: store.clone(), is_stale: AtomicBool::new(false) });
        let mut members = self.members();
        members.read_tickets.retain(|known| known.strong_count() > 0);
        members.read_tickets.push(Arc::downgrade(&read_ticket));
        read_ticket
    }

    /// `store` is in use now: all tickets for it, except `own`, become stale.
    pub(super) fn invalidate_reads(&self, store: &ResolvedDevice, own: &Arc<LoadedStoreValidity>) {
        let members = self.members();
        let others =
            members.read_tickets.iter().filter_map(Weak::upgrade).filter(|one| !Arc::ptr_eq(one, own));
        for read_ticket in others.filter(|one| args::is_same_disk(&one.store, store)) {
            read_ticket.is_stale.store(true, Ordering::Relaxed);
        }
    }

    /// The stores of all tables with a snapshot, live or not. Lanes of the origin may open them.
    pub(super) fn stores(&self) -> Vec<ResolvedDevice> {
        let bindings = self.bindings();
        let held = bindings.iter().filter(|binding| !binding.is_released() && !binding.is_orphan());
        held.map(|binding| binding.line.store.clone()).collect()
    }

    /// Adds a table with a snapshot.
    pub(super) fn join(&self, binding: &Arc<SnapshotTableBinding>) {
        let mut members = self.members();
        members.bindings.retain(|known| known.strong_count() > 0);
        members.bindings.push(Arc::downgrade(binding));
    }

    /// Adds `snapshot` to the list: lanes of the origin opened from now on copy for it.
    pub(super) fn list(&self, snapshot: &Arc<Snapshot>) {
        let mut members = self.members();
        if members.listed.iter().any(|known| Arc::ptr_eq(known, snapshot)) {
            return;
        }
        let at = members.listed.partition_point(|known| known.chunk >= snapshot.chunk);
        members.listed.insert(at, Arc::clone(snapshot));
    }

    /// Removes `snapshot` from the list.
    pub(super) fn unlist(&self, snapshot: &Arc<Snapshot>) {
        self.members().listed.retain(|known| !Arc::ptr_eq(known, snapshot));
    }

    /// The snapshots that lanes of the origin copy for.
    pub(super) fn listed(&self) -> Vec<Arc<Snapshot>> {
        self.members().listed.clone()
    }

    /// True if lanes of the origin have nothing to copy.
    pub(super) fn is_empty(&self) -> bool {
        self.members().listed.is_empty()
    }

    /// Adds a device with a table that writes the origin.
    pub(super) fn add_origin_device(&self, notify: &Arc<dyn TargetHostServices>) {
        let mut members = self.members();
        members.origin_devices.retain(|known| known.strong_count() > 0);
        members.origin_devices.push(Arc::downgrade(notify));
    }

    /// The devices with such a table, without `except`.
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
