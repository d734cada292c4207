//! The state of a mirror that its cores share.

use super::args::{MirrorLeg, MirrorTableArgs};
use super::log::MirrorLog;
use super::write_locks::WriteLocks;
use crate::clone::args::DiskIdentity;
use crate::clone::engine::{CopyMemory, DESTINATION, HydrationEngine, SOURCE};
use crate::clone::regions::RegionMap;
use crate::clone::state::CloneState;
use crate::snapshot::raw_device;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use udm_core::errno::EBUSY;
use udm_core::{Cx, Device, DeviceControlError, Lane, Sector, Sectors, Status};
use udm_dm::TargetError;
use udm_dm::target::MirrorPhase;
use udm_wire::clone_metadata::WORDS_PER_BLOCK;

/// The device of the log, beside [`SOURCE`] and [`DESTINATION`].
pub(super) const LOG: usize = 2;

/// Values of the phase.
const MIRRORING: u8 = 0;
const SWITCHING: u8 = 1;
const DEGRADED: u8 = 2;

/// A write that failed on one device.
#[derive(Clone, Copy)]
pub(super) struct WriteFailure {
    /// The device, by its number.
    pub device: usize,
    pub status: Status,
}

/// The shared state of a mirror.
pub(super) struct MirrorState {
    /// The source and the destination.
    pub legs: [MirrorLeg; 2],
    /// The regions and their copies.
    pub copies: Arc<CloneState>,
    /// The order of writes of one place.
    pub locks: WriteLocks,
    /// A mirror begins with `MIRRORING`. It is either degraded, for ever, or it is switched: a
    /// single value decides, so a write that was acknowledged without the destination and a switch
    /// exclude each other.
    phase: AtomicU8,
    /// The failure after which the devices may differ.
    failure: Mutex<Option<WriteFailure>>,
    /// The write-intent log.
    pub log: Option<Arc<MirrorLog>>,
    /// Writes fail if the log has failed; otherwise they wait.
    keep_log: bool,
}

impl MirrorState {
    /// A mirror of these devices. `len` is the length of the target.
    pub(super) fn new(line: &MirrorTableArgs, len: Sectors, log: Option<Arc<MirrorLog>>) -> MirrorState {
        let map = RegionMap::new(len, line.region);
        if line.nosync && log.is_none() {
            map.set_all();
        }
        let [source, destination] = &line.legs;
        let copies = CloneState::without_metadata(
            DiskIdentity::of(&destination.device),
            DiskIdentity::of(&source.device),
            map,
        );
        MirrorState {
            legs: line.legs.clone(),
            copies: Arc::new(copies),
            locks: WriteLocks::new(),
            phase: AtomicU8::new(MIRRORING),
            failure: Mutex::default(),
            keep_log: line.features.iter().any(|word| word == "keep_log"),
            log,
        }
    }

    /// The table becomes live: the regions that are clean in the log are copied. Nothing is in
    /// flight, and nothing else uses the map yet.
    pub(super) fn begin(&self) {
        let Some(log) = &self.log else { return };
        log.begin();
        for (block, words) in log.clean_words().chunks(WORDS_PER_BLOCK).enumerate() {
            self.copies.map.load(block as u64, words);
        }
    }

    /// True if a write of these regions may go to the devices, as far as the log is concerned.
    #[inline(always)]
    pub(super) fn is_permitted(&self, regions: Range<u64>) -> bool {
        self.log.as_ref().is_none_or(|log| log.permits(regions))
    }

    /// True if a write that waits for the log fails instead.
    pub(super) fn fails_without_log(&self) -> bool {
        self.keep_log && self.log.as_ref().is_some_and(|log| log.has_failed())
    }

    /// True while the log is being written.
    pub(super) fn is_log_busy(&self) -> bool {
        self.log.as_ref().is_some_and(|log| log.is_writing())
    }

    /// The log failed for the first time.
    pub(super) fn report_log_failure(&self, status: Status) {
        let (name, log) = (self.copies.name(), self.log.as_ref().map(|log| log.device.name.as_str()));
        let log = log.unwrap_or_default();
        let then = if self.keep_log { "fail" } else { "wait" };
        tracing::error!("{name}: the log {log} failed ({}): writes of clean regions {then}", status.text());
        self.copies.event();
        self.copies.wait_queue.wake_up();
    }

    /// Nobody continues from the log: writes no longer need it.
    pub(super) fn abandon_log(&self) {
        if let Some(log) = &self.log {
            log.abandon();
            self.copies.wait_queue.wake_up();
        }
    }

    /// The devices from their first sector of the mirror on, and the log's.
    pub(super) fn raw(&self) -> Vec<Arc<dyn Device>> {
        let log = self.log.iter().map(|log| raw_device::raw_device(&log.device, Sector(0)));
        self.raw_legs().into_iter().chain(log).collect()
    }

    /// The source and the destination from their first sector of the mirror on.
    pub(super) fn raw_legs(&self) -> Vec<Arc<dyn Device>> {
        self.legs.iter().map(|leg| raw_device::raw_device(&leg.device, leg.start)).collect()
    }

    /// Opens a lane of each device.
    ///
    /// # Errors
    /// If one cannot be opened on this core.
    pub(super) fn open(&self, cx: &mut Cx<'_>) -> Result<Vec<Box<dyn Lane>>, DeviceControlError> {
        let legs = self.legs.iter().map(|leg| (&leg.device, leg.start));
        let all = legs.chain(self.log.iter().map(|log| (&log.device, Sector(0))));
        all.map(|(device, start)| raw_device::open_lane_at(device, start, cx)).collect()
    }

    /// An engine over these devices.
    pub(super) fn engine(&self, memory: CopyMemory) -> HydrationEngine {
        let limits = self.legs.each_ref().map(|leg| leg.device.device.limits());
        let engine = HydrationEngine::new(Arc::clone(&self.copies), limits.each_ref(), memory);
        engine.keep_holes(&limits[DESTINATION])
    }

    /// True if nothing is sent to the destination any more.
    #[inline(always)]
    pub(super) fn is_degraded(&self) -> bool {
        self.phase.load(Ordering::SeqCst) == DEGRADED
    }

    /// True if a write needs both devices.
    pub(super) fn is_switching(&self) -> bool {
        self.phase.load(Ordering::SeqCst) == SWITCHING
    }

    /// The phase, for people.
    pub(super) fn phase(&self) -> MirrorPhase {
        match self.phase.load(Ordering::SeqCst) {
            SWITCHING => MirrorPhase::Switching,
            DEGRADED => MirrorPhase::Degraded,
            _ if self.copies.map.is_complete() => MirrorPhase::InSync,
            _ => MirrorPhase::Copying,
        }
    }

    /// The destination failed a request of copied data. Returns true if the mirror is degraded now,
    /// so the request has succeeded all the same; false during a switch.
    pub(super) fn fail_destination(&self, status: Status) -> bool {
        self.fail(WriteFailure { device: DESTINATION, status })
    }

    /// The source failed a write of copied data, and its client has the error. Whether the source
    /// has the data is not known, and the destination has not. So the region must be copied again.
    pub(super) fn fail_source(&self, status: Status) {
        self.fail(WriteFailure { device: SOURCE, status });
    }

    fn fail(&self, failure: WriteFailure) -> bool {
        let degraded =
            self.phase.compare_exchange(MIRRORING, DEGRADED, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        // Before the status of the request: who takes a switch back later sees it.
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
        if degraded {
            self.copies.stop_copies();
            let name = self.copies.name();
            let (device, status) = (&self.legs[failure.device].device.name, failure.status.text());
            tracing::warn!("{name}: {device} failed ({status}): writes go to the source alone");
            self.copies.event();
        }
        degraded || self.is_degraded()
    }

    /// The failure after which the devices may differ.
    pub(super) fn failure(&self) -> Option<WriteFailure> {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on a write needs both devices.
    ///
    /// # Errors
    /// EBUSY if regions are left, or if the mirror is degraded.
    pub(super) fn begin_switch(&self) -> Result<(), TargetError> {
        if !self.copies.map.is_complete() {
            return Err(TargetError::errno(EBUSY).because("not all regions are copied"));
        }
        match self.phase.compare_exchange(MIRRORING, SWITCHING, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) | Err(SWITCHING) => Ok(()),
            Err(_) => Err(TargetError::errno(EBUSY).because("the destination has failed")),
        }
    }

    /// Takes [`MirrorState::begin_switch`] back: the source stays. If a write failed on the
    /// destination meanwhile, the devices may differ there, so the mirror is degraded.
    pub(super) fn cancel_switch(&self) {
        let _ = self.phase.compare_exchange(SWITCHING, MIRRORING, Ordering::SeqCst, Ordering::SeqCst);
        // A failure is set before its request learns the phase, so none is missed.
        if self.failure().is_some() {
            self.phase.store(DEGRADED, Ordering::SeqCst);
            self.copies.stop_copies();
        }
    }
}
