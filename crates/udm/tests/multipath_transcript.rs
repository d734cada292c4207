//! Repeats with the program what a script did with dmsetup and a kernel
//! (`multipath_transcript.txt`): creation with each selector, messages, reads, reads that wait for
//! a path, paths that fail below, bad messages, a repair by reload. Tables, states, event numbers,
//! results and the kernel's reasons are compared word for word. Even the device numbers are the
//! same, because the devices are created in the same order.
//!
//! The recording does not show all steps: [`Replay::apply_unrecorded`] performs the others.

mod support;

use std::thread::{JoinHandle, sleep};
use std::time::Duration;
use support::nbd::Client;
use support::{Server, report_skip, text, until};
use tempfile::TempDir;
use udm_wire::nbd::NbdCommand;

const TRANSCRIPT: &str = include_str!("../../udm-targets/tests/data/multipath_transcript.txt");

/// Lines of the kernel's log other than the reason for a refusal.
const NEWS: [&str; 4] =
    ["Failing path", "Reinstating path", "error adding target", "unable to determine table type"];

struct Replay {
    server: Server,
    disks: TempDir,
    /// The first words of the section's heading.
    section: &'static str,
    command: &'static str,
    /// The error text of the last command, if it failed.
    refused: Option<String>,
    /// The last `dd` failed.
    dd_failed: bool,
    background: Option<JoinHandle<u32>>,
    checks: usize,
}

impl Replay {
    fn new() -> Replay {
        let disks = tempfile::tempdir().unwrap();
        let devices: Vec<_> = (0..4)
            .map(|n| {
                let disk = disks.path().join(format!("nullb{n}"));
                std::fs::File::create(&disk).unwrap().set_len(1 << 30).unwrap();
                format!("p{n}=0 2097152 linear {} 0", disk.display())
            })
            .collect();
        let devices: Vec<_> = devices.iter().map(String::as_str).collect();
        Replay {
            server: Server::start_with(&devices, &["--cores", "0-1"]),
            disks,
            section: "",
            command: "",
            refused: None,
            dd_failed: false,
            background: None,
            checks: 0,
        }
    }

    fn client(&self) -> Client {
        Client::connect(&self.server.nbd, "mp")
    }

    /// The fields of `udm status mp`.
    fn status(&self) -> Vec<String> {
        self.server.says(&["status", "mp"]).split(' ').map(String::from).collect()
    }

    /// Runs one line of commands, with device names replaced by udm's.
    fn run(&mut self, line: &'static str) {
        self.command = line;
        let disks = format!("{}/nullb", self.disks.path().display());
        let line = line.replace("/dev/mapper/", "@").replace("/dev/nullb", &disks);
        for command in line.replace("--noudevsync --noudevrules ", "").split("; dmsetup ") {
            let (words, table) = command.split_once(" --table ").unwrap_or((command, ""));
            let mut args: Vec<&str> = words.split(' ').collect();
            if !table.is_empty() {
                args.extend(["--table", table.trim_matches('\'')]);
            }
            if args[0] == "create" {
                self.server.verb(&["remove", "mp"]);
            }
            let out = self.server.verb(&args);
            self.refused = (!out.status.success()).then(|| text(&out.stderr));
        }
    }

    /// Starts a read that finds no path and waits. Its path group is then no longer the active one.
    fn begin_read(&mut self) {
        let mut client = self.client();
        self.background = Some(std::thread::spawn(move || client.read(0)));
        until("the read waits", || (self.status()[9] == "E").then_some(()));
    }

    /// Performs the steps before `line` that the recording does not show.
    fn apply_unrecorded(&mut self, line: &str) {
        let section = self.section.split('.').next().expect("a number");
        if section == "## 1" && line.contains("Failing path") && !self.command.contains("fail_path") {
            let path = line.rsplit(' ').next().expect("a path").trim_end_matches('.');
            self.server.says(&["message", "mp", "0", "fail_path", path]);
            if self.command.contains("reinstate_path") {
                self.begin_read();
            }
        }
        if line.starts_with("all failed") || section == "## 7" && line.contains("suspend") {
            self.begin_read();
        }
        if section == "## 5" && line.ends_with("fail_path 254:1") {
            self.server.says(&["suspend", "mp"]);
        }
        if section == "## 5" && line.starts_with("  table") && self.command.ends_with("fail_path 254:1") {
            self.server.says(&["resume", "mp"]);
        }
        if section == "## 4" && line.contains("create") {
            // The path is up for two seconds after its first use, then down.
            drop(Client::connect(&self.server.nbd, "p0"));
            sleep(Duration::from_millis(2100));
        }
    }

    fn line(&mut self, line: &'static str) {
        self.apply_unrecorded(line);
        if let Some(command) = line.strip_prefix("$ dmsetup ") {
            return self.run(command);
        }
        if line.starts_with("## ") {
            self.section = line;
            return;
        }
        if line == "dd: /dev/mapper/mp: Input/output error" {
            self.dd_failed = true;
            return;
        }
        if let Some(rc) = line.strip_prefix("  rc=") {
            assert_eq!(self.refused.is_none(), rc == "0", "{}: {:?}", self.command, self.refused);
        } else if let Some(want) = line.strip_prefix("  table : ") {
            self.shows("table", want);
        } else if let Some(want) = line.strip_prefix("  status: ") {
            self.shows("status", want);
        } else if let Some(want) = line.strip_prefix("  events: mp:") {
            let info = self.server.says(&["info", "mp"]);
            assert!(info.contains(&format!("Event number:      {want}\n")), "{info}");
        } else if let Some(reason) = line.strip_prefix("  dmesg: ") {
            return self.reason(reason);
        } else if line == "  [read /dev/mapper/mp done]" {
            // Over null_blk, the averages show two reads. Over flakey, the first path must be among
            // those used: round-robin begins at a different path on each core.
            let reads = if ["## 2", "## 4"].iter().any(|s| self.section.starts_with(s)) { 2 } else { 1 };
            let mut client = self.client();
            let errors = (0..reads).map(|_| client.read(0)).max();
            assert_eq!(errors != Some(0), std::mem::take(&mut self.dd_failed));
        } else if let Some(rc) = line.strip_prefix("  bgread rc=") {
            let error = self.background.take().expect("a read in the background").join().unwrap();
            assert_eq!(error == 0, rc == "0", "{error}");
            self.dd_failed = false;
        } else if line == "dd: error writing '/dev/mapper/mp': Input/output error" {
            assert_ne!(self.client().one(NbdCommand::Write, 0, 4096), 0);
        } else if line == "1073741824" {
            assert_eq!(self.client().size, 1 << 30);
        } else {
            let said_otherwise = ["device-mapper: ", "Command failed.", "1+0 records", "all failed", "re"];
            let known = line.is_empty() || said_otherwise.iter().any(|start| line.starts_with(start));
            assert!(known, "unknown line: {line}");
            return;
        }
        self.checks += 1;
    }

    fn shows(&mut self, verb: &str, want: &str) {
        let out = self.server.verb(&[verb, "mp"]);
        if want.starts_with("0 ") {
            assert_eq!(
                timeless(text(&out.stdout).trim_end_matches('\n')),
                timeless(want),
                "{}",
                self.command
            );
        } else {
            assert!(!out.status.success(), "{}", text(&out.stdout));
        }
    }

    /// Compares the reason of a refusal with the kernel's.
    fn reason(&mut self, line: &str) {
        let Some(refused) = &self.refused else { return };
        if NEWS.iter().any(|news| line.contains(news)) {
            return;
        }
        let words = line.trim_start_matches("device-mapper: ");
        let words = words.trim_start_matches("table: 254:0: ").trim_start_matches("ioctl: ");
        let words = words.trim_start_matches("table: ");
        let words = words.rsplit_once(" (-E").map_or(words, |(words, _)| words);
        assert!(refused.contains(words), "{refused}, recorded {words}");
        self.checks += 1;
    }
}

/// Replaces the times that historical-service-time measured; all other numbers of the line are
/// smaller.
fn timeless(line: &str) -> String {
    let (size, rest) = line.split_at("0 2097152".len());
    let word = |word: &str| match word.parse::<u64>() {
        Ok(1024..) => "time".to_owned(),
        _ => word.to_owned(),
    };
    size.to_owned() + &rest.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

#[test]
fn the_program_does_what_the_kernel_did() {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return report_skip("the recorded kernel had two CPUs");
    }
    let mut replay = Replay::new();
    for line in TRANSCRIPT.lines().skip(9) {
        replay.line(line);
    }
    assert!(replay.background.is_none());
    assert_eq!(replay.checks, 538, "lines that were checked");
}
