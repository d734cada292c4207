//! Clones that were created by name return with their server: after a kill, a restart and an
//! upgrade, with their sources or without.

mod support;

use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use support::nbd::Client;
use support::web_server::WebServer;
use support::{Server, until};
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, NbdCommand};

const SIZE: u64 = 4 << 20;
const REGION: u64 = 64 << 10;
const EIO: u32 = 5;

/// Data without two equal sectors.
fn data() -> Vec<u8> {
    (0..SIZE / 8).flat_map(|word| (word * 0x9e37_79b9 + 1).to_le_bytes()).collect()
}

/// A folder with a source and a state folder, for servers that start one after the other.
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

    /// Starts a server without devices.
    fn serve(&self) -> Server {
        self.serve_with(&[], &[])
    }

    fn serve_with(&self, devices: &[&str], options: &[&str]) -> Server {
        Server::start_with(devices, &[&["--state", &self.word("state")], options].concat())
    }

    /// Creates the clone `name` of `source` in the file `name`.
    fn create(&self, server: &Server, name: &str, source: &str, more: &[&str]) {
        let to = self.word(name);
        server.says(&[&["clone", "create", name, "--from", source, "--to", &to], more].concat());
    }

    fn create_paused(&self, server: &Server, name: &str) {
        self.create(server, name, &self.word("source"), &["--pause"]);
    }
}

/// What `udm clone list` says of a clone; `Null` if it has none of that name.
fn find(server: &Server, name: &str) -> Value {
    let list: Value = serde_json::from_str(&server.says(&["clone", "list", "--json"])).unwrap();
    let found = list.as_array().unwrap().iter().find(|one| one["name"] == name).cloned();
    found.unwrap_or_default()
}

fn state(server: &Server, name: &str) -> String {
    find(server, name)["state"].as_str().unwrap_or_default().to_owned()
}

fn until_state(server: &Server, name: &str, expected: &str) {
    until(expected, || (state(server, name) == expected).then_some(()));
}

/// Reads a region. Returns the error or the data.
fn read(server: &Server, name: &str, region: u64) -> Result<Vec<u8>, u32> {
    let mut client = Client::connect(&server.nbd, name);
    client.send(CommandFlags::empty(), NbdCommand::Read, region * REGION, REGION, &[]).unwrap();
    match client.answer().unwrap() {
        (_, 0, data) => Ok(data),
        (_, error, _) => Err(error),
    }
}

fn region(region: u64) -> Vec<u8> {
    data()[(region * REGION) as usize..((region + 1) * REGION) as usize].to_vec()
}

/// Writes ones to the first half of a region, which is hydrated by that, and makes it durable.
fn write_half(server: &Server, name: &str, region: u64) {
    let mut client = Client::connect(&server.nbd, name);
    assert_eq!(client.one(NbdCommand::Write, region * REGION, REGION / 2), 0);
    assert_eq!(client.one(NbdCommand::Flush, 0, 0), 0);
}

fn half_written(number: u64) -> Vec<u8> {
    let mut expected = region(number);
    expected[..REGION as usize / 2].fill(1);
    expected
}

fn log_line<'a>(log: &'a str, part: &str) -> &'a str {
    log.lines().find(|line| line.contains(part)).unwrap_or_else(|| panic!("no {part:?} in {log}"))
}

#[test]
fn clones_return_as_they_were() {
    let world = World::new();
    let mut server = world.serve();
    fs::write(world.path("profile"), format!("size {SIZE}\nregion {REGION}\n1048576 65536\n")).unwrap();
    let profile = world.word("profile");
    let source = world.word("source");
    world.create(&server, "paused", &source, &["--pause", "--hydrate-first", &profile]);
    world.create_paused(&server, "old");
    world.create_paused(&server, "gone");
    world.create_paused(&server, "ended");
    world.create(&server, "running", &source, &["--region-size", "4k", "--wait"]);
    write_half(&server, "paused", 3);
    server.says(&["rename", "old", "new"]);
    server.says(&["remove", "gone"]);
    server.says(&["clone", "start", "ended"]);
    server.says(&["message", "new", "0", "hydration_threshold 7"]);
    server.says(&["throttle", "paused", "iops=9000"]);
    server.says(&["throttle", "new", "--group", "g", "bps=2G"]);
    server.says(&["throttle", "running", "--group", "g"]);
    server.says(&["throttle", "running", "none"]);
    server.says(&["throttle", "ended", "iops=8000"]);
    let limits = |server: &Server| {
        let mut lines: Vec<String> = server.says(&["throttle"]).lines().map(String::from).collect();
        lines.sort();
        lines
    };
    let limited = limits(&server);
    assert_eq!(limited.len(), 3, "{limited:?}");
    until_state(&server, "ended", "done");
    server.says(&["clone", "finish", "ended"]);
    server.kill();
    // A clone that was finished needs neither its source nor its metadata.
    fs::remove_file(world.path("ended.clone")).unwrap();

    let mut server = world.serve();
    let names = ["ended", "new", "paused", "running"];
    let mut devices: Vec<String> =
        server.says(&["ls"]).lines().map(|line| line.split_whitespace().next().unwrap().into()).collect();
    devices.sort();
    assert_eq!(devices, names, "{}", server.log());
    let states = ["new", "paused", "running"].map(|name| state(&server, name));
    assert_eq!(states, ["stopped", "stopped", "done"]);
    assert_eq!(find(&server, "paused")["hydrated_regions"], 1);
    assert_eq!(find(&server, "running")["region_bytes"], 4096);
    assert!(
        server.says(&["table", "paused"]).contains("hydrate_first 16"),
        "{}",
        server.says(&["table", "paused"])
    );
    assert!(server.says(&["table", "new"]).contains("hydration_threshold 7"));
    assert!(server.says(&["table", "ended"]).contains(" linear "));
    assert_eq!(limits(&server), limited);
    for number in 0..SIZE / REGION {
        let expected = if number == 3 { half_written(3) } else { region(number) };
        assert_eq!(read(&server, "paused", number), Ok(expected), "region {number}");
        assert_eq!(read(&server, "ended", number), Ok(region(number)));
    }
    // The start holds too, and a clean end is no other case.
    server.says(&["clone", "start", "new"]);
    until_state(&server, "new", "done");
    server.says(&["clone", "pause", "paused"]);
    support::signal(server.pid(), rustix::process::Signal::TERM);
    server.child.wait().unwrap();

    let server = world.serve();
    assert_eq!((state(&server, "new"), state(&server, "paused")), ("done".into(), "stopped".into()));
    // What is created from a table does not return, and a table that replaces a clone ends it.
    server.says(&["load", "new", "--table", &format!("0 {} error", SIZE / 512)]);
    server.says(&["resume", "new"]);
    server.says(&["remove", "ended"]);
    drop(server);
    let server = world.serve();
    assert_eq!(server.says(&["ls"]).lines().count(), 2, "{}", server.says(&["ls"]));
}

#[test]
fn without_its_source_the_hydrated_part_is_served() {
    let world = World::new();
    let server = world.serve();
    world.create_paused(&server, "c");
    write_half(&server, "c", 3);
    server.says(&["clone", "start", "c"]);
    server.says(&["clone", "pause", "c"]);
    let hydrated = find(&server, "c")["hydrated_regions"].as_u64().unwrap();
    drop(server);
    if hydrated == SIZE / REGION {
        return support::report_skip("the clone was complete before it was paused");
    }
    fs::rename(world.path("source"), world.path("away")).unwrap();

    let server = world.serve();
    let clone = find(&server, "c");
    assert_eq!((&clone["state"], clone["size_bytes"].as_u64()), (&"waiting".into(), Some(SIZE)), "{clone}");
    assert!(clone["source"].as_str().unwrap().contains("/source?"), "{clone}");
    let list = server.says(&["clone", "list"]);
    assert!(
        list.lines().any(|line| line.starts_with("c: waiting: ") && line.contains("No such file")),
        "{list}"
    );
    log_line(&server.log(), "c: the clone is served without its source: ");
    assert_eq!(read(&server, "c", 3), Ok(half_written(3)));
    assert_eq!(read(&server, "c", SIZE / REGION - 1), Err(EIO));
    let mut client = Client::connect(&server.nbd, "c");
    assert_eq!(client.one(NbdCommand::Write, SIZE - REGION, 512), EIO, "a part of a region needs the source");
    assert_eq!(client.one(NbdCommand::Write, SIZE - REGION, REGION), 0, "a whole region does not");
    // Another size, another content: the reason is said, and nothing of it is read.
    fs::write(world.path("source"), vec![7; SIZE as usize / 2]).unwrap();
    until("another size", || {
        find(&server, "c")["error"].as_str()?.contains("and had 8192 when").then_some(())
    });
    fs::write(world.path("source"), vec![7; SIZE as usize]).unwrap();
    until("another content", || {
        find(&server, "c")["error"]
            .as_str()?
            .contains("is not the source with which this clone began")
            .then_some(())
    });
    assert_eq!(read(&server, "c", 20), Err(EIO));
    fs::rename(world.path("away"), world.path("source")).unwrap();
    until_state(&server, "c", "stopped");
    assert_eq!(read(&server, "c", 20), Ok(region(20)));
    assert_eq!(read(&server, "c", SIZE / REGION - 1), Ok(vec![1; REGION as usize]));
    // The verb from before the restart still holds, and the next one does, too.
    server.says(&["clone", "start", "c"]);
    until_state(&server, "c", "done");
    assert_eq!(fs::read(world.path("c")).unwrap()[..(REGION * 3) as usize], data()[..(REGION * 3) as usize]);
}

#[test]
fn another_destination_or_damaged_metadata_is_refused() {
    let world = World::new();
    let server = world.serve();
    for name in ["missing", "other", "damaged", "taken"] {
        world.create_paused(&server, name);
        write_half(&server, name, 3);
    }
    drop(server);
    fs::rename(world.path("missing"), world.path("missing.away")).unwrap();
    fs::rename(world.path("other"), world.path("other.away")).unwrap();
    fs::copy(world.path("other.away"), world.path("other")).unwrap();
    let metadata = File::options().write(true).open(world.path("damaged.clone")).unwrap();
    metadata.write_all_at(&[0x5a; 8192], 0).unwrap();

    let table = format!("taken=0 {} error", SIZE / 512);
    let server = world.serve_with(&[&table], &[]);
    for (name, reason) in [
        ("missing", "No such file"),
        ("other", "is another file than that of the clone"),
        ("damaged", "Failed to load metadata"),
        ("taken", "another device has its name"),
    ] {
        let clone = find(&server, name);
        assert_eq!(clone["state"], "absent", "{clone}");
        assert!(clone["error"].as_str().unwrap().contains(reason), "{name}: {clone}");
        log_line(&server.log(), &format!("{name}: the clone has not returned: "));
    }
    assert_eq!(server.says(&["ls"]).lines().count(), 1);
    // What returns is served at once.
    fs::rename(world.path("missing.away"), world.path("missing")).unwrap();
    until_state(&server, "missing", "stopped");
    assert_eq!(read(&server, "missing", 3), Ok(half_written(3)));
    // What will not return is forgotten.
    let error = server.refuses(&["clone", "forget", "missing"]);
    assert!(error.contains("it is served"), "{error}");
    server.says(&["clone", "forget", "damaged"]);
    server.says(&["clone", "forget", "taken"]);
    let error = server.refuses(&["clone", "forget", "damaged"]);
    assert!(error.contains("no clone of that name waits"), "{error}");
    drop(server);
    let server = world.serve();
    assert_eq!(find(&server, "damaged"), Value::Null);
    assert_eq!(find(&server, "taken"), Value::Null);
    fs::rename(world.path("other.away"), world.path("other")).unwrap();
    until_state(&server, "other", "stopped");
    assert_eq!(read(&server, "other", 3), Ok(half_written(3)));
}

#[test]
fn an_object_that_is_away_or_has_changed() {
    let world = World::new();
    let web = WebServer::start(data());
    let server = world.serve();
    world.create(&server, "waits", &web.uri("?deadline=none"), &["--pause"]);
    world.create(&server, "fails", &web.uri("?deadline=200ms"), &["--pause"]);
    write_half(&server, "waits", 3);
    write_half(&server, "fails", 3);
    drop(server);
    web.set_gone(true);

    let server = world.serve();
    assert_eq!((state(&server, "waits"), state(&server, "fails")), ("stopped".into(), "stopped".into()));
    for name in ["waits", "fails"] {
        assert_eq!(read(&server, name, 3), Ok(half_written(3)), "{name}");
    }
    assert_ne!(read(&server, "fails", 20), Ok(region(20)));
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| read(&server, "waits", 21));
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert!(!reads.is_finished(), "it waits as set");
        web.set_gone(false);
        assert_eq!(reads.join().unwrap(), Ok(region(21)));
    });
    drop(server);
    web.set_object(vec![9; SIZE as usize], "\"two\"");
    let server = world.serve();
    assert_eq!(read(&server, "waits", 3), Ok(half_written(3)));
    assert!(read(&server, "waits", 22).is_err(), "never of another version");
    until("a line", || server.log().contains("reads fail: the object has changed").then_some(()));
}

#[test]
fn an_upgrade_and_another_server() {
    let world = World::new();
    let web = WebServer::start(data());
    let mut server = world.serve();
    world.create(&server, "c", &web.uri(""), &[]);
    server.says(&["clone", "pause", "c"]);
    world.create_paused(&server, "file");
    write_half(&server, "file", 3);
    let hydrated = find(&server, "c")["hydrated_regions"].clone();
    // The version of the object is that of the clone, also for the next program.
    web.set_object(vec![9; SIZE as usize], "\"two\"");
    server.upgrade(&[]);
    assert_eq!(
        (state(&server, "file"), find(&server, "file")["hydrated_regions"].clone()),
        ("stopped".into(), 1.into())
    );
    if hydrated != SIZE / REGION {
        assert_eq!(state(&server, "c"), "stopped");
        assert!(read(&server, "c", SIZE / REGION - 1).is_err(), "never of another version");
    }
    // A second server with the same folder does not take what the first one has.
    let second = world.serve();
    assert_eq!(second.says(&["ls"]).trim(), "No devices found");
    assert_eq!(find(&second, "file")["error"], "another server has it");
    let (from, to) = (world.word("source"), world.word("file"));
    let error = second.refuses(&["clone", "create", "mine", "--from", &from, "--to", &to]);
    assert!(error.contains("another server has the clone file") || error.contains("in use"), "{error}");
    drop(second);
    server.says(&["rename", "file", "file2"]);
    server.kill();
    let server = world.serve();
    assert_eq!((state(&server, "file2"), find(&server, "file")), ("stopped".into(), Value::Null));
    assert_eq!(read(&server, "file2", 3), Ok(half_written(3)));
}

/// A clone, an origin over it that a file declares, and the disks of machines over that.
#[test]
fn snapshots_return_after_their_clone() {
    let world = World::new();
    let golden = format!("golden=0 {} snapshot-origin @image", SIZE / 512);
    let mut server = world.serve();
    world.create_paused(&server, "image");
    server.says(&["create", "golden", "--table", golden.split_once('=').unwrap().1]);
    let store = world.folder.path().display().to_string();
    server.says(&["snapshot", "create", "--store", &store, "--group", "vm1=golden,vm2=golden"]);
    write_half(&server, "vm1", 5);
    server.kill();
    let server = world.serve_with(&[&golden], &[]);
    assert_eq!(read(&server, "vm1", 5), Ok(half_written(5)));
    assert_eq!(read(&server, "vm2", 5), Ok(region(5)));
    assert_eq!(state(&server, "image"), "stopped");
}

/// Disks directly over a clone of an object, which is read-only then.
#[test]
fn disks_of_machines_over_an_image_that_is_still_remote() {
    let world = World::new();
    let web = WebServer::start(data());
    let mut server = world.serve();
    world.create(&server, "image", &web.uri(""), &["--pause"]);
    let store = world.folder.path().display().to_string();
    let group: Vec<String> = (0..100).map(|number| format!("vm{number}=image")).collect();
    let client = Client::connect(&server.nbd, "image");
    let create = ["snapshot", "create", "--store", &store, "--group", &group.join(",")];
    let error = server.refuses(&create);
    assert!(error.contains("image: clients use it, and a clone with snapshots is read-only"), "{error}");
    drop(client);
    until("disks", || server.verb(&create).status.success().then_some(()));
    let list: Value = serde_json::from_str(&server.says(&["snapshot", "list", "--json"])).unwrap();
    assert_eq!((list.as_array().unwrap().len(), &list[0]["origin"]), (100, &"image".into()));
    write_half(&server, "vm7", 5);
    let check = |server: &Server| {
        assert_eq!(read(server, "vm7", 5), Ok(half_written(5)));
        assert_eq!(read(server, "vm8", 5), Ok(region(5)));
        assert_eq!(read(server, "image", 5), Ok(region(5)));
        let mut client = Client::connect(&server.nbd, "image");
        assert_ne!(client.one(NbdCommand::Write, 0, 512), 0, "vm8 would see it");
    };
    check(&server);
    let error = server.refuses(&["remove", "image"]);
    assert!(error.contains("busy") || error.contains("open"), "{error}");
    server.kill();

    let mut server = world.serve();
    assert_eq!(server.says(&["ls"]).lines().count(), 101, "{}", server.log());
    check(&server);
    server.says(&["clone", "start", "image"]);
    server.says(&["clone", "wait", "image"]);
    server.says(&["clone", "finish", "image"]);
    check(&server);
    server.kill();
    web.set_gone(true);
    let server = world.serve();
    assert_eq!(server.says(&["ls"]).lines().count(), 101, "{}", server.log());
    check(&server);
}
