//! Moves to another host, over NBD with TLS and over NVMe/TCP: the server there is killed and comes
//! back, comes late, or never. Clients notice nothing, and the disk is in one place at each moment.

mod support;

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;
use support::moved_disk::{MovedDisk, REGION, SIZE, read, write};
use support::{Server, until};
use udm_wire::nbd::NbdCommand;

const SUBSYSTEM: &str = "nqn.2026-11.org.example:disks";

/// A way to the disk `there` of another host.
#[derive(Clone, Copy, Debug)]
enum Transport {
    Nbd,
    NbdTls,
    NvmeTcp,
}

const ALL: [Transport; 3] = [Transport::Nbd, Transport::NbdTls, Transport::NvmeTcp];

/// Another host, with a disk `there`.
struct OtherHost {
    transport: Transport,
    device: String,
    /// The address: a socket or a port. It stays while the server is away.
    socket: String,
    port: u16,
    certificates: String,
    server: Option<Server>,
}

impl OtherHost {
    /// A host whose server is not there yet.
    fn new(disk: &MovedDisk, transport: Transport) -> OtherHost {
        fs::write(disk.path("there"), vec![0; SIZE as usize]).unwrap();
        let device = format!("there=0 {} linear file:{}?exclusive=off 0", SIZE / 512, disk.word("there"));
        let certificates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../udm-tls/tests/data");
        let certificates = certificates.canonicalize().unwrap_or_default().display().to_string();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        OtherHost { transport, device, socket: disk.word("there.sock"), port, certificates, server: None }
    }

    fn start(&mut self) {
        let _ = fs::remove_file(&self.socket);
        let nvme = format!("127.0.0.1:{}", self.port);
        let options: Vec<&str> = match self.transport {
            Transport::Nbd => Vec::new(),
            Transport::NbdTls => vec!["--tls=require", "--tls-certificates", &self.certificates],
            Transport::NvmeTcp => {
                vec!["--nvme", &nvme, "--nvme-subsystem", SUBSYSTEM, "--nvme-quiesce-time", "0"]
            }
        };
        let server = Server::start_with(&[&self.device], &options);
        // The address is the same each time.
        std::os::unix::fs::symlink(&server.nbd, &self.socket).unwrap();
        self.server = Some(server);
    }

    fn kill(&mut self) {
        self.server = None;
    }

    fn uri(&self) -> String {
        let (socket, certificates) = (&self.socket, &self.certificates);
        match self.transport {
            Transport::Nbd => format!("nbd+unix:///there?socket={socket}"),
            Transport::NbdTls => {
                format!("nbds+unix:///there?socket={socket}&tls-certificates={certificates}")
            }
            Transport::NvmeTcp => format!("nvme+tcp://127.0.0.1:{}/{SUBSYSTEM}/1", self.port),
        }
    }
}

/// The server there is killed during the copy, and again in sync.
#[test]
fn a_path_that_dies_for_a_while_delays_the_move_only() {
    for transport in ALL {
        let disk = MovedDisk::new();
        let mut there = OtherHost::new(&disk, transport);
        there.start();
        disk.begin(&there.uri());
        let mut client = disk.client();
        for round in 0..3 {
            (0..32).for_each(|at| write(&mut client, at * REGION + round * 1024, 512));
            there.kill();
            // Writes wait at most as long as the path does.
            (0..8).for_each(|at| write(&mut client, at * REGION + round * 1024 + 512, 512));
            sleep(Duration::from_millis(100));
            there.start();
            if round == 1 {
                disk.server.says(&["move", "start", "disk"]);
            }
        }
        disk.until_state("done");
        write(&mut client, 4096, 512);
        assert_eq!(client.one(NbdCommand::Flush, 0, 0), 0, "{transport:?}");
        let (old, new) = (disk.read("old"), disk.read("there"));
        assert!(new[4096..4608] == [1; 512], "{transport:?}");
        assert!(old[8192..] == new[8192..], "{transport:?}");
        assert!(read(&mut client, 0, 4096) == new[..4096], "{transport:?}");
    }
}

/// The server that moves the disk is killed, and the other host comes late, or never.
#[test]
fn a_path_that_comes_late_or_never_leaves_the_disk_where_it_is() {
    for transport in ALL {
        let mut disk = MovedDisk::new();
        let mut there = OtherHost::new(&disk, transport);
        let error = disk.refusal(&["move", "disk", "--to", &there.uri()]);
        assert!(disk.list().as_array().unwrap().is_empty(), "{transport:?}: {error}");
        there.start();
        disk.begin(&there.uri());
        write(&mut disk.client(), 512, 512);
        there.kill();
        disk.restart();
        until("a move that waits", || (disk.state() == "waiting").then_some(()));
        let mut client = disk.client();
        write(&mut client, 1024, 512);
        assert!(read(&mut client, 512, 1024) == [1; 1024], "{transport:?}");
        // Late.
        there.start();
        disk.until_state("done");
        write(&mut client, 2048, 512);
        assert_eq!(client.one(NbdCommand::Flush, 0, 0), 0);
        let new = disk.read("there");
        assert!(new[512..1536] == [1; 1024] && new[2048..2560] == [1; 512], "{transport:?}");
    }
    // Never.
    let mut disk = MovedDisk::new();
    let mut there = OtherHost::new(&disk, Transport::Nbd);
    there.start();
    disk.begin(&there.uri());
    there.kill();
    disk.restart();
    let mut client = disk.client();
    write(&mut client, 512, 512);
    disk.server.says(&["move", "stop", "disk"]);
    assert_eq!((disk.state().as_str(), client.one(NbdCommand::Flush, 0, 0)), ("stopped", 0));
    drop(client);
    disk.restart();
    assert!(disk.list().as_array().unwrap().is_empty() && disk.read("old")[512..1024] == [1; 512]);
}
