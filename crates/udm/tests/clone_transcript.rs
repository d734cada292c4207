//! udm does with clones what a real kernel did. A recording with dm-clone
//! (`data/clone_transcript.txt`, whose head says how it was made) is repeated step by step: tables
//! that are accepted and refused, messages, requests, other tables over a clone, devices that fail.
//! Standard error and the exit status of dmsetup, tables, status lines, event numbers, the results
//! of requests, the data, and the kernel's reasons are compared word for word.
//!
//! Only the numbers of devices and of metadata blocks may differ: udm's metadata has its own
//! format. What else differs is in [`REFUSED`] and [`OTHERWISE`], with the reasons.

mod support;

use std::fs::File;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};
use support::nbd::Client;
use support::{Server, UDM, text};
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, NbdCommand};

const TRANSCRIPT: &str = include_str!("data/clone_transcript.txt");

/// Tables that the kernel accepts and udm refuses: a part of the command, the errno, and the reason.
const REFUSED: &[(&str, &str, &str)] = &[
    ("0 more words'", "Invalid argument", "words after the core arguments are a mistake"),
    ("hydration_threshold 5 more'", "Invalid argument", "words after the core arguments are a mistake"),
    ("/dev/mapper/d /dev/mapper/d ", "Invalid argument", "the clone would overwrite its source"),
    ("/dev/mapper/m /dev/mapper/m ", "Invalid argument", "the clone would overwrite its metadata"),
    ("/dev/mapper/mr ", "Permission denied", "metadata that is set read-only is not written"),
    ("/dev/mapper/dr ", "Permission denied", "a destination that is set read-only is not written"),
    (" 4294967304'", "Invalid argument", "the kernel reads 8, since the number wraps"),
];

const RO: &str = "4 hydration_threshold 1 hydration_batch_size 1 ro";
const NOT_WRITTEN: &str = "# the metadata cannot be written";
const KEPT: &str = "udm keeps what it has hydrated, so no read returns older data";

/// Other answers of udm that differ: the section, a part of the command, what the recorded line has,
/// what udm's line has in its place, and the reason. The first one that fits counts.
const OTHERWISE: &[(&str, &str, &str, &str, &str)] = &[
    (
        "## 1",
        " 2097152 1 ",
        "0 1 no_hydration 4",
        "0 2 no_hydration no_discard_passdown 4",
        "a discard of a file is shorter than that of the disk",
    ),
    (
        "## 2",
        "/dev/mapper/mg",
        "Block device required",
        "Invalid argument",
        "the errno of the kernel's checksums says nothing about metadata",
    ),
    (
        "## 2",
        "/dev/mapper/s 8 1 no_hydration'",
        "8 256/256 0 1",
        "8 0/256 0 1",
        "tables that udm refuses have copied all in the recording",
    ),
    (NOT_WRITTEN, "", "8 1/256 0 1 no_hydration RO", "8 2/256 0 1 no_hydration RO", KEPT),
    (NOT_WRITTEN, "", "8 1/256 0 0 RO", "8 2/256 0 0 RO", KEPT),
    (NOT_WRITTEN, "resume c", "8 1/256", "8 2/256", KEPT),
    (NOT_WRITTEN, "write 16 8", "8 2/256", "8 3/256", KEPT),
    (NOT_WRITTEN, "flush", "8 2/256", "8 3/256", KEPT),
    (NOT_WRITTEN, "create c", "8 2/256", "8 3/256", KEPT),
    (NOT_WRITTEN, "read 8", "S0000000000008", "N0000000000000", KEPT),
    (NOT_WRITTEN, "write 8 8", "  error", "  ok", KEPT),
];

/// How long a step that happens in the background may take.
const SETTLE: Duration = Duration::from_secs(20);

/// A command of the recording, with the lines of its answer.
#[derive(Debug)]
struct Step {
    section: &'static str,
    command: &'static str,
    answer: Vec<&'static str>,
}

fn parse_transcript() -> Vec<Step> {
    let (mut steps, mut section): (Vec<Step>, _) = (Vec::new(), "");
    for line in TRANSCRIPT.lines() {
        if let Some(command) = line.strip_prefix("$ ") {
            steps.push(Step { section, command, answer: Vec::new() });
        } else if line.starts_with('#') {
            section = line;
        } else {
            steps.last_mut().expect("a command comes first").answer.push(line);
        }
    }
    steps
}

/// The bytes of a sector: a letter and the number of the sector, and zeroes as text.
fn tagged(tag: char, sectors: std::ops::Range<u64>) -> Vec<u8> {
    sectors.flat_map(|sector| format!("{tag}{sector:013}\n{:0497}", 0).into_bytes()).collect()
}

struct Replay {
    server: Server,
    folder: TempDir,
}

impl Replay {
    fn new() -> Replay {
        let folder = tempfile::tempdir().unwrap();
        for disk in ["vda", "vdb", "vdc"] {
            File::create(folder.path().join(disk)).unwrap().set_len(16 << 20).unwrap();
        }
        std::fs::create_dir(folder.path().join("bin")).unwrap();
        symlink(UDM, folder.path().join("bin/dmsetup")).unwrap();
        Replay { server: Server::start(&[]), folder }
    }

    /// Runs a command of dmsetup: the lines of standard error, then the exit status.
    fn dmsetup(&self, command: &str) -> Vec<String> {
        let disks = format!("{}/vd", self.folder.path().display());
        let command = command.replace("/dev/mapper/", "@").replace("/dev/vd", &disks).replace("253:", "254:");
        let mut sh = Command::new("sh");
        let path = format!("{}/bin:{}", self.folder.path().display(), std::env::var("PATH").unwrap());
        sh.args(["-c", &command]).env("PATH", path).env("LC_ALL", "C");
        sh.env("UDM_SOCKET", &self.server.socket).env_remove("UDM_LOG");
        let out = sh.output().unwrap();
        let mut lines: Vec<String> =
            text(&out.stderr).lines().map(|line| line.replace("254:", "253:")).collect();
        lines.push(format!("  rc={}", out.status.code().unwrap_or(-1)));
        lines
    }

    /// One request of the clone, or of another device.
    fn request(&self, export: &str, command: NbdCommand, sector: u64, sectors: u64) -> Result<Vec<u8>, u32> {
        let mut client = Client::connect(&self.server.nbd, export);
        let data = if command == NbdCommand::Write { tagged('N', 0..sectors) } else { Vec::new() };
        client.send(CommandFlags::empty(), command, sector * 512, sectors * 512, &data).unwrap();
        match client.answer().unwrap() {
            (_, 0, data) => Ok(data),
            (_, error, _) => Err(error),
        }
    }

    /// Overwrites a device.
    fn fill(&self, export: &str, data: &[u8]) {
        let mut client = Client::connect(&self.server.nbd, export);
        let offset = |at: usize| (at * (64 << 10)) as u64;
        for (at, part) in data.chunks(64 << 10).enumerate() {
            client
                .send(CommandFlags::empty(), NbdCommand::Write, offset(at), part.len() as u64, part)
                .unwrap();
            assert_eq!(client.answer().unwrap().1, 0);
        }
    }

    /// The line `table : ` or `status: ` of the clone.
    fn line(&self, verb: &str, head: &str) -> String {
        let out = self.server.verb(&[verb, "c"]);
        let line = if out.status.success() { text(&out.stdout) } else { String::new() };
        format!("{head}{}", line.trim_end_matches('\n')).replace("254:", "253:")
    }

    fn events(&self) -> String {
        let info = text(&self.server.verb(&["info", "c"]).stdout);
        let number = info.lines().find_map(|line| line.strip_prefix("Event number:"));
        format!("  events: {}", number.unwrap_or_default().trim())
    }

    /// The answer of udm to a step, without the lines of the log.
    fn take(&self, step: &Step) -> Vec<String> {
        let words: Vec<&str> = step.command.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        let done = |result: Result<Vec<u8>, u32>| if result.is_ok() { "  ok" } else { "  error" }.to_owned();
        let tag = |result: Result<Vec<u8>, u32>| match result {
            Ok(data) if data.iter().all(|byte| *byte == 0) => "  data: ".to_owned(),
            Ok(data) => format!("  data: {}", text(&data[..14])),
            Err(_) => "  error".to_owned(),
        };
        match words[..] {
            ["dmsetup", ..] => self.dmsetup(step.command),
            ["zero", device] => {
                // The recording begins a new clone here.
                self.server.verb(&["remove", "c"]);
                self.fill(device, &vec![0; 4 << 20]);
                Vec::new()
            }
            ["fill", device, with] => {
                let tag = with.chars().next().unwrap().to_ascii_uppercase();
                let tag = if with == "old" { 'D' } else { tag };
                self.fill(device, &tagged(tag, 0..2048));
                Vec::new()
            }
            ["settle"] | ["limits"] => Vec::new(),
            ["read", _] => vec![tag(self.request("c", NbdCommand::Read, number(1), 1))],
            ["read", device, _] => vec![tag(self.request(device, NbdCommand::Read, number(2), 1))],
            ["write", ..] => vec![done(self.request("c", NbdCommand::Write, number(1), number(2)))],
            ["discard", ..] => vec![done(self.request("c", NbdCommand::Trim, number(1), number(2)))],
            ["flush"] => vec![done(self.request("c", NbdCommand::Flush, 0, 0))],
            _ => panic!("unknown: {}", step.command),
        }
    }
}

/// A status line without the numbers of metadata blocks.
fn without_blocks(line: &str) -> String {
    let blocks = |word: &str| word.split_once('/').is_some_and(|(_, total)| ["1024", "1"].contains(&total));
    let mut words: Vec<&str> = line.split(' ').collect();
    if let Some(place) = words.iter().position(|word| blocks(word)).filter(|place| *place < 8) {
        words[place] = "BLOCKS";
    }
    words.join(" ")
}

/// The expected answer to a step: the recorded one, or that of [`REFUSED`] or [`OTHERWISE`]. Marks
/// what it used.
fn expected(step: &Step, used: &mut [bool]) -> Vec<String> {
    let is_it = |(command, ..): &(&str, &str, &str)| step.command.contains(command);
    if let Some(place) = REFUSED.iter().position(is_it) {
        assert_eq!(step.answer[0], "  rc=0", "{}: the kernel refuses it too", step.command);
        used[place] = true;
        let reload = format!("device-mapper: reload ioctl on c (253:12) failed: {}", REFUSED[place].1);
        return [&reload, "Command failed.", "  rc=1", "  table : ", "  status: "].map(String::from).into();
    }
    let change = |line: &&str| {
        let line = line.replace(RO, "RO");
        let fits = |(section, command, recorded, ..): &(&str, &str, &str, &str, &str)| {
            step.section.contains(section) && step.command.contains(command) && line.contains(recorded)
        };
        let Some(place) = OTHERWISE.iter().position(fits) else { return line.replace("RO", RO) };
        used[REFUSED.len() + place] = true;
        let (_, _, recorded, ours, _) = OTHERWISE[place];
        line.replace(recorded, ours).replace("RO", RO)
    };
    step.answer.iter().map(change).collect()
}

#[test]
fn l01_udm_does_with_clones_what_a_kernel_did() {
    let replay = Replay::new();
    let (mut wrong, mut used, mut lines) = (String::new(), vec![false; REFUSED.len() + OTHERWISE.len()], 0);
    for step in &parse_transcript() {
        let expected = expected(step, &mut used);
        let (log, shown): (Vec<_>, Vec<_>) =
            expected.into_iter().partition(|line| line.starts_with("  dmesg: "));
        let is_setting = |line: &&String| line.starts_with("  ") && line.contains(": ");
        let state = |line: &&String| {
            ["  table : ", "  status: ", "  events: "].iter().any(|head| line.starts_with(head))
        };
        let mut got = replay.take(step);
        let answer: Vec<_> = shown.iter().filter(|line| !state(line)).collect();
        let answer: Vec<_> = match step.command {
            // The limits of a device are checked in the tests of the target.
            "limits" => answer.into_iter().filter(|line| !is_setting(line)).collect(),
            _ => answer,
        };
        lines += answer.len();
        if got.iter().ne(answer.iter().copied()) {
            wrong +=
                &format!("{}\n$ {}\n--- wanted\n{answer:?}\n--- got\n{got:?}\n", step.section, step.command);
        }
        // What happens in the background is waited for.
        let begin = Instant::now();
        for want in shown.iter().filter(state) {
            lines += 1;
            loop {
                got = match &want[..10] {
                    "  table : " => vec![replay.line("table", "  table : ")],
                    "  status: " => vec![replay.line("status", "  status: ")],
                    _ => vec![replay.events()],
                };
                if without_blocks(&got[0]).trim_end() == without_blocks(want).trim_end() {
                    break;
                }
                if begin.elapsed() > if want.contains("0/256") { SETTLE / 20 } else { SETTLE / 8 } {
                    wrong += &format!(
                        "{}\n$ {}\n--- wanted\n{want}\n--- got\n{}\n",
                        step.section, step.command, got[0]
                    );
                    break;
                }
                sleep(Duration::from_millis(20));
            }
        }
        for line in &log {
            lines += usize::from(check_log(&replay, step, line, &mut wrong));
        }
        // The recording removes what a table of these sections has created.
        if step.section.starts_with("## 2") && step.command.contains("create c") {
            replay.server.verb(&["remove", "c"]);
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    let unused: Vec<_> =
        used.iter().enumerate().filter(|(_, used)| !**used).map(|(place, _)| place).collect();
    assert!(unused.is_empty(), "not in the recording: {unused:?} of REFUSED and OTHERWISE");
    assert!(lines > 750, "{lines} lines");
}

/// Checks a line of the kernel's log: the reason of a refusal, or what udm logs too. Returns false
/// for a line that is about the kernel alone.
fn check_log(replay: &Replay, step: &Step, line: &str, wrong: &mut String) -> bool {
    let words = line.trim_start_matches("  dmesg: device-mapper: ");
    let (had, part) = if let Some((_, reason)) = words.split_once(": clone: ") {
        let reason = reason.rsplit_once(" (-E").map_or(reason, |(reason, _)| reason);
        let table = step.command.split('\'').nth(1).unwrap_or_default().replace("/dev/mapper/", "@");
        let table = table.replace("253:", "254:");
        let error = text(&replay.server.verb(&["create", "again", "--table", &table]).stderr);
        replay.server.verb(&["remove", "again"]);
        (error, reason.to_owned())
    } else if let Some((_, news)) = words.split_once("clone: 253:12: ").filter(|(_, news)| {
        ["hydration failed", "Switching to", "Metadata operation"].iter().any(|start| news.starts_with(start))
    }) {
        (replay.server.log(), news.to_owned())
    } else {
        return false;
    };
    if !had.contains(&part) {
        *wrong += &format!("{}\n$ {}\n--- wanted\n{part}\n--- got\n{had}\n", step.section, step.command);
    }
    true
}
