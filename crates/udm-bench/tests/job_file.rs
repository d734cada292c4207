//! The properties of `udm_bench::fuzz` with random input: any bytes, and files that look valid.

use proptest::collection::vec;
use proptest::prelude::*;
use udm_bench::fuzz;

/// Values that are valid for some option.
const VALUES: &[&str] = &[
    "0",
    "1",
    "2",
    "7",
    "50",
    "100",
    "101",
    "-1",
    "1024",
    "99999999999999999999",
    "512",
    "513",
    "4k",
    "8k,",
    ",8k",
    "4k,8k,16k",
    "64k",
    "1m",
    "1g",
    "2g",
    "16e",
    "50%",
    "0%",
    "3k",
    "1m,2m",
    ",500k",
    "0,0",
    "0:50",
    "0:1",
    "read",
    "randread",
    "randwrite",
    "rw",
    "randrw",
    "trim",
    "randtrim",
    "1:50:99.9",
    "nan",
    "0-1",
    "split",
    "crc32c",
    "10ms",
    "9999999999999999h",
    "null\\:1M",
    "${X}",
    "${",
    "\u{1b}[0m",
    "a b",
    "",
];

/// Every option of a load, and some others.
const KEYS: &[&str] = &[
    "rw",
    "rwmixread",
    "rwmixwrite",
    "bs",
    "blocksize",
    "iodepth",
    "iodepth_batch",
    "numjobs",
    "size",
    "offset",
    "loops",
    "rate",
    "rate_iops",
    "runtime",
    "time_based",
    "ramp_time",
    "norandommap",
    "randrepeat",
    "randseed",
    "number_ios",
    "fsync",
    "verify",
    "bare",
    "cpus_allowed",
    "cpus_allowed_policy",
    "percentile_list",
    "clat_percentiles",
    "lat_percentiles",
    "group_reporting",
    "name",
    "filename",
    "stonewall",
    "new_group",
    "ioengine",
    "direct",
    "nosuch",
    "help",
    "-x",
    "\u{1b}",
];

/// Lines that are valid on a device of 1 MiB, in any order.
const RIGHT: &[&str] = &[
    "rw=read\n",
    "rw=randrw\n",
    "rw=randwrite\n",
    "rw=randtrim\n",
    "bs=4k,16k\n",
    "bs=16k\n",
    "norandommap\n",
    "rate=1m,2m\n",
    "loops=2\n",
    "size=300k\n",
    "size=50%\n",
    "offset=70k\nsize=400k\n",
    "number_ios=20\n",
    "numjobs=3\n",
    "time_based\nruntime=1\n",
    "[b]\n",
];

fn right() -> impl Strategy<Value = String> {
    prop::sample::select(RIGHT).prop_map(str::to_owned)
}

fn line() -> impl Strategy<Value = String> {
    let option =
        (prop::sample::select(KEYS), prop::sample::select(VALUES)).prop_map(|(k, v)| format!("{k}={v}\n"));
    prop_oneof![
        2 => option,
        3 => right(),
        2 => Just("[a]\n".to_owned()),
        1 => prop::sample::select(&["[global]\n", "[a\n", "; c\n", "stonewall\n", "\n", "[\u{1b}]\n"][..]).prop_map(str::to_owned),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes(data in vec(any::<u8>(), 0..200)) {
        fuzz::fuzz_job_file_parser(&data);
    }

    #[test]
    fn loads(lines in vec(right(), 1..8)) {
        fuzz::fuzz_job_file_parser(format!("[a]\n{}", lines.concat()).as_bytes());
    }

    #[test]
    fn files(lines in vec(line(), 1..12)) {
        fuzz::fuzz_job_file_parser(format!("[a]\n{}", lines.concat()).as_bytes());
    }
}

/// Too many sections, options and variables are refused before they use much time or memory.
#[test]
fn what_is_too_much_is_refused() {
    let refused = |text: &str, why: &str| {
        let error =
            udm_bench::parse_job_file(text, |_| Some("x".repeat(100_000))).expect_err("this must be refused");
        assert!(format!("{error:#}").contains(why), "{error:#}");
        fuzz::fuzz_job_file_parser(text.as_bytes());
    };
    refused(&"#".repeat(300_000), "more than 262144 bytes");
    refused(&format!("[a]\n{}", "direct=1\n".repeat(300)), "more than 256 options");
    refused(&format!("[global]\n{}[a]", "bs=4k\n".repeat(300)), "more than 256 options");
    refused(&"[a]\n".repeat(1025), "more than 1024 jobs");
    refused(&"[a]\nnumjobs=1000\n".repeat(2), "more than 1024 jobs");
    refused("[a]\nname=${A}", "line 2: longer than 65536 bytes");
    let long = "[a]\nname=${A}\n".repeat(9);
    let error =
        udm_bench::parse_job_file(&long, |_| Some("x".repeat(65_000))).expect_err("this must be refused");
    assert_eq!(format!("{error:#}"), "line 18: more than 524288 bytes after variables are expanded");
}
