//! An orderly guest: a driver of one ring that keeps the rules, and checks all results.

use super::memory::{BLOCK, DATA, EXTRA, EXTRA_PART, ExtraRegionState, HEADERS, MachineMemory, STATUSES};
use super::model::{GuestCompletion, GuestDiskModel, GuestOp, GuestRequest, POISON, SECTOR};
use super::ring::{Buffer, DriverRing};
use crate::model::Violation;
use crate::rng::SimRng;
use std::collections::BTreeMap;
use udm_core::Nanos;
use udm_wire::virtio::VirtioFeatures;
use udm_wire::virtio::blk::{BLK_ID_SIZE, BLK_S_IOERR, BLK_S_OK, BLK_S_UNSUPP};

/// Places for data, and sectors per place.
pub(super) const PLACES: usize = 8;
pub(super) const PLACE_SECTORS: u64 = 16;
const PLACE: usize = PLACE_SECTORS as usize * SECTOR;

/// Reads in flight while all data is read back.
const CHECKS: usize = 3;

/// The disk of a guest, as the guest knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct GuestDisk {
    /// Index of the disk.
    pub(super) index: usize,
    /// Sectors of the disk.
    pub(super) sectors: u64,
    /// Sectors per block.
    pub(super) block: u64,
}

/// Disturbances that a guest makes.
#[derive(Clone, Copy, Debug)]
pub(super) struct GuestHabits {
    pub(super) trims: bool,
    pub(super) flushes: bool,
    pub(super) pieces: bool,
    pub(super) wild: bool,
    /// Requests in flight at most.
    pub(super) depth: usize,
    /// Mean pause between two turns in ns.
    pub(super) pause: u64,
}

/// What a guest sees and uses in its turn.
pub(super) struct GuestContext<'a> {
    pub(super) memory: &'a MachineMemory,
    pub(super) model: &'a mut GuestDiskModel,
    pub(super) chance: &'a mut SimRng,
    pub(super) disk: GuestDisk,
    pub(super) features: VirtioFeatures,
    pub(super) step: u64,
    pub(super) now: Nanos,
    pub(super) faults: u64,
    /// Step since which the guest knows that the write cache is off.
    pub(super) through_since: Option<u64>,
    /// No new requests are made.
    pub(super) is_resting: bool,
    pub(super) events: Vec<String>,
    /// Notifications sent, and notifications that were not wanted.
    pub(super) kicks: [u64; 2],
}

/// An orderly driver of one ring.
pub(super) struct OrderlyGuest {
    pub(super) ring: DriverRing,
    /// The requests in flight, by head.
    pub(super) requests: BTreeMap<u16, GuestRequest>,
    /// Free places for data.
    places: Vec<usize>,
    pub(super) habits: GuestHabits,
    /// Time of the next turn.
    pub(super) next: Nanos,
    /// Next sector to read back.
    pub(super) check: Option<u64>,
}

impl OrderlyGuest {
    pub(super) fn new(ring: DriverRing, habits: GuestHabits, now: Nanos) -> OrderlyGuest {
        let requests = BTreeMap::new();
        OrderlyGuest { ring, requests, places: (0..PLACES).collect(), habits, next: now, check: None }
    }

    /// Forgets all requests, and begins with an empty ring. Returns the requests.
    pub(super) fn reset(&mut self, memory: &MachineMemory) -> Vec<GuestRequest> {
        self.ring.reset(memory);
        self.places = (0..PLACES).collect();
        self.check = None;
        std::mem::take(&mut self.requests).into_values().collect()
    }

    /// True if the guest waits for nothing and has nothing to check.
    pub(super) fn is_through(&self) -> bool {
        self.requests.is_empty() && self.check.is_none() && !self.ring.has_unannounced()
    }

    /// Time of the next turn.
    pub(super) fn reason(&self, is_resting: bool) -> Nanos {
        let adds = match self.check {
            Some(_) => self.requests.len() < CHECKS,
            None => !is_resting && self.requests.len() < self.habits.depth,
        };
        let looks = if self.ring.is_armed { self.ring.is_called() } else { !self.requests.is_empty() };
        if adds || looks || self.ring.has_unannounced() { self.next } else { Nanos::NEVER }
    }

    /// A turn: notifies, takes completed requests, or adds some.
    pub(super) fn turn(&mut self, around: &mut GuestContext<'_>) -> Result<(), Violation> {
        self.next = around.now + Nanos(1 + around.chance.span(self.habits.pause));
        if around.is_resting || around.chance.below(4) > 0 {
            self.announce(around);
        }
        self.take_completed(around)?;
        if self.check.is_some() {
            self.read_back(around);
        } else if !around.is_resting {
            let room = self.habits.depth.saturating_sub(self.requests.len()) as u64;
            for _ in 0..around.chance.below(5).min(room) {
                self.add_one(around);
            }
        }
        // Most drivers notify at once.
        if around.chance.one_in(2) {
            self.announce(around);
        }
        Ok(())
    }

    /// Notifies the device of added requests, if it wants that.
    fn announce(&mut self, around: &mut GuestContext<'_>) {
        if self.ring.has_unannounced() {
            let wants = self.ring.announce(around.memory);
            around.kicks[usize::from(!wants)] += 1;
        }
    }

    /// Chooses where a read puts its data: in the place `start`, or in the region that is added and
    /// removed. Each ring has a part of that, for one request.
    fn choose_data(&self, start: usize, len: usize, around: &mut GuestContext<'_>) -> usize {
        let is_open = around.memory.extra_state() == Some(ExtraRegionState::Open);
        let is_free = is_open && !self.requests.values().any(GuestRequest::is_in_extra);
        match is_free && len <= EXTRA_PART && around.chance.one_in(2) {
            true => EXTRA + self.ring.block / BLOCK * EXTRA_PART,
            false => start,
        }
    }

    fn take_completed(&mut self, around: &mut GuestContext<'_>) -> Result<(), Violation> {
        let is_called = self.ring.is_armed && self.ring.take_call();
        // A driver that adds requests may look without a notification.
        let looks = !self.ring.is_armed || is_called || (!around.is_resting && around.chance.one_in(16));
        if !looks {
            return Ok(());
        }
        loop {
            let published = self.ring.completed_heads(around.memory).len();
            if published > self.requests.len() {
                return Err(format!(
                    "{published} requests are completed, and {} are in flight",
                    self.requests.len()
                ));
            }
            while let Some((head, written)) = self.ring.take_used(around.memory) {
                self.completed(head, written, around)?;
            }
            let polls = !around.is_resting && around.chance.one_in(3);
            self.ring.arm(around.memory, !polls, around.chance);
            if polls || self.ring.completed_heads(around.memory).is_empty() {
                return Ok(());
            }
        }
    }

    fn completed(&mut self, head: u32, written: u32, around: &mut GuestContext<'_>) -> Result<(), Violation> {
        let known = u16::try_from(head).ok().and_then(|head| self.requests.remove(&head));
        let Some(request) = known else {
            return Err(format!(
                "the used ring has descriptor {head}, which is not in flight: completed twice, or never added"
            ));
        };
        let status = around.memory.read(self.status_at(head as u16), 1)[0];
        let data = request.data.iter().flat_map(|(at, len)| around.memory.read(*at, *len)).collect();
        let is_durable =
            request.is_through && around.through_since.is_some_and(|since| since <= request.start);
        let done = GuestCompletion { status, written, data, faults: around.faults, is_durable };
        around.events.push(format!(
            "ring {:#x}: {} completes with {status}",
            self.ring.block,
            request.describe()
        ));
        around.model.complete(&request, &done, around.step)?;
        self.ring.free.extend(&request.descriptors);
        self.places.push(request.place);
        Ok(())
    }

    fn status_at(&self, head: u16) -> usize {
        self.ring.block + STATUSES + usize::from(head)
    }

    fn read_back(&mut self, around: &mut GuestContext<'_>) {
        while let Some(at) = self.check.filter(|_| self.requests.len() < CHECKS) {
            let sectors = PLACE_SECTORS.min(around.disk.sectors - at);
            if sectors == 0 {
                self.check = None;
                return;
            }
            if !self.add(GuestOp::Read, vec![(at, sectors)], BLK_S_OK, around) {
                return;
            }
            self.check = Some(at + sectors);
        }
    }

    /// Draws a request and adds it.
    fn add_one(&mut self, around: &mut GuestContext<'_>) {
        let (disk, habits) = (around.disk, self.habits);
        let c = &mut *around.chance;
        let most = PLACE_SECTORS.min(disk.sectors) / disk.block;
        let range = |c: &mut SimRng| {
            let blocks = 1 + c.below(most);
            let at = c.below(disk.sectors / disk.block - blocks + 1);
            (at * disk.block, blocks * disk.block)
        };
        let can = |feature| around.features.contains(feature);
        let op = match c.below(20) {
            0..7 => GuestOp::Read,
            7..15 => GuestOp::Write,
            15 if habits.flushes => GuestOp::Flush,
            16 if habits.trims && can(VirtioFeatures::BLK_DISCARD) => GuestOp::Discard,
            17 if habits.trims && can(VirtioFeatures::BLK_WRITE_ZEROES) => GuestOp::WriteZeroes,
            18 if c.one_in(4) => GuestOp::GetId,
            19 if habits.wild && c.one_in(4) => GuestOp::Unknown,
            _ => GuestOp::Write,
        };
        let (mut ranges, mut must) = match op {
            GuestOp::Flush => (vec![], BLK_S_OK),
            GuestOp::GetId => (vec![], BLK_S_OK),
            GuestOp::Unknown => (vec![], BLK_S_UNSUPP),
            GuestOp::Discard | GuestOp::WriteZeroes => {
                ((0..1 + c.below(3)).map(|_| range(c)).collect(), BLK_S_OK)
            }
            GuestOp::Read | GuestOp::Write => (vec![range(c)], BLK_S_OK),
        };
        // Beyond the end.
        if habits.wild && !ranges.is_empty() && c.one_in(40) {
            (ranges[0].0, must) = (disk.sectors - ranges[0].1 + disk.block, BLK_S_IOERR);
        }
        self.add(op, ranges, must, around);
    }

    /// Adds a request; false if there is no room for it.
    fn add(&mut self, op: GuestOp, ranges: Vec<(u64, u64)>, must: u8, around: &mut GuestContext<'_>) -> bool {
        let Some(place) = self.places.pop() else { return false };
        let (start, id) = (self.ring.block + DATA + place * PLACE, around.model.next_id());
        let sectors: u64 = ranges.iter().map(|(_, sectors)| sectors).sum();
        let (payload, is_written) = match op {
            GuestOp::Read => (vec![POISON; sectors as usize * SECTOR], true),
            GuestOp::GetId => (vec![POISON; BLK_ID_SIZE], true),
            GuestOp::Write => (GuestDiskModel::payload(id, sectors), false),
            GuestOp::Discard | GuestOp::WriteZeroes => (encode_ranges(op, &ranges, around.chance), false),
            GuestOp::Flush | GuestOp::Unknown => (Vec::new(), false),
        };
        let start = if op == GuestOp::Read { self.choose_data(start, payload.len(), around) } else { start };
        around.memory.write(start, &payload);
        let data = self.cut(start, payload.len(), around.chance);
        let head = self.ring.free.last().copied();
        let Some(head) = head else {
            self.places.push(place);
            return false;
        };
        let header = self.ring.block + HEADERS + 16 * usize::from(head);
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&(op as u32).to_le_bytes());
        bytes[8..].copy_from_slice(&ranges.first().map_or(0, |(at, _)| *at).to_le_bytes());
        let mut buffers: Vec<Buffer> = vec![(header, 16, false)];
        buffers.extend(data.iter().map(|(at, len)| (*at, *len, is_written)));
        buffers.push((self.status_at(head), 1, true));
        let indirect = around.features.contains(VirtioFeatures::INDIRECT_DESC) && around.chance.below(3) > 0;
        // The head is known only afterwards, so the last free descriptor must be the head.
        let count = if indirect { 1 } else { buffers.len() };
        if self.ring.free.len() < count {
            self.places.push(place);
            return false;
        }
        let at = self.ring.free.len() - count;
        let last = self.ring.free.len() - 1;
        self.ring.free.swap(at, last);
        let Some(descriptors) = self.ring.make_chain(around.memory, &buffers, indirect) else { return false };
        around.memory.write(header, &bytes);
        around.memory.write(self.status_at(head), &[0xff]);
        let request = GuestRequest {
            id,
            op,
            disk: around.disk.index,
            ranges,
            data,
            place,
            descriptors,
            start: 2 * around.step,
            at: around.now,
            faults: around.faults,
            is_through: around.through_since.is_some(),
            must,
            may_fail: false,
        };
        around.events.push(format!("ring {:#x}: adds {} as {head}", self.ring.block, request.describe()));
        around.model.begin(&request);
        self.requests.insert(head, request);
        self.ring.publish(around.memory, head);
        true
    }

    /// Cuts `len` bytes at `start` into up to four buffers, anywhere.
    fn cut(&self, start: usize, len: usize, chance: &mut SimRng) -> Vec<(usize, usize)> {
        let mut data = Vec::new();
        let mut at = 0;
        while at < len {
            let left = len - at;
            let part = match self.habits.pieces && data.len() < 3 && chance.one_in(2) {
                true => 1 + chance.below(left as u64) as usize,
                false => left,
            };
            data.push((start + at, part));
            at += part;
        }
        data
    }
}

/// The payload of DISCARD or WRITE ZEROES.
fn encode_ranges(op: GuestOp, ranges: &[(u64, u64)], chance: &mut SimRng) -> Vec<u8> {
    let unmap = u32::from(op == GuestOp::WriteZeroes && chance.one_in(2));
    let encode = |(at, sectors): &(u64, u64)| {
        [&at.to_le_bytes()[..], &(*sectors as u32).to_le_bytes(), &unmap.to_le_bytes()].concat()
    };
    ranges.iter().flat_map(encode).collect()
}
