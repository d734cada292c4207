//! All devices of a process: the opened ones by URI, the mapped ones by name.
//!
//! Contract: one name of one disk is one device with one number ([`opened`]); the names of mapped
//! devices are in the [`directory`]. The registry's lock is held only for moments, and never while
//! the file system is asked, a device is opened, or a table is built ([`lookup`]). No lane uses it.
//!
//! * **Numbers.** Opened devices are 253:N, mapped devices 254:N, in udm's own numbering. Each load
//!   resolves its paths again, without a lock. A name that now leads to another disk gets another
//!   number. A message resolves nothing: it finds a device by number or by the name that the table
//!   used.
//! * **Directory.** A device that is being created or removed is listed nowhere, but its name, uuid
//!   and number are taken. A table that is being built counts its use of a device under a lock. A
//!   removal begins under the same lock, so one of the two is refused. Look-ups and counts use an
//!   index.
//! * **Names.** Nothing depends on a device's name (`directory/rename`). A device has one export,
//!   so its clients stay when it is renamed. Verbs find a device once. Tables hold devices and
//!   print numbers.
//! * **Removal.** A deferred removal is a mark. The connection or table that closes a device checks
//!   for marks; there is no timer ([`deferred_removals`]). A forced removal loads a table of `error` first,
//!   and waits for requests that storage has. Its clients get EIO meanwhile (`Exports::fail`).
//! * **Events** ([`event_stream`]): each change puts a line into a bounded queue, from cores too. Listeners
//!   read the last 1,024 at their own pace, and one that is too slow is told how many it lost.
//!   Without a first listener a change costs a fence and a load.
//! * **Stores** ([`store_locks`]): changes that concern one store run one after the other.

mod deferred_removals;
pub mod device_opener;
mod directory;
mod event_stream;
mod events;
mod lookup;
mod name_locks;
mod opened;
mod request_queue_params;
mod resumed_merges;
mod store_locks;

pub(crate) use directory::CreationGuard;
pub use directory::{Mapped, NewName};
pub(crate) use event_stream::EventSubscription;
pub use lookup::BaseDir;
pub(crate) use lookup::{MessageResolver, TableResolver};
pub use opened::OPENED_MAJOR;
pub use request_queue_params::RequestQueueParams;

use crate::config::{Config, ConfigReader};
use crate::exports::Exporter;
use crate::http::api;
use crate::state_folder::store_creation::StoreCreation;
use crate::state_folder::{MarkedStore, StateFolder, StoreId};
use crate::verbs::snapshot::{LostSnapshots, PendingMerge};
use deferred_removals::DeferredRemovals;
use device_opener::DeviceOpener;
use directory::{DeviceDirectory, DeviceUse};
use event_stream::EventStream;
use lookup::lookup;
use name_locks::NameLocks;
use opened::OpenedDevices;
use resumed_merges::ResumedMerges;
use std::any::Any;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use store_locks::StoreLocks;
use udm_backends::Backends;
use udm_core::errno::{EBUSY, ENOENT, ENXIO};
use udm_core::{Cores, DevNo, Device, DeviceId};
use udm_dm::{DeviceRef, InvalidStoreMark, LookupError, PathMaintenance, QueueFactory};
use udm_wire::uri::DeviceUri;

/// The major number of mapped devices.
pub const MAPPED_MAJOR: u32 = 254;

/// What is done for the device of a name and a uuid besides its requests.
pub type MaintenancePolicy = Box<dyn Fn(&str, Option<&str>) -> PathMaintenance + Send + Sync>;

/// All devices of a process.
pub struct Registry {
    cores: Arc<dyn Cores>,
    core_count: usize,
    outside: Box<dyn DeviceOpener>,
    state: Mutex<State>,
    opening: NameLocks,
    deferred: Arc<DeferredRemovals>,
    feed: Arc<EventStream>,
    linking: Mutex<()>,
    exporter: OnceLock<Exporter>,
    upkeep: OnceLock<MaintenancePolicy>,
    requests: OnceLock<RequestQueueParams>,
    state_folder: OnceLock<Arc<StateFolder>>,
    lost_snapshots: OnceLock<LostSnapshots>,
    /// Devices are being made together: one may come with a snapshot that another waits for.
    pub(crate) is_starting: AtomicBool,
    is_ending: AtomicBool,
    /// Merges that go on and are to be seen to their end.
    pub(crate) merges: ResumedMerges,
    /// Changes that are about one store go one after the other.
    pub(crate) store_locks: StoreLocks,
    /// Itself.
    pub(crate) me: Weak<Registry>,
    config: OnceLock<Config>,
}

#[derive(Default)]
struct State {
    opened: OpenedDevices,
    directory: DeviceDirectory,
}

impl Registry {
    /// An empty registry for the `core_count` cores behind `cores`.
    pub fn new(cores: Arc<dyn Cores>, core_count: usize) -> Arc<Registry> {
        Registry::over(cores, core_count, Box::new(Backends::new(core_count)))
    }

    /// As [`Registry::new`], over another outside.
    pub fn over(cores: Arc<dyn Cores>, core_count: usize, outside: Box<dyn DeviceOpener>) -> Arc<Registry> {
        let deferred = Arc::new(DeferredRemovals::default());
        let feed = Arc::new(EventStream::default());
        let directory = DeviceDirectory::new(&deferred, &feed);
        Arc::new_cyclic(|me| Registry {
            cores,
            core_count,
            outside,
            state: Mutex::new(State { directory, ..State::default() }),
            deferred,
            feed,
            opening: NameLocks::default(),
            linking: Mutex::default(),
            exporter: OnceLock::new(),
            upkeep: OnceLock::new(),
            requests: OnceLock::new(),
            state_folder: OnceLock::new(),
            lost_snapshots: OnceLock::new(),
            is_starting: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            merges: ResumedMerges::default(),
            store_locks: StoreLocks::default(),
            me: Weak::clone(me),
            config: OnceLock::new(),
        })
    }

    /// Has devices exported from now on. Once; later calls change nothing.
    pub fn set_exporter(&self, exporter: Exporter) {
        let deferred = Arc::clone(&self.deferred);
        exporter.on_closed(Arc::new(move || deferred.closed()));
        let _ = self.exporter.set(exporter);
    }

    /// Says what is done for the devices that are made from now on besides their requests, by name
    /// and uuid. Once; later calls change nothing.
    pub fn set_maintenance(&self, upkeep: MaintenancePolicy) {
        let _ = self.upkeep.set(upkeep);
    }

    /// Says which queues request-based devices have that are made from now on, where it is not said
    /// of them. Once; later calls change nothing.
    pub fn set_request_queues(&self, requests: RequestQueueParams) {
        let _ = self.requests.set(requests);
    }

    /// What makes the queue of a device of which `own` is said.
    pub(crate) fn queue_by(&self, own: RequestQueueParams) -> Option<QueueFactory> {
        own.or(self.requests.get().copied().unwrap_or_default()).queue_by(self.core_count)
    }

    /// What is done for a device of this name and uuid.
    fn upkeep(&self, name: &str, uuid: Option<&str>) -> PathMaintenance {
        self.upkeep.get().map_or_else(PathMaintenance::default, |of| of(name, uuid))
    }

    /// Says where is kept what outlives the program. Once; later calls change nothing.
    pub fn set_state_folder(&self, folder: Arc<StateFolder>) {
        let _ = self.state_folder.set(folder);
    }

    /// Says where the file is that wants devices. Once; later calls change nothing.
    pub fn set_config_reader(&self, read: ConfigReader) {
        let _ = self.config.set(Config::new(read));
    }

    /// The file that wants devices, where there is one.
    pub(crate) fn config(&self) -> Option<&Config> {
        self.config.get()
    }

    /// The next merge that goes on with this server and that another one began. For one caller at a
    /// time, who sees to its end.
    pub async fn next_merge(&self) -> PendingMerge {
        self.merges.next().await
    }

    /// Where is kept what outlives the program, where something is.
    pub(crate) fn state_folder(&self) -> Option<&Arc<StateFolder>> {
        self.state_folder.get()
    }

    /// Says what becomes of a disk whose snapshots can't be attached. Once; later calls change
    /// nothing.
    pub fn set_lost_snapshots(&self, how: LostSnapshots) {
        let _ = self.lost_snapshots.set(how);
    }

    /// What becomes of a disk whose snapshots can't be attached.
    #[must_use]
    pub fn lost_snapshots(&self) -> LostSnapshots {
        self.lost_snapshots.get().copied().unwrap_or_default()
    }

    /// Says whether devices are being made together: a snapshot that one of them waits for is given
    /// up when none is left that may bring it.
    pub fn start(&self, together: bool) {
        self.is_starting.store(together, Ordering::Relaxed);
    }

    /// The server ends, and has no clients any more: snapshots stay attached until
    /// [`StateFolder::detach_all`].
    pub fn end(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
    }

    /// True when the server ends.
    pub(crate) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    /// How the disk of `device` is known again, by another server too; `None` for what is gone with
    /// the program. May block.
    pub(crate) fn disk_id(&self, device: &DeviceRef) -> Option<StoreId> {
        let number = device.number;
        if number.major == MAPPED_MAJOR {
            return self.disk_id_cached(number);
        }
        let identity = self.state().opened.identity(number.minor)?;
        StoreId::opened(&self.uri_of(number), identity)
    }

    /// As [`Registry::disk_id`], as far as it is known without asking the file system.
    pub(crate) fn disk_id_cached(&self, number: DevNo) -> Option<StoreId> {
        match number.major {
            MAPPED_MAJOR => Some(StoreId::mapped(&self.name_of(number)?)),
            _ => {
                let identity = self.state().opened.identity(number.minor)?;
                StoreId::seen(&self.uri_of(number), identity)
            }
        }
    }

    /// Says that a store is going to be made; `None` where nothing outlives the program.
    pub(crate) fn making(&self, store: &Path) -> Option<StoreCreation> {
        self.state_folder.get()?.making(store)
    }

    /// Where marks of a store on this device are kept.
    fn mark(&self, device: &DeviceRef) -> Option<Arc<dyn InvalidStoreMark>> {
        let folder = self.state_folder.get()?;
        let store = match device.number.major {
            MAPPED_MAJOR => {
                let state = self.state();
                let mapped = state.directory.numbered(device.number.minor).ok()?;
                MarkedStore::Mapped(mapped.device.name_handle())
            }
            _ => {
                let identity = self.state().opened.identity(device.number.minor)?;
                MarkedStore::Disk(StoreId::opened(&device.name, identity)?)
            }
        };
        Some(folder.mark(store))
    }

    /// What exports devices, when something does.
    #[must_use]
    pub fn exporter(&self) -> Option<&Exporter> {
        self.exporter.get()
    }

    /// Everything that clients can connect to.
    #[must_use]
    pub fn exports(&self) -> Vec<api::Export> {
        self.exporter().map(Exporter::list).unwrap_or_default()
    }

    /// Listens to the changes of state of all devices, from now on or from behind change `after`
    /// on. Their numbers are greater than `base`, which is the same each time.
    pub(crate) fn listen(&self, base: u64, after: Option<u64>) -> EventSubscription {
        self.feed.listen(base, after)
    }

    /// The cores that commands go to.
    #[must_use]
    pub fn cores(&self) -> &dyn Cores {
        &*self.cores
    }

    /// The outside.
    pub(crate) fn outside(&self) -> &dyn DeviceOpener {
        &*self.outside
    }

    /// How many cores there are.
    #[must_use]
    pub fn core_count(&self) -> usize {
        self.core_count
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held while a table is put into a slot, and where a removal begins: checks of what lies on
    /// what stay true until the table is there.
    pub(crate) fn linking(&self) -> MutexGuard<'_, ()> {
        self.linking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the mapped device of a number is called; `None` for all other numbers.
    #[must_use]
    pub(crate) fn name_of(&self, number: DevNo) -> Option<String> {
        let state = self.state();
        let minor = (number.major == MAPPED_MAJOR).then_some(number.minor)?;
        state.directory.numbered(minor).ok().map(|mapped| mapped.device.name())
    }

    /// What a number that stands in a table means: a URI, or `@` and a name. Empty when it means
    /// nothing.
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

    /// A mapped device that a table or a message names, when `uri` names one. A table holds it.
    fn mapped(
        &self,
        uri: &DeviceUri,
        holds: Option<&mut DeviceUses>,
    ) -> Option<Result<DeviceRef, LookupError>> {
        let state = self.state();
        let (found, errno) = match uri {
            DeviceUri::Mapped(name) => (state.directory.named(name), ENOENT),
            DeviceUri::Number { major: MAPPED_MAJOR, minor } => (state.directory.numbered(*minor), ENXIO),
            _ => return None,
        };
        let found = found.map_err(|absent| match absent.reason() {
            None => lookup(errno, format!("there is no device {uri}")),
            Some(reason) => lookup(EBUSY, format!("{uri}: {reason}")),
        });
        Some(found.map(|mapped| {
            let hold = || -> Arc<dyn Any + Send + Sync> { Arc::new(DeviceUse::new(mapped)) };
            DeviceRef {
                number: mapped.device.number(),
                name: mapped.device.name(),
                device: Arc::clone(&mapped.device) as Arc<dyn Device>,
                // One for the whole table, however often it names the device.
                hold: holds.map(|holds| Arc::clone(holds.entry(mapped.device.id()).or_insert_with(hold))),
            }
        }))
    }
}

/// What a table holds of mapped devices.
type DeviceUses = HashMap<DeviceId, Arc<dyn Any + Send + Sync>>;
