//! `udm move`: what it does under clients, what it survives, and what it refuses.

mod support;

use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use support::moved_disk::{MovedDisk, REGION, SIZE, data, read, write};
use support::nbd::Client;
use support::servers::Nbdkit;
use support::{Server, has, until};
use udm_wire::nbd::NbdCommand;

#[test]
fn a_disk_moves_under_a_client_and_leaves_its_old_place() {
    let mut world = MovedDisk::new();
    assert_eq!(world.server.says(&["move", "list"]), "No moves found\n");
    let is_over = &AtomicBool::new(false);
    let expected = thread::scope(|scope| {
        let mut client = world.client();
        let load = scope.spawn(move || {
            let mut expected = data();
            for round in 0_u64.. {
                let at = round * 20_992 % (SIZE - 4096) / 512 * 512;
                assert!(read(&mut client, at, 4096) == expected[at as usize..][..4096], "{round}");
                write(&mut client, at, 1024);
                expected[at as usize..][..1024].fill(1);
                if is_over.load(Ordering::Relaxed) && round > 100 {
                    break;
                }
            }
            expected
        });
        let moved = world.move_to("new");
        is_over.store(true, Ordering::Relaxed);
        for (key, value) in [
            ("state", Value::from("done")),
            ("source", world.word("old").into()),
            ("destination", world.word("new").into()),
            ("copied_bytes", SIZE.into()),
        ] {
            assert_eq!(moved[key], value, "{key}");
        }
        load.join().unwrap()
    });
    let table = world.server.says(&["table", "disk"]);
    assert!(table.contains(" linear "), "{table}");
    assert!(world.read("new") == expected, "other data");
    // The zeroes at the end take no space, and only who runs the server can read it.
    let made = fs::metadata(world.path("new")).unwrap();
    assert!(made.blocks() * 512 < SIZE * 7 / 8 && made.mode() & 0o777 == 0o600, "{made:?}");
    // A server with the old words serves the new place, and says so.
    write(&mut world.client(), 0, 512);
    world.restart();
    let log = world.server.log();
    let line = format!("disk: {} was moved to {}, which is served", world.word("old"), world.word("new"));
    assert!(log.contains(&line), "{log}");
    assert!(read(&mut world.client(), 0, 512) == [1; 512]);
    assert!(world.read("old")[..512] == data()[..512] || expected[..512] == [1; 512]);
    // Nothing else gets the old place, until it is forgotten.
    let table = format!("0 8 linear {} 0", world.word("old"));
    let error = world.refusal(&["create", "part", "--table", &table]);
    assert!(error.contains("was moved to"), "{error}");
    let table = format!("0 8 linear {} 8\n8 8 zero", world.word("old"));
    let error = world.refusal(&["create", "part", "--table", &table]);
    assert!(error.contains("has old data: disk was moved from there to"), "{error}");
    world.server.says(&["move", "forget", &world.word("old")]);
    world.server.says(&["create", "part", "--table", &table]);
    assert!(
        world.refusal(&["move", "forget", &world.word("old")]).contains("no disk was moved away from it")
    );
}

#[test]
fn a_move_is_stopped_at_any_moment_and_the_disk_stays() {
    let world = MovedDisk::new();
    let mut client = world.client();
    for round in 0..20 {
        let to = world.word(&format!("new{round}"));
        world.server.says(&["move", "disk", "--to", &to]);
        write(&mut client, round * REGION + 512, 512);
        thread::sleep(std::time::Duration::from_millis(round * 7));
        let stopped = world.server.verb(&["move", "stop", "disk"]);
        if !stopped.status.success() {
            // The switch had begun.
            world.until_state("done");
            world.server.says(&["move", "disk", "--to", &world.word("old"), "--wait"]);
            continue;
        }
        assert_eq!(world.state(), "stopped");
        let table = world.server.says(&["table", "disk"]);
        assert!(table.contains(" linear "), "{table}");
        assert_eq!(client.one(NbdCommand::Flush, 0, 0), 0);
        assert!(world.read("old")[(round * REGION + 512) as usize..][..512] == [1; 512]);
    }
    assert!(world.refusal(&["move", "stop", "disk"]).contains("it is not being moved"));
}

/// A move that was not done begins again after a kill, and after a restart in order.
#[test]
fn a_move_continues_after_a_restart_of_the_server() {
    let mut world = MovedDisk::new();
    world.begin(&world.word("new"));
    write(&mut world.client(), 4096, 512);
    world.restart();
    world.until_state("done");
    assert!(world.read("new")[4096..4608] == [1; 512]);
    world.begin(&world.word("old"));
    write(&mut world.client(), 8192, 512);
    support::signal(world.server.pid(), rustix::process::Signal::TERM);
    world.server.child.wait().unwrap();
    world.server = MovedDisk::serve(&world.folder, &[]);
    world.until_state("done");
    assert!(world.read("old")[8192..8704] == [1; 512]);
    assert_eq!(world.list()[0]["old_places"], Value::from(vec![world.word("new")]));
}

#[test]
fn what_is_refused_changes_nothing() {
    let world = MovedDisk::new();
    let file = |name: &str, len: u64| {
        File::create(world.path(name)).unwrap().set_len(len).unwrap();
        world.word(name)
    };
    let used = file("used", SIZE);
    File::options().write(true).open(world.path("used")).unwrap().write_all_at(b"x", SIZE - 1).unwrap();
    let (small, claimed) = (file("small", SIZE - 512), file("claimed", SIZE));
    let (meta, source) = (file("meta", 1 << 20), file("source", SIZE));
    let clone = format!("0 {} clone {meta} {claimed} {source} 128", SIZE / 512);
    world.server.says(&["create", "c", "--table", &clone]);
    world.server.says(&["create", "striped", "--table", &format!("0 256 striped 1 8 {source} 0")]);
    let paths = format!("0 256 multipath 0 0 1 1 round-robin 0 1 1 {source} 1");
    world.server.says(&["create", "paths", "--table", &paths]);
    world.server.says(&["create", "memory", "--table", "0 2048 linear mem:1M 0"]);
    let new = world.word("new");
    for (name, to, why) in [
        ("nothing", &new, "no device of that name"),
        ("disk", &used, "has data, and is not overwritten without --force"),
        ("disk", &small, "has 16776704 bytes, and the disk 16777216"),
        ("disk", &world.word("old"), "it is on "),
        ("disk", &claimed, "exclusively"),
        ("disk", &"mem:16M".to_owned(), "its content ends with the server"),
        ("disk", &format!("{}/no/file", world.word("folder")), "No such file"),
        (
            "striped",
            &new,
            "its table is striped, and a move needs one linear line: put it into a device of its own",
        ),
        ("paths", &new, "its table is multipath, which no other table replaces while it is live"),
        ("c", &new, "it is a clone: finish it first"),
        ("memory", &new, "its content ends with the server"),
    ] {
        let error = world.refusal(&["move", name, "--to", to]);
        assert!(error.contains(why), "{name} {to}: {error}");
        assert!(!world.path("new").exists(), "{error}");
    }
    assert_eq!(world.list(), Value::Array(Vec::new()));
    let table = format!("8 8 linear {} 8", world.word("old"));
    world.server.says(&["create", "other", "--table", &format!("0 8 zero\n{table}")]);
    assert!(world.refusal(&["move", "disk", "--to", &new]).contains("other uses "));
    world.server.says(&["remove", "other"]);
    let snapshot = world.word("snap.cow");
    world.server.says(&["snapshot", "create", "snap", "--of", "disk", "--store", &snapshot]);
    assert!(world.refusal(&["move", "disk", "--to", &new]).contains("it has snapshots"));
    assert!(world.refusal(&["move", "snap", "--to", &new]).contains("it is a snapshot"));
    world.server.says(&["snapshot", "remove", "snap"]);
    // What is overwritten was named twice.
    world.server.says(&["move", "disk", "--to", &used, "--force", "--wait"]);
    assert!(world.read("used") == data());
}

/// A configuration file that names the old place, before and after its device changes there.
#[test]
fn a_file_that_names_the_old_place_serves_the_new_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("old"), data()).unwrap();
    let config = |table: &str| fs::write(path("udm.toml"), format!("[devices.disk]\ntable = \"{table}\"\n"));
    let (sectors, old) = (SIZE / 512, path("old"));
    config(&format!("0 {sectors} linear {old} 0")).unwrap();
    let (file, state) = (path("udm.toml"), path("state"));
    let server = || Server::start_with(&[], &[&file, "--state", &state]);
    let mut first = server();
    first.says(&["move", "disk", "--to", &path("new"), "--wait"]);
    write(&mut Client::connect(&first.nbd, "disk"), 0, 512);
    first.says(&["reconfigure"]);
    // The table changes in its words, but not in its place.
    config(&old).unwrap();
    first.says(&["reconfigure"]);
    assert!(read(&mut Client::connect(&first.nbd, "disk"), 0, 512) == [1; 512]);
    config(&format!("0 {} linear {old} 0", sectors - 8)).unwrap();
    let refused = first.verb(&["reconfigure"]);
    let text = support::text(&refused.stdout) + &support::text(&refused.stderr);
    assert!(!refused.status.success() && text.contains("was moved to"), "{text}");
    assert!(read(&mut Client::connect(&first.nbd, "disk"), 0, 512) == [1; 512]);
    // Another file under the old name is not the disk.
    config(&old).unwrap();
    first.kill();
    fs::remove_file(&old).unwrap();
    let mut second = server();
    assert!(read(&mut Client::connect(&second.nbd, "disk"), 0, 512) == [1; 512]);
    second.kill();
    fs::write(&old, data()).unwrap();
    let third = server();
    let log = third.log();
    assert!(log.contains("another disk has its name now"), "{log}");
    assert!(!third.says(&["ls"]).contains("disk"), "{log}");
    // The new place in the file: no more warnings.
    config(&path("new")).unwrap();
    third.says(&["reconfigure"]);
    assert!(read(&mut Client::connect(&third.nbd, "disk"), 0, 512) == [1; 512]);
}

/// Other changes of the device during a move.
#[test]
fn changes_of_the_device_during_a_move_hold_or_are_refused() {
    let world = MovedDisk::new();
    let server = &world.server;
    world.begin(&world.word("new"));
    let mut client = world.client();
    let error = world.refusal(&["move", "disk", "--to", &world.word("other")]);
    assert!(error.contains("it is being moved to") && !world.path("other").exists(), "{error}");
    let error = world.refusal(&["snapshot", "create", "s", "--of", "disk", "--store", &world.word("s.cow")]);
    assert!(error.contains("mirror"), "{error}");
    let error =
        world.refusal(&["create", "thief", "--table", &format!("0 8 linear {} 0", world.word("new"))]);
    assert!(error.contains("is not complete: disk is being moved there"), "{error}");
    let error =
        world.refusal(&["create", "thief", "--table", &format!("0 8 linear {} 0", world.word("old"))]);
    assert!(error.contains("is the disk of disk, which is being moved"), "{error}");
    server.says(&["suspend", "disk"]);
    server.says(&["move", "start", "disk"]);
    thread::sleep(std::time::Duration::from_millis(200));
    assert_ne!(world.state(), "done", "no switch of a suspended device");
    server.says(&["resume", "disk"]);
    write(&mut client, 0, 512);
    server.says(&["rename", "disk", "renamed"]);
    world.until_state("done");
    assert_eq!(world.list()[0]["name"], "renamed");
    assert!(world.read("new")[..512] == [1; 512]);
    // Another table ends a move. The old words are those of the new place by now.
    server.says(&["rename", "renamed", "disk"]);
    world.begin(&world.word("third"));
    server.says(&["load", "disk", "--table", &format!("0 {} linear {} 0", SIZE / 512, world.word("old"))]);
    server.says(&["resume", "disk"]);
    until("the end", || (world.state() == "failed").then_some(()));
    assert!(world.list()[0]["error"].as_str().unwrap().contains("its table was replaced"));
    write(&mut client, 512, 512);
    assert_eq!(client.one(NbdCommand::Flush, 0, 0), 0);
    assert!(world.read("new")[..1024] == [1; 1024]);
    // A removed device goes on when it is created again.
    world.begin(&world.word("fourth"));
    drop(client);
    until("a removal", || server.verb(&["remove", "disk"]).status.success().then_some(()));
    server.says(&["create", "disk", "--table", &format!("0 {} linear {} 0", SIZE / 512, world.word("old"))]);
    world.until_state("done");
    assert!(world.read("fourth")[..1024] == [1; 1024]);
}

/// The export of another server is the destination. That server is killed: the disk lives.
#[test]
fn a_destination_that_is_gone_for_a_while_is_waited_for() {
    if !has("nbdkit") {
        return;
    }
    let world = MovedDisk::new();
    fs::write(world.path("there"), vec![0; SIZE as usize]).unwrap();
    let mut there = Nbdkit::start(world.path("there.sock"), &["file", &world.word("there")]);
    world.begin(&there.uri());
    let mut client = world.client();
    for at in 0..16 {
        write(&mut client, at * REGION, 512);
    }
    there.kill();
    for at in 0..32 {
        write(&mut client, at * REGION + 1024, 512);
    }
    world.server.says(&["move", "start", "disk"]);
    until("a move that waits", || (world.state() == "waiting").then_some(()));
    assert!(!world.list()[0]["error"].is_null(), "{}", world.list());
    assert!(world.server.says(&["move", "list"]).lines().count() == 3, "a line for the error");
    there.again();
    world.until_state("done");
    write(&mut client, 4096, 512);
    assert_eq!(client.one(NbdCommand::Flush, 0, 0), 0);
    let there = world.read("there");
    assert!(there[4096..4608] == [1; 512] && (0..32).all(|at| there[(at * REGION + 1024) as usize] == 1));
}

/// A destination without space: the move has failed, and the disk is where it was.
#[test]
fn a_full_destination_ends_the_move_and_not_the_disk() {
    if !has("nbdkit") {
        return;
    }
    let world = MovedDisk::new();
    let full = ["--filter=error", "memory", "16M", "error-pwrite=ENOSPC", "error-pwrite-rate=100%"];
    let full = Nbdkit::start(world.path("full.sock"), &full);
    let mut client = world.client();
    for round in 0..2 {
        // Once by a copy in the background, and once by a write of a client.
        world.server.says(&["move", "disk", "--to", &full.uri()]);
        if round == 1 {
            write(&mut client, 8192, 512);
        }
        until("the end", || (world.state() == "failed").then_some(()));
        let list = world.list();
        assert!(list[0]["error"].as_str().unwrap().contains("no space"), "{list}");
        write(&mut client, 512, 512);
        assert!(world.server.says(&["table", "disk"]).contains(" linear "));
    }
    let error = world.refusal(&["move", "disk", "--to", &full.uri(), "--wait"]);
    assert!(error.contains("failed") && error.contains("no space"), "{error}");
    drop(client);
    // The record is gone: the next server does not begin again.
    let mut world = world;
    world.restart();
    assert_eq!(world.list(), Value::Array(Vec::new()));
    assert!(world.read("old")[512..1024] == [1; 512]);
}

/// A place of the disk that cannot be read is tried again, and a write makes it whole.
#[test]
fn bad_sectors_of_the_old_place_are_reported_and_no_client_fails() {
    let world = MovedDisk::new();
    let sectors = SIZE / 512;
    world.server.says(&["remove", "disk"]);
    world.server.says(&[
        "create",
        "bad",
        "--table",
        &format!("0 {sectors} dust {} 0 512", world.word("old")),
    ]);
    world.server.says(&["message", "bad", "0", "addbadblock", "1000"]);
    world.server.says(&["message", "bad", "0", "enable"]);
    world.server.says(&["create", "over", "--table", &format!("0 {sectors} linear @bad 0")]);
    world.server.says(&["move", "over", "--to", &world.word("new")]);
    until("a report", || world.list()[0]["error"].as_str().map(|error| error.contains("a read failed")));
    let mut client = Client::connect(&world.server.nbd, "over");
    // In the region of the bad sector, beside it.
    write(&mut client, 1001 * 512, 512);
    assert_eq!(world.state(), "copying");
    write(&mut client, 1000 * 512, 512);
    world.until_state("done");
    assert!(read(&mut client, 1000 * 512, 1024) == [1; 1024]);
    assert!(world.read("new")[1000 * 512..1002 * 512] == [1; 1024]);
}
