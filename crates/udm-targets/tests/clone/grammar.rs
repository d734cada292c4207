//! Tables, messages and the status line, in the kernel's words.

use crate::{TABLE, host, host_with};
use udm_core::errno::{EACCES, EINVAL, ENOENT};

#[test]
fn tables_that_are_refused() {
    let mut host = host(1);
    let short = host.disk("short", 100);
    host.disk("small", 24);
    let blocks = host.disk("blocks", 200);
    blocks.set_limits(|limits| limits.logical_block = 8192);
    let locked = host.disk("locked", 200);
    locked.set_limits(|limits| limits.read_only = true);
    drop(short);
    for (words, text, errno) in [
        ("M D S", "Invalid number of arguments", EINVAL),
        ("gone D S 8", "Error opening metadata device", ENOENT),
        ("M gone S 8", "Error opening destination device", ENOENT),
        ("M D gone 8", "Error opening source device", ENOENT),
        ("locked D S 8", "Error opening metadata device", EACCES),
        ("M locked S 8", "Error opening destination device", EACCES),
        ("M short S 8", "Device size larger than destination device", EINVAL),
        ("M D short 8", "Device size larger than source device", EINVAL),
        ("M D S x", "Invalid region size", EINVAL),
        ("M D S 7", "Invalid region size", EINVAL),
        ("M D S -8", "Invalid region size", EINVAL),
        ("M D S 2097153", "Invalid region size", EINVAL),
        ("M D S 24", "Region size is not a power of 2", EINVAL),
        ("M blocks S 8", "Region size is not a multiple of device logical block size", EINVAL),
        ("M D blocks 8", "Region size is not a multiple of device logical block size", EINVAL),
        ("M D S 8 3", "Invalid number of feature arguments", EINVAL),
        ("M D S 8 1", "Invalid number of feature arguments", EINVAL),
        ("M D S 8 no_hydration", "Invalid number of feature arguments", EINVAL),
        ("M D S 8 1 hydrate", "Invalid feature argument", EINVAL),
        ("M D S 8 0 1 hydration_threshold", "Number of core arguments must be even", EINVAL),
        ("M D S 8 0 5 a 1 b 2 c", "Invalid number of core arguments", EINVAL),
        ("M D S 8 0 4 hydration_threshold 1", "Invalid number of core arguments", EINVAL),
        ("M D S 8 0 2 hydration 1", "Invalid core argument", EINVAL),
        ("M D S 8 0 2 hydration_threshold x", "Invalid value for argument `hydration_threshold'", EINVAL),
        (
            "M D S 8 0 2 hydration_batch_size 4294967296",
            "Invalid value for argument `hydration_batch_size'",
            EINVAL,
        ),
        ("small D S 8", "Failed to load metadata", EINVAL),
        (
            "M D S 8 0 6 hydration_threshold 1 hydration_threshold 1 hydration_threshold 1",
            "Invalid number of core arguments",
            EINVAL,
        ),
        // The kernel accepts these two.
        ("M D S 8 0 0 more", "Invalid number of core arguments", EINVAL),
        ("M D D 8", "Error opening source device", EINVAL),
    ] {
        let error = host.build(&format!("0 125 clone {words}")).map(drop).expect_err(words);
        assert_eq!(
            (error.text.trim_start_matches("clone: "), error.errno),
            (text, errno),
            "{words}: {error}"
        );
        assert!(error.word.is_some(), "{words}");
    }
    assert!(host.get_disk("M").bytes(0, 24).iter().all(|byte| *byte == 0), "nothing was written");
}

#[test]
fn too_many_regions() {
    let mut host = host(1);
    for name in ["HD", "HS"] {
        let huge = udm_dm::testing::TestDisk::null(udm_core::Limits::new(udm_core::Sectors(1 << 40)));
        host.put_disk(name, &huge);
    }
    let sectors = (1_u64 << 31) * 8 + 1;
    let error = host.build(&format!("0 {sectors} clone M HD HS 8")).map(drop).unwrap_err();
    assert_eq!(
        error.text.trim_start_matches("clone: "),
        "Too many regions. Consider increasing the region size"
    );
}

#[test]
fn tables_and_status_lines() {
    for (words, status) in [
        ("8", "8 4/256 8 0/16 0 0 4 hydration_threshold 1 hydration_batch_size 1 rw"),
        ("16 0", "8 4/256 16 0/8 0 0 4 hydration_threshold 1 hydration_batch_size 1 rw"),
        (
            "8 1 No_Hydration",
            "8 4/256 8 0/16 0 1 no_hydration 4 hydration_threshold 1 hydration_batch_size 1 rw",
        ),
        (
            "8 2 no_discard_passdown no_hydration 2 hydration_threshold 0",
            "8 4/256 8 0/16 0 2 no_hydration no_discard_passdown 4 hydration_threshold 0 hydration_batch_size 1 rw",
        ),
        (
            "8 0 4 hydration_batch_size 7 Hydration_Threshold 256",
            "8 4/256 8 0/16 0 0 4 hydration_threshold 256 hydration_batch_size 7 rw",
        ),
    ] {
        let mut host = host(1);
        host.make("c");
        host.load("c", &format!("0 125 clone M D S {words}")).unwrap();
        assert_eq!(host.inactive_table_of("c"), format!("1:2 1:1 1:0 {words}"));
        let table = host.build(&format!("0 125 clone M D S {words}")).unwrap();
        assert_eq!(table.targets()[0].target.status(), status);
    }
}

#[test]
fn passdown_needs_a_destination_that_takes_whole_regions() {
    for (most, expected) in [(0, "1 no_discard_passdown"), (7, "1 no_discard_passdown"), (8, "0")] {
        let mut host = host(1);
        host.get_disk("D").set_limits(|limits| limits.max_discard = udm_core::Sectors(most));
        host.create("c", TABLE).unwrap();
        assert!(host.status("c").contains(&format!(" {expected} 4 ")), "{most}: {}", host.status("c"));
        let limits = udm_core::Device::limits(&*host.device("c"));
        assert_eq!(limits.max_discard.0, if most < 8 { 8_388_600 } else { 8 });
        assert_eq!((limits.io_min, limits.io_opt, limits.max_write_zeroes.0), (4096, 4096, 0));
        assert!(limits.write_cache && limits.fua);
    }
}

#[test]
fn messages() {
    let mut host = host_with(1, "0 125 clone M D S 8 1 no_hydration");
    for words in [
        "",
        "hydrate",
        "hydration_threshold",
        "hydration_threshold 1 2",
        "hydration_threshold x",
        "hydration_threshold 4294967296",
        "hydration_batch_size -1",
    ] {
        let error = host.message("c", words).expect_err(words);
        assert_eq!(error.errno, EINVAL, "{words}");
    }
    assert!(host.status("c").contains(" 1 no_hydration 4 hydration_threshold 1 hydration_batch_size 1 rw"));
    let target = |host: &crate::rig::SnapshotRig| {
        host.device("c").live().unwrap().targets()[0].target.state_outside_table()
    };
    assert_eq!(target(&host), None);
    for words in ["Hydration_Threshold 9", "hydration_batch_size 0", "enable_hydration now"] {
        assert_eq!(host.message("c", words).as_deref(), Ok(""), "{words}");
    }
    assert!(host.status("c").contains(" 0 4 hydration_threshold 9 hydration_batch_size 0 rw"));
    assert!(target(&host).is_some(), "a new table would not have these settings");
    host.message("c", "disable_hydration").unwrap();
    assert!(host.status("c").contains(" 1 no_hydration 4 "));
    assert_eq!(host.table_of("c"), "1:2 1:1 1:0 8 1 no_hydration", "messages do not change the table");
}
