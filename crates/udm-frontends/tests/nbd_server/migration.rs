//! Clients that move to other cores all the time: no request is lost, executed twice or answered
//! twice.

use crate::disk::{CompletionOrder, TestDisk, pattern};
use crate::{ScriptedClient, ServerFixture};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use udm_frontends::nbd::{Export, NbdServerLimits};
use udm_wire::nbd::{CommandFlags, EPERM, NbdCommand, NbdRequestHeader};

const MIB: u64 = 1 << 20;
const NONE: CommandFlags = CommandFlags::empty();

/// Moves all clients again and again while `f` runs.
fn while_moving<R>(world: &ServerFixture, f: impl FnOnce() -> R) -> R {
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                world.server.rotate();
                std::thread::sleep(Duration::from_micros(300));
            }
        });
        let r = f();
        over.store(true, Ordering::Relaxed);
        r
    })
}

/// Waits until clients have moved `n` more times than `before`.
fn wait_for_moves(world: &ServerFixture, before: u64, n: u64) {
    world.wait_for("nobody moves", |stats| stats.moves >= before + n);
}

/// A client with its own part of the disk, and the expected data.
struct RandomClient {
    client: ScriptedClient,
    rng: SmallRng,
    base: u64,
    model: Vec<u8>,
}

impl RandomClient {
    /// Sends many requests of all kinds to ranges that do not overlap: whole blocks, partial
    /// blocks, and payloads from one byte to half of the part.
    fn burst(&mut self) {
        let len = self.model.len();
        let mut sent = 0;
        let mut reads = std::collections::HashMap::new();
        let mut at = self.rng.random_range(0..600);
        while at < len {
            let most = if self.rng.random_bool(0.05) { len / 2 } else { 6000 };
            let n = self.rng.random_range(1..most).min(len - at);
            let (place, range) = (self.base + at as u64, at..at + n);
            match self.rng.random_range(0..10) {
                0 => {
                    self.client.send(NbdCommand::Flush, NONE, 0, 0, &[]);
                }
                1 => {
                    self.client.send(NbdCommand::WriteZeroes, CommandFlags::FUA, place, n as u32, &[]);
                    self.model[range].fill(0);
                }
                2..5 => {
                    let cookie = self.client.send(NbdCommand::Read, NONE, place, n as u32, &[]);
                    reads.insert(cookie, range);
                }
                _ => {
                    let value: u8 = self.rng.random();
                    self.model[range.clone()].fill(value);
                    self.client.send(NbdCommand::Write, NONE, place, n as u32, &self.model[range]);
                }
            }
            sent += 1;
            at += n + self.rng.random_range(0..600);
        }
        for _ in 0..sent {
            let reply = self.client.receive();
            assert_eq!(reply.error, 0);
            if let Some(range) = reads.remove(&reply.cookie) {
                assert!(reply.data == self.model[range], "wrong data");
            }
        }
        assert!(reads.is_empty(), "two answers to one request, and none to another");
    }
}

#[test]
fn whatever_they_ask_for() {
    const PART: u64 = MIB / 4;
    for (order, block) in [(CompletionOrder::Shuffled, 512), (CompletionOrder::AtOnce, 4096)] {
        let mut disk = TestDisk::new(3 * PART, order);
        disk.limits_mut().logical_block = block;
        // Its last sector is bad.
        let world = ServerFixture::new(disk);
        let workers = (0..3u64).map(|i| RandomClient {
            client: world.client(i != 1),
            rng: SmallRng::seed_from_u64(i),
            base: i * PART,
            model: (i * PART..(i + 1) * PART - 4096).map(pattern).collect(),
        });
        let workers: Vec<RandomClient> = workers.collect();
        while_moving(&world, || {
            std::thread::scope(|s| {
                for mut worker in workers {
                    s.spawn(move || (0..40).for_each(|_| worker.burst()));
                }
            });
        });
        let stats = world.server.stats();
        assert!(stats.moves > 20, "{stats:?}");
        world.wait_until_empty();
        world.end();
    }
}

/// Bytes arrive one by one, with moves in between: headers, payloads and discarded payloads are cut
/// anywhere.
#[test]
fn with_a_request_half_arrived() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    world.exports.add(Export::new("read only", "", true, world.disk.clone()).unwrap()).unwrap();
    let mut client = world.client(true);
    let mut refused = world.unnegotiated_client();
    refused.go("read only", true);
    let write =
        NbdRequestHeader { flags: NONE, command: NbdCommand::Write, cookie: 900, offset: 512, len: 100 };
    let mut bytes = write.encode().to_vec();
    bytes.extend((0..100).map(|i| i as u8));
    bytes.extend(
        NbdRequestHeader { command: NbdCommand::Flush, cookie: 901, offset: 0, len: 0, ..write }.encode(),
    );
    for cut in [1, 27, 28, 29, 77, 127, 128, 129, 155] {
        for (client, error) in [(&mut client, 0), (&mut refused, EPERM)] {
            client.stream.write_all(&bytes[..cut]).unwrap();
            let moves = world.server.stats().moves;
            world.server.rotate();
            if error != 0 || !(28..128).contains(&cut) {
                wait_for_moves(&world, moves, 1);
            }
            client.stream.write_all(&bytes[cut..]).unwrap();
            assert_eq!((client.receive().error, client.receive().error), (error, 0), "cut at {cut}");
        }
        assert_eq!(client.read(512, 100), Ok((0..100).map(|i| i as u8).collect()));
    }
    drop((client, refused));
    world.wait_until_empty();
    world.end();
}

/// A request that takes long keeps its client on its core, and other requests of the client
/// continue.
#[test]
fn not_while_a_request_hangs() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    let mut client = world.unnegotiated_client();
    client.go_with_contexts("disk", &["base:allocation"], "disk");
    world.disk.ignore_extent_queries(true);
    let hangs = client.send(NbdCommand::BlockStatus, NONE, 0, 4096, &[]);
    world.wait_for("it is in", |s| s.in_flight == 1);
    for _ in 0..3 {
        world.server.rotate();
        assert_eq!(client.read(0, 512).map(|data| data.len()), Ok(512));
    }
    assert_eq!(world.server.stats().moves, 0);
    world.disk.ignore_extent_queries(false);
    assert_eq!(client.receive().cookie, hangs);
    world.server.rotate();
    wait_for_moves(&world, 0, 1);
    assert!(client.read(0, 512).is_ok());
    drop(client);
    world.wait_until_empty();
    world.end();
}

/// If only some cores can open a device, its clients stay on them.
#[test]
fn where_the_device_can_be_opened() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::Shuffled).only_on(0));
    let mut client = loop {
        // Every other client starts on core 1 and is refused.
        let mut client = world.unnegotiated_client();
        if client.try_go("disk") {
            break client;
        }
    };
    for round in 0..20u8 {
        let moves = world.server.stats().moves;
        world.server.rotate();
        assert_eq!(client.write(NONE, 512, &[round; 700]), 0);
        // To the other core and back.
        wait_for_moves(&world, moves, 2);
        assert_eq!(client.read(512, 700), Ok(vec![round; 700]));
    }
    drop(client);
    world.wait_until_empty();
    world.end();
}

/// Each client counts as one user of an export, on any core.
#[test]
fn counted_once() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    let export = world.exports.get("disk").unwrap();
    let mut client = world.client(true);
    while_moving(&world, || {
        while world.server.stats().moves < 300 {
            let stats = world.server.stats();
            assert_eq!((export.users(), stats.connections, stats.orphans), (1, 1, 0));
            assert!(client.read(0, 512).is_ok());
        }
        // Removed from the list, but still usable for its client.
        world.exports.remove(&export);
        assert!(client.read(0, 512).is_ok());
    });
    drop(client);
    world.wait_for("connections stay open", |s| s.connections + s.orphans == 0);
    assert_eq!(export.users(), 0);
    world.end();
}

/// Clients that disconnect, send DISC or are connected at the stop, while they move between cores.
#[test]
fn until_the_end() {
    for round in 0..20 {
        let world = ServerFixture::with(
            TestDisk::new(MIB, CompletionOrder::Shuffled),
            NbdServerLimits::default(),
            &[],
        );
        let export = world.exports.get("disk").unwrap();
        let mut clients: Vec<ScriptedClient> = (0..6).map(|_| world.client(true)).collect();
        while_moving(&world, || {
            for client in &mut clients {
                for i in 0..30 {
                    client.send(NbdCommand::Read, NONE, i * 512, 512, &[]);
                }
            }
            for client in clients.drain(..4) {
                std::thread::sleep(Duration::from_micros(50 * round));
                drop(client);
            }
            let mut leaver = clients.pop().unwrap();
            let bye = NbdRequestHeader {
                flags: NONE,
                command: NbdCommand::Disconnect,
                cookie: 0,
                offset: 0,
                len: 0,
            };
            leaver.stream.write_all(&bye.encode()).unwrap();
            (0..30).for_each(|_| assert_eq!(leaver.receive().error, 0));
            assert!(leaver.is_at_end());
            world.wait_for("who is gone is gone", |s| s.connections == 1);
            (0..30).for_each(|_| assert_eq!(clients[0].receive().error, 0));
            // Two cores stop while a client moves between them.
            world.server.rotate();
        });
        let ServerFixture { server, runtime, exports, disk } = world;
        server.stop();
        runtime.stop();
        assert!(clients[0].is_at_end());
        assert_eq!(export.users(), 0, "round {round}");
        drop((exports, disk));
    }
}

/// Two busy clients and fourteen idle ones: in any order of arrival, the busy ones are served on
/// different cores in the end, and stay there.
#[test]
fn hot_clients_spread_over_the_cores() {
    for hot in [[0, 1], [0, 2], [7, 13]] {
        let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
        let mut clients: Vec<ScriptedClient> = (0..16).map(|_| world.client(true)).collect();
        let over = AtomicBool::new(false);
        std::thread::scope(|s| {
            for (i, client) in clients.iter_mut().enumerate().filter(|(i, _)| hot.contains(i)) {
                let over = &over;
                s.spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        for k in 0..16 {
                            client.send(NbdCommand::Read, NONE, k * 4096, 4096, &[]);
                        }
                        (0..16).for_each(|_| assert_eq!(client.receive().error, 0, "client {i}"));
                    }
                });
            }
            // A limit against hanging, not a measurement.
            let end = Instant::now() + Duration::from_secs(20);
            let parted = loop {
                let before = world.server.requests_by_core();
                std::thread::sleep(Duration::from_millis(100));
                let after = world.server.requests_by_core();
                let did: Vec<u64> = after.iter().zip(&before).map(|(a, b)| a - b).collect();
                if did.iter().all(|&n| n * 5 > did.iter().sum()) || Instant::now() > end {
                    break Instant::now() <= end;
                }
            };
            let moves = world.server.stats().moves;
            std::thread::sleep(Duration::from_millis(300));
            over.store(true, Ordering::Relaxed);
            assert!(parted, "{hot:?} are on one core: {:?}", world.server.stats());
            assert!(world.server.stats().moves <= moves + 1, "they go back and forth");
        });
        drop(clients);
        world.wait_until_empty();
        world.end();
    }
}
