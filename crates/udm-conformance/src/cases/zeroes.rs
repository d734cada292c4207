//! Cases: write-zeroes and discards.

use crate::{DeviceTestRig, RequestCheckingLayer, TestRequest};
use udm_core::{BioFlags, Op};

/// Writes the first `sectors` sectors, so that there is data that could be lost.
fn write_first_sectors(rig: &mut DeviceTestRig, sectors: u64) {
    let n = (64 * rig.facts.block()).min(rig.longest());
    for at in (0..sectors).step_by(n as usize) {
        let write = rig.write(at, n.min(sectors - at));
        rig.one(0, write);
    }
}

/// A range of write-zeroes reads as zeroes, with and without NOUNMAP. Its neighbours are unchanged
/// (kernel `REQ_OP_WRITE_ZEROES`).
pub(super) fn write_zeroes_read_as_zeroes(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    let longest = rig.facts.limits.max_write_zeroes.0.min(400 * block);
    for flags in [BioFlags::empty(), BioFlags::NOUNMAP, BioFlags::FUA, BioFlags::NOUNMAP | BioFlags::FUA] {
        write_first_sectors(rig, 512 * block);
        let mut at = 1;
        for n in [1, 2, 7, 8, 9, 64, 65, 129] {
            let n = (n * block).min(longest / block * block);
            let (request, handle) =
                (TestRequest::new(Op::WriteZeroes, at * block, n).with(flags), (n % 2) as usize);
            rig.one(handle, request);
            at += n / block + 2;
        }
        rig.verify(1, 0, 512 * block);
        // Later writes to the range are kept.
        let write = rig.write(2 * block, 5 * block);
        rig.one(1, write);
        rig.verify(0, 0, 16 * block);
    }
}

/// A lane without write-zeroes refuses them and changes nothing. An NBD server always offers them,
/// so it writes the zeroes as data.
pub(super) fn unsupported_write_zeroes_refused(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    write_first_sectors(rig, 256 * block);
    for flags in [BioFlags::empty(), BioFlags::NOUNMAP] {
        rig.one(0, TestRequest::new(Op::WriteZeroes, 3 * block, 30 * block).with(flags));
        rig.verify(1, 0, 64 * block);
    }
}

/// A discarded range may read as anything. A later write to the range is read back (kernel
/// `REQ_OP_DISCARD`).
pub(super) fn discard_then_write(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    let longest = rig.facts.limits.max_discard.0 / block * block;
    write_first_sectors(rig, 256 * block);
    for (i, n) in [1, 8, 13, 100].into_iter().enumerate() {
        let (at, n) = ((i as u64 * 7 + 1) * block, (n * block).min(longest));
        rig.one(0, TestRequest::new(Op::Discard, at, n));
        rig.verify(1, 0, 256 * block);
        let write = rig.write(at, block);
        rig.one(1, write);
        rig.verify(0, 0, 256 * block);
        let write = rig.write(at, n);
        rig.one(0, write);
        rig.verify(1, 0, 256 * block);
    }
}

/// A discard changes nothing outside its range, wherever its ends lie within pages, holes, chunks
/// and erase blocks.
pub(super) fn discard_odd_ends(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    let longest = rig.facts.limits.max_discard.0 / block * block;
    for (start, n) in [(1, 1), (7, 2), (9, 15), (15, 130), (3, 333), (8, 8), (0, 127)] {
        write_first_sectors(rig, 512 * block);
        rig.one(1, TestRequest::new(Op::Discard, start * block, (n * block).min(longest)));
        rig.verify(0, 0, 512 * block);
    }
    if rig.is(RequestCheckingLayer::Table) {
        // Longer than any device below accepts at once.
        write_first_sectors(rig, rig.room());
        rig.one(0, TestRequest::new(Op::Discard, block, rig.room() - 2 * block));
        rig.verify_all(1);
    }
}

/// A device without discards refuses them and changes nothing.
pub(super) fn unsupported_discard_refused(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    write_first_sectors(rig, 64 * block);
    rig.one(0, TestRequest::new(Op::Discard, 3 * block, 30 * block));
    rig.verify(1, 0, 64 * block);
}
