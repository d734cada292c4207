//! NBD servers that stop answering while they have writes: stopped, and continued later.

mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::Duration;
use support::nbd::Client;
use support::servers::{Nbdkit, ScriptedServer, request};
use support::{Server, has, needs_no_sandbox, until};
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, NbdCommand, NbdRequestHeader, SimpleReply};

const BLOCK: u64 = 4096;

/// Two servers of one file, and a multipath device over both; the first is used while it works.
struct SilentFixture {
    server: Server,
    a: Nbdkit,
    _b: Nbdkit,
    disk: File,
    folder: TempDir,
}

impl SilentFixture {
    /// `silence` has the deadline parameters for the URI of the first server; `FOLDER` in it stands
    /// for the folder of the fixture.
    fn new(silence: &str) -> Option<SilentFixture> {
        if !has("nbdkit") {
            return None;
        }
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("disk");
        let disk = File::options().create(true).truncate(true).read(true).write(true).open(&path).unwrap();
        disk.set_len(64 << 20).unwrap();
        let path = path.display().to_string();
        // With several threads, the thread that sees the end of the connection sometimes keeps the
        // others from requests that they have read before.
        let args = ["-t", "1", "file", &path];
        let [a, b] = ["a", "b"].map(|name| Nbdkit::start(folder.path().join(name), &args));
        let silence = silence.replace("FOLDER", &folder.path().display().to_string());
        let first = format!("{}&{silence}", a.uri());
        let groups = format!("round-robin 0 1 1 {first} 1 round-robin 0 1 1 {} 1", b.uri());
        let table = format!("m=0 131072 multipath 1 queue_if_no_path 0 2 1 {groups}");
        let server = Server::start(&[&table]);
        Some(SilentFixture { server, a, _b: b, disk, folder })
    }

    fn client(&self) -> Client {
        Client::connect(&self.server.nbd, "m")
    }

    /// Writes the command for `fence=exec:FOLDER/off`, which ends the first server.
    fn command(&self, text: &str) {
        let pid = self.a.child.as_ref().unwrap().id();
        let path = self.folder.path().join("off");
        // Written elsewhere and renamed: a file that is open for writing cannot be executed.
        let new = path.with_extension("new");
        fs::write(&new, format!("#!/bin/sh\npid={pid}\n{text}\n")).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o700)).unwrap();
        fs::rename(&new, &path).unwrap();
    }

    /// The reasons why requests wait.
    fn waits(&self) -> Vec<String> {
        let status: Value = serde_json::from_str(&self.server.says(&["status", "m", "--json"])).unwrap();
        let stalls = status[0]["stalls"].as_array().unwrap();
        stalls.iter().map(|stall| stall["why"].as_str().unwrap().to_owned()).collect()
    }

    fn waiting(&self, text: &str) {
        let waits = || self.waits().iter().any(|why| why.contains(text));
        until(&format!("{text}: {}", self.server.log()), || waits().then_some(()));
    }

    /// Waits for a log line that contains `text`.
    fn says(&self, text: &str) {
        until(text, || self.server.log().contains(text).then_some(()));
    }

    fn block(&self, at: u64) -> u8 {
        let mut block = [0; BLOCK as usize];
        self.disk.read_exact_at(&mut block, at * BLOCK).unwrap();
        assert!(block.iter().all(|byte| *byte == block[0]), "a block is of one piece");
        block[0]
    }
}

/// Sends a write of a block of `byte`.
fn begin(client: &mut Client, at: u64, byte: u8) {
    let data = [byte; BLOCK as usize];
    client.send(CommandFlags::empty(), NbdCommand::Write, at * BLOCK, BLOCK, &data).unwrap();
}

fn write(client: &mut Client, at: u64, byte: u8) {
    begin(client, at, byte);
    assert_eq!(client.answer().unwrap().1, 0);
}

/// Ends the server, and waits until no process is left that could write.
const KILL: &str = "kill -KILL $pid; while grep -qs '^State:.[^Z]' /proc/$pid/status; do sleep 0.01; done";

/// A server is stopped with a write in its socket. The same block is written again through the
/// other path, and the server is continued. Returns the byte that the block then has.
fn write_after_fence(command: &str) -> Option<u8> {
    let rig = SilentFixture::new("deadline=200ms&fence=exec:FOLDER/off")?;
    rig.command(command);
    let mut client = rig.client();
    write(&mut client, 5, 1);
    rig.a.signal(Signal::STOP);
    write(&mut client, 5, 2);
    assert_eq!(rig.block(5), 2, "it went through the other path");
    write(&mut client, 5, 3);
    assert_eq!(rig.block(5), 3);
    rig.a.signal(Signal::CONT);
    // A killed process is a zombie by now; a process that was not killed gets its turn.
    let status = format!("/proc/{}/status", rig.a.child.as_ref().unwrap().id());
    let is_over = || fs::read_to_string(&status).is_ok_and(|status| status.contains("State:\tZ"));
    until(&format!("the server: {}", rig.server.log()), || (is_over() || rig.block(5) != 3).then_some(()));
    Some(rig.block(5))
}

#[test]
fn a_fenced_server_does_not_write_over_newer_data() {
    if needs_no_sandbox("a command of the test") {
        return;
    }
    let Some(left) = write_after_fence(KILL) else { return };
    assert_eq!(left, 3);
}

/// The same with a command that succeeds and does nothing: the fault that the fence prevents.
#[test]
fn without_a_fence_it_does() {
    if needs_no_sandbox("a command of the test") {
        return;
    }
    let Some(left) = write_after_fence("exit 0") else { return };
    assert_eq!(left, 2, "the stopped server did not go on: the test beside this one shows nothing");
}

/// Without a fence, writes wait and the status says so; reads go to the other path. When the server
/// continues, it answers, and the writes complete.
#[test]
fn what_can_not_be_fenced_waits_and_says_why() {
    let Some(rig) = SilentFixture::new("deadline=200ms") else { return };
    let (mut writer, mut reader) = (rig.client(), rig.client());
    write(&mut writer, 5, 1);
    assert_eq!(rig.waits(), Vec::<String>::new());
    rig.a.signal(Signal::STOP);
    begin(&mut writer, 5, 2);
    begin(&mut writer, 6, 2);
    reader.ask(NbdCommand::Read, 7 * BLOCK, BLOCK);
    assert_eq!(reader.error(), 0, "a read is answered by the other path");
    write(&mut reader, 7, 9);
    let why = "2 writes wait until the server answers or closes the connection";
    assert_eq!(rig.waits(), [why]);
    rig.says(&format!("no answer for 200ms: {why}"));
    assert_eq!((rig.block(5), rig.block(7)), (1, 9));
    rig.a.signal(Signal::CONT);
    for _ in 0..2 {
        assert_eq!(writer.answer().unwrap().1, 0);
    }
    write(&mut writer, 5, 3);
    assert_eq!((rig.waits(), rig.block(5), rig.block(6)), (vec![], 3, 2));
    rig.says("all 2 writes that waited were answered");
    // A killed server closes its connection, and its system calls have ended.
    rig.server.says(&["message", "m", "0", "reinstate_path", "253:0"]);
    rig.server.says(&["message", "m", "0", "switch_group", "1"]);
    write(&mut writer, 8, 4);
    rig.a.signal(Signal::STOP);
    begin(&mut writer, 8, 5);
    rig.waiting("1 writes wait");
    rig.a.signal(Signal::KILL);
    assert_eq!(writer.answer().unwrap().1, 0);
    assert_eq!((rig.waits(), rig.block(8)), (vec![], 5));
}

/// A command that fails is run again; until then writes wait.
#[test]
fn a_fence_that_fails_is_tried_again() {
    if needs_no_sandbox("a command of the test") {
        return;
    }
    let Some(rig) = SilentFixture::new("deadline=200ms&fence=exec:FOLDER/off") else { return };
    rig.command("exit 3");
    let mut client = rig.client();
    write(&mut client, 5, 1);
    rig.a.signal(Signal::STOP);
    begin(&mut client, 5, 2);
    rig.waiting("off (failed 1 times: ");
    assert_eq!(rig.block(5), 1);
    assert!(rig.waits()[0].contains("exit status: 3"), "{:?}", rig.waits());
    rig.command(KILL);
    assert_eq!(client.answer().unwrap().1, 0);
    assert_eq!((rig.waits(), rig.block(5)), (vec![], 2));
    rig.says("fenced: waiting writes that fail over: 1");
}

/// A server that stops by itself is waited for.
#[test]
fn a_time_is_a_fence() {
    let Some(rig) = SilentFixture::new("deadline=200ms&fence=wait:1500ms") else { return };
    let mut client = rig.client();
    write(&mut client, 5, 1);
    rig.a.signal(Signal::STOP);
    begin(&mut client, 5, 2);
    rig.waiting("the server answers or 1500ms have passed");
    rig.a.signal(Signal::KILL);
    assert_eq!(rig.block(5), 1, "a close proves nothing here");
    assert_eq!(client.answer().unwrap().1, 0);
    assert_eq!(rig.block(5), 2);
}

/// More data than the socket buffer holds. Unsent writes go to the other path at once. A partly
/// sent write is sent to its end, so that a continued server can answer it.
#[test]
fn a_write_that_was_sent_in_part() {
    let Some(rig) = SilentFixture::new("deadline=200ms") else { return };
    const LEN: u64 = 1 << 20;
    const WRITES: u64 = 24;
    let mut client = rig.client();
    write(&mut client, 0, 1);
    rig.a.signal(Signal::STOP);
    for n in 0..WRITES {
        let data = vec![n as u8 + 1; LEN as usize];
        client.send(CommandFlags::empty(), NbdCommand::Write, n * LEN, LEN, &data).unwrap();
    }
    rig.waiting("writes wait");
    // Unsent writes are answered while the server is stopped.
    let held: u64 = rig.waits()[0].split_once(' ').unwrap().0.parse().unwrap();
    assert!((1..WRITES).contains(&held), "{held} of {WRITES} held: the socket took none or all");
    for _ in held..WRITES {
        assert_eq!(client.answer().unwrap().1, 0);
    }
    rig.a.signal(Signal::CONT);
    for _ in 0..held {
        assert_eq!(client.answer().unwrap().1, 0);
    }
    for at in 0..WRITES * LEN / BLOCK {
        assert_eq!(u64::from(rig.block(at)), at * BLOCK / LEN + 1);
    }
}

/// A server that violates the protocol may still perform its writes until it closes the connection.
#[test]
fn a_server_that_lies_is_waited_for() {
    let close = Arc::new(AtomicBool::new(false));
    let may_close = Arc::clone(&close);
    let puppet = ScriptedServer::start(move |number, stream| {
        if number != 1 {
            return;
        }
        assert!(request(stream).is_some_and(|request| request.command == NbdCommand::Write));
        stream.write_all(&[0xaa; 64]).unwrap();
        until("leave to close", || may_close.load(SeqCst).then_some(()));
    });
    let groups = format!("round-robin 0 1 1 {} 1 round-robin 0 1 1 mem:1M 1", puppet.uri());
    let server = Server::start(&[&format!("m=0 2048 multipath 0 0 2 1 {groups}")]);
    let mut client = Client::connect(&server.nbd, "m");
    begin(&mut client, 5, 2);
    until("a write that waits", || {
        let why = "1 writes wait until the server answers or closes the connection";
        server.says(&["status", "m", "--json"]).contains(why).then_some(())
    });
    let mut other = Client::connect(&server.nbd, "m");
    write(&mut other, 6, 3);
    close.store(true, SeqCst);
    assert_eq!(client.answer().unwrap().1, 0);
    until("a line", || {
        let line = "the server closed the connection: waiting writes that fail over: 1, answered: 0";
        server.log().contains(line).then_some(())
    });
}

/// A server that violated the protocol gets no more requests, and its connection is shut down for
/// writing. It completes its request and closes.
#[test]
fn a_server_that_lies_is_told_to_end() {
    let (_puppet, server) = serve_scripted("1h", |stream| {
        if request(stream).is_some() {
            let _ = stream.write_all(&[0xaa; 64]);
            // Reads the rest of the write, and the end of the stream.
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    write(&mut Client::connect(&server.nbd, "m"), 5, 2);
    until("a line", || server.log().contains("waiting writes that fail over: 1").then_some(()));
}

/// A multipath device over a server that does `act` with its first connection, and over one that
/// works.
fn serve_scripted(
    deadline: &str,
    act: impl Fn(&mut UnixStream) + Send + Sync + 'static,
) -> (ScriptedServer, Server) {
    let puppet = ScriptedServer::start(move |_, stream| act(stream));
    let first = format!("{}&deadline={deadline}", puppet.uri());
    let groups = format!("round-robin 0 1 1 {first} 1 round-robin 0 1 1 mem:1M 1");
    (puppet, Server::start(&[&format!("m=0 2048 multipath 0 0 2 1 {groups}")]))
}

/// Answers a read with zeroes.
fn zero(stream: &mut UnixStream, request: &NbdRequestHeader) {
    let mut out = SimpleReply { error: 0, cookie: request.cookie }.encode().to_vec();
    out.resize(out.len() + request.len as usize, 0);
    let _ = stream.write_all(&out);
}

/// The last of many requests is answered long after the deadline, by a server that answers one
/// after the other.
#[test]
fn a_busy_server_is_not_silent() {
    let (_puppet, server) = serve_scripted("1s", |stream| {
        while let Some(request) = request(stream) {
            thread::sleep(Duration::from_millis(200));
            zero(stream, &request);
        }
    });
    let mut client = Client::connect(&server.nbd, "m");
    (0..8).for_each(|at| client.ask(NbdCommand::Read, at * BLOCK, BLOCK));
    (0..8).for_each(|_| assert_eq!(client.error(), 0));
    assert!(!server.log().contains("Failing path"), "{}", server.log());
}

/// A server answers all requests but one: that one is abandoned nevertheless, and read through the
/// other path.
#[test]
fn a_request_that_a_busy_server_loses_is_given_up() {
    let (_puppet, server) = serve_scripted("100ms", |stream| {
        assert!(request(stream).is_some_and(|lost| lost.offset == 9 * BLOCK));
        while let Some(request) = request(stream) {
            zero(stream, &request);
        }
    });
    let mut client = Client::connect(&server.nbd, "m");
    client.ask(NbdCommand::Read, 9 * BLOCK, BLOCK);
    until("the answer of the other path", || {
        client.ask(NbdCommand::Read, 0, BLOCK);
        let (at, error) = client.reply();
        assert_eq!(error, 0);
        (at == 9 * BLOCK).then_some(())
    });
    let line = "others are answered, and one request is not for 400ms";
    until(line, || server.log().contains(line).then_some(()));
}
