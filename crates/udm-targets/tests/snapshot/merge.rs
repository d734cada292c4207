//! The merge of a snapshot into its origin.

use crate::journal::{CacheSurvival, DiskJournal, host_after};
use crate::kernel;
use crate::log::LogCapture;
use crate::rig::{ORIGIN, SIZE, SnapshotRig, filled_write};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use udm_core::errno::EINVAL;
use udm_core::{BioFlags, Op, Status};

const MERGE: &str = "0 131072 snapshot-merge O W P 8";

/// The recorded origin, and an unused store with a `Z` for each of `chunks`.
fn store_with_chunks(chunks: &[u64]) -> SnapshotRig {
    let mut host = SnapshotRig::recorded(2);
    for name in ["O", "W"] {
        host.get_disk(name).set_limits(|limits| limits.write_cache = true);
    }
    host.create("sn", &format!("0 {SIZE} snapshot O W P 8")).unwrap();
    for chunk in chunks {
        assert_eq!(host.write("sn", chunk * 8, 8, b'Z'), Status::Ok);
    }
    host.remove("sn");
    host
}

/// The content of the origin's disk, as letters.
fn origin_letters(host: &SnapshotRig, chunks: u64) -> String {
    let disk = host.get_disk("O");
    (0..chunks)
        .map(|chunk| char::from(disk.bytes(chunk * 8, 1)[0]))
        .map(|c| if c == '\0' { '.' } else { c })
        .collect()
}

/// More chunks than the records of a unit: every second one.
fn every_second_chunk() -> Vec<u64> {
    (0..600).map(|at| 2 * at + 1).collect()
}

/// The origin after the merge of [`every_second_chunk`], as letters.
fn merged() -> String {
    let old = |chunk: u64| if chunk < 14 { char::from(b'a' + chunk as u8) } else { '.' };
    (0..1200).map(|chunk| if chunk % 2 == 1 { 'Z' } else { old(chunk) }).collect()
}

/// A merge over an origin that completes requests only when released: no unit has completed yet.
fn stepped_merge(chunks: &[u64]) -> SnapshotRig {
    let mut host = store_with_chunks(chunks);
    host.get_disk("O").hold(true);
    host.create("m", MERGE).unwrap();
    host
}

/// Completes one request of the origin's disk.
fn complete_one(host: &mut SnapshotRig) {
    host.get_disk("O").release(1);
    (0..5).for_each(|_| host.poll());
}

fn used_sectors(host: &SnapshotRig, name: &str) -> u64 {
    host.status(name).split('/').next().unwrap().parse().unwrap()
}

#[test]
fn m01_it_goes_back_from_the_last_record_on() {
    let mut host = store_with_chunks(&[3, 4, 5, 10, 1]);
    let disks = ["O", "W"].map(|name| host.get_disk(name));
    let journal = DiskJournal::default();
    journal.watch(0, &disks[0]);
    journal.watch(1, &disks[1]);
    let _ = disks[1].take_log();
    host.create("m", MERGE).unwrap();
    host.settle();
    assert_eq!(host.status("m"), "16/131072 16");
    assert_eq!(host.letters("m", 12), "aZcZZZghijZl");
    assert_eq!(origin_letters(&host, 12), "aZcZZZghijZl");
    assert_eq!(host.events("m"), 1, "the end of a merge is an event");
    assert_eq!(host.store("W").unwrap().records, []);
    let seen = disks[0].take_log();
    let writes: Vec<_> = seen.iter().filter(|s| s.op == Op::Write).map(|s| (s.sector, s.sectors)).collect();
    assert_eq!(writes, [(8, 8), (80, 8), (24, 24)]);
    // The copies of a unit, a flush of the origin, and then the records without the unit.
    let order: String = journal.entries().iter().map(|(disk, what)| what.letter(*disk)).collect();
    assert_eq!(order, "wwwfFR");
    let cleared = disks[1].take_log();
    let records = cleared.iter().filter(|s| s.op == Op::Write);
    assert!(
        records.clone().count() == 1
            && records.clone().all(|s| s.sector == 8 && s.flags.contains(BioFlags::FUA))
    );
}

#[test]
fn m02_progress_is_told_and_the_image_stands_still() {
    let (mut host, merged) = (stepped_merge(&every_second_chunk()), merged().replace('.', "\0"));
    let mut seen = vec![used_sectors(&host, "m")];
    for round in 0..100 {
        // Chunks in both directions: merged ones and others.
        let chunk = round * 125 % 1200;
        let read = host.send("m", 0, udm_dm::testing::make_test_read_bio(chunk * 8, 8));
        let bio = loop {
            complete_one(&mut host);
            let now = used_sectors(&host, "m");
            assert!(now <= *seen.last().unwrap(), "it rises to {now}");
            if now < *seen.last().unwrap() {
                seen.push(now);
            }
            if let Some(bio) = host.answer(read) {
                break bio;
            }
        };
        assert_eq!(
            udm_dm::testing::copy_bio_data(&bio),
            [merged.as_bytes()[chunk as usize]; 4096],
            "{round}"
        );
    }
    while used_sectors(&host, "m") > 16 {
        complete_one(&mut host);
        seen.extend(Some(used_sectors(&host, "m")).filter(|now| now != seen.last().unwrap()));
    }
    // 600 records, in units of 256 from the start of an area: 88, and twice 256.
    assert_eq!(seen, [4832, 4120, 2064, 16]);
}

#[test]
fn m04_writes_while_it_goes_on() {
    let mut host = stepped_merge(&[1, 3, 5, 7, 9, 11, 13]);
    let mut sent = Vec::new();
    for (at, chunk) in [1, 2, 11, 13].into_iter().enumerate() {
        (0..at * 3).for_each(|_| complete_one(&mut host));
        sent.push(host.send("m", at % 2, crate::rig::filled_write(chunk * 8 + 2, 1, b'Y')));
    }
    host.get_disk("O").hold(false);
    for id in sent {
        assert_eq!(host.wait(id).status, Status::Ok);
    }
    host.settle();
    assert_eq!(host.status("m"), "16/131072 16");
    for (chunk, letter) in [(1, b'Z'), (2, b'c'), (11, b'Z'), (13, b'Z')] {
        let expected = [vec![letter; 1024], vec![b'Y'; 512], vec![letter; 2560]].concat();
        assert_eq!(host.read("m", chunk * 8, 8).unwrap(), expected, "{chunk}");
        assert_eq!(host.get_disk("O").bytes(chunk * 8, 8), expected, "{chunk}");
    }
}

#[test]
fn m05_it_is_removed_half_way() {
    let (mut host, merged) = (stepped_merge(&every_second_chunk()), merged());
    let before = used_sectors(&host, "m");
    while used_sectors(&host, "m") == before {
        complete_one(&mut host);
    }
    host.get_disk("O").hold(false);
    host.remove("m");
    assert_ne!(origin_letters(&host, 1200), merged, "it waited for one unit and no more");
    host.create("sn", &format!("0 {SIZE} snapshot O W P 8")).unwrap();
    let left = used_sectors(&host, "sn");
    assert!((16 < left) && (left < before), "{left}");
    assert_eq!(host.letters("sn", 1200), merged);
    host.remove("sn");
    host.create("m", MERGE).unwrap();
    host.settle();
    assert_eq!((host.status("m").as_str(), origin_letters(&host, 1200)), ("16/131072 16", merged));
}

/// The merge stops while its device is suspended, and continues afterwards.
#[test]
fn m05_it_is_suspended_half_way() {
    let (mut host, merged) = (stepped_merge(&every_second_chunk()), merged());
    let before = used_sectors(&host, "m");
    while used_sectors(&host, "m") == before {
        complete_one(&mut host);
    }
    host.get_disk("O").hold(false);
    host.suspend(&["m"]).unwrap();
    let still = host.status("m");
    host.settle();
    assert_eq!(host.status("m"), still);
    assert_ne!(still, "16/131072 16");
    host.resume(&["m"]).unwrap();
    host.settle();
    assert_eq!((host.status("m").as_str(), origin_letters(&host, 1200)), ("16/131072 16", merged));
}

const MERGING: &str = "snapshot-merge: A snapshot is already merging.";

#[test]
fn m07_a_second_merge_of_a_live_snapshot() {
    let mut host = store_with_chunks(&[1, 3]);
    host.disk("V", SIZE);
    host.create("od", ORIGIN).unwrap();
    host.create("s1", &format!("0 {SIZE} snapshot O V P 8")).unwrap();
    host.get_disk("O").hold(true);
    host.create("m", MERGE).unwrap();
    host.make("m2");
    let error = host.load("m2", "0 131072 snapshot-merge O V P 8").unwrap_err();
    assert_eq!((error.errno, &*error.text), (EINVAL, MERGING));
    host.get_disk("O").hold(false);
    host.settle();
    assert_eq!(host.letters("s1", 4), "abcd", "the other snapshot keeps what it had");
    assert_eq!(host.letters("od", 4), "aZcZ");
    assert_eq!(host.status("s1"), "32/131072 16");
}

#[test]
fn m08_a_second_merge_from_the_start() {
    let mut host = store_with_chunks(&[1]);
    host.disk("V", SIZE);
    host.make("m1");
    host.load("m1", MERGE).unwrap();
    host.make("m2");
    let error = host.load("m2", "0 131072 snapshot-merge O V P 8").unwrap_err();
    assert_eq!((error.errno, &*error.text), (EINVAL, MERGING));
}

#[test]
fn m09_the_origin_fails() {
    let (log, mut host) = (LogCapture::new(), store_with_chunks(&[1, 3, 5]));
    fail_writes(&host, "O");
    host.create("m", MERGE).unwrap();
    host.settle();
    assert_eq!(host.status("m"), "Merge failed");
    assert_eq!(host.events("m"), 1);
    assert!(log.says("Write error: shutting down merge"));
    assert_eq!(host.letters("m", 7), "aZcZeZg");
    m10_goes_on_when_it_is_resumed(host, 2);
}

fn fail_writes(host: &SnapshotRig, name: &str) {
    host.get_disk(name).set_verdict(|bio| if bio.op == Op::Write { Status::IoErr } else { Status::Ok });
}

fn m10_goes_on_when_it_is_resumed(mut host: SnapshotRig, events: u32) {
    for name in ["O", "W"] {
        host.get_disk(name).fail(Status::Ok);
    }
    host.settle();
    assert_eq!(host.status("m"), "Merge failed", "not of its own accord");
    host.suspend(&["m"]).unwrap();
    host.resume(&["m"]).unwrap();
    host.settle();
    assert_eq!(host.status("m"), "16/131072 16");
    assert_eq!((host.letters("m", 7), origin_letters(&host, 7)), ("aZcZeZg".into(), "aZcZeZg".into()));
    assert_eq!(host.events("m"), events);
    assert_eq!(host.store("W").unwrap().records, []);
}

/// Wherever the merge fails, it continues at the next resume.
#[test]
fn m10_a_merge_that_failed_anywhere() {
    type FailPredicate = fn(&udm_core::Bio) -> bool;
    let cases: [(&str, FailPredicate, &str); 4] = [
        ("O", |bio| bio.op == Op::Flush, "Flush after merge failed"),
        ("W", |bio| bio.op == Op::Write, "Error in the exception store"),
        ("W", |bio| bio.op == Op::Read && bio.sector.0 == 8, "Error in the exception store"),
        ("W", |bio| bio.op == Op::Read && bio.sector.0 > 8, "Read error"),
    ];
    for (disk, fails, text) in cases {
        let (log, mut host) = (LogCapture::new(), store_with_chunks(&[1, 3, 5]));
        host.create("m", "0 131072 linear O 0").unwrap();
        host.get_disk(disk).set_verdict(move |bio| if fails(bio) { Status::IoErr } else { Status::Ok });
        // The load must still read the store: the disk fails from the first unit on.
        let judge = host.get_disk(disk);
        judge.fail(Status::Ok);
        host.load("m", MERGE).unwrap();
        judge.set_verdict(move |bio| if fails(bio) { Status::IoErr } else { Status::Ok });
        host.resume(&["m"]).unwrap();
        host.settle();
        assert_eq!(host.status("m"), "Merge failed", "{text}");
        assert!(log.says(&format!("{text}: shutting down merge")), "{text}");
        m10_goes_on_when_it_is_resumed(host, 2);
    }
}

/// A resume is followed by a suspend before the merge continues. A unit is in the origin, its
/// records could not be cleared, and no task clears them in between.
#[test]
fn m10_it_is_resumed_and_suspended_at_once() {
    let mut host = store_with_chunks(&[1, 3, 5]);
    host.create("m", "0 131072 linear O 0").unwrap();
    host.load("m", MERGE).unwrap();
    let is_write = |bio: &udm_core::Bio| bio.op == Op::Write;
    host.get_disk("W").set_verdict(move |bio| if is_write(bio) { Status::IoErr } else { Status::Ok });
    host.resume(&["m"]).unwrap();
    host.settle();
    assert_eq!(host.status("m"), "Merge failed");
    host.suspend(&["m"]).unwrap();
    assert!(host.change_without_tasks("m", true));
    let waits = host.send("m", 0, filled_write(40, 8, b'X'));
    assert!(host.answer(waits).is_none(), "it is in the origin, and perhaps in the store");
    assert!(host.change_without_tasks("m", false), "nobody answers the write");
    assert_eq!(host.answer(waits).unwrap().status, Status::IoErr);
    m10_goes_on_when_it_is_resumed(host, 2);
}

#[test]
fn m11_a_store_that_is_invalid() {
    let (log, mut host) = (LogCapture::new(), store_with_chunks(&[1, 3]));
    host.get_disk("W").put(0, b"SnAp\0");
    host.create("m", MERGE).unwrap();
    host.settle();
    assert_eq!(host.status("m"), "Invalid");
    assert!(log.says("Snapshot is invalid: can't merge"));
    assert_eq!(host.letters("m", 4), "abcd");
    assert_eq!(host.write("m", 8, 8, b'X'), Status::Ok);
    assert_eq!(origin_letters(&host, 4), "aXcd");
}

/// The power is cut after each write and flush of the merge.
#[test]
fn m14_a_crash_anywhere() {
    let mut host = SnapshotRig::new(2);
    let disks = [host.disk("O", 14 * 8), host.disk("W", 20 * 8)];
    for (chunk, letter) in (b'a'..=b'n').enumerate() {
        disks[0].put(chunk as u64 * 8, &[letter; 4096]);
    }
    host.create("sn", "0 112 snapshot O W P 8").unwrap();
    for chunk in [3, 4, 5, 10, 1] {
        assert_eq!(host.write("sn", chunk * 8, 8, b'Z'), Status::Ok);
    }
    host.remove("sn");
    let starts = [disks[0].bytes(0, 14 * 8), disks[1].bytes(0, 20 * 8)];
    let journal = DiskJournal::default();
    disks.iter().enumerate().for_each(|(number, disk)| journal.watch(number, disk));
    host.create("m", "0 112 snapshot-merge O W P 8").unwrap();
    host.settle();
    let (mut rng, count) = (SmallRng::seed_from_u64(1), journal.entries().len());
    assert_eq!(count, 6);
    for at in 0..=count {
        for cache in [CacheSurvival::Lost, CacheSurvival::Kept].into_iter().chain([CacheSurvival::Some; 8]) {
            for table in ["snapshot", "snapshot-merge"] {
                let mut after = host_after(&journal, &starts, at, cache, &mut rng);
                after.create("x", &format!("0 112 {table} O W P 8")).unwrap();
                assert_eq!(after.letters("x", 14), "aZcZZZghijZlmn", "{at} {cache:?} {table}");
                after.settle();
                if table == "snapshot-merge" {
                    assert_eq!(after.status("x"), "16/160 16");
                    assert_eq!(origin_letters(&after, 14), "aZcZZZghijZlmn", "{at} {cache:?}");
                }
            }
        }
    }
}

/// udm's merge leaves the same store as the kernel's.
#[test]
fn the_kernels_store_is_merged_as_the_kernel_merged_it() {
    for name in ["a_P8", "a_P32", "b_P8"] {
        let read = |what: &str| kernel::image(&format!("{name}.{what}"));
        let mut host = SnapshotRig::new(1);
        for (disk, bytes) in [("O", read("origview")), ("W", read("cow"))] {
            host.disk(disk, bytes.len() as u64 / 512).put(0, bytes);
        }
        host.create("m", "0 32768 snapshot-merge O W P 8").unwrap();
        (0..50).for_each(|_| host.settle());
        assert!(host.get_disk("O").bytes(0, 32768) == read("snapview"), "{name}");
        assert_eq!(host.store("W").unwrap().records, [], "{name}");
    }
}
