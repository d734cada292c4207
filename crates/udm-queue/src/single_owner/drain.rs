//! What waits behind the one way of all cores goes home when what lies above is suspended.
//!
//! One lane of the device serves all that ask, so what a drain of it hands back may be anybody's.
//! A lane that is drained says so; the lane that the task has drains the device before each poll
//! while anybody does. It gives back what is of those who asked, marked, and sends the rest down
//! again at once, in the same poll: others are not held up by a suspend that hangs.
//!
//! ```text
//! lane:   drain: want += me, ring ────►  task's lane, in a poll:  drain below
//!                                          mine   ◄──────────────  handed back
//!         next drain: out in `back`  ◄───  others' ─────────────►  down again
//!         nothing waits, or no drain before a poll: want -= me, ring
//! ```
//!
//! **Late answers.** A drain may be over when something comes back: the lane is polled then without
//! a drain in front, sends it down again and wants no more. A lane may also be polled twice behind
//! one drain; so it asks for a turn then, and where the suspend goes on the next drain asks anew.
//! Where a suspend with flush has come in its place, what comes back goes down again too.
//!
//! **A pause.** When something was handed back the lane wants no more for a moment. Else what
//! others have would go round in it for ever, where a second way of this kind lies below and the
//! suspend waits for something else.
//!
//! *Price.* A load in each poll of the task's lane. With a suspend a lock for a moment, and two
//! letters a lane.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use udm_core::bugs::{self, Bug};
use udm_core::{
    Batch, Cx, Device, DeviceId, Drain, Lane, Limits, Nanos, OpenError, OwnWork, WaitHandle, WaitQueue,
    WakeEpoch, interleave,
};

/// Between a drain that gave something back and the next that is asked for.
const PAUSE: Nanos = Nanos::from_millis(1);

const HANDED_BACK: u64 = 1 << 31;

/// What a bio of the task carries: the lane that it is of, and its key, below 2^31.
pub(super) fn cookie(lane: u32, key: usize) -> u64 {
    u64::from(lane) << 32 | key as u64
}

/// The key, and whether nobody has begun the bio.
pub(super) fn read(cookie: u64) -> (usize, bool) {
    ((cookie & (HANDED_BACK - 1)) as usize, cookie & HANDED_BACK != 0)
}

/// Which lanes are drained, and how.
pub(super) struct DrainRequests {
    /// Held for moments.
    wanted: Mutex<Vec<(u32, Drain)>>,
    /// Rung when they are others.
    bell: Arc<WaitQueue>,
}

impl Default for DrainRequests {
    fn default() -> DrainRequests {
        DrainRequests { wanted: Mutex::default(), bell: Arc::new(WaitQueue::new()) }
    }
}

impl DrainRequests {
    fn wanted(&self) -> MutexGuard<'_, Vec<(u32, Drain)>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn want(&self, lane: u32, how: Option<Drain>) {
        interleave::point();
        let mut wanted = self.wanted();
        wanted.retain(|(other, _)| *other != lane);
        wanted.extend(how.map(|how| (lane, how)));
        drop(wanted);
        if !bugs::on(Bug::DrainNotRung) {
            self.bell.wake_up();
        }
    }
}

/// What a lane that asks knows of its drain.
pub(super) struct DrainRequester {
    lane: u32,
    drains: Arc<DrainRequests>,
    /// What it wants now.
    how: Option<Drain>,
    /// There was this drain since the last poll.
    drained: Option<Drain>,
    /// It has wanted something since it was last empty: answers of that may still come.
    asked: bool,
    /// It wants nothing before.
    pause: Nanos,
}

impl DrainRequester {
    pub fn new(lane: u32, drains: Arc<DrainRequests>) -> DrainRequester {
        DrainRequester { lane, drains, how: None, drained: None, asked: false, pause: Nanos(0) }
    }

    /// True where a poll has more to do than usual.
    #[inline]
    pub fn has_asked(&self) -> bool {
        self.asked
    }

    /// The drain since the last poll, if there was one.
    pub fn take_drained(&mut self) -> Option<Drain> {
        self.drained.take()
    }

    /// Wants `how` from now on; true when that is something else.
    pub fn ask(&mut self, how: Option<Drain>) -> bool {
        let other = self.how != how;
        if other {
            self.how = how;
            self.drains.want(self.lane, how);
        }
        other
    }

    /// The lane was drained: did something come home by that, and is nothing left? Of several
    /// drains in front of a poll, of devices one above the other, the one without flush counts:
    /// what it hands back need not fail.
    pub fn drained(&mut self, how: Drain, came: bool, empty: bool, cx: &mut Cx<'_>) {
        if empty {
            return self.settle(true);
        }
        if self.drained == Some(Drain::NoFlush) && how == Drain::Flush {
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

    /// Where nothing is left it wants nothing.
    pub fn settle(&mut self, empty: bool) {
        if empty {
            self.ask(None);
            (self.drained, self.asked) = (None, false);
        }
    }
}

/// The device as the task opens it.
pub(super) struct OwnerDevice {
    device: Arc<dyn Device>,
    drains: Arc<DrainRequests>,
}

impl OwnerDevice {
    pub fn new(device: Arc<dyn Device>, drains: Arc<DrainRequests>) -> OwnerDevice {
        OwnerDevice { device, drains }
    }
}

impl Device for OwnerDevice {
    fn id(&self) -> DeviceId {
        self.device.id()
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        let (below, drains) = (self.device.open(cx)?, Arc::clone(&self.drains));
        let listener = drains.bell.subscribe(cx);
        let (wanted, back) = (Vec::new(), Batch::new());
        Ok(Box::new(OwnerLane { below, drains, listener, seen: None, wanted, back }))
    }

    fn limits(&self) -> Limits {
        self.device.limits()
    }
}

/// The lane that the task has.
struct OwnerLane {
    below: Box<dyn Lane>,
    drains: Arc<DrainRequests>,
    listener: WaitHandle,
    /// What is wanted was looked up then.
    seen: Option<WakeEpoch>,
    wanted: Vec<(u32, Drain)>,
    /// Scratch.
    back: Batch,
}

impl OwnerLane {
    #[cold]
    fn drain_wanted(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let now = self.listener.epoch();
        if self.seen != Some(now) {
            self.seen = Some(now);
            self.wanted.clone_from(&self.drains.wanted());
            self.listener.wait(now, cx);
        }
        // What fails stays last: lanes below go by the drain that they saw last.
        for how in [Drain::NoFlush, Drain::Flush, Drain::End] {
            if !self.wanted.iter().any(|(_, wanted)| *wanted == how) {
                continue;
            }
            self.below.drain(how, &mut self.back, cx);
            let asks = |lane: u32| self.wanted.iter().any(|(of, how)| *of == lane && *how != Drain::Flush);
            for bio in self.back.extract_if(.., |bio| asks((bio.cookie >> 32) as u32)) {
                done.push(bio);
                done.last_mut().expect("just pushed").cookie |= HANDED_BACK;
            }
            if bugs::on(Bug::OthersNotSentAgain) {
                bugs::leak_bios(self.back.drain(..));
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
        if !self.wanted.is_empty() || self.seen != Some(self.listener.epoch()) {
            self.drain_wanted(done, cx);
        }
        self.below.poll(done, cx);
    }

    /// The program ends.
    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        self.below.drain(how, back, cx);
    }

    fn busy(&self) -> OwnWork {
        self.below.busy()
    }
}
