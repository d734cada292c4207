//! Every command, with simple and with structured replies.

use crate::ServerFixture;
use crate::disk::{CompletionOrder, TestDisk, pattern};
use std::collections::HashMap;
use udm_core::{BioFlags, Op, Sectors};
use udm_wire::nbd::{CommandFlags, EIO, ENOTSUP, ExportFlags, ExportInfoItem, NbdCommand};

const MIB: u64 = 1 << 20;
const NONE: CommandFlags = CommandFlags::empty();

fn fresh(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(pattern).collect()
}

#[test]
fn every_command() {
    for structured in [false, true] {
        let world = ServerFixture::new(TestDisk::new(80 * MIB, CompletionOrder::AtOnce));
        let mut c = world.client(structured);
        assert_eq!(c.read(512, 1536), Ok(fresh(512, 1536)));
        if structured {
            let reply = c.ask(NbdCommand::Read, CommandFlags::DF, 4096, 8192, &[]);
            assert_eq!((reply.error, reply.data), (0, fresh(4096, 8192)));
        }
        // Sizes around the limits of the receiver, up to the largest one.
        for len in [512, 4096, 4608, 65536, 66048, 300_032, 32 << 20, 64 << 20] {
            let data: Vec<u8> = (0..len).map(|i| (i % 249) as u8).collect();
            assert_eq!(c.write(NONE, MIB, &data), 0, "{len}");
            assert!(c.read(MIB, len as u32) == Ok(data), "{len}");
        }
        assert_eq!(c.plain(NbdCommand::WriteZeroes, NONE, MIB + 512, 1024), 0);
        assert_eq!(c.read(MIB, 2048).unwrap()[512..1536], [0; 1024]);
        assert_eq!(c.plain(NbdCommand::WriteZeroes, CommandFlags::FAST_ZERO, 2 * MIB, 1 << 20), 0);
        assert_eq!(c.plain(NbdCommand::Trim, NONE, 0, 4096), 0);
        assert_eq!(c.plain(NbdCommand::Flush, NONE, 0, 0), 0);
        assert_eq!(c.plain(NbdCommand::Cache, NONE, 0, 3 << 20), 0);
        let stats = world.wait_for("answers are out", |s| s.in_flight == 0);
        assert_eq!(stats.errors, 0);
        drop(c);
        world.wait_until_empty();
        world.end();
    }
}

/// A request may be longer than the limit of the device.
#[test]
fn data_is_cut_to_the_limit_of_the_device() {
    for structured in [false, true] {
        let mut disk = TestDisk::new(8 * MIB, CompletionOrder::Shuffled);
        disk.limits_mut().max_sectors = Sectors::from_bytes(100 << 10);
        let world = ServerFixture::new(disk);
        let mut c = world.client(structured);
        let data: Vec<u8> = (0..MIB as u32).map(|i| (i % 249) as u8).collect();
        assert_eq!(c.write(CommandFlags::FUA, MIB, &data), 0);
        assert_eq!(world.disk.seen(), vec![(Op::Write, BioFlags::FUA); 11], "each piece is durable");
        assert!(c.read(MIB, MIB as u32) == Ok(data));
        assert_eq!(world.disk.seen(), vec![(Op::Read, BioFlags::empty()); 11]);
        assert_eq!(c.read(7 * MIB, MIB as u32), Err(EIO), "the last piece failed");
        assert_eq!(c.write(NONE, 7 * MIB, &[0; MIB as usize]), EIO);
        assert_eq!(c.read(0, 512), Ok(fresh(0, 512)));
        drop(c);
        world.wait_until_empty();
        world.end();
    }
}

#[test]
fn what_reaches_the_device() {
    let world = ServerFixture::new(TestDisk::new(8 * MIB, CompletionOrder::AtOnce));
    let mut c = world.client(true);
    let none = BioFlags::empty();
    let mut check = |command, flags, len: u32, expected: &[(Op, BioFlags)]| {
        let payload = if command == NbdCommand::Write { vec![1; len as usize] } else { vec![] };
        assert_eq!(c.ask(command, flags, 0, len, &payload).error, 0);
        assert_eq!(world.disk.seen(), expected, "{command:?} {flags:?}");
    };
    let fua = CommandFlags::FUA;
    check(NbdCommand::Write, fua, 512, &[(Op::Write, BioFlags::FUA)]);
    check(NbdCommand::Write, NONE, 512, &[(Op::Write, none)]);
    check(NbdCommand::Flush, NONE, 0, &[(Op::Flush, none)]);
    check(NbdCommand::WriteZeroes, CommandFlags::NO_HOLE, 512, &[(Op::WriteZeroes, BioFlags::NOUNMAP)]);
    check(NbdCommand::Trim, fua, 512, &[(Op::Discard, none), (Op::Flush, none)]);
    check(NbdCommand::WriteZeroes, fua, 512, &[(Op::WriteZeroes, none), (Op::Flush, none)]);
    check(NbdCommand::Read, fua, 512, &[(Op::Read, none)]);
    check(NbdCommand::Cache, NONE, 300 << 10, &[(Op::Read, none), (Op::Read, none)]);
    drop(c);
    world.wait_until_empty();
    world.end();
}

#[test]
fn zeroes_that_the_device_can_not_write_are_written_out() {
    let world = ServerFixture::new(TestDisk::new(8 * MIB, CompletionOrder::Shuffled).without_zeroes());
    let mut c = world.client(false);
    assert_eq!(c.plain(NbdCommand::WriteZeroes, CommandFlags::FAST_ZERO, 0, 4096), ENOTSUP);
    assert_eq!(c.read(0, 4096), Ok(fresh(0, 4096)), "nothing happened");
    world.disk.seen();
    let len = (1 << 20) + 512;
    assert_eq!(c.plain(NbdCommand::WriteZeroes, CommandFlags::FUA, 512, len), 0);
    let seen = world.disk.seen();
    assert_eq!(seen.first().map(|s| s.0), Some(Op::WriteZeroes));
    assert_eq!(seen.last().map(|s| s.0), Some(Op::Flush));
    assert_eq!(seen.iter().filter(|s| s.0 == Op::Write).count(), 5);
    let data = c.read(0, len + 1024).unwrap();
    assert!(data[512..512 + len as usize].iter().all(|&b| b == 0));
    assert_eq!(
        (&data[..512], &data[512 + len as usize..]),
        (&fresh(0, 512)[..], &fresh(u64::from(len) + 512, 512)[..])
    );
    // A buffer is reused for zeroes and for data in any order.
    assert_eq!(c.write(NONE, 0, &vec![7; 1 << 20]), 0);
    assert_eq!(c.plain(NbdCommand::WriteZeroes, NONE, 4 * MIB, 1 << 20), 0);
    assert!(c.read(4 * MIB, 1 << 20).unwrap().iter().all(|&b| b == 0));
    drop(c);
    world.wait_until_empty();
    world.end();
}

/// A trim is a hint (proto.md). The device may lose its discards while a client is connected: it is
/// made the origin of a snapshot.
#[test]
fn a_trim_that_the_device_does_not_support_succeeds() {
    let world = ServerFixture::new(TestDisk::new(8 * MIB, CompletionOrder::AtOnce).without_discards());
    let mut c = world.client(false);
    assert_eq!(c.plain(NbdCommand::Trim, NONE, 0, 4096), 0);
    assert_eq!(c.plain(NbdCommand::Trim, CommandFlags::FUA, 4096, 4096), 0);
    let ops: Vec<Op> = world.disk.seen().into_iter().map(|seen| seen.0).collect();
    assert_eq!(ops, [Op::Discard, Op::Discard, Op::Flush]);
    assert_eq!(c.read(0, 8192), Ok(fresh(0, 8192)));
    drop(c);
    world.wait_until_empty();
    world.end();
}

#[test]
fn the_handshake_tells_the_limits() {
    let mut disk = TestDisk::new(8 * MIB, CompletionOrder::AtOnce);
    let limits = disk.limits_mut();
    (limits.logical_block, limits.io_opt, limits.read_only) = (4096, 65536, true);
    let world = ServerFixture::new(disk);
    let infos = world.unnegotiated_client().go("", true);
    let ExportInfoItem::Export { size, flags } = infos[0] else { panic!("{infos:?}") };
    assert_eq!(size, 8 * MIB);
    assert!(flags.contains(ExportFlags::READ_ONLY | ExportFlags::SEND_DF | ExportFlags::CAN_MULTI_CONN));
    let ExportInfoItem::BlockSize(blocks) = infos[1] else { panic!("{infos:?}") };
    assert_eq!((blocks.minimum, blocks.preferred, blocks.maximum), (1, 65536, 64 << 20));
    world.wait_until_empty();
    world.end();
}

/// Hundreds of requests in flight, answered in any order: every answer belongs to its request.
#[test]
fn a_pipeline_out_of_order() {
    for structured in [false, true] {
        let world = ServerFixture::new(TestDisk::new(16 * MIB, CompletionOrder::Shuffled));
        let mut c = world.client(structured);
        let mut expected = HashMap::new();
        for i in 0..600u64 {
            // Each write has its own range, and each read a range that is not written.
            if i % 2 == 0 {
                let len = 512 * (1 + i as u32 % 23);
                let data = vec![i as u8; len as usize];
                expected.insert(c.send(NbdCommand::Write, NONE, 8 * MIB + i * 12288, len, &data), vec![]);
            } else {
                let (offset, len) = (i * 4096, 512 * (1 + i as u32 % 61));
                expected
                    .insert(c.send(NbdCommand::Read, NONE, offset, len, &[]), fresh(offset, len as usize));
            }
        }
        let mut order = Vec::new();
        while !expected.is_empty() {
            let reply = c.receive();
            assert_eq!(reply.error, 0);
            order.push(reply.cookie);
            assert!(expected.remove(&reply.cookie) == Some(reply.data), "cookie {}", reply.cookie);
        }
        assert!(!order.is_sorted(), "the disk was meant to answer out of order");
        for i in (0..600).step_by(2) {
            let len = 512 * (1 + i as u32 % 23);
            assert!(c.read(8 * MIB + i * 12288, len).unwrap().iter().all(|&b| b == i as u8), "{i}");
        }
        drop(c);
        world.wait_until_empty();
        world.end();
    }
}
