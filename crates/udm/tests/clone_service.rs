//! Clones of a server that runs for long: waiting for them, their end by itself, boot profiles,
//! metrics, sparse sources.

mod support;

use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;
use support::nbd::Client;
use support::{Server, has, text, udm, until};
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, NbdCommand};

const SIZE: u64 = 8 << 20;
const REGION: u64 = 64 << 10;

/// Data without two equal sectors.
fn data() -> Vec<u8> {
    (0..SIZE / 8).flat_map(|word| (word * 0x9e37_79b9 + 1).to_le_bytes()).collect()
}

struct World {
    folder: TempDir,
}

impl World {
    fn new() -> World {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("source"), data()).unwrap();
        World { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn word(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn create(&self, server: &Server, name: &str, more: &[&str]) -> String {
        let (source, to) = (self.word("source"), self.word(name));
        let args = ["clone", "create", name, "--from", &source, "--to", &to];
        server.says(&[&args[..], more].concat())
    }

    /// Writes the file of a server with the clone c, and makes its files.
    fn declare(&self, serve: &str, more: &str) {
        for (name, len) in [("destination", SIZE), ("metadata", 1 << 20)] {
            let _ = File::create_new(self.path(name)).map(|file| file.set_len(len).unwrap());
        }
        let words = "8 0 4 hydration_threshold 64 hydration_batch_size 16";
        let table = format!(
            "0 {} clone metadata destination file:{}?readonly=on {words}",
            SIZE / 512,
            self.word("source")
        );
        let file = format!("[serve]\n{serve}\n[devices.c]\ntable = \"{table}\"\n{more}\n");
        fs::write(self.path("udm.toml"), file).unwrap();
    }

    fn serve(&self) -> Server {
        Server::start_with(&[], &[&self.word("udm.toml")])
    }
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn is_linear(server: &Server) -> bool {
    server.says(&["table", "c"]).contains(" linear ")
}

#[test]
fn a_wait_ends_when_all_is_copied() {
    let (world, server) = (World::new(), Server::start(&[]));
    let said = world.create(&server, "c", &["--wait"]);
    let lines: Vec<&str> = said.lines().collect();
    assert!(!lines.is_empty() && lines.iter().all(|line| line.starts_with("c ")), "{said}");
    assert_eq!(lines.last(), Some(&"c 100%, 8192KiB of 8192KiB"), "{said}");
    let created = json(&world.create(&server, "d", &["--wait", "--json"]));
    assert_eq!((&created["name"], &created["state"]), (&"d".into(), &"done".into()));
    let both = json(&server.says(&["clone", "wait", "c", "d", "--json"]));
    assert_eq!(both.as_array().unwrap().len(), 2);
    assert!(both[1]["state"] == "done" && both[1]["source_errors"] == 0, "{both}");
    server.says(&["clone", "finish", "c"]);
    assert!(server.refuses(&["clone", "wait", "c"]).contains("it is not a clone"));
    world.create(&server, "e", &["--pause"]);
    let error = server.refuses(&["clone", "wait", "d", "e"]);
    assert!(error.contains("e: its copy is stopped: `udm clone start e` continues it"), "{error}");
}

/// On a terminal there is a bar, and no line is left of it.
#[test]
fn a_wait_on_a_terminal_draws_a_bar() {
    if !has("script") {
        return support::report_skip("no script");
    }
    let (world, server) = (World::new(), Server::start(&[]));
    world.create(&server, "c", &["--pause"]);
    server.says(&["message", "c", "0", "hydration_threshold", "1"]);
    let mut client = Client::connect(&server.nbd, "c");
    server.says(&["clone", "start", "c"]);
    let wait = format!("{} clone wait c", udm(&[]).get_program().display());
    let mut command = Command::new("script");
    command.args(["-qec", &wait, "/dev/null"]).env("UDM_SOCKET", &server.socket).env("TERM", "xterm");
    let out = command.output().unwrap();
    assert_eq!(client.one(NbdCommand::Read, 0, 4096), 0);
    let drawn = text(&out.stdout);
    assert!(out.status.success() && !drawn.contains("c 100%,"), "{drawn}");
}

/// The lives of a server whose file has a clone: it is finished by itself, killed, and finished
/// again. The metadata stays, so nothing is copied over later writes.
#[test]
fn a_clone_of_the_file_is_finished_in_each_life() {
    let world = World::new();
    world.declare("clone-finish = true", "");
    let mut server = world.serve();
    until("a linear table", || is_linear(&server).then_some(()));
    let finished = |server: &Server| server.log().matches("the clone is finished: it is linear over").count();
    until("a line of the log", || (finished(&server) == 1).then_some(()));
    let mut expected = data();
    for life in 1..4_u64 {
        let mut client = Client::connect(&server.nbd, "c");
        let at = life * 100 * 4096;
        assert_eq!(client.one(NbdCommand::Write, at, 4096), 0);
        assert_eq!(client.one(NbdCommand::Flush, 0, 0), 0);
        expected[at as usize..][..4096].fill(1);
        drop(client);
        server.kill();
        server = world.serve();
        until("a linear table", || is_linear(&server).then_some(()));
        assert!(fs::read(world.path("destination")).unwrap() == expected, "life {life}");
        until("a line of the log", || (finished(&server) == 1).then_some(()));
    }
    server.kill();
    // Without the option it comes back as a complete clone, which needs no copy.
    world.declare("", "");
    let server = world.serve();
    assert_eq!(json(&server.says(&["clone", "list", "--json"]))[0]["state"], "done");
    assert!(fs::read(world.path("destination")).unwrap() == expected);
}

/// Killed at any moment of the copy or of its end, no flushed write is lost.
#[test]
fn a_kill_before_or_after_the_end_loses_no_flushed_write() {
    for pause_ms in [0, 20, 60, 400, 700] {
        let world = World::new();
        world.declare("clone-finish = true", "");
        let mut server = world.serve();
        let mut client = Client::connect(&server.nbd, "c");
        assert_eq!(client.one(NbdCommand::Write, REGION + 512, 1024), 0);
        assert_eq!(client.one(NbdCommand::Flush, 0, 0), 0);
        sleep(Duration::from_millis(pause_ms));
        assert_eq!(client.one(NbdCommand::Write, 4 * REGION, 4096), 0);
        assert_eq!(client.one(NbdCommand::Flush, 0, 0), 0);
        server.kill();
        let server = world.serve();
        until("a linear table", || is_linear(&server).then_some(()));
        let mut expected = data();
        expected[REGION as usize + 512..][..1024].fill(1);
        expected[4 * REGION as usize..][..4096].fill(1);
        assert!(fs::read(world.path("destination")).unwrap() == expected, "after {pause_ms} ms");
    }
}

/// A clone that cannot be finished is named once in the log, and finished when it can be.
#[test]
fn a_clone_that_cannot_be_finished_is_tried_again() {
    let world = World::new();
    let server = Server::start_with(&[], &["--clone-finish"]);
    world.create(&server, "c", &["--pause"]);
    server.says(&["load", "c", "--table", &format!("0 {} zero", SIZE / 512)]);
    server.says(&["clone", "start", "c"]);
    let line = "the clone cannot be finished yet: c: a table waits in its inactive slot";
    until("a line of the log", || server.log().contains(line).then_some(()));
    sleep(Duration::from_millis(1200));
    assert_eq!(server.log().matches(line).count(), 1, "{}", server.log());
    server.says(&["clear", "c"]);
    until("a linear table", || is_linear(&server).then_some(()));
    assert!(fs::read(world.path("c")).unwrap() == data());
}

/// The reads of the first machine are copied first for the second one, whatever its region size.
#[test]
fn a_boot_profile_orders_the_copy_of_the_next_clone() {
    let (world, server) = (World::new(), Server::start(&[]));
    world.create(&server, "c", &["--pause"]);
    let empty = server.says(&["clone", "profile", "c"]);
    assert!(empty.ends_with(&format!("\nsize {SIZE}\nregion {REGION}\n")), "{empty}");
    let mut client = Client::connect(&server.nbd, "c");
    for at in [100, 3, 4, 100, 50] {
        assert_eq!(client.one(NbdCommand::Read, at * REGION + 4096, 4096), 0);
    }
    assert_eq!(client.one(NbdCommand::Write, 7 * REGION, 512), 0);
    let profile = server.says(&["clone", "profile", "c"]);
    let ranges: Vec<&str> = profile.lines().skip(3).collect();
    assert_eq!(ranges, ["6553600 65536", "196608 131072", "3276800 65536", "458752 65536"]);
    let shown = json(&server.says(&["clone", "profile", "c", "--json"]));
    assert_eq!((&shown["ranges"], shown["profile"].as_str()), (&4.into(), Some(&*profile)));
    let file = world.word("boot.profile");
    fs::write(&file, &profile).unwrap();
    world.create(&server, "d", &["--hydrate-first", &file, "--region-size", "128k", "--wait"]);
    let table = server.says(&["table", "d"]);
    assert!(table.trim_end().ends_with(" hydrate_first 50,1-2,25,3"), "{table}");
    assert!(fs::read(world.path("d")).unwrap() == data());
    // A profile of another disk, and a file that is none.
    File::create(world.path("source")).unwrap().set_len(SIZE / 2).unwrap();
    let create = |name: &str, file: &str| {
        let (source, to) = (world.word("source"), world.word(name));
        server.refuses(&["clone", "create", name, "--from", &source, "--to", &to, "--hydrate-first", file])
    };
    let error = create("e", &file);
    assert!(
        error.contains(&format!("it is of a disk of {SIZE} bytes, and the clone has {}", SIZE / 2)),
        "{error}"
    );
    assert!(!world.path("e").exists() && !world.path("e.clone").exists());
    fs::write(&file, "size 8192\nregion 4096\n0 x\n").unwrap();
    let error = create("e", &file);
    assert!(error.contains("boot.profile: boot profile: line 3: expected FIRST and LENGTH"), "{error}");
}

#[test]
fn a_file_gives_its_clone_a_boot_profile() {
    let world = World::new();
    fs::write(world.path("boot.profile"), format!("size {SIZE}\nregion {REGION}\n{REGION} 1\n")).unwrap();
    world.declare("", "hydrate-first = \"boot.profile\"");
    let server = world.serve();
    let table = server.says(&["table", "c"]);
    assert!(table.contains(" 6 hydration_threshold 64 hydration_batch_size 16 hydrate_first 16"), "{table}");
    drop(server);
    fs::write(world.path("boot.profile"), "nonsense").unwrap();
    let refused = udm(&["serve", "--check", &world.word("udm.toml")]).output().unwrap();
    let error = text(&refused.stderr);
    assert!(error.contains("devices.c: hydrate-first: ") && error.contains("line 1"), "{error}");
}

#[test]
fn metrics_and_top_have_the_copy() {
    let (world, server) = (World::new(), Server::start(&[]));
    world.create(&server, "c", &["--pause"]);
    let mut client = Client::connect(&server.nbd, "c");
    assert_eq!(client.one(NbdCommand::Write, 512, 512), 0);
    let (_, _, metrics) = server.http("GET", "/metrics", "");
    for line in [
        format!("udm_clone_bytes{{device=\"c\"}} {SIZE}"),
        format!("udm_clone_hydrated_bytes{{device=\"c\"}} {REGION}"),
        "udm_clone_hydrating{device=\"c\"} 0".into(),
        "udm_clone_metadata_writable{device=\"c\"} 1".into(),
        "udm_clone_source_errors_total{device=\"c\"} 0".into(),
    ] {
        assert!(metrics.contains(&line), "{line}: {metrics}");
    }
    // A source that shrinks cannot be read any more.
    File::options().write(true).open(world.path("source")).unwrap().set_len(REGION).unwrap();
    server.says(&["clone", "start", "c"]);
    until("errors of the source", || {
        let list = json(&server.says(&["clone", "list", "--json"]));
        list[0]["source_errors"].as_u64().filter(|errors| *errors > 0)
    });
    let top = json(&server.says(&["top", "--once", "--json", "--interval", "0.2"]));
    let clone = &top["devices"][0]["clone"];
    assert!(clone["source_errors"].as_u64() > Some(0) && clone["hydrated_percent"] == 0.7, "{top}");
}

/// Holes of the source take neither reads nor space.
#[test]
fn a_sparse_source_stays_sparse() {
    let (world, server) = (World::new(), Server::start(&[]));
    let size = 4_u64 << 30;
    let source = File::create(world.path("source")).unwrap();
    source.set_len(size).unwrap();
    source.write_all_at(&data(), 1 << 30).unwrap();
    source.write_all_at(b"end", size - 3).unwrap();
    world.create(&server, "c", &["--wait"]);
    server.says(&["clone", "finish", "c"]);
    assert!(blocks(&world.path("c")) <= 2 * SIZE, "{} bytes", blocks(&world.path("c")));
    if has("qemu-img") {
        let args = ["compare", "-f", "raw", "-F", "raw", &world.word("source"), &world.word("c")];
        let out = Command::new("qemu-img").args(args).output().unwrap();
        assert!(out.status.success(), "{}", text(&out.stdout));
    }
}

/// Bytes that a file takes.
fn blocks(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

/// Snapshots over a clone: several machines from one image that is still being copied.
#[test]
fn a_group_of_snapshots_over_a_clone() {
    let (world, server) = (World::new(), Server::start(&[]));
    world.create(&server, "image", &["--pause"]);
    let stores = world.word("");
    // The clone itself would be read-only.
    let client = Client::connect(&server.nbd, "image");
    let error = server.refuses(&["snapshot", "create", "--store", &stores, "vm1", "--of", "image"]);
    drop(client);
    let origin = format!("0 {} snapshot-origin @image", SIZE / 512);
    assert!(error.contains(&format!("create a device \"{origin}\" that they can write")), "{error}");
    server.says(&["create", "golden", "--table", &origin]);
    let group = "vm1=golden,vm2=golden,vm3=golden";
    server.says(&["snapshot", "create", "--transient", "--store", &stores, "--group", group]);
    for (vm, byte) in [("vm1", 5_u64), ("vm2", 6)] {
        let mut client = Client::connect(&server.nbd, vm);
        assert_eq!(client.one(NbdCommand::Write, byte * REGION, 4096), 0);
        assert_eq!(client.one(NbdCommand::Read, byte * REGION, 65536), 0);
    }
    // The image is copied and finished below its machines.
    server.says(&["clone", "start", "image"]);
    server.says(&["clone", "wait", "image"]);
    server.says(&["clone", "finish", "image"]);
    fs::remove_file(world.path("source")).unwrap();
    let read = |name: &str| {
        let mut client = Client::connect(&server.nbd, name);
        client.send(CommandFlags::empty(), NbdCommand::Read, 0, SIZE, &[]).unwrap();
        client.answer().unwrap().2
    };
    assert!(read("golden") == data() && read("vm3") == data());
    let mut expected = data();
    expected[5 * REGION as usize..][..4096].fill(1);
    assert!(read("vm1") == expected);
}
