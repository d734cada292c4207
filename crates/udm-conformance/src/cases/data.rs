//! Cases: a read returns the data of the last write to its range, for any memory and handle.

use crate::{DeviceTestRig, TestRequest};
use rand::RngExt;
use udm_core::{BioFlags, Op};

/// Lengths in blocks that are not aligned with chunks and stripes.
const ODD: [u64; 7] = [1, 3, 7, 2, 13, 5, 31];

/// Ranges that cover the whole room, with `lengths` repeated.
fn cover_device_with_ranges(rig: &DeviceTestRig, lengths: &[u64]) -> Vec<(u64, u64)> {
    let (block, room, longest) = (rig.facts.block(), rig.room(), rig.longest());
    let (mut at, mut tiles) = (0, Vec::new());
    for length in lengths.iter().cycle() {
        let n = (length * block).min(longest).min(room - at);
        if n == 0 {
            break;
        }
        tiles.push((at, n));
        at += n;
    }
    tiles
}

/// The room is written in odd pieces and read in other odd pieces. A second round writes backwards
/// over the old data.
pub(super) fn data_is_read_where_written(rig: &mut DeviceTestRig) {
    for round in 0..2 {
        let mut tiles_to_write = cover_device_with_ranges(rig, &ODD[round..]);
        if round == 1 {
            tiles_to_write.reverse();
        }
        for (i, some) in tiles_to_write.chunks(37).enumerate() {
            let writes = some.iter().map(|&(at, n)| rig.write(at, n)).collect();
            rig.run(i % 2, writes);
        }
        for (i, some) in cover_device_with_ranges(rig, &[17, 64, 1, 90]).chunks(29).enumerate() {
            rig.run((i + 1) % 2, some.iter().map(|&(at, n)| TestRequest::read(at, n)).collect());
        }
    }
}

/// Data may have any number of pieces of any length at any address (kernel: bio vectors; udm:
/// `Segments`). A stream may be split anywhere.
pub(super) fn odd_data_pieces_are_served(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    let cuts: [&[usize]; 7] = [
        &[1],
        &[511],
        &[513, 1, 2, 3, 5],
        &[100; 40],
        &[7; 300],
        &[4096, 1, 4095, 512],
        &[512, 512, 512, 512, 512, 512, 512, 512, 511],
    ];
    for (i, cuts) in cuts.into_iter().enumerate() {
        let (at, n) = ((i as u64 * 40 + 1) * block, (24 * block).min(rig.longest()));
        if rig.facts.can(Op::Write) {
            let write = rig.write(at, n).in_pieces(cuts);
            rig.one(0, write);
            rig.one(1, TestRequest::read(at, n));
            let write = rig.write(at, n).with(BioFlags::FUA).in_pieces(cuts);
            rig.one(1, write);
        }
        rig.one(0, TestRequest::read(at, n).in_pieces(cuts));
        rig.one(1, TestRequest::read(at, block).in_pieces(cuts));
    }
    rig.verify_all(1);
}

/// After a write completes, a later read on any handle returns its data.
pub(super) fn all_handles_see_writes(rig: &mut DeviceTestRig) {
    let (block, handles) = (rig.facts.block(), rig.world.handles());
    for round in 0..40 {
        let at = round * 5 * block;
        for writer in 0..handles {
            let write = rig.write(at, 3 * block);
            rig.one(writer, write);
            for reader in 0..handles {
                rig.one(reader, TestRequest::read(at + block, block));
                rig.one(reader, TestRequest::read(at, 4 * block));
            }
        }
    }
}

/// A successful read of an unwritten range returns no old content of a buffer.
pub(super) fn unwritten_read_leaks_no_data(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    let n = 16.min(rig.longest() / block) * block;
    if rig.facts.can(Op::Write) {
        // The memory of these writes is reused.
        for i in 0..20 {
            let write = rig.write(i * n, n);
            rig.one(0, write);
        }
    }
    for i in 20..60 {
        rig.one((i % 2) as usize, TestRequest::read(i * n, n));
        rig.one(0, TestRequest::read(i * n + block, block).in_pieces(&[3, 77, 200]));
    }
}

/// A few hundred requests of all kinds, one after another on random handles, agree with a model.
pub(super) fn random_requests_match_model(rig: &mut DeviceTestRig) {
    let (block, handles) = (rig.facts.block(), rig.world.handles());
    let (blocks, longest) = (rig.room() / block, (rig.longest() / block).min(160));
    for _ in 0..300 {
        let start = rig.rng.random_range(0..blocks);
        let length = match rig.rng.random_range(0..8) {
            0 => rig.rng.random_range(1..=longest),
            _ => rig.rng.random_range(1..=24.min(longest)),
        };
        let (start, length) = (start * block, length.min(blocks - start) * block);
        let op = match rig.rng.random_range(0..16) {
            0 => Op::Discard,
            1 => Op::WriteZeroes,
            2 => Op::Flush,
            3..9 => Op::Write,
            _ => Op::Read,
        };
        let handle = rig.rng.random_range(0..handles);
        let mut request = rig.request(op, start, length);
        if op == Op::Flush {
            request = TestRequest::flush();
        } else if rig.facts.limits.max_for(op).0 < length {
            continue;
        }
        if rig.rng.random_range(0..4) == 0 {
            request.flags |= BioFlags::FUA;
        }
        if rig.rng.random_range(0..3) == 0 {
            request.cuts = (0..6).map(|_| rig.rng.random_range(1..3000)).collect();
        }
        rig.one(handle, request);
    }
    rig.verify_all(0);
}
