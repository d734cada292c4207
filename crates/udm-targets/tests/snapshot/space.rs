//! Full stores and failing devices.

use crate::journal::{CacheSurvival, DiskJournal, host_after};
use crate::log::LogCapture;
use crate::rig::{ORIGIN, SIZE, SnapshotRig, filled_write, host_with_snapshot};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use udm_core::errno::EINVAL;
use udm_core::{Op, Status};

/// An origin as `od`, and a snapshot of it as `sn` with a store of `sectors` sectors.
fn small_snapshot(words: &str, sectors: u64) -> SnapshotRig {
    let mut host = SnapshotRig::recorded(2);
    host.disk("S", sectors);
    host.create("od", ORIGIN).unwrap();
    host.create("sn", &format!("0 {SIZE} snapshot O S {words}")).unwrap();
    host
}

fn is_marked(host: &SnapshotRig, store: &str) -> bool {
    host.get_disk(store).bytes(0, 1)[4] == 0
}

#[test]
fn e01_an_origin_write_finds_the_store_full() {
    let (log, mut host) = (LogCapture::new(), small_snapshot("P 8", 48));
    for (chunk, status) in ["24/48 16", "32/48 16", "40/48 16", "48/48 16"].into_iter().enumerate() {
        assert_eq!(host.write("od", chunk as u64 * 8, 1, b'X'), Status::Ok);
        assert_eq!(host.status("sn"), status);
    }
    assert_eq!((host.events("sn"), is_marked(&host, "S")), (0, false));
    assert_eq!(host.write("od", 32, 1, b'X'), Status::Ok);
    assert_eq!((host.status("sn").as_str(), host.events("sn")), ("Invalid", 1));
    assert!(is_marked(&host, "S"));
    assert_eq!(host.get_disk("S").bytes(0, 1)[..16], *b"SnAp\0\0\0\0\x01\0\0\0\x08\0\0\0");
    assert_eq!(log.count("Invalidating snapshot: Unable to allocate exception."), 1);
    assert_eq!(host.letters("od", 6), "XXXXXf");
    assert_eq!(host.read("sn", 0, 1), Err(Status::IoErr));
    host.remove("sn");
    host.create("sn", &format!("0 {SIZE} snapshot O S P 8")).unwrap();
    assert_eq!((host.status("sn").as_str(), host.read("sn", 0, 1)), ("Invalid", Err(Status::IoErr)));
}

/// Fills the store by writes of the snapshot: chunks 0 to 3 are `Z`.
fn full_snapshot(words: &str) -> SnapshotRig {
    let mut host = small_snapshot(words, 48);
    for chunk in 0..4 {
        assert_eq!(host.write("sn", chunk * 8, 8, b'Z'), Status::Ok);
    }
    assert_eq!(host.status("sn"), "48/48 16");
    host
}

#[test]
fn e02_a_write_of_the_snapshot_finds_it_full() {
    let mut host = full_snapshot("P 8");
    assert_eq!(host.write("sn", 32, 8, b'Z'), Status::IoErr);
    host.settle();
    assert_eq!((host.status("sn").as_str(), host.events("sn")), ("Invalid", 1));
    assert!(is_marked(&host, "S"));
    assert_eq!(host.letters("od", 6), "abcdef");
}

/// A full and read-only snapshot.
fn overflowed_snapshot() -> SnapshotRig {
    let mut host = full_snapshot("PO 8");
    assert_eq!(host.write("sn", 32, 8, b'Z'), Status::IoErr);
    host.settle();
    assert_eq!(host.status("sn"), "Overflow");
    host
}

#[test]
fn e03_overflow_leaves_what_is_there() {
    let log = LogCapture::new();
    let mut host = overflowed_snapshot();
    assert_eq!(host.write("sn", 0, 1, b'Y'), Status::IoErr, "even where it has the chunk");
    assert_eq!(host.events("sn"), 1, "once");
    assert!(log.says("Snapshot overflowed: Unable to allocate exception."));
    assert!(!is_marked(&host, "S"));
    assert_eq!(host.letters("sn", 7), "ZZZZefg");
    assert_eq!(host.write("od", 0, 1, b'X'), Status::Ok, "a chunk that is kept");
    assert_eq!((host.status("sn").as_str(), &*host.letters("sn", 7)), ("Overflow", "ZZZZefg"));
}

#[test]
fn e05_an_origin_write_after_an_overflow() {
    let mut host = overflowed_snapshot();
    assert_eq!(host.write("od", 40, 1, b'X'), Status::Ok);
    assert_eq!((host.status("sn").as_str(), host.events("sn")), ("Invalid", 2));
    assert!(is_marked(&host, "S"));
    assert_eq!(host.letters("od", 7), "abcdeXg");
}

/// A store that becomes longer has room again.
#[test]
fn e06_a_store_grows() {
    let mut host = overflowed_snapshot();
    let long = grown_store(&host, 128);
    host.remove("sn");
    host.put_disk("S", &long);
    host.create("sn", &format!("0 {SIZE} snapshot O S PO 8")).unwrap();
    assert_eq!((host.status("sn").as_str(), &*host.letters("sn", 7)), ("48/128 16", "ZZZZefg"));
    assert_eq!(host.write("sn", 32, 8, b'Z'), Status::Ok);
    assert_eq!((host.status("sn").as_str(), &*host.letters("sn", 7)), ("56/128 16", "ZZZZZfg"));
}

/// A longer disk with the content of the store `S`.
fn grown_store(host: &SnapshotRig, sectors: u64) -> std::sync::Arc<udm_dm::testing::TestDisk> {
    let disk = host.get_disk("S");
    let long = udm_dm::testing::TestDisk::new(sectors);
    long.put(0, &disk.bytes(0, 48));
    long
}

/// A store that grows before it is full is used at once.
#[test]
fn e06_a_store_grows_while_it_is_in_use() {
    let mut host = SnapshotRig::recorded(2);
    let disk = host.disk("S", 128);
    disk.set_limits(|limits| limits.size = udm_core::Sectors(48));
    host.create("od", ORIGIN).unwrap();
    host.create("sn", &format!("0 {SIZE} snapshot O S P 8")).unwrap();
    for chunk in 0..4 {
        assert_eq!(host.write("sn", chunk * 8, 8, b'Z'), Status::Ok);
    }
    assert_eq!(host.status("sn"), "48/48 16");
    disk.set_limits(|limits| limits.size = udm_core::Sectors(128));
    assert_eq!(host.status("sn"), "48/128 16");
    assert_eq!(host.write("sn", 32, 8, b'Z'), Status::Ok);
    assert_eq!(host.write("od", 40, 8, b'X'), Status::Ok);
    assert_eq!((host.status("sn").as_str(), &*host.letters("sn", 7)), ("64/128 16", "ZZZZZfg"));
}

#[test]
fn e06_an_overflow_ends_when_there_is_room() {
    let mut host = SnapshotRig::recorded(2);
    let disk = host.disk("S", 128);
    disk.set_limits(|limits| limits.size = udm_core::Sectors(48));
    host.create("sn", &format!("0 {SIZE} snapshot O S PO 8")).unwrap();
    for chunk in 0..4 {
        assert_eq!(host.write("sn", chunk * 8, 8, b'Z'), Status::Ok);
    }
    assert_eq!(host.write("sn", 32, 8, b'Z'), Status::IoErr);
    assert_eq!(host.status("sn"), "Overflow");
    disk.set_limits(|limits| limits.size = udm_core::Sectors(128));
    assert_eq!(host.status("sn"), "48/128 16", "numbers return when the cause is gone");
    assert_eq!(host.write("sn", 32, 8, b'Z'), Status::Ok);
    assert_eq!((host.status("sn").as_str(), &*host.letters("sn", 7)), ("56/128 16", "ZZZZZfg"));
}

#[test]
fn e07_a_transient_store_is_full() {
    let mut host = small_snapshot("N 8", 48);
    for chunk in 0..6 {
        assert_eq!(host.write("od", chunk * 8, 1, b'X'), Status::Ok);
        assert_eq!(host.status("sn"), format!("{}/48 0", (chunk + 1) * 8));
    }
    assert_eq!(host.letters("sn", 7), "abcdefg");
    assert_eq!(host.write("od", 48, 1, b'X'), Status::Ok);
    assert_eq!((host.status("sn").as_str(), host.events("sn")), ("Invalid", 1));
    assert_eq!(host.letters("od", 7), "XXXXXXX");
}

/// A snapshot that is invalid because the device of its store failed.
fn lost_store() -> SnapshotRig {
    let (log, mut host) = (LogCapture::new(), host_with_snapshot("P 8"));
    assert_eq!(host.write("od", 0, 1, b'X'), Status::Ok);
    host.get_disk("W").fail(Status::IoErr);
    assert_eq!(host.write("od", 8, 1, b'X'), Status::Ok);
    assert_eq!((host.status("sn").as_str(), host.events("sn")), ("Invalid", 1));
    assert!(log.says("Invalidating snapshot: Error reading/writing."));
    assert!(log.says("write header failed"));
    host
}

#[test]
fn e10_the_store_fails() {
    let mut host = lost_store();
    assert_eq!(host.letters("od", 3), "XXc");
    assert_eq!(host.read("sn", 0, 1), Err(Status::IoErr));
}

#[test]
fn a_file_system_that_is_full_is_called_so() {
    let (log, mut host) = (LogCapture::new(), host_with_snapshot("P 8"));
    host.get_disk("W").fail(Status::NoSpace);
    assert_eq!(host.write("od", 8, 1, b'X'), Status::Ok);
    assert_eq!(host.status("sn"), "Invalid");
    assert!(log.says("Error reading/writing: No space left on device"));
}

/// The header says valid although the store is not: the mark is kept outside the store.
#[test]
fn e11_a_store_that_could_not_be_marked_is_not_believed() {
    let mut host = lost_store();
    host.get_disk("W").fail(Status::Ok);
    assert!(!is_marked(&host, "W"));
    host.remove("sn");
    let error = host.create("sn", &format!("0 {SIZE} snapshot O W P 8")).unwrap_err();
    assert_eq!((error.errno, &*error.text), (EINVAL, "snapshot: Failed to read snapshot metadata"));
    assert!(error.reason.contains("I/O"), "{error}");
    let error = host.load("od", &format!("0 {SIZE} snapshot-merge O W P 8")).unwrap_err();
    assert_eq!(&*error.text, "snapshot-merge: Failed to read snapshot metadata");
    // A store that is formatted again is a normal store, also for the next table that opens it.
    host.forget_store("W");
    host.get_disk("W").put(0, &[0; 512]);
    for _ in 0..2 {
        host.create("sn", &format!("0 {SIZE} snapshot O W P 8")).unwrap();
        assert_eq!((host.status("sn").as_str(), &*host.letters("sn", 3)), ("16/131072 16", "XXc"));
        host.remove("sn");
    }
}

/// The origin changes only after the mark is durable or has failed.
#[test]
fn e11_the_origin_waits_for_the_mark() {
    for kept in [Ok(()), Err("a folder: Read-only file system".to_owned())] {
        let (log, mut host) = (LogCapture::new(), host_with_snapshot("P 8"));
        host.resolver.marks.wait();
        host.get_disk("W").fail(Status::IoErr);
        let sent =
            [host.send("od", 0, filled_write(8, 1, b'X')), host.send("od", 1, filled_write(80, 8, b'X'))];
        (0..100).for_each(|_| host.poll());
        assert!(sent.iter().all(|sent| host.answer(*sent).is_none()), "{kept:?}");
        assert_eq!(host.get_disk("O").bytes(8, 1), [b'b'; 512]);
        assert_eq!((host.status("sn").as_str(), host.events("sn")), ("Invalid", 0));
        host.resolver.marks.end(&kept);
        assert!(sent.iter().all(|sent| host.wait(*sent).status.is_ok()));
        assert_eq!((host.letters("od", 11).as_str(), host.events("sn")), ("aXcdefghijX", 1));
        assert_eq!(log.says("it could not be marked invalid"), kept.is_err());
    }
}

#[test]
fn e12_what_cannot_be_read_is_lost_for_those_that_need_it() {
    let mut host = host_with_snapshot("P 8");
    let other = host.disk("V", SIZE);
    host.create("s2", &format!("0 {SIZE} snapshot O V P 8")).unwrap();
    // The other snapshot has the chunk.
    assert_eq!(host.write("s2", 16, 8, b'Z'), Status::Ok);
    host.get_disk("O")
        .set_verdict(|bio| if (16..24).contains(&bio.sector.0) { Status::IoErr } else { Status::Ok });
    assert_eq!(host.write("od", 16, 8, b'X'), Status::IoErr, "the origin's own");
    assert_eq!((host.status("sn").as_str(), is_marked(&host, "W")), ("Invalid", true));
    assert_eq!((host.status("s2").as_str(), &*host.letters("s2", 2)), ("24/131072 16", "ab"));
    assert_eq!(host.read("s2", 16, 8).unwrap(), [b'Z'; 4096]);
    host.get_disk("O").fail(Status::Ok);
    other.set_verdict(|bio| if bio.op == Op::Write && bio.sector.0 > 8 { Status::IoErr } else { Status::Ok });
    assert_eq!(host.write("s2", 80, 8, b'Z'), Status::IoErr);
    host.settle();
    assert_eq!((host.status("s2").as_str(), is_marked(&host, "V")), ("Invalid", true));
}

/// If the `n`-th write of the store fails, the snapshot is right or invalid, and the origin is
/// right in any case.
#[test]
fn e15_any_write_of_the_store_fails() {
    for (kind, later) in [("P 8", false), ("N 8", false), ("P 8", true), ("PO 8", true)] {
        let mut ends = [0, 0];
        for n in 1..=40 {
            let mut host = host_with_snapshot(kind);
            let mut count = 0;
            host.get_disk("W").set_verdict(move |bio| {
                count += usize::from(bio.op == Op::Write);
                // Once, or from then on.
                let fails = bio.op == Op::Write && (count == n || later && count > n);
                if fails { Status::IoErr } else { Status::Ok }
            });
            let mut expected = *b"abcdefghijklmn";
            for (chunk, own) in
                [0, 3, 4, 9, 5, 1, 12, 13, 2, 8].into_iter().zip([false, true].into_iter().cycle())
            {
                if own {
                    let sectors = 1 + chunk % 8;
                    if host.write("sn", chunk * 8, sectors, b'Z').is_ok() {
                        expected[chunk as usize] = b'Z';
                    }
                } else {
                    assert_eq!(host.write("od", chunk * 8, 8, b'X'), Status::Ok);
                }
            }
            host.settle();
            assert_eq!(host.letters("od", 14), "XbXdXXghijklXn".replace('?', ""), "{kind} {n}");
            if host.status("sn") == "Invalid" {
                ends[0] += 1;
                assert_eq!(host.letters("sn", 14), "!!!!!!!!!!!!!!");
                assert!(later || kind == "N 8" || is_marked(&host, "W"), "{kind} {n}");
            } else {
                ends[1] += 1;
                assert_eq!(host.letters("sn", 14).as_bytes(), expected, "{kind} {n}");
            }
        }
        assert!(ends[0] >= 10 && ends[1] >= 5, "{kind}: {ends:?}");
    }
}

/// The power is cut at any point, with any loss from the caches of both disks. A snapshot loaded
/// then has its instant plus its flushed writes.
#[test]
fn e16_a_crash_anywhere() {
    let start: [Vec<u8>; 2] =
        [(b'a'..=b'n').flat_map(|letter| [letter; 4096]).collect(), vec![0xee; 24 * 4096]];
    let mut begin = start.clone();
    begin[1][..512].fill(0);
    let mut host = SnapshotRig::new(2);
    let disks = ["O", "W"].map(|name| (name, begin[usize::from(name == "W")].clone()));
    let journal = DiskJournal::default();
    for (number, (name, bytes)) in disks.iter().enumerate() {
        let disk = host.disk(name, bytes.len() as u64 / 512);
        disk.put(0, bytes);
        journal.watch(number, &disk);
    }
    host.create("od", "0 112 snapshot-origin O").unwrap();
    host.create("sn", "0 112 snapshot O W P 8").unwrap();
    // Each mark has a number of journal entries and two images. After that entry each chunk must
    // have its content in one of the images.
    let mut image = *b"abcdefghijklmn";
    let mut marks = vec![(0, image, image)];
    for (step, chunk) in [0u64, 3, 4, 9, 5, 1, 12, 13, 2, 8, 3, 9].into_iter().enumerate() {
        let before = image;
        if step % 2 == 1 {
            image[chunk as usize] = b'A' + step as u8;
            marks.push((journal.entries().len(), before, image));
            assert_eq!(host.write("sn", chunk * 8, 8, image[chunk as usize]), Status::Ok);
            assert_eq!(host.flush("sn"), Status::Ok);
            marks.push((journal.entries().len(), image, image));
        } else {
            assert_eq!(host.write("od", chunk * 8, 40.min(112 - chunk * 8), b'X'), Status::Ok);
        }
    }
    host.settle();
    let (mut rng, count) = (SmallRng::seed_from_u64(7), journal.entries().len());
    assert!(count > 30);
    for at in 0..=count {
        let (_, old, new) = marks.iter().rev().find(|(entries, ..)| *entries <= at).unwrap();
        for cache in [CacheSurvival::Lost, CacheSurvival::Kept].into_iter().chain([CacheSurvival::Some; 12]) {
            let mut after = host_after(&journal, &begin, at, cache, &mut rng);
            after.create("sn", "0 112 snapshot O W P 8").unwrap();
            let found = after.read("sn", 0, 112).unwrap();
            for (sector, bytes) in found.chunks(512).enumerate() {
                let (old, new) = (old[sector / 8], new[sector / 8]);
                let byte = bytes[0];
                assert!(
                    (byte == old || byte == new) && bytes == [byte; 512],
                    "{at} {cache:?} {sector}: {byte}"
                );
            }
        }
    }
}
