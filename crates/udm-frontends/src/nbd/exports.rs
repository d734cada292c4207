//! What is served: devices by name.
//!
//! The list is read when a client names an export or asks for all of them, and never on the data
//! path.

use super::io_counters::{CoreIoCounters, DeviceIoCounters, DeviceIoReport};
use super::range_locks::RangeLocks;
use super::request::BlockSize;
use crossbeam_utils::CachePadded;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use udm_core::{CoreId, Device, DeviceId, Limits, SECTOR_SIZE, Sectors};
use udm_runtime::CoreSet;
use udm_wire::nbd::{BlockSizes, ExportFlags, PAYLOAD_MAX, PAYLOAD_MAX_DEFAULT, STRING_MAX};

/// What is called when a connection has let go of an export.
type ClosedHook = Arc<OnceLock<Arc<dyn Fn() + Send + Sync>>>;

/// A device under a name.
pub struct Export {
    /// Changed under the lock of the list alone.
    name: Mutex<Arc<str>>,
    description: String,
    read_only: bool,
    device: Arc<dyn Device>,
    users: AtomicUsize,
    /// How many have its requests fail.
    failing: AtomicUsize,
    /// That of the list that it is on.
    closed: ClosedHook,
    /// Of its device, shared with its other exports.
    exported_device: Arc<ExportedDevice>,
}

/// What all exports of a device have in common.
struct ExportedDevice {
    range_locks: Arc<RangeLocks>,
    served: DeviceIoCounters,
}

impl Export {
    /// `device` under `name`; `description` is for people and may be empty. With `read_only` writes
    /// fail with EPERM whatever the device would say.
    ///
    /// # Errors
    /// A name or description that the protocol can't carry.
    pub fn new(
        name: impl Into<String>,
        description: impl Into<String>,
        read_only: bool,
        device: Arc<dyn Device>,
    ) -> Result<Export, ExportError> {
        let (name, description) = (name.into(), description.into());
        check_text(&name, &name)?;
        check_text(&description, &name)?;
        let range_locks = Arc::new(RangeLocks::new());
        let exported_device = Arc::new(ExportedDevice { range_locks, served: DeviceIoCounters::default() });
        Ok(Export {
            name: Mutex::new(name.into()),
            description,
            read_only,
            device,
            users: AtomicUsize::new(0),
            failing: AtomicUsize::new(0),
            closed: ClosedHook::default(),
            exported_device,
        })
    }

    /// Its name, as of now.
    #[must_use]
    pub fn name(&self) -> Arc<str> {
        Arc::clone(&self.named())
    }

    fn named(&self) -> MutexGuard<'_, Arc<str>> {
        self.name.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its description; may be empty.
    #[must_use]
    pub fn description(&self) -> &str {
        &self.description
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Connections that chose this export and are still open.
    #[must_use]
    pub fn users(&self) -> usize {
        // In one order with what whoever asks has told those who close it.
        self.users.load(Ordering::SeqCst)
    }

    /// True while its requests fail.
    pub(super) fn is_failing(&self) -> bool {
        self.failing.load(Ordering::SeqCst) > 0
    }

    /// What orders requests that change a part of a block.
    pub(super) fn range_locks(&self) -> &Arc<RangeLocks> {
        &self.exported_device.range_locks
    }

    /// What `core` has served of the device.
    pub(super) fn served_on(&self, core: CoreId) -> Arc<CachePadded<CoreIoCounters>> {
        self.exported_device.served.on(core)
    }

    /// What clients of the device have asked for and got, by whatever export, while one was on the
    /// list or in use.
    #[must_use]
    pub fn served(&self) -> DeviceIoReport {
        self.exported_device.served.report()
    }

    /// Clients may not write, whatever the device would say.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// What a client is told, as of now.
    pub(super) fn geometry(&self) -> ExportGeometry {
        ExportGeometry::new(&self.device.limits(), self.read_only)
    }
}

/// For as long as this is held, requests of an export's clients fail ([`Exports::fail`]).
pub struct FailRequestsGuard {
    export: Arc<Export>,
    cluster: Weak<CoreSet>,
}

/// Has connections look whether their requests fail.
pub(super) struct FailMessage;

impl FailRequestsGuard {
    /// Behind a change: a connection that has begun to listen sees it, or hears of it.
    fn tell(&self) {
        let Some(cluster) = self.cluster.upgrade() else { return };
        for core in 0..cluster.len() {
            cluster.send_message(CoreId(core as u16), self.export.device.id(), Box::new(FailMessage));
        }
    }
}

impl Drop for FailRequestsGuard {
    fn drop(&mut self) {
        self.export.failing.fetch_sub(1, Ordering::SeqCst);
        self.tell();
    }
}

/// A connection's hold on an export, counted once with all its clones.
#[derive(Clone)]
pub struct ExportRef(Arc<ExportUseCount>);

struct ExportUseCount(Arc<Export>);

impl std::ops::Deref for ExportRef {
    type Target = Export;
    fn deref(&self) -> &Export {
        &self.0.0
    }
}

impl Drop for ExportUseCount {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::SeqCst);
        if let Some(hook) = self.0.closed.get() {
            hook();
        }
    }
}

/// Size, block sizes and abilities of an export, as a client is told them. They hold for the
/// connection: NBD has no way to change them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExportGeometry {
    /// Size in bytes, whole blocks of the device.
    pub(super) size: u64,
    /// Blocks of the device; a client may ask for less.
    pub(super) block: BlockSize,
    /// Smallest, preferred, largest.
    pub(super) blocks: BlockSizes,
    /// Without `SEND_DF`, which depends on what the client asked for.
    pub(super) flags: ExportFlags,
    /// The longest read or write in bytes that the device takes at once; whole blocks.
    pub(super) data_max: u32,
    /// The longest discard in bytes that the device takes at once; whole blocks.
    pub(super) discard_max: u32,
    /// The same of a write-zeroes.
    pub(super) zeroes_max: u32,
}

impl ExportGeometry {
    fn new(limits: &Limits, read_only: bool) -> ExportGeometry {
        let block = limits.logical_block;
        // The protocol wants a power of two; the device's optimum may be a stripe of any width.
        let optimum = limits.io_opt.max(limits.io_min).clamp(1, PAYLOAD_MAX_DEFAULT);
        let preferred = (1 << optimum.ilog2()).max(block).max(4096);
        let blocks = BlockSizes { minimum: 1, preferred, maximum: PAYLOAD_MAX };
        // One device behind all connections, so a flush on one covers all. Zeroes never travel as
        // data, so they are never slower than a write; where the device can't, FAST_ZERO is refused
        // and the rest is written out.
        let mut flags = ExportFlags::HAS_FLAGS
            | ExportFlags::SEND_FLUSH
            | ExportFlags::SEND_FUA
            | ExportFlags::CAN_MULTI_CONN
            | ExportFlags::SEND_CACHE
            | ExportFlags::SEND_WRITE_ZEROES
            | ExportFlags::SEND_FAST_ZERO;
        if limits.max_discard.0 > 0 {
            flags |= ExportFlags::SEND_TRIM;
        }
        if read_only || limits.read_only {
            flags |= ExportFlags::READ_ONLY;
        }
        let size = limits.size.bytes();
        ExportGeometry {
            size: size - size % u64::from(block),
            block: BlockSize { size: block },
            blocks,
            flags,
            data_max: range_max(limits.max_sectors, block),
            discard_max: range_max(limits.max_discard, block),
            zeroes_max: range_max(limits.max_write_zeroes, block),
        }
    }
}

/// `max` in bytes, cut to whole blocks and to what a request can ask for. A device that can't is
/// asked for all at once, and says so.
fn range_max(max: Sectors, block: u32) -> u32 {
    let bytes = if max == Sectors::ZERO { u64::MAX } else { max.0.saturating_mul(SECTOR_SIZE) };
    let bytes = bytes.min(u64::from(u32::MAX)) as u32;
    (bytes - bytes % block).max(block)
}

/// Why an export could not be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    /// A text that the protocol can't carry.
    #[error("export {0:?}: a name or description has at most 4096 bytes and no NUL")]
    Text(String),
    /// The name is taken.
    #[error("export {0:?} exists already")]
    Exists(String),
}

/// Checks that the protocol can carry `text`, of the export `name`.
fn check_text(text: &str, name: &str) -> Result<(), ExportError> {
    if text.len() <= STRING_MAX && !text.contains('\0') {
        return Ok(());
    }
    Err(ExportError::Text(name.chars().take(64).collect()))
}

/// Exports in the order in which they came, and by name: of ten thousand as of one.
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

    /// Its place, where it is on the list.
    fn place(&self, export: &Arc<Export>) -> Option<u64> {
        let place = *self.places.get(&export.name())?;
        Arc::ptr_eq(&self.ordered[&place], export).then_some(place)
    }

    fn check_free(&self, name: &str) -> Result<(), ExportError> {
        match self.places.contains_key(name) {
            true => Err(ExportError::Exists(name.into())),
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

    /// The one called `name`; the first for the empty name, unless there is one of that name.
    fn find(&self, name: &str) -> Option<&Arc<Export>> {
        self.get(name).or_else(|| self.ordered.values().next().filter(|_| name.is_empty()))
    }
}

/// The exports of a server, in order. The first one is what a client gets that names none.
#[derive(Default)]
pub struct Exports {
    list: Mutex<ExportTable>,
    /// Of each device that is or was exported, while somebody uses them.
    exported_devices: Mutex<HashMap<DeviceId, Weak<ExportedDevice>>>,
    closed: ClosedHook,
    /// Where those who serve them are.
    cluster: OnceLock<Weak<CoreSet>>,
}

impl Exports {
    /// No exports.
    #[must_use]
    pub fn new() -> Exports {
        Exports::default()
    }

    /// They are served on the cores of `core_set`. Once; later calls change nothing.
    pub(super) fn served_on(&self, cluster: &Arc<CoreSet>) {
        let _ = self.cluster.set(Arc::downgrade(cluster));
    }

    /// Has all requests of clients of `export` fail with EIO, for as long as what is returned is
    /// held: those that come, and those under way at once. What its device has of the latter it
    /// keeps, with their memory, until it is done with it; a write may happen all the same.
    #[must_use = "requests fail while it is held"]
    pub fn fail(&self, export: &Arc<Export>) -> FailRequestsGuard {
        export.failing.fetch_add(1, Ordering::SeqCst);
        let cluster = self.cluster.get().cloned().unwrap_or_default();
        let failing = FailRequestsGuard { export: Arc::clone(export), cluster };
        failing.tell();
        failing
    }

    fn list(&self) -> MutexGuard<'_, ExportTable> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has `hook` called when a connection has let go of an export, on whatever core: it should do
    /// no more than wake another. Once; later calls change nothing.
    pub fn on_closed(&self, hook: Arc<dyn Fn() + Send + Sync>) {
        let _ = self.closed.set(hook);
    }

    /// Adds an export at the end.
    ///
    /// # Errors
    /// When the name is taken.
    pub fn add(&self, mut export: Export) -> Result<Arc<Export>, ExportError> {
        let mut list = self.list();
        list.check_free(&export.name())?;
        self.share(&mut export);
        export.closed = Arc::clone(&self.closed);
        let export = Arc::new(export);
        list.push(export.clone());
        Ok(export)
    }

    /// Puts `export`, which was added before, on the list under `name`: at its place if it is on
    /// it, at the end if it was taken off. Its clients stay, and notice nothing.
    ///
    /// # Errors
    /// When the name is taken, or the protocol can't carry it.
    pub fn put(&self, export: &Arc<Export>, name: &str) -> Result<(), ExportError> {
        check_text(name, name)?;
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
        Ok(())
    }

    /// All exports of a device have the same, those included that were taken off the list and are
    /// still in use.
    fn share(&self, export: &mut Export) {
        let mut all = self.exported_devices.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() == all.capacity() {
            // Not each time: there may be thousands.
            all.retain(|_, shared| shared.strong_count() > 0);
        }
        let device = export.device.id();
        match all.get(&device).and_then(Weak::upgrade) {
            Some(shared) => export.exported_device = shared,
            None => drop(all.insert(device, Arc::downgrade(&export.exported_device))),
        }
    }

    /// Takes an export off the list. Connections that use it go on: see [`Export::users`].
    pub fn remove(&self, export: &Arc<Export>) {
        self.list().remove(export);
    }

    /// As [`Exports::get`], for a connection that is to use it: counted while the list is locked,
    /// so that whoever takes an export off the list knows by its users whether anybody can still
    /// come.
    #[must_use]
    pub fn hold(&self, name: &str) -> Option<ExportRef> {
        let list = self.list();
        let export = list.find(name)?;
        export.users.fetch_add(1, Ordering::Relaxed);
        Some(ExportRef(Arc::new(ExportUseCount(Arc::clone(export)))))
    }

    /// The export `name`; the first one for the empty name, unless there is one of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Arc<Export>> {
        self.list().find(name).cloned()
    }

    /// All exports, in order.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Export>> {
        self.list().ordered.values().cloned().collect()
    }

    /// Up to `count` exports, in order, from place `from` on; with the place behind them, if there
    /// may be more there.
    pub(super) fn some(&self, from: u64, count: usize) -> (Vec<Arc<Export>>, Option<u64>) {
        let list = self.list();
        let some: Vec<_> = list.ordered.range(from..).take(count).collect();
        let next = some.last().filter(|_| some.len() == count).map(|(place, _)| *place + 1);
        (some.into_iter().map(|(_, export)| Arc::clone(export)).collect(), next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits::new(Sectors(1000))
    }

    #[test]
    fn block_sizes_keep_the_rules_of_the_protocol() {
        for logical_block in [512, 4096, 65536] {
            for (io_min, io_opt) in [(512, 0), (4096, 3 << 16), (512, 1 << 30), (0, 0), (1 << 20, u32::MAX)] {
                let g = ExportGeometry::new(&Limits { logical_block, io_min, io_opt, ..limits() }, false);
                assert!(g.blocks.is_valid(), "{:?}", g.blocks);
                assert_eq!((g.blocks.minimum, g.size % u64::from(logical_block)), (1, 0));
                assert!(g.blocks.preferred >= logical_block);
            }
        }
        let g = ExportGeometry::new(&Limits { io_opt: 3 << 16, ..limits() }, false);
        assert_eq!(g.blocks.preferred, 2 << 16, "the power of two that the optimum holds");
    }

    #[test]
    fn ranges_are_whole_blocks() {
        for (max, block, expected) in [
            (8, 4096, 4096),
            (9, 4096, 4096),
            (1, 4096, 4096),
            (2049, 512, 2049 * 512),
            (0, 512, u32::MAX - 511),
            (u64::MAX, 65536, u32::MAX - 65535),
        ] {
            assert_eq!(range_max(Sectors(max), block), expected, "{max} sectors, blocks of {block}");
        }
    }

    #[test]
    fn abilities_follow_the_limits() {
        let g = ExportGeometry::new(&Limits { max_discard: Sectors(0), ..limits() }, false);
        assert!(!g.flags.intersects(ExportFlags::SEND_TRIM | ExportFlags::READ_ONLY));
        assert!(ExportGeometry::new(&limits(), true).flags.contains(ExportFlags::READ_ONLY));
        let g = ExportGeometry::new(&Limits { read_only: true, ..limits() }, false);
        assert!(g.flags.contains(ExportFlags::READ_ONLY));
    }
}
