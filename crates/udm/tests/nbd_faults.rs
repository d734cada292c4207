//! Faults of NBD servers that must be distinguished from faults of the disk, of other paths, and of
//! udm itself.

mod support;

use rustix::process::{Pid, Signal};
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::sleep;
use std::time::Duration;
use support::nbd::Client;
use support::servers::{Nbdkit, ScriptedServer, request};
use support::{Server, has, text, udm, until};
use tempfile::TempDir;
use udm_wire::nbd::{NbdCommand as Ask, SimpleReply};

/// A server that accepts and sends nothing: a load and the start of a server wait for the deadline
/// of the path, and end before a load without a deadline, which has begun first.
#[test]
fn a_load_waits_for_as_long_as_the_deadline() {
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("silent");
    let _listener = UnixListener::bind(&socket).unwrap();
    let server = Server::start(&[]);
    let table =
        |deadline: &str| format!("0 2048 linear nbd+unix:///?socket={}{deadline} 0", socket.display());
    let mut longer = udm(&["create", "y", "--table", &table("")]);
    let mut longer =
        longer.env("UDM_SOCKET", &server.socket).stderr(std::process::Stdio::null()).spawn().unwrap();
    let output = server.refuses(&["create", "x", "--table", &table("&deadline=300ms")]);
    assert!(output.contains("no answer within 300ms"), "{output}");
    let device = format!("x={}", table("&deadline=300ms"));
    let out = udm(&["serve", "--unix", "-", "--cores", "0", "--device", &device]).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("no answer within 300ms"), "{}", text(&out.stderr));
    assert_eq!(longer.try_wait().unwrap(), None, "it waits for 10 s");
    longer.kill().unwrap();
    longer.wait().unwrap();
}

/// A path with a queue of depth four is stopped with writes in its socket. The requests waiting in
/// the queue are sent to another path.
#[test]
fn a_queue_lets_go_of_what_waits_for_a_silent_path() {
    if !has("nbdkit") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let disk = folder.path().join("disk");
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let disk = disk.display().to_string();
    let [a, b] = ["a", "b"].map(|name| Nbdkit::start(folder.path().join(name), &["file", &disk]));
    let uris = [&a, &b].map(|nbdkit| format!("{}&deadline=300ms&queue_depth=4 1", nbdkit.uri()));
    let table =
        format!("m=0 2048 multipath 1 queue_if_no_path 0 1 1 round-robin 0 2 1 {} {}", uris[0], uris[1]);
    let server = Server::start_with(&[&table], &["--check-paths", "off", "--cores", "0"]);
    let mut client = Client::connect(&server.nbd, "m");
    (0..4).for_each(|sector| assert_eq!(client.write(sector), 0));
    a.signal(Signal::STOP);
    for sector in 0..32 {
        client.ask(Ask::Write, sector * 512, 512);
    }
    for sector in 32..64 {
        client.ask(Ask::Read, sector * 512, 512);
    }
    // The queue of the silent path has four writes, which wait for the server.
    for _ in 0..60 {
        assert_eq!(client.answer().unwrap().1, 0);
    }
    a.signal(Signal::CONT);
    for _ in 0..4 {
        assert_eq!(client.answer().unwrap().1, 0);
    }
}

/// A server whose storage is lost answers each request with EIO, and its path fails. The path of a
/// server with one bad block does not fail.
#[test]
fn a_server_whose_storage_is_gone_is_a_failed_path() {
    for (all, gets, status) in [(true, 0, "F 1"), (false, 5, "A 0")] {
        let puppet = ScriptedServer::start(move |_, stream| {
            while let Some(asked) = request(stream) {
                let error = if all || asked.offset == 0 { 5 } else { 0 };
                let _ = stream.write_all(&SimpleReply { error, cookie: asked.cookie }.encode());
                if error == 0 && asked.command == Ask::Read {
                    let _ = stream.write_all(&vec![0; asked.len as usize]);
                }
            }
        });
        let groups = format!("round-robin 0 1 1 {} 1 round-robin 0 1 1 mem:1M 1", puppet.uri());
        let table = format!("m=0 2048 multipath 0 0 2 1 {groups}");
        let server = Server::start_with(&[&table], &["--check-paths", "off"]);
        let mut client = Client::connect(&server.nbd, "m");
        assert_eq!((client.read(0), client.write(0)), (gets, gets));
        let output = server.says(&["status", "m"]);
        assert!(output.contains(&format!("253:0 {status}")), "{output}");
    }
}

/// The server loses a write; the path is connected again at once and works. After its deadline the
/// write is sent again, and the path does not fail because of it.
#[test]
fn a_held_write_does_not_fail_a_path_that_works() {
    let puppet = ScriptedServer::start(move |number, stream| {
        // The first connection is that of the load.
        while let Some(asked) = request(stream) {
            if number == 1 && asked.offset == 0 {
                continue;
            }
            let _ = stream.write_all(&SimpleReply { error: 0, cookie: asked.cookie }.encode());
            if asked.command == Ask::Read {
                let _ = stream.write_all(&vec![0; asked.len as usize]);
            }
        }
    });
    let path = format!("{}&deadline=200ms&fence=wait:1s", puppet.uri());
    let table = format!("m=0 2048 multipath 0 0 1 1 round-robin 0 1 1 {path} 1");
    let server = Server::start_with(&[&table], &["--check-paths", "off", "--cores", "0"]);
    let mut client = Client::connect(&server.nbd, "m");
    client.ask(Ask::Write, 0, 512);
    until("the write is held", || server.log().contains("1 writes wait").then_some(()));
    let mut other = Client::connect(&server.nbd, "m");
    sleep(Duration::from_millis(150));
    until("another connection", || (other.write(9) == 0).then_some(()));
    server.says(&["message", "m", "0", "reinstate_path", &path]);
    until("a healthy path", || (other.write(9) == 0).then_some(()));
    let failures = server.log().matches("Failing path").count();
    assert_eq!(client.error(), 0, "it was sent again");
    assert_eq!(server.log().matches("Failing path").count(), failures, "{}", server.log());
}

/// udm is stopped with requests in flight for longer than the deadline of its paths. The replies
/// arrived meanwhile, so no path fails.
#[test]
fn a_pause_of_udm_fails_no_path() {
    if !has("nbdkit") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let disk = folder.path().join("disk");
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let disk = disk.display().to_string();
    let args = ["--filter=delay", "file", &disk, "rdelay=300ms", "wdelay=300ms"];
    let [a, b] = ["a", "b"].map(|name| Nbdkit::start(folder.path().join(name), &args));
    let table = format!("m=0 2048 multipath 0 0 1 1 round-robin 0 2 1 {} 1 {} 1", a.uri(), b.uri());
    let options = ["--path-deadline", "1", "--check-paths", "off", "--cores", "0"];
    let server = Server::start_with(&[&table], &options);
    let mut client = Client::connect(&server.nbd, "m");
    assert_eq!(client.read(0), 0);
    for _ in 0..2 {
        for sector in 0..8 {
            client.ask(if sector % 2 == 0 { Ask::Read } else { Ask::Write }, sector * 512, 512);
        }
        sleep(Duration::from_millis(50));
        support::signal(Pid::from_child(&server.child), Signal::STOP);
        sleep(Duration::from_millis(1500));
        support::signal(Pid::from_child(&server.child), Signal::CONT);
        for _ in 0..8 {
            assert_eq!(client.answer().unwrap().1, 0, "{}", server.log());
        }
    }
    assert!(!server.log().contains("Failing path"), "{}", server.log());
}

/// A server returns before the reconnect delay of udm has passed. A message reinstates the path,
/// and the next request uses it.
#[test]
fn a_path_that_is_reinstated_is_connected_to() {
    let down = Arc::new(AtomicBool::new(false));
    let is_down = Arc::clone(&down);
    let puppet = ScriptedServer::start(move |_, stream| {
        if !is_down.load(SeqCst) {
            // Ends with the first request after the server goes down.
            while let (false, Some(asked)) = (is_down.load(SeqCst), request(stream)) {
                if is_down.load(SeqCst) {
                    return;
                }
                let _ = stream.write_all(&SimpleReply { error: 0, cookie: asked.cookie }.encode());
                if asked.command == Ask::Read {
                    let _ = stream.write_all(&vec![0; asked.len as usize]);
                }
            }
        }
    });
    let path = puppet.uri();
    let table = format!("m=0 2048 multipath 0 0 1 1 round-robin 0 1 1 {path} 1");
    let server = Server::start_with(&[&table], &["--check-paths", "off", "--cores", "0"]);
    let mut client = Client::connect(&server.nbd, "m");
    assert_eq!(client.read(0), 0);
    let reinstate = || drop(server.says(&["message", "m", "0", "reinstate_path", &path]));
    down.store(true, SeqCst);
    // Each failure doubles the delay.
    for _ in 0..4 {
        assert_ne!(client.read(0), 0);
        reinstate();
    }
    assert_ne!(client.read(0), 0);
    down.store(false, SeqCst);
    reinstate();
    assert_eq!(client.read(0), 0, "{}", server.log());
}
