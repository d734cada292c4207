//! Tests of the amount and the time of a load.

use super::*;

/// Numbers of fio 3.33, on a file of 1 MiB and on one of 100 KiB.
#[test]
fn sizes_that_end_inside_a_block() {
    let reads = |text: &str| ios(&one(&line(text)))[0];
    assert_eq!(reads("--device null:size=1M --rw read --bs 64k --size 100k"), 2);
    assert_eq!(reads("--device null:size=1M --rw randread --bs 64k --size 100k"), 1);
    assert_eq!(reads("--device null:size=1M --rw randread --bs 64k --size 100k --norandommap"), 2);
    assert_eq!(reads("--device null:size=100k --rw read --bs 64k"), 1);
    assert_eq!(reads("--device null:size=1M --rw read --bs 64k --size 50%"), 8);
    assert_eq!(reads("--device null:size=1M --rw read --bs 4k --size 33%"), 84);
    assert!(
        error(&line("--device null:size=1M --rw read --bs 64k --size 32k"))
            .contains("larger than the available part")
    );
    for bad in ["0%", "101%", "%", "5%%", "-1%"] {
        assert!(LoadLine::try_parse_from(["bench", "--device", "mem:1M", "--size", bad]).is_err(), "{bad}");
    }
}

/// As in fio, 0 means no limit.
#[test]
fn no_bound_is_zero() {
    let reads = |text: &str| ios(&one(&line(&format!("--device null:size=1M --rw read {text}"))))[0];
    assert_eq!(reads("--runtime 0 --number_ios 0"), 256);
    assert_eq!(
        error(&line("--device null:size=1M --runtime 0 --time_based")),
        "bench: time_based needs runtime"
    );
    assert_eq!(error(&line("--device null:size=1M --size 0")), "bench: size=0: nothing to do");
}

/// A mapped device splits requests that are too long for the device below.
#[test]
fn requests_that_are_longer_than_the_disk_takes() {
    let disk = "mem:1M,max_sectors_kb=64";
    let entry =
        one(&with_table(&format!("d=0 2048 linear {disk} 0"), "--rw write --bs 128k --verify crc32c"));
    assert_eq!((ios(&entry), entry.failure), ([8, 8, 0], None));
    let refused = error(&line(&format!("--device {disk} --rw write --bs 128k")));
    assert!(
        refused.starts_with("bench: bs=131072: the device takes 65536 at most; a mapped device"),
        "{refused}"
    );
}

/// As in fio, the time has precedence over all other limits.
#[test]
fn time_goes_before_all_other_limits() {
    let limits = "--number_ios 2 --loops 2 --time_based --runtime 50ms";
    let entry = one(&line(&format!("--device null:size=1M --rw read {limits}")));
    assert!(ios(&entry)[0] > 4 && entry.stats.runtime >= Nanos::from_millis(50));
}
