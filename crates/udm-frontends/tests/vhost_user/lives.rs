//! What survives the end of a session, of a server, and of memory.

use super::driver::{DATA, TestMachine, message};
use super::{READ, VhostUserServerFixture, WRITE, pattern};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use udm_frontends::nbd::Export;
use udm_wire::vhost_user::HEADER_SIZE;
use udm_wire::virtio::VirtioFeatures;

/// A ring that is stopped has nothing in flight, and continues where it was.
#[test]
fn a_ring_stops_and_continues() {
    let fixture = VhostUserServerFixture::new("null:size=1G,irqmode=2,completion_nsec=20000000");
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    for round in 1..4u32 {
        for _ in 0..10 {
            machine.add(0, READ, 0, &[], &[(DATA, 512)]);
        }
        machine.kick_always(0);
        let base = machine.stop_ring(0);
        assert!(base <= round * 10);
        let done = (0..).map_while(|_| machine.take_used(0)).count() as u32;
        // All that was taken is complete, and the rest was not taken.
        assert_eq!(base, (round - 1) * 10 + done, "round {round}");
        machine.reconnect(&fixture.path());
        for _ in 0..10 - done {
            machine.wait_used(0);
        }
    }
    fixture.end();
}

/// A machine that disconnects with requests in flight, and connects again: each request completes
/// once, and none is lost.
#[test]
fn requests_in_flight_survive_the_session() {
    let fixture = VhostUserServerFixture::new("null:size=1G,irqmode=2,completion_nsec=5000000");
    let mut machine = TestMachine::new(&fixture.path(), 2);
    machine.negotiate(VirtioFeatures::EVENT_IDX);
    machine.create_inflight();
    drop(std::mem::replace(&mut machine.socket, UnixStream::pair().unwrap().0));
    for round in 0..20 {
        machine.reconnect(&fixture.path());
        for ring in 0..2 {
            for i in 0..20 {
                machine.add(ring, READ, i, &[], &[(DATA, 512)]);
            }
            machine.kick_always(ring);
        }
        if round % 2 == 1 {
            std::thread::sleep(Duration::from_millis(3));
        }
        machine.socket = UnixStream::pair().unwrap().0;
        machine.reconnect(&fixture.path());
        for ring in 0..2 {
            for _ in 0..20 {
                machine.wait_used(ring);
            }
            assert_eq!(machine.take_used(ring), None, "a request completed twice");
        }
        machine.socket = UnixStream::pair().unwrap().0;
    }
    fixture.end();
}

/// One machine at a time: the next one is served when the first has gone.
#[test]
fn the_next_machine_waits() {
    let fixture = VhostUserServerFixture::new("null:1G");
    let first = fixture.machine(1, VirtioFeatures::empty());
    let path = fixture.path();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| {
            let mut machine = TestMachine::new(&path, 1);
            machine.start(VirtioFeatures::empty());
            machine.request(0, READ, 0, &[], &[(DATA, 512)])
        });
        std::thread::sleep(Duration::from_millis(50));
        assert!(!second.is_finished() && fixture.server.is_connected());
        drop(first);
        assert_eq!(second.join().unwrap().0, 0);
    });
    fixture.end();
}

/// A device that is removed and comes back under its name: a machine is turned away, then served.
#[test]
fn a_device_may_be_missing_for_a_while() {
    let fixture = VhostUserServerFixture::new("null:1G");
    let export = fixture.exports.get("disk").unwrap();
    fixture.exports.remove(&export);
    let mut turned_away = TestMachine::new(&fixture.path(), 1);
    assert!(turned_away.is_closed());
    fixture.exports.put(&export, "disk").unwrap();
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    assert_eq!(export.users(), 1, "a machine is a user of its device");
    assert_eq!(machine.request(0, READ, 0, &[], &[(DATA, 512)]).0, 0);
    drop(machine);
    let end = Instant::now() + Duration::from_secs(20);
    while export.users() > 0 {
        assert!(Instant::now() < end, "the session does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    fixture.end();
}

/// Memory that is removed is not used any more; requests in flight use it to their end.
#[test]
fn memory_is_removed_and_added() {
    let fixture = VhostUserServerFixture::new("null:size=1G,irqmode=2,completion_nsec=10000000");
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    let head = machine.add(0, READ, 0, &[], &[(DATA, 512)]);
    machine.kick_always(0);
    // Waits for the request, if it was taken before.
    machine.remove_memory();
    assert!(!machine.try_tell(message::REM_MEM_REG, &[0; 40], &[]), "a region that does not exist");
    machine.add_memory();
    let (used, _) = machine.wait_used(0);
    assert_eq!(used, head);
    assert_eq!(machine.request(0, READ, 0, &[], &[(DATA, 512)]).0, 0);
    fixture.end();
}

/// A change of the memory is acknowledged when the requests before it are complete, whatever else
/// completes meanwhile: here a chain that breaks the rules.
#[test]
fn a_change_of_memory_waits_for_older_requests() {
    let fixture = VhostUserServerFixture::new("null:size=1G,irqmode=2,completion_nsec=100000000");
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    let older = machine.add(0, READ, 0, &[], &[(DATA, 512)]);
    machine.kick_always(0);
    std::thread::sleep(Duration::from_millis(20));
    let status = machine.status_at(0, 0);
    let mut broken = 0;
    machine.add_page(|machine| {
        std::thread::sleep(Duration::from_millis(10));
        let chain = [(DATA, 16, false), (DATA, 512, true), (DATA, 512, false), (status, 1, true)];
        broken = machine.add_chain(0, &chain);
        machine.kick_always(0);
        assert_eq!(machine.wait_used(0), (broken, 0));
    });
    assert_eq!(machine.take_used(0), Some((older, 513)), "acknowledged while the old memory is used");
    fixture.end();
}

/// The file of the memory is cut: the queue ends, and the server serves other machines.
#[test]
fn a_file_of_memory_that_is_cut_ends_its_queue_only() {
    let fixture = VhostUserServerFixture::new("mem:16M");
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    machine.write(DATA, &pattern(4096, 3));
    assert_eq!(machine.request(0, WRITE, 0, &[(DATA, 4096)], &[]).0, 0);
    machine.add(0, WRITE, 0, &[(DATA, 4096)], &[]);
    rustix::fs::ftruncate(&machine.memfd, 0).unwrap();
    machine.kick_always(0);
    std::thread::sleep(Duration::from_millis(50));
    drop(machine);
    let mut next = fixture.machine(1, VirtioFeatures::empty());
    assert_eq!(next.request(0, READ, 8, &[], &[(DATA, 512)]).0, 0);
    fixture.end();
}

/// A machine learns its new size over the channel of the back end.
#[test]
fn a_new_size_is_announced() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let fixture = VhostUserServerFixture::new(&format!("file:{}", file.path().display()));
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    let (back, theirs) = UnixStream::pair().unwrap();
    machine.tell(message::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
    assert!(theirs.as_raw_fd() > 0);
    file.as_file().set_len(2 << 20).unwrap();
    let export = fixture.exports.get("disk").unwrap();
    export.device().refresh_size();
    fixture.server.refresh_handle().refresh_if_of(export.device().id());
    let mut bytes = [0; HEADER_SIZE];
    back.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    std::io::Read::read_exact(&mut &back, &mut bytes).unwrap();
    assert_eq!(u32::from_ne_bytes(bytes[..4].try_into().unwrap()), 2, "CONFIG_CHANGE_MSG");
    assert_eq!(machine.config()[..8], ((2u64 << 20) / 512).to_le_bytes());
    assert_eq!(machine.request(0, READ, 3000, &[], &[(DATA, 512)]).0, 0, "behind the old end");
    fixture.end();
}

/// Requests of a device whose removal is forced fail.
#[test]
fn a_failing_export_fails_requests() {
    let fixture = VhostUserServerFixture::new("null:1G");
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    let export: Arc<Export> = fixture.exports.get("disk").unwrap();
    let failing = fixture.exports.fail_requests(&export);
    assert_eq!(machine.request(0, READ, 0, &[], &[(DATA, 512)]).0, 1);
    drop(failing);
    assert_eq!(machine.request(0, READ, 0, &[], &[(DATA, 512)]).0, 0);
    fixture.end();
}
