//! The shutdown of a server: at once if possible, with a message and a time limit if not, and at
//! once after a second signal.

mod support;

use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use support::nbd::Client;
use support::shutdown::ShutdownServer;
use support::{Server, udm, until};
use udm_wire::nbd::{ESHUTDOWN, NbdCommand};

/// A disk on which every request takes an hour.
const HUNG: &str = "d=0 2048 linear null:size=1M,irqmode=2,completion_nsec=3600000000000 0";

/// Requests that nothing can complete any more: no path, or a suspended device, also below another
/// one. They fail, delayed requests complete, and the shutdown is regular.
#[test]
fn what_is_held_does_not_hold_up_the_end() {
    let mp = "mp=0 2048 multipath 1 queue_if_no_path 0 1 1 round-robin 0 1 1 mem:1M 1";
    let mut server = ShutdownServer::start(
        &[],
        &[
            mp,
            "s=0 2048 linear mem:2M 0",
            "top=0 1024 linear @s 8\n1024 512 zero",
            "slow=0 2048 delay mem:3M 0 3600000",
        ],
    );
    server.verb(&["message", "mp", "0", "fail_path", "mem:1M"]);
    let mut clients: Vec<_> = ["mp", "s", "top", "slow"].map(|name| server.client(name)).into();
    server.verb(&["suspend", "s"]);
    for c in &mut clients {
        c.ask(NbdCommand::Read, 0, 512);
        c.ask(NbdCommand::Write, 0, 512);
    }
    // Waits until the requests are queued. For some of them there is no status.
    until("the requests wait", || {
        let status = udm(&["status", "slow"])
            .env("UDM_SOCKET", server.folder.path().join("control.sock"))
            .output()
            .unwrap();
        String::from_utf8_lossy(&status.stdout).contains("delay 1 1 0").then_some(())
    });
    std::thread::sleep(Duration::from_millis(100));
    server.signal(Signal::TERM);
    for (i, c) in clients.iter_mut().enumerate() {
        // The read is the first of the delayed requests, as in its queue.
        let errors = [c.error(), c.error()];
        assert_eq!(errors, if i == 3 { [0, 0] } else { [ESHUTDOWN, ESHUTDOWN] }, "client {i}");
    }
    assert_eq!(server.wait().code(), Some(0), "{}", server.output());
    assert!(server.is_clean());
    assert!(!server.output().contains("udm: left"), "{}", server.output());
}

/// With storage that hangs, the server says that it waits, and a second signal ends it.
#[test]
fn a_second_signal_ends_at_once() {
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let mut server = ShutdownServer::start(&["--stop-timeout", "3600"], &[HUNG]);
        let mut c = server.client("d");
        (0..3).for_each(|_| c.ask(NbdCommand::Read, 0, 512));
        std::thread::sleep(Duration::from_millis(100));
        server.signal(signal);
        until("a word", || server.output().contains("udm: waiting for 3 requests on d (").then_some(()));
        assert!(server.child.try_wait().unwrap().is_none() && server.is_clean());
        server.signal(signal);
        assert_eq!(server.wait().code(), Some(status), "{}", server.output());
        assert!(server.output().contains("ended at once"), "{}", server.output());
    }
}

#[test]
fn the_end_has_a_limit_and_says_what_it_leaves() {
    let mut server = ShutdownServer::start(&["--stop-timeout", "1"], &[HUNG, "ok=0 8 linear mem:4k 0"]);
    let mut c = server.client("d");
    c.ask(NbdCommand::Write, 0, 512);
    std::thread::sleep(Duration::from_millis(100));
    server.signal(Signal::TERM);
    assert_eq!(server.wait().code(), Some(1));
    let output = server.output();
    assert!(
        output.contains("udm: stopped waiting after 1 s: 1 request on d; flushed data is safe; "),
        "{output}"
    );
    assert!(server.is_clean());
}

/// A client that reads no replies and one that sends nothing do not delay the shutdown for long.
#[test]
fn idle_and_deaf_clients_do_not_hold_up_the_end() {
    let mut server = ShutdownServer::start(&["--stop-timeout", "60"], &["d=0 65536 linear null:size=32M 0"]);
    let (idle, mut deaf) = (server.client("d"), server.client("d"));
    let silent = UnixStream::connect(server.folder.path().join("nbd.sock")).unwrap();
    (0..2).for_each(|_| deaf.ask(NbdCommand::Read, 0, 32 << 20));
    std::thread::sleep(Duration::from_millis(100));
    let begin = Instant::now();
    server.signal(Signal::HUP);
    assert_eq!(server.wait().code(), Some(0), "{}", server.output());
    assert!(begin.elapsed() < Duration::from_secs(50), "the deaf one is given up before the limit");
    drop((idle, deaf, silent));
}

/// Acknowledged writes survive the end of the server, flushed or not: they are in the system's page
/// cache.
#[test]
fn what_was_acknowledged_is_there_after_the_end() {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let server = Server::start(&[&format!("d=0 2048 linear {} 0", image.path().display())]);
    let mut c = Client::connect(&server.nbd, "d");
    assert_eq!(c.one(NbdCommand::Write, 0, 64 << 10), 0);
    let mut server = server;
    kill_process(Pid::from_child(&server.child), Signal::TERM).unwrap();
    until("the end of the server", || server.child.try_wait().unwrap());
    assert!(fs::read(image.path()).unwrap()[..64 << 10].iter().all(|&b| b == 1));
}
