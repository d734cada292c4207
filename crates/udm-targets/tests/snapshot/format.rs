//! The bytes of a store, and the checks of them.

use crate::log::LogCapture;
use crate::rig::{ORIGIN, SIZE, SnapshotRig, host_with_snapshot};
use udm_core::errno::{EINVAL, EIO, ENXIO};
use udm_core::{BioFlags, Op, Status};
use udm_dm::testing::TestDisk;

/// A store of 64 MiB with this header and these records in its first area.
fn put_store(disk: &TestDisk, valid: u8, chunk: u32, records: &[(u64, u64)]) {
    let mut head = [0; 512];
    head[..12].copy_from_slice(&[b'S', b'n', b'A', b'p', valid, 0, 0, 0, 1, 0, 0, 0]);
    head[12..16].copy_from_slice(&chunk.to_le_bytes());
    disk.put(0, &head);
    let mut area = vec![0; 4096];
    for (at, (old, new)) in records.iter().enumerate() {
        area[at * 16..at * 16 + 8].copy_from_slice(&old.to_le_bytes());
        area[at * 16 + 8..at * 16 + 16].copy_from_slice(&new.to_le_bytes());
    }
    disk.put(8, &area);
}

/// The refusal of a store; the store is not written to.
fn refusal_of(prepare: impl FnOnce(&TestDisk), words: &str) -> (i32, String) {
    let mut host = SnapshotRig::recorded(1);
    let disk = host.get_disk("W");
    prepare(&disk);
    let before = disk.bytes(0, SIZE);
    host.make("sn");
    let error = host.load("sn", &format!("0 {SIZE} snapshot O W {words}")).expect_err("a bad store");
    assert!(disk.bytes(0, SIZE) == before, "a store that is refused was written to");
    assert_eq!(error.text, "snapshot: Failed to read snapshot metadata");
    (error.errno, error.reason)
}

#[test]
fn f01_a_new_store() {
    let mut host = SnapshotRig::recorded(1);
    host.get_disk("W").put(8, &[0xee; 4096]);
    host.create("sn", &format!("0 {SIZE} snapshot O W P 8")).unwrap();
    let store = host.get_disk("W").bytes(0, 24);
    assert_eq!(store[..16], *b"SnAp\x01\0\0\0\x01\0\0\0\x08\0\0\0");
    assert!(store[16..].iter().all(|byte| *byte == 0), "what was there before is no record");
}

/// The state of the recorded example.
fn worked_example() -> SnapshotRig {
    let mut host = host_with_snapshot("P 8");
    for sector in [43, 48, 56, 16] {
        assert_eq!(host.write("od", sector, 1, b'X'), Status::Ok);
    }
    assert_eq!(host.write("sn", 72, 8, b'Z'), Status::Ok);
    assert_eq!(host.write("sn", 8, 1, b'Y'), Status::Ok);
    host
}

/// The recorded example, byte for byte.
#[test]
fn f02_the_worked_example() {
    let host = worked_example();
    assert_eq!(host.status("sn"), "64/131072 16");
    let store = host.get_disk("W").bytes(0, 64);
    assert_eq!(store[..16], *b"SnAp\x01\0\0\0\x01\0\0\0\x08\0\0\0");
    let mut area = vec![0; 4096];
    for (at, (old, new)) in [(5, 2), (6, 3), (7, 4), (2, 5), (9, 6), (1, 7)].into_iter().enumerate() {
        (area[at * 16], area[at * 16 + 8]) = (old, new);
    }
    assert!(store[4096..8192] == area, "{:?}", host.store("W"));
    let chunks = [b'f', b'g', b'h', b'c', b'Z', b'b'].map(|letter| [letter; 4096]);
    let mut data = chunks.concat();
    data[5 * 4096..5 * 4096 + 512].fill(b'Y');
    assert!(store[8192..] == data);
    assert_eq!(host.store("W").unwrap().usage, (64, 16));
}

/// Removes `sn` and creates it again.
fn recreate_snapshot(host: &mut SnapshotRig, words: &str) {
    host.remove("sn");
    host.create("sn", &format!("0 {SIZE} snapshot O W {words}")).unwrap();
}

fn check_worked_example(host: &mut SnapshotRig) {
    assert_eq!(host.status("sn"), "64/131072 16");
    assert_eq!(host.letters("sn", 14), "aYcdefghiZklmn");
    assert_eq!(host.read("sn", 8, 8).unwrap(), [vec![b'Y'; 512], vec![b'b'; 3584]].concat());
}

#[test]
fn f03_a_store_is_opened_again() {
    let mut host = worked_example();
    recreate_snapshot(&mut host, "P 8");
    check_worked_example(&mut host);
}

#[test]
fn f04_the_store_says_how_large_its_chunks_are() {
    let (log, mut host) = (LogCapture::new(), worked_example());
    for words in ["P 64", "P 0"] {
        recreate_snapshot(&mut host, words);
        assert_eq!(host.table_of("sn"), "1:0 1:1 P 8");
        check_worked_example(&mut host);
    }
    assert_eq!(log.count("chunk size 8 in device metadata overrides table chunk size of 64"), 1);
    assert_eq!(log.count("overrides"), 1, "0 asks for what is there");
}

#[test]
fn f05_another_version_and_another_magic() {
    let version = |disk: &TestDisk| {
        put_store(disk, 1, 8, &[]);
        let mut head = disk.bytes(0, 1);
        head[8] = 2;
        disk.put(0, &head);
    };
    let (errno, reason) = refusal_of(version, "P 8");
    assert_eq!(errno, EINVAL);
    assert!(reason.contains("unable to handle snapshot disk version 2"), "{reason}");
    let (errno, reason) = refusal_of(|disk| disk.put(0, b"XXXX"), "P 8");
    assert_eq!(errno, ENXIO);
    assert!(reason.contains("Invalid or corrupt snapshot"), "{reason}");
}

#[test]
fn f07_a_store_that_is_invalid() {
    let (log, mut host) = (LogCapture::new(), SnapshotRig::recorded(1));
    put_store(&host.get_disk("W"), 0, 8, &[(1, 2)]);
    host.create("od", ORIGIN).unwrap();
    host.create("sn", &format!("0 {SIZE} snapshot O W P 8")).unwrap();
    assert_eq!(host.status("sn"), "Invalid");
    assert!(log.says("Snapshot is marked invalid."));
    assert_eq!(host.read("sn", 8, 8), Err(Status::IoErr));
    assert_eq!(host.write("sn", 8, 8, b'X'), Status::IoErr);
    assert_eq!(host.write("od", 8, 8, b'X'), Status::Ok);
    assert_eq!(host.letters("od", 3), "aXc");
}

#[test]
fn f08_a_chunk_size_that_is_none() {
    for chunk in [9, 0] {
        let (errno, reason) = refusal_of(|disk| put_store(disk, 1, chunk, &[]), "P 8");
        assert_eq!(errno, EINVAL);
        let text = format!("invalid on-disk chunk size {chunk}: Chunk size is not a power of 2.");
        assert!(reason.contains(text.trim_end_matches('.')), "{reason}");
        assert!(reason.contains("at byte 12"), "{reason}");
    }
}

#[test]
fn f10_a_full_area() {
    let mut host = host_with_snapshot("P 8");
    // Old data on the disk at the place of the next area.
    host.get_disk("W").put(258 * 8, &[0xee; 4096]);
    for chunk in 0..256 {
        assert_eq!(host.write("od", chunk * 16, 1, b'X'), Status::Ok);
    }
    assert_eq!(host.status("sn"), "2072/131072 24");
    assert_eq!(host.get_disk("W").bytes(0x102000 / 512, 8), [0; 4096]);
    assert_eq!(host.write("od", 256 * 16, 1, b'X'), Status::Ok);
    let store = host.store("W").unwrap();
    assert_eq!((store.records.len(), store.records[256]), (257, (512, 259)));
    assert!(store.is_in_order());
    recreate_snapshot(&mut host, "P 8");
    assert_eq!(host.letters("sn", 5), "abcde");
}

/// The last record of an area needs the next area.
#[test]
fn f12_no_room_for_the_next_area() {
    for kind in ["P", "PO"] {
        let mut host = SnapshotRig::recorded(1);
        host.disk("S", 258 * 8);
        host.create("od", ORIGIN).unwrap();
        host.create("sn", &format!("0 {SIZE} snapshot O S {kind} 8")).unwrap();
        let log = LogCapture::new();
        for chunk in 0..255 {
            assert_eq!(host.write("sn", chunk * 8, 1, b'Y'), Status::Ok);
        }
        assert_eq!(host.status("sn"), "2056/2064 16");
        let _ = host.get_disk("O").take_log();
        assert_eq!(host.write("sn", 255 * 8, 1, b'Y'), Status::IoErr);
        assert_eq!(host.get_disk("O").take_log(), [], "nothing is copied in vain");
        assert!(log.says("Unable to allocate exception."));
        assert_eq!(host.status("sn"), if kind == "P" { "Invalid" } else { "Overflow" });
        let read = host.read("sn", 0, 1);
        assert_eq!(read, if kind == "P" { Err(Status::IoErr) } else { Ok(vec![b'Y'; 512]) });
    }
}

#[test]
fn f14_a_store_without_room_for_an_area() {
    for sectors in [8, 9, 15] {
        let mut host = SnapshotRig::recorded(1);
        let disk = host.disk("S", sectors);
        host.make("sn");
        let error = host.load("sn", &format!("0 {SIZE} snapshot O S P 8")).unwrap_err();
        assert_eq!((error.errno, &*error.text), (EIO, "snapshot: Failed to read snapshot metadata"));
        assert_eq!(disk.bytes(0, 8), [0; 4096]);
    }
    let mut host = SnapshotRig::recorded(1);
    host.disk("S", 16);
    host.create("sn", &format!("0 {SIZE} snapshot O S P 8")).unwrap();
    assert_eq!(host.write("sn", 0, 8, b'X'), Status::IoErr);
    assert_eq!(host.status("sn"), "Invalid");
}

/// A record after the end of the list, as a torn write leaves it, is never used.
#[test]
fn f17_bytes_behind_the_records() {
    let (log, mut host) = (LogCapture::new(), SnapshotRig::recorded(1));
    let disk = host.get_disk("W");
    put_store(&disk, 1, 8, &[(1, 2), (0, 0), (5, 4)]);
    disk.put(16, &[b'P'; 4096]);
    disk.put(32, &[b'S'; 4096]);
    host.create("sn", &format!("0 {SIZE} snapshot O W P 8")).unwrap();
    assert_eq!(host.status("sn"), "24/131072 16");
    assert!(log.says("bytes after the records, at byte 4128, are cleared"));
    assert_eq!(host.letters("sn", 7), "aPcdefg");
    assert_eq!(host.write("sn", 24, 8, b'Y'), Status::Ok);
    assert_eq!((host.status("sn").as_str(), &*host.letters("sn", 7)), ("32/131072 16", "aPcYefg"));
    recreate_snapshot(&mut host, "P 8");
    assert_eq!((host.status("sn").as_str(), &*host.letters("sn", 7)), ("32/131072 16", "aPcYefg"));
}

#[test]
fn f18_a_record_that_points_behind_the_store() {
    let (errno, reason) = refusal_of(|disk| put_store(disk, 1, 8, &[(1, 0xff_ffff)]), "P 8");
    assert_eq!(errno, EINVAL);
    assert!(reason.contains("at byte 4096"), "{reason}");
}

#[test]
fn f19_holes_are_legal_and_other_records_are_not() {
    let mut host = SnapshotRig::recorded(1);
    let disk = host.get_disk("W");
    put_store(&disk, 1, 8, &[(1, 9), (2, 5)]);
    disk.put(72, &[b'P'; 4096]);
    disk.put(40, &[b'Q'; 4096]);
    host.create("sn", &format!("0 {SIZE} snapshot O W P 8")).unwrap();
    assert_eq!((host.status("sn").as_str(), &*host.letters("sn", 4)), ("80/131072 16", "aPQd"));
    assert_eq!(host.write("sn", 80, 8, b'Y'), Status::Ok);
    assert_eq!(host.status("sn"), "88/131072 16");
    assert_eq!(host.store("W").unwrap().records, [(1, 9), (2, 5), (10, 10)]);
    let bad: [(&[(u64, u64)], &str); 5] = [
        (&[(1, 2), (1, 3)], "at byte 4112"),
        (&[(1, 2), (2, 2)], "at byte 4112"),
        (&[(1, 1)], "at byte 4096"),
        (&[(1, 258)], "at byte 4096"),
        (&[(16_384, 2)], "at byte 4096"),
    ];
    let mut reasons = Vec::new();
    for (records, place) in bad {
        let (errno, reason) = refusal_of(|disk| put_store(disk, 1, 8, records), "P 8");
        assert_eq!(errno, EINVAL);
        assert!(reason.contains(place), "{records:?}: {reason}");
        let text = reason.split_once(": ").unwrap().1.to_owned();
        reasons.push(text);
    }
    assert_ne!(reasons[0], reasons[1]);
    assert_ne!(reasons[1], reasons[2]);
    assert_ne!(reasons[3], reasons[4]);
}

/// After every step an independent reader reads the store.
#[test]
fn f21_stores_are_right_after_each_step() {
    for chunk in [1, 8, 32] {
        let mut host = host_with_snapshot(&format!("P {chunk}"));
        // A step that divides none of the sizes, for 2000 copies.
        for step in 0..2000 {
            let sector = step * 37 % 1999 * chunk;
            let name = ["od", "sn"][step as usize % 2];
            assert_eq!(host.write(name, sector, 1, b'X'), Status::Ok);
            let store = host.store("W").unwrap();
            assert!(store.is_in_order(), "{:?}", store.records);
            assert_eq!(store.records.len() as u64, step.min(1998) + 1);
            assert_eq!(host.status("sn"), format!("{}/131072 {}", store.usage.0, store.usage.1));
        }
    }
}

/// Data is written before its record, and zeroes of the next area before the record that fills this
/// area.
#[test]
fn f23_in_which_order_a_store_is_written() {
    let mut host = host_with_snapshot("P 8");
    let disk = host.get_disk("W");
    disk.set_limits(|limits| limits.write_cache = true);
    recreate_snapshot(&mut host, "P 8");
    let _ = disk.take_log();
    assert_eq!(host.write("od", 0, 128, b'X'), Status::Ok);
    let log = disk.take_log();
    let is_record = |sector: u64| sector / 8 % 257 == 1;
    let data: u64 = log.iter().filter(|s| s.op == Op::Write && !is_record(s.sector)).map(|s| s.sectors).sum();
    assert_eq!(data, 128, "16 chunks");
    assert_eq!(host.store("W").unwrap().records.len(), 16);
    check_order(&log);
    for chunk in 16..256 {
        assert_eq!(host.write("od", chunk * 8, 1, b'X'), Status::Ok);
    }
    let log = disk.take_log();
    check_order(&log);
    let zeroes = log.iter().position(|s| s.sector == 258 * 8).expect("the next area is made zero");
    let last = log.iter().rposition(|s| s.op == Op::Write && s.sector / 8 == 1).unwrap();
    assert!(zeroes < last, "{log:?}");
    assert!(
        log[zeroes + 1..last].iter().any(|s| s.op == Op::Flush || s.flags.contains(BioFlags::PREFLUSH))
            || log[last].flags.contains(BioFlags::PREFLUSH)
    );
}

/// Each write of records is FUA and comes after a flush of the preceding writes.
fn check_order(log: &[udm_dm::testing::LoggedTestDiskRequest]) {
    let mut dirty = false;
    for seen in log {
        if seen.op == Op::Flush || seen.flags.contains(BioFlags::PREFLUSH) {
            dirty = false;
        }
        if seen.op == Op::Write && seen.sector / 8 == 1 {
            assert!(!dirty, "records before their data: {log:?}");
            assert!(seen.flags.contains(BioFlags::FUA), "{log:?}");
        } else if seen.op == Op::Write {
            dirty = true;
        }
    }
}
