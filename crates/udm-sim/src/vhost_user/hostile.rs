//! A hostile guest: it does anything with its ring. It keeps away from the memory of the orderly
//! guest beside it, which is the guest's own.
//!
//! Its block is the last one of the memory, so an address beyond its block is in no memory.

use super::memory::{AVAIL, BLOCK, DATA, GUEST, HEADERS, MachineMemory, STATUSES, TABLES, USED};
use super::ring::DriverRing;
use crate::rng::SimRng;
use std::sync::atomic::Ordering;
use udm_core::Nanos;
use udm_wire::virtio::packed::PackedPosition;
use udm_wire::virtio::ring::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

/// Types of requests: known ones and others.
const KINDS: [u32; 10] = [0, 0, 1, 1, 4, 8, 11, 13, 2, 0xffff_ffff];

/// A driver of one ring that keeps no rule.
pub(super) struct HostileGuest {
    pub(super) ring: DriverRing,
    /// Time of the next turn.
    pub(super) next: Nanos,
    /// Mean pause between two turns in ns.
    pub(super) pause: u64,
    /// Sectors of the disk.
    pub(super) sectors: u64,
    /// Number of actions.
    pub(super) acts: u64,
}

impl HostileGuest {
    /// Begins with an empty ring.
    pub(super) fn reset(&mut self, memory: &MachineMemory) {
        self.ring.reset(memory);
    }

    /// A turn: one to three actions.
    pub(super) fn turn(&mut self, memory: &MachineMemory, chance: &mut SimRng, now: Nanos) {
        self.next = now + Nanos(1 + chance.span(self.pause));
        for _ in 0..chance.between(1, 3) {
            self.act(memory, chance);
        }
        if chance.below(3) > 0 {
            self.ring.kick();
        }
        self.ring.take_call();
    }

    fn act(&mut self, memory: &MachineMemory, chance: &mut SimRng) {
        self.acts += 1;
        if self.ring.packed.is_some() {
            return self.act_packed(memory, chance);
        }
        let size = self.ring.layout.size;
        match chance.below(16) {
            0..5 => self.request(memory, chance),
            5..8 => self.scribble_descriptor(memory, chance),
            8..10 => self.scribble_table(memory, chance),
            10 => {
                // A head of the ring that may be in flight, free, or in the middle of a chain.
                self.ring.publish(memory, chance.below(u64::from(size)) as u16);
            }
            11 if chance.one_in(4) => {
                let head = size + chance.below(1 + u64::from(u16::MAX - size)) as u16;
                self.ring.publish(memory, head);
            }
            12 if chance.one_in(4) => {
                // Jumps forward by more than the ring, or back.
                let jump = chance.between(1, u64::from(u16::MAX)) as u16;
                self.ring.avail = self.ring.avail.wrapping_add(jump);
                memory.u16_at(self.ring.block + AVAIL + 2).store(self.ring.avail, Ordering::Release);
            }
            13 => {
                // The used ring is the device's: it must not rely on it.
                let at = self.ring.block + USED + chance.below(self.ring.layout.used_len() as u64) as usize;
                memory.write(at, &[chance.any() as u8]);
            }
            14 if chance.one_in(8) => self.spoil_entries(memory),
            14 => {
                // Flags and `used_event`.
                let at = chance.pick(&[0, self.ring.layout.used_event()]);
                memory.u16_at(self.ring.block + AVAIL + at).store(chance.any() as u16, Ordering::Relaxed);
            }
            _ => self.scribble_data(memory, chance),
        }
    }

    /// Writes a header, a status byte or a range that may be in use.
    pub(super) fn scribble_data(&self, memory: &MachineMemory, chance: &mut SimRng) {
        let at = chance.pick(&[HEADERS, STATUSES, DATA]) + 8 * chance.below(64) as usize;
        self.write_header(memory, self.ring.block + at, chance);
    }

    pub(super) fn write_header(&self, memory: &MachineMemory, at: usize, chance: &mut SimRng) {
        let sector = match chance.below(8) {
            0 => chance.any() >> chance.below(64),
            _ => chance.below(self.sectors),
        };
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&chance.pick(&KINDS).to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        memory.write(at, &bytes);
    }

    /// An address and a length: in the block, or in no memory.
    pub(super) fn buffer(&self, chance: &mut SimRng) -> (u64, u32) {
        let block = GUEST + self.ring.block as u64;
        let address = match chance.below(12) {
            0 => u64::MAX - chance.below(64),
            1 => chance.any() | 1 << 62,
            2 => block + (BLOCK as u64) - chance.below(600),
            3 => 0,
            4 => block + USED as u64 + chance.below(512),
            _ => block + (DATA as u64) + chance.below(4096),
        };
        let len = match chance.below(12) {
            0 => 0,
            1 => u32::MAX - chance.below(3) as u32,
            2 => chance.below(1 << 32) as u32,
            3 => chance.between(1, 2000) as u32,
            4 => 1 << 20,
            5 => 16,
            _ => 512 * chance.between(1, 12) as u32,
        };
        (address, len)
    }

    /// A request that is nearly correct.
    fn request(&mut self, memory: &MachineMemory, chance: &mut SimRng) {
        let size = u64::from(self.ring.layout.size);
        let header = self.ring.block + HEADERS + 16 * chance.below(size) as usize;
        self.write_header(memory, header, chance);
        let (data, len) = self.buffer(chance);
        let status = GUEST + (self.ring.block + STATUSES) as u64 + chance.below(size);
        let is_written = if chance.one_in(2) { DESC_F_WRITE } else { 0 };
        let [head, middle, last] = [0; 3].map(|_: u16| chance.below(size) as u16);
        let at = |index: u16| self.ring.block + 16 * usize::from(index);
        let put = |index, descriptor| DriverRing::put_descriptor(memory, at(index), descriptor);
        put(last, (status, 1, DESC_F_WRITE, 0));
        put(middle, (data, len, is_written | DESC_F_NEXT, last));
        put(head, (GUEST + header as u64, 16, DESC_F_NEXT, middle));
        self.ring.publish(memory, head);
    }

    /// Any descriptor: circles, ends beyond the ring, buffers in no memory.
    fn scribble_descriptor(&self, memory: &MachineMemory, chance: &mut SimRng) {
        let size = u64::from(self.ring.layout.size);
        let at = self.ring.block + 16 * chance.below(size) as usize;
        let next = match chance.below(6) {
            0 => chance.any() as u16,
            _ => chance.below(size) as u16,
        };
        let (address, len) = self.buffer(chance);
        let flags = any_flags(chance);
        DriverRing::put_descriptor(memory, at, (address, len, flags, next));
    }

    /// A table of indirect descriptors, also in another one, and a descriptor that names it.
    fn scribble_table(&mut self, memory: &MachineMemory, chance: &mut SimRng) {
        let table = self.ring.block + TABLES;
        for entry in 0..chance.below(5) as usize {
            let (address, len) = self.buffer(chance);
            let (flags, next) = (any_flags(chance), chance.below(6) as u16);
            DriverRing::put_descriptor(memory, table + 16 * entry, (address, len, flags, next));
        }
        let head = chance.below(u64::from(self.ring.layout.size)) as u16;
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
        DriverRing::put_descriptor(
            memory,
            self.ring.block + 16 * usize::from(head),
            (address, len, flags, 0),
        );
        self.ring.publish(memory, head);
    }

    /// Makes all available entries, also those that the device takes now, name no descriptor.
    fn spoil_entries(&self, memory: &MachineMemory) {
        let (size, avail) = (self.ring.layout.size, self.ring.block + AVAIL);
        for entry in 0..size {
            memory.u16_at(avail + self.ring.layout.avail_entry(entry)).store(size, Ordering::Relaxed);
        }
    }

    /// At a rest, in an empty ring: adds an entry or a chain that no ring can have, so the device
    /// must stop the ring.
    pub(super) fn break_ring(&mut self, memory: &MachineMemory) {
        if self.ring.packed.is_some() {
            self.spoil_packed(memory, PackedPosition::START.wrap);
            return self.ring.kick();
        }
        self.spoil_entries(memory);
        self.ring.publish(memory, self.ring.layout.size);
        self.ring.kick();
    }
}

/// Flags of a descriptor.
pub(super) fn any_flags(chance: &mut SimRng) -> u16 {
    match chance.below(4) {
        0 => chance.any() as u16,
        _ => chance.any() as u16 & (DESC_F_NEXT | DESC_F_WRITE | DESC_F_INDIRECT),
    }
}
