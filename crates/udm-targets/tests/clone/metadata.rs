//! Metadata: restarts, damage, and devices that are refused.

use crate::rig::SnapshotRig;
use crate::{METADATA, REGIONS, SIZE, STILL, TABLE, bytes, host, host_with, pass, progress, source};
use std::sync::Arc;
use udm_core::Status;
use udm_core::errno::EINVAL;
use udm_dm::testing::TestDisk;

/// The same disks on another host, as after a kill of the program.
fn restarted(host: &SnapshotRig) -> SnapshotRig {
    let mut again = SnapshotRig::new(2);
    for name in ["S", "D", "M"] {
        let (old, new) = (host.get_disk(name), TestDisk::new(if name == "M" { METADATA } else { SIZE }));
        new.put(0, &old.bytes(0, if name == "M" { METADATA } else { SIZE }));
        again.put_disk(name, &new);
    }
    again
}

fn refusal(host: &mut SnapshotRig, table: &str) -> String {
    let error = host.build(table).map(drop).expect_err(table);
    assert_eq!((error.text.trim_start_matches("clone: "), error.errno), ("Failed to load metadata", EINVAL));
    error.reason
}

#[test]
fn committed_regions_survive_a_restart() {
    let mut host = host_with(2, STILL);
    host.write("c", 10, 2, 0xaa);
    host.flush("c");
    host.write("c", 40, 8, 0xbb);
    let mut again = restarted(&host);
    again.create("c", STILL).unwrap();
    assert_eq!(progress(&again).0, 1);
    let mut expected = source(0, SIZE);
    expected[10..12].fill(0xaa);
    assert_eq!(bytes(&mut again, 0, SIZE), expected, "the write without a flush is not known");
    again.load("c", TABLE).unwrap();
    again.resume(&["c"]).unwrap();
    pass(&mut again, 3);
    assert_eq!((bytes(&mut again, 0, SIZE), progress(&again).0), (expected, REGIONS));
    // A clone that is complete raises no event at its next load.
    let mut third = restarted(&again);
    third.create("c", TABLE).unwrap();
    pass(&mut third, 2);
    assert_eq!((progress(&third).0, third.events("c")), (REGIONS, 0));
}

#[test]
fn one_damaged_copy_is_enough() {
    let mut host = host_with(2, STILL);
    host.write("c", 10, 2, 0xaa);
    host.flush("c");
    host.settle();
    // Blocks: two headers, the first copy of the bitmap, the second one.
    for block in 0..4 {
        let mut again = restarted(&host);
        again.get_disk("M").put(block * 8, &[0x5a; 512]);
        again.create("c", STILL).unwrap();
        assert_eq!(bytes(&mut again, 9, 4), [10, 0xaa, 0xaa, 13], "block {block}");
        // The copy is written again.
        pass(&mut again, 2);
        let mut third = restarted(&again);
        third.get_disk("M").put((block ^ 1) * 8, &[0x5a; 512]);
        third.create("c", STILL).unwrap();
        assert_eq!(bytes(&mut third, 9, 4), [10, 0xaa, 0xaa, 13], "block {block}");
    }
}

#[test]
fn two_damaged_copies_are_refused() {
    let mut host = host_with(2, STILL);
    host.write("c", 10, 2, 0xaa);
    host.flush("c");
    host.settle();
    for (blocks, why) in [
        ([0, 1], "this is no metadata of a clone: a new clone needs a device of zeroes"),
        ([2, 3], "both copies of block 0 of the bitmap are damaged: it is no block of a bitmap"),
    ] {
        let mut again = restarted(&host);
        blocks.into_iter().for_each(|block| again.get_disk("M").put(block * 8, &[0x5a; 512]));
        let before = again.get_disk("M").bytes(0, METADATA);
        assert_eq!(refusal(&mut again, STILL), why);
        assert_eq!(again.get_disk("M").bytes(0, METADATA), before, "nothing is overwritten");
    }
}

#[test]
fn other_metadata_is_refused() {
    let host = host_with(2, STILL);
    let mut again = restarted(&host);
    assert!(refusal(&mut again, "0 125 clone M D S 16").contains("it has 125 sectors in regions of 8"));
    assert!(refusal(&mut again, "0 100 clone M D S 8").contains("it has 125 sectors in regions of 8"));
    // A superblock of the kernel's dm-clone has its magic number at byte 32.
    let mut kernel = crate::host(1);
    let mut superblock = vec![0; 4096];
    superblock[32..40].copy_from_slice(&0x8af2_7f64_u64.to_le_bytes());
    kernel.get_disk("M").put(0, &superblock);
    assert!(refusal(&mut kernel, STILL).starts_with("this is metadata of the kernel's dm-clone"));
}

#[test]
fn a_disk_with_data_is_not_taken_for_blank() {
    // Byte 65600 has the magic number of btrfs; the last one is in the last whole block of 1 MiB.
    for sector in [2, 16, 128, 2047] {
        let mut host = host(1);
        host.get_disk("M").put(sector, &[1; 512]);
        let why = refusal(&mut host, STILL);
        assert_eq!(
            why,
            format!(
                "it has data at byte {}: a new clone needs zeroes in the first 1048576 bytes",
                sector * 512
            )
        );
        assert_eq!(host.get_disk("M").bytes(0, 2), vec![0; 1024]);
    }
}

#[test]
fn another_source_is_noticed_as_long_as_it_is_needed() {
    let mut host = host_with(2, STILL);
    host.write("c", 10, 2, 0xaa);
    host.flush("c");
    let changed = |host: &SnapshotRig| {
        let again = restarted(host);
        again.get_disk("S").put(124, &[0x77; 512]);
        again
    };
    let why = refusal(&mut changed(&host), STILL);
    assert_eq!(why, "S is not the source with which this clone began, and 15 of 16 regions are still there");
    // A source that cannot be read now is not refused: its requests fail.
    let mut dead = restarted(&host);
    dead.get_disk("S").fail(Status::IoErr);
    dead.create("c", STILL).unwrap();
    host.load("c", TABLE).unwrap();
    host.resume(&["c"]).unwrap();
    pass(&mut host, 3);
    changed(&host).create("c", STILL).unwrap();
}

#[test]
fn metadata_of_several_blocks() {
    // 80,000 regions are 3 blocks of the bitmap.
    let mut host = SnapshotRig::new(2);
    for name in ["BS", "BD"] {
        host.disk(name, 640_000);
    }
    let metadata = host.disk("M", METADATA);
    host.get_disk("BS").put(639_992, &[0x33; 512]);
    host.create("c", "0 640000 clone M BD BS 8 1 no_hydration").unwrap();
    for region in [0, 1, 32_511, 32_512, 65_024, 79_999] {
        assert_eq!(host.write("c", region * 8 + 1, 1, 0xaa), Status::Ok);
    }
    assert_eq!(host.flush("c"), Status::Ok);
    let mut again = SnapshotRig::new(1);
    for name in ["BS", "BD", "M"] {
        again.put_disk(name, &Arc::clone(&host.get_disk(name)));
    }
    drop(host);
    let copy = TestDisk::new(METADATA);
    copy.put(0, &metadata.bytes(0, METADATA));
    again.put_disk("M2", &copy);
    again.create("c", "0 640000 clone M2 BD BS 8 1 no_hydration").unwrap();
    assert!(again.status("c").starts_with("8 8/256 8 6/80000 0 "), "{}", again.status("c"));
    assert_eq!(
        again.read("c", 639_992, 2).unwrap()[..1024].iter().step_by(512).copied().collect::<Vec<_>>(),
        [0x33, 0xaa]
    );
}
