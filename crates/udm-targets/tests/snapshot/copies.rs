//! Copies for several snapshots: which requests pass, and in which order.

use crate::rig::{ORIGIN, SIZE, SnapshotRig, filled_write, host_with_snapshot};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use udm_core::errno::EBUSY;
use udm_core::{Device, Op, Sectors, Status};
use udm_dm::testing::{bio_without_data, copy_bio_data, make_test_read_bio};

#[test]
fn c04_a_whole_chunk_is_not_copied() {
    for kind in ["P 8", "N 8"] {
        let mut host = host_with_snapshot(kind);
        let origin = host.get_disk("O");
        origin.set_verdict(|bio| if bio.op == Op::Read { Status::IoErr } else { Status::Ok });
        let _ = origin.take_log();
        assert_eq!(host.write("sn", 72, 8, b'Z'), Status::Ok);
        assert_eq!(host.read("sn", 72, 8).unwrap(), [b'Z'; 4096]);
        assert_eq!(origin.take_log(), []);
    }
}

#[test]
fn c05_a_snapshot_that_was_never_live_copies_nothing() {
    let mut host = SnapshotRig::recorded(2);
    host.create("od", ORIGIN).unwrap();
    host.make("sn");
    host.load("sn", &format!("0 {SIZE} snapshot O W P 8")).unwrap();
    let _ = host.get_disk("W").take_log();
    assert_eq!(host.write("od", 8, 8, b'X'), Status::Ok);
    assert_eq!(host.get_disk("W").take_log(), []);
    host.resume(&["sn"]).unwrap();
    assert_eq!((host.status("sn").as_str(), &*host.letters("sn", 3)), ("16/131072 16", "aXc"));
}

#[test]
fn c06_a_snapshot_that_is_suspended_goes_on_copying() {
    let mut host = host_with_snapshot("P 8");
    host.suspend(&["sn"]).unwrap();
    assert_eq!(host.write("od", 24, 8, b'X'), Status::Ok);
    assert_eq!(host.status("sn"), "24/131072 16");
    host.resume(&["sn"]).unwrap();
    assert_eq!((host.letters("sn", 5), host.letters("od", 5)), ("abcde".into(), "abcXe".into()));
}

#[test]
fn c08_an_origin_that_was_suspended_for_it() {
    let mut host = host_with_snapshot("N 8");
    assert_eq!(host.write("od", 0, 64, b'X'), Status::Ok);
    assert_eq!((host.status("sn").as_str(), &*host.letters("sn", 9)), ("64/131072 0", "abcdefghi"));
}

#[test]
fn c12_writes_past_the_origin_and_two_names_of_it() {
    let mut host = host_with_snapshot("P 8");
    host.get_disk("O").put(16, &[b'R'; 4096]);
    assert_eq!(host.letters("sn", 4), "abRd", "nobody saw that");
    host.create("o2", ORIGIN).unwrap();
    assert_eq!(host.write("od", 0, 8, b'X'), Status::Ok);
    assert_eq!(host.write("o2", 8, 8, b'X'), Status::Ok);
    assert_eq!((host.status("sn").as_str(), &*host.letters("sn", 4)), ("32/131072 16", "abRd"));
}

#[test]
fn c15_a_store_has_one_origin() {
    for kind in ["P 8", "N 8"] {
        let mut host = host_with_snapshot(kind);
        host.disk("O2", SIZE);
        host.make("s2");
        let error = match host.load("s2", &format!("0 {SIZE} snapshot O2 W {kind}")) {
            Err(error) => error,
            Ok(()) => host.resume(&["s2"]).unwrap_err(),
        };
        assert_eq!(error.errno, EBUSY, "{error}");
        assert_eq!(host.write("od", 8, 8, b'X'), Status::Ok);
        assert_eq!(host.letters("sn", 3), "abc");
    }
}

/// The origin does not change while a read of it is in flight, even if the chunk is copied.
#[test]
fn c16_a_copy_does_not_overtake_a_read() {
    for kind in ["P 8", "N 8"] {
        let mut host = host_with_snapshot(kind);
        let origin = host.get_disk("O");
        let _ = origin.take_log();
        origin.hold(true);
        let reading = host.send("sn", 1, make_test_read_bio(24, 8));
        let writing = host.send("od", 0, filled_write(24, 8, b'X'));
        // The lane of the origin is polled first, so this completes the copy's read.
        origin.release(1);
        (0..30).for_each(|_| host.poll());
        assert_eq!(host.status("sn").split('/').next(), Some(if kind == "P 8" { "24" } else { "8" }));
        assert!(host.answer(writing).is_none(), "the write waits");
        assert_eq!(origin.take_log().iter().map(|seen| seen.op).collect::<Vec<_>>(), [Op::Read]);
        assert_eq!(origin.waiting(), 1, "the read, and no write");
        origin.hold(false);
        assert_eq!(copy_bio_data(&host.wait(reading)), [b'd'; 4096]);
        assert!(host.wait(writing).status.is_ok());
        let order: Vec<_> = origin.take_log().iter().map(|seen| seen.op).collect();
        assert_eq!(order, [Op::Read, Op::Write]);
        assert_eq!((host.letters("sn", 5), host.letters("od", 5)), ("abcde".into(), "abcXe".into()));
    }
}

/// Sixteen cores write the origin and read the snapshot, over disks that complete in any order.
#[test]
fn c17_reads_are_of_the_instant() {
    const CORES: usize = 16;
    for kind in ["N 8", "P 8"] {
        let (mut host, mut rng) = (SnapshotRig::new(CORES), SmallRng::seed_from_u64(17));
        let start: Vec<u8> = (0..512).map(|_| rng.random()).collect();
        let disks = [host.disk("O", 512), host.disk("W", 2000)];
        start.iter().enumerate().for_each(|(sector, byte)| disks[0].put(sector as u64, &[*byte; 512]));
        host.create("od", "0 512 snapshot-origin O").unwrap();
        host.create("sn", &format!("0 512 snapshot O W {kind}")).unwrap();
        disks.iter().for_each(|disk| disk.hold(true));
        let mut under_way = Vec::new();
        for round in 0..60 {
            for core in 0..CORES {
                let (at, to) = (rng.random_range(0..504), rng.random_range(0..504));
                host.send("od", core, filled_write(to, 1 + round % 8, rng.random()));
                under_way.push((at, host.send("sn", core, make_test_read_bio(at, 8))));
            }
            for disk in &disks {
                disk.reverse(rng.random());
                disk.release(rng.random_range(0..40));
            }
            host.poll();
        }
        disks.iter().for_each(|disk| disk.hold(false));
        for (at, id) in under_way {
            let bio = host.wait(id);
            let found: Vec<u8> = copy_bio_data(&bio).chunks(512).map(|sector| sector[0]).collect();
            assert_eq!(
                (bio.status, &*found),
                (Status::Ok, &start[at as usize..at as usize + 8]),
                "{kind} {at}"
            );
        }
        host.settle();
    }
}

#[test]
fn c19_a_hundred_and_one_snapshots() {
    let mut host = SnapshotRig::recorded(1);
    host.create("od", ORIGIN).unwrap();
    let mut names: Vec<String> = (0..101).map(|n| format!("s{n}")).collect();
    for name in &names {
        host.disk(&format!("D{name}"), 64);
        host.create(name, &format!("0 {SIZE} snapshot O D{name} N 8")).unwrap();
    }
    assert_eq!(host.write("od", 16, 8, b'X'), Status::Ok);
    names.shuffle(&mut SmallRng::seed_from_u64(19));
    while let Some(name) = names.pop() {
        assert_eq!(host.letters(&name, 4), "abcd", "{name}");
        host.remove(&name);
    }
    assert_eq!(host.letters("od", 4), "abXd");
}

#[test]
fn c21_discards_are_not_offered() {
    let mut host = host_with_snapshot("P 8");
    for name in ["od", "sn"] {
        let limits = host.device(name).limits();
        assert_eq!((limits.max_discard, limits.max_write_zeroes), (Sectors::ZERO, Sectors::ZERO));
        for op in [Op::Discard, Op::WriteZeroes] {
            assert_eq!(host.run(name, bio_without_data(op, 8, 8)).status, Status::NotSupp, "{name} {op:?}");
        }
    }
    assert_eq!((host.letters("sn", 3), host.letters("od", 3)), ("abc".into(), "abc".into()));
}

#[test]
fn c22_a_discard_clears_what_is_in_the_store() {
    let mut host = host_with_snapshot("N 8 1 discard_zeroes_cow");
    assert_eq!(host.write("sn", 8, 16, b'Z'), Status::Ok);
    assert_eq!(host.status("sn"), "16/131072 0");
    assert_eq!(host.discard("sn", 8, 16), Status::Ok);
    assert_eq!((host.status("sn").as_str(), &*host.letters("sn", 9)), ("16/131072 0", "a..defghi"));
    assert_eq!(host.discard("sn", 64, 8), Status::Ok);
    assert_eq!((host.status("sn").as_str(), &*host.letters("sn", 9)), ("16/131072 0", "a..defghi"));
    assert_eq!(host.letters("od", 9), "abcdefghi");
}

#[test]
fn c24_a_discard_of_a_part_of_a_chunk() {
    let mut host = host_with_snapshot("P 16 1 discard_zeroes_cow");
    assert_eq!(host.write("sn", 16, 16, b'X'), Status::Ok);
    let before = host.status("sn");
    assert_eq!(host.discard("sn", 16, 8), Status::Ok);
    assert_eq!(host.status("sn"), before);
    assert_eq!(host.read("sn", 24, 8).unwrap(), [b'X'; 4096]);
    let first = host.read("sn", 16, 8).unwrap();
    assert!(first == [0; 4096] || first == [b'X'; 4096]);
}

#[test]
fn c25_a_discard_of_the_origin_as_well() {
    let mut host = host_with_snapshot("P 8 2 discard_zeroes_cow discard_passdown_origin");
    assert_eq!(host.discard("sn", 64, 8), Status::Ok);
    assert_eq!(host.status("sn"), "16/131072 16");
    assert_eq!((host.letters("od", 10), host.letters("sn", 10)), ("abcdefgh.j".into(), "abcdefgh.j".into()));
}

/// Sectors of the chunk of the tests of long discards: 4 MiB.
const LONG_CHUNK: u64 = 8192;

/// A snapshot whose first chunk is in the store, full of `X`, over a store that takes requests of
/// at most `max_sectors`.
fn host_with_long_chunk(max_sectors: u64) -> SnapshotRig {
    let mut host = SnapshotRig::new(1);
    host.disk("O", SIZE).put(0, &vec![b'o'; LONG_CHUNK as usize * 2 * 512]);
    host.disk("W", SIZE).set_limits(|limits| limits.max_sectors = Sectors(max_sectors));
    host.create("od", ORIGIN).unwrap();
    let words = format!("P {LONG_CHUNK} 2 discard_zeroes_cow discard_passdown_origin");
    host.attach("od", "sn", &format!("0 {SIZE} snapshot O W {words}")).unwrap();
    assert_eq!(host.write("sn", 0, LONG_CHUNK, b'X'), Status::Ok);
    let _ = host.get_disk("W").take_log();
    host
}

/// Sectors of the writes of `W` since the last look.
fn writes_of_store(host: &SnapshotRig) -> Vec<u64> {
    let log = host.get_disk("W").take_log().into_iter();
    log.filter(|one| one.op == Op::Write).map(|one| one.sectors).collect()
}

fn is_filled(host: &mut SnapshotRig, name: &str, sector: u64, fill: u8) -> bool {
    host.read(name, sector, LONG_CHUNK).unwrap().iter().all(|byte| *byte == fill)
}

/// The zeroes of a discard take no more memory than a piece of a copy, however long the chunk is,
/// and the store takes each piece.
#[test]
fn a_discard_of_a_long_chunk_is_cleared_in_pieces() {
    for (max_sectors, longest) in [(u64::from(u32::MAX), 512), (255, 255)] {
        let mut host = host_with_long_chunk(max_sectors);
        assert_eq!(host.discard("sn", 0, LONG_CHUNK), Status::Ok);
        let pieces = writes_of_store(&host);
        assert_eq!((pieces.iter().sum(), pieces.iter().max()), (LONG_CHUNK, Some(&longest)));
        assert!(is_filled(&mut host, "sn", 0, 0) && is_filled(&mut host, "sn", LONG_CHUNK, b'o'));
        assert!(is_filled(&mut host, "od", 0, 0), "passed down");
    }
}

/// A piece that fails fails the discard. A piece that is handed back is the whole discard again.
#[test]
fn a_discard_of_a_long_chunk_ends_between_its_pieces() {
    for fails in [true, false] {
        let mut host = host_with_long_chunk(u64::from(u32::MAX));
        let store = host.get_disk("W");
        store.hold(true);
        store.hand_back(true);
        store.release(3);
        let sent = host.send("sn", 0, bio_without_data(Op::Discard, 0, LONG_CHUNK));
        (0..20).for_each(|_| host.poll());
        assert_eq!((writes_of_store(&host).len(), store.waiting()), (3, 1));
        if fails {
            store.fail(Status::Medium);
        } else {
            assert!(host.suspend_asleep("sn", |_, _| true));
            assert_eq!(store.waiting(), 0);
        }
        store.hold(false);
        if !fails {
            host.resume(&["sn"]).unwrap();
        }
        let bio = host.wait(sent);
        assert_eq!((bio.op, bio.sector.0, bio.sectors.0), (Op::Discard, 0, LONG_CHUNK));
        assert!(bio.data.is_empty());
        assert_eq!(bio.status, if fails { Status::Medium } else { Status::Ok });
        store.fail(Status::Ok);
        assert_eq!((is_filled(&mut host, "sn", 0, 0), is_filled(&mut host, "od", 0, 0)), (!fails, !fails));
    }
}

/// Two writes of the origin whose copies complete in reverse order. Returns which of them have
/// completed then.
fn copies_end_backwards(kind: &str) -> [bool; 2] {
    let mut host = host_with_snapshot(kind);
    let store = host.get_disk("W");
    store.hold(true);
    store.reverse(true);
    let sent = [0, 80].map(|sector| host.send("od", 0, filled_write(sector, 8, b'X')));
    (0..5).for_each(|_| host.poll());
    assert_eq!(store.waiting(), 2);
    store.release(1);
    (0..20).for_each(|_| host.poll());
    let answered = sent.map(|id| host.answer(id).is_some());
    store.hold(false);
    host.settle();
    assert_eq!(
        (host.letters("od", 12), host.letters("sn", 12)),
        ("XbcdefghijXl".into(), "abcdefghijkl".into())
    );
    if kind.starts_with('P') {
        assert!(host.store("W").unwrap().is_in_order());
        assert_eq!(host.store("W").unwrap().records, [(0, 2), (10, 3)]);
    }
    answered
}

#[test]
fn c27_a_transient_copy_waits_for_no_other() {
    assert_eq!(copies_end_backwards("N 8"), [false, true]);
}

#[test]
fn c28_records_are_in_the_order_of_their_chunks() {
    assert_eq!(copies_end_backwards("P 8"), [false, false]);
}

/// C01.
#[test]
fn c01_a_chunk_is_copied_once() {
    let mut host = host_with_snapshot("P 8");
    assert_eq!(host.status("sn"), "16/131072 16");
    assert_eq!(host.write("od", 43, 1, b'X'), Status::Ok);
    assert_eq!(host.status("sn"), "24/131072 16");
    assert_eq!(
        host.read("od", 40, 8).unwrap()[1024..2560],
        *[vec![b'f'; 512], vec![b'X'; 512], vec![b'f'; 512]].concat()
    );
    assert_eq!(host.write("od", 40, 8, b'X'), Status::Ok);
    assert_eq!(host.status("sn"), "24/131072 16");
    assert_eq!(host.read("sn", 40, 8).unwrap(), [b'f'; 4096]);
    assert_eq!(host.letters("od", 8), "abcdeXgh");
    assert_eq!(host.letters("sn", 8), "abcdefgh");
}

/// C03: a write to a part of a chunk of the snapshot.
#[test]
fn c03_a_partial_write_takes_the_rest_of_its_chunk_along() {
    for kind in ["P 8", "N 8"] {
        let mut host = host_with_snapshot(kind);
        assert_eq!(host.write("sn", 8, 1, b'Y'), Status::Ok);
        assert_eq!(host.read("sn", 8, 8).unwrap(), [vec![b'Y'; 512], vec![b'b'; 3584]].concat());
        assert_eq!(host.read("od", 8, 8).unwrap(), [b'b'; 4096]);
    }
}

/// C07: a snapshot is created while its origin is in use, without a manual suspend.
#[test]
fn c07_an_origin_in_use_loses_no_chunk() {
    let mut host = SnapshotRig::recorded(2);
    host.create("od", ORIGIN).unwrap();
    host.create("sn", &format!("0 {SIZE} snapshot O W N 8")).unwrap();
    assert_eq!(host.write("od", 0, 64, b'X'), Status::Ok);
    assert_eq!(host.letters("sn", 9), "abcdefghi");
    assert_eq!(host.letters("od", 9), "XXXXXXXXi");
    assert_eq!(host.status("sn"), "64/131072 0");
    host.remove("sn");
    assert_eq!(host.write("od", 64, 64, b'X'), Status::Ok);
    assert_eq!(host.letters("od", 14), "XXXXXXXXXXXXXX");
}

/// A store with blocks of 4 KiB, and an origin with odd maximum lengths or an end within a block.
/// Copies are split by the limits of both, and a merge restores the data.
#[test]
fn stores_whose_blocks_are_larger_than_the_origins() {
    for (max_sectors, size, len) in
        [(255, SIZE, SIZE), (100, SIZE, SIZE), (u64::MAX, 8201, 8200), (255, 8201, 8200)]
    {
        let mut host = SnapshotRig::recorded(1);
        host.get_disk("O").set_limits(|limits| {
            limits.size = Sectors(size);
            limits.max_sectors = Sectors(max_sectors.min(u64::from(u32::MAX)));
        });
        host.get_disk("W").set_limits(|limits| limits.logical_block = 4096);
        host.get_disk("O").put(8192, &[b'o'; 9 * 512]);
        host.create("od", &format!("0 {size} snapshot-origin O")).unwrap();
        host.attach("od", "sn", &format!("0 {len} snapshot O W P 256")).unwrap();
        for sector in [0, 8192] {
            assert_eq!(host.write("od", sector, 8, b'X'), Status::Ok);
        }
        assert!(!host.status("sn").contains("Invalid"), "{max_sectors} {size}");
        assert_eq!(host.read("sn", 8, 8).unwrap(), [b'b'; 4096]);
        assert_eq!(host.read("sn", 8192, 8).unwrap(), [b'o'; 4096]);
        host.remove("sn");
        host.create("m", &format!("0 {len} snapshot-merge O W P 256")).unwrap();
        host.settle();
        assert!(!host.status("m").contains("failed"), "{}", host.status("m"));
        assert_eq!(host.get_disk("O").bytes(8192, 8), [b'o'; 4096]);
        assert_eq!(host.get_disk("O").bytes(0, 1), [b'a'; 512]);
    }
}
