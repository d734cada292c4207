//! Tables that are refused, and some that are accepted, compared with the kernel's texts.

mod common;

use common::{compare, load, load_with, recorded};
use std::sync::Arc;
use udm_core::{Limits, Sectors};
use udm_dm::testing::{TestDeviceNameResolver, TestDisk};

#[test]
fn recorded_tables_of_the_basic_targets() {
    let all = recorded(&["linear", "striped", "zero", "error", "nosuchtarget"]);
    assert!(all.len() >= 9, "{}", all.len());
    all.iter().for_each(compare);
}

#[test]
fn multipath_stands_alone() {
    let company: Vec<_> = recorded(&["multipath"]).into_iter().filter(|r| r.table.contains('\n')).collect();
    assert_eq!(company.len(), 1);
    company.iter().for_each(compare);
    let behind = "0 8 zero\n8 8 multipath 0 0 1 1 round-robin 0 1 0 /dev/nullb0";
    assert_refused(behind, 22, "multipath: singleton target type must appear alone in table");
}

#[track_caller]
fn assert_refused(table: &str, errno: i32, text: &str) {
    let error = load(table).expect_err(table);
    assert_eq!((error.errno, error.text.as_str()), (errno, text), "{table}");
}

/// Order, gaps, lengths and types of lines.
#[test]
fn k01_lines_in_the_kernels_order_of_checks() {
    assert_refused("", 22, "populate_table: no targets specified");
    assert_refused("8 8 zero", 22, "zero: Gap in table");
    assert_refused("0 8 zero\n16 8 zero", 22, "zero: Gap in table");
    assert_refused("0 8 zero\n4 8 linear /dev/nullb0 0", 22, "linear: Gap in table");
    assert_refused("8 8 zero\n0 8 zero", 22, "zero: Gap in table");
    assert_refused("0 0 zero", 22, "zero-length target");
    assert_refused("0 36028797018963968 zero", 22, "too large device");
    assert_refused("0 18014398509481984 zero", 22, "too large device");
    assert_refused("8 18446744073709551615 zero", 22, "too large device");
    assert_eq!(load("0 18014398509481983 zero").unwrap(), "0 18014398509481983 zero ");
    // The check that comes first decides.
    assert_refused("8 0 nosuch", 22, "zero-length target");
    assert_refused("8 8 nosuch", 22, "nosuch: unknown target type");
    assert_refused("8 8 linear", 22, "linear: Gap in table");
}

#[test]
fn arguments_of_the_basic_targets() {
    assert_refused("0 8 linear /dev/nullb0 0x10", 22, "linear: Invalid device sector");
    assert_refused("0 8 linear /dev/nullb0 18446744073709551616", 22, "linear: Invalid device sector");
    assert_refused("0 8 linear /dev/nosuch 0", 2, "linear: Device lookup failed");
    assert_refused("0 8 linear 99:99 0", 6, "linear: Device lookup failed");
    assert_refused("0 8 linear /dev/nosuch x", 22, "linear: Invalid device sector");
    assert_refused(
        "0 8 linear /dev/nullb0 18446744073709551615",
        22,
        "nullb0 too small for target: start=18446744073709551615, len=8, dev_size=2097152",
    );
    assert_refused("0 16 striped", 22, "striped: Not enough arguments");
    assert_refused("0 16 striped 2", 22, "striped: Not enough arguments");
    assert_refused("0 16 striped 0 8", 22, "striped: Invalid stripe count");
    assert_refused("0 16 striped x 0", 22, "striped: Invalid stripe count");
    assert_refused("0 16 striped 4294967296 8", 22, "striped: Invalid stripe count");
    assert_refused("0 16 striped 2 0", 22, "striped: Invalid chunk_size");
    assert_refused("0 16 striped 3 8", 22, "striped: Target length not divisible by number of stripes");
    assert_refused("0 16 striped 2 3", 22, "striped: Target length not divisible by chunk size");
    assert_refused("0 16 striped 2 8 /dev/nullb0 0", 22, "striped: Not enough destinations specified");
    assert_refused(
        "0 16 striped 2 8 /dev/nullb0 0 /dev/nullb1 0 x",
        22,
        "striped: Not enough destinations specified",
    );
    assert_refused(
        "0 16 striped 2 8 /dev/nullb0 0 /dev/nullb1 x",
        22,
        "striped: Couldn't parse stripe destination",
    );
    assert_refused(
        "0 16 striped 2 8 /dev/nullb0 0 /dev/nosuch 0",
        2,
        "striped: Couldn't parse stripe destination",
    );
    assert_refused("0 16 error /dev/nosuch 0", 2, "error: Device lookup failed");
    assert_refused("0 16 error /dev/nullb0 x", 22, "error: Invalid device sector");
    for (table, printed) in [
        ("0 16 striped 2 8 /dev/nullb0 0 253:1 4", "0 16 striped 2 8 253:0 0 253:1 4"),
        ("0 18 striped 2 3 /dev/nullb0 0 253:0 16", "0 18 striped 2 3 253:0 0 253:0 16"),
        ("0 16 error", "0 16 error "),
        ("0 16 error whatever it is", "0 16 error "),
        ("0 16 error /dev/nullb0 8", "0 16 error "),
        ("0 8 zero\n8 8 error\n16 8 linear 253:2 7", "0 8 zero \n8 8 error \n16 8 linear 253:2 7"),
    ] {
        assert_eq!(load(table).unwrap(), printed);
    }
}

/// Sizes, and blocks of 4096 bytes.
#[test]
fn k03_sizes_and_alignment() {
    let mut resolver = TestDeviceNameResolver::recorded();
    let limits = Limits { logical_block: 4096, ..Limits::new(Sectors(1024)) };
    resolver.add("/dev/big0", "7:0".parse().unwrap(), TestDisk::null(limits));
    resolver.add("/dev/small0", "7:2".parse().unwrap(), TestDisk::null(Limits::new(Sectors(1024))));
    resolver.add("file:///tmp/a%20b", "7:1".parse().unwrap(), TestDisk::null(Limits::new(Sectors(8))));
    let cases = [
        ("0 9 linear /dev/big0 0", "len=9 not aligned to h/w logical block size 4096 of big0"),
        // If a target has several devices, the error names the device with the block size.
        (
            "0 9 multipath 0 0 1 1 round-robin 0 2 0 /dev/small0 /dev/big0",
            "len=9 not aligned to h/w logical block size 4096 of big0",
        ),
        (
            "0 16 striped 2 8 /dev/small0 1 /dev/big0 0",
            "start=1 of small0 not aligned to h/w logical block size 4096 of big0",
        ),
        ("0 8 linear /dev/big0 1", "start=1 not aligned to h/w logical block size 4096 of big0"),
        ("0 1024 linear /dev/big0 8", "big0 too small for target: start=8, len=1024, dev_size=1024"),
        (
            "0 16 linear file:///tmp/a%20b 0",
            "file:///tmp/a%20b too small for target: start=0, len=16, dev_size=8",
        ),
        (
            "0 16 striped 2 8 /dev/nullb0 0 /dev/big0 1024",
            "big0 too small for target: start=1024, len=8, dev_size=1024",
        ),
        // A block of 4096 bytes across two targets: the error names the target with the block size,
        // else the last target.
        (
            "0 4 linear /dev/nullb0 0\n4 8 linear /dev/big0 0",
            "table line 1 (start sect 4 len 8) not aligned to h/w logical block size 4096",
        ),
        (
            "0 8 linear /dev/big0 0\n8 4 linear /dev/nullb0 0",
            "table line 2 (start sect 8 len 4) not aligned to h/w logical block size 4096",
        ),
    ];
    for (table, text) in cases {
        let error = load_with(table, &mut resolver).expect_err(table);
        assert_eq!((error.errno, error.text.as_str()), (22, text), "{table}");
    }
    load_with("0 4 linear /dev/nullb0 0\n4 4 linear /dev/nullb1 0\n8 8 linear /dev/big0 0", &mut resolver)
        .unwrap();
    // A device without a size is a device that has no table yet.
    resolver.add("@later", "254:1".parse().unwrap(), TestDisk::null(Limits::new(Sectors(0))));
    load_with("0 4096 linear @later 64", &mut resolver).unwrap();
}

/// The line and word of an error, used to mark the table text.
#[test]
fn errors_name_the_line_and_the_word() {
    let error = load("0 8 zero\n8 8 linear /dev/nullb0 x").unwrap_err();
    assert_eq!((error.line, error.word), (Some(1), Some(1)));
    let error = load("0 8 linear /dev/nullb0").unwrap_err();
    assert_eq!((error.line, error.word), (Some(0), Some(1)));
    let error = load("0 16 striped 2 8 /dev/nullb0 0 /dev/nosuch 0").unwrap_err();
    assert_eq!((error.line, error.word), (Some(0), Some(4)));
}

#[test]
fn refused_tables_leave_nothing_open() {
    let disk = TestDisk::null(Limits::new(Sectors(64)));
    let mut resolver = TestDeviceNameResolver::recorded();
    resolver.add("/dev/d", "7:0".parse().unwrap(), Arc::<TestDisk>::clone(&disk));
    load_with("0 8 linear /dev/d 0\n8 8 linear /dev/nosuch 0", &mut resolver).unwrap_err();
    drop(resolver);
    assert_eq!(Arc::strong_count(&disk), 1);
}
