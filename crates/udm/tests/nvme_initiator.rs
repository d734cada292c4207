//! udm as a host of its own NVMe/TCP target: lost controllers that another path resets, and
//! authentication.

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};
use support::nbd::Client;
use support::stamps::image;
use support::{Server, until};
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, NbdCommand};

const SUBSYSTEM: &str = "nqn.2026-11.org.example:disks";
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555";
const SECTORS: usize = 8192;

/// A port that nothing listens on.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn uri(port: u16, parameters: &str) -> String {
    format!("nvme+tcp://127.0.0.1:{port}/{SUBSYSTEM}/1?hostnqn={HOST}{parameters}")
}

/// A target with device `a` over `disk` on these ports.
fn target(disk: &Path, ports: &[u16], more: &[&str]) -> Server {
    let device = format!("a=0 {SECTORS} linear file:{}?exclusive=off 0", disk.display());
    let addresses: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    let mut options = vec!["--nvme-subsystem", SUBSYSTEM];
    addresses.iter().for_each(|address| options.extend(["--nvme", address]));
    options.extend(more);
    Server::start_with(&[&device], &options)
}

/// A network between a host and a target. While it is cut, bytes wait in it, and nothing is closed.
struct Network {
    port: u16,
    is_cut: Arc<AtomicBool>,
}

impl Network {
    fn before(target: u16) -> Network {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let is_cut = Arc::new(AtomicBool::new(false));
        let shared = Arc::clone(&is_cut);
        thread::spawn(move || {
            for host in listener.incoming() {
                let (host, is_cut) = (host.unwrap(), Arc::clone(&shared));
                thread::spawn(move || {
                    wait_while(&is_cut);
                    let Ok(controller) = TcpStream::connect(("127.0.0.1", target)) else { return };
                    let (up, down) = (host.try_clone().unwrap(), controller.try_clone().unwrap());
                    let also = Arc::clone(&is_cut);
                    thread::spawn(move || copy(up, controller, &also));
                    copy(down, host, &is_cut);
                });
            }
        });
        Network { port, is_cut }
    }

    fn cut(&self) {
        self.is_cut.store(true, SeqCst);
    }

    fn mend(&self) {
        self.is_cut.store(false, SeqCst);
    }
}

fn wait_while(flag: &AtomicBool) {
    while flag.load(SeqCst) {
        sleep(Duration::from_millis(2));
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream, is_cut: &AtomicBool) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(n) = from.read(&mut bytes)
        && n > 0
    {
        wait_while(is_cut);
        if to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

struct Writer<'a> {
    client: Client,
    server: &'a Server,
}

impl Writer<'_> {
    fn write(&mut self, byte: u8) -> Duration {
        let begun = Instant::now();
        let cookie = self.send(byte);
        let (answered, error, _) = self.client.answer().unwrap();
        assert_eq!((answered, error), (cookie, 0), "{}", self.server.log());
        begun.elapsed()
    }

    fn send(&mut self, byte: u8) -> u64 {
        self.client.send(CommandFlags::empty(), NbdCommand::Write, 4096, 4096, &[byte; 4096]).unwrap()
    }
}

fn report(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Two portals of one target. The network to one is cut with a write in it. The other path resets
/// the controller at once, so that the write goes there long before the quiesce time of 30 s is
/// over. The held bytes arrive when the network is mended, and change nothing.
#[test]
fn another_path_resets_a_lost_controller() {
    let (folder, ports) = (TempDir::new().unwrap(), [free_port(), free_port()]);
    let disk = folder.path().join("disk");
    std::fs::write(&disk, image(SECTORS)).unwrap();
    let target = target(&disk, &ports, &[]);
    let network = Network::before(ports[0]);
    // The host gives up before the keep-alive timer of the target ends the controller.
    let [a, b] = [network.port, ports[1]].map(|port| uri(port, "&kato=10s&deadline=500ms"));
    let groups = format!("round-robin 0 1 1 {a} 1 round-robin 0 1 1 {b} 1");
    let server = Server::start(&[&format!("m=0 {SECTORS} multipath 1 queue_if_no_path 0 2 1 {groups}")]);
    let mut writer = Writer { client: Client::connect(&server.nbd, "m"), server: &server };
    writer.write(1);
    network.cut();
    let stall = writer.write(2);
    report(&format!("a write in a network that was cut waited for {stall:?}"));
    let done = "the lost controller was reset through";
    until("the reset in the log", || server.log().contains(done).then_some(()));
    assert!(stall < Duration::from_secs(5), "{stall:?}: {}", server.log());
    let controllers = target.says(&["nvme", "ls"]);
    assert_eq!(controllers.matches("  controller ").count(), 1, "the other one has ended: {controllers}");
    let samples = server.http("GET", "/metrics", "").2;
    let sample = |metric: &str, port: u16, label: &str| {
        let line =
            format!("udm_nvme_path_{metric}{{uri=\"nvme+tcp://127.0.0.1:{port}/{SUBSYSTEM}/1\"{label}}} ");
        let found = samples.lines().find_map(|sample| sample.strip_prefix(&*line));
        found.unwrap_or_else(|| panic!("no {line} in {samples}")).to_owned()
    };
    let [lost, other] = [network.port, ports[1]];
    assert_eq!([sample("up", lost, ""), sample("up", other, "")], ["0", "1"]);
    assert_eq!(sample("losses_total", lost, ""), "1");
    assert_eq!(sample("released_writes_total", lost, ",after=\"reset\""), "1");
    assert_eq!(sample("released_writes_total", lost, ",after=\"time\""), "0");
    assert_eq!(sample("resets_total", other, ",result=\"done\""), "1");
    let shown = server.says(&["nvme", "ls"]);
    assert!(
        shown.contains("down, optimized, 1 associations, 1 lost, 0 writes wait, 1 after a reset"),
        "{shown}"
    );
    writer.write(3);
    network.mend();
    until("the path again", || server.log().contains("connected again").then_some(()));
    sleep(Duration::from_millis(300));
    assert_eq!(std::fs::read(&disk).unwrap()[4096], 3, "{}", target.log());
}

/// A request of the lost controller is held by a suspended device. The write of the host is not
/// sent elsewhere until the device is resumed; then the end of the reset is told by an event.
#[test]
fn a_reset_waits_for_the_requests_of_the_lost_controller() {
    let (folder, ports) = (TempDir::new().unwrap(), [free_port(), free_port()]);
    let disk = folder.path().join("disk");
    std::fs::write(&disk, image(SECTORS)).unwrap();
    let target = target(&disk, &ports, &[]);
    let network = Network::before(ports[0]);
    let [a, b] = [network.port, ports[1]].map(|port| uri(port, "&kato=1s"));
    let groups = format!("round-robin 0 1 1 {a} 1 round-robin 0 1 1 {b} 1");
    let server = Server::start(&[&format!("m=0 {SECTORS} multipath 1 queue_if_no_path 0 2 1 {groups}")]);
    let mut writer = Writer { client: Client::connect(&server.nbd, "m"), server: &server };
    writer.write(1);
    target.says(&["suspend", "a"]);
    let cookie = writer.send(2);
    sleep(Duration::from_millis(300));
    network.cut();
    let why = "unanswered writes wait";
    until("the loss", || server.log().contains(why).then_some(()));
    sleep(Duration::from_millis(1500));
    let log = server.log();
    assert!(!log.contains("was reset through"), "{log}");
    assert!(server.says(&["status", "m", "--json"]).contains("is reset through another path"));
    target.says(&["resume", "a"]);
    let begun = Instant::now();
    assert_eq!(writer.client.answer().map(|(answered, error, _)| (answered, error)).unwrap(), (cookie, 0));
    report(&format!("the write completed {:?} after its controller had ended", begun.elapsed()));
    assert!(begun.elapsed() < Duration::from_secs(5), "{}", server.log());
    assert!(server.log().contains("was reset through"), "{}", server.log());
}

/// The only path is lost and returns with a new controller, which resets the old one.
#[test]
fn a_path_resets_its_own_old_controller() {
    let (folder, port) = (TempDir::new().unwrap(), free_port());
    let disk = folder.path().join("disk");
    std::fs::write(&disk, image(SECTORS)).unwrap();
    let target = target(&disk, &[port], &[]);
    let network = Network::before(port);
    let path = uri(network.port, "&kato=1s");
    let table = format!("m=0 {SECTORS} multipath 1 queue_if_no_path 0 1 1 round-robin 0 1 1 {path} 1");
    let server = Server::start_with(&[&table], &["--check-paths", "1"]);
    let mut writer = Writer { client: Client::connect(&server.nbd, "m"), server: &server };
    writer.write(1);
    network.cut();
    let cookie = writer.send(2);
    until("the loss", || server.log().contains("unanswered writes wait").then_some(()));
    network.mend();
    let begun = Instant::now();
    assert_eq!(writer.client.answer().map(|(answered, error, _)| (answered, error)).unwrap(), (cookie, 0));
    report(&format!("the write completed {:?} after the network was mended", begun.elapsed()));
    assert!(begun.elapsed() < Duration::from_secs(15), "{}", server.log());
    assert!(server.log().contains("was reset through"), "{}{}", server.log(), target.log());
}

/// Two servers with one disk: the other server cannot reset the controller, refuses, and the write
/// waits for its time.
#[test]
fn a_refused_reset_leaves_the_time() {
    let (folder, ports) = (TempDir::new().unwrap(), [free_port(), free_port()]);
    let disk = folder.path().join("disk");
    std::fs::write(&disk, image(SECTORS)).unwrap();
    let quiesce = ["--nvme-quiesce-time", "1"];
    let _targets = ports.map(|port| target(&disk, &[port], &quiesce));
    let network = Network::before(ports[0]);
    let [a, b] = [network.port, ports[1]].map(|port| uri(port, "&kato=1s"));
    let groups = format!("round-robin 0 1 1 {a} 1 round-robin 0 1 1 {b} 1");
    let server = Server::start(&[&format!("m=0 {SECTORS} multipath 1 queue_if_no_path 0 2 1 {groups}")]);
    let mut writer = Writer { client: Client::connect(&server.nbd, "m"), server: &server };
    writer.write(1);
    network.cut();
    let stall = writer.write(2);
    let log = server.log();
    assert!(stall > Duration::from_millis(2900), "two keep-alive timeouts and the quiesce time: {stall:?}");
    assert!(log.contains("was not reset through") && log.contains("refused with status 0x0/0x02"), "{log}");
}

const SECRET: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
const OTHER: &str = "DHHC-1:02:d4gmzh5i0I3npDMWAmJX/nAvAw7ioKmS2w44ceutFeObYDFG/r6zOB3UW0FLzevsI7XDJg==:";

/// The host proves itself, and asks for a proof, on each queue and after each loss; wrong secrets,
/// missing ones and files that everybody can read are refused in one line.
#[test]
fn secrets_in_both_directions() {
    let (folder, port) = (TempDir::new().unwrap(), free_port());
    let disk = folder.path().join("disk");
    std::fs::write(&disk, image(SECTORS)).unwrap();
    let secret = |name: &str, text: &str, mode: u32| {
        let path = folder.path().join(name);
        std::fs::write(&path, format!("{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path.display().to_string()
    };
    let (good, other, open) =
        (secret("good", SECRET, 0o600), secret("other", OTHER, 0o640), secret("open", SECRET, 0o644));
    let (of_host, of_controller) = (format!("{HOST}={good}"), format!("{HOST}={other}"));
    let secrets = ["--nvme-dhchap-secret", &of_host, "--nvme-dhchap-ctrl-secret", &of_controller];
    let start = || target(&disk, &[port], &secrets);
    let mut target = start();
    let server = Server::start_with(&[], &["--cores", "0,1"]);
    for (parameters, why) in [
        (String::new(), "the controller asks for authentication: give dhchap-secret=FILE"),
        (format!("&dhchap-secret={other}"), "does not accept the secret of dhchap-secret"),
        (format!("&dhchap-secret={good}&dhchap-ctrl-secret={good}"), "does not know the secret of"),
        (format!("&dhchap-secret={open}"), "everybody may use the file"),
        (format!("&dhchap-secret={good}x"), "No such file"),
        (format!("&dhchap-secret={SECRET}"), "tables are shown to everybody"),
        (format!("&dhchap-ctrl-secret={good}"), "dhchap-ctrl-secret needs dhchap-secret"),
    ] {
        let table = format!("0 {SECTORS} linear {} 0", uri(port, &parameters));
        let said = server.refuses(&["create", "d", "--table", &table]);
        assert!(said.contains(why) && !said.contains("ia6z"), "{parameters}: {said}");
    }
    for (device, parameters) in [
        ("one", format!("&dhchap-secret={good}&kato=1s")),
        ("two", format!("&dhchap-secret={good}&dhchap-ctrl-secret={other}&kato=1s&digest=header,data")),
    ] {
        let table = format!("0 {SECTORS} linear {} 0", uri(port, &parameters));
        server.says(&["create", device, "--table", &table]);
        let mut client = Client::connect(&server.nbd, device);
        assert_eq!(client.read(5), 0);
        target.kill();
        assert_ne!(client.read(5), 0);
        target = start();
        until("the path again", || (client.read(5) == 0).then_some(()));
    }
}

/// Writes `byte` through `device`. Returns the error, 0 for none.
fn write_through(server: &Server, device: &str, byte: u8) -> u32 {
    let mut client = Client::connect(&server.nbd, device);
    client.send(CommandFlags::empty(), NbdCommand::Write, 4096, 4096, &[byte; 4096]).unwrap();
    client.answer().unwrap().1
}

/// A path in each ANA state. In a state that forbids requests the path gets none, and others are
/// used; without another one, requests wait for a better state if the table queues, and fail
/// otherwise.
#[test]
fn each_ana_state() {
    let (folder, ports) = (TempDir::new().unwrap(), [free_port(), free_port()]);
    let disk = folder.path().join("disk");
    std::fs::write(&disk, image(SECTORS)).unwrap();
    let target = target(&disk, &ports, &[]);
    let [a, b] = ports.map(|port| uri(port, "&kato=5s"));
    let groups = format!("round-robin 0 1 1 {a} 1 round-robin 0 1 1 {b} 1");
    let tables = [
        format!("queues=0 {SECTORS} multipath 1 queue_if_no_path 0 2 1 {groups}"),
        format!("fails=0 {SECTORS} multipath 0 0 2 1 {groups}"),
    ];
    let server = Server::start_with(&[&*tables[0], &*tables[1]], &["--check-paths", "1"]);
    let requests = || -> u64 {
        let list = target.http("GET", "/metrics", "").2;
        let of = |line: &str| line.rsplit(' ').next().and_then(|number| number.parse::<u64>().ok());
        list.lines().filter(|line| line.starts_with("udm_nvme_host_requests_total{")).filter_map(of).sum()
    };
    let set = |state: &str, port: Option<u16>| {
        let port = port.map(|port| format!("127.0.0.1:{port}"));
        let only = port.iter().flat_map(|port| ["--port", port]);
        let words: Vec<&str> = ["nvme", "ana", "a", state].into_iter().chain(only).collect();
        target.says(&words);
    };
    let shows = |port: u16, state: &str| {
        let list: serde_json::Value = serde_json::from_str(&server.http("GET", "/v1/nvme", "").2).unwrap();
        let of = |one: &&serde_json::Value| one["uri"].as_str().unwrap().contains(&format!(":{port}/"));
        list["paths"].as_array().unwrap().iter().find(of).is_some_and(|one| one["ana"] == state)
    };
    assert_eq!((write_through(&server, "queues", 1), write_through(&server, "fails", 1)), (0, 0));
    for (state, byte) in [("non-optimized", 2), ("inaccessible", 3), ("persistent-loss", 4)] {
        set(state, Some(ports[0]));
        until("the state", || shows(ports[0], state).then_some(()));
        let before = requests();
        assert_eq!(
            (write_through(&server, "queues", byte), write_through(&server, "fails", byte)),
            (0, 0),
            "{state}"
        );
        assert_eq!(requests() - before, 2, "{state}: no request was tried twice");
        assert_eq!(std::fs::read(&disk).unwrap()[4096], byte);
    }
    let why = server.says(&["multipath", "show", "paths"]);
    assert!(why.contains("persistent-loss"), "{why}");
    for state in ["inaccessible", "persistent-loss"] {
        set(state, None);
        until("the states", || ports.iter().all(|port| shows(*port, state)).then_some(()));
        assert_ne!(write_through(&server, "fails", 5), 0, "{state}");
        let mut client = Client::connect(&server.nbd, "queues");
        client.send(CommandFlags::empty(), NbdCommand::Write, 4096, 4096, &[6; 4096]).unwrap();
        sleep(Duration::from_millis(300));
        set("optimized", None);
        assert_eq!(client.answer().unwrap().1, 0, "it has waited: {}", server.log());
        until("paths that work again", || (write_through(&server, "fails", 7) == 0).then_some(()));
    }
}

/// A network that changes the status of the next completion of an I/O queue to *authentication
/// required* (0x191), as a controller does that wants to authenticate its host again.
fn network_that_asks_for_authentication(target: u16, asks: &Arc<AtomicBool>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let asks = Arc::clone(asks);
    thread::spawn(move || {
        for host in listener.incoming() {
            let (host, controller) = (host.unwrap(), TcpStream::connect(("127.0.0.1", target)).unwrap());
            let (up, down) = (host.try_clone().unwrap(), controller.try_clone().unwrap());
            thread::spawn(move || copy(up, controller, &AtomicBool::new(false)));
            let asks = Arc::clone(&asks);
            thread::spawn(move || change_one_completion(down, host, &asks));
        }
    });
    port
}

/// Passes PDUs on, which have no digests. Changes the next completion after `asks` is set.
fn change_one_completion(mut from: TcpStream, mut to: TcpStream, asks: &AtomicBool) {
    let mut header = [0; 8];
    while from.read_exact(&mut header).is_ok() {
        let len = u32::from_le_bytes(header[4..].try_into().unwrap()) as usize;
        let mut rest = vec![0; len - header.len()];
        if from.read_exact(&mut rest).is_err() {
            break;
        }
        const RESPONSE: u8 = 5;
        if header[0] == RESPONSE && asks.swap(false, SeqCst) {
            rest[14..16].copy_from_slice(&(0x191_u16 << 1).to_le_bytes());
        }
        if to.write_all(&header).and_then(|()| to.write_all(&rest)).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// A controller asks for authentication again: the association is made again with a new proof, and
/// the write that it has refused is sent through another path.
#[test]
fn a_controller_that_asks_for_authentication_again() {
    let (folder, ports) = (TempDir::new().unwrap(), [free_port(), free_port()]);
    let disk = folder.path().join("disk");
    std::fs::write(&disk, image(SECTORS)).unwrap();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, SECRET).unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    let of_host = format!("{HOST}={}", secret.display());
    let target = target(&disk, &ports, &["--nvme-dhchap-secret", &of_host]);
    let asks = Arc::new(AtomicBool::new(false));
    let network = network_that_asks_for_authentication(ports[0], &asks);
    // No Keep Alive is on its way while a completion is changed.
    let [a, b] =
        [network, ports[1]].map(|port| uri(port, &format!("&kato=1m&dhchap-secret={}", secret.display())));
    let groups = format!("round-robin 0 1 1 {a} 1 round-robin 0 1 1 {b} 1");
    let server = Server::start(&[&format!("m=0 {SECTORS} multipath 1 queue_if_no_path 0 2 1 {groups}")]);
    // The queue stays connected while the client is.
    let mut writer = Writer { client: Client::connect(&server.nbd, "m"), server: &server };
    writer.write(1);
    asks.store(true, SeqCst);
    writer.write(2);
    assert!(!asks.load(SeqCst), "a completion was changed");
    assert_eq!(std::fs::read(&disk).unwrap()[4096], 2);
    let why = "the controller asks for authentication again";
    until("the reason in the log", || server.log().contains(why).then_some(()));
    until("a new association", || server.log().contains("connected again").then_some(()));
    server.says(&["message", "m", "0", "fail_path", &b]);
    server.says(&["message", "m", "0", "reinstate_path", &a]);
    writer.write(3);
    assert_eq!(std::fs::read(&disk).unwrap()[4096], 3, "{}", target.log());
}
