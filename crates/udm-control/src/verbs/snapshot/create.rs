//! Creating snapshots, several at one instant.

use super::image::{make_read_only, make_writable};
use super::origin::OriginDevice;
use super::store::{NewSnapshotStore, StoreSpec};
use super::verb_error_with_errno;
use crate::api;
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceCreationGuard, DeviceRegistry, RegisteredDevice};
use crate::verbs::begin_transition::{LoadedTable, begin_removal_transition, begin_resume_if_still_loaded};
use crate::verbs::cancel::{CancelToken, CancellableVerbKind};
use crate::verbs::change::{export_device, run_change_with_device_locks};
use crate::verbs::{block_on_verb, tables};
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use udm_core::Device;
use udm_core::errno::EINVAL;
use udm_dm::Table;

/// Maximum number of loads that run concurrently.
const LOADS_MAX: usize = 8;

/// Creates the snapshots of `wanted` at one instant, all or none. Linear devices become origins in
/// the same change. A store file that does not exist is created. Relative paths are based on
/// `folder`. May block when it opens devices.
///
/// # Errors
/// An error with the device's name if a name is in use, if a device can't be an origin, or if a
/// store can't be used; the error of the cancel token.
pub fn create_snapshots(
    registry: &Arc<DeviceRegistry>,
    wanted: &api::CreateSnapshotsRequest,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<Vec<api::SnapshotDescription>, VerbError> {
    let all = &wanted.snapshots;
    let first =
        all.first().ok_or_else(|| verb_error_with_errno("snapshot", EINVAL, "no snapshot is named"))?;
    let store = StoreSpec {
        store: wanted.store.as_deref(),
        size_bytes: wanted.size_bytes,
        grow_bytes: wanted.grow_bytes,
        chunk_bytes: wanted.chunk_bytes,
        transient: wanted.transient.unwrap_or(false),
        overflow: wanted.overflow.unwrap_or(false),
        several: all.len() > 1,
        folder,
    };
    let mut devices: Vec<(&str, Arc<RegisteredDevice>)> = Vec::new();
    // For each snapshot, the index of its origin in `devices`: names may change from here on.
    let mut places = Vec::new();
    for one in all {
        let mapped = registry.find(&one.of)?;
        let known = devices.iter().position(|(_, known)| Arc::ptr_eq(known, &mapped));
        places.push(known.unwrap_or(devices.len()));
        if known.is_none() {
            devices.push((&one.of, mapped));
        }
    }
    let mut disks = HashSet::new();
    for (name, mapped) in &devices {
        disks.insert(OriginDevice::of(name, Arc::clone(mapped))?.disk.number);
    }
    let _alone = registry.lock_snapshots(first.name.as_str(), disks)?;

    let mut set =
        SnapshotCreationGuard { registry, origins: Vec::new(), made: Vec::new(), clones: Vec::new() };
    for (name, mapped) in &devices {
        if !registry.is_active(mapped) {
            return Err(VerbError::missing(*name));
        }
        // Read again under the lock.
        let origin = OriginDevice::of(name, Arc::clone(mapped))?;
        if origin.is_clone && make_read_only(registry, name, mapped)? {
            set.clones.push(Arc::clone(mapped));
        }
        set.origins.push((origin, None));
    }
    let mut tables = Vec::new();
    for (one, place) in all.iter().zip(places) {
        // A name that is in use is reported before a store is created.
        let made = registry.begin_create(&one.name, None, None).map_err(|e| VerbError::new(&one.name, e))?;
        let store = store.store(registry, &one.name, &set.origins[place].0, cancel_token)?;
        let origin = &set.origins[place].0;
        let table = format!("0 {} snapshot {} {}", origin.len.0, origin.disk.number, store.words);
        made.mapped.allowed_clients.follow(&origin.mapped.allowed_clients);
        let linear = origin.is_linear || origin.mapped.snapshot_info().was_linear;
        made.mapped.snapshot_info().origin_was_linear = linear;
        set.made.push((made, store));
        tables.push(table);
    }
    set.load(&tables, folder, cancel_token)?;
    set.convert(&devices, folder, cancel_token)?;
    set.fill_snapshot_infos();
    set.cut(cancel_token)?;
    let made = set.keep();
    all.iter()
        .zip(made)
        .map(|(one, made)| super::list::describe_snapshot_device(registry, &one.name, &made))
        .collect()
}

/// Snapshots that are being created. Unless they are kept, dropping this undoes everything.
struct SnapshotCreationGuard<'a> {
    registry: &'a Arc<DeviceRegistry>,
    /// The origins, with the origin table loaded into linear ones.
    origins: Vec<(OriginDevice, Option<Arc<Table>>)>,
    made: Vec<(DeviceCreationGuard<'a>, NewSnapshotStore)>,
    /// The clones that clients could write until now.
    clones: Vec<Arc<RegisteredDevice>>,
}

impl SnapshotCreationGuard<'_> {
    /// Loads the tables of the snapshots. Tables with a newly created store are independent of each
    /// other and are loaded concurrently, because each load waits for a disk.
    fn load(&self, tables: &[String], folder: &BaseDir, cancel_token: &CancelToken) -> Result<(), VerbError> {
        let all: Vec<(&DeviceCreationGuard<'_>, &NewSnapshotStore, &str)> = self
            .made
            .iter()
            .zip(tables)
            .map(|((made, store), table)| (made, store, table.as_str()))
            .collect();
        let load = |(made, _, table): &(&DeviceCreationGuard<'_>, &NewSnapshotStore, &str)| {
            let name = made.mapped.device.name();
            let loaded = tables::load_into(self.registry, &made.mapped, &name, table, folder, cancel_token);
            loaded.map(drop).map_err(|e| e.at(None))
        };
        let (fresh, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|(_, store, _)| store.is_made());
        others.iter().try_for_each(load)?;
        let (next, failed) = (AtomicUsize::new(0), OnceLock::new());
        let work = || {
            // Relaxed: each index is taken once, and no other data is published with it.
            while let Some(one) = fresh.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(error) = load(one) {
                    let _ = failed.set(error);
                }
                if failed.get().is_some() {
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..LOADS_MAX.min(fresh.len()) {
                // If no thread can be started, the loads only take longer.
                let _ = std::thread::Builder::new().name("udm-load".into()).spawn_scoped(scope, work);
            }
            work();
        });
        failed.into_inner().map_or(Ok(()), Err)
    }

    /// Loads origin tables into the devices that are still linear.
    fn convert(
        &mut self,
        names: &[(&str, Arc<RegisteredDevice>)],
        folder: &BaseDir,
        cancel_token: &CancelToken,
    ) -> Result<(), VerbError> {
        for ((origin, loaded), (name, _)) in self.origins.iter_mut().zip(names) {
            if origin.is_linear {
                origin.is_ours_to_change(name)?;
                let table = origin.with_snapshots();
                let table =
                    tables::load_into(self.registry, &origin.mapped, name, &table, folder, cancel_token);
                *loaded = Some(table.map_err(|e| e.at(None))?);
            }
        }
        Ok(())
    }

    /// Sets what the records will need to know of the snapshots.
    fn fill_snapshot_infos(&self) {
        for (made, store) in &self.made {
            let mut info = made.mapped.snapshot_info();
            (info.by_name, info.store) = (true, store.file().cloned());
        }
    }

    /// Makes all tables live at one instant.
    fn cut(&mut self, cancel_token: &CancelToken) -> Result<(), VerbError> {
        let origins =
            self.origins.iter().filter_map(|(origin, loaded)| Some((&origin.mapped, loaded.as_ref()?)));
        let made = self.made.iter().map(|(made, _)| &made.mapped);
        let all = made.chain(origins.clone().map(|(mapped, _)| mapped));
        let several: Vec<_> = all.map(|mapped| (mapped.device.name(), Arc::clone(mapped))).collect();
        // If another verb replaced an origin's table, writes would not be copied: the change then
        // fails.
        let places = self.made.len()..;
        let ours = places.zip(origins).map(|(place, (mapped, table))| LoadedTable { place, mapped, table });
        let ours: Vec<_> = ours.collect();
        block_on_verb(run_change_with_device_locks(
            self.registry,
            &several,
            CancellableVerbKind::Resume,
            cancel_token,
            |devices, turns, wake| {
                let _linked = self.registry.linking();
                begin_resume_if_still_loaded(&ours, devices, turns, wake)
            },
        ))?;
        let exported = self.made.iter().try_for_each(|(made, _)| export_device(self.registry, &made.mapped));
        exported.inspect_err(|_| self.take_back())
    }

    /// Removes the snapshots again. Their origins then behave like linear devices.
    fn take_back(&self) {
        let made: Vec<_> =
            self.made.iter().map(|(made, _)| (made.mapped.device.name(), Arc::clone(&made.mapped))).collect();
        let exporter = self.registry.exporter();
        for (_, mapped) in &made {
            exporter.inspect(|exporter| exporter.remove(mapped.device.id()));
        }
        let cancel_token = CancelToken::default();
        let _ = block_on_verb(run_change_with_device_locks(
            self.registry,
            &made,
            CancellableVerbKind::Remove,
            &cancel_token,
            begin_removal_transition,
        ));
        for (_, mapped) in &made {
            exporter.inspect(|exporter| exporter.forget(mapped.device.id()));
        }
    }

    /// Completes the creation; from now on other verbs can use the snapshots.
    fn keep(&mut self) -> Vec<Arc<RegisteredDevice>> {
        let kept = self.made.iter().map(|(made, _)| Arc::clone(&made.mapped)).collect();
        for (origin, loaded) in &mut self.origins {
            origin.mapped.snapshot_info().was_linear |= loaded.take().is_some();
        }
        self.clones.clear();
        for (made, store) in self.made.drain(..) {
            made.mapped.snapshot_info().made = Some(Instant::now());
            store.keep();
            made.complete();
        }
        kept
    }
}

impl Drop for SnapshotCreationGuard<'_> {
    fn drop(&mut self) {
        for (origin, loaded) in &self.origins {
            loaded.as_ref().inspect(|loaded| origin.mapped.device.clear_own(loaded));
        }
        self.clones.iter().for_each(|clone| make_writable(self.registry, clone));
    }
}
