//! The `mirror` target: the control half.

use super::args::{MirrorLeg, parse_mirror_table_args};
use super::lane::MirrorLane;
use super::log::load::load_log;
use super::log::task::LogTask;
use super::state::MirrorState;
use super::write_locks::LOCKED_MAX;
use crate::clone::engine::{CopyMemory, DESTINATION, SOURCE};
use crate::clone::settings::{HydrationSettings, HydrationValues};
use crate::clone::task::HydrationTask;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use udm_core::{
    BioTaskFactory, ClaimSharingPolicy, Cx, DeviceControlError, Extents, Lane, Limits, Sector, Sectors,
};
use udm_dm::TargetError;
use udm_dm::target::{
    DeviceRange, LowerLimits, MirrorFailure, MirrorLegReport, MirrorLogReport, MirrorReport,
    MirrorTargetQueries, Target, TargetArgs, TargetFeatures, TargetHostServices,
};
use udm_wire::boot_profile::HydrationOrder;

const NAME: &str = "mirror";

/// Bytes that are copied at a time in the background, and in one batch, as `udm clone create`
/// chooses them.
const COPY_BYTES: u64 = 4 << 20;
const BATCH_BYTES: u64 = 1 << 20;

/// The longest request of zeroes: its regions are copied before it.
const ZEROES_MAX: Sectors = Sectors((1 << 20) / udm_core::SECTOR_SIZE);

/// The control half of a table.
struct MirrorTarget {
    state: Arc<MirrorState>,
    settings: Arc<HydrationSettings>,
    /// The words of the log, and of the features.
    log_words: String,
    features: Vec<String>,
    /// The table has been resumed.
    was_live: AtomicBool,
}

/// Creates a mirror target.
///
/// # Errors
/// The kernel's, in its order.
pub fn create_mirror_target(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    let line = parse_mirror_table_args(args)?;
    let log = line.log.as_ref().map(|log| load_log(&line, log, args.len, args.io)).transpose()?;
    let in_flight = |bytes: u64| (bytes / line.region.bytes()).max(1) as u32;
    let (threshold, batch) = (in_flight(COPY_BYTES), in_flight(BATCH_BYTES));
    Ok(Arc::new(MirrorTarget {
        state: Arc::new(MirrorState::new(&line, args.len, log)),
        settings: Arc::new(HydrationSettings::new(
            HydrationValues { enabled: true, threshold, batch },
            HydrationOrder::default(),
        )),
        log_words: line.log_words,
        features: line.features,
        was_live: AtomicBool::new(false),
    }))
}

impl MirrorTarget {
    fn leg_words(&self, words: impl Fn(&MirrorLeg) -> String) -> String {
        self.state.legs.iter().map(words).collect::<Vec<_>>().join(" ")
    }

    fn failure(&self) -> Option<MirrorFailure> {
        let copies = &self.state.copies;
        if let Some(failure) = self.state.failure() {
            let of_destination = failure.device == DESTINATION;
            return Some(MirrorFailure { of_destination, status: failure.status, sector: None });
        }
        copies.copy_failure().map(|failure| MirrorFailure {
            of_destination: failure.device == DESTINATION,
            status: failure.status,
            sector: Some(Sector(copies.map.sectors_of(failure.region).0)),
        })
    }
}

impl MirrorTargetQueries for MirrorTarget {
    fn report(&self) -> MirrorReport {
        let [source, destination] = self
            .state
            .legs
            .each_ref()
            .map(|leg| MirrorLegReport { device: leg.device.clone(), start: leg.start });
        let map = &self.state.copies.map;
        MirrorReport {
            source,
            destination,
            len: map.len(),
            region: map.region(),
            regions: map.count(),
            copied: map.hydrated(),
            phase: self.state.phase(),
            is_paused: !self.settings.values().enabled,
            failure: self.failure(),
            log: self.state.log.as_ref().map(|log| MirrorLogReport {
                device: log.device.clone(),
                dirty: log.dirty(),
                failure: log.failure().filter(|_| log.has_failed()),
            }),
        }
    }

    fn set_paused(&self, is_paused: bool) {
        let message = if is_paused { "disable_hydration" } else { "enable_hydration" };
        self.settings.message(&[message.into()]);
        self.state.copies.task_queue.wake_up();
    }

    fn begin_switch(&self) -> Result<(), TargetError> {
        self.state.begin_switch()
    }

    fn cancel_switch(&self) {
        self.state.cancel_switch();
    }

    fn abandon_log(&self) {
        self.state.abandon_log();
    }
}

impl Target for MirrorTarget {
    fn type_name(&self) -> &'static str {
        NAME
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(MirrorLane::open(&self.state, cx)?))
    }

    fn table(&self) -> String {
        let legs = self.leg_words(|leg| format!("{} {}", leg.device.number, leg.start));
        let features = match self.features.is_empty() {
            true => String::new(),
            false => format!(" {} {}", self.features.len(), self.features.join(" ")),
        };
        format!("{} 2 {legs}{features}", self.log_words)
    }

    /// The kernel's line: the devices, the copied regions, and a letter per device (`A` alive, `R`
    /// a read failed, `D` a write failed, `S` a copy failed).
    fn status(&self) -> String {
        let legs = self.leg_words(|leg| leg.device.number.to_string());
        let failure = self.failure();
        let letter = |of_destination| match failure.filter(|failure| failure.of_destination == of_destination)
        {
            None => 'A',
            Some(MirrorFailure { sector: None, .. }) => 'D',
            Some(_) if !of_destination => 'R',
            Some(_) => 'S',
        };
        let map = &self.state.copies.map;
        let (copied, count) = (map.hydrated(), map.count());
        let log = match &self.state.log {
            None => "1 core".into(),
            Some(log) => format!("3 disk {} {}", log.device.number, if log.works() { 'A' } else { 'D' }),
        };
        format!("2 {legs} {copied}/{count} 1 {}{} {log}", letter(false), letter(true))
    }

    fn state_outside_table(&self) -> Option<String> {
        let is_in_log = self.state.log.as_ref().is_some_and(|log| log.works());
        (!is_in_log).then(|| "a copy of it under way to another device".into())
    }

    /// Requests must suit both devices. Discards and zeroes depend on the source alone: what the
    /// destination cannot do is replaced or left out.
    fn limits(&self, below: LowerLimits<'_>) -> Limits {
        let legs = self.state.legs.each_ref().map(|leg| below.limits(&leg.device));
        let (source, destination) = (&legs[SOURCE], &legs[DESTINATION]);
        let limits = Limits::new(self.state.copies.map.len()).stack(source).stack(destination);
        Limits {
            max_sectors: limits.max_sectors.min(LOCKED_MAX),
            max_discard: source.max_discard.min(LOCKED_MAX),
            max_write_zeroes: Sectors(source.max_write_zeroes.0.min(ZEROES_MAX.0)),
            write_cache: source.write_cache || destination.write_cache,
            fua: true,
            read_only: source.read_only || destination.read_only,
            request_stackable: false,
            ..limits
        }
    }

    fn max_io_len(&self) -> Option<Sectors> {
        Some(self.state.copies.map.region())
    }

    fn features(&self) -> TargetFeatures {
        TargetFeatures { needs_own_lane: true, ..TargetFeatures::default() }
    }

    /// The source is complete.
    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let source = &self.state.legs[SOURCE];
        source.device.device.extents(Sector(source.start.0 + from.0), len, out);
    }

    fn devices(&self) -> Vec<DeviceRange> {
        let len = self.state.copies.map.len();
        let [source, destination] = &self.state.legs;
        let alone = || Some(ClaimSharingPolicy::Device);
        let mut devices = vec![
            DeviceRange::new(&source.device, source.start, len),
            DeviceRange { alone: alone(), ..DeviceRange::new(&destination.device, destination.start, len) },
        ];
        devices.extend(self.state.log.iter().map(|log| DeviceRange {
            alone: alone(),
            ..DeviceRange::new(&log.device, Sector(0), log.sectors())
        }));
        devices
    }

    fn as_mirror(&self) -> Option<&dyn MirrorTargetQueries> {
        Some(self)
    }

    fn tasks(&self) -> Vec<BioTaskFactory> {
        let (state, settings) = (Arc::clone(&self.state), Arc::clone(&self.settings));
        let task = move || {
            let copies = Arc::clone(&state.copies);
            HydrationTask::new(state.raw_legs(), state.engine(CopyMemory::OF_TASK), copies, settings)
        };
        let mut tasks: Vec<BioTaskFactory> = vec![Box::new(move || Box::new(task()))];
        if let Some(log) = self.state.log.clone() {
            let state = Arc::clone(&self.state);
            tasks.push(Box::new(move || Box::new(LogTask::new(&state, &log))));
        }
        tasks
    }

    fn attach(&self, notify: Arc<dyn TargetHostServices>) {
        self.state.copies.attach(notify);
    }

    fn presuspend(&self, _noflush: bool) {
        self.state.copies.set_suspending(true);
    }

    fn resume(&self) {
        if !self.was_live.swap(true, Ordering::Relaxed) {
            self.state.begin();
        }
        self.state.copies.set_suspending(false);
    }

    fn retired(&self) {
        self.state.log.iter().for_each(|log| log.end());
    }
}
