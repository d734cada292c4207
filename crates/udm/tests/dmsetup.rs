//! udm called as `dmsetup` gives the answers of dmsetup. A recording with a real kernel
//! (`data/dmsetup_transcript.txt`, whose head says how it was made) is compared command by command,
//! byte for byte: standard output, standard error and exit status. Device numbers are equal,
//! because devices are created in the same order. Differences are listed in [`OTHERWISE`] and
//! [`is_read_ahead_line`].

mod support;

use std::os::unix::fs::symlink;
use std::process::{Command, Output, Stdio};
use support::nbd::Client;
use support::{Server, UDM, text};
use tempfile::TempDir;

const TRANSCRIPT: &str = include_str!("data/dmsetup_transcript.txt");
/// Selections by regular expressions, and repeated reports.
const REPORTS: &str = include_str!("data/dmsetup_reports.txt");

/// Commands with a different answer in udm: the end or the name of the command, the output of udm,
/// and the reason.
const OTHERWISE: &[(&str, &str, &str)] = &[
    ("dmsetup ls --tree -o ascii,compact,inverted,nodevice", NO_TREE, "what is not shown has no tree"),
    ("dmsetup ls --tree -o inverted,nodevice", NO_TREE, "what is not shown has no tree"),
    ("dmsetup info -c -o read_ahead a", "|RAhead\n|     0\n", "there is no read ahead"),
    ("dmsetup -v resume none2", NONE2, "a device without a table goes on as well"),
    ("dmsetup -v clear none2", NONE2, "it went on before"),
    ("dmsetup -v load none2 --table '0 8 error'", NONE2_LOADED, "it went on before"),
    (
        "dmsetup -v message z 0 hello",
        "!device-mapper: message ioctl on z  failed: Invalid argument\n!z: Target type zero does not support messages: \
         Invalid argument\n!Command failed.\n=1\n",
        "-v says what a kernel says in its log",
    ),
    (
        "dmsetup create x --table \"0 8 linear /dev/nosuch 0\"",
        "!device-mapper: reload ioctl on x (254:10) failed: No such file or directory\n!Command failed.\n=1\n",
        "as Linux 6.12 has it",
    ),
    (
        "dmsetup load a --table \"0 8 linear /dev/nosuch 0\"",
        "!device-mapper: reload ioctl on a  failed: No such file or directory\n!Command failed.\n=1\n",
        "as Linux 6.12 has it",
    ),
    (
        "dmsetup message mp 0 fail_path 77:77",
        "!device-mapper: message ioctl on mp  failed: Invalid argument\n!Command failed.\n=1\n",
        "as Linux 6.12 has it",
    ),
    ("dmsetup ls --exec echo", NO_EXEC, "there are no nodes to hand to a command"),
    ("dmsetup ls --exec 'echo x' --target striped", NO_EXEC, "there are no nodes to hand to a command"),
    ("dmsetup version", VERSION, "versions are udm's"),
    ("dmsetup --version", VERSION, "versions are udm's"),
    ("dmsetup targets", TARGETS, "targets are udm's"),
];

const NO_TREE: &str = "|none\n|none2\n|z\n";
const NONE2: &str = "|Name:              none2\n|State:             ACTIVE\n|Tables present:    None\n|Open count:        0\n\
                     |Event number:      0\n|Major, minor:      254, 5\n|Number of targets: 0\n|UUID: UUID-none\n|\n";
const NONE2_LOADED: &str = "|Name:              none2\n|State:             ACTIVE\n|Tables present:    INACTIVE\n|Open count:        0\n\
                            |Event number:      0\n|Major, minor:      254, 5\n|Number of targets: 0\n|UUID: UUID-none\n|\n";
const NO_EXEC: &str =
    "!ls --exec: not in udm: there are no device nodes to hand to a command\n!Command failed.\n=1\n";
const VERSION: &str =
    concat!("|Library version:   ", env!("CARGO_PKG_VERSION"), " (udm)\n|Driver version:    4.48.0\n");
const TARGETS: &str = "|clone            v1.0.0\n|delay            v1.4.0\n|dust             v1.0.0\n|error            v1.7.0\n|flakey           v1.5.0\n\
                       |linear           v1.4.0\n|log-writes       v1.1.0\n|mirror           v1.14.0\n|multipath        v1.14.0\n|snapshot         v1.16.0\n\
                       |snapshot-merge   v1.5.0\n|snapshot-origin  v1.9.0\n|striped          v1.6.0\n|zero             v1.2.0\n";

/// True for a line about read-ahead, which udm does not have. dmsetup omits the line if the value
/// is unknown, and prints an error if the device has no node.
fn is_read_ahead_line(line: &str) -> bool {
    line.starts_with("|Read Ahead:") || line.starts_with("!/dev/mapper/") && line.contains(": open failed:")
}

/// The answer with a read-ahead of 0.
fn without_read_ahead(answer: &str) -> String {
    answer.replace("   256\n", "     0\n")
}

/// A command and its answer, from the recording.
#[derive(Clone)]
struct RecordedCommand {
    command: String,
    answer: String,
    /// No devices existed before the command.
    is_first: bool,
}

fn parse_transcript(transcript: &str) -> Vec<RecordedCommand> {
    let (mut all, mut is_first): (Vec<RecordedCommand>, bool) = (Vec::new(), true);
    for line in transcript.lines() {
        if line.starts_with('#') {
            is_first |= line.ends_with("in a fresh machine");
            continue;
        }
        if let Some(command) = line.strip_prefix("$ ") {
            all.push(RecordedCommand { command: command.into(), answer: String::new(), is_first });
            is_first = false;
            continue;
        }
        let last = all.last_mut().expect("a command comes first");
        match line.strip_prefix("> ") {
            Some(more) => last.command += &format!("\n{more}"),
            None if is_read_ahead_line(line) => {}
            None if last.command.contains("name_all") => {
                last.answer += &without_read_ahead(&format!("{line}\n"));
            }
            None => last.answer += &format!("{line}\n"),
        }
    }
    all
}

/// Formats output like the recording.
fn shown(out: &Output) -> String {
    let mut shown = String::new();
    for (mark, bytes) in [('|', &out.stdout), ('!', &out.stderr)] {
        let text = text(bytes);
        for line in text.lines() {
            shown += &format!("{mark}{line}\n");
        }
        if !text.is_empty() && !text.ends_with('\n') {
            shown += "\\\n";
        }
    }
    match out.status.code() {
        Some(0) => {}
        code => shown += &format!("={}\n", code.unwrap_or(-1)),
    }
    shown
}

/// A folder with three disks, and udm under the name `dmsetup`.
struct DmsetupFixture {
    server: Server,
    folder: TempDir,
}

impl DmsetupFixture {
    fn new() -> DmsetupFixture {
        let folder = tempfile::tempdir().unwrap();
        for disk in 0..3 {
            let path = folder.path().join(format!("nullb{disk}"));
            std::fs::File::create(path).unwrap().set_len(1 << 30).unwrap();
        }
        std::fs::create_dir(folder.path().join("bin")).unwrap();
        symlink(UDM, folder.path().join("bin/dmsetup")).unwrap();
        DmsetupFixture { server: Server::start(&[]), folder }
    }

    fn sh(&self, command: &str) -> Output {
        let path = format!("{}/bin:{}", self.folder.path().display(), std::env::var("PATH").unwrap());
        let mut sh = Command::new("sh");
        sh.args(["-c", command]).current_dir(&self.folder).env("PATH", path).env("LC_ALL", "C");
        sh.env("UDM_SOCKET", &self.server.socket).env_remove("UDM_LOG").stdin(Stdio::null());
        for disk in 0..3 {
            sh.env(format!("R{disk}"), self.folder.path().join(format!("nullb{disk}")));
            sh.env(format!("N{disk}"), format!("253:{disk}"));
        }
        sh.output().unwrap()
    }
}

#[test]
fn a_script_gets_the_answers_of_dmsetup() {
    let (mut world, mut wrong, mut used) =
        (DmsetupFixture::new(), String::new(), vec![false; OTHERWISE.len()]);
    let all = [parse_transcript(TRANSCRIPT), parse_transcript(REPORTS)].concat();
    for RecordedCommand { command, answer, is_first } in &all {
        if *is_first {
            world = DmsetupFixture::new();
        }
        let mut got = shown(&world.sh(command));
        let other = OTHERWISE.iter().position(|(one, ..)| command == one);
        let expected = match other {
            Some(place) => {
                assert_ne!(got, *answer, "{command}: it is as dmsetup now");
                used[place] = true;
                OTHERWISE[place].1
            }
            None => answer,
        };
        // A deferred removal happens some time after the last close, in the kernel as in udm.
        let is_list = command.starts_with("dmsetup info ") || command == "dmsetup ls";
        for _ in 0..50 {
            if got == expected || !is_list {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
            got = shown(&world.sh(command));
        }
        if got != expected {
            wrong += &format!("$ {command}\n--- wanted\n{expected}--- got\n{got}");
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    let unused: Vec<_> = OTHERWISE.iter().zip(&used).filter(|(_, used)| !**used).collect();
    assert!(unused.is_empty(), "not in the transcript: {unused:?}");
    assert!(all.len() > 400, "{} commands", all.len());
}

/// udm as dmsetup gives the recorded answers for 117 valid and invalid tables (with errnos of Linux
/// 6.12).
#[test]
fn bad_tables_get_dmsetups_answers() {
    let world = DmsetupFixture::new();
    let (mut wrong, mut rows) = (String::new(), 0);
    for line in include_str!("../../udm-targets/tests/data/bad_tables.jsonl").lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        let table = row["table"].as_str().unwrap();
        // `/dev/loop1` does not exist on every machine.
        if table.contains("/dev/loop1") {
            continue;
        }
        rows += 1;
        // Empties the disks, because those of the recording were empty.
        for disk in 0..3 {
            let disk =
                std::fs::File::options().write(true).open(world.folder.path().join(format!("nullb{disk}")));
            let disk = disk.unwrap();
            disk.set_len(0).unwrap();
            disk.set_len(1 << 30).unwrap();
        }
        let disks = format!("{}/nullb", world.folder.path().display());
        let out = world.sh(&format!("dmsetup create t --table '{}'", table.replace("/dev/nullb", &disks)));
        let stderr: Vec<_> =
            row["stderr"].as_array().unwrap().iter().map(|line| line.as_str().unwrap()).collect();
        let mut got =
            (text(&out.stderr).lines().collect::<Vec<_>>().join("\n"), out.status.code(), String::new());
        let mut expected = (stderr.join("\n"), row["rc"].as_i64().map(|rc| rc as i32), String::new());
        if out.status.success() {
            got.2 = text(&world.sh("dmsetup table t").stdout).trim_end_matches('\n').to_owned();
            expected.2 = row["table_out"].as_str().unwrap_or_default().to_owned();
            assert!(world.sh("dmsetup remove t").status.success());
        }
        if got != expected {
            wrong += &format!("{table}\n  wanted {expected:?}\n  got    {got:?}\n");
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert_eq!(rows, 117);
}

/// Each report shows the present state; columns never become narrower.
#[test]
fn a_report_is_made_again_as_things_are_then() {
    let world = DmsetupFixture::new();
    let out =
        world.sh("dmsetup create longer-than-columns --table '0 8 error' && dmsetup create z --notable && \
         dmsetup info -c -o name,open -S 'name=~l|z' --count 2 --interval 5 > out & \
         while ! [ -s out ]; do sleep 0.01; done; dmsetup remove longer-than-columns; wait; cat out");
    let line = |name: &str, open: &str| format!("|{name:<19} {open:>4}\n");
    let (heading, z) = (line("Name", "Open"), line("z", "0"));
    let expected = format!("{heading}{}{z}|\n{heading}{z}", line("longer-than-columns", "0"));
    assert_eq!(shown(&out), expected);
    let refused = "!ls: not in udm: only reports are repeated: info -c, splitname\n!Command failed.\n=1\n";
    assert_eq!(shown(&world.sh("dmsetup ls --count 2")), refused);
}

/// Without a server, a command prints one error and does not crash.
#[test]
fn without_a_server_commands_fail() {
    let world = DmsetupFixture::new();
    let out = world.sh("UDM_SOCKET=$PWD/none dmsetup ls");
    let why = format!(
        "!{}/none: can't reach udm serve: No such file or directory (start it, ",
        world.folder.path().display()
    );
    let output = shown(&out);
    assert!(output.starts_with(&why) && output.ends_with("\n!Command failed.\n=1\n"), "{output}");
}

/// Commands of udm and dmsetup print the same, and each reads the output of the other.
#[test]
fn udm_prints_the_same() {
    let world = DmsetupFixture::new();
    let created = world.sh(
        "dmsetup create a -u UUID-a --table \"0 2048 linear $R0 0\" && dmsetup create b --table '0 8 error' && \
         dmsetup create top --table '0 1024 linear /dev/mapper/a 8' && dmsetup suspend b",
    );
    assert_eq!(shown(&created), "");
    for words in [
        "info -c",
        "info -C a top",
        "info -c -o name,devs_used,names_using_dev,blkdevname",
        "info -c -o info_all -O -name",
        "info -c --noheadings -o name,uuid,open --separator /",
        "info -c --nameprefixes --unquoted --rows -o +devno",
        "info -c -S open>0||name=b -o name,selected",
        "table --concise",
        "table --concise top b",
        "table --concise --target error",
        "ls",
        "table --target linear",
        "status --target error",
    ] {
        let words: Vec<_> = words.split(' ').collect();
        let quoted: Vec<_> = words.iter().map(|word| format!("'{word}'")).collect();
        let dmsetup = world.sh(&format!("dmsetup {}", quoted.join(" ")));
        assert_eq!(world.server.says(&words), text(&dmsetup.stdout), "{words:?}");
    }
    let list = world.server.says(&["ls", "--target", "linear"]);
    assert_eq!(list, "a\t(254:0)\ntop\t(254:2)\n");
    let refused = world.server.refuses(&["info", "-c", "-o", "name,nosuch"]);
    assert_eq!(refused, "udm: Unrecognised field: nosuch\n");

    let concise = world.server.says(&["table", "--concise"]);
    world.server.says(&["remove", "top", "a", "b"]);
    world.server.says(&["create", "--concise", concise.trim_end()]);
    assert_eq!(world.server.says(&["table", "--concise"]), concise);
    world.server.says(&["create", "--concise", "ro,,99,ro,0 8 linear 254:0 0"]);
    assert_eq!(world.server.says(&["ls"]).lines().last(), Some("ro\t(254:99)"));
    let refused = world.server.refuses(&["create", "--concise", "z,,,,0 8 zero x;never,,,,0 8 zero"]);
    assert!(refused.starts_with("udm: z: ") && refused.ends_with("       ^\n"), "{refused}");
    assert!(!world.server.says(&["ls"]).contains("never"));
}

/// A device with a read-only table rejects writes, even if the disk below is writable.
#[test]
fn what_is_loaded_read_only_is_not_written_to() {
    let world = DmsetupFixture::new();
    assert_eq!(shown(&world.sh("dmsetup create d --readonly --table \"0 2048 linear $R0 0\"")), "");
    let writes = || Client::connect(&world.server.nbd, "d").write(0);
    assert_ne!(writes(), 0);
    assert_eq!(Client::connect(&world.server.nbd, "d").read(0), 0);
    let reload = "dmsetup load d --table \"0 2048 linear $R0 0\" && dmsetup resume d";
    assert_eq!(shown(&world.sh(reload)), "");
    assert_eq!(writes(), 0);
    assert_eq!(shown(&world.sh(&reload.replace("load d", "load d -r"))), "");
    assert_ne!(writes(), 0);
    let info = world.server.says(&["info", "d"]);
    assert!(info.contains("ACTIVE (READ-ONLY)"), "{info}");
}
