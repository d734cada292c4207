//! Hosts that break the rules: each gets the specification's error, and nothing else is harmed.

use super::host::{Answer, BLOCK, Connection, READ, WRITE, command, rw};
use super::{SIZE, TargetFixture, options};
use crate::disk::{CompletionOrder, TestDisk};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::time::Duration;
use udm_wire::nvme::{DataPdu, InitializeRequest, NvmeStatus};

const FIELD: u16 = 1;
const SEQUENCE: u16 = 2;
const DIGEST: u16 = 3;
const RANGE: u16 = 4;
const LIMIT: u16 = 5;
const PARAMETER: u16 = 6;

/// The first bytes of a PDU.
fn common(kind: u8, flags: u8, header: u8, offset: u8, total: u32) -> Vec<u8> {
    [&[kind, flags, header, offset][..], &total.to_le_bytes()].concat()
}

#[test]
fn wrong_beginnings() {
    let target = TargetFixture::new();
    let request = InitializeRequest {
        version: 0,
        host_alignment: 0,
        header_digest: false,
        data_digest: false,
        max_r2t: 0,
    };
    let changed = |at: usize, byte: u8| {
        let mut bytes = request.encode();
        bytes[at] = byte;
        bytes.to_vec()
    };
    for (bytes, error) in [
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), SEQUENCE),
        (changed(0, 4), SEQUENCE),
        (changed(2, 127), FIELD),
        (changed(4, 129), FIELD),
        (changed(8, 1), PARAMETER),
        (changed(10, 32), FIELD),
    ] {
        let mut connection = target.connection();
        connection.send(&bytes);
        assert_eq!(connection.answer().fatal().0, error, "{:?}", &bytes[..12]);
        assert_eq!(connection.answer(), Answer::End);
    }
    // Something else than Connect, and too much data.
    for (pdu, error) in [
        (common(0x00, 0, 128, 0, 128), SEQUENCE),
        (common(0x06, 0, 24, 24, 32), SEQUENCE),
        (common(0x04, 0, 72, 72, 72 + 1028), LIMIT),
        (common(0x04, 0, 72, 72, u32::MAX), LIMIT),
        (common(0x04, 0, 72, 70, 2000), FIELD),
        (common(0x04, 1, 72, 0, 72), FIELD),
        (common(0x0b, 0, 72, 0, 72), FIELD),
    ] {
        let mut connection = target.connection();
        connection.initialize(false);
        connection.send(&pdu);
        assert_eq!(connection.answer().fatal().0, error, "{pdu:?}");
        assert_eq!(connection.answer(), Answer::End);
    }
    let mut connection = target.connection();
    connection.initialize(false);
    connection.command(command(0x06, 0, &[1]), &[]);
    assert_eq!(connection.answer().status(), NvmeStatus::COMMAND_SEQUENCE_ERROR.permanent());
    target.end();
}

/// Wrong PDUs end the connection of their queue; the controller and its other queue go on.
#[test]
fn wrong_pdus() {
    let target = TargetFixture::new();
    let mut host = target.host();
    let mut other = host.queue(2, false);
    let tag = |queue: &mut Connection| {
        queue.command(rw(WRITE, 0, 64, false), &[]);
        match queue.answer() {
            Answer::ReadyToTransfer(r2t) => r2t,
            other => panic!("{other:?}"),
        }
    };
    type Attack<'a> = (&'a str, u16, &'a dyn Fn(&mut Connection));
    let attacks: [Attack<'_>; 12] = [
        ("ICReq again", SEQUENCE, &|queue| queue.send(&common(0, 0, 128, 0, 128))),
        ("a response", SEQUENCE, &|queue| queue.send(&common(5, 0, 24, 0, 24))),
        ("unknown type", FIELD, &|queue| queue.send(&common(0x42, 0, 24, 0, 24))),
        ("header length", FIELD, &|queue| queue.send(&common(4, 0, 24, 0, 24))),
        ("a capsule that is too long", LIMIT, &|queue| queue.send(&common(4, 0, 72, 72, 72 + 16_385))),
        ("4 GiB", LIMIT, &|queue| queue.send(&common(4, 0, 72, 72, u32::MAX))),
        ("no transfer", FIELD, &|queue| {
            queue.data(DataPdu { command: 1, tag: 77, offset: 0, len: 8 }, &[0; 8], true);
        }),
        ("another command", FIELD, &|queue| {
            let r2t = tag(queue);
            queue.data(DataPdu { command: r2t.command + 1, ..r2t }, &[0; 64 * BLOCK], true);
        }),
        ("a wrong order", RANGE, &|queue| {
            let r2t = tag(queue);
            queue.data(DataPdu { offset: 512, len: 512, ..r2t }, &[0; 512], false);
        }),
        ("too much", RANGE, &|queue| {
            let r2t = tag(queue);
            queue.data(DataPdu { len: r2t.len + 4, ..r2t }, &[0; 64 * BLOCK + 4], true);
        }),
        ("an early end", FIELD, &|queue| {
            let r2t = tag(queue);
            queue.data(DataPdu { len: 512, ..r2t }, &[0; 512], true);
        }),
        ("more commands than entries", SEQUENCE, &|queue| {
            for _ in 0..33 {
                queue.command(rw(READ, 0, 1, false), &[]);
            }
        }),
    ];
    for (what, error, attack) in attacks {
        let holds = error == SEQUENCE && what.starts_with("more");
        if holds {
            target.disk.hold_requests();
        }
        let mut queue = host.queue(1, false);
        attack(&mut queue);
        assert_eq!(queue.answer().fatal().0, error, "{what}");
        target.disk.release_requests();
        while queue.answer() != Answer::End {
            assert!(holds, "{what}");
        }
        assert_eq!(other.read(rw(READ, 0, 1, false)).map(|data| data.len()), Ok(BLOCK), "{what}");
        target.wait_for("the queue stays", |stats| stats.connections == 2);
    }
    assert!(host.admin.ask(command(0x18, 0, &[])).status.is_ok());
    assert_eq!(other.ask(command(0x7f, 1, &[])).status, NvmeStatus::COMMAND_SEQUENCE_ERROR.permanent());
    drop((host, other));
    target.end();
}

/// A wrong header digest ends the connection; wrong data fails its command only.
#[test]
fn wrong_digests() {
    let target = TargetFixture::new();
    let host = target.host();
    let mut queue = host.queue(1, true);
    let before = queue.read(rw(READ, 0, 64, false));
    let mut limits = queue.limits;
    // In the capsule.
    let mut header = [0; 128];
    let write = rw(WRITE, 0, 1, true);
    let len = udm_wire::nvme::encode_capsule_command(&mut header, &write, Some(512), &limits);
    queue.send(&[&header[..len], &[9; 512], &[1, 2, 3, 4]].concat());
    assert_eq!(queue.answer().status(), NvmeStatus::TRANSIENT_TRANSPORT_ERROR);
    // In the first of two data PDUs.
    queue.command(rw(WRITE, 0, 64, false), &[]);
    let Answer::ReadyToTransfer(r2t) = queue.answer() else { panic!("expected R2T") };
    let half = r2t.len / 2;
    let len = udm_wire::nvme::encode_h2c_data(&mut header, &DataPdu { len: half, ..r2t }, false, &limits);
    queue.send(&[&header[..len], &vec![9; half as usize][..], &[1, 2, 3, 4]].concat());
    queue.data(DataPdu { offset: half, len: half, ..r2t }, &vec![9; half as usize], true);
    assert_eq!(queue.answer().status(), NvmeStatus::TRANSIENT_TRANSPORT_ERROR);
    assert_eq!(queue.read(rw(READ, 0, 64, false)), before, "nothing was written");
    // The header.
    limits.header_digest = false;
    let len = udm_wire::nvme::encode_capsule_command(&mut header, &rw(READ, 0, 1, false), None, &limits);
    header[1] |= 1;
    header[4] += 4;
    queue.send(&[&header[..len], &[1, 2, 3, 4]].concat());
    assert_eq!(queue.answer().fatal().0, DIGEST);
    assert_eq!(queue.answer(), Answer::End);
    drop((host, queue));
    target.end();
}

/// Random bytes instead of PDUs, and PDUs with random bytes changed.
#[test]
fn noise() {
    let target = TargetFixture::with(TestDisk::new(SIZE, CompletionOrder::Shuffled), options());
    let host = target.host();
    let mut rng = SmallRng::seed_from_u64(11);
    for round in 0..200 {
        let mut queue = host.queue(1, false);
        for _ in 0..rng.random_range(1..20) {
            let mut header = [0; 128];
            let (opcode, in_capsule) = (rng.random_range(0..12), rng.random());
            let mut command = *rw(opcode, rng.random_range(0..100), 1, in_capsule).bytes();
            if rng.random_range(0..3) == 0 {
                command[rng.random_range(0..64)] = rng.random();
            }
            let command = udm_wire::nvme::NvmeCommand::from_bytes(command);
            let data = in_capsule.then_some(512);
            let len = udm_wire::nvme::encode_capsule_command(&mut header, &command, data, &queue.limits);
            if rng.random_range(0..6) == 0 {
                header[rng.random_range(0..len)] = rng.random();
            }
            queue.send(&header[..len]);
            queue.send(if in_capsule { &[3; 512] } else { &[] });
        }
        queue.stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        let _ = std::io::copy(&mut &queue.stream, &mut std::io::sink());
        drop(queue);
        target.wait_for(&format!("round {round}"), |stats| stats.connections == 1);
    }
    assert!(host.queue(1, false).read(rw(READ, 0, 1, false)).is_ok());
    drop(host);
    target.end();
}

/// Connections that never become a queue are limited in number and time.
#[test]
fn silent_connections() {
    let mut limits = options();
    limits.limits.handshakes_max = 8;
    limits.limits.handshake_max = Duration::from_millis(200);
    let target = TargetFixture::with(TestDisk::new(SIZE, CompletionOrder::AtOnce), limits);
    let mut silent: Vec<Connection> = (0..20).map(|_| target.connection()).collect();
    assert!(silent.iter_mut().all(|connection| connection.answer() == Answer::End));
    target.wait_for("handshakes", |stats| stats.handshakes == 0);
    drop(target.host());
    target.end();
}

/// A host that reads none of its answers, or does not send the data of a write, is disconnected.
#[test]
fn hosts_that_stall() {
    let mut limits = options();
    limits.limits.stall_max = Duration::from_millis(300);
    let target = TargetFixture::with(TestDisk::new(SIZE, CompletionOrder::AtOnce), limits);
    let host = target.host();
    let mut queue = host.queue(1, false);
    queue.command(rw(WRITE, 0, 64, false), &[]);
    assert!(matches!(queue.answer(), Answer::ReadyToTransfer(_)));
    assert_eq!(queue.answer(), Answer::End);
    let mut deaf = host.queue(2, false);
    for _ in 0..16 {
        deaf.command(rw(READ, 0, 2048, false), &[]);
    }
    target.wait_for("a deaf host stays", |stats| stats.connections == 1);
    drop(host);
    target.end();
}
