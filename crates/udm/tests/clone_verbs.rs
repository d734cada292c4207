//! `udm clone`: clones created with their files, listed, paused, and ended as linear devices.

mod support;

use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use support::nbd::Client;
use support::web_server::WebServer;
use support::{ChildGuard, Server, has, text, udm, until};
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, NbdCommand};

const SIZE: u64 = 8 << 20;
const REGION: u64 = 64 << 10;

/// Data without two equal sectors.
fn data() -> Vec<u8> {
    (0..SIZE / 8).flat_map(|word| (word * 0x9e37_79b9 + 1).to_le_bytes()).collect()
}

/// A folder with a source, and a server without devices.
struct World {
    folder: TempDir,
    server: Server,
}

impl World {
    fn new() -> World {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("source"), data()).unwrap();
        World { folder, server: Server::start(&[]) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The path of `name` as a word.
    fn word(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Creates the clone c from `source` to the file `to`.
    fn create(&self, source: &str, more: &[&str]) -> Value {
        let to = self.word("to");
        let args = ["clone", "create", "c", "--from", source, "--to", &to, "--json"];
        serde_json::from_str(&self.server.says(&[&args[..], more].concat())).unwrap()
    }

    /// The only clone.
    fn clone(&self) -> Value {
        let list: Value = serde_json::from_str(&self.server.says(&["clone", "list", "--json"])).unwrap();
        assert_eq!(list.as_array().unwrap().len(), 1, "{list}");
        list[0].clone()
    }

    fn wait_until_done(&self) {
        until("a complete clone", || (self.clone()["state"] == "done").then_some(()));
    }

    /// The line of a verb that is refused.
    fn refusal(&self, args: &[&str]) -> String {
        let error = self.server.refuses(args);
        assert_eq!(error.trim_end().lines().count(), 1, "one line: {error}");
        error
    }
}

#[test]
fn a_clone_from_its_creation_to_its_end_under_a_client() {
    let world = World::new();
    let server = &world.server;
    assert_eq!(server.says(&["clone", "list"]), "No clones found\n");
    assert_eq!(server.says(&["clone", "list", "--json"]).trim(), "[]");
    let created = world.create(&world.word("source"), &["--pause"]);
    assert_eq!(created, world.clone());
    for (key, value) in [
        ("name", "c".into()),
        ("source", format!("file:{}?readonly=on", world.word("source")).into()),
        ("destination", world.word("to").into()),
        ("metadata", world.word("to.clone").into()),
        ("state", "stopped".into()),
        ("size_bytes", SIZE.into()),
        ("region_bytes", REGION.into()),
        ("regions", Value::from(SIZE / REGION)),
        ("hydrated_regions", Value::from(0)),
    ] {
        assert_eq!(created[key], value, "{key}");
    }
    // Only who runs the server can read the copy, and it takes no space yet.
    let made = fs::metadata(world.path("to")).unwrap();
    assert_eq!((made.len(), made.blocks(), made.mode() & 0o777), (SIZE, 0, 0o600));
    let mut client = Client::connect(&server.nbd, "c");
    assert_eq!(client.one(NbdCommand::Write, REGION * 3 + 512, 1024), 0);
    let clone = world.clone();
    assert_eq!((&clone["hydrated_regions"], &clone["hydrated_bytes"]), (&1.into(), &REGION.into()));
    let list = server.says(&["clone", "list"]);
    assert!(
        list.contains(" 64.0Ki/8192Ki ") && list.contains(" 1/128 ") && list.contains(" stopped "),
        "{list}"
    );
    let error = world.refusal(&["clone", "finish", "c"]);
    assert!(error.contains("127 of 128 regions are not hydrated yet"), "{error}");
    let (status, _, _) = server.http("POST", "/v1/clones/c/finish", "");
    assert_eq!(status, 409);
    server.says(&["clone", "start", "c"]);
    world.wait_until_done();
    server.says(&["clone", "pause", "c"]);
    assert_eq!(world.clone()["state"], "done", "there is nothing to stop");
    refuse_while_another_change_waits(&world);
    // Requests before, during and after the change of the table.
    let is_finished = &AtomicBool::new(false);
    let mut expected = data();
    expected[(REGION * 3 + 512) as usize..][..1024].fill(1);
    thread::scope(|scope| {
        let load = scope.spawn(move || {
            for round in 0_usize.. {
                let at = round * 4096 % SIZE as usize;
                client.send(CommandFlags::empty(), NbdCommand::Read, at as u64, 4096, &[]).unwrap();
                let (_, error, found) = client.answer().unwrap();
                assert!(error == 0 && found == expected[at..at + 4096], "{round}");
                assert_eq!(client.one(NbdCommand::Write, at as u64, 512), 0, "{round}");
                expected[at..at + 512].fill(1);
                if is_finished.load(Ordering::Relaxed) && round >= 20 {
                    break;
                }
            }
            (client, expected)
        });
        server.says(&["clone", "finish", "c"]);
        is_finished.store(true, Ordering::Relaxed);
        let (mut client, expected) = load.join().unwrap();
        assert!(server.says(&["table", "c"]).contains(" linear "));
        assert_eq!(server.says(&["clone", "list"]), "No clones found\n");
        // The source and the metadata are not used any more.
        assert!(fs::read(world.path("source")).unwrap() == data(), "the source is only read");
        fs::remove_file(world.path("source")).unwrap();
        fs::remove_file(world.path("to.clone")).unwrap();
        assert_eq!(client.one(NbdCommand::Flush, 0, 0), 0);
        assert!(fs::read(world.path("to")).unwrap() == expected, "other data");
    });
    assert!(world.refusal(&["clone", "finish", "c"]).contains("it is not a clone"));
}

/// A device that is suspended, or has a loaded table, is not finished.
fn refuse_while_another_change_waits(world: &World) {
    let server = &world.server;
    server.says(&["suspend", "c"]);
    assert!(world.refusal(&["clone", "finish", "c"]).contains("it is suspended: resume it first"));
    server.says(&["resume", "c"]);
    server.says(&["load", "c", "--table", &format!("0 {} zero", SIZE / 512)]);
    let error = world.refusal(&["clone", "finish", "c"]);
    assert!(error.contains("a table waits in its inactive slot"), "{error}");
    server.says(&["clear", "c"]);
    assert_eq!(world.clone()["state"], "done");
}

/// The destination is a copy of `source`, whatever the source is.
fn copies(world: &World, source: &str) {
    world.create(source, &["--region-size", "256k"]);
    assert_eq!(world.clone()["region_bytes"], 256 << 10);
    world.wait_until_done();
    world.server.says(&["clone", "finish", "c"]);
    world.server.says(&["remove", "c"]);
    assert!(fs::read(world.path("to")).unwrap() == data(), "{source}");
    fs::remove_file(world.path("to")).unwrap();
    fs::remove_file(world.path("to.clone")).unwrap();
}

#[test]
fn sources_of_each_kind() {
    let world = World::new();
    copies(&world, &format!("file:{}", world.word("source")));
    let web = WebServer::start(data());
    copies(&world, &web.uri(""));
    world.server.says(&["create", "s", "--table", &world.word("source")]);
    copies(&world, "@s");
    world.server.says(&["remove", "s"]);
    if has("nbdkit") {
        let socket = world.word("socket");
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.args(["-f", "-r", "-U", &socket, "file", &world.word("source")]).stderr(Stdio::null());
        let nbdkit = ChildGuard(nbdkit.spawn().unwrap());
        until("a socket", || world.path("socket").exists().then_some(()));
        copies(&world, &format!("nbd+unix:///?socket={socket}"));
        drop(nbdkit);
    }
    if has("qemu-img") {
        let image = world.word("image");
        let args = ["convert", "-c", "-f", "raw", "-O", "qcow2", &world.word("source"), &image];
        assert!(Command::new("qemu-img").args(args).status().unwrap().success());
        copies(&world, &format!("file:{image}?format=qcow2"));
    }
}

/// Relative paths are those of the client. A clone goes on where a killed server has left it.
#[test]
fn a_clone_continues_after_a_kill() {
    let mut world = World::new();
    let create = |world: &World, more: &[&str]| {
        let args = ["clone", "create", "c", "--from", "source", "--to", "to", "--metadata", "bits"];
        let mut command = udm(&[&args[..], more].concat());
        command.current_dir(world.folder.path()).env("UDM_SOCKET", &world.server.socket);
        command.output().unwrap()
    };
    let created = create(&world, &["--pause", "--region-size", "4k"]);
    assert!(created.status.success(), "{}", text(&created.stderr));
    let mut client = Client::connect(&world.server.nbd, "c");
    assert_eq!(client.one(NbdCommand::Write, 4096 * 7 + 512, 1024), 0);
    assert_eq!(client.one(NbdCommand::Flush, 0, 0), 0);
    world.server = Server::start(&[]);
    // The region size is that of the metadata.
    let created = create(&world, &["--pause"]);
    assert!(created.status.success(), "{}", text(&created.stderr));
    let clone = world.clone();
    assert_eq!((&clone["region_bytes"], &clone["hydrated_regions"]), (&4096.into(), &1.into()));
    world.server.says(&["clone", "start", "c"]);
    world.wait_until_done();
    let mut expected = data();
    expected[4096 * 7 + 512..][..1024].fill(1);
    world.server.says(&["clone", "finish", "c"]);
    world.server.says(&["remove", "c"]);
    assert!(fs::read(world.path("to")).unwrap() == expected);
    // Without its destination the metadata is worthless, and a new file would read as zeroes.
    fs::remove_file(world.path("to")).unwrap();
    let refused = create(&world, &[]);
    let error = text(&refused.stderr);
    assert!(!refused.status.success() && error.contains("whose destination"), "{error}");
    assert!(error.contains("is gone or empty: to begin anew, remove"), "{error}");
    assert!(!world.path("to").exists());
}

/// A refusal is one line. What existed is as before, and what was made is gone.
#[test]
fn what_is_refused_leaves_no_file_behind_and_overwrites_none() {
    let world = World::new();
    fs::write(world.path("used"), b"a diary").unwrap();
    let late = File::create(world.path("late")).unwrap();
    late.write_all_at(b"x", SIZE - 1).unwrap();
    File::create(world.path("empty")).unwrap();
    fs::write(world.path("short"), [0; 4096]).unwrap();
    world.server.says(&["create", "taken", "--table", "0 8 zero"]);
    world.server.says(&["create", "disk", "--table", "0 32768 linear pattern:16M 0"]);
    let names = || {
        let mut all: Vec<_> =
            fs::read_dir(world.folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        all.sort();
        all
    };
    let before = names();
    let source = world.word("source");
    let refused = |name: &str, from: &str, to: &str, more: &[&str], why: &str| {
        let args = ["clone", "create", name, "--from", from, "--to", to];
        let error = world.refusal(&[&args[..], more].concat());
        assert!(error.contains(why), "{why}: {error}");
        assert_eq!(names(), before, "{why}");
    };
    let [to, used, empty] = ["to", "used", "empty"].map(|name| world.word(name));
    refused("c", &world.word("none"), &to, &[], "No such file");
    refused("taken", &source, &to, &[], "taken");
    refused("c", &source, &used, &[], "has data at byte 0, and is not overwritten");
    refused("c", &source, &world.word("late"), &[], "has data at byte 8388607, and is not overwritten");
    refused("c", &source, &source, &[], "has data at byte 0, and is not overwritten");
    refused("c", &source, "@disk", &["--metadata", &world.word("m")], "has data at byte");
    refused("c", &source, "mem:8M", &[], "is not a file: name the metadata");
    refused("c", &source, &world.word("short"), &[], "Device size larger than destination device");
    refused("c", &source, &to, &["--metadata", &source], "no metadata of a clone");
    refused("c", &source, &to, &["--metadata", &world.word("short")], "are needed");
    refused("c", &source, &to, &["--metadata", &to], "are one disk");
    refused("c", &source, &to, &["--metadata", "/nonexistent/m"], "No such file");
    refused("c", &source, &to, &["--region-size", "3000"], "expected a power of two");
    refused("c", &source, &to, &["--region-size", "2G"], "expected a power of two");
    refused("c", &source, &empty, &["--metadata", &empty], "are one disk");
    assert_eq!(fs::metadata(world.path("empty")).unwrap().len(), 0);
    assert_eq!(fs::read(world.path("used")).unwrap(), b"a diary");
    assert!(world.refusal(&["clone", "pause", "taken"]).contains("it is not a clone"));
    assert!(world.refusal(&["clone", "start", "c"]).contains("no device of that name"));
    // An empty file is used.
    world.server.says(&["clone", "create", "c", "--from", &source, "--to", &empty]);
    world.wait_until_done();
    world.server.says(&["clone", "finish", "c"]);
    assert!(fs::read(world.path("empty")).unwrap() == data());
}
