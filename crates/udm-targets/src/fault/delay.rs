//! `delay`: every request waits a fixed time before it is sent down.
//!
//! ```text
//! delay <dev> <offset> <ms> [<write dev> <offset> <ms> [<flush dev> <offset> <ms>]]
//! ```
//!
//! There are three classes of requests, each with its own device and delay: reads; writes, discards
//! and write-zeroes; flushes and requests that carry a flush. With 3 words all classes share device
//! and delay; with 6 words flushes use those of writes. A delay of 0 sends requests down at once.
//! With 9 words and a separate flush device, a flush reaches only that device, as in the kernel:
//! such a table is for measurements, not for data.
//!
//! The delay of a class is constant, so requests leave in the order in which they came: each class
//! has a queue, not a heap. Requests of different classes overtake each other. A suspend sends all
//! waiting requests down at once.
//!
//! `status` shows how many reads, writes and flushes wait, over all cores; a class without delay
//! counts none. The counts are shared by the cores and changed once per batch.

use super::{SectorOffsetLane, UnderlyingRange, look_up_device, parse_number};
use crossbeam_utils::CachePadded;
use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::{
    Batch, Bio, BioFlags, Cx, DeviceControlError, DrainMode, Lane, Limits, Nanos, Op, OwnWork, Sectors,
};
use udm_dm::TargetError;
use udm_dm::target::{DeviceRange, LowerLimits, Target, TargetArgs};

const NAME: &str = "delay";
const READ: usize = 0;
const WRITE: usize = 1;
const FLUSH: usize = 2;

/// The class of a request.
fn delay_class_of(bio: &Bio) -> usize {
    match bio.op {
        Op::Read => READ,
        Op::Flush => FLUSH,
        _ if bio.flags.contains(BioFlags::PREFLUSH) => FLUSH,
        Op::Write | Op::Discard | Op::WriteZeroes => WRITE,
    }
}

struct DelayClass {
    under: UnderlyingRange,
    delay_ms: u32,
}

/// The control half.
struct DelayTarget {
    classes: [DelayClass; 3],
    /// Number of classes in the table, 1 to 3.
    given: usize,
    len: Sectors,
    queued: Arc<[CachePadded<AtomicU64>; 3]>,
}

/// The constructor.
///
/// # Errors
/// The kernel's, for a wrong number of words, a bad number or an unknown device.
pub fn create_delay_target(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    if !matches!(args.args.len(), 3 | 6 | 9) {
        return Err(TargetError::new("delay: Requires exactly 3, 6 or 9 arguments").at(args.args.len()));
    }
    let given = args.args.len() / 3;
    let mut class = |class: usize| {
        let first = class.min(given - 1) * 3;
        let start = parse_number(&args.args[first + 1]);
        let start = start.ok_or_else(|| TargetError::new("delay: Invalid device sector").at(first + 1))?;
        let delay_ms = parse_number(&args.args[first + 2]);
        let delay_ms = delay_ms.ok_or_else(|| TargetError::new("delay: Invalid delay").at(first + 2))?;
        let device = look_up_device(args.resolver, args.args, first, "delay: Device lookup failed")?;
        Ok::<_, TargetError>(DelayClass {
            under: UnderlyingRange { device, start: udm_core::Sector(start) },
            delay_ms,
        })
    };
    let classes = [class(READ)?, class(WRITE)?, class(FLUSH)?];
    Ok(Arc::new(DelayTarget { classes, given, len: args.len, queued: Arc::default() }))
}

impl Target for DelayTarget {
    fn type_name(&self) -> &'static str {
        NAME
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let mut lanes: Vec<DelayLowerLane> = Vec::new();
        let mut queues = Vec::new();
        for class in &self.classes {
            let lower_range = (class.under.device.device.id(), class.under.start);
            let lane = match lanes.iter().position(|lane| lane.lower_range == lower_range) {
                Some(lane) => lane,
                None => {
                    lanes.push(DelayLowerLane {
                        lower_range,
                        lane: class.under.open(cx)?,
                        down: Batch::new(),
                    });
                    lanes.len() - 1
                }
            };
            let delay = Nanos::from_millis(class.delay_ms.into());
            queues.push(DelayQueue { lane, delay, waiting: VecDeque::new(), published: 0 });
        }
        let Ok(queues) = queues.try_into() else { unreachable!("one queue for each of three classes") };
        Ok(Box::new(DelayLane { lanes, queues, queued: Arc::clone(&self.queued) }))
    }

    fn table(&self) -> String {
        let mut text = String::new();
        for class in &self.classes[..self.given] {
            let gap = if text.is_empty() { "" } else { " " };
            let DelayClass { under, delay_ms } = class;
            let _ = write!(text, "{gap}{} {} {delay_ms}", under.device.number, under.start);
        }
        text
    }

    fn status(&self) -> String {
        // Relaxed: three independent counters for display.
        let [r, w, f] = [READ, WRITE, FLUSH].map(|class| self.queued[class].load(Ordering::Relaxed));
        format!("{r} {w} {f}")
    }

    fn limits(&self, below: LowerLimits<'_>) -> Limits {
        let all = self.classes.iter().map(|class| below.limits(&class.under.device));
        let own = Limits { request_stackable: false, ..Limits::new(self.len) };
        all.fold(own, |limits, one| limits.stack(&one))
    }

    fn devices(&self) -> Vec<DeviceRange> {
        self.classes[..self.given].iter().map(|class| class.under.used(self.len)).collect()
    }
}

struct DelayLowerLane {
    lower_range: (udm_core::DeviceId, udm_core::Sector),
    lane: SectorOffsetLane,
    down: Batch,
}

struct DelayQueue {
    /// Index of the lane for the class.
    lane: usize,
    delay: Nanos,
    /// Waiting requests and the times at which they are sent, in order.
    waiting: VecDeque<(Nanos, Box<Bio>)>,
    /// This core's part of the count in `status`.
    published: u64,
}

struct DelayLane {
    /// One lane per distinct device and offset.
    lanes: Vec<DelayLowerLane>,
    queues: [DelayQueue; 3],
    queued: Arc<[CachePadded<AtomicU64>; 3]>,
}

impl DelayLane {
    /// Sends down the requests that are due at `now`, and sets the timer for the next one.
    fn release(&mut self, now: Nanos, cx: &mut Cx<'_>) {
        for queue in &mut self.queues {
            let due = queue.waiting.partition_point(|(due, _)| *due <= now);
            self.lanes[queue.lane].down.extend(queue.waiting.drain(..due).map(|(_, bio)| bio));
            if let Some((due, _)) = queue.waiting.front() {
                cx.wake_at(*due);
            }
        }
        for under in &mut self.lanes {
            under.lane.submit(&mut under.down, cx);
        }
        self.publish();
    }

    fn publish(&mut self) {
        for (queue, shared) in self.queues.iter_mut().zip(self.queued.iter()) {
            let now = queue.waiting.len() as u64;
            if now != queue.published {
                // Relaxed: no other data depends on the count. Wrapping adds of differences sum up
                // to the number of requests on all cores.
                shared.fetch_add(now.wrapping_sub(queue.published), Ordering::Relaxed);
                queue.published = now;
            }
        }
    }
}

impl Lane for DelayLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        for bio in batch.drain(..) {
            let queue = &mut self.queues[delay_class_of(&bio)];
            if queue.delay == Nanos(0) {
                self.lanes[queue.lane].down.push(bio);
            } else {
                queue.waiting.push_back((cx.now() + queue.delay, bio));
            }
        }
        self.release(cx.now(), cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.release(cx.now(), cx);
        for under in &mut self.lanes {
            under.lane.poll(done, cx);
        }
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        self.release(Nanos::NEVER, cx);
        for under in &mut self.lanes {
            under.lane.drain(how, back, cx);
        }
    }

    fn own_work(&self) -> OwnWork {
        self.lanes.iter().map(|under| under.lane.own_work()).max().unwrap_or_default()
    }
}
