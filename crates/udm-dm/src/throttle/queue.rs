//! The bios of one lane that wait for their device's limits.

use super::{DeviceThrottle, Direction, Throttle, ThrottledAmount};
use std::collections::VecDeque;
use std::sync::Arc;
use udm_core::{Batch, Bio, Nanos};

/// The waiting bios of a lane. Dropped when the device has no limits any more.
pub(crate) struct ThrottleQueue {
    throttle: Arc<Throttle>,
    device: Arc<DeviceThrottle>,
    /// Bios by direction, in the order of [`Direction::ALL`].
    waiting: [WaitingBios; 2],
    /// The direction that reserves first, the other one next time.
    first: usize,
}

/// The waiting bios of one direction, oldest first.
#[derive(Default)]
struct WaitingBios {
    bios: VecDeque<Box<Bio>>,
    reserved: Option<Reservation>,
    /// Part of the first bio that ended reservations were for.
    paid: ThrottledAmount,
}

/// A place in all limits of a direction.
struct Reservation {
    /// The bios that pass at its end, from the front of the queue; 0 if it is for a part of the
    /// first one.
    bios: usize,
    amount: ThrottledAmount,
    /// The time at which it ends.
    at: Nanos,
}

impl ThrottleQueue {
    pub fn new(throttle: Arc<Throttle>, device: &Arc<DeviceThrottle>) -> ThrottleQueue {
        ThrottleQueue { throttle, device: Arc::clone(device), waiting: Default::default(), first: 0 }
    }

    /// The limits.
    pub fn throttle(&self) -> &Arc<Throttle> {
        &self.throttle
    }

    /// Changes the limits. Bios that wait stay, and get a place in the new limits.
    pub fn set_throttle(&mut self, throttle: Arc<Throttle>, now: Nanos) {
        self.cancel_reservations();
        throttle.continue_from(&self.throttle, now);
        self.throttle = throttle;
    }

    /// Takes bios. Those that may pass now are in `batch` afterwards, with bios that waited.
    pub fn admit(&mut self, batch: &mut Batch, now: Nanos) {
        if self.is_empty() && self.passes_at_once(batch, now) {
            return;
        }
        self.device.begin_waiting(batch.len());
        for bio in batch.drain(..) {
            self.waiting[Direction::of(&bio) as usize].bios.push_back(bio);
        }
        self.release(batch, now);
    }

    /// True if all of `batch` may pass now.
    fn passes_at_once(&self, batch: &Batch, now: Nanos) -> bool {
        let mut amounts = [ThrottledAmount::default(); 2];
        batch.iter().for_each(|bio| amounts[Direction::of(bio) as usize].add(bio));
        self.throttle.try_take(&amounts, now)
    }

    /// Appends the bios that may pass now to `batch`.
    pub fn release(&mut self, batch: &mut Batch, now: Nanos) {
        if self.is_empty() {
            return;
        }
        let before = batch.len();
        for nth in [self.first, 1 - self.first] {
            self.waiting[nth].release(Direction::ALL[nth], &self.throttle, batch, now);
        }
        self.first = 1 - self.first;
        self.device.end_waiting(batch.len() - before);
    }

    /// The time at which the next bio may pass; `None` if none waits.
    pub fn next_release(&self) -> Option<Nanos> {
        self.waiting.iter().filter_map(|waiting| waiting.reserved.as_ref()).map(|reserved| reserved.at).min()
    }

    /// True if no bio waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.iter().all(|waiting| waiting.bios.is_empty())
    }

    /// Appends all bios to `batch`, whatever the limits.
    pub fn take_all(&mut self, batch: &mut Batch) {
        self.cancel_reservations();
        let before = batch.len();
        self.waiting.iter_mut().for_each(|waiting| batch.extend(waiting.bios.drain(..)));
        self.device.end_waiting(batch.len() - before);
    }

    fn cancel_reservations(&mut self) {
        for (waiting, direction) in self.waiting.iter_mut().zip(Direction::ALL) {
            let paid = std::mem::take(&mut waiting.paid);
            self.throttle.cancel(direction, paid);
            if let Some(reserved) = waiting.reserved.take() {
                self.throttle.cancel(direction, reserved.amount);
            }
        }
    }
}

impl Drop for ThrottleQueue {
    fn drop(&mut self) {
        self.cancel_reservations();
        self.device.end_waiting(self.waiting.iter().map(|waiting| waiting.bios.len()).sum());
    }
}

impl WaitingBios {
    fn release(&mut self, direction: Direction, throttle: &Throttle, batch: &mut Batch, now: Nanos) {
        while !self.bios.is_empty() {
            let next = self.reserved.take().unwrap_or_else(|| self.reserve(direction, throttle, now));
            if next.at > now {
                self.reserved = Some(next);
                return;
            }
            self.paid = if next.bios == 0 { self.paid.plus(next.amount) } else { ThrottledAmount::default() };
            batch.extend(self.bios.drain(..next.bios));
        }
    }

    /// Reserves for the rest of the first bio, and for those behind it within [`super::QUANTUM`]. A
    /// rest that takes longer is reserved in parts, so that lanes with shorter bios get their turns
    /// in between.
    fn reserve(&self, direction: Direction, throttle: &Throttle, now: Nanos) -> Reservation {
        let mut sizes = self.bios.iter().map(|bio| ThrottledAmount::of(bio));
        let mut amount = sizes.next().unwrap_or_default().minus(self.paid);
        if !throttle.is_within_quantum(direction, amount) {
            if throttle.try_take_one(direction, amount, now) {
                return Reservation { bios: 1, amount, at: now };
            }
            let part = throttle.part_within_quantum(direction, amount);
            return Reservation {
                bios: usize::from(part == amount),
                amount: part,
                at: throttle.reserve(direction, part, now),
            };
        }
        let mut bios = 1;
        for size in sizes {
            let more = amount.plus(size);
            if !throttle.is_within_quantum(direction, more) {
                break;
            }
            (bios, amount) = (bios + 1, more);
        }
        Reservation { bios, amount, at: throttle.reserve(direction, amount, now) }
    }
}
