//! `udm upgrade`: clients stay connected and lose nothing, whatever the new program does.

mod support;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::Duration;
use support::nbd::Client;
use support::servers::Nbdkit;
use support::stamps::{StampedVolume, image};
use support::{PATIENCE, Server, UDM, has, needs_no_sandbox, text, udm, until};
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, NbdCommand, NbdRequestHeader};

const SECTORS: usize = 8192;

/// The words of a verb.
type VerbLine<'a> = &'a [&'a str];

/// A disk `v` with stamped sectors and a persistent snapshot `s` of its first content. They outlive
/// each server.
struct UpgradeFixture {
    files: TempDir,
    volume: StampedVolume,
    frozen: StampedVolume,
}

impl UpgradeFixture {
    fn new() -> (UpgradeFixture, Server) {
        let files = tempfile::tempdir().unwrap();
        fs::write(files.path().join("disk"), image(SECTORS)).unwrap();
        let [volume, frozen] = [0, 1 << 40].map(|first| StampedVolume::new(SECTORS, first));
        let fixture = UpgradeFixture { files, volume, frozen };
        let server = fixture.serve();
        server.says(&["snapshot", "create", "s", "--of", "v"]);
        (fixture, server)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    fn serve(&self) -> Server {
        let state = self.path("state").display().to_string();
        let device = format!("v={}", self.path("disk").display());
        Server::start_with(&[&device], &["--cores", "0,1", "--state", &state])
    }

    /// An executable script.
    fn program(&self, name: &str, script: &str) -> String {
        let path = self.path(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.display().to_string()
    }

    /// Checks that both devices have the content that they must have.
    fn check(&self, server: &Server) {
        self.volume.settle(&server.nbd, "v", 0..0);
        self.frozen.settle(&server.nbd, "s", 0..0);
    }
}

fn report(server: &mut Server) -> Value {
    let report = server.upgrade(&[UDM]);
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    report
}

#[test]
fn clients_see_a_pause_and_no_error() {
    let (fixture, mut server) = UpgradeFixture::new();
    let (answered, mut pauses) = (AtomicU64::new(0), Vec::new());
    let (loads, has_early_end) = std::thread::scope(|scope| {
        let start = |seed| {
            let (client, volume, count) = (Client::connect(&server.nbd, "v"), &fixture.volume, &answered);
            scope.spawn(move || volume.load(client, 0..SECTORS, seed, count))
        };
        let loads: Vec<_> = (0..4).map(start).collect();
        let _idle = Client::connect(&server.nbd, "s");
        for _ in 0..20 {
            let report = report(&mut server);
            assert_eq!((&report["devices"], &report["clients"]), (&2.into(), &5.into()));
            pauses.push(report["pause_ns"].as_f64().unwrap() / 1e6);
            let target = answered.load(Ordering::Relaxed) + 200;
            until("a load", || {
                let over = loads.iter().any(|load| load.is_finished());
                (over || answered.load(Ordering::Relaxed) >= target).then_some(())
            });
        }
        let has_early_end = loads.iter().any(|load| load.is_finished());
        server.kill();
        (loads.into_iter().map(|load| load.join().unwrap()).collect::<Vec<_>>(), has_early_end)
    });
    assert!(loads.iter().all(|load| load.failed == 0), "requests have failed: {}", server.log());
    assert!(!has_early_end, "a client has ended early: {}", server.log());
    pauses.sort_by(f64::total_cmp);
    #[expect(clippy::print_stdout, reason = "the figure that the test is for")]
    let say = |line: String| println!("{line}");
    say(format!("20 upgrades: pauses of {:.1} ms in the middle, {:.1} ms at most", pauses[10], pauses[19]));
    fixture.check(&fixture.serve());
}

/// Names, numbers, UUIDs, tables, snapshots and failed paths are those of the old server.
#[test]
fn the_new_server_is_as_the_old_one() {
    let (fixture, mut server) = UpgradeFixture::new();
    for name in ["a", "b"] {
        File::create(fixture.path(name)).unwrap().set_len(1 << 20).unwrap();
    }
    let [a, b] = ["a", "b"].map(|name| fixture.path(name).display().to_string());
    let paths = format!("0 2048 multipath 0 0 1 1 round-robin 0 2 1 {b} 1 {a} 1");
    server.says(&["create", "paths", "--uuid", "mpath-1", "--table", &paths]);
    server.says(&["message", "paths", "0", "fail_path", &b]);
    // A number that is not the next free one.
    server.says(&["create", "gap", "--notable"]);
    server.says(&["create", "top", "--table", "0 1024 linear @paths 8"]);
    server.says(&["remove", "gap"]);
    server.says(&["load", "top", "--table", "0 1024 linear @paths 16"]);
    // More than are created at the same time, alone and in stacks.
    for i in 0..40 {
        let below = if i % 2 == 0 { "null:1M".to_owned() } else { format!("@plain{}", i - 1) };
        let table = format!("0 2048 linear {below} 0");
        server.says(&["create", &format!("plain{i}"), "--table", &table]);
    }
    let describe = |server: &Server| {
        let info: Value = serde_json::from_str(&server.says(&["info", "--json"])).unwrap();
        let list: Value = serde_json::from_str(&server.says(&["snapshot", "list", "--json"])).unwrap();
        let snapshot = ["name", "origin", "store", "chunk_bytes"].map(|key| list[0][key].clone());
        let verbs = [&["table"][..], &["table", "--inactive"], &["status", "paths"], &["exports"]];
        (info, snapshot, verbs.map(|verb| server.says(verb)))
    };
    let mut client = Client::connect(&server.nbd, "top");
    let (before, pid) = (describe(&server), server.pid());
    report(&mut server);
    assert_ne!(server.pid(), pid);
    assert_eq!(describe(&server), before);
    let mut writes = |server: &mut Server| {
        client.ask(NbdCommand::Write, 0, 512);
        assert_eq!(client.error(), 0, "{}", server.log());
    };
    writes(&mut server);
    server.says(&["resume", "top"]);
    report(&mut server);
    writes(&mut server);
    // One process has counted the first write, and another one the second.
    let metrics = server.http("GET", "/metrics", "").2;
    for line in [
        "udm_requests_total{device=\"top\",op=\"write\"} 2",
        "udm_request_bytes_total{device=\"top\",op=\"write\"} 1024",
        "udm_request_duration_seconds_count{device=\"top\",op=\"write\"} 2",
    ] {
        until(line, || server.http("GET", "/metrics", "").2.contains(line).then_some(()));
    }
    assert!(metrics.contains("udm_device_events_total{device=\"paths\"} 1"), "{metrics}");
    drop(client);
    until("devices that are not in use", || {
        let gone = ["top", "paths"].iter().all(|name| {
            let known = server.verb(&["info", name]).status.success();
            !known || server.verb(&["remove", name]).status.success()
        });
        gone.then_some(())
    });
    server.says(&["snapshot", "remove", "s"]);
}

/// The counters of paths go on from those of the old server, also after an upgrade that failed.
#[test]
fn counters_of_paths_go_on() {
    if needs_no_sandbox("a program of the test") {
        return;
    }
    let (fixture, mut server) = UpgradeFixture::new();
    File::create(fixture.path("a")).unwrap().set_len(1 << 20).unwrap();
    server.says(&["create", "broken", "--table", "0 2048 error"]);
    let a = fixture.path("a").display().to_string();
    let table = format!("0 2048 multipath 2 queue_mode bio 0 1 1 round-robin 0 2 1 @broken 1 {a} 1");
    server.says(&["create", "m", "--table", &table]);
    let mut client = Client::connect(&server.nbd, "m");
    let mut write = |server: &Server| {
        client.ask(NbdCommand::Write, 0, 512);
        assert_eq!(client.error(), 0, "{}", server.log());
    };
    write(&server);
    write(&server);
    // It is failed by a command, too.
    for _ in 0..2 {
        server.says(&["message", "m", "0", "fail_path", &a]);
        server.says(&["message", "m", "0", "reinstate_path", &a]);
    }
    let counters = |server: &Server| -> Vec<Value> {
        let stats: Value = serde_json::from_str(&server.http("GET", "/v1/stats", "").2).unwrap();
        let all = stats["devices"].as_array().unwrap();
        let m = all.iter().find(|one| one["device"]["name"] == "m").unwrap();
        let of_path = |path: &Value| {
            let keys = ["state", "failures", "served", "errors", "retries", "ejections"];
            Value::from(keys.map(|key| path[key].clone()).to_vec())
        };
        m["paths"].as_array().unwrap().iter().map(of_path).collect()
    };
    let shows_failures = |server: &Server| server.says(&["status", "m"]).contains(" F 1 253:2 A 2 ");
    let before = counters(&server);
    assert!(shows_failures(&server), "{}", server.says(&["status", "m"]));
    let failed_ns = |server: &Server| {
        let metrics = server.http("GET", "/metrics", "").2;
        let of_path = |line: &&str| line.starts_with("udm_path_failed_seconds_total{device=\"m\"");
        metrics.lines().find(of_path).unwrap().rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()
    };
    let was_failed = failed_ns(&server);
    assert_eq!((&before[0][0], &before[0][1], &before[1][1]), (&"failed".into(), &1.into(), &2.into()));
    assert_eq!((&before[1][2]["write"]["requests"], &before[1][4]), (&2.into(), &1.into()), "{before:?}");
    let bad = fixture.program("bad", &format!("ulimit -n 14; exec {UDM} \"$@\""));
    server.refuses(&["upgrade", &bad]);
    assert_eq!(counters(&server), before, "after a failed upgrade");
    for _ in 0..2 {
        report(&mut server);
        assert_eq!(counters(&server), before);
        assert!(shows_failures(&server), "{}", server.says(&["status", "m"]));
        assert!(failed_ns(&server) >= was_failed);
    }
    write(&server);
    let after = until("a counted write", || {
        let after = counters(&server);
        (after != before).then_some(after)
    });
    assert_eq!(after[0], before[0]);
    assert_eq!(after[1][2]["write"], serde_json::json!({"requests": 3, "bytes": 1536}));
}

#[test]
fn what_cannot_be_handed_over_is_refused() {
    if needs_no_sandbox("a program of the test") {
        return;
    }
    let (fixture, mut server) = UpgradeFixture::new();
    let mut client = Client::connect(&server.nbd, "v");
    let disk = fixture.path("other");
    File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let dust = format!("0 1024 dust {} 0 512", disk.display());
    let store = fixture.path("store");
    File::create(&store).unwrap().set_len(1 << 20).unwrap();
    let transient = format!("0 1024 snapshot {} {} N 8", disk.display(), store.display());
    let cases: [(&[VerbLine<'_>], &str, VerbLine<'_>); 4] = [
        (
            &[&["suspend", "v"]],
            "v: it is suspended: resume it first: Device or resource busy",
            &["resume", "v"],
        ),
        (
            &[&["create", "m", "--table", "0 2048 linear mem:1M 0"]],
            "m: the content of mem:1M is memory of this server: Operation not supported",
            &["remove", "m"],
        ),
        (
            &[&["create", "d", "--table", &dust], &["message", "d", "0", "addbadblock", "3"]],
            "d: it has a bad block that a message added; this would be lost: Operation not supported",
            &["remove", "d"],
        ),
        (
            &[&["create", "n", "--table", &transient]],
            "n: it has a snapshot without a persistent store (N); this would be lost: Operation not supported",
            &["remove", "n"],
        ),
    ];
    let moved = format!("f: {} leads to another disk now", disk.display());
    let gone = format!("f: it could not be opened again: {}: No such file", disk.display());
    server.says(&["create", "f", "--table", &format!("0 2048 linear {} 0", disk.display())]);
    fs::rename(&disk, fixture.path("elsewhere")).unwrap();
    let said = server.refuses(&["upgrade", UDM]);
    assert!(said.contains(&gone), "{said}");
    File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let said = server.refuses(&["upgrade", UDM]);
    assert!(said.contains(&moved), "{said}");
    server.says(&["remove", "f"]);
    for (before, why, after) in cases {
        before.iter().for_each(|verb| drop(server.says(verb)));
        assert_eq!(server.refuses(&["upgrade", UDM]), format!("udm: upgrade: {why}\n"));
        server.says(after);
    }
    let nonsense = fixture.program("nonsense", "echo nonsense");
    let fails = fixture.program("fails", "exit 3");
    for (program, why) in [
        ("/nonexistent/udm", "No such file or directory: Input/output error"),
        (&nonsense, "it did not get ready; the log has what it said: Input/output error"),
        (&fails, "it did not get ready; the log has what it said: Input/output error"),
    ] {
        assert_eq!(server.refuses(&["upgrade", program]), format!("udm: upgrade: {program}: {why}\n"));
    }
    let (status, _, body) = server.http("POST", "/v1/upgrade", r#"{"program":"udm"}"#);
    assert!(status == 400 && body.contains("udm: expected an absolute path"), "{status} {body}");
    let mut serves = |server: &Server| {
        client.ask(NbdCommand::Write, 0, 512);
        assert_eq!(client.error(), 0, "{}", server.log());
    };
    serves(&server);
    report(&mut server);
    serves(&server);
}

/// A new program that fails or is killed at any moment leaves the old server serving, or has taken
/// over before. No client sees an error while one of them lives, and nothing acknowledged is lost.
#[test]
fn a_new_program_may_fail_at_any_moment() {
    let (fixture, mut server) = UpgradeFixture::new();
    let (answered, mut kept) = (AtomicU64::new(0), 0);
    const ROUNDS: u64 = 12;
    for round in 0..ROUNDS {
        let script = match round % 4 {
            // The record of the snapshot is in another state folder.
            0 => format!("exec {UDM} \"$@\" --state {}", fixture.path("none").display()),
            1 => format!("ulimit -n 14; exec {UDM} \"$@\""),
            _ => format!(
                "exec 3<&0 0</dev/null\n{UDM} \"$@\" <&3 3<&- &\nexec 3<&-\nsleep {:.2}\nkill -9 $!\nwait",
                0.015 * round as f64
            ),
        };
        let program = fixture.program("new", &script);
        let load = std::thread::scope(|scope| {
            let (client, volume, count) = (Client::connect(&server.nbd, "v"), &fixture.volume, &answered);
            let load = scope.spawn(move || volume.load(client, 0..SECTORS, round, count));
            let out = server.verb(&["upgrade", &program]);
            let target = answered.load(Ordering::Relaxed) + 100;
            let is_over = until("a load, or its end", || {
                let over = load.is_finished();
                (over || answered.load(Ordering::Relaxed) >= target).then_some(over)
            });
            let took_over = out.status.success();
            kept += u64::from(!took_over);
            if !took_over {
                assert!(!is_over, "round {round}: {}{}", text(&out.stderr), server.log());
            }
            server.kill();
            load.join().unwrap()
        });
        assert_eq!(load.failed, 0, "round {round}: {}", server.log());
        server = fixture.serve();
        fixture.check(&server);
    }
    assert!(kept >= ROUNDS / 2, "{kept} of {ROUNDS} kept: this shows nothing");
}

/// A server of a path that is gone prevents neither an upgrade nor the way back from one.
#[test]
fn a_path_may_be_down() {
    if !has("nbdkit") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("disk"), vec![7; 1 << 20]).unwrap();
    let disk = path("disk").display().to_string();
    let [mut a, b] = ["a", "b"].map(|name| Nbdkit::start(path(name), &["file", &disk]));
    let table = format!("m=0 2048 multipath 0 0 1 1 round-robin 0 2 1 {} 1 {} 1", a.uri(), b.uri());
    let mut server = Server::start_with(&[&table], &["--check-paths", "1"]);
    let mut client = Client::connect(&server.nbd, "m");
    a.kill();
    // It runs out of descriptors when the devices of the old server are removed already.
    let bad = path("bad");
    fs::write(&bad, format!("#!/bin/sh\nulimit -n 14; exec {UDM} \"$@\"\n")).unwrap();
    fs::set_permissions(&bad, fs::Permissions::from_mode(0o755)).unwrap();
    let mut serves = |server: &Server| {
        for _ in 0..4 {
            client.ask(NbdCommand::Read, 0, 512);
            assert_eq!(client.error(), 0, "{}", server.log());
        }
    };
    server.refuses(&["upgrade", &bad.display().to_string()]);
    serves(&server);
    server.upgrade(&[UDM]);
    serves(&server);
    until("a failed path", || server.says(&["status", "m"]).contains(" F ").then_some(()));
    a.again();
    until("a path that is back", || (!server.says(&["status", "m"]).contains(" F ")).then_some(()));
    serves(&server);
}

/// A request that does not complete prevents the upgrade, and goes on.
#[test]
fn a_request_that_hangs_is_not_given_up() {
    let server = Server::start_with(&["q=null:size=1M", "slow=0 2048 delay null:size=1M 0 7000"], &[]);
    let (mut slow, mut quick) = (Client::connect(&server.nbd, "slow"), Client::connect(&server.nbd, "q"));
    slow.ask(NbdCommand::Read, 0, 512);
    sleep(Duration::from_millis(100));
    let said = server.refuses(&["upgrade", UDM]);
    assert_eq!(
        said,
        "udm: upgrade: 1 client has requests in flight that do not complete: Connection timed out\n"
    );
    quick.ask(NbdCommand::Read, 0, 512);
    assert_eq!((quick.error(), slow.error()), (0, 0));
}

/// A program of today takes over from a server of version 0.1.0: its state was recorded.
#[test]
fn the_state_of_an_older_release_is_taken_over() {
    let recorded = include_str!("../src/serve/upgrade/recorded_format_1.json");
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("disk.img"), image(SECTORS)).unwrap();
    let device = format!("disk={}", path("disk.img").display());
    let state_folder = path("state").display().to_string();
    // The files of that server, and the record of its snapshot.
    let server = Server::start_with(&[&device], &["--state", &state_folder]);
    server.says(&["snapshot", "create", "snap", "--of", "disk"]);
    drop(server);

    let listeners = ["c.sock", "nbd.sock", "vm.sock"].map(|name| UnixListener::bind(path(name)).unwrap());
    let clients = [UnixStream::pair().unwrap(), UnixStream::pair().unwrap()];
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut new = udm(&["serve", "--device", &device, "--cores", "0", "--state", &state_folder]);
    new.arg("--unix").arg(path("nbd.sock")).arg("--socket").arg(path("c.sock"));
    new.arg("--take-over-on-stdin").stdin(OwnedFd::from(theirs));
    let mut new = new.spawn().unwrap();
    let mut channel = TestChannel(ours);
    assert_eq!(channel.receive()["ready"]["formats"], Value::from(vec![1, 2, 3, 4, 5, 6]));
    let state = recorded.replace("/srv/udm", folder.path().to_str().unwrap());
    channel.send(&format!("{{\"state\":{state}}}"));
    let sockets = listeners.iter().map(AsFd::as_fd).chain(clients.iter().map(|(_, theirs)| theirs.as_fd()));
    channel.send_descriptors(&sockets.collect::<Vec<_>>());
    assert_eq!(channel.receive(), "prepared");
    channel.send("\"commit\"");
    assert_eq!(channel.receive(), "serving");

    // The second client had sent the first four bytes of a request.
    let mut client = &clients[1].0;
    let request = NbdRequestHeader {
        flags: CommandFlags::empty(),
        command: NbdCommand::Read,
        cookie: 7,
        offset: 512,
        len: 512,
    };
    client.write_all(&request.encode()[4..]).unwrap();
    let mut reply = [0; 16 + 512];
    client.read_exact(&mut reply).unwrap();
    assert_eq!((&reply[4..8], &reply[16..]), (&[0; 4][..], &image(2)[512..]));
    let verb = |args: &[&str]| text(&udm(args).env("UDM_SOCKET", path("c.sock")).output().unwrap().stdout);
    assert_eq!(verb(&["ls"]), "disk\t(254:0)\nsnap\t(254:1)\ntop\t(254:2)\n");
    assert!(verb(&["snapshot", "list"]).contains("snap"));
    kill_process(Pid::from_child(&new), Signal::TERM).unwrap();
    assert!(new.wait().unwrap().success());
    assert!(!path("nbd.sock").exists() && !path("vm.sock").exists(), "the sockets are its own");
}

/// The old server's end of the socket between two servers.
struct TestChannel(UnixStream);

impl TestChannel {
    fn send(&mut self, text: &str) {
        self.0.write_all(&(text.len() as u32).to_le_bytes()).unwrap();
        self.0.write_all(text.as_bytes()).unwrap();
    }

    fn send_descriptors(&mut self, all: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(all)));
        sendmsg(&self.0, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::empty()).unwrap();
    }

    fn receive(&mut self) -> Value {
        let mut len = [0; 4];
        self.0.set_read_timeout(Some(PATIENCE)).unwrap();
        self.0.read_exact(&mut len).unwrap();
        let mut text = vec![0; u32::from_le_bytes(len) as usize];
        self.0.read_exact(&mut text).unwrap();
        serde_json::from_slice(&text).unwrap()
    }
}

/// A server that is told to end during an upgrade ends, and so does the new program.
#[test]
fn the_end_of_a_server_ends_its_upgrade() {
    if needs_no_sandbox("a program of the test") {
        return;
    }
    let (fixture, mut server) = UpgradeFixture::new();
    let pid = fixture.path("pid");
    let script = format!("echo $$ > {}; sleep 0.5; exec {UDM} \"$@\"", pid.display());
    let program = fixture.program("new", &script);
    let mut verb = udm(&["upgrade", &program]).env("UDM_SOCKET", &server.socket).spawn().unwrap();
    let new: u32 = until("the new program", || fs::read_to_string(&pid).ok()?.trim().parse().ok());
    kill_process(Pid::from_child(&server.child), Signal::TERM).unwrap();
    assert!(server.child.wait().unwrap().success());
    assert!(!verb.wait().unwrap().success());
    until("the end of the new program", || (!Path::new(&format!("/proc/{new}")).exists()).then_some(()));
    assert!(UnixStream::connect(&server.nbd).is_err() && !server.nbd.exists());
    fixture.check(&fixture.serve());
}
