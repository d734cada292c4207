//! The binding of a table to a snapshot.
//!
//! A binding is *loaded* when the contents of the store are read, *active* from its first resume
//! on, and *released* when another table has taken the snapshot over. It is also released if the
//! source of its handover disappears first.
//!
//! A store has one owner: the table whose snapshot is active. No other table writes the store or
//! relies on its contents. A second table with the same origin and store is a *destination*. At its
//! resume it takes the snapshot over from the first table, its *source*, with all state in memory.
//! The source must be quiesced then: it is the previous table of the same device, or a table of
//! another device that is suspended. If two tables are loaded for one handover, the first is the
//! source of the second.
//!
//! A table that is loaded while the store has no owner reads the store. If another table has used
//! the store since, the data read is stale and the table is refused ([`LoadedStoreValidity`]). If
//! two such tables become live in one change, one of them is refused.

use super::args::{self, SnapshotFeatures, SnapshotTableArgs};
use super::load;
use super::origin_snapshots::{LoadedStoreValidity, OriginSnapshots};
use super::state::Snapshot;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use udm_core::errno::{EBUSY, EINVAL};
use udm_core::{
    ClaimSharingPolicy, DevNo, Device, DeviceId, ExtentKind, Extents, Sector, Sectors, SharedClaimKey,
};
use udm_dm::target::{DeviceRange, ResolvedDevice, TargetArgs, TargetHostServices};
use udm_dm::{MappedDevice, SnapshotReport, SnapshotState, TargetError};

/// The state of a binding.
#[derive(Clone)]
pub(super) enum SnapshotHandoverState {
    /// Not resumed yet.
    Loaded,
    /// Not resumed yet; at its resume it takes the snapshot over from its source.
    Destination,
    /// The owner of the snapshot.
    Active,
    /// The snapshot was taken over, or disappeared before a handover.
    Released,
}

/// The purpose of a table with a snapshot.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SnapshotTableRole {
    /// Keeps the content of an instant.
    Keep,
    /// Merges the store back into the origin.
    Merge,
}

/// A table's binding to its snapshot.
pub(super) struct SnapshotTableBinding {
    pub line: SnapshotTableArgs,
    pub len: Sectors,
    pub origin_snapshots: Arc<OriginSnapshots>,
    pub snapshot: Arc<Snapshot>,
    table_role: SnapshotTableRole,
    /// The ticket of reading the store; `None` for a destination.
    read_ticket: Option<Arc<LoadedStoreValidity>>,
    /// The last `preresume` allowed the table to become live.
    was_checked: AtomicBool,
    role: Mutex<SnapshotHandoverState>,
    /// True if the role is `Released`; read by lanes.
    pub released: Arc<AtomicBool>,
    notify: Mutex<Option<Arc<dyn TargetHostServices>>>,
}

impl SnapshotTableBinding {
    /// Creates the binding for the table line in `args`.
    ///
    /// # Errors
    /// The kernel's, in its order. If the kernel hides the reason behind a general text, the reason
    /// follows.
    pub(super) fn take(
        table_role: SnapshotTableRole,
        args: &mut TargetArgs<'_>,
    ) -> Result<Arc<SnapshotTableBinding>, TargetError> {
        let line = args::parse_snapshot_table_args(args)?;
        if table_role == SnapshotTableRole::Merge && !line.persistent {
            return Err(TargetError::new("Snapshot exception store does not support snapshot-merge.").at(2));
        }
        let origin_snapshots = OriginSnapshots::of(&line.origin);
        args::check_origin_store_not_stacked(&line, args.len, &origin_snapshots.origin_devices(None))?;
        let read_ticket = origin_snapshots.read(&line.store);
        let others = origin_snapshots.on_store(&line.store);
        let source = others.iter().find(|other| matches!(*other.role(), SnapshotHandoverState::Active));
        // A destination in the device of its source is replaced, as any inactive table.
        let waits =
            |other: &&Arc<SnapshotTableBinding>| matches!(*other.role(), SnapshotHandoverState::Destination);
        let id = |binding: &Arc<SnapshotTableBinding>| binding.device().map(|device| device.id());
        // A destination without a device may belong to the same device; this is checked at the
        // resume.
        let elsewhere =
            |other: &Arc<SnapshotTableBinding>| id(other).is_some() && source.map(id) != Some(id(other));
        let third = others.iter().filter(waits).any(elsewhere);
        let (snapshot, role) = match source {
            // Tables that are loaded and were never resumed have no state that is not in the store.
            None => (load_or_format_store(&line, &origin_snapshots, args)?, SnapshotHandoverState::Loaded),
            Some(_) if third => return Err(snapshot_handover_error().at(1)),
            Some(source) => (
                source.snapshot_for_handover(&line, args.len, table_role)?,
                SnapshotHandoverState::Destination,
            ),
        };
        let merges = |other: &Arc<SnapshotTableBinding>| {
            other.table_role == SnapshotTableRole::Merge && !other.is_released()
        };
        let others = origin_snapshots.bindings();
        if table_role == SnapshotTableRole::Merge
            && others.iter().any(|one| merges(one) && !one.is_on(&line.store))
        {
            return Err(TargetError::new("A snapshot is already merging."));
        }
        let binding = Arc::new(SnapshotTableBinding {
            line,
            len: args.len,
            origin_snapshots,
            snapshot,
            table_role,
            read_ticket: matches!(role, SnapshotHandoverState::Loaded).then_some(read_ticket),
            was_checked: AtomicBool::new(false),
            role: Mutex::new(role),
            released: Arc::default(),
            notify: Mutex::default(),
        });
        binding.origin_snapshots.join(&binding);
        Ok(binding)
    }

    /// The snapshot for a destination with this line.
    fn snapshot_for_handover(
        &self,
        line: &SnapshotTableArgs,
        len: Sectors,
        table_role: SnapshotTableRole,
    ) -> Result<Arc<Snapshot>, TargetError> {
        let refuse = |reason: &str| {
            Err(TargetError::new("Couldn't create exception store").because(reason.to_owned()).at(2))
        };
        let most = self.snapshot.map.capacity() * u64::from(self.snapshot.chunk.sectors());
        if len.0 > most {
            let why = format!(
                "the snapshot that it takes over can have {most} sectors at the most: remove that one, and load \
                 this table again"
            );
            return refuse(&why);
        }
        match (self.snapshot.commits.is_some() == line.persistent, self.table_role, table_role) {
            (false, ..) => refuse("the snapshot that it takes over has a store of the other type"),
            (_, SnapshotTableRole::Merge, SnapshotTableRole::Keep) => refuse("it is being merged"),
            _ => Ok(Arc::clone(&self.snapshot)),
        }
    }

    /// True if `store` is the binding's store.
    pub(super) fn is_on(&self, store: &ResolvedDevice) -> bool {
        args::is_same_disk(&self.line.store, store)
    }

    fn role(&self) -> MutexGuard<'_, SnapshotHandoverState> {
        self.role.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that a table loaded while its store had no owner can become the owner.
    fn check_store(&self) -> Result<(), TargetError> {
        let mut others = self.origin_snapshots.on_store(&self.line.store);
        others.retain(|other| !std::ptr::eq(&**other, self));
        if others.iter().any(|other| matches!(*other.role(), SnapshotHandoverState::Active)) {
            return Err(snapshot_handover_error());
        }
        // A table of the same change, or of another change in progress.
        let comes = |other: &Arc<SnapshotTableBinding>| {
            other.was_checked.load(Ordering::Relaxed)
                && other.device().is_some_and(|device| device.is_changing())
        };
        if others.iter().any(comes) {
            return Err(snapshot_handover_error()
                .because("another table with this store becomes live at the same time"));
        }
        if self.read_ticket.as_ref().is_some_and(|read_ticket| read_ticket.is_stale()) {
            let why = "another table has used the store since this table was loaded: load it again";
            return Err(snapshot_handover_error().because(why));
        }
        Ok(())
    }

    /// The source of a destination.
    fn source(&self) -> Option<Arc<SnapshotTableBinding>> {
        let has_it = |other: &Arc<SnapshotTableBinding>| {
            Arc::ptr_eq(&other.snapshot, &self.snapshot)
                && matches!(*other.role(), SnapshotHandoverState::Active)
        };
        self.origin_snapshots.bindings().into_iter().find(has_it)
    }

    /// True if the device was dropped without a call of `removed`.
    pub(super) fn is_orphan(&self) -> bool {
        self.notify().is_some_and(|notify| notify.mapped().is_none())
    }

    /// True if the snapshot no longer belongs to this table.
    pub(super) fn is_released(&self) -> bool {
        matches!(*self.role(), SnapshotHandoverState::Released)
    }

    fn release(&self) {
        *self.role() = SnapshotHandoverState::Released;
        self.released.store(true, Ordering::Relaxed);
    }

    fn is_destination_of(&self, source: &SnapshotTableBinding) -> bool {
        matches!(*self.role(), SnapshotHandoverState::Destination)
            && Arc::ptr_eq(&self.snapshot, &source.snapshot)
    }

    fn notify(&self) -> Option<Arc<dyn TargetHostServices>> {
        self.notify.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// True if this table is the active snapshot and not a merge.
    pub(super) fn is_active_snapshot(&self) -> bool {
        self.table_role == SnapshotTableRole::Keep && matches!(*self.role(), SnapshotHandoverState::Active)
    }

    /// The name of the device.
    pub(super) fn name(&self) -> Option<String> {
        Some(self.notify()?.device())
    }

    /// The device of this table.
    fn device(&self) -> Option<Arc<MappedDevice>> {
        self.notify()?.mapped()
    }

    /// The text of `table` after the type.
    pub(super) fn table(&self) -> String {
        let SnapshotTableArgs { origin, store, features, .. } = &self.line;
        let kind = self.line.kind();
        // A destination has no chunk size before the handover (kernel).
        let chunk = match *self.role() {
            SnapshotHandoverState::Destination => 0,
            _ => self.snapshot.chunk.sectors(),
        };
        let words = match features {
            SnapshotFeatures { discard_passdown_origin: true, .. } => {
                " 2 discard_zeroes_cow discard_passdown_origin"
            }
            SnapshotFeatures { discard_zeroes_cow: true, .. } => " 1 discard_zeroes_cow",
            _ => "",
        };
        format!("{} {} {kind} {chunk}{words}", origin.number, store.number)
    }

    /// The report for the control side, with `usage` in sectors.
    pub(super) fn report(&self, state: SnapshotState, usage: (u64, u64, u64)) -> SnapshotReport {
        let (used, total, metadata) = usage;
        SnapshotReport {
            origin: self.line.origin.clone(),
            store: self.line.store.clone(),
            kind: self.line.kind(),
            chunk: Sectors(u64::from(self.snapshot.chunk.sectors())),
            used: Sectors(used),
            total: Sectors(total),
            growth: self.snapshot.growth.wanted(),
            metadata: Sectors(metadata),
            state: if self.is_lost() { SnapshotState::Invalid } else { state },
        }
    }

    /// True if the snapshot can no longer be read.
    pub(super) fn is_lost(&self) -> bool {
        self.is_released() || !self.snapshot.is_valid()
    }

    /// The devices below.
    pub(super) fn devices(&self) -> Vec<DeviceRange> {
        let alone = Some(ClaimSharingPolicy::With(SharedClaimKey::of(&self.origin_snapshots)));
        let size = self.line.store.device.limits().size;
        let store = DeviceRange { alone, ..DeviceRange::new(&self.line.store, Sector(0), size) };
        vec![DeviceRange::new(&self.line.origin, Sector(0), self.len), store]
    }

    /// The extents of the sectors from `from` on: chunks in the store are data, the others are as
    /// in the origin.
    pub(super) fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let (snapshot, origin) = (&self.snapshot, &self.line.origin.device);
        let (mut at, end) = (from.0, from.0 + len.0);
        while at < end && !out.is_full() {
            let kept = snapshot.map.next_in_store(snapshot.chunk_of(at), snapshot.chunk_of(end - 1) + 1);
            let kept = kept.map_or(u64::MAX, |(chunk, _)| snapshot.start_of(chunk)).clamp(at, end);
            if kept > at {
                origin.extents(Sector(at), Sectors(kept - at), out);
            }
            at = snapshot.start_of(snapshot.chunk_of(kept) + 1).min(end);
            out.push(Sectors(at - kept), ExtentKind::Data);
        }
    }

    pub(super) fn attach(&self, notify: Arc<dyn TargetHostServices>) {
        *self.notify.lock().unwrap_or_else(PoisonError::into_inner) = Some(notify);
    }

    /// The other devices with lanes of the origin.
    pub(super) fn partners(&self) -> Vec<Arc<MappedDevice>> {
        let own = self.device().map(|device| device.id());
        self.origin_snapshots.origin_devices(own)
    }

    /// The last check before the table becomes live in `device`.
    pub(super) fn preresume(&self, device: DeviceId) -> Result<(), TargetError> {
        let role = self.role().clone();
        let elsewhere =
            |binding: &SnapshotTableBinding| binding.device().filter(|holder| holder.id() != device);
        match role {
            SnapshotHandoverState::Destination => {
                let holder = self.source().and_then(|source| elsewhere(&source));
                if holder.is_some_and(|holder| !holder.is_suspended()) {
                    let text = "Unable to perform snapshot handover until source is suspended.";
                    return Err(TargetError::new(text).with_errno(EINVAL));
                }
            }
            SnapshotHandoverState::Active => {
                let others = self.origin_snapshots.bindings();
                if others.iter().any(|other| other.is_destination_of(self) && elsewhere(other).is_some()) {
                    let text = "Unable to resume snapshot source until handover completes.";
                    return Err(TargetError::new(text).with_errno(EINVAL));
                }
            }
            SnapshotHandoverState::Loaded => {
                let _one_at_a_time = self.origin_snapshots.preresume_lock();
                self.check_store()?;
                self.was_checked.store(true, Ordering::Relaxed);
                if self.table_role == SnapshotTableRole::Keep {
                    self.origin_snapshots.list(&self.snapshot);
                }
            }
            SnapshotHandoverState::Released => {}
        }
        Ok(())
    }

    /// The table becomes live, while all its devices are quiesced.
    pub(super) fn resume(&self) {
        let role = self.role().clone();
        match role {
            SnapshotHandoverState::Destination => match self.source() {
                Some(source) => source.release(),
                None => {
                    tracing::error!("Cancelling snapshot handover.");
                    return self.release();
                }
            },
            SnapshotHandoverState::Loaded | SnapshotHandoverState::Active => {}
            SnapshotHandoverState::Released => return,
        }
        *self.role() = SnapshotHandoverState::Active;
        if let Some(read_ticket) = &self.read_ticket {
            self.origin_snapshots.invalidate_reads(&self.line.store, read_ticket);
        }
        if let Some(notify) = self.notify() {
            self.snapshot.attach(notify);
        }
        self.snapshot.set_len(self.len, self.line.origin.device.limits().size);
        self.snapshot.set_active(self.table_role == SnapshotTableRole::Keep);
        match self.table_role {
            SnapshotTableRole::Keep => self.origin_snapshots.list(&self.snapshot),
            SnapshotTableRole::Merge => self.origin_snapshots.unlist(&self.snapshot),
        }
    }

    /// The table is no longer live, while all its devices are quiesced.
    pub(super) fn retired(&self) {
        // If the next table of the device takes the snapshot over, it continues there.
        let own = self.device().map(|device| device.id());
        let is_own =
            |other: &SnapshotTableBinding| own.is_some() && other.device().map(|device| device.id()) == own;
        let taken = self
            .origin_snapshots
            .bindings()
            .iter()
            .any(|other| other.is_destination_of(self) && is_own(other));
        if !taken {
            self.removed();
        }
    }

    /// As [`SnapshotTableBinding::retired`], if no table of the device takes the snapshot over.
    pub(super) fn removed(&self) {
        if matches!(*self.role(), SnapshotHandoverState::Active) {
            self.snapshot.set_active(false);
            self.origin_snapshots.unlist(&self.snapshot);
            self.release();
        }
    }
}

impl Drop for SnapshotTableBinding {
    fn drop(&mut self) {
        // The snapshot was listed for a resume that did not happen.
        if matches!(
            self.role.get_mut().unwrap_or_else(PoisonError::into_inner),
            SnapshotHandoverState::Loaded
        ) {
            self.origin_snapshots.unlist(&self.snapshot);
        }
    }
}

fn snapshot_handover_error() -> TargetError {
    TargetError::new("Snapshot cow pairing for exception table handover failed").with_errno(EINVAL)
}

/// Opens the store with exclusive use: reads it, or formats it if it is blank.
fn load_or_format_store(
    line: &SnapshotTableArgs,
    origin_snapshots: &Arc<OriginSnapshots>,
    args: &TargetArgs<'_>,
) -> Result<Arc<Snapshot>, TargetError> {
    let alone = ClaimSharingPolicy::With(SharedClaimKey::of(origin_snapshots));
    let number = DevNo { major: 0, minor: 0 };
    let store = &*line.store.device;
    let claim = store
        .shared_disk_state()
        .map(|shared_disk_state| shared_disk_state.claim(DeviceId::new(), number, &alone, store));
    let _claim = claim.transpose().map_err(|taken| {
        let reason = format!("{taken} uses {} exclusively", line.store.name);
        TargetError::new("Cannot get COW device").with_errno(EBUSY).because(reason).at(1)
    })?;
    let mark = args.resolver.mark(&line.store).filter(|_| line.persistent);
    let (chunk, loaded) = load::load_store(line, args.len, args.io, mark.as_deref())?;
    Ok(Snapshot::new(&line.origin, line.store.clone(), chunk, loaded, mark))
}
