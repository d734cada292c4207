//! Machines and front ends that break the rules: nothing is lost, and the server serves others.

use super::driver::{DATA, GUEST, MEMORY, RING, message};
use super::{READ, VhostUserServerFixture};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::event::{EventfdFlags, eventfd};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use udm_wire::virtio::VirtioFeatures;

/// True if a new machine is served.
fn serves(fixture: &VhostUserServerFixture) -> bool {
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    machine.request(0, READ, 0, &[], &[(DATA, 512)]).0 == 0
}

#[test]
fn chains_that_break_the_rules_complete_with_nothing() {
    let fixture = VhostUserServerFixture::new("null:1G");
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    let status = machine.status_at(0, 0);
    for chain in [
        // No header; a header of 15 bytes; no status; writable before readable.
        &[(status, 1, true)][..],
        &[(DATA, 15, false), (status, 1, true)],
        &[(DATA, 16, false)],
        &[(DATA, 16, false), (DATA, 512, true), (DATA, 512, false), (status, 1, true)],
        // A header and a status in no memory.
        &[(MEMORY, 16, false), (status, 1, true)],
        &[(DATA, 16, false), (MEMORY, 1, true)],
        // A status of length 0.
        &[(DATA, 16, false), (DATA, 0, true)],
    ] {
        machine.write(DATA, &[0; 16]);
        let head = machine.add_chain(0, chain);
        machine.kick_always(0);
        let (used, written) = machine.wait_used(0);
        assert_eq!((used, written), (head, 0), "{chain:?}");
    }
    assert_eq!(machine.request(0, READ, 0, &[], &[(DATA, 512)]).0, 0, "the ring is still good");
    fixture.end();
}

/// A circle of descriptors, an index beyond the ring, and more entries than the ring has: the queue
/// is not used any more, until it is reset.
#[test]
fn rings_that_break_the_rules_are_left_alone() {
    let fixture = VhostUserServerFixture::new("null:1G");
    // A descriptor that is followed by itself.
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    let mut descriptor = GUEST.to_le_bytes().to_vec();
    descriptor.extend([16, 0, 0, 0, 1, 0, 5, 0]);
    machine.write(16 * 5, &descriptor);
    machine.publish(0, 5);
    machine.kick_always(0);
    std::thread::sleep(Duration::from_millis(20));
    drop(machine);
    assert!(serves(&fixture));
    for head in [RING, u16::MAX] {
        let mut machine = fixture.machine(1, VirtioFeatures::empty());
        machine.publish(0, head);
        machine.kick_always(0);
        std::thread::sleep(Duration::from_millis(20));
        machine.stop_ring(0);
        drop(machine);
        assert!(serves(&fixture));
    }
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    (0..=RING).for_each(|_| machine.publish(0, 0));
    machine.kick_always(0);
    std::thread::sleep(Duration::from_millis(20));
    drop(machine);
    assert!(serves(&fixture));
    fixture.end();
}

#[test]
fn messages_that_cannot_be_are_refused() {
    let fixture = VhostUserServerFixture::new("null:1G");
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    let pair = |index: u32, value: u32| [index.to_ne_bytes(), value.to_ne_bytes()].concat();
    for (request, payload) in [
        (message::SET_VRING_NUM, pair(64, 128)),
        (message::SET_VRING_NUM, pair(1, 100)),
        (message::SET_VRING_NUM, pair(1, 2048)),
        (message::SET_VRING_NUM, pair(0, 128)),
        (message::SET_VRING_BASE, pair(0, 5)),
        (message::SET_FEATURES, u64::MAX.to_ne_bytes().to_vec()),
        (message::SET_PROTOCOL_FEATURES, u64::MAX.to_ne_bytes().to_vec()),
        (message::SET_VRING_KICK, 0x101u64.to_ne_bytes().to_vec()),
        (99, vec![1, 2, 3]),
    ] {
        assert!(!machine.try_tell(request, &payload, &[]), "{request} {payload:?}");
    }
    // A region beyond the end of its file, and one that overlaps.
    let memfd = machine.memfd.try_clone().unwrap();
    for region in [[0, 1 << 40, 16 << 20, 1 << 50, 0], [0, GUEST, 4096, 1 << 50, 0]] {
        let payload: Vec<u8> = region.iter().flat_map(|word: &u64| word.to_ne_bytes()).collect();
        assert!(!machine.try_tell(message::ADD_MEM_REG, &payload, &[memfd.as_fd()]));
    }
    assert_eq!(machine.request(0, READ, 0, &[], &[(DATA, 512)]).0, 0);
    // The reply to these is a value, so it cannot report a failure.
    assert!(machine.is_closed_by(message::GET_VRING_BASE, &pair(64, 0)));
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    assert!(machine.is_closed_by(message::GET_INFLIGHT_FD, &[0; 24]));
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    // A message of the wrong length ends the connection.
    machine.tell_plain(message::SET_FEATURES, &[1, 2, 3]);
    assert!(machine.is_closed());
    assert!(serves(&fixture));
    fixture.end();
}

/// A front end whose descriptor for notifications is full: its ring can be stopped, and the next
/// machine is served.
#[test]
fn a_full_descriptor_keeps_no_queue() {
    let fixture = VhostUserServerFixture::new("null:1G");
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    machine.tell(message::SET_VRING_CALL, &0u64.to_ne_bytes(), &[full.as_fd()]);
    assert_eq!(machine.request(0, READ, 0, &[], &[(DATA, 512)]).0, 0);
    assert_eq!(machine.stop_ring(0), 1);
    drop(machine);
    assert!(serves(&fixture));
    fixture.end();
}

/// Random bytes on the socket, and random bytes in the memory of a running machine.
#[test]
fn nonsense_harms_nobody() {
    let fixture = VhostUserServerFixture::new("mem:16M");
    let mut rng = SmallRng::seed_from_u64(29);
    for _ in 0..200 {
        let mut socket = UnixStream::connect(fixture.path()).unwrap();
        let mut bytes: Vec<u8> = (0..rng.random_range(1..100)).map(|_| rng.random()).collect();
        if rng.random_bool(0.8) && bytes.len() >= 12 {
            bytes[..12].copy_from_slice(&[rng.random_range(0..45), 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
            bytes[8] = (bytes.len() - 12) as u8;
        }
        // The server may have closed the connection already.
        let _ = socket.write_all(&bytes);
    }
    for round in 0..60 {
        let features = if round % 2 == 0 { VirtioFeatures::EVENT_IDX } else { VirtioFeatures::empty() };
        let mut machine = fixture.machine(1, features);
        for _ in 0..20 {
            (0..4).for_each(|_| {
                let at = rng.random_range(0..24 << 10);
                let bytes: Vec<u8> = (0..rng.random_range(1..40)).map(|_| rng.random()).collect();
                machine.write(at, &bytes);
            });
            machine.publish(0, rng.random_range(0..RING));
            machine.kick_always(0);
        }
    }
    assert!(serves(&fixture));
    fixture.end();
}
