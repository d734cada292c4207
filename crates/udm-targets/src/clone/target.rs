//! The `clone` target: the control half.

use super::args::{CloneTableArgs, parse_clone_table_args};
use super::engine::{CopyMemory, DESTINATION, HydrationEngine, METADATA, SOURCE};
use super::lane::CloneLane;
use super::load::load_clone;
use super::settings::HydrationSettings;
use super::state::{CloneState, MetadataMode};
use super::task::HydrationTask;
use crate::snapshot::raw_device;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use udm_core::{
    BioTaskFactory, ClaimSharingPolicy, Cx, Device, DeviceControlError, Extents, Lane, Limits, SECTOR_SIZE,
    Sector, Sectors,
};
use udm_dm::target::{
    CloneHydrationState, CloneReport, CloneTargetQueries, DeviceNameResolver, DeviceRange, LowerLimits,
    ResolvedDevice, Target, TargetArgs, TargetFeatures, TargetHostServices,
};
use udm_dm::{TargetError, WholeDeviceLane};
use udm_wire::clone_metadata::BLOCK_LEN;

const NAME: &str = "clone";

/// Sectors of a block of metadata, the first number of `status`.
const METADATA_BLOCK: u64 = BLOCK_LEN as u64 / SECTOR_SIZE;

/// The longest discard if discards are not passed down (kernel: `UINT_MAX` bytes, in sectors).
const DISCARD_MAX: u64 = u32::MAX as u64 / SECTOR_SIZE;

/// The devices of a table, in the order of the engine's numbers.
pub(super) struct CloneDevices {
    pub source: ResolvedDevice,
    pub destination: ResolvedDevice,
    pub metadata: ResolvedDevice,
}

impl CloneDevices {
    /// The devices, with requests cut and flushed as each needs it.
    pub(super) fn raw(&self) -> Vec<Arc<dyn Device>> {
        const _: () = assert!(SOURCE == 0 && DESTINATION == 1 && METADATA == 2);
        let raw = |device| raw_device::raw_device(device, Sector(0));
        [&self.source, &self.destination, &self.metadata].map(raw).into()
    }

    /// Opens a lane of each device.
    pub(super) fn open(&self, cx: &mut Cx<'_>) -> Result<[Box<WholeDeviceLane>; 3], DeviceControlError> {
        let mut open = |device| raw_device::open_whole_device_lane(device, Sector(0), cx);
        Ok([open(&self.source)?, open(&self.destination)?, open(&self.metadata)?])
    }

    /// An engine over these devices.
    pub(super) fn engine(&self, state: &Arc<CloneState>, memory: CopyMemory) -> HydrationEngine {
        let limits = [&self.source, &self.destination].map(|device| device.device.limits());
        HydrationEngine::new(Arc::clone(state), limits.each_ref(), memory)
    }
}

/// The control half of a table.
struct CloneTarget {
    devices: Arc<CloneDevices>,
    state: Arc<CloneState>,
    settings: Arc<HydrationSettings>,
    /// The words of the table from the region size on.
    words: Vec<String>,
    /// The table wants discards to be passed down.
    wants_passdown: bool,
    /// Discards are passed down: the table wants it, and the destination takes whole regions. As of
    /// the last call of `limits`.
    passdown: Arc<AtomicBool>,
    /// The table has been resumed.
    was_live: AtomicBool,
}

/// Creates a clone target.
///
/// # Errors
/// The kernel's, in its order. `Failed to load metadata` is followed by the reason.
pub fn create_clone_target(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    let line = parse_clone_table_args(args)?;
    let state = load_clone(&line, args.len, args.io)?;
    let CloneTableArgs { metadata, destination, source, discard_passdown, words, .. } = line;
    Ok(Arc::new(CloneTarget {
        devices: Arc::new(CloneDevices { source, destination, metadata }),
        state,
        settings: Arc::new(HydrationSettings::new(line.hydration, line.hydrate_first)),
        words,
        wants_passdown: discard_passdown,
        passdown: Arc::new(AtomicBool::new(discard_passdown)),
        was_live: AtomicBool::new(false),
    }))
}

impl CloneTarget {
    /// Decides whether discards are passed down, as the kernel does when it computes limits.
    fn decide_passdown(&self, destination: &Limits) -> bool {
        let reason = match destination.max_discard {
            Sectors::ZERO => Some("discard unsupported"),
            most if most < self.state.map.region() => Some("max discard sectors smaller than a region"),
            _ => None,
        };
        let passes = self.wants_passdown && reason.is_none();
        // Relaxed: lanes are opened afterwards, by a message or under the same lock as the limits.
        let before = self.passdown.swap(passes, Ordering::Relaxed);
        if let (true, Some(reason)) = (before && self.wants_passdown, reason) {
            let name = self.devices.destination.current_name();
            tracing::warn!("Destination device ({name}) {reason}: Disabling discard passdown.");
        }
        passes
    }
}

impl CloneTargetQueries for CloneTarget {
    fn report(&self) -> CloneReport {
        let CloneDevices { source, destination, metadata } = &*self.devices;
        let map = &self.state.map;
        let state = match self.state.mode() {
            MetadataMode::Fail => CloneHydrationState::Fail,
            MetadataMode::ReadOnly => CloneHydrationState::ReadOnly,
            MetadataMode::ReadWrite if map.is_complete() => CloneHydrationState::Done,
            MetadataMode::ReadWrite if self.settings.values().enabled => CloneHydrationState::Hydrating,
            MetadataMode::ReadWrite => CloneHydrationState::Stopped,
        };
        let (source_errors, destination_errors) = self.state.copy_errors();
        CloneReport {
            source: source.clone(),
            destination: destination.clone(),
            metadata: metadata.clone(),
            len: map.len(),
            region: map.region(),
            regions: map.count(),
            hydrated: map.hydrated(),
            in_flight: self.state.hydrating(),
            source_errors,
            destination_errors,
            state,
        }
    }

    fn first_reads(&self) -> Vec<u64> {
        self.state.first_reads.regions()
    }
}

impl Target for CloneTarget {
    fn type_name(&self) -> &'static str {
        NAME
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let passdown = Arc::clone(&self.passdown);
        Ok(Box::new(CloneLane::open(&self.devices, &self.state, passdown, cx)?))
    }

    fn table(&self) -> String {
        let CloneDevices { source, destination, metadata } = &*self.devices;
        let words = self.words.join(" ");
        format!("{} {} {} {words}", metadata.number, destination.number, source.number)
    }

    fn status(&self) -> String {
        let mode = self.state.mode();
        if mode == MetadataMode::Fail {
            return mode.text().into();
        }
        let map = &self.state.map;
        let total = self.devices.metadata.device.limits().size.0 / METADATA_BLOCK;
        let values = self.settings.values();
        let features = [
            (!values.enabled).then_some("no_hydration "),
            (!self.passdown.load(Ordering::Relaxed)).then_some("no_discard_passdown "),
        ];
        format!(
            "{METADATA_BLOCK} {}/{total} {} {}/{} {} {} {}4 hydration_threshold {} hydration_batch_size {} {}",
            map.layout().blocks(),
            map.region(),
            map.hydrated(),
            map.count(),
            self.state.hydrating(),
            features.iter().flatten().count(),
            features.into_iter().flatten().collect::<String>(),
            values.threshold,
            values.batch,
            mode.text(),
        )
    }

    fn state_outside_table(&self) -> Option<String> {
        self.settings.are_changed().then(|| "settings of the hydration that messages have changed".into())
    }

    /// Writes, flushes and discards concern only the destination, because the source is only read.
    fn limits(&self, below: LowerLimits<'_>) -> Limits {
        let (source, destination) =
            (below.limits(&self.devices.source), below.limits(&self.devices.destination));
        let region = self.state.map.region();
        let max_discard = match self.decide_passdown(&destination) {
            true => destination.max_discard,
            false => Sectors(DISCARD_MAX - DISCARD_MAX % region.0),
        };
        let limits = Limits::new(self.state.map.len()).stack(&source).stack(&destination);
        let optimal = u64::from(limits.io_opt) / SECTOR_SIZE;
        // At most 1 GiB.
        let region_bytes = region.bytes() as u32;
        let (io_min, io_opt) = match optimal < region.0 || !optimal.is_multiple_of(region.0) {
            true => (region_bytes, region_bytes),
            false => (limits.io_min, limits.io_opt),
        };
        Limits {
            max_discard,
            max_write_zeroes: Sectors::ZERO,
            // Even without a cache below, a flush makes the metadata durable.
            write_cache: true,
            fua: true,
            read_only: destination.read_only,
            request_stackable: false,
            io_min,
            io_opt,
            ..limits
        }
    }

    fn max_io_len(&self) -> Option<Sectors> {
        Some(self.state.map.region())
    }

    fn features(&self) -> TargetFeatures {
        TargetFeatures { needs_own_lane: true, ..TargetFeatures::default() }
    }

    /// Hydrated regions are as in the destination, the others as in the source.
    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let (map, end) = (&self.state.map, from.0 + len.0);
        let mut at = from.0;
        while at < end && !out.is_full() {
            let (region, regions) = (map.region_of(at), map.region_of(end - 1) + 1);
            let (device, next) = match map.is_hydrated(region) {
                true => (&self.devices.destination, map.next_unhydrated(region, regions)),
                false => (&self.devices.source, map.next_hydrated(region, regions)),
            };
            let until = next.map_or(end, |next| map.sectors_of(next).0.min(end));
            device.device.extents(Sector(at), Sectors(until - at), out);
            at = until;
        }
    }

    fn devices(&self) -> Vec<DeviceRange> {
        let CloneDevices { source, destination, metadata } = &*self.devices;
        let len = self.state.map.len();
        let alone = Some(ClaimSharingPolicy::Device);
        let used = Sectors(self.state.map.layout().sectors());
        vec![
            DeviceRange { alone: alone.clone(), ..DeviceRange::new(metadata, Sector(0), used) },
            DeviceRange { alone, ..DeviceRange::new(destination, Sector(0), len) },
            DeviceRange::new(source, Sector(0), len),
        ]
    }

    fn as_clone(&self) -> Option<&dyn CloneTargetQueries> {
        Some(self)
    }

    fn message(&self, words: &[String], _: &mut dyn DeviceNameResolver) -> Result<String, TargetError> {
        if !self.settings.message(words) {
            let name = words.first().map_or("", String::as_str);
            let error = TargetError::new(format!("Unsupported message `{name}'")).at(0);
            return Err(error.because(
                "expected enable_hydration, disable_hydration, hydration_threshold N or hydration_batch_size N",
            ));
        }
        self.state.task_queue.wake_up();
        Ok(String::new())
    }

    fn tasks(&self) -> Vec<BioTaskFactory> {
        let (devices, state) = (Arc::clone(&self.devices), Arc::clone(&self.state));
        let settings = Arc::clone(&self.settings);
        let task = move || {
            HydrationTask::new(devices.raw(), devices.engine(&state, CopyMemory::OF_TASK), state, settings)
        };
        vec![Box::new(move || Box::new(task()))]
    }

    fn attach(&self, notify: Arc<dyn TargetHostServices>) {
        self.state.attach(notify);
    }

    fn presuspend(&self, _noflush: bool) {
        self.state.set_suspending(true);
    }

    fn resume(&self) {
        if !self.was_live.swap(true, Ordering::Relaxed) {
            self.state.reset_mode();
            self.state.set_ended(false);
        }
        self.state.set_suspending(false);
    }

    fn retired(&self) {
        self.state.set_ended(true);
    }
}
