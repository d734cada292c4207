//! Cases: guarantees of flush, FUA and PREFLUSH. Other flags do no harm.

use crate::{DeviceTestRig, TestRequest};
use udm_core::{BioFlags, Op};

/// Any set of flags is legal on any operation and is kept in the completed bio. Flags that do not
/// apply are ignored (`BioFlags`).
pub(super) fn any_bio_flags_are_accepted(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    let n = 5 * block;
    for bits in 0..=BioFlags::all().bits() {
        let flags = BioFlags::from_bits_truncate(bits);
        for op in Op::ALL {
            let at = u64::from(bits) * 9 * block;
            let request = match op {
                Op::Flush => TestRequest::flush(),
                _ => rig.request(op, at, n),
            };
            if op == Op::Flush || rig.facts.can(op) {
                rig.one(usize::from(bits % 2), request.with(flags));
            }
            rig.verify(0, at, n);
        }
    }
}

/// FUA is legal on every NBD command and is ignored if it does not apply (proto.md, "Request
/// flags"). A virtual machine flushes after such a write instead.
pub(super) fn clients_may_ask_for_fua(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    for (i, op) in Op::ALL.into_iter().enumerate().filter(|(_, op)| rig.facts.can(*op)).collect::<Vec<_>>() {
        let at = i as u64 * 20 * block;
        let request = if op == Op::Flush { TestRequest::flush() } else { rig.request(op, at, 9 * block) };
        rig.one(i % 3, request.clone().with(BioFlags::FUA));
        if op == Op::WriteZeroes {
            rig.one(0, request.with(BioFlags::FUA | BioFlags::NOUNMAP));
        }
        rig.verify(1, at, 9 * block);
    }
}

/// A flush makes all writes durable that completed before it was sent. They survive a power cut
/// after the flush completes (kernel: "writeback cache control").
pub(super) fn flush_is_durable(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    for round in 0..6 {
        let writes = (0..20).map(|i| rig.write((i * 11 + round) * block, 9 * block)).collect();
        rig.run(0, writes);
        if rig.facts.can(Op::WriteZeroes) {
            rig.one(0, TestRequest::new(Op::WriteZeroes, 3 * block, 30 * block));
        }
        rig.one(0, TestRequest::flush());
        rig.ground.cut_power();
        rig.verify(0, 0, 260 * block);
    }
}

/// A flush on one handle covers writes that completed on the other handles (NBD: `CAN_MULTI_CONN`;
/// in the kernel there is one device).
pub(super) fn flush_covers_other_handles(rig: &mut DeviceTestRig) {
    let (block, handles) = (rig.facts.block(), rig.world.handles());
    for writer in 0..handles {
        for flusher in 0..handles {
            let at = (writer * handles + flusher) as u64 * 50 * block;
            let writes = (0..4).map(|i| rig.write(at + i * 10 * block, 10 * block)).collect();
            rig.run(writer, writes);
            rig.one(flusher, TestRequest::flush());
            rig.ground.cut_power();
            rig.verify(writer, at, 40 * block);
        }
    }
}

/// A request with FUA is durable when it completes. This holds for writes, discards and zeroes.
pub(super) fn fua_is_durable(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    for round in 0..12 {
        let (at, n) = (round * 30 * block, (round * 2 + 1) * block);
        for op in [Op::Write, Op::WriteZeroes, Op::Write, Op::Discard, Op::Write] {
            if rig.facts.can(op) {
                let request = rig.request(op, at, n).with(BioFlags::FUA);
                rig.one((round % 2) as usize, request);
                rig.ground.cut_power();
                rig.verify(0, at, n);
            }
        }
    }
}

/// A request with PREFLUSH makes all writes durable that completed before it was sent.
pub(super) fn preflush_is_durable(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    for (round, op) in [Op::Write, Op::WriteZeroes, Op::Discard, Op::Write].into_iter().enumerate() {
        if !rig.facts.can(op) {
            continue;
        }
        let at = round as u64 * 100 * block;
        let writes = (0..5).map(|i| rig.write(at + i * 7 * block, 6 * block)).collect();
        rig.run(0, writes);
        for flags in [BioFlags::PREFLUSH, BioFlags::PREFLUSH | BioFlags::FUA] {
            let request = rig.request(op, at + 50 * block, 9 * block).with(flags);
            rig.one(1, request.clone());
            rig.ground.cut_power();
            if !flags.contains(BioFlags::FUA) {
                // The request itself may be lost.
                rig.model.may_have_written(&TestRequest::new(Op::Discard, request.sector, request.sectors));
            }
            rig.verify(0, at, 50 * block);
            rig.verify(0, at + 50 * block, 9 * block);
        }
    }
}
