//! Requests at any byte: the device sees whole blocks, and no client's bytes are lost.

use crate::disk::{CompletionOrder, TestDisk, pattern};
use crate::{ScriptedClient, ServerFixture};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use udm_core::{BioFlags, Op};
use udm_frontends::nbd::Export;
use udm_wire::nbd::{CommandFlags, EIO, NbdCommand};

const MIB: u64 = 1 << 20;
const NONE: CommandFlags = CommandFlags::empty();

fn world(block: u32, size: u64, order: CompletionOrder) -> ServerFixture {
    let mut disk = TestDisk::new(size, order);
    disk.limits_mut().logical_block = block;
    ServerFixture::new(disk)
}

/// One client with any ranges, compared with a copy in memory.
#[test]
fn any_range_of_any_command() {
    for (block, structured) in [(512, true), (4096, false), (65536, true)] {
        let world = world(block, 2 * MIB, CompletionOrder::Shuffled);
        let mut c = world.client(structured);
        let mut rng = SmallRng::seed_from_u64(u64::from(block));
        let mut model: Vec<u8> = (0..2 * MIB).map(pattern).collect();
        // The last sector is bad.
        let end = 2 * MIB - 65536;
        for step in 0..1500u32 {
            let offset = rng.random_range(0..end);
            let longest = if step % 5 == 0 { 300_000 } else { 3 * block as u64 };
            let len = rng.random_range(1..=longest.min(end - offset));
            let range = offset as usize..(offset + len) as usize;
            let flags = if rng.random_bool(0.2) { CommandFlags::FUA } else { NONE };
            match rng.random_range(0..6) {
                0 | 1 => {
                    let data: Vec<u8> = (0..len).map(|i| (u64::from(step) + i) as u8).collect();
                    assert_eq!(c.write(flags, offset, &data), 0);
                    model[range].copy_from_slice(&data);
                }
                2 => {
                    assert_eq!(c.plain(NbdCommand::WriteZeroes, flags, offset, len as u32), 0);
                    model[range].fill(0);
                }
                3 => {
                    // The disk does not change trimmed data.
                    assert_eq!(c.plain(NbdCommand::Trim, flags, offset, len as u32), 0);
                }
                4 => assert_eq!(c.plain(NbdCommand::Cache, NONE, offset, len as u32), 0),
                _ => assert!(c.read(offset, len as u32) == Ok(model[range].to_vec()), "{offset} {len}"),
            }
        }
        assert!(c.read(0, end as u32) == Ok(model[..end as usize].to_vec()));
        drop(c);
        world.wait_until_empty();
        world.end();
    }
}

#[test]
fn what_the_device_sees() {
    let world = world(512, MIB, CompletionOrder::AtOnce);
    let mut c = world.client(true);
    let (read, none, fua) = ((Op::Read, BioFlags::empty()), BioFlags::empty(), BioFlags::FUA);
    let mut check = |command, flags, offset, len: u32, expected: &[(Op, BioFlags)]| {
        let payload = if command == NbdCommand::Write { vec![1; len as usize] } else { vec![] };
        assert_eq!(c.ask(command, flags, offset, len, &payload).error, 0);
        assert_eq!(world.disk.seen(), expected, "{command:?} {offset} {len}");
    };
    check(NbdCommand::Read, NONE, 1, 5000, &[read]);
    check(NbdCommand::Write, NONE, 1, 1, &[read, (Op::Write, none)]);
    let write = (Op::Write, fua);
    check(NbdCommand::Write, CommandFlags::FUA, 100, 2000, &[write, read, write, read, write]);
    check(NbdCommand::Write, NONE, 512, 600, &[(Op::Write, none), read, (Op::Write, none)]);
    let zeroes = (Op::WriteZeroes, none);
    let (write, flush) = ((Op::Write, none), (Op::Flush, none));
    check(NbdCommand::WriteZeroes, CommandFlags::FUA, 100, 2000, &[zeroes, read, write, read, write, flush]);
    check(NbdCommand::WriteZeroes, CommandFlags::FAST_ZERO, 100, 20, &[read, write]);
    check(NbdCommand::Trim, CommandFlags::FUA, 100, 2000, &[(Op::Discard, none), flush]);
    check(NbdCommand::Trim, CommandFlags::FUA, 100, 500, &[]);
    check(NbdCommand::Cache, NONE, 100, 500, &[read]);
    drop(c);
    world.wait_until_empty();
    world.end();
}

/// A partial write of a block that cannot be read fails with an error.
#[test]
fn an_edge_that_fails() {
    let world = world(512, MIB, CompletionOrder::Shuffled);
    let mut c = world.client(true);
    assert_eq!(c.write(NONE, MIB - 700, &[1; 400]), EIO);
    assert_eq!(c.plain(NbdCommand::WriteZeroes, NONE, MIB - 100, 50), EIO);
    assert_eq!(c.read(MIB - 512, 1), Err(EIO));
    assert_eq!(c.write(NONE, 5, &[1; 5]), 0, "and its hold is gone");
    drop(c);
    world.wait_until_empty();
    world.end();
}

/// A client that writes single bytes of shared blocks.
struct UnalignedWriter {
    client: ScriptedClient,
    rng: SmallRng,
    /// Offset of its first byte, and the distance between its bytes.
    at: u64,
    step: u64,
    model: Vec<u8>,
}

impl UnalignedWriter {
    /// Sends up to 8 requests at a time, each to another byte.
    fn burst(&mut self) {
        let n = self.model.len();
        let mut used = std::collections::HashSet::new();
        let mut sent = 0;
        while sent < 8 {
            let i = self.rng.random_range(0..n);
            if !used.insert(i) {
                continue;
            }
            let value: u8 = self.rng.random();
            let place = self.at + i as u64 * self.step;
            if self.rng.random_bool(0.2) {
                self.client.send(NbdCommand::WriteZeroes, NONE, place, 1, &[]);
                self.model[i] = 0;
            } else {
                self.client.send(NbdCommand::Write, NONE, place, 1, &[value]);
                self.model[i] = value;
            }
            sent += 1;
        }
        (0..sent).for_each(|_| assert_eq!(self.client.receive().error, 0));
    }
}

/// Clients on all cores and through two exports of the device change bytes of the same blocks.
/// Other clients write whole blocks next to them. Some blocks are written by all of them. Every
/// byte is that of its last writer.
#[test]
fn writers_of_the_same_blocks_lose_nothing() {
    const WRITERS: u64 = 6;
    const SHARED: u64 = 4096;
    let world = world(512, MIB, CompletionOrder::Shuffled);
    world.exports.add(Export::new("again", "", false, world.disk.clone()).unwrap()).unwrap();
    let writers: Vec<UnalignedWriter> = (0..WRITERS)
        .map(|i| {
            let mut client = world.unnegotiated_client();
            client.go(if i % 3 == 0 { "again" } else { "disk" }, i % 2 == 0);
            let model = (0..SHARED / WRITERS).map(|k| pattern(i + k * WRITERS)).collect();
            UnalignedWriter { client, rng: SmallRng::seed_from_u64(i), at: i, step: WRITERS, model }
        })
        .collect();
    let mut whole: Vec<ScriptedClient> = (0..2).map(|_| world.client(true)).collect();
    let used = (SHARED / WRITERS * WRITERS) as usize;
    let writers: Vec<UnalignedWriter> = std::thread::scope(|s| {
        let runs: Vec<_> = writers
            .into_iter()
            .map(|mut w| {
                s.spawn(move || {
                    (0..60).for_each(|_| w.burst());
                    w
                })
            })
            .collect();
        for (k, client) in whole.iter_mut().enumerate() {
            s.spawn(move || {
                for round in 0..120u64 {
                    // The neighbours, and a block that only this client writes, whole, while others
                    // read and change the blocks around it.
                    let block = 8192 + (round % 8) * 1024 + k as u64 * 512;
                    let value = (round * 2 + k as u64) as u8;
                    assert_eq!(client.write(NONE, block, &[value; 512]), 0);
                    // Across the end of it, into the other client's range: partial blocks.
                    assert_eq!(client.write(NONE, 20_480 + k as u64 * 700, &[value; 700]), 0);
                    assert_eq!(client.read(block, 512), Ok(vec![value; 512]));
                    let across = client.read(20_480 + k as u64 * 700, 700);
                    assert_eq!(across, Ok(vec![value; 700]), "round {round}");
                }
            });
        }
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    let data = whole[0].read(0, used as u32).unwrap();
    for (at, byte) in data.iter().enumerate() {
        let (writer, i) = (at as u64 % WRITERS, at / WRITERS as usize);
        assert_eq!(*byte, writers[writer as usize].model[i], "byte {at}, of writer {writer}");
    }
    drop((writers, whole));
    world.wait_until_empty();
    world.end();
}

/// Whole and partial writes of a block from different connections: the last acknowledged data is on
/// the disk.
#[test]
fn a_whole_block_against_a_part_of_it() {
    let world = world(512, MIB, CompletionOrder::Shuffled);
    let clients: Vec<ScriptedClient> = (0..4).map(|_| world.client(true)).collect();
    std::thread::scope(|s| {
        for (i, mut c) in clients.into_iter().enumerate() {
            s.spawn(move || {
                for round in 0..150u32 {
                    // Two clients write the whole block, two a part of it. In the end each byte
                    // comes from one of them, and no partial write brings old data back.
                    let error = match i % 2 {
                        0 => c.write(NONE, 0, &[(round + 1) as u8; 512]),
                        _ => c.write(NONE, 100 * i as u64, &[255; 7]),
                    };
                    assert_eq!(error, 0);
                }
            });
        }
    });
    let mut c = world.client(true);
    let block = c.read(0, 512).unwrap();
    assert!(block.iter().all(|b| [150, 255].contains(b)), "an older write came back: {block:?}");
    drop(c);
    world.wait_until_empty();
    world.end();
}

/// A client that disconnects with range locks granted, queued and blocked leaves none behind.
#[test]
fn a_client_that_vanishes_holds_nothing() {
    let world = world(512, MIB, CompletionOrder::AtOnce);
    let mut stays = [world.client(true), world.client(true), world.client(false)];
    world.disk.hold_requests();
    let mut gone = [world.client(true), world.client(true)];
    for c in &mut gone {
        for i in 0..40 {
            c.send(NbdCommand::Write, NONE, 3 + i % 4 * 700, 9, &[1; 9]);
            c.send(NbdCommand::Write, NONE, i % 4 * 512, 512, &[2; 512]);
        }
    }
    stays[0].send(NbdCommand::Write, NONE, 1, 1, &[7]);
    stays[1].send(NbdCommand::Write, NONE, 0, 512, &[8; 512]);
    world.wait_for("requests are taken in", |s| s.in_flight == 162);
    drop(gone);
    world.disk.release_requests();
    for c in &mut stays[..2] {
        assert_eq!(c.receive().error, 0);
    }
    for (i, c) in stays.iter_mut().enumerate() {
        assert_eq!(c.write(NONE, 100 + i as u64, &[i as u8]), 0);
        assert_eq!(c.write(NONE, 1024, &[3; 512]), 0);
    }
    assert_eq!(stays[0].read(100, 3), Ok(vec![0, 1, 2]));
    drop(stays);
    world.wait_until_empty();
    world.end();
}

/// A new client connects while a range lock is active: its whole writes wait like those of others.
#[test]
fn a_client_that_comes_late() {
    let world = world(512, MIB, CompletionOrder::AtOnce);
    let mut first = world.client(true);
    let other = world.client(true);
    world.disk.hold_requests();
    first.send(NbdCommand::Write, NONE, 10, 10, &[1; 10]);
    world.wait_for("the first is in", |s| s.in_flight == 1);
    // Its read of the block is at the gate before the other clients connect.
    while world.disk.held() == 0 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let mut late: Vec<ScriptedClient> = (0..2).map(|_| world.client(true)).collect();
    for c in &mut late {
        c.send(NbdCommand::Write, NONE, 0, 512, &[9; 512]);
    }
    world.wait_for("the late ones are in", |s| s.in_flight == 3);
    assert_eq!(world.disk.held(), 1, "they wait");
    world.disk.release_requests();
    assert_eq!(first.receive().error, 0);
    late.iter_mut().for_each(|c| assert_eq!(c.receive().error, 0));
    assert_eq!(first.read(0, 512), Ok(vec![9; 512]));
    drop((first, other, late));
    world.wait_until_empty();
    world.end();
}
