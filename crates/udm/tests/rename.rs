//! `udm rename` against a running server: the kernel's errors, and everything that a rename leaves
//! unchanged.

mod support;

use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::nbd::Client;
use support::{Server, has, text, until};
use udm_wire::nbd::NbdCommand as Nbd;

fn exports(server: &Server) -> Vec<String> {
    let all = server.says(&["exports"]);
    all.lines().filter_map(|line| Some(line.split_once('\t')?.0.to_owned())).collect()
}

fn events(server: &Server, name: &str) -> u64 {
    let info: Value = serde_json::from_str(&server.says(&["info", "--json", name])).unwrap();
    info[0]["event_nr"].as_u64().unwrap()
}

#[test]
fn k10_a_rename_in_the_kernels_words() {
    let server = Server::start(&["a=0 2048 linear mem:1M 0", "b=0 8 zero", "top=0 8 linear @a 0"]);
    let table = server.says(&["table", "top"]);
    server.says(&["rename", "a", "c"]);
    assert_eq!(server.says(&["ls"]), "c\t(254:0)\nb\t(254:1)\ntop\t(254:2)\n");
    // The number identifies the device: the table above is printed unchanged and can be loaded
    // again.
    assert_eq!(server.says(&["table", "top"]), table);
    server.says(&["load", "top", "--table", table.trim_end()]);
    server.says(&["load", "top", "--table", "0 8 linear @c 0"]);
    assert!(server.refuses(&["load", "top", "--table", "0 8 linear @a 0"]).contains("there is no device @a"));
    let devices: Value = serde_json::from_str(&server.says(&["table", "top", "--json"])).unwrap();
    assert_eq!(devices[0]["devices"], json!([{"number": "254:0", "uri": "@c"}]));

    let exists = "Unable to change name on mapped device";
    for (words, output) in [
        (["c", "b"], format!("c: {exists} c to one that already exists: b: Device or resource busy")),
        (["c", "c"], format!("c: {exists} c to one that already exists: c: Device or resource busy")),
        (["x", "b"], format!("x: {exists} x to one that already exists: b: Device or resource busy")),
        (["x", "y"], "x: Unable to rename non-existent device, x to y: No such device or address".to_owned()),
        (["c", "a/b"], r#"c: Name "a/b" invalid. It contains "/".: Invalid argument"#.to_owned()),
        (["c", ""], "c: Non empty new name is required.: Invalid argument".to_owned()),
        (["c", ".."], r#"c: device name cannot be "control", ".", or "..": Invalid argument"#.to_owned()),
        (["c", "254:7"], "c: a name of the form major:minor would be taken for a device number".to_owned()),
    ] {
        assert_eq!(server.refuses(&["rename", words[0], words[1]]), format!("udm: {output}\n"));
    }
    let long = "n".repeat(128);
    assert!(server.refuses(&["rename", "c", &long]).contains("too long."));
    // The longest name, with characters that are special in paths and URIs; and a rename by number.
    let odd = format!("ü {}?&#%\"'\\", "n".repeat(117));
    assert_eq!(odd.len(), 127);
    server.says(&["rename", "c", &odd]);
    assert!(server.says(&["info", &odd]).starts_with(&format!("Name:              {odd}\n")));
    server.says(&["rename", "254:0", &long[1..]]);
    server.says(&["rename", &long[1..], "c"]);
    assert_eq!(exports(&server), ["c", "b", "top"]);

    server.says(&["rename", "c", "--setuuid", "U1"]);
    server.says(&["rename", "--setuuid", "b", "U2"]);
    assert!(server.says(&["info", "U1"]).ends_with("UUID: U1\n\n"));
    for (words, output) in [
        (
            ["c", "U3"],
            "Unable to change uuid of mapped device c to U3 because uuid is already set to U1: Invalid argument",
        ),
        (
            ["top", "U1"],
            "Unable to change uuid on mapped device top to one that already exists: U1: Device or resource busy",
        ),
        (["x", "U3"], "Unable to rename non-existent device, x to uuid U3: No such device or address"),
    ] {
        let refused = server.refuses(&["rename", words[0], words[1], "--setuuid"]);
        assert_eq!(refused, format!("udm: {}: {output}\n", words[0]));
    }
    // A rename by uuid; the uuid stays.
    server.says(&["rename", "U1", "a"]);
    assert!(server.says(&["info", "a"]).contains("UUID: U1\n"));
}

/// A rename causes an event if there is a live table, and changes nothing else: suspended, with an
/// inactive table, open, or with a deferred removal.
#[test]
fn in_every_state() {
    let server = Server::start(&["a=0 2048 linear mem:1M 0"]);
    server.says(&["create", "bare", "--notable"]);
    server.says(&["rename", "bare", "none"]);
    assert_eq!((events(&server, "none"), events(&server, "a")), (0, 0));
    server.says(&["load", "a", "--table", "0 2048 linear mem:1M 0\n2048 8 zero"]);
    server.says(&["suspend", "a"]);
    server.says(&["rename", "a", "b"]);
    let info = server.says(&["info", "b"]);
    assert!(info.contains("State:             SUSPENDED\nTables present:    LIVE & INACTIVE\n"), "{info}");
    assert_eq!(events(&server, "b"), 1);
    server.says(&["rename", "b", "--setuuid", "U"]);
    server.says(&["resume", "b"]);
    assert_eq!((server.says(&["table", "b"]).lines().count(), events(&server, "b")), (2, 2));

    let mut client = Client::connect(&server.nbd, "b");
    server.says(&["remove", "--deferred", "b"]);
    server.says(&["rename", "b", "c"]);
    assert!(server.says(&["info", "c"]).contains("ACTIVE (DEFERRED REMOVE)"));
    assert_eq!(client.one(Nbd::Write, 0, 4096), 0);
    assert!(server.refuses(&["remove", "c"]).contains("it is open 1 times"));
    drop(client);
    until("its removal", || (server.says(&["ls"]) == "none\t(254:1)\n").then_some(()));
    server.says(&["create", "b", "--table", "0 8 zero", "--uuid", "U"]);
    assert_eq!(exports(&server), ["none", "b"]);
}

/// A client keeps the device that it chose; new clients get the device with that name now.
#[test]
fn clients_keep_what_they_chose() {
    let devices = ["a=0 2048 linear mem:1M 0", "b=0 4096 linear mem:2M 0"];
    let server = Server::start(&devices);
    let mut old = Client::connect(&server.nbd, "a");
    assert_eq!(old.one(Nbd::Write, 0, 4096), 0);
    // The two devices exchange their names.
    for (name, new) in [("a", "was-a"), ("b", "a"), ("was-a", "b")] {
        server.says(&["rename", name, new]);
    }
    let mut new = Client::connect(&server.nbd, "a");
    assert_eq!(new.one(Nbd::Read, 1 << 20, 512), 0, "the larger one");
    assert_eq!(old.one(Nbd::Read, 0, 512), 0);
    assert_ne!(old.one(Nbd::Read, 1 << 20, 512), 0, "the one that it had");
    // A forced removal also fails requests of clients that connected under another name.
    server.refuses(&["remove", "--force", "b"]);
    assert_ne!(old.one(Nbd::Read, 0, 512), 0);
    drop(old);
    until("that it is closed", || server.verb(&["remove", "b"]).status.success().then_some(()));
    assert_eq!(exports(&server), ["a"]);
}

/// With `--export`, devices are exported by their present name.
#[test]
fn what_is_exported_alone() {
    let devices = ["a=0 8 zero", "b=0 8 zero", "c=0 8 zero"];
    let server = Server::start_with(&devices, &["--export", "a", "--export", "c"]);
    server.says(&["remove", "c"]);
    let mut client = Client::connect(&server.nbd, "a");
    server.says(&["rename", "a", "hidden"]);
    assert!(exports(&server).is_empty());
    assert_eq!(client.one(Nbd::Read, 0, 512), 0);
    assert!(server.says(&["info", "hidden"]).contains("Open count:        1\n"));
    server.says(&["rename", "b", "a"]);
    assert_eq!(exports(&server), ["a"]);
    server.says(&["rename", "hidden", "c"]);
    assert_eq!(exports(&server), ["a", "c"]);
    assert!(server.says(&["info", "c"]).contains("Open count:        1\n"));
}

/// If several devices are renamed to one name at once, exactly one succeeds.
#[test]
fn one_gets_the_name() {
    let names: Vec<String> = (0..8).map(|i| format!("d{i}")).collect();
    let devices: Vec<String> = names.iter().map(|name| format!("{name}=0 8 zero")).collect();
    let server = Server::start(&devices.iter().map(String::as_str).collect::<Vec<_>>());
    for round in 0..20 {
        let (new, won) = (format!("r{round}"), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for number in 0..names.len() {
                let (server, new, won) = (&server, &new, &won);
                scope.spawn(move || {
                    let body = json!({"name": new}).to_string();
                    match server.http("POST", &format!("/v1/devices/254:{number}/rename"), &body).0 {
                        204 => won.fetch_add(1, Ordering::Relaxed),
                        status => usize::from(status != 409) * 100,
                    }
                });
            }
        });
        assert_eq!(won.into_inner(), 1, "{new}");
        assert!(server.says(&["ls"]).contains(&format!("{new}\t")) && exports(&server).contains(&new));
    }
    assert_eq!(exports(&server).len(), names.len());
}

/// A thousand reloads, suspends, resumes and renames of one device from four clients at once, under
/// a verifying load.
#[test]
fn under_load() {
    if !has("fio") {
        return;
    }
    const EACH: usize = 250;
    let server = Server::start(&["base=0 65536 linear mem:32M 0", "disk=0 65536 linear @base 0"]);
    let uri = format!("nbd+unix:///disk?socket={}", server.nbd.display());
    let mut fio = Command::new("timeout");
    fio.args(["-k", "5", "120", "fio", "--name=renames", "--ioengine=nbd", "--verify_state_save=0"]);
    fio.args(["--rw=randrw", "--bs=4k", "--iodepth=8", "--size=8M", "--verify=crc32c", "--verify_fatal=1"]);
    fio.args([&format!("--uri={uri}"), "--time_based", "--runtime=6"]);
    let load = std::thread::spawn(move || fio.output().unwrap());
    let device = "/v1/devices/254:1";
    // fio connects once to query the export before it opens it by name.
    until("a load", || {
        let stats: Value = serde_json::from_str(&server.http("GET", "/v1/stats", "").2).unwrap();
        let mut devices = stats["devices"].as_array().unwrap().iter();
        let device = devices.find(|device| device["device"]["name"] == "disk")?;
        (device["served"]["write"]["requests"].as_u64() > Some(0)).then_some(())
    });
    let call = |method: &str, rest: &str, body: Value| {
        let (status, _, output) = server.http(method, &format!("{device}{rest}"), &body.to_string());
        // A resume cancels the suspend of another client.
        assert!(status == 204 || status == 409 && rest == "/suspend", "{rest}: {status} {output}");
    };
    let verb = |client: usize, turn: usize| match (client + turn) % 4 {
        0 => call("POST", "/rename", json!({"name": format!("disk-{client}-{turn}")})),
        1 => call("PUT", "/table", json!({"table": "0 65536 linear 254:0 0"})),
        2 => call("POST", "/suspend", json!({"noflush": turn % 8 < 4})),
        _ => call("POST", "/resume", json!({})),
    };
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for client in 0..4 {
            scope.spawn(move || (0..EACH).for_each(|turn| verb(client, turn)));
        }
    });
    assert!(begun.elapsed() < Duration::from_secs(60), "they went on while there was a load");
    call("POST", "/resume", json!({}));
    let out = load.join().unwrap();
    assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
    assert_eq!(exports(&server).len(), 2);
    assert!(events(&server, "254:1") >= EACH as u64 / 4 * 4);
}

/// Number of files in a folder.
fn files(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

/// A snapshot and its origin work under any name, also during a merge.
#[test]
fn snapshots_and_their_origins() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.img");
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let server = Server::start(&[&format!("disk={}", image.display())]);
    server.says(&["snapshot", "create", "s", "--of", "disk"]);
    server.says(&["snapshot", "create", "t", "--of", "disk"]);
    let mut client = Client::connect(&server.nbd, "disk");
    for chunk in 0..1024 {
        assert_eq!(client.one(Nbd::Write, chunk * 4096, 4096), 0);
    }
    for (name, new) in [("disk", "origin"), ("s", "monday"), ("t", "s")] {
        server.says(&["rename", name, new]);
    }
    let list: Value = serde_json::from_str(&server.says(&["snapshot", "list", "--json"])).unwrap();
    let names: Vec<_> = list.as_array().unwrap().iter().map(|one| (&one["name"], &one["origin"])).collect();
    assert_eq!(names, [(&json!("monday"), &json!("origin")), (&json!("s"), &json!("origin"))]);
    // The store that was created for the snapshot is removed with it.
    assert!(server.refuses(&["snapshot", "remove", "t"]).contains("No such device"));
    server.says(&["snapshot", "remove", "s"]);
    assert_eq!(files(folder.path()), 2);

    let (status, _, output) = server.http("POST", "/v1/snapshots/monday/merge", "");
    assert_eq!(status, 200, "{output}");
    let mut turn = 0;
    until("its end", || {
        turn += 1;
        server.says(&["rename", "254:0", &format!("origin-{turn}")]);
        (server.says(&["snapshot", "list", "--json"]).trim() == "[]").then_some(())
    });
    // The origin gets its old table back, which was linear.
    let table = || server.says(&["table", "254:0"]).contains(" linear ").then_some(());
    until("a linear table", table);
    until("a store that is gone", || (files(folder.path()) == 1).then_some(()));
    assert_eq!(client.one(Nbd::Read, 0, 4096), 0);
}

/// Names change while snapshots are created and removed: a verb never uses the wrong device.
#[test]
fn names_change_under_the_verbs_of_snapshots() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.img");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let server = Server::start(&[&format!("disk={}", image.display()), "other=0 8 zero"]);
    let over = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while over.load(Ordering::Relaxed) == 0 {
                for (name, new) in [("disk", "away"), ("other", "disk"), ("disk", "other"), ("away", "disk")]
                {
                    let body = json!({"name": new}).to_string();
                    assert_eq!(server.http("POST", &format!("/v1/devices/{name}/rename"), &body).0, 204);
                }
            }
        });
        for turn in 0..60 {
            let name = format!("s{turn}");
            let out = server.verb(&["snapshot", "create", &name, "--of", "disk"]);
            if out.status.success() {
                server.says(&["rename", &name, "kept"]);
                server.says(&["snapshot", "remove", "kept"]);
            } else {
                // The device had another name at that moment, or another device had this name.
                let output = text(&out.stderr);
                assert!(output.contains("No such device") || output.contains("not linear"), "{output}");
            }
        }
        over.store(1, Ordering::Relaxed);
    });
    assert_eq!(server.says(&["table", "other"]), "0 8 zero \n");
    assert_eq!((files(folder.path()), server.says(&["ls"]).lines().count()), (1, 2));
    assert!(server.says(&["table", "disk"]).contains(" linear "));
}
