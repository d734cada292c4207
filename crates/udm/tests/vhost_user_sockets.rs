//! `udm vhost-user`: sockets for virtual machines that come and go while the server runs.

#[path = "../../udm-frontends/tests/vhost_user/driver.rs"]
#[allow(dead_code, reason = "the front end's tests use all of it")]
mod driver;
mod support;

use driver::{DATA, TestMachine};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use support::{Server, UDM, needs_no_sandbox, until};
use tempfile::TempDir;
use udm_wire::virtio::VirtioFeatures;

const READ: u32 = 0;
const WRITE: u32 = 1;

/// A machine with a working disk.
fn machine(socket: &Path) -> TestMachine {
    let mut machine = TestMachine::new(socket, 1);
    machine.start(VirtioFeatures::INDIRECT_DESC);
    assert_eq!(machine.request(0, READ, 0, &[], &[(DATA, 512)]).0, 0);
    machine
}

fn list(server: &Server) -> Vec<Value> {
    serde_json::from_str(&server.says(&["vhost-user", "list", "--json"])).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A socket is added, is used, follows a rename and an upgrade, and ends by its verb or with its
/// device.
#[test]
fn sockets_come_and_go() {
    let configured = TempDir::new().unwrap();
    let option = configured.path().join("option");
    let mut server =
        Server::start_with(&["d=mem:1M", "o=null:1M"], &["--vhost-user", &format!("o={}", text(&option))]);
    let path = |name: &str| server.folder.path().join(name);
    let (first, second) = (path("first"), path("second"));
    assert_eq!(list(&server).len(), 1);
    server.says(&["vhost-user", "add", "d", text(&first)]);
    server.says(&["vhost-user", "add", "d", text(&second)]);
    assert_eq!(fs::metadata(&first).unwrap().permissions().mode() & 0o777, 0o600);
    let mut one = machine(&first);
    assert_eq!(one.request(0, WRITE, 0, &[(DATA, 512)], &[]).0, 0);
    let described = |device: &str, path: &Path, connected: bool, added: bool| json!({"device": device, "path": path, "connected": connected, "added": added});
    let all = [
        described("o", &option, false, false),
        described("d", &first, true, true),
        described("d", &second, false, true),
    ];
    until("the machine in the list", || (list(&server) == all).then_some(()));
    let plain = server.says(&["vhost-user", "list"]);
    assert!(plain.contains(&format!("d: {}  connected, added\n", first.display())), "{plain}");

    // A device with a machine is in use, and so is its socket.
    assert!(server.refuses(&["remove", "d"]).contains("open"), "a machine is connected");
    let busy = server.refuses(&["vhost-user", "remove", "d", text(&first)]);
    assert!(busy.contains("a machine is connected: stop it first, or disconnect it with --force"), "{busy}");
    for (words, why) in [
        (&["add", "none", "/tmp/x"][..], "no device of that name"),
        (&["add", "d", text(&second)], "it is in use: another server answers there: Device or resource busy"),
        (&["add", "d", "/nowhere/s"], "No such file or directory"),
        (&["remove", "d", "/nowhere/s"], "the device has no such socket"),
        (&["remove", "o", text(&option)], "it is one of the server's options"),
        (&["remove", "o", text(&second)], "the device has no such socket"),
    ] {
        let said = server.refuses(&[&["vhost-user"], words].concat());
        assert!(said.contains(why) && said.lines().count() == 1, "{words:?}: {said}");
    }
    let relative = server.http("POST", "/v1/devices/d/vhost-user", r#"{"path":"x"}"#);
    assert!(relative.2.contains("expected an absolute path"), "{}", relative.2);

    server.says(&["rename", "d", "e"]);
    machine(&second);
    assert_eq!(list(&server)[1]["device"], "e");
    assert_eq!(one.request(0, READ, 0, &[], &[(DATA, 512)]).0, 0, "a connected machine stays");
    let gone = server.refuses(&["vhost-user", "remove", "d", text(&first)]);
    assert!(gone.contains("no device of that name"), "{gone}");
    server.says(&["vhost-user", "remove", "e", text(&first), "--force"]);
    assert!(!first.exists() && one.is_closed(), "the machine is disconnected");
    drop(one);
    until("a device that is not in use", || server.verb(&["remove", "e"]).status.success().then_some(()));
    assert!(!second.exists(), "the socket ends with its device");
    assert_eq!(list(&server), [described("o", &option, false, false)]);

    // `mem:` keeps a server from being upgraded.
    server.says(&["create", "n", "--table", "0 2048 linear null:1M 0"]);
    let third = path("third");
    server.says(&["vhost-user", "add", "n", text(&third)]);
    let mut other = machine(&third);
    server.upgrade(&[UDM]);
    assert_eq!(other.request(0, READ, 0, &[], &[(DATA, 512)]).0, 0);
    assert_eq!(list(&server)[1], described("n", &third, true, true));
    drop(other);
    machine(&third);
    until("a device that is not in use", || server.verb(&["remove", "n"]).status.success().then_some(()));
    assert!(!third.exists(), "the new server knows that it was added");
}

/// The sockets of snapshots and clones that were created by name come back with them; those of other
/// devices do not.
#[test]
fn sockets_come_back_with_snapshots_and_clones() {
    if needs_no_sandbox("sockets in a folder that outlives the server") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let path = |name: &str| -> PathBuf { folder.path().join(name) };
    let (disk, state) = (path("disk"), path("state"));
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let device = format!("d={}", disk.display());
    let serve = || Server::start_with(&[&device], &["--state", text(&state)]);
    let mut server = serve();
    for name in ["s", "t"] {
        server.says(&["snapshot", "create", name, "--of", "d"]);
        server.says(&["vhost-user", "add", name, text(&path(name))]);
    }
    let (source, image) = (path("source"), path("image"));
    fs::write(&source, vec![7; 1 << 20]).unwrap();
    server.says(&["clone", "create", "c", "--from", text(&source), "--to", text(&image), "--pause"]);
    server.says(&["vhost-user", "add", "c", text(&path("c"))]);
    for name in ["s", "c"] {
        server.says(&["vhost-user", "add", name, text(&path("extra"))]);
        server.says(&["vhost-user", "remove", name, text(&path("extra"))]);
    }
    server.says(&["vhost-user", "add", "d", text(&path("d"))]);
    server.kill();
    let names = |server: &Server| -> Vec<String> {
        let of = |one: &Value| format!("{} {}", one["device"].as_str().unwrap(), one["added"]);
        let mut names: Vec<String> = list(server).iter().map(of).collect();
        names.sort();
        names
    };
    let mut server = serve();
    assert_eq!(names(&server), ["c true", "s true", "t true"], "after a kill: {}", server.log());
    for name in ["c", "s", "t"] {
        machine(&path(name));
    }
    server.upgrade(&[UDM]);
    server.says(&["rename", "t", "u"]);
    server.kill();
    let mut server = serve();
    assert_eq!(names(&server), ["c true", "s true", "u true"], "after an upgrade, a rename and a kill");
    machine(&path("t"));
    // Another program has taken the path meanwhile: the snapshot comes back all the same.
    server.kill();
    fs::remove_file(path("s")).unwrap();
    fs::write(path("s"), "a file").unwrap();
    let server = serve();
    assert_eq!(names(&server), ["c true", "u true"]);
    assert!(server.log().contains("s: no machine can connect: "), "{}", server.log());
    assert_eq!(fs::read(path("s")).unwrap(), b"a file");
}
