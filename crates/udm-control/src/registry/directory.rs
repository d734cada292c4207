//! The directory of mapped devices: names, UUIDs, numbers and the stage of each device.
//!
//! Contract: an entry belongs to the creator ([`DeviceCreationGuard`]) until the device is
//! complete, and later to the remover ([`DeviceRemovalGuard`]). During both, the name, UUID and
//! number are taken, but look-ups fail, the device is not listed, and no table can use it. A table
//! is counted as a user of a device ([`DeviceUseGuard`]) under the lock under which a removal
//! begins, so one of the two is refused. All look-ups use an index.

mod rename;

pub use rename::NewName;
use rename::check_not_number;

use super::deferred_removals::DeferredRemovalNotifier;
use super::event_stream::EventStream;
use super::event_waiters::EventWaiters;
use super::{DeviceRegistry, MAPPED_MAJOR, RequestQueueParams};
use crate::error::VerbError;
use crate::verbs::{PendingVerbs, SnapshotCreationInfo};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;
use udm_core::errno::{EBUSY, EINVAL, ENXIO};
use udm_core::{DevNo, Nanos};
use udm_dm::{DeviceEventDetails, EventKind, MappedDevice, TargetError};
use udm_frontends::nbd::{AllowedClients, ExportDescription};

/// Maximum number of mapped devices (the kernel's minors have 20 bits).
const MAPPED_MAX: u32 = 1 << 20;

/// The clock of the control side: nanoseconds since its first use.
fn control_clock() -> Nanos {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    Nanos(ORIGIN.get_or_init(Instant::now).elapsed().as_nanos() as u64)
}

/// A mapped device in the registry.
pub struct RegisteredDevice {
    /// The device.
    pub device: Arc<MappedDevice>,
    /// Lock of a suspend, resume, table change or removal. Waiters get it in the order of arrival.
    pub(crate) changing: Arc<tokio::sync::Mutex<()>>,
    /// The verbs that hold or wait for the lock.
    pub(crate) pending: PendingVerbs,
    /// The waiters for its events.
    pub(crate) waiters: Arc<EventWaiters>,
    /// Number of tables that use the device.
    use_count: AtomicUsize,
    snapshot_info: Mutex<SnapshotCreationInfo>,
    /// Parameters of its own queue.
    requests: OnceLock<RequestQueueParams>,
    /// If true, clients may not write. Set before the device is exported.
    pub(crate) read_only: AtomicBool,
    /// The NBD clients that may use it.
    pub(crate) allowed_clients: Arc<AllowedClients>,
    /// What NBD clients can show about it.
    pub(crate) description: Arc<ExportDescription>,
    /// The devices that name the same group share their limits. Changed under
    /// [`DeviceRegistry::throttling`].
    pub(crate) throttle_group: Mutex<Option<Arc<str>>>,
    pub(crate) is_deferred: AtomicBool,
    /// Wake-up of the task that runs deferred removals.
    pub(super) deferred: Arc<DeferredRemovalNotifier>,
}

impl RegisteredDevice {
    /// Number of tables that use the device, in either slot of other devices or still being built.
    pub(crate) fn use_count(&self) -> usize {
        self.use_count.load(Ordering::SeqCst)
    }

    /// Parameters of the device's own queue, as its creator gave them.
    pub(crate) fn requests(&self) -> RequestQueueParams {
        self.requests.get().copied().unwrap_or_default()
    }

    /// Sets the parameters of the device's own queue. Only the first call has an effect.
    pub(crate) fn set_requests(&self, requests: RequestQueueParams) {
        let _ = self.requests.set(requests);
    }

    /// Sends an event of the device to the event stream.
    pub(crate) fn publish(&self, kind: EventKind, line: &str) {
        self.device.emit_event(&|| DeviceEventDetails::new(kind, line));
    }

    /// Facts for the snapshot verbs. Locked only briefly.
    pub(crate) fn snapshot_info(&self) -> MutexGuard<'_, SnapshotCreationInfo> {
        self.snapshot_info.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lifecycle stage of a directory entry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DeviceLifecycleStage {
    Creating,
    Active,
    Removing,
}

struct DeviceDirectoryEntry {
    mapped: Arc<RegisteredDevice>,
    stage: DeviceLifecycleStage,
}

/// The directory entries and their indexes.
#[derive(Default)]
pub(super) struct DeviceDirectory {
    by_minor: BTreeMap<u32, DeviceDirectoryEntry>,
    names: HashMap<String, u32>,
    uuids: HashMap<String, u32>,
    /// Free numbers below `next`.
    free: BTreeSet<u32>,
    next: u32,
    deferred: Arc<DeferredRemovalNotifier>,
    event_stream: Arc<EventStream>,
}

impl DeviceDirectory {
    /// An empty directory.
    pub fn new(deferred: &Arc<DeferredRemovalNotifier>, event_stream: &Arc<EventStream>) -> DeviceDirectory {
        DeviceDirectory {
            deferred: Arc::clone(deferred),
            event_stream: Arc::clone(event_stream),
            ..DeviceDirectory::default()
        }
    }
}

/// Reason why a look-up fails.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LookupFailure {
    /// There is no such device.
    Unknown,
    /// The device is being created.
    Creating,
    /// The device is being removed.
    Removing,
}

impl LookupFailure {
    /// Text for an error message; `None` for an unknown device.
    pub fn reason(self) -> Option<&'static str> {
        match self {
            LookupFailure::Unknown => None,
            LookupFailure::Creating => Some("it is still being created: try again when that is done"),
            LookupFailure::Removing => Some("it is being removed"),
        }
    }
}

impl DeviceDirectory {
    /// The device with a number.
    pub fn numbered(&self, minor: u32) -> Result<&Arc<RegisteredDevice>, LookupFailure> {
        let listing = self.by_minor.get(&minor).ok_or(LookupFailure::Unknown)?;
        match listing.stage {
            DeviceLifecycleStage::Active => Ok(&listing.mapped),
            DeviceLifecycleStage::Creating => Err(LookupFailure::Creating),
            DeviceLifecycleStage::Removing => Err(LookupFailure::Removing),
        }
    }

    /// The device with a name.
    pub fn named(&self, name: &str) -> Result<&Arc<RegisteredDevice>, LookupFailure> {
        self.numbered(*self.names.get(name).ok_or(LookupFailure::Unknown)?)
    }

    /// The device with the number, name or UUID `word`. Names and UUIDs can't look like numbers.
    fn resolve(&self, word: &str) -> Result<&Arc<RegisteredDevice>, LookupFailure> {
        if let Ok(number) = word.parse::<DevNo>() {
            return if number.major == MAPPED_MAJOR {
                self.numbered(number.minor)
            } else {
                Err(LookupFailure::Unknown)
            };
        }
        let minor = self.names.get(word).or_else(|| self.uuids.get(word));
        self.numbered(*minor.ok_or(LookupFailure::Unknown)?)
    }

    /// All complete devices, by number.
    pub fn all(&self) -> impl Iterator<Item = &Arc<RegisteredDevice>> {
        self.by_minor
            .values()
            .filter(|listing| listing.stage == DeviceLifecycleStage::Active)
            .map(|listing| &listing.mapped)
    }

    /// Adds a device with the given minor number, or with the lowest free one.
    fn reserve(
        &mut self,
        name: &str,
        uuid: Option<&str>,
        minor: Option<u32>,
    ) -> Result<Arc<RegisteredDevice>, TargetError> {
        let busy = |why: &str| Err(TargetError::errno(EBUSY).because(why));
        if self.names.contains_key(name) {
            return busy("a device of that name exists");
        }
        if uuid.is_some_and(|uuid| self.uuids.contains_key(uuid)) {
            return busy("a device with that uuid exists");
        }
        for (what, word) in [("name", Some(name)), ("uuid", uuid)] {
            word.map_or(Ok(()), |word| check_not_number(what, word))?;
        }
        if minor.is_some_and(|minor| self.by_minor.contains_key(&minor)) {
            // ENXIO, as in the kernel.
            return Err(TargetError::errno(ENXIO).because("a device with that number exists"));
        }
        let is_wanted = minor.is_some();
        let minor = minor.or(self.free.first().copied()).unwrap_or(self.next);
        if minor >= MAPPED_MAX {
            let (errno, why) = match is_wanted {
                true => (EINVAL, "the minor number is above the maximum"),
                false => (EBUSY, "no device number is free"),
            };
            return Err(TargetError::errno(errno).because(why));
        }
        let device = MappedDevice::new(name, uuid, DevNo { major: MAPPED_MAJOR, minor })?;
        let waiters = Arc::new(EventWaiters::default());
        let waiters_of_device = Arc::clone(&waiters);
        device.on_event(Arc::new(move || waiters_of_device.wake()));
        let event_stream = Arc::clone(&self.event_stream);
        device.set_event_sink(Arc::new(move |event| event_stream.publish(event)));
        let mapped = Arc::new(RegisteredDevice {
            device,
            waiters,
            changing: Arc::default(),
            pending: PendingVerbs::default(),
            use_count: AtomicUsize::new(0),
            snapshot_info: Mutex::default(),
            requests: OnceLock::new(),
            read_only: AtomicBool::new(false),
            allowed_clients: Arc::default(),
            description: Arc::default(),
            throttle_group: Mutex::default(),
            is_deferred: AtomicBool::new(false),
            deferred: Arc::clone(&self.deferred),
        });
        if !self.free.remove(&minor) {
            self.free.extend(self.next..minor);
            self.next = minor + 1;
        }
        self.names.insert(name.into(), minor);
        if let Some(uuid) = uuid {
            self.uuids.insert(uuid.into(), minor);
        }
        self.by_minor.insert(
            minor,
            DeviceDirectoryEntry { mapped: Arc::clone(&mapped), stage: DeviceLifecycleStage::Creating },
        );
        Ok(mapped)
    }

    /// The entry of `mapped`; another device may have its number by now.
    fn listing(&mut self, mapped: &Arc<RegisteredDevice>) -> Option<&mut DeviceDirectoryEntry> {
        let listing = self.by_minor.get_mut(&mapped.device.number().minor)?;
        Arc::ptr_eq(&listing.mapped, mapped).then_some(listing)
    }

    fn set(&mut self, mapped: &Arc<RegisteredDevice>, stage: DeviceLifecycleStage) {
        if let Some(listing) = self.listing(mapped) {
            listing.stage = stage;
        }
    }

    fn forget(&mut self, mapped: &Arc<RegisteredDevice>) {
        if self.listing(mapped).is_none() {
            return;
        }
        let minor = mapped.device.number().minor;
        self.by_minor.remove(&minor);
        self.names.remove(&mapped.device.name());
        if let Some(uuid) = mapped.device.uuid() {
            self.uuids.remove(&uuid);
        }
        self.free.insert(minor);
    }
}

/// A device that is being created. If dropped before it is complete, the device is removed.
pub(crate) struct DeviceCreationGuard<'a> {
    registry: &'a DeviceRegistry,
    pub mapped: Arc<RegisteredDevice>,
    complete: bool,
}

impl DeviceCreationGuard<'_> {
    /// Completes the creation: other verbs can use the device from now on.
    pub fn complete(mut self) {
        self.complete = true;
        let mut state = self.registry.state();
        state.directory.set(&self.mapped, DeviceLifecycleStage::Active);
        // Sent before other verbs can find and change the device.
        self.mapped.publish(EventKind::Created, "created");
    }
}

impl Drop for DeviceCreationGuard<'_> {
    fn drop(&mut self) {
        if !self.complete {
            self.registry.state().directory.forget(&self.mapped);
        }
    }
}

/// A device that is being removed. If dropped before the removal is complete, the device stays.
pub(crate) struct DeviceRemovalGuard<'a> {
    registry: &'a DeviceRegistry,
    mapped: Arc<RegisteredDevice>,
    committed: bool,
}

impl DeviceRemovalGuard<'_> {
    /// Completes the removal: the name, UUID and number are free.
    pub fn commit(mut self) {
        self.committed = true;
        let mut state = self.registry.state();
        // Sent before another device can get the name.
        self.mapped.publish(EventKind::Removed, "removed");
        state.directory.forget(&self.mapped);
    }
}

impl Drop for DeviceRemovalGuard<'_> {
    fn drop(&mut self) {
        if !self.committed {
            self.registry.state().directory.set(&self.mapped, DeviceLifecycleStage::Active);
        }
    }
}

/// Counts a table as a user of a device until dropped.
pub(super) struct DeviceUseGuard(Arc<RegisteredDevice>);

impl DeviceUseGuard {
    /// The caller holds the directory's lock since it looked the device up.
    pub fn new(mapped: &Arc<RegisteredDevice>) -> DeviceUseGuard {
        mapped.use_count.fetch_add(1, Ordering::Relaxed);
        DeviceUseGuard(Arc::clone(mapped))
    }
}

impl Drop for DeviceUseGuard {
    fn drop(&mut self) {
        self.0.use_count.fetch_sub(1, Ordering::SeqCst);
        self.0.deferred.closed();
    }
}

impl DeviceRegistry {
    /// Looks up a mapped device by `major:minor`, name or UUID.
    ///
    /// # Errors
    /// ENXIO for an unknown device, as in the kernel; EBUSY while the device is being created or
    /// removed.
    pub fn find(&self, word: &str) -> Result<Arc<RegisteredDevice>, VerbError> {
        let state = self.state();
        state.directory.resolve(word).cloned().map_err(|absent| match absent.reason() {
            None => VerbError::missing(word),
            Some(reason) => VerbError::new(word, TargetError::errno(EBUSY).because(reason)),
        })
    }

    /// All complete mapped devices, by number.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<RegisteredDevice>> {
        self.state().directory.all().cloned().collect()
    }

    /// All mapped devices, including those that are being created or removed.
    #[must_use]
    pub fn all_with_pending(&self) -> Vec<Arc<RegisteredDevice>> {
        self.state().directory.by_minor.values().map(|listing| Arc::clone(&listing.mapped)).collect()
    }

    /// The entry of `device`, in any stage.
    pub(crate) fn listed(&self, device: &Arc<MappedDevice>) -> Option<Arc<RegisteredDevice>> {
        let state = self.state();
        let listing = state.directory.by_minor.get(&device.number().minor)?;
        Arc::ptr_eq(&listing.mapped.device, device).then(|| Arc::clone(&listing.mapped))
    }

    /// Adds a device without a table. Reserves its name, UUID and number: the given one, or the
    /// lowest free one as in the kernel.
    ///
    /// # Errors
    /// EINVAL for an invalid name, UUID or number, EBUSY for a name or UUID in use, ENXIO for a
    /// number in use.
    pub(crate) fn begin_create(
        &self,
        name: &str,
        uuid: Option<&str>,
        minor: Option<u32>,
    ) -> Result<DeviceCreationGuard<'_>, TargetError> {
        if self.is_ending() {
            return Err(TargetError::errno(EBUSY).because("the server ends, or is being upgraded: try again"));
        }
        let mapped = self.state().directory.reserve(name, uuid, minor)?;
        if self.maintenance.get().is_some() {
            self.maintenance_of(name, uuid).set(&mapped.device);
            mapped.device.set_clock(control_clock);
        }
        Ok(DeviceCreationGuard { registry: self, mapped, complete: false })
    }

    /// Begins the removal of a device that no table uses, if `may` allows it. From then on no table
    /// can use the device.
    ///
    /// # Errors
    /// EBUSY while tables use it; ENXIO if another verb has removed it, or if `may` returns false.
    pub(crate) fn begin_removal(
        &self,
        mapped: &Arc<RegisteredDevice>,
        may: impl FnOnce(&RegisteredDevice) -> bool,
    ) -> Result<DeviceRemovalGuard<'_>, TargetError> {
        let _linked = self.linking();
        let mut state = self.state();
        let Some(listing) =
            state.directory.listing(mapped).filter(|listing| listing.stage == DeviceLifecycleStage::Active)
        else {
            return Err(TargetError::errno(ENXIO).because("it has been removed meanwhile"));
        };
        if !may(mapped) {
            return Err(TargetError::errno(ENXIO).because("its deferred removal was cancelled"));
        }
        let count = mapped.use_count();
        if count > 0 {
            return Err(TargetError::errno(EBUSY).because(format!("it is open {count} times")));
        }
        listing.stage = DeviceLifecycleStage::Removing;
        Ok(DeviceRemovalGuard { registry: self, mapped: Arc::clone(mapped), committed: false })
    }

    /// Cancels a deferred removal that has not begun.
    ///
    /// # Errors
    /// ENXIO if the removal has begun.
    pub(crate) fn cancel_deferred_removal(&self, mapped: &Arc<RegisteredDevice>) -> Result<(), TargetError> {
        let mut state = self.state();
        if state.directory.listing(mapped).is_none_or(|listing| listing.stage != DeviceLifecycleStage::Active)
        {
            return Err(TargetError::errno(ENXIO).because("it is being removed"));
        }
        mapped.defer(false);
        Ok(())
    }

    /// True while the device is being created. Events are not sent for it yet.
    pub(crate) fn is_being_created(&self, mapped: &Arc<RegisteredDevice>) -> bool {
        let mut state = self.state();
        state.directory.listing(mapped).is_some_and(|listing| listing.stage == DeviceLifecycleStage::Creating)
    }

    /// True while `mapped` is listed and not being removed. Under the lock
    /// [`DeviceRegistry::linking`] the answer stays valid.
    pub(crate) fn is_active(&self, mapped: &Arc<RegisteredDevice>) -> bool {
        let mut state = self.state();
        state.directory.listing(mapped).is_some_and(|listing| listing.stage != DeviceLifecycleStage::Removing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_lowest_that_are_free() {
        let mut directory = DeviceDirectory::default();
        let made: Vec<_> = ["a", "b", "c"].map(|name| directory.reserve(name, None, None).unwrap()).into();
        let minor = |mapped: &Arc<RegisteredDevice>| mapped.device.number().minor;
        assert_eq!(made.iter().map(minor).collect::<Vec<_>>(), [0, 1, 2]);
        directory.forget(&made[1]);
        directory.forget(&made[0]);
        let again = directory.reserve("d", Some("u"), None).unwrap();
        assert_eq!(minor(&again), 0);
        // A device without an entry must not remove another's.
        directory.forget(&made[0]);
        assert!(directory.named("d").is_err_and(|absent| absent == LookupFailure::Creating));
        directory.set(&again, DeviceLifecycleStage::Active);
        assert!(
            directory.resolve("u").is_ok()
                && directory.resolve("254:0").is_ok()
                && directory.resolve("253:0").is_err()
        );
        assert_eq!(minor(&directory.reserve("e", None, None).unwrap()), 1);
        assert_eq!(minor(&directory.reserve("f", None, None).unwrap()), 3);
    }

    #[test]
    fn a_number_always_means_the_number() {
        let mut directory = DeviceDirectory::default();
        for (name, uuid) in [("254:0", None), ("x", Some("254:0")), ("1:1", None)] {
            assert_eq!(directory.reserve(name, uuid, None).err().unwrap().errno, EINVAL);
        }
        directory.reserve("254:", Some(":0"), None).unwrap();
    }
}
