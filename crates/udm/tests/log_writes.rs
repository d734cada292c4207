//! `udm log-writes` on logs made here. Real clients are in `nbd_clients/log.rs`.

use std::fs;
use std::process::{Command, Output};
use tempfile::TempDir;
use udm_wire::log_writes::{EntryFlags, LogWritesEntryHeader, LogWritesSuperblock};

const UDM: &str = env!("CARGO_BIN_EXE_udm");

/// A log of 512-byte sectors under construction.
struct LogFile(Vec<u8>, u64);

impl LogFile {
    fn new() -> LogFile {
        LogFile(vec![0; 512], 0)
    }

    fn add(mut self, sector: u64, sectors: u64, flags: EntryFlags, fill: u8, text: &str) -> LogFile {
        let entry = LogWritesEntryHeader { sector, sectors, flags, data_len: text.len() as u64 };
        let mut head = vec![0; 512];
        entry.encode(text.as_bytes(), &mut head);
        self.0.extend(head);
        self.0.extend(vec![fill; entry.data_sectors() as usize * 512]);
        self.1 += 1;
        self
    }

    fn write(self, sector: u64, sectors: u64, fill: u8) -> LogFile {
        self.add(sector, sectors, EntryFlags::empty(), fill, "")
    }

    fn flush(self) -> LogFile {
        self.add(0, 0, EntryFlags::FLUSH, 0, "")
    }

    fn mark(self, text: &str) -> LogFile {
        self.add(0, 0, EntryFlags::MARK, 0, text)
    }

    fn save(mut self, folder: &TempDir) {
        LogWritesSuperblock { entries: self.1, sector_size: 512 }.encode(&mut self.0[..512]);
        fs::write(folder.path().join("log"), self.0).unwrap();
    }
}

/// Runs `udm log-writes` in `folder`.
fn run(folder: &TempDir, args: &[&str]) -> Output {
    Command::new(UDM).arg("log-writes").args(args).current_dir(folder.path()).output().unwrap()
}

fn ok(folder: &TempDir, args: &[&str]) -> String {
    let output = run(folder, args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The one line on standard error of a run that fails.
fn refused(folder: &TempDir, args: &[&str]) -> String {
    let output = run(folder, args);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        (output.status.code(), output.stdout.len(), text.lines().count()),
        (Some(1), 0, 1),
        "{args:?}: {text}"
    );
    text.trim_end().to_owned()
}

/// The first byte of each of the first eight sectors.
fn sectors(folder: &TempDir, name: &str) -> Vec<u8> {
    fs::read(folder.path().join(name)).unwrap().chunks(512).take(8).map(|sector| sector[0]).collect()
}

fn sample(folder: &TempDir) {
    LogFile::new()
        .write(0, 2, 1)
        .flush()
        .mark("mkfs")
        .write(1, 1, 2)
        .flush()
        .add(4, 1, EntryFlags::FUA, 3, "")
        .add(0, 1, EntryFlags::DISCARD, 0, "")
        .flush()
        .save(folder);
}

#[test]
fn list_prints_each_entry() {
    let folder = TempDir::new().unwrap();
    sample(&folder);
    let expected = "# sectors of 512 bytes, 8 entries: ENTRY SECTOR SECTORS FLAGS\n\
                    0 0 2 -\n1 0 0 flush #1\n2 0 0 mark \"mkfs\"\n3 1 1 -\n4 0 0 flush #2\n\
                    5 4 1 fua\n6 0 1 discard\n7 0 0 flush #3\n";
    assert_eq!(ok(&folder, &["list", "log"]), expected);
    let json: serde_json::Value = serde_json::from_str(&ok(&folder, &["list", "log", "--json"])).unwrap();
    assert_eq!(json["log"]["entries"], 8);
    assert_eq!(json["entries"][5]["start_bytes"], 2048);
    assert_eq!(json["entries"][2]["mark"], "mkfs");
    LogFile::new().save(&folder);
    let json: serde_json::Value = serde_json::from_str(&ok(&folder, &["list", "log", "--json"])).unwrap();
    assert_eq!(json["entries"].as_array().unwrap().len(), 0);
}

#[test]
fn replay_rebuilds_any_prefix() {
    let folder = TempDir::new().unwrap();
    sample(&folder);
    let prefixes: [(&[&str], [u8; 8]); 8] = [
        (&["--entries", "1"], [1, 1, 0, 0, 0, 0, 0, 0]),
        (&["--upto", "1"], [1, 1, 0, 0, 0, 0, 0, 0]),
        (&["--upto-mark", "mkfs"], [1, 1, 0, 0, 0, 0, 0, 0]),
        (&["--upto", "2"], [1, 2, 0, 0, 0, 0, 0, 0]),
        (&["--upto", "3"], [0, 2, 0, 0, 3, 0, 0, 0]),
        (&[], [0, 2, 0, 0, 3, 0, 0, 0]),
        (&["--start-mark", "mkfs"], [0, 2, 0, 0, 3, 0, 0, 0]),
        (&["--start-entry", "3", "--entries", "3"], [0, 2, 0, 0, 3, 0, 0, 0]),
    ];
    for (i, (words, expected)) in prefixes.iter().enumerate() {
        let device = format!("device{i}");
        ok(&folder, &[&["replay", "log", &device, "--size", "4k"], *words].concat());
        assert_eq!(sectors(&folder, &device), expected, "{words:?}");
    }
    // In two parts, the second over the result of the first.
    ok(&folder, &["replay", "log", "parts", "--size", "4k", "--upto-mark", "mkfs"]);
    let json = ok(&folder, &["replay", "log", "parts", "--start-mark", "mkfs", "--json"]);
    assert_eq!(sectors(&folder, "parts"), [0, 2, 0, 0, 3, 0, 0, 0]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let counts = ["first_entry", "entries", "writes", "written_bytes", "discards", "flushes"]
        .map(|key| json[key].as_u64());
    assert_eq!(counts.map(Option::unwrap), [3, 5, 2, 1024, 1, 2]);
}

#[test]
fn the_check_sees_a_fresh_copy_of_each_state() {
    let folder = TempDir::new().unwrap();
    sample(&folder);
    let command = "od -An -tu1 -N1 -j512 $image >> seen; printf x > $image";
    ok(&folder, &["replay", "log", "device", "--size", "4k", "--each-flush", "--check", command]);
    let seen = fs::read_to_string(folder.path().join("seen")).unwrap();
    assert_eq!(seen.split_whitespace().collect::<Vec<_>>(), ["1", "2", "2"], "sector 1 at each flush");
    assert_eq!(sectors(&folder, "device"), [0, 2, 0, 0, 3, 0, 0, 0], "the check ruined its copy alone");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "the copies are gone");

    let text = "test $(od -An -tu1 -N1 -j512 $image) = 1";
    let reply =
        refused(&folder, &["replay", "log", "failed", "--size", "4k", "--each-flush", "--check", text]);
    assert_eq!(
        reply,
        "udm: failed: the check failed at flush 2 (entry 4): exit status: 1: the file holds what failed"
    );
    assert_eq!(sectors(&folder, "failed"), [1, 2, 0, 0, 0, 0, 0, 0]);
}

/// A replay writes nothing to an unsuitable target: the log itself under any name, or a target that
/// is too small.
#[test]
fn a_replay_spares_the_log_and_what_is_too_small() {
    let folder = TempDir::new().unwrap();
    sample(&folder);
    let log = fs::read(folder.path().join("log")).unwrap();
    std::os::unix::fs::symlink("log", folder.path().join("symlink")).unwrap();
    fs::hard_link(folder.path().join("log"), folder.path().join("hardlink")).unwrap();
    for name in ["log", "./log", "symlink", "hardlink"] {
        let reply = refused(&folder, &["replay", "log", name]);
        let why = "this is the log itself; a replay would write over it: name another file";
        assert_eq!(reply, format!("udm: {name}: {why}"));
        assert!(fs::read(folder.path().join("log")).unwrap() == log, "{name}");
    }
    refused(&folder, &["replay", "log", "log", "--size", "4k"]);
    assert!(fs::read(folder.path().join("log")).unwrap() == log);
    fs::write(folder.path().join("small"), [9; 2048]).unwrap();
    let reply = refused(&folder, &["replay", "log", "small"]);
    assert_eq!(reply, "udm: log: at byte 4608: entry 5 reaches to byte 2560 of a device of 2048");
    assert!(fs::read(folder.path().join("small")).unwrap() == [9; 2048]);
    assert_eq!(
        refused(&folder, &["replay", "log", "/dev/null"]).split(": entry").next(),
        Some("udm: log: at byte 4608")
    );
}

#[test]
fn what_cannot_be_is_refused_in_a_line_and_nothing_is_written() {
    let folder = TempDir::new().unwrap();
    sample(&folder);
    let cases: [(&[&str], &str); 9] = [
        (&["--size", "2k"], "udm: log: at byte 4608: entry 5 reaches to byte 2560 of a device of 2048"),
        (&[], "udm: device: no such file; --size makes one"),
        (&["--size", "4k", "--upto", "4"], "udm: log: there is no flush 4, the log has 3"),
        (&["--size", "4k", "--upto-mark", "x"], "udm: log: no mark \"x\" after the start"),
        (&["--size", "4k", "--start-mark", "x"], "udm: log: no mark \"x\" in the 8 entries up to the end"),
        (
            &["--size", "4k", "--start-mark", "mkfs", "--upto", "1"],
            "udm: log: no mark \"mkfs\" in the 2 entries up to the end",
        ),
        (
            &["--size", "4k", "--entries", "9"],
            "udm: log: there are fewer than 9 entries after the start; the log has 8",
        ),
        (&["--size", "4k", "--start-entry", "9"], "udm: log: the start, entry 9, is after the end, entry 8"),
        (
            &["--size", "4k", "--start-entry", "5", "--upto", "1"],
            "udm: log: the start, entry 5, is after the end, entry 2",
        ),
    ];
    for (words, expected) in cases {
        assert_eq!(refused(&folder, &[&["replay", "log", "device"], words].concat()), expected);
        assert!(!folder.path().join("device").exists(), "{words:?}");
    }
    fs::write(folder.path().join("device"), b"mine").unwrap();
    refused(&folder, &["replay", "log", "device", "--size", "4k"]);
    assert_eq!(fs::read(folder.path().join("device")).unwrap(), b"mine");
    // The log is damaged after the first entries to replay.
    let mut bytes = fs::read(folder.path().join("log")).unwrap();
    bytes[4608 + 17] = 0xff;
    fs::write(folder.path().join("log"), bytes).unwrap();
    let reply = refused(&folder, &["replay", "log", "new", "--size", "4k"]);
    assert_eq!(reply, "udm: log: at byte 4624: entry 5 has unknown flags 0xff02");
    assert!(!folder.path().join("new").exists());
    ok(&folder, &["replay", "log", "new", "--size", "4k", "--upto", "2"]);
    fs::write(folder.path().join("log"), b"short").unwrap();
    assert_eq!(refused(&folder, &["list", "log"]), "udm: log: at byte 0: the log ends inside its superblock");
    assert_eq!(refused(&folder, &["list", "nosuch"]), "udm: nosuch: No such file or directory");
}
