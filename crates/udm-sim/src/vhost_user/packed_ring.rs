//! The driver's side of a packed ring, as the specification has it (VIRTIO 1.2, section 2.8). The
//! descriptors are where a split ring has them; the event suppression structures of driver and
//! device are at the starts of its available and used rings.

use super::memory::{AVAIL, GUEST, MachineMemory, TABLES, USED};
use super::ring::{Buffer, DriverRing};
use crate::rng::SimRng;
use std::sync::atomic::{Ordering, fence};
use udm_wire::virtio::packed::{
    EVENT_F_DESC, EVENT_F_DISABLE, EVENT_F_ENABLE, EventSuppression, PackedPosition, encode_packed_base,
};
use udm_wire::virtio::ring::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

/// The state of a driver.
pub(super) struct PackedDriverRing {
    /// Offset of its block.
    block: usize,
    size: u16,
    /// Position of the next descriptor to make available.
    pub(super) available: PackedPosition,
    /// Position of the next used descriptor to look at.
    used: PackedPosition,
    /// Descriptors that were made available since the driver last looked if the device wants a
    /// notification.
    unannounced: u16,
    /// Number of descriptors of each chain, by its ID.
    lens: Vec<u16>,
    /// Flags of the first descriptor of the chain that is not visible yet.
    first_flags: u16,
}

impl PackedDriverRing {
    /// An empty ring of `size` descriptors in `block`.
    pub(super) fn new(block: usize, size: u16) -> PackedDriverRing {
        PackedDriverRing {
            block,
            size,
            available: PackedPosition::START,
            used: PackedPosition::START,
            unannounced: 0,
            lens: vec![0; usize::from(size)],
            first_flags: 0,
        }
    }

    fn at(&self, position: PackedPosition) -> usize {
        self.block + 16 * usize::from(position.index)
    }

    fn flags(&self, memory: &MachineMemory, position: PackedPosition) -> u16 {
        memory.u16_at(self.at(position) + 14).load(Ordering::Acquire)
    }

    /// Writes the chain of `id`. The device sees it after [`PackedDriverRing::publish`].
    pub(super) fn make_chain(&mut self, memory: &MachineMemory, id: u16, buffers: &[Buffer], indirect: bool) {
        let table = self.block + TABLES + 256 * usize::from(id);
        let mut descriptors = Vec::new();
        for (i, (at, len, is_writable)) in buffers.iter().enumerate() {
            let mut flags = if *is_writable { DESC_F_WRITE } else { 0 };
            let address = GUEST + *at as u64;
            if indirect {
                let words = (address, *len as u32, 0, flags);
                DriverRing::put_descriptor(memory, table + 16 * i, words);
            } else {
                flags |= if i + 1 == buffers.len() { 0 } else { DESC_F_NEXT };
                descriptors.push((address, *len as u32, flags));
            }
        }
        if indirect {
            descriptors.push((GUEST + table as u64, 16 * buffers.len() as u32, DESC_F_INDIRECT));
        }
        self.lens[usize::from(id)] = descriptors.len() as u16;
        for (ahead, (address, len, flags)) in (0..).zip(descriptors) {
            let position = self.available.advanced(ahead, self.size);
            let flags = flags | position.available_flags();
            let at = self.at(position);
            memory.write(at, &address.to_le_bytes());
            memory.write(at + 8, &len.to_le_bytes());
            memory.write(at + 12, &id.to_le_bytes());
            match ahead {
                0 => self.first_flags = flags,
                _ => memory.u16_at(at + 14).store(flags, Ordering::Relaxed),
            }
        }
    }

    /// Makes the chain of `id` visible.
    pub(super) fn publish(&mut self, memory: &MachineMemory, id: u16) {
        memory.u16_at(self.at(self.available) + 14).store(self.first_flags, Ordering::Release);
        let len = self.lens[usize::from(id)];
        self.available = self.available.advanced(len, self.size);
        self.unannounced += len;
    }

    /// True if descriptors were added for which the driver has not looked if it must notify.
    pub(super) fn has_unannounced(&self) -> bool {
        self.unannounced > 0
    }

    /// True if the device wants a notification of the descriptors that were added.
    pub(super) fn announce(&mut self, memory: &MachineMemory) -> bool {
        fence(Ordering::SeqCst);
        let count = std::mem::take(&mut self.unannounced);
        let event = EventSuppression::from_word(memory.u32_at(self.block + USED).load(Ordering::Relaxed));
        event.is_notified(self.available, count, self.size)
    }

    /// IDs of completed chains that the driver has not taken, and the position behind them.
    fn completed(&self, memory: &MachineMemory) -> (Vec<u16>, PackedPosition) {
        let (mut ids, mut position) = (Vec::new(), self.used);
        while position.is_used(self.flags(memory, position)) && ids.len() < usize::from(self.size) {
            let id = memory.u16_at(self.at(position) + 12).load(Ordering::Relaxed);
            ids.push(id);
            position = position.advanced(self.len_of(id), self.size);
        }
        (ids, position)
    }

    fn len_of(&self, id: u16) -> u16 {
        self.lens.get(usize::from(id)).map_or(1, |len| (*len).max(1))
    }

    /// IDs of completed chains that the driver has not taken.
    pub(super) fn completed_ids(&self, memory: &MachineMemory) -> Vec<u16> {
        self.completed(memory).0
    }

    /// The base of a ring that continues behind the used descriptors.
    pub(super) fn base(&self, memory: &MachineMemory) -> u32 {
        let (_, position) = self.completed(memory);
        encode_packed_base(position, position)
    }

    /// Takes the next used descriptor: ID and written bytes.
    pub(super) fn take_used(&mut self, memory: &MachineMemory) -> Option<(u32, u32)> {
        if !self.used.is_used(self.flags(memory, self.used)) {
            return None;
        }
        let at = self.at(self.used);
        let id = memory.u16_at(at + 12).load(Ordering::Relaxed);
        let written = memory.u32_at(at + 8).load(Ordering::Relaxed);
        self.used = self.used.advanced(self.len_of(id), self.size);
        Some((id.into(), written))
    }

    /// Asks for a notification of the next used descriptor, or for none.
    pub(super) fn arm(
        &self,
        memory: &MachineMemory,
        is_armed: bool,
        has_event_index: bool,
        chance: &mut SimRng,
    ) {
        let flags = match (is_armed, has_event_index) {
            (false, _) => EVENT_F_DISABLE,
            (true, true) if chance.below(8) > 0 => EVENT_F_DESC,
            (true, _) => EVENT_F_ENABLE,
        };
        let event = EventSuppression { position: self.used, flags };
        memory.u32_at(self.block + AVAIL).store(event.to_word(), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Describes the state of the ring, for a person.
    pub(super) fn describe(&self, memory: &MachineMemory) -> String {
        let event = |at| EventSuppression::from_word(memory.u32_at(self.block + at).load(Ordering::Relaxed));
        format!(
            "packed, available {:?}, used {:?} with flags {:x}, events {:?} and {:?}",
            self.available,
            self.used,
            self.flags(memory, self.used),
            event(AVAIL),
            event(USED)
        )
    }
}
