//! Tables that Linux 6.12 was given, with its recorded answers.

use crate::build;
use crate::common::{compare, recorded};
use udm_dm::testing::TestDeviceNameResolver;

#[test]
fn recorded_tables() {
    let all = recorded(&["delay", "flakey"]);
    assert_eq!(all.len(), 9);
    all.iter().for_each(compare);
}

/// Texts of the kernel's constructors that were not recorded.
#[test]
fn the_other_refusals() {
    let all = [
        ("delay /dev/nullb0 x 1", "delay: Invalid device sector", 22, 1),
        ("delay /dev/nullb0 0 -1", "delay: Invalid delay", 22, 2),
        ("delay /dev/nullb0 0 4294967296", "delay: Invalid delay", 22, 2),
        ("delay /dev/nullb0 0 1 nosuch 0 1", "delay: Device lookup failed", 2, 3),
        ("delay /dev/nullb0 0 1 9:9 0 1", "delay: Device lookup failed", 6, 3),
        ("flakey /dev/nullb0 0x1 1 1", "flakey: Invalid device sector", 22, 1),
        ("flakey /dev/nullb0 0 x 1", "flakey: Invalid up interval", 22, 2),
        ("flakey /dev/nullb0 0 1 x", "flakey: Invalid down interval", 22, 3),
        ("flakey /dev/nullb0 0 4294967295 1", "flakey: Interval overflow", 22, 3),
        ("flakey nosuch 0 1 1", "flakey: Device lookup failed", 2, 0),
        ("flakey /dev/nullb0 0 1 1 12 a", "flakey: Invalid number of feature args", 22, 4),
        ("flakey /dev/nullb0 0 1 1 2 drop_writes", "flakey: Invalid number of feature args", 22, 4),
        (
            "flakey /dev/nullb0 0 1 1 2 drop_writes drop_writes",
            "flakey: Feature drop_writes duplicated",
            22,
            6,
        ),
        (
            "flakey /dev/nullb0 0 1 1 2 error_writes drop_writes",
            "flakey: Feature drop_writes conflicts with feature error_writes",
            22,
            6,
        ),
        (
            "flakey /dev/nullb0 0 1 1 2 drop_writes error_writes",
            "flakey: Feature error_writes conflicts with feature drop_writes",
            22,
            6,
        ),
        (
            "flakey /dev/nullb0 0 1 1 2 error_reads error_reads",
            "flakey: Feature error_reads duplicated",
            22,
            6,
        ),
        (
            "flakey /dev/nullb0 0 1 1 1 corrupt_bio_byte",
            "flakey: Feature corrupt_bio_byte requires parameters",
            22,
            6,
        ),
        ("flakey /dev/nullb0 0 1 1 5 corrupt_bio_byte 0 r 1 0", "flakey: Invalid corrupt bio byte", 22, 6),
        (
            "flakey /dev/nullb0 0 1 1 5 corrupt_bio_byte 1 x 1 0",
            "flakey: Invalid corrupt bio direction (r or w)",
            22,
            7,
        ),
        (
            "flakey /dev/nullb0 0 1 1 5 corrupt_bio_byte 1 w 256 0",
            "flakey: Invalid corrupt value to write into bio byte (0-255)",
            22,
            8,
        ),
        (
            "flakey /dev/nullb0 0 1 1 5 corrupt_bio_byte 1 w 1 x",
            "flakey: Invalid corrupt bio flags mask",
            22,
            9,
        ),
        (
            "flakey /dev/nullb0 0 1 1 2 random_read_corrupt 1000000001",
            "flakey: Invalid random corrupt argument",
            22,
            6,
        ),
        (
            "flakey /dev/nullb0 0 1 1 1 random_write_corrupt",
            "flakey: Feature random_write_corrupt requires a parameter",
            22,
            6,
        ),
        (
            "flakey /dev/nullb0 0 1 1 6 drop_writes corrupt_bio_byte 1 w 1 0",
            "flakey: drop_writes is incompatible with corrupt_bio_byte with the WRITE flag set",
            22,
            4,
        ),
        ("dust /dev/nullb0 0", "dust: Invalid argument count", 22, 2),
        ("dust /dev/nullb0 0 0", "dust: Invalid block size parameter", 22, 2),
        ("dust /dev/nullb0 0 256", "dust: Block size must be at least 512", 22, 2),
        ("dust /dev/nullb0 0 1000", "dust: Block size must be a power of 2", 22, 2),
        ("dust /dev/nullb0 0 2147483648", "dust: Block size is too large", 22, 2),
        ("dust /dev/nullb0 x 512", "dust: Invalid device offset sector", 22, 1),
        ("dust nosuch 0 512", "dust: Device lookup failed", 22, 0),
        ("log-writes /dev/nullb0", "log-writes: Invalid argument count", 22, 1),
        ("log-writes nosuch /dev/nullb0", "log-writes: Device lookup failed", 2, 0),
        ("log-writes /dev/nullb0 nosuch", "log-writes: Log device lookup failed", 2, 1),
    ];
    for (line, text, errno, word) in all {
        let error = build(line, 2_097_152, &mut TestDeviceNameResolver::recorded()).err().expect(line);
        assert_eq!((error.text.as_str(), error.errno, error.word), (text, errno, Some(word)), "{line}");
    }
}

/// Tables are printed in the kernel's canonical form.
#[test]
fn canonical_tables() {
    let all = [
        ("delay /dev/nullb0 1 10 /dev/nullb1 2 20 253:2 3 30", "253:0 1 10 253:1 2 20 253:2 3 30"),
        ("delay /dev/nullb0 1 10 /dev/nullb1 2 20", "253:0 1 10 253:1 2 20"),
        ("flakey /dev/nullb0 8 1 2", "253:0 8 1 2 2 error_reads error_writes"),
        ("flakey /dev/nullb0 8 1 2 0", "253:0 8 1 2 2 error_reads error_writes"),
        ("flakey /dev/nullb0 8 1 2 2 random_read_corrupt 0", "253:0 8 1 2 2 error_reads error_writes"),
        (
            "flakey /dev/nullb0 8 1 2 11 random_write_corrupt 7 CORRUPT_BIO_BYTE 1 R 2 3 random_read_corrupt 9 error_writes error_reads",
            "253:0 8 1 2 11 error_reads error_writes corrupt_bio_byte 1 r 2 3 random_read_corrupt 9 random_write_corrupt 7",
        ),
        ("dust /dev/nullb0 8 4096", "253:0 8 4096"),
        ("log-writes /dev/nullb0 /dev/nullb1", "253:0 253:1"),
    ];
    for (line, table) in all {
        let target = build(line, 4096, &mut TestDeviceNameResolver::recorded())
            .unwrap_or_else(|e| panic!("{line}: {e}"));
        assert_eq!(target.table(), table, "{line}");
        let again = format!("{} {table}", target.type_name());
        let again = build(&again, 4096, &mut TestDeviceNameResolver::recorded())
            .unwrap_or_else(|e| panic!("{again}: {e}"));
        assert_eq!(again.table(), table, "a printed table loads as itself");
    }
}
