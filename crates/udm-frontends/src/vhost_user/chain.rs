//! Chains of descriptors: the buffers of one request.

use super::memory::GuestMemory;
use super::ring::SplitRing;
use udm_core::interleave;
use udm_wire::virtio::packed::PackedDescriptor;
use udm_wire::virtio::ring::{DESCRIPTOR_SIZE, RingDescriptor};

/// The longest chain. A guest must not make one longer than its ring, but rings may have 32,768
/// entries.
const BUFFERS_MAX: usize = 1024;

/// The guest has made a chain that breaks the rules. It is used with nothing written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BrokenChainError {
    #[error("a chain of descriptors has a circle, or more than 1024 buffers")]
    TooLong,
    #[error("a descriptor is followed by one that the ring does not have")]
    NoSuchDescriptor,
    #[error("a table of indirect descriptors is empty, in another one, or in no memory of the guest")]
    BadIndirect,
    #[error("a buffer that the device reads follows one that it writes")]
    Order,
}

/// A buffer: guest address and length.
pub(super) type GuestBuffer = (u64, usize);

/// The buffers of a request, in order.
#[derive(Debug, Default)]
pub(super) struct DescriptorChain {
    /// Buffers that the device reads.
    pub(super) readable: Vec<GuestBuffer>,
    /// Buffers that the device writes.
    pub(super) writable: Vec<GuestBuffer>,
}

impl DescriptorChain {
    /// Reads the chain of a split ring that begins at `head`, which is below the size of the ring.
    ///
    /// # Errors
    /// The chain is broken.
    pub(super) fn read(
        &mut self,
        ring: &SplitRing,
        memory: &GuestMemory,
        head: u16,
    ) -> Result<(), BrokenChainError> {
        self.readable.clear();
        self.writable.clear();
        let mut index = head;
        for _ in 0..ring.layout.size {
            let descriptor = ring.descriptor(index);
            if descriptor.is_indirect() {
                if descriptor.has_next() {
                    return Err(BrokenChainError::BadIndirect);
                }
                return self.read_indirect(memory, &descriptor);
            }
            self.add(descriptor.address, descriptor.len, descriptor.is_writable())?;
            if !descriptor.has_next() {
                return Ok(());
            }
            index = descriptor.next;
            if index >= ring.layout.size {
                return Err(BrokenChainError::NoSuchDescriptor);
            }
        }
        Err(BrokenChainError::TooLong)
    }

    fn read_indirect(
        &mut self,
        memory: &GuestMemory,
        table: &RingDescriptor,
    ) -> Result<(), BrokenChainError> {
        let count = table.len as usize / DESCRIPTOR_SIZE;
        if count == 0 || !(table.len as usize).is_multiple_of(DESCRIPTOR_SIZE) {
            return Err(BrokenChainError::BadIndirect);
        }
        let mut index = 0;
        for _ in 0..count.min(BUFFERS_MAX) {
            let descriptor = RingDescriptor::from_words(read_table_words(memory, table.address, index)?);
            if descriptor.is_indirect() {
                return Err(BrokenChainError::BadIndirect);
            }
            self.add(descriptor.address, descriptor.len, descriptor.is_writable())?;
            if !descriptor.has_next() {
                return Ok(());
            }
            index = usize::from(descriptor.next);
            if index >= count {
                return Err(BrokenChainError::NoSuchDescriptor);
            }
        }
        Err(BrokenChainError::TooLong)
    }

    /// Reads the chain of these descriptors of a packed ring.
    ///
    /// # Errors
    /// The chain is broken.
    pub(super) fn read_packed(
        &mut self,
        descriptors: &[PackedDescriptor],
        memory: &GuestMemory,
    ) -> Result<(), BrokenChainError> {
        self.readable.clear();
        self.writable.clear();
        for descriptor in descriptors {
            if !descriptor.is_indirect() {
                self.add(descriptor.address, descriptor.len, descriptor.is_writable())?;
            } else if let [table] = descriptors {
                return self.read_packed_table(memory, table);
            } else {
                return Err(BrokenChainError::BadIndirect);
            }
        }
        Ok(())
    }

    /// Reads a table of descriptors of a packed ring: all of them, in their order (VIRTIO 1.2,
    /// 2.8.8).
    fn read_packed_table(
        &mut self,
        memory: &GuestMemory,
        table: &PackedDescriptor,
    ) -> Result<(), BrokenChainError> {
        let count = table.len as usize / DESCRIPTOR_SIZE;
        if count == 0 || !(table.len as usize).is_multiple_of(DESCRIPTOR_SIZE) {
            return Err(BrokenChainError::BadIndirect);
        }
        for index in 0..count {
            let descriptor = PackedDescriptor::from_words(read_table_words(memory, table.address, index)?);
            if descriptor.is_indirect() {
                return Err(BrokenChainError::BadIndirect);
            }
            self.add(descriptor.address, descriptor.len, descriptor.is_writable())?;
        }
        Ok(())
    }

    fn add(&mut self, address: u64, len: u32, is_writable: bool) -> Result<(), BrokenChainError> {
        let buffer = (address, len as usize);
        if self.readable.len() + self.writable.len() == BUFFERS_MAX {
            return Err(BrokenChainError::TooLong);
        }
        match is_writable {
            true => self.writable.push(buffer),
            false if !self.writable.is_empty() => return Err(BrokenChainError::Order),
            false => self.readable.push(buffer),
        }
        Ok(())
    }
}

/// Reads descriptor `index` of the table at guest address `table`, as its two words.
fn read_table_words(memory: &GuestMemory, table: u64, index: usize) -> Result<[u64; 2], BrokenChainError> {
    interleave::mark_interleave_point();
    let at = table.checked_add((index * DESCRIPTOR_SIZE) as u64);
    let bytes = at.and_then(|at| memory.read_16(at)).ok_or(BrokenChainError::BadIndirect)?;
    let (low, high) = bytes.split_at(8);
    Ok([low, high].map(|half| u64::from_le_bytes(half.try_into().unwrap_or_default())))
}

/// Number of bytes of `buffers`.
pub(super) fn buffers_len(buffers: &[GuestBuffer]) -> usize {
    buffers.iter().map(|(_, len)| len).sum()
}

/// Reads the first 16 bytes of `buffers` and removes them. `None` if there are fewer, or some are
/// in no memory of the guest.
pub(super) fn consume_front_16(memory: &GuestMemory, buffers: &mut Vec<GuestBuffer>) -> Option<[u8; 16]> {
    match buffers.first() {
        Some((address, 16)) => {
            let bytes = memory.read_16(*address)?;
            buffers.remove(0);
            Some(bytes)
        }
        _ => {
            let mut bytes = [0; 16];
            consume_front(memory, buffers, &mut bytes).then_some(bytes)
        }
    }
}

/// Reads the first `out.len()` bytes of `buffers` and removes them. False if there are fewer, or
/// some are in no memory of the guest.
fn consume_front(memory: &GuestMemory, buffers: &mut Vec<GuestBuffer>, out: &mut [u8]) -> bool {
    let mut done = 0;
    let mut whole = 0;
    for (address, len) in buffers.iter_mut() {
        interleave::mark_interleave_point();
        let part = (*len).min(out.len() - done);
        if !memory.read(*address, &mut out[done..done + part]) {
            return false;
        }
        done += part;
        if part < *len {
            // It was readable, so its end does not overflow.
            (*address, *len) = (*address + part as u64, *len - part);
            break;
        }
        whole += 1;
    }
    buffers.drain(..whole);
    done == out.len()
}

/// Removes the last byte of `buffers` and returns its address.
pub(super) fn take_last_byte(buffers: &mut Vec<GuestBuffer>) -> Option<u64> {
    while buffers.last().is_some_and(|(_, len)| *len == 0) {
        buffers.pop();
    }
    let (address, len) = buffers.last_mut()?;
    *len -= 1;
    address.checked_add(*len as u64)
}
