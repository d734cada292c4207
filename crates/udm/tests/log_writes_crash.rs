//! After a kill of the server, the log of a log-writes target holds everything that was
//! acknowledged: flushes and FUA writes of four clients, and marks.

mod support;

use std::collections::HashMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use support::nbd::Client;
use support::{Server, UDM, text, udm, until};
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, NbdCommand as Nbd};

/// Rounds of the kill, without UDM_KILL_ROUNDS in the environment.
const ROUNDS: u64 = 4;
const CLIENTS: u64 = 4;
/// Blocks of a client.
const BLOCKS: u64 = 16;
const BLOCK: usize = 4096;

/// A server with a logged device `d` of 1 MiB, on two cores.
struct LoggedServer {
    child: Child,
    folder: TempDir,
    socket: PathBuf,
}

impl LoggedServer {
    fn start() -> LoggedServer {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, len| {
            let path = folder.path().join(name);
            std::fs::File::create(&path).unwrap().set_len(len).unwrap();
            path.display().to_string()
        };
        let (disk, log) = (file("disk", 1 << 20), file("log", 256 << 20));
        let socket = folder.path().join("control");
        let mut command = udm(&["serve", "--device", &format!("d=0 2048 log-writes {disk} {log}")]);
        command.arg("--unix").arg(folder.path().join("nbd")).arg("--socket").arg(&socket);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        until("a server that answers", || {
            assert!(child.try_wait().unwrap().is_none(), "the server ended");
            UnixStream::connect(&socket).ok()
        });
        LoggedServer { child, folder, socket }
    }

    fn mark(&self, text: &str) -> std::process::Output {
        udm(&["message", "d", "0", "mark", text]).env("UDM_SOCKET", &self.socket).output().unwrap()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Output of `udm log-writes` in the folder.
    fn log_writes(&self, args: &[&str]) -> String {
        let out =
            Command::new(UDM).arg("log-writes").args(args).current_dir(self.folder.path()).output().unwrap();
        assert!(out.status.success(), "{args:?}: {}", text(&out.stderr));
        text(&out.stdout)
    }
}

impl Drop for LoggedServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a request and waits for the reply; an error if the server has ended.
fn request(client: &mut Client, flags: CommandFlags, kind: Nbd, block: u64, data: &[u8]) -> io::Result<()> {
    client.send(flags, kind, block * BLOCK as u64, data.len() as u64, data)?;
    let (_, error, _) = client.answer()?;
    assert_eq!(error, 0, "the request failed");
    Ok(())
}

/// Data that was acknowledged to a client as durable.
#[derive(Default)]
struct Acknowledged {
    /// The last value of each block.
    values: HashMap<u64, u64>,
    flushes: u64,
}

/// Writes, flushes and FUA writes until the server has ended.
fn load(socket: &Path, nr: u64) -> Acknowledged {
    let mut acknowledged = Acknowledged::default();
    let mut written = HashMap::new();
    let mut client = Client::connect(socket, "d");
    const NONE: CommandFlags = CommandFlags::empty();
    for value in 1.. {
        let block = nr * BLOCKS + value * 7 % BLOCKS;
        let fua = value % 5 == 0;
        let data: Vec<u8> = value.to_be_bytes().repeat(BLOCK / 8);
        let flags = if fua { CommandFlags::FUA } else { NONE };
        if request(&mut client, flags, Nbd::Write, block, &data).is_err() {
            break;
        }
        written.insert(block, value);
        if fua {
            acknowledged.values.insert(block, value);
        }
        if value % 3 == 0 {
            if request(&mut client, NONE, Nbd::Flush, 0, &[]).is_err() {
                break;
            }
            acknowledged.flushes += 1;
            acknowledged.values.extend(&written);
        }
    }
    acknowledged
}

/// The log of a killed server has every acknowledged flush, FUA write and mark.
#[test]
fn a_killed_server_has_logged_what_it_acknowledged() {
    let rounds = std::env::var("UDM_KILL_ROUNDS").map_or(ROUNDS, |n| n.parse().unwrap());
    let (mut flushes, mut losses) = (0, Vec::new());
    for round in 0..rounds {
        let mut server = LoggedServer::start();
        let socket = server.folder.path().join("nbd");
        let clients: Vec<_> = (0..CLIENTS)
            .map(|nr| {
                let socket = socket.clone();
                std::thread::spawn(move || load(&socket, nr))
            })
            .collect();
        std::thread::sleep(Duration::from_millis(60 + round * 13 % 97));
        let marked = server.mark("seen").status.success();
        server.kill();
        let acknowledged: Vec<Acknowledged> =
            clients.into_iter().map(|client| client.join().unwrap()).collect();

        let list = server.log_writes(&["list", "log"]);
        let logged = list.lines().filter(|line| line.contains("flush")).count() as u64;
        server.log_writes(&["replay", "log", "state", "--size", "1M"]);
        let state = std::fs::read(server.folder.path().join("state")).unwrap();
        let acknowledged_flushes: u64 = acknowledged.iter().map(|acknowledged| acknowledged.flushes).sum();
        flushes += acknowledged_flushes;
        let mut lost = acknowledged_flushes.saturating_sub(logged);
        for (block, value) in acknowledged.iter().flat_map(|acknowledged| &acknowledged.values) {
            let at = *block as usize * BLOCK;
            let there = u64::from_be_bytes(state[at..at + 8].try_into().unwrap());
            lost += u64::from(there < *value);
        }
        if lost > 0 || (marked && !list.contains("mark \"seen\"")) {
            losses.push(format!("round {round}: {lost} lost of {acknowledged_flushes}, marked: {marked}"));
        }
    }
    assert!(losses.is_empty(), "{} of {rounds} rounds lost something: {losses:#?}", losses.len());
    assert!(flushes > rounds, "{flushes} flushes are no test");
}

/// Without a client, an acknowledged mark is in the log at once. The log begins at the first resume
/// of its table.
#[test]
fn a_mark_without_a_client_is_in_the_log() {
    let mut server = LoggedServer::start();
    let superblock = || std::fs::read(server.folder.path().join("log")).unwrap()[..8] != [0; 8];
    until("a log that is begun", || superblock().then_some(()));
    assert_eq!(server.log_writes(&["list", "log"]).lines().count(), 1, "a log, and empty");
    for mark in ["one", "two"] {
        let out = server.mark(mark);
        assert!(out.status.success(), "{}", text(&out.stderr));
    }
    server.kill();
    let list = server.log_writes(&["list", "log"]);
    assert!(list.ends_with("\n0 0 0 mark \"one\"\n1 0 0 mark \"two\"\n"), "{list}");
}

/// A regular shutdown closes the log, although no client has the device open.
#[test]
fn a_log_is_closed_without_a_client() {
    let mut server = LoggedServer::start();
    server.mark("one");
    let pid = rustix::process::Pid::from_child(&server.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(server.child.wait().unwrap().success());
    let list = server.log_writes(&["list", "log"]);
    assert!(list.ends_with("\n0 0 0 mark \"one\"\n1 0 0 mark \"dm-log-writes-end\"\n"), "{list}");
}

/// A mark without room in the log is refused with the reason.
#[test]
fn a_mark_that_does_not_fit_is_refused() {
    let server = LoggedServer::start();
    std::fs::File::create(server.folder.path().join("small")).unwrap().set_len(4 * 512).unwrap();
    let (disk, small) = (server.folder.path().join("disk"), server.folder.path().join("small"));
    let table = format!("0 2048 log-writes {} {}", disk.display(), small.display());
    for args in [&["load", "d", "--table", &table][..], &["resume", "d"]] {
        let out = udm(args).env("UDM_SOCKET", &server.socket).output().unwrap();
        assert!(out.status.success(), "{}", text(&out.stderr));
    }
    assert!(server.mark("one").status.success() && server.mark("two").status.success());
    for _ in 0..2 {
        let output = text(&server.mark("three").stderr);
        assert!(output.contains("Ran out of space on the logdev"), "{output}");
    }
    let status = udm(&["status", "d"]).env("UDM_SOCKET", &server.socket).output().unwrap();
    assert_eq!(text(&status.stdout), "0 2048 log-writes 2 2 logging_disabled\n");
}

/// The device with the log and a device over it get new tables at the same time, under writes. A
/// retired lane still logs its requests.
#[test]
fn tables_change_above_and_below_a_log() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::File::create(at("disk")).unwrap().set_len(2 << 20).unwrap();
    std::fs::File::create(at("log")).unwrap().set_len(1 << 30).unwrap();
    let tables = [format!("0 4096 log-writes {} {}", at("disk"), at("log")), "0 4096 linear @l 0".to_owned()];
    let server = Server::start(&[&format!("l={}", tables[0]), &format!("u={}", tables[1])]);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2_u64)
            .map(|half| {
                let mut client = Client::connect(&server.nbd, "u");
                let is_over = &is_over;
                scope.spawn(move || {
                    let mut written = 0;
                    while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                        for at in 0..8 {
                            client.ask(Nbd::Write, (half << 20) | (((written + at) % 15) << 16), 65536);
                        }
                        (0..8).for_each(|_| assert_eq!(client.error(), 0));
                        written += 8;
                    }
                    written
                })
            })
            .collect();
        let reload = |name: &'static str, table: &str| {
            for _ in 0..120 {
                server.says(&["load", name, "--table", table]);
                server.says(&["resume", name, "--timeout", "30"]);
            }
        };
        let others: Vec<_> = ["l", "u"]
            .into_iter()
            .zip(&tables)
            .map(|(name, table)| scope.spawn(move || reload(name, table)))
            .collect();
        others.into_iter().for_each(|other| other.join().unwrap());
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(writers.into_iter().all(|writer| writer.join().unwrap() > 0));
    });
}
