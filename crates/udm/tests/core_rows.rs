//! Rows about the core of the device mapper, through the program: `remove --deferred`, `remove
//! --force`, names.

mod support;

use rustix::process::Signal;
use std::time::Duration;
use support::mount::Mount;
use support::nbd::Client;
use support::{Server, text, until};
use udm_wire::nbd::NbdCommand as Nbd;

const EIO: u32 = 5;
const TABLE: &str = "0 16 linear mem:1M 0";

/// The state of a device, as `udm info` prints it.
fn state(server: &Server, name: &str) -> String {
    let info = server.says(&["info", name]);
    info.lines().find_map(|line| line.strip_prefix("State:")).unwrap().trim().into()
}

/// Waits until the removal of a device has finished.
fn gone(server: &Server, name: &str) {
    let missing = format!("udm: {name}: no device of that name: No such device or address\n");
    until("its removal", || (text(&server.verb(&["info", name]).stderr) == missing).then_some(()));
}

#[test]
fn k07_a_removal_is_deferred() {
    let server = Server::start(&[&format!("d={TABLE}")]);
    let busy = "udm: d: it is open 1 times: Device or resource busy\n";
    let client = Client::connect(&server.nbd, "d");
    assert_eq!(server.refuses(&["remove", "d"]), busy);
    assert_eq!(state(&server, "d"), "ACTIVE");
    for _ in 0..2 {
        server.says(&["remove", "--deferred", "d"]);
        assert_eq!(state(&server, "d"), "ACTIVE (DEFERRED REMOVE)");
    }
    assert_eq!(server.refuses(&["remove", "d"]), busy);
    let info: serde_json::Value = serde_json::from_str(&server.says(&["info", "d", "--json"])).unwrap();
    assert_eq!(info[0]["deferred_remove"], true);
    server.says(&["message", "d", "0", "@cancel_deferred_remove"]);
    assert_eq!(state(&server, "d"), "ACTIVE");
    // The deferred removal was cancelled, so the device outlives its client.
    drop(client);
    until("a client that is gone", || {
        server.says(&["info", "d"]).contains("Open count:        0").then_some(())
    });
    let mut client = Client::connect(&server.nbd, "d");
    server.says(&["remove", "--deferred", "d"]);
    // The device is usable as before, also for new clients.
    let mut other = Client::connect(&server.nbd, "d");
    assert_eq!(client.write(0), 0);
    drop(client);
    assert_eq!((other.read(0), state(&server, "d").as_str()), (0, "ACTIVE (DEFERRED REMOVE)"));
    drop(other);
    gone(&server, "d");

    // A table is a user too. A device without users is removed at once.
    server.says(&["create", "low", "--table", TABLE]);
    server.says(&["create", "high", "--table", "0 16 linear @low 0"]);
    server.says(&["remove", "--deferred", "low"]);
    server.says(&["suspend", "low"]);
    assert_eq!(state(&server, "low"), "SUSPENDED (DEFERRED REMOVE)");
    server.says(&["remove", "--deferred", "high"]);
    gone(&server, "low");
    assert_eq!(server.says(&["ls"]), "No devices found\n");

    // The error texts are the kernel's.
    server.says(&["create", "d", "--table", TABLE]);
    for (words, why) in [
        ("@cancel_deferred_remove now", "Invalid arguments for @cancel_deferred_remove"),
        ("@what", "Unsupported message sent to DM core: @what"),
    ] {
        let message: Vec<&str> = words.split(' ').collect();
        let output = server.refuses(&[&["message", "d", "0"], &message[..]].concat());
        assert!(output.contains(why) && output.ends_with("Invalid argument\n"), "{output}");
    }
    server.says(&["message", "d", "0", "@Cancel_Deferred_Remove"]);
}

#[test]
fn k08_a_removal_is_forced() {
    let server = Server::start(&[&format!("d={TABLE}")]);
    let mut client = Client::connect(&server.nbd, "d");
    assert_eq!(client.write(0), 0);
    server.says(&["load", "d", "--table", "0 16 zero"]);
    let output = server.refuses(&["remove", "--force", "d"]);
    assert_eq!(output, "udm: d: it is open 1 times: Device or resource busy\n");
    assert_eq!(server.says(&["table", "d"]), "0 16 error \n");
    assert_eq!(server.says(&["table", "d", "--inactive"]), "\n");
    assert_eq!((client.read(0), client.write(0), client.one(Nbd::Flush, 0, 0)), (EIO, EIO, 0));
    server.says(&["remove", "--force", "--deferred", "d"]);
    drop(client);
    gone(&server, "d");
    // Without a table there is nothing to replace; without a user the device is removed.
    server.says(&["create", "n", "--notable"]);
    server.says(&["create", "d", "--table", TABLE]);
    server.says(&["remove", "-f", "n", "d"]);
    assert_eq!(server.says(&["ls"]), "No devices found\n");
}

/// Requests that wait for a path or for a resume fail, also those of devices above.
#[test]
fn k08_what_waits_fails() {
    let mp = "0 2048 multipath 1 queue_if_no_path 0 1 1 round-robin 0 1 1 mem:1M 1";
    let server = Server::start(&[&format!("low={mp}"), "high=0 16 linear @low 0"]);
    server.says(&["message", "low", "0", "fail_path", "mem:1M"]);
    let mut clients = ["low", "high"].map(|name| Client::connect(&server.nbd, name));
    clients.iter_mut().for_each(|client| client.ask_read(0));
    until("requests", || server.says(&["status", "low"]).contains(" F ").then_some(()));
    let output = server.refuses(&["remove", "--force", "low"]);
    assert_eq!(output, "udm: low: it is open 1 times: Device or resource busy\n".replace('1', "2"));
    assert_eq!(clients.each_mut().map(|client| client.error()), [EIO, EIO]);
    // A suspended device is resumed, and its requests fail.
    server.says(&["suspend", "high"]);
    clients[1].ask_read(0);
    server.refuses(&["remove", "--force", "high"]);
    assert_eq!(clients[1].error(), EIO);
    assert_eq!(server.says(&["table", "high"]), "0 16 error \n");
    assert_eq!(state(&server, "high"), "ACTIVE");
}

/// A request that storage does not complete cannot be taken back. The removal waits for it as long
/// as the caller wants, and then leaves the device as it was.
#[test]
fn k08_storage_that_hangs_is_waited_for_until_the_caller_has_enough() {
    let Some(mount) = Mount::new() else { return };
    let table = format!("0 16 linear {} 0", mount.file().display());
    let server = Server::start(&[&format!("d={table}")]);
    let before = server.says(&["table", "d"]);
    let mut client = Client::connect(&server.nbd, "d");
    mount.signal_behind(Signal::STOP);
    client.ask(Nbd::Write, 0, 512);
    client.ask(Nbd::Flush, 0, 0);
    std::thread::sleep(Duration::from_millis(50));
    let output = server.refuses(&["remove", "--force", "--timeout", "0.2", "d"]);
    assert_eq!(output, "udm: d: not done within 200 ms; the device was not removed: Connection timed out\n");
    assert_eq!((server.says(&["table", "d"]), state(&server, "d").as_str()), (before, "ACTIVE"));
    assert_eq!(server.says(&["table", "d", "--inactive"]), "\n");
    // The clients do not wait for storage: requests in flight failed at once.
    assert_eq!([client.error(), client.error()], [5, 5]);
    // The removal was cancelled, so new requests go to the device again.
    client.ask(Nbd::Read, 0, 512);
    std::thread::sleep(Duration::from_millis(50));
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| server.refuses(&["remove", "--force", "d"]));
        assert_eq!(client.error(), 5);
        for kind in [Nbd::Write, Nbd::Read, Nbd::Flush, Nbd::Write] {
            let len = if kind == Nbd::Flush { 0 } else { 700 };
            assert_eq!(client.one(kind, 0, len), 5, "while it waits");
        }
        // A client that arrives, writes and disconnects is not delayed either.
        let mut other = Client::connect(&server.nbd, "d");
        assert_eq!(other.one(Nbd::Write, 512, 512), 5);
        drop(other);
        assert!(!removal.is_finished());
        mount.signal_behind(Signal::CONT);
        assert!(removal.join().unwrap().contains("it is open 1 times"));
    });
    assert_eq!(server.says(&["table", "d"]), "0 16 error \n");
    assert_eq!(client.one(Nbd::Write, 0, 512), 5);
    drop(client);
    until("a device that nobody has open", || server.verb(&["remove", "d"]).status.success().then_some(()));
}

#[test]
fn k10_names_that_are_taken() {
    let server = Server::start(&[]);
    server.says(&["create", "a", "--notable", "--uuid", "U"]);
    for args in [&["create", "a", "--notable"][..], &["create", "b", "--notable", "--uuid", "U"]] {
        let output = server.refuses(args);
        assert!(output.ends_with(" exists: Device or resource busy\n"), "{output}");
    }
    for (name, why) in [
        ("a/b", r#"Name "a/b" invalid. It contains "/"."#),
        ("control", r#"device name cannot be "control", ".", or ".."#),
        (&*"x".repeat(128), "Invalid argument"),
    ] {
        let output = server.refuses(&["create", name, "--notable"]);
        assert!(output.contains(why) && output.ends_with("Invalid argument\n"), "{output}");
    }
}
