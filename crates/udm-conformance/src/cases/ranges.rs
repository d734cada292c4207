//! Cases: ranges of requests. They have all starts and lengths, lie at and beyond the end, and at
//! the limits of 32-bit numbers.

use crate::{DeviceTestRig, ExpectedResult, TestRequest};
use udm_core::{Op, Sectors};

/// A device accepts each range inside it that is aligned to its block, up to its maximum length
/// (kernel: `bio_check_eod`, `queue_limits`).
pub(super) fn every_start_and_length(rig: &mut DeviceTestRig) {
    let (block, room) = (rig.facts.block(), rig.room());
    let end = rig.facts.size() / block * block;
    let longest = rig.longest();
    let starts = [0, 1, 2, 7, 8, 9, 255, 256].map(|n| n * block);
    let ends = [1, 2, 7, 8, 9, 300].map(|n| end - n * block);
    let lengths = [1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 63, 128, 129].map(|n| n * block);
    for start in starts.into_iter().filter(|&start| start < room).chain(ends) {
        for length in lengths.into_iter().chain([longest]) {
            if start + length <= end && length <= longest {
                let write = rig.write(start, length);
                rig.one(0, write);
                rig.one(1, TestRequest::read(start, length));
            }
        }
    }
    rig.verify_all(0);
}

/// A request that ends after the end of the device is refused and changes nothing, not even the
/// part before the end (kernel: EIO; NBD: ENOSPC or EINVAL).
pub(super) fn beyond_the_end(rig: &mut DeviceTestRig) {
    let (block, end) = (rig.facts.block(), rig.facts.size() / rig.facts.block() * rig.facts.block());
    if rig.facts.can(Op::Write) {
        let write = rig.write(end - 4 * block, 4 * block);
        rig.one(0, write);
    }
    let far = [end - block, end, end + block, end * 2, 1 << 40, 1 << 54].into_iter();
    for start in far.filter(|start| start + 2 * block > end) {
        for op in [Op::Read, Op::Write, Op::Discard, Op::WriteZeroes] {
            for length in [2, 8] {
                let request = rig.request(op, start, length * block);
                rig.one(0, request);
            }
        }
    }
    rig.verify(1, end - 4 * block, 4 * block);
}

/// A range that wraps around, in sectors or in bytes, does not reach the begin of the device.
pub(super) fn wrapping_range_is_refused(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    if rig.facts.can(Op::Write) {
        let write = rig.write(0, 8 * block);
        rig.one(0, write);
    }
    // 2^64 sectors, 2^64 bytes, and 2^63 bytes, which is the limit of signed file offsets.
    for start in [u64::MAX / block * block - block, (1 << 55) - block, 1 << 55, (1 << 54) - block, 1 << 54] {
        for op in [Op::Read, Op::Write, Op::Discard, Op::WriteZeroes] {
            let request = rig.request(op, start, 2 * block);
            rig.one(1, request);
        }
    }
    if !rig.kind.is_served() {
        for op in [Op::Discard, Op::WriteZeroes] {
            for length in [1 << 55, u64::MAX / block * block - block] {
                let request = rig.request(op, block, length);
                rig.one(0, request);
            }
        }
    }
    rig.verify(0, 0, 8 * block);
}

/// Positions have 64 bits in all layers: on both sides of 2^32 bytes, of 2^31 and 2^32 sectors, and
/// of the largest power of two inside the device.
pub(super) fn sector_offsets_have_64_bits(rig: &mut DeviceTestRig) {
    let (block, end) = (rig.facts.block(), rig.facts.size() / rig.facts.block() * rig.facts.block());
    let mut marks = vec![1 << 22, 1 << 23, 1 << 31, 1 << 32, 1 << 33, 1 << end.ilog2(), end - 8 * block];
    marks.retain(|mark| mark + 8 * block <= end);
    for &mark in &marks {
        let n = 8 * block;
        if rig.facts.can(Op::Write) {
            for (handle, start) in [(0, mark - n), (1, mark)] {
                let write = rig.write(start, n);
                rig.one(handle, write);
            }
            let write = rig.write(mark - block, 2 * block);
            rig.one(0, write);
        }
        rig.one(1, TestRequest::read(mark - n, n));
        rig.one(0, TestRequest::read(mark - block, 2 * block));
    }
    // A position that was cut to 32 bits would have overwritten this data.
    for mark in marks {
        rig.verify(0, mark - 8 * block, 8 * block);
        rig.verify(1, mark & 0xffff_ffff, 8 * block);
    }
    rig.verify(0, 0, 16 * block);
}

/// A request that is not aligned to the logical block is refused with EINVAL (kernel; virtio: EIO)
/// and writes nothing. Over NBD it succeeds and affects exactly its range.
pub(super) fn unaligned_request_is_refused(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    let ops = [Op::Read, Op::Write, Op::Discard, Op::WriteZeroes].into_iter();
    for op in ops.filter(|&op| rig.facts.can(op)).collect::<Vec<_>>() {
        for (start, length) in [(1, block), (0, block - 1), (block - 1, 2), (block + 1, block + 1)] {
            let request = rig.request(op, start, length);
            rig.one(0, request);
        }
    }
    rig.verify(1, 0, 4 * block);
}

/// An empty range is EINVAL, for a table and over NBD; virtio: EIO.
pub(super) fn empty_range_is_einval(rig: &mut DeviceTestRig) {
    for op in [Op::Read, Op::Write, Op::Discard, Op::WriteZeroes] {
        for start in [0, rig.facts.block(), rig.facts.size()] {
            let request = rig.request(op, start, 0);
            rig.one(0, request);
        }
    }
    rig.verify(0, 0, 8 * rig.facts.block());
}

/// A request of exactly the maximum length of the limits is served. A table splits a longer one.
/// Data is limited to 2 MiB here.
pub(super) fn longest_request_is_served(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    let size = rig.facts.size() / block * block;
    for op in [Op::Write, Op::Read, Op::WriteZeroes, Op::Discard, Op::Read] {
        if !rig.facts.can(op) {
            continue;
        }
        let max = rig.facts.limits.max_for(op).0;
        // In NBD a length in bytes has 32 bits, in virtio a length in sectors.
        let bound = if op.has_data() { rig.room() } else { size.min((1 << 23) - block) };
        for length in [max, max + block, max * 2, max * 3 + block, bound] {
            let length = length.min(bound) / block * block;
            let request = rig.request(op, 0, length);
            if length > 0 && rig.facts.verdict(&request) != ExpectedResult::Unasked {
                rig.one(0, request);
            }
        }
        rig.verify(1, 0, block);
    }
    // A request of the maximum length is also served at the end of the device.
    for op in [Op::Read, Op::WriteZeroes] {
        let n = rig.facts.limits.max_for(op).min(Sectors(rig.room())).0 / block * block;
        if rig.facts.can(op) && n > 0 {
            let request = rig.request(op, size - n, n);
            rig.one(1, request);
        }
    }
    rig.verify_all(0);
}
