//! Suspends over a single owner: waiting requests are handed back to the lanes that submitted them.
//!
//! One lane of the device serves all cores, so a drain of it may hand back bios of any lane. A lane
//! that is drained requests a drain from the owner. While any such request exists, the owner's lane
//! drains the device before each poll. It hands back the bios of the requesting lanes, with a mark,
//! and submits the others again in the same poll. So a suspend that hangs does not delay other
//! lanes.
//!
//! ```text
//! lane:   drain: request, wake ─────────►  owner's lane, in a poll: drains the device
//!                                            own bios   ◄───────────  handed back
//!         next drain: returned in `back` ◄─  other bios ───────────►  submitted again
//!         nothing waits, or a poll without a drain: withdraw the request, wake
//! ```
//!
//! **Late bios.** Bios may be handed back after the suspend has ended. The lane is then polled
//! without a drain; it submits these bios again and withdraws its request. A lane may also be
//! polled twice after one drain. So it asks for another turn, and if the suspend continues, the
//! next drain requests again. If a suspend with flush has followed, bios that are handed back are
//! submitted again too.
//!
//! **A pause.** After bios were handed back, the lane requests no drain for 1 ms. A second single
//! owner may lie below, and the suspend may wait for something else. Without the pause, bios of
//! other lanes would then be handed back and submitted again forever.
//!
//! *Price.* An atomic load in each poll of the owner's lane. During a suspend, a short lock and two
//! messages per lane.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use udm_core::{
    Batch, Cx, Device, DeviceControlError, DeviceId, DrainMode, Lane, Limits, Nanos, OwnWork, WaitQueue,
    WaitQueueSubscription, WakeEpoch, interleave,
};

/// Pause between a drain that handed back bios and the next drain request.
const PAUSE: Nanos = Nanos::from_millis(1);

const HANDED_BACK: u64 = 1 << 31;

/// The cookie of the owner's bios: the lane, and the key of the request, below 2^31.
pub(super) fn make_owner_bio_cookie(lane: u32, key: usize) -> u64 {
    u64::from(lane) << 32 | key as u64
}

/// The key of a cookie, and whether the bio was handed back unstarted.
pub(super) fn parse_owner_bio_cookie(cookie: u64) -> (usize, bool) {
    ((cookie & (HANDED_BACK - 1)) as usize, cookie & HANDED_BACK != 0)
}

/// Drain requests of all lanes.
pub(super) struct PendingSuspendDrains {
    /// Requesting lanes with the kind of drain. Locked briefly.
    wanted: Mutex<Vec<(u32, DrainMode)>>,
    /// Woken when the requests change.
    wait_queue: Arc<WaitQueue>,
}

impl Default for PendingSuspendDrains {
    fn default() -> PendingSuspendDrains {
        PendingSuspendDrains { wanted: Mutex::default(), wait_queue: Arc::new(WaitQueue::new()) }
    }
}

impl PendingSuspendDrains {
    fn wanted(&self) -> MutexGuard<'_, Vec<(u32, DrainMode)>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn want(&self, lane: u32, how: Option<DrainMode>) {
        interleave::mark_interleave_point();
        let mut wanted = self.wanted();
        wanted.retain(|(other, _)| *other != lane);
        wanted.extend(how.map(|how| (lane, how)));
        drop(wanted);
        self.wait_queue.wake_up();
    }
}

/// The drain state of a requesting lane.
pub(super) struct RemoteLaneDrainState {
    lane: u32,
    drains: Arc<PendingSuspendDrains>,
    /// The drain that the lane requests now.
    how: Option<DrainMode>,
    /// The drain since the last poll.
    drained: Option<DrainMode>,
    /// True if the lane has requested a drain since it was last empty: bios may still be handed
    /// back.
    asked: bool,
    /// The lane requests no drain before this time.
    pause: Nanos,
}

impl RemoteLaneDrainState {
    pub fn new(lane: u32, drains: Arc<PendingSuspendDrains>) -> RemoteLaneDrainState {
        RemoteLaneDrainState { lane, drains, how: None, drained: None, asked: false, pause: Nanos(0) }
    }

    /// True if the poll must handle a drain.
    #[inline]
    pub fn has_asked(&self) -> bool {
        self.asked
    }

    /// Takes the drain since the last poll.
    pub fn take_drained(&mut self) -> Option<DrainMode> {
        self.drained.take()
    }

    /// Sets the request to `how`; returns true if it changed.
    pub fn ask(&mut self, how: Option<DrainMode>) -> bool {
        let other = self.how != how;
        if other {
            self.how = how;
            self.drains.want(self.lane, how);
        }
        other
    }

    /// Handles a drain of the lane. `came` is true if it returned bios, `empty` if no bio waits. If
    /// stacked devices cause several drains before a poll, the one without flush counts, since bios
    /// that it hands back need not fail.
    pub fn drained(&mut self, how: DrainMode, came: bool, empty: bool, cx: &mut Cx<'_>) {
        if empty {
            return self.clear_if_empty(true);
        }
        if self.drained == Some(DrainMode::NoFlush) && how == DrainMode::Flush {
            return;
        }
        (self.drained, self.asked) = (Some(how), true);
        if came {
            self.ask(None);
            self.pause = cx.now() + PAUSE;
        }
        if self.how.is_none() && cx.now() < self.pause {
            cx.wake_at(self.pause);
        } else {
            self.ask(Some(how));
        }
    }

    /// Withdraws the request if no bio waits.
    pub fn clear_if_empty(&mut self, empty: bool) {
        if empty {
            self.ask(None);
            (self.drained, self.asked) = (None, false);
        }
    }
}

/// The device that the owner task opens.
pub(super) struct DrainTaskDevice {
    device: Arc<dyn Device>,
    drains: Arc<PendingSuspendDrains>,
}

impl DrainTaskDevice {
    pub fn new(device: Arc<dyn Device>, drains: Arc<PendingSuspendDrains>) -> DrainTaskDevice {
        DrainTaskDevice { device, drains }
    }
}

impl Device for DrainTaskDevice {
    fn id(&self) -> DeviceId {
        self.device.id()
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let (below, drains) = (self.device.open(cx)?, Arc::clone(&self.drains));
        let wait_handle = drains.wait_queue.subscribe(cx);
        let (wanted, back) = (Vec::new(), Batch::new());
        Ok(Box::new(OwnerLane { below, drains, wait_handle, seen: None, wanted, back }))
    }

    fn limits(&self) -> Limits {
        self.device.limits()
    }
}

/// The lane of the owner task.
struct OwnerLane {
    below: Box<dyn Lane>,
    drains: Arc<PendingSuspendDrains>,
    wait_handle: WaitQueueSubscription,
    /// Epoch at which `wanted` was read.
    seen: Option<WakeEpoch>,
    wanted: Vec<(u32, DrainMode)>,
    /// Reused vector.
    back: Batch,
}

impl OwnerLane {
    #[cold]
    fn drain_wanted(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let now = self.wait_handle.epoch();
        if self.seen != Some(now) {
            self.seen = Some(now);
            self.wanted.clone_from(&self.drains.wanted());
            self.wait_handle.wait(now, cx);
        }
        // Failing drains come last: lower lanes act on the last drain that they saw.
        for how in [DrainMode::NoFlush, DrainMode::Flush, DrainMode::End] {
            if !self.wanted.iter().any(|(_, wanted)| *wanted == how) {
                continue;
            }
            self.below.drain(how, &mut self.back, cx);
            let asks =
                |lane: u32| self.wanted.iter().any(|(of, how)| *of == lane && *how != DrainMode::Flush);
            for bio in self.back.extract_if(.., |bio| asks((bio.cookie >> 32) as u32)) {
                done.push(bio);
                done.last_mut().expect("just pushed").cookie |= HANDED_BACK;
            }
            if !self.back.is_empty() {
                self.below.submit(&mut self.back, cx);
            }
        }
    }
}

impl Lane for OwnerLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.below.submit(batch, cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        if !self.wanted.is_empty() || self.seen != Some(self.wait_handle.epoch()) {
            self.drain_wanted(done, cx);
        }
        self.below.poll(done, cx);
    }

    /// Called when the program ends.
    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        self.below.drain(how, back, cx);
    }

    fn own_work(&self) -> OwnWork {
        self.below.own_work()
    }
}
