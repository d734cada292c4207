//! The log of a move: after a kill, an upgrade, or a destination that was gone, only what may
//! differ is copied. Logs that cannot be used are refused, and then all is copied.

mod support;

use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use support::moved_disk::{MovedDisk, REGION, SIZE, data, write};
use support::servers::Nbdkit;
use support::{has, until};
use udm_wire::nbd::NbdCommand;

/// Copies all but `left` regions by writes, so that the log says so. The move is paused.
fn copy_by_writes(disk: &MovedDisk, left: u64) {
    let mut client = disk.client();
    for region in 0..SIZE / REGION - left {
        write(&mut client, region * REGION, REGION);
    }
    until("a clean log", || {
        let unlogged = disk.list()[0]["unlogged_bytes"].as_u64();
        (unlogged == Some(left * REGION)).then_some(())
    });
}

/// The data after [`copy_by_writes`].
fn written(left: u64) -> Vec<u8> {
    let mut expected = data();
    expected[..(SIZE - left * REGION) as usize].fill(1);
    expected
}

/// Overwrites what is copied in the destination, which a second copy would repair.
fn mark_destination(disk: &MovedDisk, name: &str) {
    let file = File::options().write(true).open(disk.path(name)).unwrap();
    file.write_all_at(&[9; 512], 3 * REGION).unwrap();
}

fn is_marked(disk: &MovedDisk, name: &str) -> bool {
    disk.read(name)[3 * REGION as usize..][..512] == [9; 512]
}

fn log_files(disk: &MovedDisk) -> usize {
    let files = fs::read_dir(disk.path("state").join("moves")).into_iter().flatten();
    files.filter(|file| file.as_ref().unwrap().path().extension().is_some_and(|end| end == "log")).count()
}

#[test]
fn after_a_kill_only_dirty_and_uncopied_regions_are_copied() {
    let mut disk = MovedDisk::new();
    disk.begin(&disk.word("new"));
    assert_eq!(log_files(&disk), 1);
    copy_by_writes(&disk, 16);
    let mut client = disk.client();
    write(&mut client, 5 * REGION + 512, 512);
    mark_destination(&disk, "new");
    drop(client);
    disk.restart();
    let list = disk.list();
    assert!(list[0]["copied_bytes"].as_u64().unwrap() >= SIZE - 17 * REGION, "{list}");
    disk.until_state("done");
    assert!(is_marked(&disk, "new"), "it was copied again");
    let mut expected = written(16);
    expected[3 * REGION as usize..][..512].fill(9);
    assert!(disk.read("new") == expected);
    assert_eq!(log_files(&disk), 0);
}

#[test]
fn an_upgrade_continues_a_move() {
    let mut disk = MovedDisk::new();
    disk.begin(&disk.word("new"));
    copy_by_writes(&disk, 16);
    mark_destination(&disk, "new");
    let mut client = disk.client();
    disk.server.upgrade(&[support::UDM]);
    write(&mut client, SIZE - 512, 512);
    disk.until_state("done");
    assert!(is_marked(&disk, "new") && disk.read("new")[SIZE as usize - 512..] == [1; 512]);
}

/// Another table over the old place: nobody knows what it wrote, so all is copied again.
#[test]
fn a_table_over_the_old_place_ends_the_log() {
    let mut disk = MovedDisk::new();
    disk.begin(&disk.word("new"));
    copy_by_writes(&disk, 16);
    mark_destination(&disk, "new");
    until("a removal", || disk.server.verb(&["remove", "disk"]).status.success().then_some(()));
    let half = format!("0 {} linear {} 0", SIZE / 1024, disk.word("old"));
    disk.server.says(&["create", "half", "--table", &half]);
    assert_eq!(log_files(&disk), 0);
    disk.restart();
    disk.until_state("done");
    assert!(disk.read("new") == written(16));
}

/// A destination that is another file by now, and logs that are damaged.
#[test]
fn a_log_that_says_nothing_of_this_move_is_not_used() {
    for case in ["destination", "header", "gone", "short"] {
        let mut disk = MovedDisk::new();
        disk.begin(&disk.word("new"));
        copy_by_writes(&disk, 16);
        mark_destination(&disk, "new");
        disk.server.kill();
        let moves = fs::read_dir(disk.path("state").join("moves")).unwrap();
        let log = moves.map(|file| file.unwrap().path()).find(|path| path.extension().unwrap() == "log");
        let log = log.unwrap();
        let open = || File::options().write(true).open(&log).unwrap();
        match case {
            "destination" => {
                fs::copy(disk.path("new"), disk.path("copy")).unwrap();
                fs::rename(disk.path("copy"), disk.path("new")).unwrap();
            }
            "header" => open().write_all_at(b"x", 600).unwrap(),
            "gone" => fs::remove_file(&log).unwrap(),
            _ => open().set_len(4096).unwrap(),
        }
        disk.restart();
        disk.until_state("done");
        let said = disk.server.log();
        assert!(said.contains("does not continue from its log, and begins again"), "{case}: {said}");
        assert!(disk.read("new") == written(16), "{case}");
    }
}

#[test]
fn a_log_in_a_named_file() {
    let mut disk = MovedDisk::new();
    let (new, log) = (disk.word("new"), disk.word("log"));
    disk.server.says(&["move", "disk", "--to", &new, "--log", &log, "--pause"]);
    assert!(disk.server.says(&["table", "disk"]).contains(" mirror disk 2 "));
    copy_by_writes(&disk, 16);
    mark_destination(&disk, "new");
    disk.restart();
    disk.until_state("done");
    assert!(is_marked(&disk, "new"));
    // It says what was copied to another place, so it is not used once more.
    let old = disk.word("old");
    let error = disk.refusal(&["move", "disk", "--to", &old, "--log", &log]);
    assert!(error.contains("has data: remove it, or name another file"), "{error}");
    fs::write(disk.path("other"), "text").unwrap();
    let error = disk.refusal(&["move", "disk", "--to", &old, "--log", &disk.word("other")]);
    assert!(error.contains("has data"), "{error}");
    disk.server.says(&["move", "disk", "--to", &old, "--wait"]);
}

/// The server of the destination is killed, and comes back: it gets what it missed.
#[test]
fn a_destination_that_returns_gets_only_what_it_missed() {
    if !has("nbdkit") {
        return;
    }
    let disk = MovedDisk::new();
    fs::write(disk.path("there"), vec![0; SIZE as usize]).unwrap();
    let mut there = Nbdkit::start(disk.path("there.sock"), &["file", &disk.word("there")]);
    disk.begin(&there.uri());
    copy_by_writes(&disk, 0);
    mark_destination(&disk, "there");
    there.kill();
    let mut client = disk.client();
    write(&mut client, 7 * REGION, 512);
    write(&mut client, 9 * REGION, 512);
    disk.server.says(&["move", "start", "disk"]);
    until("a move that waits", || (disk.state() == "waiting").then_some(()));
    assert_eq!(disk.list()[0]["unlogged_bytes"], Value::from(2 * REGION));
    there.again();
    disk.until_state("done");
    write(&mut client, 4096, 512);
    assert_eq!(client.one(NbdCommand::Flush, 0, 0), 0);
    assert!(is_marked(&disk, "there"));
}
