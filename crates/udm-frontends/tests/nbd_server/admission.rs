//! Many clients at once, most of them harmful: correct clients are served.

use crate::ServerFixture;
use crate::client::ScriptedClient;
use crate::disk::{CompletionOrder, TestDisk, pattern};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use udm_frontends::nbd::{Export, ListenAddress, NbdServerLimits};
use udm_wire::nbd::{CommandFlags, NbdCommand, NbdRequestHeader, OptionReply};

const MIB: u64 = 1 << 20;
const NONE: CommandFlags = CommandFlags::empty();

fn disk(size: u64) -> TestDisk {
    TestDisk::new(size, CompletionOrder::AtOnce)
}

/// Tries to choose an export. Returns the text of the error if it is refused.
fn refusal(world: &ServerFixture, export: &str) -> Option<String> {
    let mut c = world.unnegotiated_client();
    let mut greeting = [0; 18];
    std::io::Read::read_exact(&mut c.stream, &mut greeting).unwrap();
    c.stream.write_all(&ScriptedClient::opening(export, false)).unwrap();
    loop {
        match c.option_reply() {
            OptionReply::Ack => return None,
            OptionReply::Error { text, .. } => return Some(text),
            OptionReply::Info(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn too_many_clients_are_told_so() {
    let options = NbdServerLimits { connections_max: 3, ..NbdServerLimits::default() };
    let world = ServerFixture::with(disk(MIB), options, &[]);
    let mut clients: Vec<_> = (0..3).map(|_| world.client(true)).collect();
    assert_eq!(refusal(&world, "disk").unwrap(), "3 clients are connected, which is the maximum");
    for c in &mut clients {
        assert!(c.read(0, 512).is_ok());
    }
    clients.pop();
    world.wait_for("the place is free", |s| s.connections == 2);
    assert_eq!(refusal(&world, "disk"), None);
    drop(clients);
    world.wait_until_empty();
    world.end();
}

/// Clients that leave requests in a device that does not answer block no others, except those of
/// their peer at its part of that device: three quarters.
#[test]
fn who_is_gone_keeps_no_place() {
    let options =
        NbdServerLimits { connections_max: 3, device_connections_max: 8, ..NbdServerLimits::default() };
    let world = ServerFixture::with(disk(MIB), options, &[]);
    let other =
        udm_backends::open_standalone_device(&udm_wire::uri::parse_device_uri("mem:1M").unwrap()).unwrap();
    world.exports.add(Export::new("other", "", false, other).unwrap()).unwrap();
    world.disk.hold_requests();
    for n in 1..=6 {
        let mut c = world.client(false);
        c.send(NbdCommand::Write, NONE, 0, 512, &[1; 512]);
        world.wait_for("the write is on the device", |s| s.in_flight >= 1 && world.disk.held() == n);
        drop(c);
        world.wait_for("it is gone", |s| s.orphans == n && s.connections == 0);
    }
    let text = refusal(&world, "disk").unwrap();
    let left = "6 clients of your user or address are connected to this device, or have left requests in it";
    assert!(text.starts_with(left), "{text}");
    assert_eq!(refusal(&world, "other"), None, "other devices have room");
    world.disk.release_requests();
    world.wait_until_empty();
    assert!(world.client(false).read(0, 512).is_ok());
    world.end();
}

/// Any number of silent connections delays no other client.
#[test]
fn silent_connections_make_room() {
    let options = NbdServerLimits { handshakes_max: 4, ..NbdServerLimits::default() };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nbd.sock");
    let world = ServerFixture::with(disk(MIB), options, &[ListenAddress::Unix(path.clone())]);
    let connect = || ScriptedClient::on(UnixStream::connect(&path).unwrap());
    let mut silent = Vec::new();
    for _ in 0..200 {
        silent.push(connect());
        if silent.len() % 20 == 0 {
            let mut c = connect();
            c.go("disk", false);
            assert!(c.read(0, 512).is_ok());
        }
    }
    assert!(world.server.stats().handshakes <= 8);
    drop(silent);
    world.wait_until_empty();
    world.end();
}

fn tight_limits(stall_ms: u64) -> NbdServerLimits {
    let stall_max = Duration::from_millis(stall_ms);
    NbdServerLimits { core_bytes_max: 4 << 20, stall_max, ..NbdServerLimits::default() }
}

/// Requests of many clients that each exceed all the memory are all served.
#[test]
fn long_requests_of_many_clients_share_little_memory() {
    const LEN: u64 = 6 * MIB;
    let world = ServerFixture::with(disk(8 * MIB), tight_limits(20_000), &[]);
    let threads: Vec<_> = (0..8)
        .map(|i| {
            let mut c = world.client(i % 2 == 0);
            std::thread::spawn(move || {
                let data: Vec<u8> = (0..LEN).map(pattern).collect();
                for _ in 0..3 {
                    assert_eq!(c.write(NONE, 0, &data), 0);
                    assert!(c.read(0, LEN as u32).unwrap() == data);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    world.wait_until_empty();
    world.end();
}

/// A long write that starts in the memory of the previous one and continues after it. The device
/// has no part of it, and no other connection can free memory.
#[test]
fn a_longer_write_behind_a_long_one() {
    let options = NbdServerLimits { core_bytes_max: 512 << 10, ..tight_limits(20_000) };
    let world = ServerFixture::with(disk(8 * MIB), options, &[]);
    let mut c = world.client(false);
    for len in [MIB, 2 * MIB, MIB, 6 * MIB] {
        let data: Vec<u8> = (0..len).map(|at| pattern(at + len)).collect();
        assert_eq!(c.write(NONE, 0, &data), 0);
    }
    assert!(c.read(0, 6 << 20).unwrap().iter().zip(6 * MIB..).all(|(byte, at)| *byte == pattern(at)));
    drop(c);
    world.wait_until_empty();
    world.end();
}

/// One request may exceed the limit, but not those after it.
#[test]
fn one_request_at_a_time_passes_the_bound() {
    let world = ServerFixture::with(disk(8 * MIB), tight_limits(20_000), &[]);
    world.disk.hold_requests();
    let mut c = world.client(false);
    for _ in 0..32 {
        c.send(NbdCommand::Read, NONE, 0, 1 << 20, &[]);
    }
    world.wait_for("the memory is given out", |_| world.disk.held() >= 3);
    let held = world.disk.held();
    assert!(held <= 4, "half of 4 MiB, what each may have, and one request: {held}");
    world.disk.release_requests();
    for _ in 0..32 {
        assert_eq!(c.receive().error, 0);
    }
    drop(c);
    world.wait_until_empty();
    world.end();
}

/// A device that hangs keeps the memory of its clients forever, but never all memory.
#[test]
fn a_device_that_hangs_takes_not_all_memory() {
    let world = ServerFixture::with(disk(8 * MIB), tight_limits(100), &[]);
    let other = Arc::new(disk(8 * MIB));
    world.exports.add(Export::new("other", "", false, other).unwrap()).unwrap();
    world.disk.hold_requests();
    let mut stuck = Vec::new();
    for _ in 0..12 {
        let mut c = world.client(false);
        for _ in 0..8 {
            c.send(NbdCommand::Read, NONE, 0, 1 << 20, &[]);
        }
        stuck.push(c);
    }
    world.wait_for("both cores have what they take", |_| world.disk.held() >= 6);
    // One on each core.
    let mut healthy: Vec<_> = (0..2).map(|_| world.unnegotiated_client()).collect();
    for c in &mut healthy {
        c.go("other", false);
        for _ in 0..3 {
            assert!(c.read(0, 1 << 20).is_ok());
        }
    }
    world.disk.release_requests();
    drop((healthy, stuck));
    world.wait_until_empty();
    world.end();
}

/// Clients hold memory and do nothing. Short requests are served all the time, and long ones once
/// the stalled clients are closed.
#[test]
fn clients_that_do_not_move_starve_nobody() {
    let world = ServerFixture::with(disk(8 * MIB), tight_limits(100), &[]);
    let mut stuck = Vec::new();
    for i in 0..12 {
        let mut c = world.client(false);
        if i % 2 == 0 {
            // Half of a payload.
            let request = NbdRequestHeader {
                flags: NONE,
                command: NbdCommand::Write,
                cookie: 1,
                offset: 0,
                len: 6 << 20,
            };
            c.stream.set_nonblocking(true).unwrap();
            let mut bytes = request.encode().to_vec();
            bytes.resize(3 << 20, 1);
            // Sends as much of it as the server receives.
            let _ = c.stream.write_all(&bytes);
        } else {
            // Answers that the client does not read.
            c.send(NbdCommand::Read, NONE, 0, 6 << 20, &[]);
        }
        stuck.push(c);
    }
    let mut c = world.client(false);
    for i in 0..50 {
        assert_eq!(c.write(NONE, 7 * MIB, &[i; 4096]), 0);
        assert!(c.read(7 * MIB, 4096).unwrap() == [i; 4096]);
    }
    let data: Vec<u8> = (0..6 * MIB).map(pattern).collect();
    assert_eq!(c.write(NONE, 0, &data), 0);
    assert!(c.read(0, 6 << 20).unwrap() == data);
    drop((c, stuck));
    world.wait_until_empty();
    world.end();
}
