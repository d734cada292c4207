//! Two servers that share a subsystem and a folder (`--nvme-peers`): what a killed, stopped, cut off
//! or remote one costs the writes of a host.

use super::support::nbd::Client;
use super::support::{Server, signal, until};
use super::{SECTORS, SUBSYSTEM, disk_in, free_port, report, uri};
use rustix::process::Signal;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, NbdCommand};

/// A target with device `a` over the table `line`, which shares `folder`.
fn peer(line: &str, port: u16, quiesce: &str, folder: &Path) -> Server {
    let address = format!("127.0.0.1:{port}");
    let folder = folder.display().to_string();
    let options = [
        "--nvme",
        &address,
        "--nvme-subsystem",
        SUBSYSTEM,
        "--nvme-quiesce-time",
        quiesce,
        "--nvme-peers",
        &folder,
    ];
    Server::start_with(&[&format!("a=0 {SECTORS} linear {line} 0")], &options)
}

/// Two targets over one disk, and a host that writes through the first one.
struct TwoPeers {
    folder: TempDir,
    targets: [Server; 2],
    host: Server,
    client: Client,
}

impl TwoPeers {
    fn start(quiesce: &str) -> TwoPeers {
        let ports = [free_port(), free_port()];
        TwoPeers::start_at(ports, ports, quiesce)
    }

    /// As [`TwoPeers::start`]; the host connects to other ports than those of the targets.
    fn start_at(ports: [u16; 2], reached: [u16; 2], quiesce: &str) -> TwoPeers {
        let folder = TempDir::new().unwrap();
        let line = format!("file:{}?exclusive=off", disk_in(&folder).display());
        let peers = folder.path().join("peers");
        let targets = ports.map(|port| peer(&line, port, quiesce, &peers));
        TwoPeers::over(folder, targets, reached)
    }

    fn over(folder: TempDir, targets: [Server; 2], reached: [u16; 2]) -> TwoPeers {
        let [a, b] = reached.map(|port| uri(port, "?kato=1s"));
        let groups = format!("round-robin 0 1 1 {a} 1 round-robin 0 1 1 {b} 1");
        let table = format!("m=0 {SECTORS} multipath 1 queue_if_no_path 0 2 1 {groups}");
        let host = Server::start(&[&table]);
        let client = Client::connect(&host.nbd, "m");
        TwoPeers { folder, targets, host, client }
    }

    /// Sends a write of `byte`. Returns its cookie.
    fn send(&mut self, byte: u8) -> u64 {
        self.client.send(CommandFlags::empty(), NbdCommand::Write, 4096, 4096, &[byte; 4096]).unwrap()
    }

    /// Waits for the answer of the write, which must succeed.
    fn answered(&mut self, cookie: u64) {
        let (answered, error, _) = self.client.answer().unwrap();
        assert_eq!((answered, error), (cookie, 0), "{}", self.host.log());
    }

    fn write(&mut self, byte: u8) {
        let cookie = self.send(byte);
        self.answered(cookie);
    }

    fn block(&self) -> u8 {
        std::fs::read(self.folder.path().join("disk")).unwrap()[4096]
    }

    /// Writes that were sent elsewhere: after a reset, and after the time.
    fn released(&self) -> (u64, u64) {
        let all: Value = serde_json::from_str(&self.host.http("GET", "/v1/nvme", "").2).unwrap();
        let sum =
            |key: &str| all["paths"].as_array().unwrap().iter().map(|one| one[key].as_u64().unwrap()).sum();
        (sum("writes_after_reset"), sum("writes_after_time"))
    }

    /// Stops the first target with a write in its socket, and kills it. Returns the cookie of the
    /// write and the time of the kill.
    fn kill_with_a_write(&mut self, byte: u8) -> (u64, Instant) {
        signal(self.targets[0].pid(), Signal::STOP);
        let cookie = self.send(byte);
        sleep(Duration::from_millis(100));
        let begun = Instant::now();
        self.targets[0].kill();
        (cookie, begun)
    }
}

/// Waits for a line of the log, which is written a little later.
fn until_logged(server: &Server, line: &str) {
    until(line, || server.log().contains(line).then_some(()));
}

/// A server is killed with a write in its socket. Its lock is free, so the other one answers at
/// once, although the quiesce time is 30 s. The killed server comes back with other numbers for its
/// controllers, and then the other one is killed.
#[test]
fn a_killed_server_costs_a_moment() {
    let ports = [free_port(), free_port()];
    let mut peers = TwoPeers::start_at(ports, ports, "30");
    peers.write(1);
    let (cookie, begun) = peers.kill_with_a_write(2);
    peers.answered(cookie);
    let stall = begun.elapsed();
    report(&format!("a write of a killed server waited for {stall:?}"));
    assert!(stall < Duration::from_secs(10), "{stall:?}: {}{}", peers.host.log(), peers.targets[1].log());
    assert_eq!((peers.block(), peers.released()), (2, (1, 0)), "{}", peers.host.log());
    until_logged(&peers.targets[1], "has ended");
    let folder = peers.folder.path().join("peers");
    let line = format!("file:{}?exclusive=off", peers.folder.path().join("disk").display());
    peers.targets[0] = peer(&line, ports[0], "30", &folder);
    let first = uri(ports[0], "");
    until("a path that is back", || {
        let all: Value = serde_json::from_str(&peers.host.http("GET", "/v1/nvme", "").2).unwrap();
        let path = all["paths"].as_array().unwrap().iter().find(|one| one["uri"] == *first).cloned()?;
        (path["state"] == "live").then_some(())
    });
    peers.host.says(&["message", "m", "0", "reinstate_path", &uri(ports[0], "?kato=1s")]);
    peers.targets.swap(0, 1);
    let (cookie, begun) = peers.kill_with_a_write(3);
    peers.answered(cookie);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}: {}", begun.elapsed(), peers.host.log());
    assert_eq!((peers.block(), peers.released()), (3, (2, 0)));
}

/// A stopped server has its lock and answers nothing: the write waits for its time. When the server
/// continues, it does not write the old data.
#[test]
fn a_stopped_server_is_waited_for() {
    let mut peers = TwoPeers::start("1");
    peers.write(1);
    signal(peers.targets[0].pid(), Signal::STOP);
    let begun = Instant::now();
    peers.write(2);
    let stall = begun.elapsed();
    report(&format!("a write of a stopped server waited for {stall:?}"));
    assert!(stall > Duration::from_millis(2900), "two keep-alive timeouts and the quiesce time: {stall:?}");
    assert_eq!(peers.released(), (0, 1), "{}", peers.host.log());
    peers.write(3);
    assert_eq!(peers.block(), 3);
    signal(peers.targets[0].pid(), Signal::CONT);
    until("the end of the old controller", || {
        let list = peers.targets[0].says(&["nvme", "ls"]);
        (list.matches("  controller ").count() <= 1).then_some(())
    });
    sleep(Duration::from_millis(500));
    assert_eq!(peers.block(), 3, "{}", peers.targets[0].log());
}

/// A host loses its connection to a server that runs. The other server asks it, and the write waits
/// for the keep-alive timeout but not for the quiesce time.
#[test]
fn a_server_that_runs_is_asked() {
    let ports = [free_port(), free_port()];
    let proxy = SilentProxy::start(ports[0]);
    let mut peers = TwoPeers::start_at(ports, [proxy.port, ports[1]], "30");
    peers.write(1);
    proxy.is_silent.store(true, SeqCst);
    let begun = Instant::now();
    peers.write(2);
    let stall = begun.elapsed();
    report(&format!("a write of a server that is cut off waited for {stall:?}"));
    assert!(stall < Duration::from_secs(10), "{stall:?}: {}{}", peers.host.log(), peers.targets[1].log());
    assert_eq!((peers.block(), peers.released()), (2, (1, 0)), "{}", peers.host.log());
    until_logged(&peers.targets[1], "was reset by its server");
}

/// A killed server has used a disk of another server, which may still carry out its write: the write
/// waits for its time.
#[test]
fn a_killed_server_with_a_remote_disk_is_waited_for() {
    let folder = TempDir::new().unwrap();
    let disk = disk_in(&folder);
    let below = Server::start(&[&format!("d={}", disk.display())]);
    let export = format!("nbd+unix:///d?socket={}", below.nbd.display());
    let (ports, shared) = ([free_port(), free_port()], folder.path().join("peers"));
    let targets = ports.map(|port| peer(&export, port, "1", &shared));
    let mut peers = TwoPeers::over(folder, targets, ports);
    peers.write(1);
    let (cookie, begun) = peers.kill_with_a_write(2);
    peers.answered(cookie);
    let stall = begun.elapsed();
    assert!(stall > Duration::from_millis(1900), "{stall:?}: {}", peers.host.log());
    assert_eq!(peers.released(), (0, 1), "{}", peers.host.log());
    until_logged(&peers.targets[1], "has ended, but has used nbd");
    until_logged(&peers.targets[1], "is no disk of this machine");
}

/// A proxy that goes silent: it keeps its connections, and drops what it gets.
struct SilentProxy {
    port: u16,
    is_silent: Arc<AtomicBool>,
}

impl SilentProxy {
    fn start(target: u16) -> SilentProxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, is_silent) = (listener.local_addr().unwrap().port(), Arc::new(AtomicBool::new(false)));
        let silent = Arc::clone(&is_silent);
        thread::spawn(move || {
            for host in listener.incoming() {
                let (host, controller) = (host.unwrap(), TcpStream::connect(("127.0.0.1", target)));
                let Ok(controller) = controller else { continue };
                let (up, down) = (host.try_clone().unwrap(), controller.try_clone().unwrap());
                for (from, to) in [(up, controller), (down, host)] {
                    let silent = Arc::clone(&silent);
                    thread::spawn(move || copy_until_silent(from, to, &silent));
                }
            }
        });
        SilentProxy { port, is_silent }
    }
}

fn copy_until_silent(mut from: TcpStream, mut to: TcpStream, is_silent: &AtomicBool) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(n) = from.read(&mut bytes)
        && n > 0
    {
        if !is_silent.load(SeqCst) && to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    // The end of a connection is not passed on either.
    while is_silent.load(SeqCst) {
        sleep(Duration::from_millis(50));
    }
}
