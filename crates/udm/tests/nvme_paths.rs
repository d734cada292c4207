//! Namespaces of NVMe/TCP controllers as disks and as paths: udm's own target below.

#[path = "nvme_paths/peers.rs"]
mod peers;
mod support;

use rustix::process::Signal;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};
use support::nbd::Client;
use support::servers::fio;
use support::stamps::{StampedVolume, image};
use support::{Server, has, signal, text, udm, until};
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, NbdCommand};

const SUBSYSTEM: &str = "nqn.2026-11.org.example:disks";
const SECTORS: usize = 8192;

/// A port that nothing listens on.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A target with device `a` over `disk`, at `address` (`HOST:PORT`), with this quiesce time in
/// seconds.
fn target(disk: &Path, address: &str, quiesce: &str) -> Server {
    let device = format!("a=0 {SECTORS} linear file:{}?exclusive=off 0", disk.display());
    let options = ["--nvme", address, "--nvme-subsystem", SUBSYSTEM, "--nvme-quiesce-time", quiesce];
    Server::start_with(&[&device], &options)
}

fn uri(port: u16, parameters: &str) -> String {
    format!("nvme+tcp://127.0.0.1:{port}/{SUBSYSTEM}/1{parameters}")
}

fn disk_in(folder: &TempDir) -> std::path::PathBuf {
    let disk = folder.path().join("disk");
    std::fs::write(&disk, image(SECTORS)).unwrap();
    disk
}

fn qemu_io(server: &Server, device: &str, commands: &[&str]) -> String {
    let commands = commands.iter().flat_map(|&command| ["-c", command]);
    let name = format!("nbd+unix:///{device}?socket={}", server.nbd.display());
    let out = Command::new("qemu-io").args(["-f", "raw"]).args(commands).arg(name).output().unwrap();
    text(&out.stdout) + &text(&out.stderr)
}

/// Each operation reaches the disk, with and without digests, with one queue for all cores and with
/// more, over IPv4 and IPv6.
#[test]
fn a_namespace_as_a_disk() {
    if !has("qemu-io") || !has("fio") {
        return;
    }
    for (address, parameters) in [
        ("127.0.0.1", ""),
        ("127.0.0.1", "?digest=header,data&queues=1&kato=1s"),
        ("127.0.0.1", "?digest=data"),
        ("[::1]", "?digest=header"),
    ] {
        let (folder, port) = (TempDir::new().unwrap(), free_port());
        let disk = disk_in(&folder);
        let _target = target(&disk, &format!("{address}:{port}"), "0");
        let table = format!("d=0 {SECTORS} linear nvme+tcp://{address}:{port}/{SUBSYSTEM}/1{parameters} 0");
        let server = Server::start_with(&[&table], &["--cores", "0,1"]);
        let out =
            fio(&server, "d", "--rw=randrw --size=1m --offset=2m --bs=512-64k --fsync=32").output().unwrap();
        assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
        let output = qemu_io(
            &server,
            "d",
            &[
                "write -P 5 4096 1M",
                "read -P 5 4096 1M",
                "write -f -P 6 100 300",
                "read -P 6 100 300",
                "write -z 8192 64k",
                "read -P 0 8192 64k",
                "discard 65536 64k",
                "aio_write -P 9 2M 1500k",
                "aio_flush",
                "read -P 9 2M 1500k",
                "flush",
            ],
        );
        assert!(!output.contains("rror") && !output.contains("ailed"), "{output}");
        let bytes = std::fs::read(&disk).unwrap();
        assert!(bytes[2 << 20..(2 << 20) + (1500 << 10)].iter().all(|&byte| byte == 9));
        assert!(bytes[100..400].iter().all(|&byte| byte == 6));
        assert!(!server.log().contains("WARN"), "{}", server.log());
    }
}

/// Prints a measured value.
fn report(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Measures the longest time of a request until `stop` is set.
fn longest(server: &Server, command: NbdCommand, sector: u64, stop: &AtomicBool) -> Duration {
    let mut client = Client::connect(&server.nbd, "m");
    let mut longest = Duration::ZERO;
    while !stop.load(SeqCst) {
        let begun = Instant::now();
        assert_eq!(client.one(command, sector * 512, 512), 0, "{}", server.log());
        longest = longest.max(begun.elapsed());
        sleep(Duration::from_millis(2));
    }
    longest
}

/// Two targets share a disk. In turn they are killed and started again, and stopped and continued,
/// under load. No request fails, and no read is stale.
#[test]
fn paths_that_fail_in_turn() {
    let folder = TempDir::new().unwrap();
    let disk = disk_in(&folder);
    let ports = [free_port(), free_port()];
    // A command that a target has taken before it is stopped lands when it continues. So the wait
    // of a write, two seconds and the quiesce time, is longer than the stop.
    let start = |port: u16| target(&disk, &format!("127.0.0.1:{port}"), "4");
    let mut targets = ports.map(start);
    let [a, b] = ports.map(|port| uri(port, "?kato=1s&deadline=2s"));
    let table = format!("m=0 {SECTORS} multipath 1 queue_if_no_path 0 1 1 round-robin 0 2 1 {a} 1 {b} 1");
    let options = ["--check-paths", "1", "--path-deadline", "0.5", "--hedge-reads", "--cores", "0,1"];
    let mut server = Server::start_with(&[&table], &options);
    let volume = StampedVolume::new(SECTORS, 1 << 40);
    let (answered, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let stalls = thread::scope(|scope| {
        let client = || Client::connect(&server.nbd, "m");
        let loads: Vec<_> = [0..SECTORS / 2, SECTORS / 2..SECTORS - 16]
            .into_iter()
            .enumerate()
            .map(|(seed, range)| {
                let (client, volume, answered) = (client(), &volume, &answered);
                scope.spawn(move || volume.load(client, range, seed as u64, answered))
            })
            .collect();
        const LAST: u64 = SECTORS as u64 - 8;
        let reads = scope.spawn(|| longest(&server, NbdCommand::Read, LAST, &stop));
        let writes = scope.spawn(|| longest(&server, NbdCommand::WriteZeroes, LAST + 1, &stop));
        for round in 0..2 {
            for (at, port) in ports.into_iter().enumerate() {
                let before = answered.load(SeqCst);
                if round == 0 {
                    targets[at].kill();
                    sleep(Duration::from_millis(1500));
                    targets[at] = start(port);
                } else {
                    signal(targets[at].pid(), Signal::STOP);
                    sleep(Duration::from_millis(3500));
                    signal(targets[at].pid(), Signal::CONT);
                }
                let path = [&a, &b][at];
                let is_up = || {
                    let status = server.says(&["status", "m"]);
                    let state = status.split(&format!("{path} ")).nth(1).unwrap_or(&status).to_owned();
                    (state.starts_with('A') || status.matches(" A ").count() >= 3).then_some(())
                };
                until("a path that works again", is_up);
                until("more requests", || (answered.load(SeqCst) > before + 100).then_some(()));
            }
        }
        stop.store(true, SeqCst);
        let stalls = (reads.join().unwrap(), writes.join().unwrap());
        signal(server.pid(), Signal::KILL);
        for load in loads {
            assert_eq!(load.join().unwrap().failed, 0, "{}", server.log());
        }
        stalls
    });
    report(&format!("longest read {:?}, longest write {:?}", stalls.0, stalls.1));
    assert!(stalls.0 < Duration::from_millis(1500), "a read waited for {:?}: {}", stalls.0, server.log());
    assert!(stalls.1 < Duration::from_secs(9), "a write waited for {:?}: {}", stalls.1, server.log());
    server.kill();
    let server = Server::start(&[&format!("m=0 {SECTORS} linear file:{}?exclusive=off 0", disk.display())]);
    volume.settle(&server.nbd, "m", SECTORS - 8..SECTORS);
}

/// A target is stopped with a write in its socket. The write is sent through the other path when the
/// target's keep-alive timer must have expired, and the same block is written again. The target
/// continues, and does not write the old data.
#[test]
fn a_stopped_controller_does_not_write_over_newer_data() {
    let folder = TempDir::new().unwrap();
    let disk = disk_in(&folder);
    let ports = [free_port(), free_port()];
    let targets = ports.map(|port| target(&disk, &format!("127.0.0.1:{port}"), "0"));
    let [a, b] = ports.map(|port| uri(port, "?kato=1s"));
    let groups = format!("round-robin 0 1 1 {a} 1 round-robin 0 1 1 {b} 1");
    let table = format!("m=0 {SECTORS} multipath 1 queue_if_no_path 0 2 1 {groups}");
    let server = Server::start(&[&table]);
    let mut client = Client::connect(&server.nbd, "m");
    let mut write = |byte: u8| {
        let cookie =
            client.send(CommandFlags::empty(), NbdCommand::Write, 4096, 4096, &[byte; 4096]).unwrap();
        let (answered, error, _) = client.answer().unwrap();
        assert_eq!((answered, error), (cookie, 0), "{}", server.log());
    };
    write(1);
    signal(targets[0].pid(), Signal::STOP);
    let begun = Instant::now();
    write(2);
    let stall = begun.elapsed();
    report(&format!("a write of a stopped controller waited for {stall:?}"));
    assert!(stall > Duration::from_millis(1900), "two keep-alive timeouts: {stall:?}");
    assert!(stall < Duration::from_secs(6), "{stall:?}: {}", server.log());
    write(3);
    let block = || std::fs::read(&disk).unwrap()[4096];
    assert_eq!(block(), 3);
    signal(targets[0].pid(), Signal::CONT);
    let why = "the keep-alive timer has expired";
    until("the end of the old association", || targets[0].log().contains(why).then_some(()));
    sleep(Duration::from_millis(300));
    assert_eq!(block(), 3, "{}", targets[0].log());
}

/// Two namespaces in one table are refused; so is a controller that returns with another one.
#[test]
fn another_namespace_is_refused() {
    let folder = TempDir::new().unwrap();
    let disk = disk_in(&folder);
    let port = free_port();
    let address = format!("127.0.0.1:{port}");
    let two = format!("b=0 {SECTORS} linear mem:4M 0");
    let options = ["--nvme", &address, "--nvme-subsystem", SUBSYSTEM];
    let device = format!("a=0 {SECTORS} linear {} 0", disk.display());
    let mut target = Server::start_with(&[&device, &two], &options);
    let server = Server::start(&[]);
    let other = format!("nvme+tcp://127.0.0.1:{port}/{SUBSYSTEM}/2");
    let table = format!("0 {SECTORS} multipath 0 0 1 1 round-robin 0 2 1 {} 1 {other} 1", uri(port, ""));
    let why = server.refuses(&["create", "m", "--table", &table]);
    assert!(why.contains("paths lead to different disks") && why.contains("uuid."), "{why}");
    let missing = format!("0 {SECTORS} linear nvme+tcp://127.0.0.1:{port}/{SUBSYSTEM}/7 0");
    let why = server.refuses(&["create", "m", "--table", &missing]);
    assert!(why.contains("namespace"), "{why}");
    let stranger = format!("0 {SECTORS} linear nvme+tcp://127.0.0.1:{port}/nqn.2026-11.org.example:x/1 0");
    let why = server.refuses(&["create", "m", "--table", &stranger]);
    assert!(why.contains("refuses the connection"), "{why}");
    server.says(&["create", "d", "--table", &format!("0 {SECTORS} linear {} 0", uri(port, "?kato=1s"))]);
    let mut client = Client::connect(&server.nbd, "d");
    assert_eq!(client.read(5), 0);
    target.kill();
    // The first namespace is another disk now.
    let _target = Server::start_with(&[&two, &device], &options);
    until("a refusal", || server.log().contains("it is another namespace").then_some(()));
    assert_ne!(client.read(5), 0);
}

/// ANA: an inaccessible path fails and returns; a namespace that grows is seen.
#[test]
fn the_controller_reports_changes() {
    let port = free_port();
    let options = ["--nvme", &format!("127.0.0.1:{port}"), "--nvme-subsystem", SUBSYSTEM];
    let target = Server::start_with(&["a=0 8192 linear mem:8M 0"], &options);
    let server = Server::start(&[&format!("d=0 8192 linear {} 0", uri(port, "?kato=1s"))]);
    let mut client = Client::connect(&server.nbd, "d");
    assert_eq!(client.read(5), 0);
    target.says(&["nvme", "ana", "a", "inaccessible"]);
    until("the state", || server.log().contains("ANA state inaccessible").then_some(()));
    assert_ne!(client.read(5), 0);
    target.says(&["nvme", "ana", "a", "non-optimized"]);
    until("the state", || server.log().contains("ANA state non-optimized").then_some(()));
    assert_eq!(client.read(5), 0);
    target.says(&["load", "a", "--table", "0 16384 linear mem:8M 0"]);
    target.says(&["resume", "a"]);
    until("the size", || server.log().contains("4194304 bytes and is 8388608 now").then_some(()));
    server.says(&["load", "d", "--table", &format!("0 16384 linear {} 0", uri(port, "?kato=1s"))]);
    server.says(&["resume", "d"]);
    assert_eq!(client.read(5), 0);
}

/// A proxy that flips one bit of every `every` bytes from the target, until it is switched off.
struct CorruptingProxy {
    port: u16,
    is_on: Arc<AtomicBool>,
    flips: Arc<AtomicU64>,
}

impl CorruptingProxy {
    fn start(target: u16, every: usize) -> CorruptingProxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (is_on, flips) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let shared = (Arc::clone(&is_on), Arc::clone(&flips));
        thread::spawn(move || {
            for host in listener.incoming() {
                let (host, controller) = (host.unwrap(), TcpStream::connect(("127.0.0.1", target)));
                let Ok(controller) = controller else { continue };
                let (up, down) = (host.try_clone().unwrap(), controller.try_clone().unwrap());
                thread::spawn(move || copy(up, controller, |_| {}));
                let (is_on, flips) = (Arc::clone(&shared.0), Arc::clone(&shared.1));
                let mut left = every;
                thread::spawn(move || {
                    copy(down, host, |bytes| {
                        if !is_on.load(SeqCst) {
                            return;
                        }
                        if bytes.len() <= left {
                            left -= bytes.len();
                            return;
                        }
                        bytes[left] ^= 1 << (left % 8);
                        left = every + left % 4096;
                        flips.fetch_add(1, SeqCst);
                    });
                });
            }
        });
        CorruptingProxy { port, is_on, flips }
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream, mut change: impl FnMut(&mut [u8])) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(n) = from.read(&mut bytes)
        && n > 0
    {
        change(&mut bytes[..n]);
        if to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// With digests, no flipped bit reaches a reader: each ends the association, which is made again.
#[test]
fn digests_find_every_flipped_bit() {
    let folder = TempDir::new().unwrap();
    let disk = disk_in(&folder);
    let port = free_port();
    let _target = target(&disk, &format!("127.0.0.1:{port}"), "0");
    let proxy = CorruptingProxy::start(port, 200_000);
    let path = uri(proxy.port, "?digest=header,data&kato=500ms&deadline=1s");
    let table = format!("m=0 {SECTORS} multipath 1 queue_if_no_path 0 1 1 round-robin 0 1 1 {path} 1");
    let mut server = Server::start_with(&[&table], &["--check-paths", "1"]);
    let (volume, answered) = (StampedVolume::new(SECTORS, 1 << 40), AtomicU64::new(0));
    proxy.is_on.store(true, SeqCst);
    thread::scope(|scope| {
        let client = Client::connect(&server.nbd, "m");
        let load = scope.spawn(|| volume.load(client, 0..SECTORS, 7, &answered));
        until("flipped bits", || (proxy.flips.load(SeqCst) >= 4).then_some(()));
        proxy.is_on.store(false, SeqCst);
        let before = answered.load(SeqCst);
        until("requests after them", || (answered.load(SeqCst) > before + 50).then_some(()));
        signal(server.pid(), Signal::KILL);
        assert_eq!(load.join().unwrap().failed, 0, "{}", server.log());
    });
    let log = server.log();
    assert!(log.contains("digest") && log.contains("connected again"), "{log}");
    server.kill();
    let server = Server::start(&[&format!("m=0 {SECTORS} linear file:{}?exclusive=off 0", disk.display())]);
    volume.settle(&server.nbd, "m", 0..0);
}

/// What is not a controller is refused in one line, and a controller that sends garbage later ends
/// one association only.
#[test]
fn a_hostile_controller_is_refused() {
    for (answer, why) in [
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "unknown type"),
        (&[0x01, 0, 128, 0, 128, 0, 0, 0, 9, 0][..], "closed"),
        (&[0x03, 0, 24, 0, 24, 0, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], "fatal error 1"),
        (
            &[0x07, 0, 24, 24, 255, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            "expected ICResp",
        ),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let hostile = thread::spawn(move || {
            let (mut host, _) = listener.accept().unwrap();
            host.read_exact(&mut [0; 128]).unwrap();
            host.write_all(answer).unwrap();
            host.shutdown(Shutdown::Write).unwrap();
            let _ = host.read(&mut [0; 64]);
        });
        let mut create = udm(&["serve", "--cores", "0", "--unix"]);
        let folder = TempDir::new().unwrap();
        create.arg(folder.path().join("n")).arg("--socket").arg(folder.path().join("c"));
        create.env("UDM_STATE", folder.path().join("s"));
        let out = create.arg("--device").arg(format!("d=0 8 linear {} 0", uri(port, ""))).output().unwrap();
        let said = text(&out.stderr);
        assert!(!out.status.success() && said.contains(why), "{said}");
        hostile.join().unwrap();
    }
}
