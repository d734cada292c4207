//! Marks in the state folder for stores that lost a copy and could not be marked themselves.

mod support;

use std::path::Path;
use std::process::Command;
use support::mount::Mount;
use support::nbd::Client;
use support::{Server, text, udm};
use udm_wire::nbd::NbdCommand as Nbd;

const SNAPSHOT: &str = "0 2048 snapshot mem:1M";

/// Writes a chunk of `disk`, which is an origin; the write must succeed.
fn write(server: &Server, chunk: u64) {
    let mut client = Client::connect(&server.nbd, "disk");
    assert_eq!(client.one(Nbd::Write, chunk * 4096, 4096), 0);
}

fn clear(state: &Path, store: &str) -> std::process::Output {
    udm(&["cow", "clear-invalid", store, "--state"]).arg(state).output().unwrap()
}

/// A server with an origin and a snapshot in a store that fails since the first copy. The state
/// folder is `state`.
fn lost(state: &Path, cow: &Path) -> Server {
    let devices = [
        "disk=0 2048 snapshot-origin mem:1M".to_owned(),
        // Tests start another server on the same store while this one runs.
        format!("cow=0 2048 linear file:{}?exclusive=off 0", cow.display()),
        format!("s={SNAPSHOT} @cow P 8"),
    ];
    let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
    let server = Server::start_with(&devices, &["--state", state.to_str().unwrap()]);
    write(&server, 0);
    server.says(&["load", "cow", "--table", "0 2048 error"]);
    server.says(&["resume", "cow"]);
    write(&server, 1);
    assert_eq!(server.says(&["status", "s"]), "0 2048 snapshot Invalid\n");
    assert!(server.log().contains("write header failed"), "{}", server.log());
    server
}

#[test]
fn e11_a_store_that_comes_back_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (state, cow) = (folder.path().join("state"), folder.path().join("x.cow"));
    std::fs::File::create(&cow).unwrap().set_len(1 << 20).unwrap();
    let server = lost(&state, &cow);
    let linear = format!("0 2048 linear file:{}?exclusive=off 0", cow.display());
    let table = format!("{SNAPSHOT} @cow P 8");
    // The store works again and looks valid. This server knows the mark, and so does the next one.
    for round in 0..2 {
        let next;
        let server = if round == 0 {
            server.says(&["remove", "s"]);
            server.says(&["load", "cow", "--table", &linear]);
            server.says(&["resume", "cow"]);
            &server
        } else {
            let devices = ["disk=0 2048 snapshot-origin mem:1M".into(), format!("cow={linear}")];
            let devices = devices.each_ref().map(String::as_str);
            next = Server::start_with(&devices, &["--state", state.to_str().unwrap()]);
            &next
        };
        let output = server.refuses(&["create", "s", "--table", &table]);
        let line = output.lines().next().unwrap();
        assert!(line.contains("@cow has lost a copy, and that could not be written into it"), "{output}");
        assert!(line.ends_with("Invalid argument"), "{output}");
    }
    let out = clear(&state, "@cow");
    assert_eq!((out.status.code(), text(&out.stdout)), (Some(0), "@cow: believed again\n".into()));
    let out = clear(&state, "@cow");
    assert_eq!(text(&out.stderr), "udm: @cow: nothing is kept against it\n");
    let devices =
        ["disk=0 2048 snapshot-origin mem:1M".into(), format!("cow={linear}"), format!("s={table}")];
    let server =
        Server::start_with(&devices.each_ref().map(String::as_str), &["--state", state.to_str().unwrap()]);
    assert_eq!(server.says(&["status", "s"]), "0 2048 snapshot 24/2048 16\n");
}

/// A mark follows a device that is renamed: in this server, and in the next one after a `kill -9`.
#[test]
fn e11_a_mark_goes_with_a_device_that_is_renamed() {
    let folder = tempfile::tempdir().unwrap();
    let (state, cow) = (folder.path().join("state"), folder.path().join("x.cow"));
    std::fs::File::create(&cow).unwrap().set_len(1 << 20).unwrap();
    let mut server = lost(&state, &cow);
    let linear = format!("0 2048 linear file:{}?exclusive=off 0", cow.display());
    server.says(&["remove", "s"]);
    server.says(&["load", "cow", "--table", &linear]);
    server.says(&["resume", "cow"]);
    server.says(&["rename", "cow", "store"]);
    server.says(&["rename", "store", "kept"]);
    let table = |store: &str| format!("{SNAPSHOT} {store} P 8");
    let refused = |server: &Server, store: &str| {
        let output = server.refuses(&["create", "s", "--table", &table(store)]);
        assert!(output.contains("@kept has lost a copy, and that could not be written into it"), "{output}");
    };
    refused(&server, "@kept");
    server.says(&["create", "cow", "--table", "0 2048 linear mem:2M 0"]);
    server.says(&["create", "t", "--table", &table("@cow")]);
    server.child.kill().unwrap();
    server.child.wait().unwrap();

    let devices = ["disk=0 2048 snapshot-origin mem:1M".into(), format!("kept={linear}")];
    let server =
        Server::start_with(&devices.each_ref().map(String::as_str), &["--state", state.to_str().unwrap()]);
    refused(&server, "@kept");
    assert_eq!(std::fs::read_dir(&state).unwrap().count(), 1, "under one name");
    // A marked name makes any store with this name invalid.
    server.says(&["rename", "kept", "good"]);
    let out = clear(&state, "@good");
    assert_eq!(text(&out.stdout), "@good: believed again\n");
}

/// If the mark cannot be moved, the device keeps its name; without a mark, the rename succeeds.
#[test]
fn e11_a_mark_that_cannot_go_with_it_keeps_the_name() {
    let folder = tempfile::tempdir().unwrap();
    let (state, cow) = (folder.path().join("state"), folder.path().join("x.cow"));
    std::fs::File::create(&cow).unwrap().set_len(1 << 20).unwrap();
    let server = lost(&state, &cow);
    let state_files =
        || std::fs::read_dir(&state).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    server.says(&["rename", "cow", "store"]);
    let file = state_files().remove(0);
    server.says(&["rename", "store", "cow"]);
    // A folder is in the way of the mark's file.
    std::fs::create_dir(file).unwrap();
    let output = server.refuses(&["rename", "cow", "store"]);
    assert!(output.starts_with("udm: cow: what is kept against it can't be moved: "), "{output}");
    assert!(server.says(&["ls"]).contains("cow\t"));
    assert_eq!(state_files().len(), 2, "nothing is left of it");
    server.says(&["rename", "cow", "else"]);
    server.says(&["rename", "s", "store"]);
}

/// If no mark can be written, the origin works as before, and the log reports the consequence.
#[test]
fn e11_a_state_folder_that_cannot_be_written_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let (state, cow) = (folder.path().join("no-folder"), folder.path().join("x.cow"));
    std::fs::write(&state, "").unwrap();
    std::fs::File::create(&cow).unwrap().set_len(1 << 20).unwrap();
    let server = lost(&state, &cow);
    let log = server.log();
    let line = log.lines().find(|line| line.contains("it could not be marked invalid"));
    assert!(line.is_some_and(|line| line.contains("do not use it") && line.contains("no-folder")), "{log}");
    // This server remembers the mark in memory.
    server.says(&["remove", "s"]);
    server.says(&[
        "load",
        "cow",
        "--table",
        &format!("0 2048 linear file:{}?exclusive=off 0", cow.display()),
    ]);
    server.says(&["resume", "cow"]);
    assert!(
        server
            .refuses(&["create", "s", "--table", &format!("{SNAPSHOT} @cow P 8")])
            .contains("has lost a copy")
    );
}

/// A real disk that fails: a file of a mount whose server returns errors for a time. The mark
/// applies to every name of the disk, and after a kill of the server.
#[test]
fn e11_a_disk_that_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let (state, bad) = (folder.path().join("state"), folder.path().join("bad"));
    let fails = format!("error-file={}", bad.display());
    let kit = ["--filter=error", "memory", "1M", "error=EIO", "error-pwrite-rate=100%", &fails];
    let Some(mount) = Mount::of(&kit) else { return };
    let table = format!("{SNAPSHOT} {} P 8", mount.file().display());
    let start = |devices: &[&str]| Server::start_with(devices, &["--state", state.to_str().unwrap()]);
    let mut server = start(&["disk=0 2048 snapshot-origin mem:1M", &format!("s={table}")]);
    write(&server, 0);
    std::fs::write(&bad, "").unwrap();
    write(&server, 1);
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    std::fs::remove_file(&bad).unwrap();
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(mount.file(), &link).unwrap();
    // Offline tools report the mark as well.
    for verb in ["info", "check", "compact"] {
        let out = udm(&["cow", verb, link.to_str().unwrap(), "--state"]).arg(&state).output().unwrap();
        assert_eq!(out.status.success(), verb == "info", "{verb}");
        let output = text(&out.stdout) + &text(&out.stderr);
        let first = if verb == "compact" { "udm: " } else { "state       invalid\nmarked      " };
        assert!(
            output.starts_with(&format!("{first}{} has lost a copy", mount.file().display())),
            "{output}"
        );
    }
    let server = start(&["disk=0 2048 snapshot-origin mem:1M"]);
    for name in [mount.file(), link.clone()] {
        let output =
            server.refuses(&["create", "s", "--table", &format!("{SNAPSHOT} {} P 8", name.display())]);
        assert!(output.contains("has lost a copy"), "{output}");
    }
    // A cleared store has no mark any more.
    assert!(
        Command::new("dd")
            .args(["if=/dev/zero", "bs=4096", "count=1", "conv=notrunc"])
            .arg(format!("of={}", link.display()))
            .output()
            .unwrap()
            .status
            .success()
    );
    server.says(&["create", "s", "--table", &table]);
    assert_eq!(server.says(&["status", "s"]), "0 2048 snapshot 16/2048 16\n");
    assert_eq!(std::fs::read_dir(&state).unwrap().count(), 0);
}
