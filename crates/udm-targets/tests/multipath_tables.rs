//! Accepted and refused tables, compared with two recordings of a real kernel: printed text, or
//! errno and error text.

mod multipath_rig;

use multipath_rig::disks;
use std::sync::Arc;
use udm_core::errno::EINVAL;
use udm_core::{DevNo, Limits, Sectors};
use udm_dm::testing::{TestControlIo, TestDeviceNameResolver, TestDisk};
use udm_dm::{DmQueueMode, LowerLimits, Table, TargetError};

/// Builds a table from its text.
fn build(text: &str, resolver: &mut TestDeviceNameResolver) -> Result<Arc<Table>, TargetError> {
    let lines = udm_wire::table::parse_table(text).expect("the syntax is good");
    Table::build(udm_targets::TARGETS, &lines, resolver, &TestControlIo::new(), 2)
}

/// The text of the kernel's line `device-mapper: table: 254:0: TEXT (-EINVAL)`.
fn kernel_text(log: &str) -> Option<&str> {
    let text = log.split_once("device-mapper: table: 254:0: ")?.1;
    Some(text.rsplit_once(" (-E").map_or(text, |(text, _)| text))
}

/// Checks a refusal: the output of dmsetup ends with the errno's text.
fn check_refusal(table: &str, error: &TargetError, printed: &str, text: &str) {
    assert_eq!(error.text, text, "{table}");
    let errno = std::io::Error::from_raw_os_error(error.errno).to_string();
    let errno = errno.split(" (os").next().expect("a text");
    assert!(printed.trim_end().ends_with(errno), "{table}: {errno}, recorded {printed}");
}

/// The output of `table` is a valid table that prints the same.
fn check_again(printed: &str, status: &str, resolver: &mut TestDeviceNameResolver) {
    let again = build(printed, resolver).unwrap_or_else(|e| panic!("{printed}: {e}"));
    assert_eq!((again.text().as_str(), again.status().as_str()), (printed, status));
}

#[test]
fn recorded_tables() {
    let golden = include_str!("data/multipath-golden.txt");
    let run = golden.split("################ run ").nth(1).expect("run 1");
    let mut accepted = 0;
    let mut refused = 0;
    for case in run.split("TABLE: ").skip(1) {
        // The table ends where the indented results begin.
        let (table, results) = case.split_once("\n  rc=").expect("a result");
        let mut resolver = disks(4).1;
        let field = |name: &str| results.lines().find_map(|l| l.trim_start().strip_prefix(name));
        match build(table, &mut resolver) {
            Ok(t) => {
                let (text, status) = (t.text(), t.status());
                assert_eq!(Some(text.as_str()), field("table : "), "{table}");
                assert_eq!(Some(status.as_str()), field("status: "), "{table}");
                check_again(&text, &status, &mut resolver);
                accepted += 1;
            }
            Err(e) => {
                assert!(results.starts_with("FAIL"), "{table}: {e}");
                let text = results.lines().find_map(kernel_text).expect("the kernel's log");
                check_refusal(table, &e, results.lines().next().expect("dmsetup's line"), text);
                refused += 1;
            }
        }
    }
    assert_eq!((accepted, refused), (26, 30), "every recorded table was tried");
}

#[test]
fn recorded_bad_tables() {
    let mut rows = 0;
    for line in include_str!("data/bad_tables.jsonl").lines() {
        let row: serde_json::Value = serde_json::from_str(line).expect("a row");
        let table = row["table"].as_str().expect("a table");
        if !table.contains("multipath") {
            continue;
        }
        rows += 1;
        let text = row["dmesg"].as_array().expect("log lines").iter().find_map(|l| kernel_text(l.as_str()?));
        let mut resolver = TestDeviceNameResolver::recorded();
        let result = build(table, &mut resolver);
        match (result, row["table_out"].as_str()) {
            (Ok(t), Some(want)) => assert_eq!(t.text(), want),
            (Err(e), None) => {
                let printed = row["stderr"][0].as_str().expect("dmsetup's line");
                check_refusal(table, &e, printed, text.expect("the kernel's log"));
            }
            (Ok(_), None) => panic!("{table}: accepted"),
            (Err(e), Some(_)) => panic!("{table}: {e}"),
        }
    }
    assert_eq!(rows, 67, "every recorded table with multipath in it");
}

/// The word that an error points at, used to mark the table text.
#[test]
fn errors_blame_a_word() {
    for (params, word) in [
        ("", 0),
        ("1 bogus 0 1 1 round-robin 0 1 0 253:0", 1),
        ("2 pg_init_retries 51 0 0 0", 2),
        ("2 queue_mode foo 0 0 0", 2),
        ("0 0 1 0 round-robin 0 1 0 253:0", 3),
        ("0 0 2 1 round-robin 0 1 0 253:0", 2),
        ("0 0 1 1 nosuch 0 1 0 253:0", 4),
        ("0 0 1 1 round-robin", 5),
        ("0 0 1 1 round-robin 0 0 1", 6),
        ("0 0 1 1 round-robin 0 1 0 253:9", 8),
        ("0 0 1 1 round-robin 0 2 1 253:0 1 253:1 x", 11),
        ("0 0 1 1 service-time 0 1 2 253:0 1 101", 10),
        ("0 1 alua 1 1 round-robin 0 1 0 253:0", 2),
    ] {
        let error = multipath_rig::build(params, &mut disks(2).1).err().expect(params);
        assert_eq!(error.word, Some(word), "{params}: {error}");
    }
}

/// Numbers are plain decimals, and counts allocate no memory.
#[test]
fn hostile_numbers() {
    for count in ["+1", "-1", "1x", " ", "0x1", "4294967297", "99999999999999999999", "1025", ""] {
        let args = ["0", "0", "1", "1", "round-robin", "0", count, "0", "253:0"].map(String::from);
        let mut resolver = disks(1).1;
        let mut args = udm_dm::TargetArgs {
            start: udm_core::Sector(0),
            len: Sectors(8),
            args: &args,
            resolver: &mut resolver,
            io: &TestControlIo::new(),
            cores: 1,
        };
        let error = udm_targets::multipath::create_multipath_target(&mut args).err().expect(count);
        assert_eq!(error.text, "multipath: invalid number of paths", "{count}");
    }
}

#[test]
fn limits_are_those_of_all_paths() {
    let mut resolver = disks(2).1;
    let small = TestDisk::null(Limits {
        max_sectors: Sectors(64),
        max_discard: Sectors(0),
        write_cache: true,
        ..Limits::new(Sectors(multipath_rig::SIZE))
    });
    resolver.add("/dev/small", DevNo { major: 9, minor: 0 }, small);
    let table = build("0 1000 multipath 0 0 1 1 round-robin 0 2 0 253:0 /dev/small", &mut resolver).unwrap();
    let limits = table.targets()[0].target.limits(LowerLimits::NOW);
    assert_eq!(
        (limits.size, limits.max_sectors, limits.max_discard),
        (Sectors(1000), Sectors(64), Sectors(0))
    );
    assert!(limits.write_cache);
    assert_eq!(
        (table.targets()[0].target.features().queue_mode, limits.request_stackable),
        (DmQueueMode::Request, true)
    );
    let table =
        build("0 1000 multipath 2 queue_mode bio 0 1 1 round-robin 0 1 0 253:0", &mut resolver).unwrap();
    let target = &table.targets()[0].target;
    assert_eq!(
        (target.features().queue_mode, target.limits(LowerLimits::NOW).request_stackable),
        (DmQueueMode::Bio, false)
    );
    assert!(target.features().singleton);
}

/// Two nodes of a disk, each with its own page cache: data written through one would not be read
/// through the other. Checked at load and at resume.
#[test]
fn paths_with_caches_of_their_own_are_refused() {
    let mut resolver = disks(2).1;
    let limits = Limits::new(Sectors(multipath_rig::SIZE));
    let cached = TestDisk::null(Limits { private_cache: true, ..limits });
    let mut add = |name, minor, disk: &Arc<TestDisk>| {
        resolver.add(name, DevNo { major: 9, minor }, Arc::<TestDisk>::clone(disk));
    };
    add("/dev/cached", 0, &cached);
    let table = |paths: &str| {
        format!("0 1000 multipath 0 0 1 1 round-robin 0 {} 0 {paths}", paths.split(' ').count())
    };
    for paths in ["/dev/cached 253:0", "253:1 253:0 /dev/cached"] {
        let error = build(&table(paths), &mut resolver).err().expect(paths);
        assert_eq!(error.text, "multipath: /dev/cached has a page cache of its own");
        assert_eq!(error.reason, "other paths would read stale data; open it without direct=off");
        assert_eq!((error.errno, error.line), (22, Some(0)));
    }
    for paths in ["/dev/cached", "/dev/cached /dev/cached", "253:0 253:1"] {
        build(&table(paths), &mut resolver).expect(paths);
    }
    build("0 500 linear /dev/cached 0\n500 500 linear 253:0 0", &mut resolver).expect("no paths");
    cached.set_limits(|limits| limits.read_only = true);
    let table = build(&table("/dev/cached 253:0"), &mut resolver).expect("nothing is written");
    cached.set_limits(|limits| limits.read_only = false);
    assert_eq!(table.check(LowerLimits::NOW).expect_err("checked again").errno, EINVAL);
}

#[test]
fn a_thousand_paths() {
    let paths: Vec<_> = (0..1024).map(|i| format!("253:{}", i % 4)).collect();
    for selector in ["round-robin", "queue-length", "service-time"] {
        let mut rig =
            multipath_rig::MultipathRig::new(&format!("0 0 1 1 {selector} 0 1024 0 {}", paths.join(" ")));
        let want: Vec<_> = (0..6).map(|i| i % 4).collect();
        assert_eq!(rig.order(6), want, "{selector}");
        rig.tell("fail_path 253:0");
        assert_eq!(rig.events.count(), 1, "256 paths at once are one event");
        assert!(!rig.order(9).contains(&0), "{selector}");
    }
}
