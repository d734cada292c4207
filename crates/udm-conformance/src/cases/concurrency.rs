//! Cases: many requests at once, from all handles.

use crate::{DeviceTestRig, TestRequest};
use rand::RngExt;
use rand::seq::SliceRandom;
use udm_core::{BioFlags, Op};

/// Each handle has its own ranges and dozens of requests in flight. Rounds of writes alternate with
/// rounds of reads, concurrently with the other handles.
pub(super) fn many_in_flight(rig: &mut DeviceTestRig) {
    let (block, handles) = (rig.facts.block(), rig.world.handles() as u64);
    let longest = (rig.longest() / block).min(12);
    let slots = rig.room() / block / 12;
    for round in 0..4 {
        let mut sent: Vec<Vec<TestRequest>> = Vec::new();
        for handle in 0..handles {
            let mut own: Vec<u64> = (0..slots).filter(|slot| slot % handles == handle).collect();
            own.shuffle(&mut rig.rng);
            let mut requests = Vec::new();
            for slot in own.into_iter().take(64) {
                let (at, n) = (slot * 12 * block, rig.rng.random_range(1..=longest) * block);
                let op = if round % 2 == 0 { Op::Write } else { Op::Read };
                requests.push(rig.request(op, at, n));
            }
            rig.world.submit(handle as usize, requests.clone());
            sent.push(requests);
        }
        for (handle, requests) in sent.into_iter().enumerate() {
            for (request, answer) in requests.iter().zip(rig.world.collect(handle)) {
                rig.set_verdict(request, &answer);
            }
        }
    }
    rig.verify_all(0);
}

/// All handles write one range at the same time. Each sector then has the whole data of one write,
/// and readers see the same data now and later. A disk writes a sector completely or not at all;
/// larger units may be mixed. Memory guarantees only a word.
pub(super) fn overlapping_writes(rig: &mut DeviceTestRig) {
    let (block, handles) = (rig.facts.block(), rig.world.handles());
    let n = (32 * block).min(rig.longest());
    for round in 0..8 {
        let at = round * 16 * block;
        let mut sent: Vec<Vec<TestRequest>> = Vec::new();
        for _ in 0..handles {
            sent.push((0..6).map(|i| rig.write(at + i % 3 * block, n - 2 * block)).collect());
        }
        sent.iter().flatten().for_each(|write| rig.model.may_have_written(write));
        for (handle, requests) in sent.into_iter().enumerate() {
            rig.world.submit(handle, requests);
        }
        for handle in 0..handles {
            assert!(rig.world.collect(handle).iter().all(|answer| answer.errno == 0));
        }
        rig.verify(0, at, n);
        // The content does not change any more.
        let read = vec![TestRequest::read(at, n)];
        let (first, second) = (rig.run(0, read.clone()), rig.run(1, read));
        assert!(first == second, "two readers see different data");
        let write = rig.write(at, n);
        rig.one((round % 2) as usize, write);
    }
}

/// Flushes complete among writes and reads on all handles, and block no request.
pub(super) fn flushes_among_writes(rig: &mut DeviceTestRig) {
    let (block, handles) = (rig.facts.block(), rig.world.handles());
    for round in 0..4 {
        let mut sent: Vec<Vec<TestRequest>> = Vec::new();
        for handle in 0..handles {
            let mut requests = Vec::new();
            for i in 0..40 {
                let at = ((handle * 40 + i) * 5) as u64 * block;
                requests.push(match i % 5 {
                    0 => TestRequest::flush(),
                    1 | 2 if rig.facts.can(Op::Write) => rig.write(at, 4 * block),
                    3 if rig.facts.can(Op::Write) => rig.write(at, 2 * block).with(BioFlags::FUA),
                    _ => TestRequest::read(at, 3 * block),
                });
            }
            rig.world.submit(handle, requests.clone());
            sent.push(requests);
        }
        for (handle, requests) in sent.into_iter().enumerate() {
            for (request, answer) in requests.iter().zip(rig.world.collect(handle)) {
                rig.set_verdict(request, &answer);
            }
        }
        rig.one(round % handles, TestRequest::flush());
    }
    rig.verify_all(1);
}

/// A batch that is larger than every pool on its way (1024 requests) is served completely. An empty
/// pool must not fail requests.
pub(super) fn one_large_batch(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    let blocks = (rig.room() / block).min(1500);
    let op = if rig.facts.can(Op::Write) { Op::Write } else { Op::Read };
    let requests: Vec<TestRequest> = (0..blocks).map(|i| rig.request(op, i * block, block)).collect();
    rig.run(0, requests);
    let n = (4 * block).min(rig.longest());
    let reads = (0..rig.room() / n)
        .map(|i| if i % 64 == 0 { TestRequest::flush() } else { TestRequest::read(i * n, n) });
    rig.run(1, reads.collect());
}
