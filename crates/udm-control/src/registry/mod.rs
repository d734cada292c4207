//! All devices of a process: the opened ones by URI, the mapped ones by name.
//!
//! Contract: one name of one disk is one device with one number ([`opened`]); the names of mapped
//! devices are in the [`directory`]. The registry's lock is held only briefly, and never during
//! file system access, while a device is opened, or while a table is built ([`lookup`]). No lane
//! uses it.
//!
//! * **Numbers.** Opened devices are 253:N, mapped devices 254:N, in udm's own numbering. Each load
//!   resolves its paths again, without a lock. A name that now leads to another disk gets another
//!   number. A message resolves nothing: it finds a device by number or by the name that the table
//!   used.
//! * **Directory.** A device that is being created or removed is not listed, but its name, UUID and
//!   number are taken. A table that is being built counts its use of a device under a lock. A
//!   removal begins under the same lock, so one of the two is refused. Look-ups and counts use an
//!   index.
//! * **Names.** Nothing depends on a device's name (`directory/rename`). A device has one export,
//!   so its clients stay when it is renamed. Verbs find a device once. Tables hold devices and
//!   print numbers.
//! * **Removal.** A deferred removal is a mark. The connection or table that closes a device checks
//!   for marks; there is no timer ([`deferred_removals`]). A forced removal first loads a table of
//!   `error` and waits for the requests that storage has. Its clients get EIO meanwhile
//!   (`Exports::fail_requests`).
//! * **Events** ([`event_stream`]): each change puts a line into a bounded queue, from cores too.
//!   Clients read the last 1,024 at their own pace; a slow client gets the number of lost events.
//!   Before the first client, a change costs a fence and a load.
//! * **Stores** ([`store_locks`]): changes of one store run one after the other.

mod deferred_removals;
pub mod device_opener;
mod directory;
mod event_stream;
mod event_waiters;
mod lookup;
mod name_locks;
mod nvme;
mod opened;
mod request_queue_params;
mod resumed_merges;
mod store_locks;
mod ublk;
mod vhost_user;

pub(crate) use directory::DeviceCreationGuard;
pub use directory::{NewName, RegisteredDevice};
pub(crate) use event_stream::EventSubscription;
pub use lookup::BaseDir;
pub(crate) use lookup::{MessageResolver, TableResolver};
pub use opened::OPENED_MAJOR;
pub use request_queue_params::RequestQueueParams;

use crate::api;
use crate::config::{ConfigReader, ServerConfigFile};
use crate::error::VerbError;
use crate::exports::DeviceExporter;
use crate::nvme_target::NvmeTarget;
use crate::state_folder::store_creation::StoreCreationMarker;
use crate::state_folder::{StableDiskId, StateFolder, StoreToMarkInvalid};
use crate::verbs::clone::WaitingClones;
use crate::verbs::moves::{MoveJob, MoveJobs};
use crate::verbs::snapshot::{LostSnapshotPolicy, PendingMerge};
use deferred_removals::DeferredRemovalNotifier;
use device_opener::DeviceOpener;
use directory::{DeviceDirectory, DeviceUseGuard};
use event_stream::EventStream;
use lookup::device_lookup_error;
use name_locks::NameLocks;
use opened::OpenedDevices;
use resumed_merges::ResumedMerges;
use std::any::Any;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use store_locks::StoreLocks;
use tokio::sync::{mpsc, oneshot};
use ublk::ServedUblkDisks;
use udm_backends::{BackendDeviceRegistry, DiskIdentity};
use udm_core::errno::{EACCES, EBUSY, ENOENT, ENXIO, EOPNOTSUPP};
use udm_core::{CoreCommandSender, DevNo, Device, DeviceId};
use udm_dm::{DeviceLookupError, InvalidStoreMark, QueueFactory, ResolvedDevice, TargetError};
pub use udm_targets::multipath::{PathMaintenanceSettings, PathWatchOptions};
use udm_wire::uri::{self, DeviceUri};
use vhost_user::ServedVhostUserSockets;

/// The major number of mapped devices.
pub const MAPPED_MAJOR: u32 = 254;

/// Returns the path maintenance for a device, by its name and UUID.
pub type PathMaintenanceFn = Box<dyn Fn(&str, Option<&str>) -> PathMaintenanceSettings + Send + Sync>;

/// Sends a request for an upgrade to the task that serves it, with the place for its reply.
pub type UpgradeRequestSender =
    mpsc::Sender<(api::UpgradeServerRequest, oneshot::Sender<Result<api::UpgradeReport, VerbError>>)>;

/// All devices of a process.
pub struct DeviceRegistry {
    cores: Arc<dyn CoreCommandSender>,
    core_count: usize,
    opener: Box<dyn DeviceOpener>,
    state: Mutex<DeviceRegistryState>,
    opening: NameLocks,
    deferred: Arc<DeferredRemovalNotifier>,
    event_stream: Arc<EventStream>,
    linking: Mutex<()>,
    throttling: Mutex<()>,
    exporter: OnceLock<DeviceExporter>,
    maintenance: OnceLock<PathMaintenanceFn>,
    requests: OnceLock<RequestQueueParams>,
    state_folder: OnceLock<Arc<StateFolder>>,
    lost_snapshots: OnceLock<LostSnapshotPolicy>,
    refused_file_advice: OnceLock<&'static str>,
    /// True while a group of devices is created: one may bring a snapshot that blocks another.
    pub(crate) is_starting: AtomicBool,
    is_ending: AtomicBool,
    upgrades: OnceLock<UpgradeRequestSender>,
    /// Merges that an earlier server began and that must be finished.
    pub(crate) merges: ResumedMerges,
    pub(crate) moves: MoveJobs,
    /// Clones of the state folder that have not returned.
    pub(crate) clones: WaitingClones,
    /// Locks of stores, for changes of their snapshots.
    pub(crate) store_locks: StoreLocks,
    /// Weak reference to this registry.
    pub(crate) weak_self: Weak<DeviceRegistry>,
    config: OnceLock<ServerConfigFile>,
    nvme: OnceLock<Arc<dyn NvmeTarget>>,
    ublk: ServedUblkDisks,
    vhost_user: ServedVhostUserSockets,
}

#[derive(Default)]
struct DeviceRegistryState {
    opened: OpenedDevices,
    directory: DeviceDirectory,
}

impl DeviceRegistry {
    /// An empty registry for the `core_count` cores of `cores`.
    pub fn new(cores: Arc<dyn CoreCommandSender>, core_count: usize) -> Arc<DeviceRegistry> {
        DeviceRegistry::with_opener(cores, core_count, Box::new(BackendDeviceRegistry::new(core_count)))
    }

    /// As [`DeviceRegistry::new`], with another way to open devices.
    pub fn with_opener(
        cores: Arc<dyn CoreCommandSender>,
        core_count: usize,
        opener: Box<dyn DeviceOpener>,
    ) -> Arc<DeviceRegistry> {
        let deferred = Arc::new(DeferredRemovalNotifier::default());
        let event_stream = Arc::new(EventStream::default());
        let directory = DeviceDirectory::new(&deferred, &event_stream);
        Arc::new_cyclic(|weak_self| DeviceRegistry {
            cores,
            core_count,
            opener,
            state: Mutex::new(DeviceRegistryState { directory, ..DeviceRegistryState::default() }),
            deferred,
            event_stream,
            opening: NameLocks::default(),
            linking: Mutex::default(),
            throttling: Mutex::default(),
            exporter: OnceLock::new(),
            maintenance: OnceLock::new(),
            requests: OnceLock::new(),
            state_folder: OnceLock::new(),
            lost_snapshots: OnceLock::new(),
            refused_file_advice: OnceLock::new(),
            nvme: OnceLock::new(),
            ublk: ServedUblkDisks::default(),
            vhost_user: ServedVhostUserSockets::default(),
            is_starting: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            upgrades: OnceLock::new(),
            merges: ResumedMerges::default(),
            moves: MoveJobs::default(),
            clones: WaitingClones::default(),
            store_locks: StoreLocks::default(),
            weak_self: Weak::clone(weak_self),
            config: OnceLock::new(),
        })
    }

    /// Sets the exporter of devices. Only the first call has an effect.
    pub fn set_exporter(&self, exporter: DeviceExporter) {
        let deferred = Arc::clone(&self.deferred);
        exporter.on_closed(Arc::new(move || deferred.closed()));
        let _ = self.exporter.set(exporter);
    }

    /// Sets the path maintenance of devices created from now on. Only the first call has an effect.
    pub fn set_maintenance(&self, policy: PathMaintenanceFn) {
        let _ = self.maintenance.set(policy);
    }

    /// Sets what to add to the errors of files that the system refuses (EACCES). Only the first
    /// call has an effect.
    pub fn set_refused_file_advice(&self, advice: &'static str) {
        let _ = self.refused_file_advice.set(advice);
    }

    /// What to add to an error of a file with this errno.
    pub(crate) fn advice_on_refused_file(&self, errno: i32) -> Option<&'static str> {
        self.refused_file_advice.get().copied().filter(|_| errno == EACCES)
    }

    /// Sets the default queue parameters of request-based devices created from now on. Only the
    /// first call has an effect.
    pub fn set_request_queues(&self, requests: RequestQueueParams) {
        let _ = self.requests.set(requests);
    }

    /// The factory of a device's own queue: `own` parameters first, then the defaults.
    pub(crate) fn queue_by(&self, own: RequestQueueParams) -> Option<QueueFactory> {
        own.or(self.requests.get().copied().unwrap_or_default()).queue_by(self.core_count)
    }

    /// The path maintenance of a device with this name and UUID.
    fn maintenance_of(&self, name: &str, uuid: Option<&str>) -> PathMaintenanceSettings {
        self.maintenance.get().map_or_else(PathMaintenanceSettings::default, |of| of(name, uuid))
    }

    /// Sets the folder of persistent facts. Only the first call has an effect.
    pub fn set_state_folder(&self, folder: Arc<StateFolder>) {
        let _ = self.state_folder.set(folder);
    }

    /// Sets the reader of the configuration file. Only the first call has an effect.
    pub fn set_config_reader(&self, read: ConfigReader) {
        let _ = self.config.set(ServerConfigFile::new(read));
    }

    /// The configuration, if there is a file.
    pub(crate) fn config(&self) -> Option<&ServerConfigFile> {
        self.config.get()
    }

    /// Waits for the next merge that an earlier server began and this one continues. Only one task
    /// may call this; it finishes the merges.
    pub async fn next_merge(&self) -> PendingMerge {
        self.merges.next().await
    }

    /// Waits for the next move of a device. Only one task may call this; it lets the moves go on.
    pub async fn next_move(&self) -> Arc<MoveJob> {
        self.moves.next().await
    }

    /// The folder of persistent facts, if there is one.
    pub(crate) fn state_folder(&self) -> Option<&Arc<StateFolder>> {
        self.state_folder.get()
    }

    /// Sets the policy for disks whose snapshots can't be attached. Only the first call has an
    /// effect.
    pub fn set_lost_snapshots(&self, how: LostSnapshotPolicy) {
        let _ = self.lost_snapshots.set(how);
    }

    /// The policy for disks whose snapshots can't be attached.
    #[must_use]
    pub fn lost_snapshots(&self) -> LostSnapshotPolicy {
        self.lost_snapshots.get().copied().unwrap_or_default()
    }

    /// Sets whether a group of devices is being created. Meanwhile no blocking snapshot is given
    /// up, because another device of the group may bring it.
    pub fn set_starting(&self, starting: bool) {
        self.is_starting.store(starting, Ordering::Relaxed);
    }

    /// Marks the shutdown, after the last client is gone: snapshots stay attached until
    /// [`StateFolder::detach_all`].
    pub fn begin_shutdown(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
    }

    /// Ends the state of [`DeviceRegistry::begin_shutdown`]: an upgrade has failed, and the server
    /// goes on.
    pub fn cancel_shutdown(&self) {
        self.is_ending.store(false, Ordering::Relaxed);
        self.lift_throttles(false);
    }

    /// Lifts the limits of requests and bytes per second of all devices, or puts them back. They
    /// may make clients wait for longer than a shutdown or an upgrade does.
    pub fn lift_throttles(&self, is_lifted: bool) {
        let all = self.all();
        let throttled = all.iter().filter(|mapped| mapped.device.throttle().is_some());
        throttled.for_each(|mapped| mapped.device.lift_throttle(is_lifted, self.cores()));
    }

    /// Sets the task that upgrades the server. Only the first call has an effect.
    pub fn set_upgrades(&self, upgrades: UpgradeRequestSender) {
        let _ = self.upgrades.set(upgrades);
    }

    /// Has the server upgraded by its task.
    ///
    /// # Errors
    /// EOPNOTSUPP if it has no such task, EBUSY during another upgrade, otherwise the reason why
    /// the server goes on as it was.
    pub async fn upgrade(&self, request: api::UpgradeServerRequest) -> Result<api::UpgradeReport, VerbError> {
        let refuse =
            |errno, why: &str| Err(VerbError::new("upgrade", TargetError::new(why).with_errno(errno)));
        let Some(upgrades) = self.upgrades.get() else {
            return refuse(EOPNOTSUPP, "only udm serve can be upgraded");
        };
        let (reply, done) = oneshot::channel();
        if upgrades.try_send((request, reply)).is_err() {
            return refuse(EBUSY, "another upgrade is under way, or the server ends");
        }
        done.await.unwrap_or_else(|_| refuse(EBUSY, "the server ends"))
    }

    /// True during the shutdown, and while an upgrade hands the devices over.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    /// The opened devices in the order of their numbers, open or not.
    pub(crate) fn opened_disks(&self) -> Vec<(String, DiskIdentity)> {
        self.state().opened.disks()
    }

    /// Gives the numbers from 0 on to these devices, which are not open yet.
    pub(crate) fn remember_opened_disks(&self, disks: Vec<(String, DiskIdentity)>) {
        self.state().opened.remember(disks);
    }

    /// Checks that another process can open the disk of this number: the name of a file must still
    /// lead to it. May block for as long as the file system does.
    ///
    /// # Errors
    /// Why not, in one line.
    pub(crate) fn check_disk_can_be_reopened(&self, number: DevNo) -> Result<(), String> {
        let opened = self.state().opened.identity(number.minor).filter(|_| number.major != MAPPED_MAJOR);
        let text = self.uri_of(number);
        let (Some(opened), Ok(uri @ DeviceUri::File(_))) = (opened, uri::parse_device_uri(&text)) else {
            return Ok(());
        };
        match self.opener.identify(&uri) {
            Ok(found) if found == opened => Ok(()),
            Ok(_) => Err(format!("{text} leads to another disk now")),
            Err(error) => Err(format!("it could not be opened again: {}", error.text)),
        }
    }

    /// Identity of the disk of `device`, valid for other servers too. `None` for a disk that ends
    /// with the process. May block.
    pub(crate) fn disk_id(&self, device: &ResolvedDevice) -> Option<StableDiskId> {
        let number = device.number;
        if number.major == MAPPED_MAJOR {
            return self.disk_id_cached(number);
        }
        let identity = self.state().opened.identity(number.minor)?;
        StableDiskId::of_uri(&self.uri_of(number), identity)
    }

    /// As [`DeviceRegistry::disk_id`], as far as known without file system access.
    pub(crate) fn disk_id_cached(&self, number: DevNo) -> Option<StableDiskId> {
        match number.major {
            MAPPED_MAJOR => Some(StableDiskId::mapped(&self.name_of(number)?)),
            _ => {
                let identity = self.state().opened.identity(number.minor)?;
                StableDiskId::of_uri_cached(&self.uri_of(number), identity)
            }
        }
    }

    /// Marks that a store is being created. `None` without a state folder.
    pub(crate) fn begin_store_creation(&self, store: &Path) -> Option<StoreCreationMarker> {
        self.state_folder.get()?.begin_store_creation(store)
    }

    /// The mark that invalidates a store on this device.
    fn mark(&self, device: &ResolvedDevice) -> Option<Arc<dyn InvalidStoreMark>> {
        let folder = self.state_folder.get()?;
        let store = match device.number.major {
            MAPPED_MAJOR => {
                let state = self.state();
                let mapped = state.directory.numbered(device.number.minor).ok()?;
                StoreToMarkInvalid::Mapped(mapped.device.name_handle())
            }
            _ => {
                let identity = self.state().opened.identity(device.number.minor)?;
                StoreToMarkInvalid::Disk(StableDiskId::of_uri(&device.name, identity)?)
            }
        };
        Some(folder.mark(store))
    }

    /// The exporter, if one is set.
    #[must_use]
    pub fn exporter(&self) -> Option<&DeviceExporter> {
        self.exporter.get()
    }

    /// All exports that clients can connect to.
    #[must_use]
    pub fn exports(&self) -> Vec<api::NbdExportDescription> {
        self.exporter().map(DeviceExporter::list).unwrap_or_default()
    }

    /// Subscribes to the events of all devices, from now on or after event `after`. Event numbers
    /// are greater than `base`; every call passes the same `base`.
    pub(crate) fn listen(&self, base: u64, after: Option<u64>) -> EventSubscription {
        self.event_stream.listen(base, after)
    }

    /// The cores that run lanes.
    #[must_use]
    pub fn cores(&self) -> &dyn CoreCommandSender {
        &*self.cores
    }

    /// Opens devices and runs blocking work.
    pub(crate) fn opener(&self) -> &dyn DeviceOpener {
        &*self.opener
    }

    /// Number of cores.
    #[must_use]
    pub fn core_count(&self) -> usize {
        self.core_count
    }

    fn state(&self) -> MutexGuard<'_, DeviceRegistryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lock held while the limits of requests and bytes per second of devices change.
    pub(crate) fn throttling(&self) -> MutexGuard<'_, ()> {
        self.throttling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lock held while a table is put into a slot and while a removal begins. Checks of
    /// dependencies made under it stay valid until it is released.
    pub(crate) fn linking(&self) -> MutexGuard<'_, ()> {
        self.linking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The name of the mapped device with a number; `None` for all other numbers.
    #[must_use]
    pub(crate) fn name_of(&self, number: DevNo) -> Option<String> {
        let state = self.state();
        let minor = (number.major == MAPPED_MAJOR).then_some(number.minor)?;
        state.directory.numbered(minor).ok().map(|mapped| mapped.device.name())
    }

    /// The URI of a number in a table, or `@` and the name of a mapped device. Empty for an unknown
    /// number.
    #[must_use]
    pub fn uri_of(&self, number: DevNo) -> String {
        let state = self.state();
        match number.major {
            MAPPED_MAJOR => {
                state.directory.numbered(number.minor).ok().map(|m| format!("@{}", m.device.name()))
            }
            OPENED_MAJOR => state.opened.uri(number.minor).map(String::from),
            _ => None,
        }
        .unwrap_or_default()
    }

    /// The mapped device that `uri` names, if it names one. With `uses`, the table counts as a
    /// user.
    fn mapped(
        &self,
        uri: &DeviceUri,
        uses: Option<&mut TableDeviceUses>,
    ) -> Option<Result<ResolvedDevice, DeviceLookupError>> {
        let state = self.state();
        let (found, errno) = match uri {
            DeviceUri::Mapped(name) => (state.directory.named(name), ENOENT),
            DeviceUri::Number { major: MAPPED_MAJOR, minor } => (state.directory.numbered(*minor), ENXIO),
            _ => return None,
        };
        let found = found.map_err(|absent| match absent.reason() {
            None => device_lookup_error(errno, format!("there is no device {uri}")),
            Some(reason) => device_lookup_error(EBUSY, format!("{uri}: {reason}")),
        });
        Some(found.map(|mapped| {
            let hold = || -> Arc<dyn Any + Send + Sync> { Arc::new(DeviceUseGuard::new(mapped)) };
            ResolvedDevice {
                number: mapped.device.number(),
                name: mapped.device.name(),
                device: Arc::clone(&mapped.device) as Arc<dyn Device>,
                // One use per table, even if the table names the device several times.
                hold: uses.map(|uses| Arc::clone(uses.entry(mapped.device.id()).or_insert_with(hold))),
            }
        }))
    }
}

/// The mapped devices that a table uses.
type TableDeviceUses = HashMap<DeviceId, Arc<dyn Any + Send + Sync>>;
