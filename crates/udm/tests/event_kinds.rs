//! Events that need some preparation: paths that are held, refused or slow, merges, stripes; and
//! listeners that read nothing.

mod support;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use support::listener::EventListener;
use support::nbd::Client;
use support::{Server, until};
use tempfile::TempDir;
use udm_wire::nbd::NbdCommand;

/// Disks of 1 MiB in a folder.
fn disks(names: &[&str]) -> (TempDir, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let make = |name: &&str| {
        let path: PathBuf = folder.path().join(name);
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let paths = names.iter().map(make).collect();
    (folder, paths)
}

/// Waits for the next event of a kind.
fn next(listener: &mut EventListener, kind: &str) -> Value {
    loop {
        let event = listener.next();
        if event["kind"] == kind {
            return event;
        }
    }
}

fn line(event: &Value) -> &str {
    event["line"].as_str().unwrap()
}

fn set_len(path: &str, len: u64) {
    File::options().write(true).open(path).unwrap().set_len(len).unwrap();
}

#[test]
fn a_better_group_is_gone_back_to() {
    let (folder, disks) = disks(&["a", "b"]);
    let conf = folder.path().join("mp.conf");
    std::fs::write(&conf, "defaults {\n failback immediate\n}\n").unwrap();
    let table = format!(
        "mp=0 2048 multipath 0 0 2 1 round-robin 0 1 1 {} 1 round-robin 0 1 1 {} 1",
        disks[0], disks[1]
    );
    let options = ["--check-paths", "1", "--multipath-conf", conf.to_str().unwrap()];
    let server = Server::start_with(&[&table], &options);
    let mut listener = EventListener::start(&server, None);
    let mut client = Client::connect(&server.nbd, "mp");
    server.says(&["message", "mp", "0", "fail_path", "253:0"]);
    client.read(0);
    let event = next(&mut listener, "failback");
    assert_eq!((&event["device"], &event["group"]), (&"mp".into(), &1.into()));
    assert_eq!(line(&event), "back to group 1, which is better");
}

#[test]
fn a_path_that_is_held_and_one_that_is_refused() {
    let (_folder, disks) = disks(&["a", "b"]);
    let table = format!("mp=0 2048 multipath 0 0 1 1 round-robin 0 2 1 {} 1 {} 1", disks[0], disks[1]);
    let server = Server::start_with(&[&table], &["--check-paths", "1"]);
    let mut listener = EventListener::start(&server, None);
    // The file becomes too short, so the next check refuses the failed path.
    set_len(&disks[0], 4096);
    server.says(&["message", "mp", "0", "fail_path", "253:0"]);
    let refused = next(&mut listener, "path-refused");
    assert_eq!((&refused["device"], &refused["path"]), (&"mp".into(), &"253:0".into()));
    let output = format!("path 253:0 ({}) stays failed: it is shorter than ", disks[0]);
    assert!(line(&refused).starts_with(&output), "{refused}");
    server.says(&["multipath", "fail", "path", "253:0"]);
    let held = next(&mut listener, "path-held");
    assert_eq!(held["path"], "253:0");
    assert!(line(&held).ends_with("stays failed: by command, and no check brings it back"), "{held}");
    set_len(&disks[0], 1 << 20);
    server.says(&["multipath", "reinstate", "path", "253:0"]);
    assert_eq!(next(&mut listener, "path-reinstated")["path"], "253:0");
}

/// Reads with 32 requests in flight until `done`.
fn read_until(server: &Server, export: &str, done: &AtomicBool) {
    let mut client = Client::connect(&server.nbd, export);
    (0..32).for_each(|at| client.ask_read(at));
    while !done.load(Relaxed) {
        let (offset, error) = client.reply();
        assert_eq!(error, 0);
        client.ask(NbdCommand::Read, offset, 512);
    }
}

#[test]
fn a_slow_path_is_ejected_and_admitted_again() {
    let (_folder, disks) = disks(&["a", "b"]);
    let slow = format!("0 2048 delay {} 0 40", disks[0]);
    let mp = format!("mp=0 2048 multipath 2 queue_mode bio 0 1 1 round-robin 0 2 1 @slow 1 {} 1", disks[1]);
    let server = Server::start_with(&[&format!("slow={slow}"), &mp], &["--eject-slow-paths"]);
    let mut listener = EventListener::start(&server, None);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| read_until(&server, "mp", &done));
        // Ends the reader even if the test fails.
        let _end = SetOnDrop(&done);
        let ejected = next(&mut listener, "path-ejected");
        assert_eq!((&ejected["device"], &ejected["path"]), (&"mp".into(), &"254:0".into()));
        assert!(line(&ejected).ends_with("much slower than the others: out of use for 10s"), "{ejected}");
        server.says(&["load", "slow", "--table", &slow.replace("delay", "linear").replace(" 0 40", " 0")]);
        server.says(&["resume", "slow"]);
        server.says(&["rename", "slow", "mended"]);
        let admitted = next(&mut listener, "path-admitted");
        assert_eq!(admitted["path"], "254:0");
        // The event and the log use the new name.
        let output = "path 254:0 (mended) is no slower than the others: in use again";
        assert_eq!(line(&admitted), output);
        // The log is written by another thread.
        let output = format!("multipath: mp: {output}\n");
        until("the line in the log", || server.log().contains(&output).then_some(()));
    });
}

/// Sets the flag when it is dropped.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn a_merge_that_fails_and_one_that_is_done() {
    let (_folder, disks) = disks(&["disk", "store"]);
    let low = format!("0 2048 linear {} 0", disks[0]);
    let server = Server::start(&[
        &format!("low={low}"),
        "o=0 2048 snapshot-origin @low",
        &format!("s=0 2048 snapshot @low {} P 8", disks[1]),
    ]);
    let mut listener = EventListener::start(&server, None);
    let mut client = Client::connect(&server.nbd, "s");
    (0..16).for_each(|at| assert_eq!(client.write(at * 16), 0));
    drop(client);
    until("the end of the client", || server.verb(&["remove", "s"]).status.success().then_some(()));
    // The origin rejects writes.
    let failing = format!("0 2048 flakey {} 0 0 60 1 error_writes", disks[0]);
    server.says(&["load", "low", "--table", &failing]);
    server.says(&["resume", "low"]);
    server.says(&["load", "o", "--table", &format!("0 2048 snapshot-merge @low {} P 8", disks[1])]);
    server.says(&["resume", "o"]);
    let failed = next(&mut listener, "merge-failed");
    assert_eq!((&failed["device"], line(&failed)), (&"o".into(), "the merge has stopped: an I/O error"));
    server.says(&["load", "low", "--table", &low]);
    server.says(&["resume", "low"]);
    // The merge continues at the next resume.
    server.says(&["suspend", "o"]);
    server.says(&["resume", "o"]);
    let done = next(&mut listener, "merge-done");
    assert_eq!((&done["device"], line(&done)), (&"o".into(), "all of the snapshot is in its origin"));
    assert_eq!(listener.kinds(1), ["o event"]);
    let mut sector = [0; 512];
    File::open(Path::new(&disks[0])).unwrap().read_exact(&mut sector).unwrap();
    assert_eq!(sector, [1; 512]);
}

#[test]
fn a_stripe_that_fails() {
    let (_folder, disks) = disks(&["a"]);
    let server = Server::start(&["bad=0 1024 error", &format!("d=0 2048 striped 2 8 @bad 0 {} 0", disks[0])]);
    let mut listener = EventListener::start(&server, None);
    let mut client = Client::connect(&server.nbd, "d");
    assert_eq!((client.read(8), client.read(0)), (0, 5));
    let failed = listener.next();
    assert_eq!(
        (&failed["kind"], &failed["device"], &failed["path"], line(&failed)),
        (&"stripe-failed".into(), &"d".into(), &"254:0".into(), "device 254:0 failed a request, 1 in all")
    );
    assert_eq!(listener.kinds(1), ["d event"]);
}

/// True if the server has closed the connection.
fn is_hung_up(listener: &EventListener) -> bool {
    let mut fds = [PollFd::new(listener.0.get_ref(), PollFlags::empty())];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
    fds[0].revents().contains(PollFlags::HUP)
}

/// A listener that reads nothing for 30 s is disconnected. A listener that reads stays connected,
/// even without events.
#[test]
fn who_reads_nothing_is_hung_up_on() {
    let name = "x".repeat(120);
    let server = Server::start(&[&format!("{name}=0 8 zero")]);
    let slot = format!("/v1/devices/{name}/table");
    let change = || {
        assert_eq!(server.http("PUT", &slot, r#"{"table":"0 8 zero"}"#).0, 204);
        assert_eq!(server.http("DELETE", &slot, "").0, 204);
    };
    let deaf = EventListener::start(&server, None);
    // More events than the two socket buffers hold.
    (0..1000).for_each(|_| change());
    let mut quiet = EventListener::start(&server, None);
    assert!(!is_hung_up(&deaf));
    std::thread::scope(|scope| {
        // Each comment is a line; at the end an event arrives.
        let hears = scope.spawn(|| quiet.kinds(1));
        until("that it is hung up on", || is_hung_up(&deaf).then_some(()));
        change();
        assert_eq!(hears.join().unwrap(), [format!("{name} loaded")]);
    });
}
