//! The list of exports: devices by name.
//!
//! The list is read when a client names an export or lists all of them, and never on the data path.

use super::allowed_clients::{AllowedClients, NbdClientIdentity};
use super::description::ExportDescription;
use super::export_geometry::ExportGeometry;
use super::io_counters::{CoreDeviceIoCounters, DeviceIoCounters, DeviceIoReport};
use super::range_locks::RangeLocks;
use crossbeam_utils::CachePadded;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use udm_core::{CoreId, Device, DeviceId};
use udm_runtime::ProcessCores;
use udm_wire::nbd::STRING_MAX;

/// Function that is called when a connection has closed an export, or the list has changed.
type ExportClosedHook = Arc<OnceLock<Arc<dyn Fn() + Send + Sync>>>;

/// Function that is called when a device may have another size or other limits.
type DeviceChangedHook = OnceLock<Arc<dyn Fn(DeviceId) + Send + Sync>>;

/// A device under a name.
pub struct Export {
    /// Changed only under the lock of the list.
    name: Mutex<Arc<str>>,
    description: Arc<ExportDescription>,
    read_only: bool,
    device: Arc<dyn Device>,
    users: AtomicUsize,
    /// Number of [`FailingExportGuard`]s of the export.
    failing: AtomicUsize,
    allowed_clients: Arc<AllowedClients>,
    /// The hook of the list that the export is on.
    closed: ExportClosedHook,
    /// State of the device, shared by all its exports.
    exported_device: Arc<PerDeviceExportState>,
}

/// State that all exports of a device share.
struct PerDeviceExportState {
    range_locks: Arc<RangeLocks>,
    served: DeviceIoCounters,
}

impl Export {
    /// Creates an export of `device` under `name`. `description` is for people and may be empty.
    /// With `read_only`, writes fail with EPERM even if the device is writable.
    ///
    /// # Errors
    /// The protocol cannot transmit the name or description.
    pub fn new(
        name: impl Into<String>,
        description: impl Into<String>,
        read_only: bool,
        device: Arc<dyn Device>,
    ) -> Result<Export, ExportNameError> {
        let (name, description) = (name.into(), description.into());
        check_export_text(&name, &name)?;
        check_export_text(&description, &name)?;
        let text = ExportDescription::default();
        text.set(&description);
        let range_locks = Arc::new(RangeLocks::new());
        let exported_device =
            Arc::new(PerDeviceExportState { range_locks, served: DeviceIoCounters::default() });
        Ok(Export {
            name: Mutex::new(name.into()),
            description: Arc::new(text),
            read_only,
            device,
            users: AtomicUsize::new(0),
            failing: AtomicUsize::new(0),
            allowed_clients: Arc::default(),
            closed: ExportClosedHook::default(),
            exported_device,
        })
    }

    /// Current name.
    #[must_use]
    pub fn name(&self) -> Arc<str> {
        Arc::clone(&self.named())
    }

    fn named(&self) -> MutexGuard<'_, Arc<str>> {
        self.name.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Description; may be empty.
    #[must_use]
    pub fn description(&self) -> Arc<str> {
        self.description.get()
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Connections that chose this export and are still open.
    #[must_use]
    pub fn users(&self) -> usize {
        // Sequentially consistent with messages between the reader and the connections that close
        // the export.
        self.users.load(Ordering::SeqCst)
    }

    /// Returns true while requests of the export fail.
    pub(crate) fn is_failing(&self) -> bool {
        self.failing.load(Ordering::SeqCst) > 0
    }

    /// Range locks of the device, for requests that change a part of a block.
    pub(super) fn range_locks(&self) -> &Arc<RangeLocks> {
        &self.exported_device.range_locks
    }

    /// Counters of `core` for the device.
    pub(crate) fn io_counters_on(&self, core: CoreId) -> Arc<CachePadded<CoreDeviceIoCounters>> {
        self.exported_device.served.on(core)
    }

    /// Counters of the device over all its exports, since one was last added while none was listed
    /// or in use.
    #[must_use]
    pub fn served(&self) -> DeviceIoReport {
        self.exported_device.served.report()
    }

    /// Sets the counters that another process has counted before. [`Export::served`] adds them.
    pub fn set_served_before(&self, before: DeviceIoReport) {
        self.exported_device.served.set_before(before);
    }

    /// True if clients may not write, even if the device is writable.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The same export for these clients; without this call, it is for all.
    #[must_use]
    pub fn for_clients(self, allowed_clients: Arc<AllowedClients>) -> Export {
        Export { allowed_clients, ..self }
    }

    /// The same export with a description that may change.
    #[must_use]
    pub fn described_by(self, description: Arc<ExportDescription>) -> Export {
        Export { description, ..self }
    }

    /// True if the export is for all clients, without a list of allowed ones.
    pub(crate) fn is_for_all_clients(&self) -> bool {
        self.allowed_clients.get().is_none()
    }

    /// True if `client` may choose the export.
    pub(super) fn admits(&self, client: &NbdClientIdentity) -> bool {
        self.allowed_clients.admits(client)
    }

    /// Current geometry for a client.
    pub(super) fn geometry(&self) -> ExportGeometry {
        ExportGeometry::new(&self.device.limits(), self.read_only)
    }
}

/// Makes requests of an export's clients fail while it is held ([`Exports::fail_requests`]).
pub struct FailingExportGuard {
    export: Arc<Export>,
    core_set: Weak<ProcessCores>,
}

/// Message: connections check whether their requests fail.
pub(crate) struct FailingExportMessage;

/// Message: connections check whether their client may still use the device.
pub(super) struct AllowedClientsChanged;

impl FailingExportGuard {
    /// Notifies connections after a change. A connection that subscribes meanwhile reads the new
    /// state.
    fn notify(&self) {
        let Some(core_set) = self.core_set.upgrade() else { return };
        for core in 0..core_set.len() {
            core_set.send_message(
                CoreId(core as u16),
                self.export.device.id(),
                Box::new(FailingExportMessage),
            );
        }
    }
}

impl Drop for FailingExportGuard {
    fn drop(&mut self) {
        self.export.failing.fetch_sub(1, Ordering::SeqCst);
        self.notify();
    }
}

/// A connection's reference to an export. All its clones count as one user.
#[derive(Clone)]
pub struct ExportRef(Arc<ExportUseGuard>);

struct ExportUseGuard(Arc<Export>);

impl std::ops::Deref for ExportRef {
    type Target = Export;
    fn deref(&self) -> &Export {
        &self.0.0
    }
}

impl Drop for ExportUseGuard {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::SeqCst);
        if let Some(hook) = self.0.closed.get() {
            hook();
        }
    }
}

/// Error of adding or renaming an export.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExportNameError {
    /// The protocol cannot transmit the text.
    #[error("export {0:?}: a name or description has at most 4096 bytes and no NUL")]
    Text(String),
    /// Another export has the name.
    #[error("export {0:?} exists already")]
    Exists(String),
}

/// Checks that the protocol can transmit `text` of the export `name`.
fn check_export_text(text: &str, name: &str) -> Result<(), ExportNameError> {
    if text.len() <= STRING_MAX && !text.contains('\0') {
        return Ok(());
    }
    Err(ExportNameError::Text(name.chars().take(64).collect()))
}

/// Exports in the order in which they were added, and by name. Look-ups are fast for any number.
#[derive(Default)]
struct ExportTable {
    ordered: BTreeMap<u64, Arc<Export>>,
    places: HashMap<Arc<str>, u64>,
    next: u64,
}

impl ExportTable {
    fn get(&self, name: &str) -> Option<&Arc<Export>> {
        self.places.get(name).map(|place| &self.ordered[place])
    }

    /// Position of the export, if it is on the list.
    fn place(&self, export: &Arc<Export>) -> Option<u64> {
        let place = *self.places.get(&export.name())?;
        Arc::ptr_eq(&self.ordered[&place], export).then_some(place)
    }

    fn check_free(&self, name: &str) -> Result<(), ExportNameError> {
        match self.places.contains_key(name) {
            true => Err(ExportNameError::Exists(name.into())),
            false => Ok(()),
        }
    }

    fn push(&mut self, export: Arc<Export>) {
        self.places.insert(export.name(), self.next);
        self.ordered.insert(self.next, export);
        self.next += 1;
    }

    fn remove(&mut self, export: &Arc<Export>) {
        if let Some(place) = self.place(export) {
            self.places.remove(&export.name());
            self.ordered.remove(&place);
        }
    }

    /// Returns the export called `name`. For the empty name, returns the first one unless an export
    /// has that name.
    fn find(&self, name: &str) -> Option<&Arc<Export>> {
        self.get(name).or_else(|| self.ordered.values().next().filter(|_| name.is_empty()))
    }
}

/// The exports of a server, in order. A client that names no export gets the first one.
#[derive(Default)]
pub struct Exports {
    list: Mutex<ExportTable>,
    /// State of each device that is or was exported, while an export of it exists.
    exported_devices: Mutex<HashMap<DeviceId, Weak<PerDeviceExportState>>>,
    closed: ExportClosedHook,
    changed: DeviceChangedHook,
    list_changed: ExportClosedHook,
    /// The cores that serve the exports.
    core_set: OnceLock<Weak<ProcessCores>>,
}

impl Exports {
    /// Creates an empty list.
    #[must_use]
    pub fn new() -> Exports {
        Exports::default()
    }

    /// Sets the cores that serve the exports. Only the first call has an effect.
    pub(crate) fn set_core_set(&self, core_set: &Arc<ProcessCores>) {
        let _ = self.core_set.set(Arc::downgrade(core_set));
    }

    /// Makes all requests of the clients of `export` fail with EIO while the returned guard is
    /// held. This includes requests in flight, which fail at once. The device keeps those, with
    /// their memory, until it completes them; a write may still be executed.
    #[must_use = "requests fail while it is held"]
    pub fn fail_requests(&self, export: &Arc<Export>) -> FailingExportGuard {
        export.failing.fetch_add(1, Ordering::SeqCst);
        let core_set = self.core_set.get().cloned().unwrap_or_default();
        let failing = FailingExportGuard { export: Arc::clone(export), core_set };
        failing.notify();
        failing
    }

    fn list(&self) -> MutexGuard<'_, ExportTable> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the function that is called when a connection has closed an export, on any core. `hook`
    /// should only wake a thread. Only the first call has an effect.
    pub fn on_closed(&self, hook: Arc<dyn Fn() + Send + Sync>) {
        let _ = self.closed.set(hook);
    }

    /// Sets the function that is called with the id of a device that may have another size or other
    /// limits. It should only wake a thread. Only the first call has an effect.
    pub fn on_changed(&self, hook: Arc<dyn Fn(DeviceId) + Send + Sync>) {
        let _ = self.changed.set(hook);
    }

    /// Sets the function that is called after the list has changed. It must not wait. Only the
    /// first call has an effect.
    pub(crate) fn on_list_changed(&self, hook: Arc<dyn Fn() + Send + Sync>) {
        let _ = self.list_changed.set(hook);
    }

    fn list_has_changed(&self) {
        if let Some(hook) = self.list_changed.get() {
            hook();
        }
    }

    /// Reports that `device` may have another size or other limits, such as after a change of its
    /// table.
    pub fn device_changed(&self, device: DeviceId) {
        if let Some(hook) = self.changed.get() {
            hook(device);
        }
    }

    /// Disconnects the clients that are not allowed any more after `changed` has changed, in all
    /// exports that depend on it. Requests in flight are answered.
    pub fn allowed_clients_changed(&self, changed: &AllowedClients) {
        let Some(core_set) = self.core_set.get().and_then(Weak::upgrade) else { return };
        for export in self.all().iter().filter(|export| export.allowed_clients.depends_on(changed)) {
            for core in 0..core_set.len() {
                let message = Box::new(AllowedClientsChanged);
                core_set.send_message(CoreId(core as u16), export.device.id(), message);
            }
        }
    }

    /// Adds an export at the end.
    ///
    /// # Errors
    /// Another export has the name.
    pub fn add(&self, mut export: Export) -> Result<Arc<Export>, ExportNameError> {
        let mut list = self.list();
        list.check_free(&export.name())?;
        self.share(&mut export);
        export.closed = Arc::clone(&self.closed);
        let export = Arc::new(export);
        list.push(export.clone());
        drop(list);
        self.list_has_changed();
        Ok(export)
    }

    /// Puts `export`, which was added before, on the list under `name`. If it is on the list, it
    /// keeps its position; otherwise it is added at the end. Its clients stay connected.
    ///
    /// # Errors
    /// Another export has the name, or the protocol cannot transmit it.
    pub fn put(&self, export: &Arc<Export>, name: &str) -> Result<(), ExportNameError> {
        check_export_text(name, name)?;
        let mut list = self.list();
        let place = list.place(export);
        if place.is_some() && *export.name() == *name {
            return Ok(());
        }
        list.check_free(name)?;
        let old = std::mem::replace(&mut *export.named(), name.into());
        match place {
            Some(place) => {
                list.places.remove(&old);
                list.places.insert(export.name(), place);
            }
            None => list.push(Arc::clone(export)),
        }
        drop(list);
        self.list_has_changed();
        Ok(())
    }

    /// Shares the state of a device with its other exports, including those that were removed and
    /// are still in use.
    fn share(&self, export: &mut Export) {
        let mut all = self.exported_devices.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() == all.capacity() {
            // Only when the map is full: it may have thousands of entries.
            all.retain(|_, shared| shared.strong_count() > 0);
        }
        let device = export.device.id();
        match all.get(&device).and_then(Weak::upgrade) {
            Some(shared) => export.exported_device = shared,
            None => drop(all.insert(device, Arc::downgrade(&export.exported_device))),
        }
    }

    /// Removes an export from the list. Connections that use it continue; [`Export::users`] counts
    /// them.
    pub fn remove(&self, export: &Arc<Export>) {
        self.list().remove(export);
        self.list_has_changed();
    }

    /// As [`Exports::get`], but counts a user while the list is locked. So after
    /// [`Exports::remove`], the number of users cannot grow.
    #[must_use]
    pub fn acquire(&self, name: &str) -> Option<ExportRef> {
        let list = self.list();
        let export = list.find(name)?;
        export.users.fetch_add(1, Ordering::Relaxed);
        Some(ExportRef(Arc::new(ExportUseGuard(Arc::clone(export)))))
    }

    /// As [`Exports::acquire`], for an export of this list; `None` if it was removed.
    pub(crate) fn acquire_export(&self, export: &Arc<Export>) -> Option<ExportRef> {
        let list = self.list();
        list.place(export)?;
        export.users.fetch_add(1, Ordering::Relaxed);
        Some(ExportRef(Arc::new(ExportUseGuard(Arc::clone(export)))))
    }

    /// Returns the export `name`. For the empty name, returns the first one unless an export has
    /// that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Arc<Export>> {
        self.list().find(name).cloned()
    }

    /// All exports, in order.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Export>> {
        self.list().ordered.values().cloned().collect()
    }

    /// Returns up to `count` exports, in order, from position `from` on. Also returns the position
    /// after them if there may be more.
    pub(super) fn page(&self, from: u64, count: usize) -> (Vec<Arc<Export>>, Option<u64>) {
        let list = self.list();
        let some: Vec<_> = list.ordered.range(from..).take(count).collect();
        let next = some.last().filter(|_| some.len() == count).map(|(place, _)| *place + 1);
        (some.into_iter().map(|(_, export)| Arc::clone(export)).collect(), next)
    }
}
