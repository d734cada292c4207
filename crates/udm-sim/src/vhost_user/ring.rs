//! The driver's side of a ring. The split ring is as the specification has it (VIRTIO 1.2, section
//! 2.7); for the other kind see `packed_ring`.

use super::memory::{AVAIL, GUEST, MachineMemory, TABLES, USED};
use super::packed_ring::PackedDriverRing;
use crate::rng::SimRng;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use udm_wire::virtio::ring::{
    AVAIL_F_NO_INTERRUPT, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, SplitRingLayout, USED_F_NO_NOTIFY,
    needs_event,
};

/// A buffer: offset in the memory, length, and whether the device writes it.
pub(super) type Buffer = (usize, usize, bool);

/// A ring in the memory of a machine.
pub(super) struct DriverRing {
    /// Offset of its block.
    pub(super) block: usize,
    pub(super) layout: SplitRingLayout,
    /// The state of a packed ring; `None` of a split one.
    pub(super) packed: Option<PackedDriverRing>,
    /// `used_event` and `avail_event` replace the flags.
    pub(super) has_event_index: bool,
    /// Descriptors that no request uses; of a packed ring, IDs of chains, as many.
    pub(super) free: Vec<u16>,
    /// Index of the next available entry.
    pub(super) avail: u16,
    /// Index of the next used entry to look at.
    pub(super) seen: u16,
    /// `avail` when the driver last looked if the device wants a notification.
    announced: u16,
    /// The driver wants to be notified.
    pub(super) is_armed: bool,
    pub(super) kick: Arc<OwnedFd>,
    pub(super) call: Arc<OwnedFd>,
}

/// Creates an eventfd.
pub(super) fn create_eventfd() -> io::Result<Arc<OwnedFd>> {
    Ok(Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?))
}

/// True if `fd` can be read.
pub(super) fn is_readable(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|n| n > 0)
}

impl DriverRing {
    pub(super) fn new(block: usize, size: u16) -> io::Result<DriverRing> {
        Ok(DriverRing {
            block,
            layout: SplitRingLayout { size },
            packed: None,
            has_event_index: false,
            free: (0..size).rev().collect(),
            avail: 0,
            seen: 0,
            announced: 0,
            is_armed: true,
            kick: create_eventfd()?,
            call: create_eventfd()?,
        })
    }

    /// Begins again with an empty ring.
    pub(super) fn reset(&mut self, memory: &MachineMemory) {
        memory.clear(self.block);
        self.free = (0..self.layout.size).rev().collect();
        (self.avail, self.seen, self.announced, self.is_armed) = (0, 0, 0, true);
        self.set_packed(self.packed.is_some());
    }

    /// Makes the empty ring a packed or a split one.
    pub(super) fn set_packed(&mut self, is_packed: bool) {
        self.packed = is_packed.then(|| PackedDriverRing::new(self.block, self.layout.size));
    }

    /// The base of an empty ring.
    pub(super) fn first_base(&self) -> u32 {
        if self.packed.is_some() { 0x8000_8000 } else { 0 }
    }

    /// Writes descriptor or table entry `at`.
    pub(super) fn put_descriptor(
        memory: &MachineMemory,
        at: usize,
        (address, len, flags, next): (u64, u32, u16, u16),
    ) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        memory.write(at, &bytes);
    }

    /// Takes descriptors for `buffers` and fills them in: in the ring, or in a table of their own.
    /// Returns the descriptors, the head first; `None` if the ring has too few.
    pub(super) fn make_chain(
        &mut self,
        memory: &MachineMemory,
        buffers: &[Buffer],
        indirect: bool,
    ) -> Option<Vec<u16>> {
        let count = if indirect { 1 } else { buffers.len() };
        if self.free.len() < count {
            return None;
        }
        let used = self.free.split_off(self.free.len() - count);
        if let Some(packed) = &mut self.packed {
            packed.make_chain(memory, used[0], buffers, indirect);
            return Some(used);
        }
        let table = self.block + TABLES + 256 * usize::from(used[0]);
        for (i, (at, len, is_writable)) in buffers.iter().enumerate() {
            let mut flags = if *is_writable { DESC_F_WRITE } else { 0 };
            flags |= if i + 1 == buffers.len() { 0 } else { DESC_F_NEXT };
            let (place, next) = match indirect {
                true => (table + 16 * i, i as u16 + 1),
                false => {
                    (self.block + 16 * usize::from(used[i]), used.get(i + 1).copied().unwrap_or_default())
                }
            };
            DriverRing::put_descriptor(memory, place, (GUEST + *at as u64, *len as u32, flags, next));
        }
        if indirect {
            let at = self.block + 16 * usize::from(used[0]);
            let len = 16 * buffers.len() as u32;
            DriverRing::put_descriptor(memory, at, (GUEST + table as u64, len, DESC_F_INDIRECT, 0));
        }
        Some(used)
    }

    /// Makes the chain that begins at `head` visible.
    pub(super) fn publish(&mut self, memory: &MachineMemory, head: u16) {
        if let Some(packed) = &mut self.packed {
            return packed.publish(memory, head);
        }
        let avail = self.block + AVAIL;
        memory.u16_at(avail + self.layout.avail_entry(self.avail)).store(head, Ordering::Relaxed);
        self.avail = self.avail.wrapping_add(1);
        memory.u16_at(avail + 2).store(self.avail, Ordering::Release);
    }

    /// True if entries were added for which the driver has not looked if it must notify.
    pub(super) fn has_unannounced(&self) -> bool {
        self.avail != self.announced || self.packed.as_ref().is_some_and(PackedDriverRing::has_unannounced)
    }

    /// Notifies the device of new entries, if it wants that. Returns true if it does.
    pub(super) fn announce(&mut self, memory: &MachineMemory) -> bool {
        if let Some(packed) = &mut self.packed {
            let wants = packed.announce(memory);
            if wants {
                self.kick();
            }
            return wants;
        }
        fence(Ordering::SeqCst);
        let old = std::mem::replace(&mut self.announced, self.avail);
        let used = self.block + USED;
        let wants = if self.has_event_index {
            let event = memory.u16_at(used + self.layout.avail_event()).load(Ordering::Relaxed);
            needs_event(event, self.avail, old)
        } else {
            memory.u16_at(used).load(Ordering::Relaxed) & USED_F_NO_NOTIFY == 0
        };
        if wants {
            self.kick();
        }
        wants
    }

    /// Notifies the device.
    pub(super) fn kick(&self) {
        // Fails only if the eventfd is full, which is as good.
        let _ = rustix::io::write(&*self.kick, &1u64.to_ne_bytes());
    }

    /// The base of a ring that continues where the used ring ends.
    pub(super) fn used_base(&self, memory: &MachineMemory) -> u32 {
        match &self.packed {
            Some(packed) => packed.base(memory),
            None => self.used_index(memory).into(),
        }
    }

    /// `idx` of the used ring.
    fn used_index(&self, memory: &MachineMemory) -> u16 {
        memory.u16_at(self.block + USED + 2).load(Ordering::Acquire)
    }

    /// Heads of completed requests that the driver has not taken.
    pub(super) fn completed_heads(&self, memory: &MachineMemory) -> Vec<u16> {
        if let Some(packed) = &self.packed {
            return packed.completed_ids(memory);
        }
        let count = self.used_index(memory).wrapping_sub(self.seen);
        let at = |i| self.block + USED + self.layout.used_entry(self.seen.wrapping_add(i));
        (0..count).map(|i| memory.u32_at(at(i)).load(Ordering::Relaxed) as u16).collect()
    }

    /// Describes the state of the ring, for a person.
    pub(super) fn describe(&self, memory: &MachineMemory) -> String {
        if let Some(packed) = &self.packed {
            return packed.describe(memory);
        }
        let word = |at: usize| memory.u16_at(self.block + at).load(Ordering::Relaxed);
        format!(
            "avail {} of {}, used {} of {}, flags {} and {}, events {} and {}, kick {}, call {}",
            self.avail,
            word(AVAIL + 2),
            self.seen,
            word(USED + 2),
            word(AVAIL),
            word(USED),
            word(AVAIL + self.layout.used_event()),
            word(USED + self.layout.avail_event()),
            is_readable(&self.kick),
            is_readable(&self.call)
        )
    }

    /// True if the driver asked for a notification that has come.
    pub(super) fn is_called(&self) -> bool {
        is_readable(&self.call)
    }

    /// Takes the notification.
    pub(super) fn take_call(&self) -> bool {
        rustix::io::read(&*self.call, &mut [0; 8]).is_ok()
    }

    /// Asks for a notification of the next used entry, or for none.
    pub(super) fn arm(&mut self, memory: &MachineMemory, is_armed: bool, chance: &mut SimRng) {
        self.is_armed = is_armed;
        if let Some(packed) = &self.packed {
            return packed.arm(memory, is_armed, self.has_event_index, chance);
        }
        let avail = self.block + AVAIL;
        if self.has_event_index {
            let event = if is_armed { self.seen } else { self.seen.wrapping_sub(1 + chance.below(8) as u16) };
            memory.u16_at(avail + self.layout.used_event()).store(event, Ordering::Relaxed);
        } else {
            let flags = if is_armed { 0 } else { AVAIL_F_NO_INTERRUPT };
            memory.u16_at(avail).store(flags, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
    }

    /// Takes the next used entry: head and written bytes.
    pub(super) fn take_used(&mut self, memory: &MachineMemory) -> Option<(u32, u32)> {
        if let Some(packed) = &mut self.packed {
            return packed.take_used(memory);
        }
        if self.used_index(memory) == self.seen {
            return None;
        }
        let at = self.block + USED + self.layout.used_entry(self.seen);
        self.seen = self.seen.wrapping_add(1);
        let word = |at: usize| memory.u32_at(at).load(Ordering::Relaxed);
        Some((word(at), word(at + 4)))
    }
}
