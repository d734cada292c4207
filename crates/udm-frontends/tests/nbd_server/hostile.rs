//! Clients that disconnect, send garbage or stall. After each of them the server works as before.

use crate::disk::{CompletionOrder, TestDisk};
use crate::{ScriptedClient, ServerFixture};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::Duration;
use udm_frontends::nbd::NbdServerLimits;
use udm_wire::nbd::{CommandFlags, NbdCommand, NbdRequestHeader};

const MIB: u64 = 1 << 20;

/// A handshake and some requests of each kind, as one sequence of bytes.
fn conversation() -> Vec<u8> {
    let mut bytes = ScriptedClient::opening("disk", true);
    let mut cookie = 0;
    let mut put = |command, offset, len: u64, data: usize| {
        cookie += 1;
        let flags = CommandFlags::empty();
        bytes.extend_from_slice(&NbdRequestHeader { flags, command, cookie, offset, len }.encode());
        bytes.resize(bytes.len() + data, 9);
    };
    put(NbdCommand::Read, 0, 4096, 0);
    put(NbdCommand::Write, 4096, 512, 512);
    put(NbdCommand::Flush, 0, 0, 0);
    put(NbdCommand::Write, 1, 100, 100);
    put(NbdCommand::WriteZeroes, 8192, 8192, 0);
    put(NbdCommand::Cache, 0, 65536, 0);
    put(NbdCommand::Write, 16384, 1024, 1024);
    put(NbdCommand::Read, 0, 512, 0);
    put(NbdCommand::Disconnect, 0, 0, 0);
    bytes
}

/// The client stops at every single byte of the conversation. Half of the clients disconnect, the
/// others still read.
#[test]
fn disconnects_at_every_byte() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::Shuffled));
    let bytes = conversation();
    for cut in 0..=bytes.len() {
        let mut c = world.unnegotiated_client();
        c.stream.write_all(&bytes[..cut]).unwrap();
        if cut % 2 == 0 {
            c.stream.shutdown(Shutdown::Write).unwrap();
            assert!(c.is_at_end(), "cut at {cut}");
        }
    }
    world.wait_until_empty();
    assert!(world.client(true).read(0, 512).is_ok());
    world.end();
}

/// The same with long payloads, which the receiver handles differently; cut at some positions.
#[test]
fn disconnects_inside_long_payloads() {
    let world = ServerFixture::new(TestDisk::new(4 * MIB, CompletionOrder::Shuffled));
    let mut bytes = ScriptedClient::opening("disk", false);
    for (cookie, len) in [(1, 1 << 20), (2, 300 << 10), (3, 70 << 10)] {
        let flags = CommandFlags::empty();
        let request = NbdRequestHeader { flags, command: NbdCommand::Write, cookie, offset: 0, len };
        bytes.extend_from_slice(&request.encode());
        bytes.resize(bytes.len() + len as usize, 9);
    }
    for cut in (100..bytes.len()).step_by(10_007) {
        let mut c = world.unnegotiated_client();
        c.stream.write_all(&bytes[..cut]).unwrap();
        drop(c);
    }
    world.wait_until_empty();
    assert!(world.client(true).read(0, 512).is_ok());
    world.end();
}

/// Requests in flight when the client disconnects: they are awaited, then freed.
#[test]
fn what_is_in_flight_is_awaited() {
    let world = ServerFixture::new(TestDisk::new(4 * MIB, CompletionOrder::Shuffled));
    world.disk.hold_requests();
    for i in 0..20 {
        let mut c = world.client(i % 2 == 0);
        for k in 0..50 {
            let (command, data) = if k % 2 == 0 { (NbdCommand::Read, 0) } else { (NbdCommand::Write, 8192) };
            c.send(command, CommandFlags::empty(), k * 8192, 8192, &vec![1; data]);
        }
    }
    world.wait_for("all is under way", |s| s.in_flight >= 20 * 50 && world.disk.held() == 20 * 50);
    std::thread::sleep(Duration::from_millis(50));
    let stats = world.server.stats();
    assert_eq!(stats.orphans, 20, "what is left of a connection lasts as long as its bios: {stats:?}");
    world.disk.release_requests();
    world.wait_until_empty();
    world.end();
}

#[test]
fn a_thousand_babblers() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    // xorshift: random numbers that are the same each time.
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    let mut chance = move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    };
    for i in 0..1000 {
        let mut c = world.unnegotiated_client();
        // From pure garbage to a valid conversation with garbage after it.
        let mut bytes = match i % 4 {
            0 => vec![],
            1 => vec![0, 0, 0, 3],
            2 => ScriptedClient::opening("disk", false),
            _ => conversation(),
        };
        if i % 4 == 3 {
            for _ in 0..3 {
                let at = 4 + chance() as usize % (bytes.len() - 4);
                bytes[at] = chance() as u8;
            }
        }
        let len = chance() % 700;
        bytes.extend((0..len).map(|_| chance() as u8));
        // The server may close while the client still sends.
        let _ = c.stream.write_all(&bytes);
        if i % 3 == 0 {
            let _ = c.stream.shutdown(Shutdown::Write);
            c.is_at_end();
        }
    }
    world.wait_until_empty();
    assert!(world.client(false).read(0, 512).is_ok());
    world.end();
}

#[test]
fn a_dawdler_is_dropped() {
    let handshake_max = Duration::from_millis(200);
    let options = NbdServerLimits { handshake_max, ..NbdServerLimits::default() };
    let world = ServerFixture::with(TestDisk::new(MIB, CompletionOrder::AtOnce), options, &[]);
    let (mut silent, mut served) = (world.unnegotiated_client(), world.client(true));
    let bytes = ScriptedClient::opening("disk", false);
    let mut slow = world.unnegotiated_client();
    for byte in &bytes[..bytes.len() - 1] {
        if slow.stream.write_all(&[*byte]).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(slow.is_at_end() && silent.is_at_end());
    assert!(served.read(0, 512).is_ok(), "who is through the handshake may take all the time it likes");
    drop(served);
    world.wait_until_empty();
    world.end();
}

/// A client requests the list of exports again and again and reads nothing: the answers must not
/// pile up.
#[test]
fn a_deaf_client_in_the_handshake() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    let mut c = world.unnegotiated_client();
    let mut bytes = ScriptedClient::opening("disk", false)[..4].to_vec();
    for _ in 0..3000 {
        udm_wire::nbd::NbdOption::List.encode(&mut bytes);
    }
    c.stream.write_all(&bytes).unwrap();
    c.stream.shutdown(Shutdown::Write).unwrap();
    let mut out = Vec::new();
    c.stream.read_to_end(&mut out).unwrap();
    assert_eq!(out.len(), 18 + 3000 * (20 + 4 + 4 + 16 + 20));
    world.wait_until_empty();
    world.end();
}
