//! Tables that a kernel was given, with its recorded answers.
#![allow(dead_code, reason = "each test uses its part")]

use udm_dm::testing::{TestControlIo, TestDeviceNameResolver};
use udm_dm::{MappedDevice, Table, TargetError};

/// One recorded `dmsetup reload`.
pub struct RecordedReload {
    /// The table text.
    pub table: String,
    /// The output of `dmsetup table --inactive`, if the table was accepted.
    pub printed: Option<String>,
    /// The kernel's log line, without device number and errno, if the table was refused.
    pub text: Option<String>,
    /// The errno that dmsetup printed.
    pub errno: i32,
}

/// The recorded tables whose first target type is one of `kinds`.
pub fn recorded(kinds: &[&str]) -> Vec<RecordedReload> {
    let lines = include_str!("../data/bad_tables.jsonl").lines();
    let all = lines.map(|line| serde_json::from_str(line).expect("a line of JSON"));
    let wanted = |r: &RecordedReload| r.table.split_whitespace().nth(2).is_some_and(|k| kinds.contains(&k));
    all.map(|value| read(&value)).filter(wanted).collect()
}

fn read(value: &serde_json::Value) -> RecordedReload {
    let words = |key: &str| {
        value[key].as_array().expect("a list").iter().map(|l| l.as_str().expect("a text").to_owned())
    };
    let text = words("dmesg").find_map(|line| {
        let text = line.split_once("device-mapper: table: 254:0: ")?.1;
        let text = text.rsplit_once(" (-E").map_or(text, |(text, _)| text);
        (!text.starts_with("device ")).then(|| text.to_owned())
    });
    let errno = words("stderr").find_map(|line| {
        let (_, error) = line.rsplit_once("failed: ")?;
        let known = [
            ("Invalid argument", 22),
            ("No such file or directory", 2),
            ("No such device or address", 6),
            ("No such device", 19),
        ];
        Some(known.iter().find(|(text, _)| *text == error).unwrap_or_else(|| panic!("errno of {error:?}")).1)
    });
    RecordedReload {
        table: value["table"].as_str().expect("a table").to_owned(),
        printed: value["table_out"].as_str().map(str::to_owned),
        text: (value["rc"] != 0).then(|| text.unwrap_or_else(|| panic!("the kernel's line in {value}"))),
        errno: errno.unwrap_or(0),
    }
}

/// Loads a table into a new device of the recorded machine. Returns its printed form.
pub fn load(table: &str) -> Result<String, TargetError> {
    load_with(table, &mut TestDeviceNameResolver::recorded())
}

/// As [`load`], with the devices of `resolver`.
pub fn load_with(table: &str, resolver: &mut TestDeviceNameResolver) -> Result<String, TargetError> {
    let lines = udm_wire::table::parse_table(table).expect("a table that dmsetup reads");
    let table = Table::build(udm_targets::TARGETS, &lines, resolver, &TestControlIo::new(), 2)?;
    let device = MappedDevice::new("t", None, "254:0".parse().expect("a number"))?;
    device.load(table)?;
    Ok(device.table_text(true))
}

/// Compares udm's answer to `recorded` with the kernel's.
pub fn compare(recorded: &RecordedReload) {
    let RecordedReload { table, printed, text, errno } = recorded;
    match (load(table), printed, text) {
        (Ok(got), Some(printed), None) => assert_eq!(&got, printed, "{table}"),
        (Err(error), None, Some(text)) => {
            assert_eq!((&error.text, error.errno), (text, *errno), "{table}");
        }
        (got, ..) => panic!("{table}: got {got:?}, the kernel {text:?} {printed:?}"),
    }
}
