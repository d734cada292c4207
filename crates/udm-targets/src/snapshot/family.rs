//! An origin and all that have to do with its snapshots: what every name of its disk shares.
//!
//! A lane of a `snapshot-origin` looks after the snapshots that are listed when it is opened. So a
//! snapshot that becomes live, or goes, has the devices with such lanes renewed in the same change
//! ([`udm_dm::target::Target::partners`]): all of them stand still while it happens.

use super::args;
use super::seat::Seat;
use super::state::Snapshot;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use udm_core::{Commons, Device, DeviceId};
use udm_dm::MappedDevice;
use udm_dm::target::{DeviceRef, Notify};

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Family {
    members: Mutex<Members>,
    asking: Mutex<()>,
}

#[derive(Default)]
struct Members {
    /// The tables with a snapshot of the origin, live or not.
    seats: Vec<Weak<Seat>>,
    /// What lanes of the origin look after, those with the largest chunks first.
    listed: Vec<Arc<Snapshot>>,
    /// The devices with an origin's target.
    nodes: Vec<Weak<dyn Notify>>,
    /// What was read of stores and is not in use yet.
    readings: Vec<Weak<Reading>>,
}

/// What was read of a store for a table that is loaded.
pub(super) struct Reading {
    store: DeviceRef,
    /// Another table has had the store in use since it was begun: it is not what is there.
    is_stale: AtomicBool,
}

impl Reading {
    /// True when the store has to be read again.
    pub(super) fn is_stale(&self) -> bool {
        self.is_stale.load(Ordering::Relaxed)
    }
}

impl Family {
    /// That of `origin`.
    pub(super) fn of(origin: &DeviceRef) -> Arc<Family> {
        origin.device.commons().map(Commons::common).unwrap_or_default()
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held while a table is asked whether it can have its store: one at a time.
    pub(super) fn asking(&self) -> MutexGuard<'_, ()> {
        self.asking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tables with a snapshot of the origin.
    pub(super) fn seats(&self) -> Vec<Arc<Seat>> {
        self.members().seats.iter().filter_map(Weak::upgrade).collect()
    }

    /// Those with one on `store`. Who has handed his over is no longer one of them.
    pub(super) fn on_store(&self, store: &DeviceRef) -> Vec<Arc<Seat>> {
        let mut seats = self.seats();
        seats.retain(|seat| seat.is_on(store) && !seat.is_spent() && !seat.is_orphan());
        seats
    }

    /// A table is about to read `store`.
    pub(super) fn read(&self, store: &DeviceRef) -> Arc<Reading> {
        let reading = Arc::new(Reading { store: store.clone(), is_stale: AtomicBool::new(false) });
        let mut members = self.members();
        members.readings.retain(|known| known.strong_count() > 0);
        members.readings.push(Arc::downgrade(&reading));
        reading
    }

    /// `store` is in use: whatever was read of it before, but for `own`, is not what is there from
    /// now on.
    pub(super) fn uses(&self, store: &DeviceRef, own: &Arc<Reading>) {
        let members = self.members();
        let others = members.readings.iter().filter_map(Weak::upgrade).filter(|one| !Arc::ptr_eq(one, own));
        for reading in others.filter(|one| args::is_same(&one.store, store)) {
            reading.is_stale.store(true, Ordering::Relaxed);
        }
    }

    /// The stores of all tables with a snapshot, live or not: what lanes of the origin may open.
    pub(super) fn stores(&self) -> Vec<DeviceRef> {
        let seats = self.seats();
        let held = seats.iter().filter(|seat| !seat.is_spent() && !seat.is_orphan());
        held.map(|seat| seat.line.store.clone()).collect()
    }

    /// Another table with a snapshot.
    pub(super) fn join(&self, seat: &Arc<Seat>) {
        let mut members = self.members();
        members.seats.retain(|known| known.strong_count() > 0);
        members.seats.push(Arc::downgrade(seat));
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
    pub(super) fn add_node(&self, notify: &Arc<dyn Notify>) {
        let mut members = self.members();
        members.nodes.retain(|known| known.strong_count() > 0);
        members.nodes.push(Arc::downgrade(notify));
    }

    /// The devices with such a table, but for `except`.
    pub(super) fn nodes(&self, except: Option<DeviceId>) -> Vec<Arc<MappedDevice>> {
        let nodes: Vec<_> = self.members().nodes.iter().filter_map(Weak::upgrade).collect();
        let mut found: Vec<Arc<MappedDevice>> = Vec::new();
        for device in nodes.iter().filter_map(|notify| notify.mapped()) {
            if Some(device.id()) != except && !found.iter().any(|known| known.id() == device.id()) {
                found.push(device);
            }
        }
        found
    }
}
