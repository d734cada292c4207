//! Listening, the number of connections, and stopping.

use crate::disk::{CompletionOrder, TestDisk};
use crate::{ScriptedClient, ServerFixture};
use std::io::Read;
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use udm_frontends::nbd::{BoundAddress, ListenAddress, NbdServerLimits};
use udm_wire::nbd::{CommandFlags, NbdCommand};

const MIB: u64 = 1 << 20;

fn disk() -> TestDisk {
    TestDisk::new(MIB, CompletionOrder::AtOnce)
}

#[test]
fn a_unix_socket_is_private_and_goes_with_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nbd.sock");
    // A socket that a dead server left.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let listen = [ListenAddress::Unix(path.clone())];
    let world = ServerFixture::with(disk(), NbdServerLimits::default(), &listen);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let mut c = ScriptedClient::on(UnixStream::connect(&path).unwrap());
    c.go("disk", true);
    assert!(c.read(0, 512).is_ok());

    let e = udm_frontends::nbd::NbdServer::start(
        world.runtime.core_set(),
        world.exports.clone(),
        NbdServerLimits::default(),
        &listen,
    );
    let text = e.err().expect("the path is taken").to_string();
    assert!(text.contains("nbd.sock") && text.contains("in use"), "{text}");
    drop(c);
    world.wait_until_empty();
    world.end();
    assert!(!path.exists());
}

#[test]
fn what_is_no_socket_of_ours_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nbd.sock");
    std::fs::write(&path, "precious").unwrap();
    let runtime_less = |p: &std::path::Path| {
        let core_set = udm_runtime::ProcessCores::new(1).unwrap();
        let listen = [ListenAddress::Unix(p.to_owned())];
        udm_frontends::nbd::NbdServer::start(
            &core_set,
            Default::default(),
            NbdServerLimits::default(),
            &listen,
        )
    };
    assert!(runtime_less(&path).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    std::fs::remove_file(&path).unwrap();
    let server = runtime_less(&path).unwrap();
    let ours = std::fs::metadata(&path).unwrap().ino();
    std::fs::remove_file(&path).unwrap();
    let _other = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let replaced = std::fs::metadata(&path).unwrap().ino() != ours;
    server.stop();
    assert!(path.exists() || !replaced, "somebody else's socket was removed");
    let long = dir.path().join("x".repeat(200));
    assert!(runtime_less(&long).err().unwrap().to_string().contains("xxx"));
}

#[test]
fn tcp_works_as_well() {
    let listen = [ListenAddress::Tcp((Ipv4Addr::LOCALHOST, 0).into())];
    let world = ServerFixture::with(disk(), NbdServerLimits::default(), &listen);
    let BoundAddress::Tcp(address) = world.server.bound()[0] else { panic!() };
    assert_ne!(address.port(), 0);
    let mut greeting = [0; 18];
    let mut stream = TcpStream::connect(address).unwrap();
    stream.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..8], b"NBDMAGIC");
    drop(stream);
    world.wait_until_empty();
    world.end();
}

/// A stop while requests are at the device: they are answered, then the connection ends. Silent
/// connections end, too.
#[test]
fn a_stop_finishes_what_is_in_flight() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::Shuffled));
    let (mut c, mut silent, mut stranger) =
        (world.client(false), world.client(true), world.unnegotiated_client());
    world.disk.hold_requests();
    for i in 0..100 {
        c.send(NbdCommand::Read, CommandFlags::empty(), i * 512, 512, &[]);
    }
    world.wait_for("all is under way", |s| s.in_flight == 100);
    let ServerFixture { disk, server, runtime, .. } = world;
    let stopping = std::thread::spawn(move || {
        server.stop();
        runtime.stop();
    });
    // Both wait until the stop has reached the cores; the gate opens after that.
    assert!(silent.is_at_end() && stranger.is_at_end());
    assert!(!stopping.is_finished(), "nothing is dropped");
    disk.release_requests();
    for _ in 0..100 {
        assert_eq!(c.receive().error, 0);
    }
    assert!(c.is_at_end());
    stopping.join().unwrap();
}

/// A client that reads nothing does not keep the server from stopping.
#[test]
fn a_stop_waits_for_a_deaf_client_only_so_long() {
    let options = NbdServerLimits { stop_max: Duration::from_millis(100), ..NbdServerLimits::default() };
    let world = ServerFixture::with(TestDisk::new(64 * MIB, CompletionOrder::AtOnce), options, &[]);
    let mut c = world.client(false);
    for _ in 0..4 {
        c.send(NbdCommand::Read, CommandFlags::empty(), 0, 8 << 20, &[]);
    }
    world.wait_for("all is under way", |s| s.in_flight + s.requests == 4);
    world.end();
    assert!(c.is_at_end());
}

#[test]
fn disconnect_answers_first() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::Shuffled));
    let mut c = world.client(true);
    let cookies: Vec<_> =
        (0..100).map(|i| c.send(NbdCommand::Read, CommandFlags::empty(), i * 512, 512, &[])).collect();
    c.send(NbdCommand::Disconnect, CommandFlags::empty(), 0, 0, &[]);
    let mut got: Vec<_> = cookies.iter().map(|_| c.receive().cookie).collect();
    got.sort_unstable();
    assert_eq!(got, cookies);
    assert!(c.is_at_end());
    world.wait_until_empty();
    world.end();
}

#[test]
fn an_export_that_is_taken_off_keeps_its_clients() {
    let world = ServerFixture::new(disk());
    let mut c = world.client(true);
    let export = world.exports.get("disk").unwrap();
    world.exports.remove(&export);
    assert_eq!(export.users(), 1);
    assert!(c.read(0, 512).is_ok() && world.exports.get("disk").is_none());
    drop(c);
    world.wait_until_empty();
    assert_eq!(export.users(), 0);
    world.end();
}
