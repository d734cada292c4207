//! Settings of a snapshot.

use crate::rig::{SIZE, SnapshotRig, filled_write};
use udm_core::{Sectors, Status};

/// An origin, and a snapshot with room for two chunks.
fn small_snapshot(kind: &str) -> SnapshotRig {
    let mut host = SnapshotRig::recorded(2);
    host.get_disk("W").set_limits(|limits| limits.size = Sectors(32));
    host.create("od", "0 131072 snapshot-origin O").unwrap();
    host.create("sn", &format!("0 {SIZE} snapshot O W {kind} 8")).unwrap();
    host
}

fn grow_store(host: &mut SnapshotRig) {
    host.get_disk("W").set_limits(|limits| limits.size = Sectors(400));
    host.message("sn", "grown").unwrap();
}

#[test]
fn a_full_store_pauses_the_origin_until_it_has_grown() {
    let mut host = small_snapshot("P");
    host.message("sn", "set on_full pause").unwrap();
    let writes: Vec<u64> = (0..4).map(|chunk| host.send("od", 0, filled_write(chunk * 8, 8, b'X'))).collect();
    let mine = host.send("sn", 1, filled_write(80, 1, b'Y'));
    (0..100).for_each(|_| host.poll());
    assert_eq!(writes.iter().filter(|sent| host.answer(**sent).is_some()).count(), 2);
    assert!(host.answer(mine).is_none());
    assert_eq!(host.status("sn"), "32/32 16");
    grow_store(&mut host);
    for sent in &writes[2..] {
        assert_eq!(host.wait(*sent).status, Status::Ok);
    }
    assert_eq!(host.wait(mine).status, Status::Ok);
    assert_eq!((host.letters("sn", 6), host.letters("od", 6)), ("abcdef".into(), "XXXXef".into()));
    assert_eq!(host.status("sn"), "56/400 16");
}

#[test]
fn a_full_store_fails_writes_and_nothing_else() {
    let mut host = small_snapshot("N");
    host.message("sn", "set on_full fail").unwrap();
    for chunk in 0..4 {
        assert_eq!(host.write("od", chunk * 8, 8, b'X'), Status::Ok, "all of it is data");
    }
    assert_eq!(host.write("od", 32, 1, b'X'), Status::NoSpace);
    assert_eq!(host.write("sn", 40, 1, b'X'), Status::NoSpace);
    assert_eq!(host.write("od", 0, 8, b'Z'), Status::Ok);
    assert_eq!((host.letters("sn", 6), host.letters("od", 6)), ("abcdef".into(), "ZXXXef".into()));
    grow_store(&mut host);
    assert_eq!(host.write("od", 32, 1, b'X'), Status::Ok);
    assert_eq!(host.events("sn"), 0);
}

#[test]
fn a_watermark_is_an_event() {
    let mut host = small_snapshot("N");
    host.message("sn", "set watermark 50").unwrap();
    for (chunk, events) in [(0, 0), (1, 1), (2, 1), (3, 1)] {
        assert_eq!(host.write("od", chunk * 8, 8, b'X'), Status::Ok);
        assert_eq!(host.events("sn"), events, "after {} of 4", chunk + 1);
    }
}

#[test]
fn what_it_does_not_know_is_refused() {
    let mut host = small_snapshot("P");
    for message in
        ["set on_full never", "set watermark 101", "set copy_memory 1", "set speed 1", "set", "stop"]
    {
        assert_eq!(host.message("sn", message).unwrap_err().errno, 22, "{message}");
    }
    host.message("sn", "set copy_memory 64k").unwrap();
}

/// If there is no memory for another exception, the store counts as full.
#[test]
fn the_memory_of_the_map_has_a_bound() {
    let mut host = SnapshotRig::recorded(2);
    host.create("od", "0 131072 snapshot-origin O").unwrap();
    host.create("sn", &format!("0 {SIZE} snapshot O W N 1")).unwrap();
    host.message("sn", "set on_full fail").unwrap();
    host.message("sn", "set map_memory 8k").unwrap();
    // One exception in each leaf of 512 chunks: 32 bytes each, with the pointer.
    let statuses: Vec<Status> = (0..256).map(|leaf| host.write("od", leaf * 512, 1, b'X')).collect();
    let kept = statuses.iter().filter(|status| **status == Status::Ok).count();
    assert!((100..256).contains(&kept), "{kept}");
    assert!(statuses[kept..].iter().all(|status| *status == Status::NoSpace));
    assert_eq!(host.letters("sn", 2), "ab", "it is as it was");
    host.message("sn", "set map_memory 1M").unwrap();
    assert_eq!(host.write("od", 255 * 512, 1, b'X'), Status::Ok);
    assert!(host.message("sn", "set map_memory x").is_err());
}

#[test]
fn an_origin_of_more_chunks_than_can_be_kept_is_refused() {
    let mut host = SnapshotRig::recorded(1);
    host.get_disk("O").set_limits(|limits| limits.size = Sectors(1 << 54));
    let error = host.create("sn", "0 8192 snapshot O W N 8").unwrap_err();
    assert!(error.to_string().contains("at most 274877906944 are possible: use larger chunks"), "{error}");
    host.create("sn", "0 8192 snapshot O W N 1048576").unwrap();
}
