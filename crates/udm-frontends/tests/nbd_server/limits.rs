//! Requests that are refused while the connection continues.

use crate::disk::{CompletionOrder, TestDisk, pattern};
use crate::{ScriptedClient, ServerFixture};
use std::io::Write;
use std::sync::Arc;
use udm_frontends::nbd::{Export, NbdServerLimits};
use udm_wire::nbd::{
    CommandFlags, EINVAL, EIO, ENOSPC, EPERM, MAGIC_REQUEST, NbdCommand, NbdRequestHeader, OptionReply,
    REP_ERR_UNKNOWN,
};

const MIB: u64 = 1 << 20;
const NONE: CommandFlags = CommandFlags::empty();

#[test]
fn requests_that_make_no_sense() {
    for structured in [false, true] {
        let world = ServerFixture::new(TestDisk::new(64 * MIB, CompletionOrder::AtOnce));
        let mut c = world.client(structured);
        let end = 64 * MIB;
        assert_eq!(c.read(end, 512), Err(EINVAL));
        assert_eq!(c.read(u64::MAX - 511, 512), Err(EINVAL));
        assert_eq!(c.read(end - 100, 101), Err(EINVAL));
        assert_eq!(c.read(0, (64 << 20) + 512), Err(EINVAL));
        assert_eq!(c.write(NONE, end, &[1; 512]), ENOSPC);
        assert_eq!(c.write(CommandFlags::DF, 0, &[1; 5120]), EINVAL);
        assert_eq!(
            c.write(NONE, 0, &vec![1; (64 << 20) + 512]),
            EINVAL,
            "too long, and taken off the stream"
        );
        assert_eq!(c.plain(NbdCommand::WriteZeroes, NONE, end, 512), ENOSPC);
        assert_eq!(c.plain(NbdCommand::Trim, NONE, end, 512), EINVAL);
        assert_eq!(c.plain(NbdCommand::BlockStatus, NONE, 0, 512), EINVAL);
        assert_eq!(c.plain(NbdCommand::Other(77), NONE, 0, 512), EINVAL);
        assert_eq!(world.disk.seen(), [], "nothing of this reached the device");
        assert!(c.read(0, 512).is_ok());
        let stats = world.wait_for("answers are out", |s| s.in_flight == 0);
        assert_eq!((stats.requests, stats.errors), (12, 11));
        drop(c);
        world.wait_until_empty();
        world.end();
    }
}

/// A payload of absurd length ends the connection, and no other.
#[test]
fn an_absurd_payload_ends_the_connection() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    let (mut c, mut other) = (world.client(true), world.client(true));
    c.send(NbdCommand::Write, NONE, 0, (256 << 20) + 512, &[]);
    assert!(c.is_at_end());
    assert!(other.read(0, 512).is_ok());
    drop((c, other));
    world.wait_until_empty();
    world.end();
}

#[test]
fn a_device_that_fails() {
    for structured in [false, true] {
        let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::Shuffled));
        let mut c = world.client(structured);
        let last = MIB - 512;
        assert_eq!(c.read(last, 512), Err(EIO), "and no data behind it, or the next reply would not be one");
        assert_eq!(c.read(0, 1 << 20), Err(EIO));
        assert_eq!(c.write(NONE, last, &[1; 512]), EIO);
        assert_eq!(c.plain(NbdCommand::Cache, NONE, 0, 1 << 20), EIO);
        assert_eq!(c.read(0, 512), Ok((0..512).map(pattern).collect()));
        drop(c);
        world.wait_until_empty();
        world.end();
    }
}

#[test]
fn a_read_only_export() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    let other = Arc::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    world.exports.add(Export::new("ro", "", true, other.clone()).unwrap()).unwrap();
    let mut c = world.unnegotiated_client();
    c.go("ro", true);
    assert_eq!(c.write(NONE, 0, &[1; 70_656]), EPERM);
    assert_eq!(c.plain(NbdCommand::WriteZeroes, NONE, 0, 512), EPERM);
    assert_eq!(c.plain(NbdCommand::Trim, NONE, 0, 512), EPERM);
    assert_eq!(c.plain(NbdCommand::Flush, NONE, 0, 0), 0);
    assert!(c.read(0, 512).is_ok());
    drop(c);
    world.wait_until_empty();
    world.end();
}

#[test]
fn an_unknown_export_may_be_followed_by_a_known_one() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    let mut c = world.unnegotiated_client();
    let mut bytes = ScriptedClient::opening("nothing", false);
    bytes.extend_from_slice(&ScriptedClient::opening("disk", false)[4..]);
    c.stream.write_all(&bytes).unwrap();
    std::io::Read::read_exact(&mut c.stream, &mut [0; 18]).unwrap();
    let reply = c.option_reply();
    assert!(matches!(reply, OptionReply::Error { error: REP_ERR_UNKNOWN, .. }), "{reply:?}");
    while c.option_reply() != OptionReply::Ack {}
    assert!(c.read(0, 512).is_ok());
    drop(c);
    world.wait_until_empty();
    world.end();
}

#[test]
fn a_stream_out_of_step_is_dropped() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::Shuffled));
    let mut c = world.client(true);
    c.send(NbdCommand::Read, NONE, 0, 4096, &[]);
    let mut bytes =
        NbdRequestHeader { flags: NONE, command: NbdCommand::Read, cookie: 1, offset: 0, len: 512 }.encode();
    bytes[..4].copy_from_slice(&(MAGIC_REQUEST + 1).to_be_bytes());
    c.stream.write_all(&bytes).unwrap();
    assert!(c.is_at_end());
    world.wait_until_empty();
    world.end();
}

/// A client that sends many requests and reads nothing: the server receives up to its limit, and
/// continues when the client reads.
#[test]
fn in_flight_is_bounded() {
    let by_number = NbdServerLimits { requests_max: 10, ..NbdServerLimits::default() };
    let by_bytes = NbdServerLimits { bytes_max: 1 << 20, ..NbdServerLimits::default() };
    for (options, max) in [(by_number, 10), (by_bytes, 5)] {
        let world = ServerFixture::with(TestDisk::new(4 * MIB, CompletionOrder::AtOnce), options, &[]);
        world.disk.hold_requests();
        let mut c = world.client(false);
        let n = 200;
        for _ in 0..n {
            c.send(NbdCommand::Read, NONE, 0, 256 << 10, &[]);
        }
        let stats = world.wait_for("the bound is reached", |s| s.in_flight >= max - 1);
        assert!(stats.in_flight <= max, "{stats:?}");
        world.disk.release_requests();
        for _ in 0..n {
            assert!(world.server.stats().in_flight <= max);
            assert_eq!(c.receive().error, 0);
        }
        // A write that alone exceeds the limit is still accepted.
        assert_eq!(c.write(NONE, 0, &vec![3; 3 << 20]), 0);
        drop(c);
        world.wait_until_empty();
        world.end();
    }
}

#[test]
fn slow_writes_of_many_clients_pin_bounded_memory() {
    let options = NbdServerLimits { bytes_max: 1 << 20, ..NbdServerLimits::default() };
    let world = ServerFixture::with(TestDisk::new(4 * MIB, CompletionOrder::AtOnce), options, &[]);
    world.disk.hold_requests();
    let mut clients: Vec<_> = (0..4).map(|_| world.client(false)).collect();
    let mut senders = Vec::new();
    for c in &mut clients {
        let mut stream = c.stream.try_clone().unwrap();
        senders.push(std::thread::spawn(move || {
            for cookie in 0..1500u64 {
                let flags = CommandFlags::empty();
                let request =
                    NbdRequestHeader { flags, command: NbdCommand::Write, cookie, offset: 0, len: 4096 };
                stream.write_all(&request.encode()).unwrap();
                stream.write_all(&[5; 4096]).unwrap();
            }
        }));
    }
    world.wait_for("the bounds are reached", |s| s.in_flight >= 4 * 200);
    assert!(world.server.stats().in_flight <= 4 * 257);
    world.disk.release_requests();
    for c in &mut clients {
        (0..1500).for_each(|_| assert_eq!(c.receive().error, 0));
    }
    senders.into_iter().for_each(|s| s.join().unwrap());
    drop(clients);
    world.wait_until_empty();
    world.end();
}
