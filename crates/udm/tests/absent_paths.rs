//! Multipath devices of which a path is down when the server starts.

mod support;

use std::fs;
use support::nbd::Client;
use support::servers::Nbdkit;
use support::{Server, has, text, udm, until};
use tempfile::TempDir;
use udm_wire::nbd::NbdCommand::{Read, Write};

const SIZE: u64 = 1 << 20;

/// Two servers of one disk.
struct Paths {
    folder: TempDir,
    a: Nbdkit,
    b: Nbdkit,
}

impl Paths {
    fn new() -> Paths {
        let folder = TempDir::new().unwrap();
        let disk = folder.path().join("disk");
        fs::write(&disk, vec![7; SIZE as usize]).unwrap();
        let disk = disk.display().to_string();
        let [a, b] = ["a", "b"].map(|name| Nbdkit::start(folder.path().join(name), &["file", &disk]));
        Paths { folder, a, b }
    }

    fn table(&self) -> String {
        format!("m=0 2048 multipath 0 0 1 1 round-robin 0 2 1 {} 1 {} 1", self.a.uri(), self.b.uri())
    }

    fn serve(&self) -> Server {
        Server::start_with(&[&self.table()], &["--check-paths", "1"])
    }
}

fn works(server: &Server) {
    let mut client = Client::connect(&server.nbd, "m");
    for block in 0..8 {
        assert_eq!(client.one(Write, block * 4096, 4096), 0, "{}", server.log());
        assert_eq!(client.one(Read, block * 4096, 4096), 0, "{}", server.log());
    }
}

/// Waits until as many paths of the device have failed.
fn wait_for_failed(server: &Server, count: usize) {
    let failed = || server.says(&["status", "m"]).split(' ').filter(|word| *word == "F").count();
    until("the state of the paths", || (failed() == count).then_some(()));
}

/// A server is started, or started again, while either path is down. The path comes back when its
/// server does.
#[test]
fn a_server_starts_while_a_path_is_down() {
    if !has("nbdkit") {
        return;
    }
    let mut paths = Paths::new();
    paths.a.kill();
    let mut server = paths.serve();
    works(&server);
    wait_for_failed(&server, 1);
    let line = "its server is down: taken to be a path to the same disk as";
    assert!(server.log().contains(line), "{}", server.log());
    paths.a.again();
    wait_for_failed(&server, 0);
    works(&server);
    server.kill();
    paths.b.kill();
    let server = paths.serve();
    works(&server);
    wait_for_failed(&server, 1);
    paths.b.again();
    wait_for_failed(&server, 0);
}

/// A server that turns out to have another disk stays out.
#[test]
fn a_path_that_was_assumed_is_checked_when_it_answers() {
    if !has("nbdkit") {
        return;
    }
    let mut paths = Paths::new();
    paths.a.kill();
    let server = paths.serve();
    wait_for_failed(&server, 1);
    let other = paths.folder.path().join("other");
    fs::write(&other, vec![9; SIZE as usize / 2]).unwrap();
    let other = Nbdkit::start(paths.folder.path().join("a"), &["file", &other.display().to_string()]);
    until("the reason", || {
        server.log().contains("its size was 1048576 bytes and is 524288 now").then_some(())
    });
    wait_for_failed(&server, 1);
    works(&server);
    drop(other);
    paths.a.again();
    wait_for_failed(&server, 0);
}

/// Only a path whose server is down is assumed, and only beside another one of NBD.
#[test]
fn what_cannot_be_assumed_is_refused() {
    if !has("nbdkit") {
        return;
    }
    let mut paths = Paths::new();
    paths.a.kill();
    let refused = |table: &str| {
        let socket = paths.folder.path().join("refused").display().to_string();
        let out = udm(&["serve", "--device", table, "--unix", &socket]).output().unwrap();
        assert!(!out.status.success());
        text(&out.stderr)
    };
    let multipath = |words: &[&str]| {
        let paths: String = words.iter().map(|path| format!(" {path} 1")).collect();
        format!("m=0 2048 multipath 0 0 1 1 round-robin 0 {} 1{paths}", words.len())
    };
    let (a, b, disk) = (paths.a.uri(), paths.b.uri(), paths.folder.path().join("disk").display().to_string());
    // A server that answers, and has no such export.
    let server = Server::start(&["x=0 2048 zero"]);
    let [exported, unknown] =
        ["x", "y"].map(|name| format!("nbd+unix:///{name}?socket={}", server.nbd.display()));
    for (table, why) in [
        (multipath(&[&a]), format!("error getting device ({a}): Connection refused")),
        (multipath(&[&a, &disk]), format!("error getting device ({a}): Connection refused")),
        (multipath(&[&exported, &unknown]), format!("error getting device ({unknown}")),
        (format!("d=0 2048 linear {a} 0"), format!("{a}): Connection refused")),
    ] {
        let said = refused(&table);
        assert!(said.contains(&why), "{table}: {said}");
    }
    paths.b.kill();
    let said = refused(&multipath(&[&b, &a]));
    assert!(said.contains(&format!("error getting device ({b}): Connection refused")), "{said}");
}
