//! What a hostile guest does with a packed ring.

use super::hostile::{HostileGuest, any_flags};
use super::memory::{AVAIL, BLOCK, GUEST, HEADERS, MachineMemory, STATUSES, TABLES, USED};
use super::packed_ring::PackedDriverRing;
use super::ring::DriverRing;
use crate::rng::SimRng;
use std::sync::atomic::Ordering;
use udm_wire::virtio::packed::{DESC_F_AVAIL, DESC_F_USED, PackedPosition};
use udm_wire::virtio::ring::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

/// Address, length, flags.
type HostileDescriptor = (u64, u32, u16);

impl HostileGuest {
    /// An action with a packed ring.
    pub(super) fn act_packed(&mut self, memory: &MachineMemory, chance: &mut SimRng) {
        let size = self.ring.layout.size;
        match chance.below(16) {
            0..6 => self.packed_request(memory, chance),
            6..9 => {
                // Any descriptor of the ring, also a used one, of any round.
                let index = chance.below(u64::from(size)) as u16;
                let (address, len) = self.buffer(chance);
                let flags = any_flags(chance) ^ chance.pick(&[0, DESC_F_AVAIL, DESC_F_USED]);
                let words = (address, len, chance.any() as u16, flags);
                DriverRing::put_descriptor(memory, self.ring.block + 16 * usize::from(index), words);
            }
            9..11 => self.packed_table(memory, chance),
            11 if chance.one_in(4) => {
                // Continues elsewhere, or in another round.
                let index = chance.below(u64::from(size)) as u16;
                let wrap = chance.one_in(2);
                if let Some(packed) = &mut self.ring.packed {
                    packed.available = PackedPosition { index, wrap };
                }
            }
            12 if chance.one_in(8) => self.spoil_packed(memory, chance.one_in(2)),
            13 | 14 => {
                // The structure of the device is the device's: it must not rely on it.
                let at = self.ring.block + chance.pick(&[AVAIL, USED]);
                memory.u32_at(at).store(chance.any() as u32, Ordering::Relaxed);
            }
            _ => self.scribble_data(memory, chance),
        }
    }

    /// Adds a chain to the ring with any ID.
    fn publish_packed(&mut self, memory: &MachineMemory, chain: &[HostileDescriptor], chance: &mut SimRng) {
        let (size, block) = (self.ring.layout.size, self.ring.block);
        let id = match chance.below(3) {
            0 => chance.any() as u16,
            _ => chance.below(u64::from(size)) as u16,
        };
        let Some(PackedDriverRing { available, .. }) = &mut self.ring.packed else { return };
        for (ahead, (address, len, flags)) in (0..chain.len() as u16).zip(chain).rev() {
            let position = available.advanced(ahead, size);
            let flags = flags | position.available_flags();
            let at = block + 16 * usize::from(position.index);
            DriverRing::put_descriptor(memory, at, (*address, *len, id, flags));
        }
        *available = available.advanced(chain.len() as u16, size);
    }

    /// A request that is nearly correct.
    fn packed_request(&mut self, memory: &MachineMemory, chance: &mut SimRng) {
        let size = u64::from(self.ring.layout.size);
        let header = self.ring.block + HEADERS + 16 * chance.below(size) as usize;
        self.write_header(memory, header, chance);
        let (data, len) = self.buffer(chance);
        let status = GUEST + (self.ring.block + STATUSES) as u64 + chance.below(size);
        let is_written = if chance.one_in(2) { DESC_F_WRITE } else { 0 };
        let last = chance.pick(&[0, 0, 0, 0, 0, 0, DESC_F_NEXT, DESC_F_INDIRECT]);
        let chain = [
            (GUEST + header as u64, 16, DESC_F_NEXT),
            (data, len, is_written | DESC_F_NEXT),
            (status, 1, DESC_F_WRITE | last),
        ];
        self.publish_packed(memory, &chain, chance);
    }

    /// A table of descriptors, also in another one, and a descriptor that names it.
    fn packed_table(&mut self, memory: &MachineMemory, chance: &mut SimRng) {
        let table = self.ring.block + TABLES;
        for entry in 0..chance.below(5) as usize {
            let (address, len) = self.buffer(chance);
            let words = (address, len, chance.any() as u16, any_flags(chance));
            DriverRing::put_descriptor(memory, table + 16 * entry, words);
        }
        let len = match chance.below(6) {
            0 => 0,
            1 => 8,
            2 => !15,
            _ => 16 * chance.between(1, 6) as u32,
        };
        let flags = DESC_F_INDIRECT | chance.pick(&[0, 0, 0, DESC_F_NEXT, DESC_F_WRITE]);
        let address = match chance.below(8) {
            0 => u64::MAX - 7,
            1 => GUEST + (self.ring.block + BLOCK - 24) as u64,
            _ => GUEST + table as u64,
        };
        self.publish_packed(memory, &[(address, len, flags)], chance);
    }

    /// Makes all descriptors of a round one chain without an end, also those that the device has.
    pub(super) fn spoil_packed(&self, memory: &MachineMemory, wrap: bool) {
        for index in 0..self.ring.layout.size {
            let flags = PackedPosition { index, wrap }.available_flags() | DESC_F_NEXT;
            let at = self.ring.block + 16 * usize::from(index);
            memory.u16_at(at + 14).store(flags, Ordering::Release);
        }
    }
}
