//! Tables: accepted ones and their printed form, refused ones and their texts.

use crate::log::LogCapture;
use crate::rig::{SIZE, SnapshotRig};
use udm_core::errno::{EINVAL, ENOENT};
use udm_dm::TargetError;
use udm_dm::testing::TestDisk;

const NO_STORE: &str = "Couldn't create exception store";

/// The refusal of `table` on a host with the recorded disks. The store is not written to.
fn refusal_of(table: &str) -> TargetError {
    let mut host = SnapshotRig::recorded(1);
    host.make("sn");
    let error = host.load("sn", table).expect_err(table);
    assert_eq!(host.get_disk("W").bytes(0, 64), [0; 64 * 512], "{table} wrote");
    error
}

/// The table line of a snapshot with `words` after its devices.
fn snapshot_line(words: &str) -> String {
    format!("0 {SIZE} snapshot O W {words}")
}

#[track_caller]
fn assert_refused(table: &str, errno: i32, text: &str, reason: &str) {
    let error = refusal_of(table);
    let kind = table.split(' ').nth(2).unwrap();
    assert_eq!((error.errno, error.text), (errno, format!("{kind}: {text}")), "{table}");
    assert!(error.reason.contains(reason), "{table}: {}", error.reason);
}

#[test]
fn g01_a_persistent_snapshot() {
    let mut host = SnapshotRig::recorded(1);
    host.create("sn", &snapshot_line("P 8")).unwrap();
    assert_eq!(host.device("sn").table_text(false).trim_end(), "0 131072 snapshot 1:0 1:1 P 8");
    assert_eq!(host.status("sn"), "16/131072 16");
    assert_eq!(host.events("sn"), 0);
}

#[test]
fn g02_letters_and_what_they_are_printed_as() {
    let cases =
        [("p", "P"), ("po", "PO"), ("n", "N"), ("POX", "PO"), ("NO", "N"), ("pO", "PO"), ("Po", "PO")];
    for (word, printed) in cases {
        let mut host = SnapshotRig::recorded(1);
        host.create("sn", &snapshot_line(&format!("{word} 8"))).unwrap();
        assert_eq!(host.table_of("sn"), format!("1:0 1:1 {printed} 8"));
        let status = if printed == "N" { "0/131072 0" } else { "16/131072 16" };
        assert_eq!(host.status("sn"), status, "{word}");
    }
    for (words, printed) in [
        ("P 8 1 discard_zeroes_cow", "P 8 1 discard_zeroes_cow"),
        ("N 8 1 DISCARD_zeroes_COW", "N 8 1 discard_zeroes_cow"),
        ("P 8 0", "P 8"),
        (
            "P 8 2 discard_passdown_origin discard_zeroes_cow",
            "P 8 2 discard_zeroes_cow discard_passdown_origin",
        ),
    ] {
        let mut host = SnapshotRig::recorded(1);
        host.create("sn", &snapshot_line(words)).unwrap();
        assert_eq!(host.table_of("sn"), format!("1:0 1:1 {printed}"));
    }
}

#[test]
fn g04_other_words_are_no_type() {
    for (word, reason) in [
        ("PX", "Unsupported persistent store option: X"),
        ("persistent", "Unsupported persistent store option: ersistent"),
        ("Q", "Exception store type is not P or N"),
        ("transient", "Exception store type is not P or N"),
    ] {
        assert_refused(&snapshot_line(&format!("{word} 8")), EINVAL, NO_STORE, reason);
    }
}

#[test]
fn g08_chunk_sizes_that_are_none_and_why() {
    for (chunk, reason) in [
        ("7", "Chunk size is not a power of 2"),
        ("65", "Chunk size is not a power of 2"),
        ("-8", "Invalid chunk size"),
        ("8x", "Invalid chunk size"),
        ("99999999999", "Invalid chunk size"),
    ] {
        assert_refused(&snapshot_line(&format!("P {chunk}")), EINVAL, NO_STORE, reason);
    }
    assert_refused(&snapshot_line("N 0"), EINVAL, "Chunk size not set", "");
    let mut host = SnapshotRig::recorded(1);
    host.create("sn", &snapshot_line("P 0")).unwrap();
    assert_eq!(host.table_of("sn"), "1:0 1:1 P 32", "the default");
}

#[test]
fn g09_the_largest_chunk() {
    let mut host = SnapshotRig::recorded(1);
    host.create("sn", &snapshot_line("N 2097152")).unwrap();
    assert_eq!(host.status("sn"), "0/131072 0");
    assert_refused(&snapshot_line("N 4194304"), EINVAL, NO_STORE, "Chunk size is too high");
}

#[test]
fn g11_a_chunk_is_whole_blocks() {
    let mut host = SnapshotRig::recorded(1);
    host.get_disk("O").set_limits(|limits| limits.logical_block = 4096);
    host.make("sn");
    let error = host.load("sn", "0 8 snapshot O W N 4").unwrap_err();
    assert_eq!((error.errno, error.text), (EINVAL, format!("snapshot: {NO_STORE}")));
    assert_eq!(error.reason, "Chunk size is not a multiple of device blocksize");
    host.create("sn", "0 8 snapshot O W N 8").unwrap();
}

#[test]
fn g13_devices_and_words_that_are_missing() {
    let few = "requires 4 or more arguments";
    let size = format!("0 {SIZE}");
    for (table, errno, text) in [
        (format!("{size} snapshot O O P 8"), EINVAL, "COW device cannot be the same as origin device"),
        (format!("{size} snapshot /no W P 8"), ENOENT, "Cannot get origin device"),
        (format!("{size} snapshot O /no P 8"), ENOENT, "Cannot get COW device"),
        (format!("{size} snapshot O W P"), EINVAL, few),
        (format!("{size} snapshot"), EINVAL, few),
        (format!("{size} snapshot-merge O W P"), EINVAL, few),
        (format!("{size} snapshot-origin"), EINVAL, "origin: incorrect number of arguments"),
        (format!("{size} snapshot-origin O W"), EINVAL, "origin: incorrect number of arguments"),
        (format!("{size} snapshot-origin /no"), ENOENT, "Cannot get target device"),
    ] {
        assert_refused(&table, errno, text, "");
    }
}

/// The order of the checks decides which error is reported for a line with two faults.
#[test]
fn g13_the_first_fault_is_told() {
    for (table, errno, text) in [
        ("0 8 snapshot /no /no Q 7 9", EINVAL, "Invalid number of feature arguments"),
        ("0 8 snapshot /no /no Q 7", ENOENT, "Cannot get origin device"),
        ("0 8 snapshot O /no Q 7", ENOENT, "Cannot get COW device"),
        ("0 8 snapshot O O Q 7", EINVAL, "COW device cannot be the same as origin device"),
    ] {
        assert_refused(table, errno, text, "");
    }
}

#[test]
fn g15_an_origin_that_is_too_small() {
    let error = refusal_of("0 131073 snapshot O W N 8");
    assert_eq!(error.errno, EINVAL);
    let text = "O too small for target: start=0, len=131073, dev_size=131072";
    assert!(error.to_string().contains(text), "{error}");
    let error = refusal_of("0 131073 snapshot-origin O");
    assert!(error.to_string().contains(text), "{error}");
}

#[test]
fn g18_passdown_needs_zeroes() {
    let text = "discard_passdown_origin feature depends on discard_zeroes_cow";
    assert_refused(&snapshot_line("P 8 1 discard_passdown_origin"), EINVAL, text, "");
}

#[test]
fn g19_features_that_are_none() {
    let count = "Invalid number of feature arguments";
    for (words, text) in [
        ("3 a b c", count),
        ("2 discard_zeroes_cow", count),
        ("x discard_zeroes_cow", count),
        ("1 foo", "Unrecognised feature requested"),
    ] {
        assert_refused(&snapshot_line(&format!("P 8 {words}")), EINVAL, text, "");
    }
}

#[test]
fn g21_nothing_follows_the_features() {
    let error = refusal_of(&snapshot_line("P 8 1 discard_zeroes_cow extra"));
    assert_eq!(error.errno, EINVAL);
    assert!(error.reason.contains("extra"), "{error}");
}

#[test]
fn g23_a_transient_snapshot_is_not_merged() {
    let text = "Snapshot exception store does not support snapshot-merge.";
    assert_refused(&format!("0 {SIZE} snapshot-merge O W N 8"), EINVAL, text, "");
}

#[test]
fn g24_a_snapshot_begins_at_sector_0() {
    let mut host = SnapshotRig::recorded(1);
    let small = TestDisk::new(1024);
    host.put_disk("Z", &small);
    host.make("sn");
    for line in ["snapshot O W N 8", "snapshot-origin O", "snapshot-merge O W P 8"] {
        let error = host.load("sn", &format!("0 1024 linear Z 0\n1024 1024 {line}")).unwrap_err();
        assert_eq!(error.errno, EINVAL);
        assert!(error.to_string().contains("begins at sector 0"), "{error}");
    }
    assert_eq!(host.get_disk("W").bytes(0, 64), [0; 64 * 512]);
}

/// An accepted table writes no log line.
#[test]
fn a_new_store_is_made_in_silence() {
    let (log, mut host) = (LogCapture::new(), SnapshotRig::recorded(1));
    host.create("sn", &snapshot_line("P 8")).unwrap();
    host.create("od", &format!("0 {SIZE} snapshot-origin O")).unwrap();
    assert_eq!(log.count(""), 0);
    tracing::warn!("heard");
    assert!(log.says("heard"));
}
