//! Multipath under a verifying load (fio), while its paths fail and return: rows of
//! docs/internals/kernel-rows.md. One file under four names is four paths. No request may fail.

mod support;

use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;
use support::nbd::Client;
use support::{Server, has, text};
use tempfile::TempDir;

const SECTORS: u64 = 131_072;

struct FioLoad {
    server: Server,
    folder: TempDir,
    fio: Option<Child>,
}

impl FioLoad {
    /// A multipath device with the arguments `groups`, in which `a` to `d` are the paths.
    fn new(groups: &str) -> Option<FioLoad> {
        if !has("fio") {
            return None;
        }
        let folder = TempDir::new().unwrap();
        std::fs::File::create(folder.path().join("a")).unwrap().set_len(SECTORS * 512).unwrap();
        for name in ["b", "c", "d"] {
            std::fs::hard_link(folder.path().join("a"), folder.path().join(name)).unwrap();
        }
        let table = format!("m={}", FioLoad::table(&folder, groups));
        Some(FioLoad { server: Server::start(&[&table]), folder, fio: None })
    }

    fn table(folder: &TempDir, groups: &str) -> String {
        let word = |word: &str| match word {
            "a" | "b" | "c" | "d" => folder.path().join(word).display().to_string(),
            _ => word.to_owned(),
        };
        let groups: Vec<_> = groups.split(' ').map(word).collect();
        format!("0 {SECTORS} multipath 1 queue_if_no_path 0 {}", groups.join(" "))
    }

    /// Starts the load, which writes and verifies.
    fn begin(&mut self, options: &str) {
        let mut fio = Command::new("timeout");
        fio.args("-k 5 120 fio --name=t --ioengine=nbd --verify_state_save=0 --verify_fatal=1".split(' '));
        fio.arg(format!("--uri=nbd+unix:///m?socket={}", self.server.nbd.display()));
        fio.args(options.split(' ')).current_dir(self.folder.path());
        fio.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        self.fio = Some(fio.spawn().unwrap());
    }

    fn runs(&mut self) -> bool {
        self.fio.as_mut().unwrap().try_wait().unwrap().is_none()
    }

    fn send_message(&self, message: &str) {
        let mut words = vec!["message", "m", "0"];
        words.extend(message.split(' '));
        self.server.says(&words);
    }

    /// Sends a message about each path.
    fn tell_all(&self, verb: &str) {
        for name in ["a", "b", "c", "d"] {
            self.send_message(&format!("{verb} {}", self.folder.path().join(name).display()));
        }
    }

    fn ends_well(&mut self) {
        let out = self.fio.take().unwrap().wait_with_output().unwrap();
        assert!(out.status.success(), "{}{}\n{}", text(&out.stdout), text(&out.stderr), self.server.log());
    }
}

const MIXED: &str = "--rw=randwrite --bs=64k --iodepth=8 --verify=crc32c --size=64m --time_based --runtime=3";
const TWO: &str = "2 1 service-time 0 2 0 a b queue-length 0 2 0 c d";

#[test]
fn m01_each_selector_under_load() {
    for group in [
        "round-robin 0 4 0 a b c d",
        "queue-length 0 4 0 a b c d",
        "service-time 0 4 0 a b c d",
        "historical-service-time 0 4 0 a b c d",
        "io-affinity 0 1 1 a 1",
    ] {
        let Some(mut load) = FioLoad::new(&format!("1 1 {group}")) else { return };
        load.begin("--rw=randwrite --bs=512k --iodepth=2 --verify=crc32c --size=64m");
        load.ends_well();
    }
}

#[test]
fn m02_all_paths_go_and_return_in_a_loop() {
    let Some(mut load) = FioLoad::new("1 1 round-robin 0 4 0 a b c d") else { return };
    load.begin(MIXED);
    while load.runs() {
        load.tell_all("fail_path");
        load.tell_all("reinstate_path");
    }
    load.ends_well();
}

/// As if all paths were deleted: the table has no groups, and later it has them again.
#[test]
fn m03_all_paths_are_removed_and_added() {
    let Some(mut load) = FioLoad::new(TWO) else { return };
    load.begin(MIXED);
    while load.runs() {
        for groups in ["0 0", TWO] {
            let table = FioLoad::table(&load.folder, groups);
            load.server.says(&["suspend", "--noflush", "m"]);
            load.server.says(&["reload", "m", "--table", &table]);
            load.server.says(&["resume", "m"]);
            sleep(Duration::from_millis(100));
        }
    }
    load.ends_well();
}

#[test]
fn m04_all_paths_fail_for_a_second() {
    let Some(mut load) = FioLoad::new(TWO) else { return };
    load.begin(MIXED);
    while load.runs() {
        load.tell_all("fail_path");
        sleep(Duration::from_secs(1));
        load.tell_all("reinstate_path");
        sleep(Duration::from_millis(500));
    }
    load.ends_well();
}

#[test]
fn m05_a_group_is_disabled_and_enabled() {
    let Some(mut load) = FioLoad::new(TWO) else { return };
    load.begin(MIXED);
    while load.runs() {
        for message in ["disable_group 1", "enable_group 1"] {
            load.send_message(message);
            sleep(Duration::from_millis(200));
        }
    }
    load.ends_well();
}

/// Several clients with deep queues. Requests that wait for a path do not delay the end of a
/// client.
#[test]
fn m06_deep_queues_while_all_paths_drop() {
    let Some(mut load) = FioLoad::new(TWO) else { return };
    load.begin(
        "--rw=randwrite --bs=4k --iodepth=64 --numjobs=4 --offset_increment=16m --size=16m --verify=md5 \
         --time_based --runtime=3",
    );
    while load.runs() {
        load.tell_all("fail_path");
        sleep(Duration::from_millis(700));
        load.tell_all("reinstate_path");
        sleep(Duration::from_millis(700));
    }
    load.ends_well();
}

#[test]
fn m07_long_requests() {
    let Some(mut load) = FioLoad::new("1 1 queue-length 0 4 0 a b c d") else { return };
    for size in ["4m", "8m"] {
        load.begin(&format!("--rw=randwrite --bs={size} --iodepth=4 --verify=md5 --size=64m"));
        load.ends_well();
    }
}

/// 256 paths in 16 groups are created, read, failed and reinstated one by one. A path takes less
/// than 16 KiB of memory, with a client at work.
#[test]
fn sixteen_groups_of_sixteen_paths() {
    let folder = TempDir::new().unwrap();
    let file = |n: usize| folder.path().join(n.to_string()).display().to_string();
    std::fs::File::create(file(0)).unwrap().set_len(1 << 20).unwrap();
    (1..256).for_each(|n| std::fs::hard_link(file(0), file(n)).unwrap());
    let server = Server::start(&["other=0 8 zero"]);
    let memory = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap()
    };
    let before = memory();
    let group = |n: usize| {
        let paths: Vec<_> = (n * 16..(n + 1) * 16).map(file).collect();
        format!("queue-length 0 16 0 {}", paths.join(" "))
    };
    let groups: Vec<_> = (0..16).map(group).collect();
    let table = format!("0 2048 multipath 1 queue_if_no_path 0 16 1 {}", groups.join(" "));
    server.says(&["create", "m", "--table", &table]);
    let mut client = Client::connect(&server.nbd, "m");
    let served = |path: usize, client: &mut Client| {
        assert_eq!(client.read(0), 0);
        let group = server.says(&["status", "m"]).split(' ').nth(8).unwrap().parse::<usize>().unwrap();
        assert_eq!(group, path / 16 + 1, "the group in use");
    };
    let states = |state| server.says(&["status", "m"]).matches(state).count();
    for path in 0..256 {
        if path % 16 == 0 {
            served(path, &mut client);
        }
        server.says(&["message", "m", "0", "fail_path", &file(path)]);
    }
    assert_eq!(states(" F 1 "), 256);
    client.ask_read(0);
    for path in (0..256).rev() {
        server.says(&["message", "m", "0", "reinstate_path", &file(path)]);
    }
    assert_eq!(client.error(), 0, "what waited is served");
    assert_eq!((states(" F "), states(" A 1 ")), (0, 256));
    let path = memory().saturating_sub(before) / 256;
    assert!(path < 16, "{path} KiB a path");
}
