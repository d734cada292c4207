//! `udm snapshot` against a running server, with external clients.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use support::nbd::Client;
use support::{Server, has, text, udm, until};
use tempfile::TempDir;
use udm_wire::nbd::{ExportFlags, NbdCommand as Nbd};

/// A folder with images of 8 MiB with these names, and a server that maps each of them.
fn served(names: &[&str]) -> (TempDir, Server) {
    let folder = tempfile::tempdir().unwrap();
    let image = |name: &&str| {
        let path = folder.path().join(format!("{name}.img"));
        std::fs::File::create(&path).unwrap().set_len(8 << 20).unwrap();
        format!("{name}={}", path.display())
    };
    let devices: Vec<String> = names.iter().map(image).collect();
    let server = Server::start(&devices.iter().map(String::as_str).collect::<Vec<_>>());
    (folder, server)
}

fn uri(server: &Server, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", server.nbd.display())
}

/// Runs qemu-io's commands on an export; they must succeed and find the expected data.
fn qemu_io(server: &Server, name: &str, commands: &[&str]) {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "raw", &uri(server, name)]);
    for each in commands {
        command.args(["-c", each]);
    }
    let out = command.output().unwrap();
    let output = text(&out.stdout) + &text(&out.stderr);
    assert!(out.status.success() && !output.contains("failed"), "{name}: {commands:?}: {output}");
}

/// The files of a folder, sorted.
fn files(folder: &Path) -> Vec<String> {
    let name =
        |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().to_string_lossy().into_owned();
    let mut names: Vec<String> = std::fs::read_dir(folder).unwrap().map(name).collect();
    names.sort();
    names
}

fn target(server: &Server, name: &str) -> String {
    server.says(&["table", name]).split_whitespace().nth(2).unwrap().into()
}

#[test]
fn a_life_of_a_snapshot() {
    if !has("qemu-io") {
        return;
    }
    let (folder, server) = served(&["disk"]);
    qemu_io(&server, "disk", &["write -P 1 0 1M"]);
    server.says(&["snapshot", "create", "monday", "--of", "disk"]);
    assert_eq!(target(&server, "disk"), "snapshot-origin");
    assert_eq!(files(folder.path()), ["disk.img", "monday.cow"]);
    assert_eq!(server.says(&["snapshot", "diff", "monday"]), "");

    // Origin and snapshot are written; the diff shows exactly these ranges.
    qemu_io(&server, "disk", &["write -P 2 64k 64k"]);
    qemu_io(&server, "monday", &["read -P 1 0 1M", "write -P 9 5M 4k"]);
    assert_eq!(server.says(&["snapshot", "diff", "monday"]), "65536\t65536\n5242880\t4096\n");
    server.says(&["snapshot", "create", "tuesday", "--of", "disk", "--chunk", "16k", "--transient"]);
    qemu_io(&server, "disk", &["write -P 3 128k 4k"]);
    qemu_io(&server, "tuesday", &["read -P 2 64k 64k", "read -P 0 5M 4k"]);
    let both = server.says(&["snapshot", "diff", "monday", "tuesday"]);
    assert_eq!(both, "65536\t81920\n5242880\t4096\n");
    let report = server.says(&["snapshot", "diff", "monday", "tuesday", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["changed_bytes"], 81920 + 4096);

    // The list is checked for names and sizes only.
    let list: serde_json::Value =
        serde_json::from_str(&server.says(&["snapshot", "list", "--json"])).unwrap();
    let of = |row: usize, key: &str| list[row][key].as_str().unwrap().to_owned();
    assert_eq!(
        [of(0, "name"), of(0, "origin"), of(0, "type"), of(0, "state")],
        ["monday", "disk", "P", "active"]
    );
    assert_eq!([of(1, "name"), of(1, "origin"), of(1, "type")], ["tuesday", "disk", "N"]);
    // The header, an area, and 16 + 1 + 1 chunks of 4 KiB.
    assert_eq!(list[0]["used_bytes"], (2 + 18) * 4096);
    assert_eq!(server.says(&["snapshot", "list"]).lines().count(), 3);
    assert_eq!(server.says(&["snapshot", "export", "monday"]), format!("{}\n", uri(&server, "monday")));

    // The merged data is in the origin, and the other snapshot is unchanged.
    let output = server.says(&["snapshot", "merge", "monday"]);
    assert!(output.ends_with("merged 100%, 72.0KiB of 72.0KiB\n"), "{output}");
    qemu_io(&server, "disk", &["read -P 1 0 1M", "read -P 9 5M 4k"]);
    qemu_io(&server, "tuesday", &["read -P 2 64k 64k", "read -P 1 128k 4k", "read -P 0 5M 4k"]);
    assert_eq!(target(&server, "disk"), "snapshot-origin");
    assert_eq!(files(folder.path()), ["disk.img", "tuesday.cow"]);

    server.says(&["snapshot", "remove", "tuesday"]);
    assert_eq!(target(&server, "disk"), "linear");
    assert_eq!(files(folder.path()), ["disk.img"]);
    assert_eq!(server.says(&["snapshot", "list"]), "No snapshots found\n");
    qemu_io(&server, "disk", &["read -P 1 0 1M", "read -P 9 5M 4k", "write -P 4 0 4k"]);
}

#[test]
fn what_cannot_be_is_refused_and_leaves_nothing() {
    let (folder, server) = served(&["disk", "other"]);
    let before = server.says(&["table"]);
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(folder.path().join("old.cow"), [b"SnAp".as_slice(), &[0; 1 << 20]].concat()).unwrap();
    let mut header = [0; 16];
    udm_wire::cow::ExceptionStoreHeader { valid: true, chunk: udm_wire::cow::ChunkSize::new(8).unwrap() }
        .encode(&mut header);
    let store = [header.as_slice(), &[0; 1 << 20]].concat();
    std::fs::write(folder.path().join("old.cow"), &store[..1 << 20]).unwrap();
    server.says(&["create", "part", "--table", &format!("0 8 linear {} 8", at("disk.img"))]);
    server.says(&["create", "dead", "--table", "0 8 error"]);
    let (old, none) = (at("old.cow"), at("none/x.cow"));
    let refusals: &[(&[&str], &str)] = &[
        (&["s", "--of", "nobody"], "nobody: no device of that name"),
        (&["disk", "--of", "disk"], "disk: a device of that name exists"),
        (&["s", "--of", "part"], "its table begins at sector 8 of its disk"),
        (&["s", "--of", "dead"], "its table is error, and not linear"),
        (&["s", "--of", "disk", "--store", &old], "has a snapshot in it"),
        (&["s", "--of", "disk", "--store", &old, "--size", "1G"], "is not resized"),
        (&["s", "--of", "disk", "--store", &none], "No such file or directory"),
        (&["s", "--of", "disk", "--chunk", "3k"], "Chunk size is not a power of 2"),
        (&["s", "--of", "disk", "--size", "4k"], "a store has at least two chunks"),
        (&["--group", "s=disk,t=dead"], "its table is error"),
        (&["--group", "s=disk,t=other", "--store", &none], "is not a folder"),
        (&["--group", "s=disk,other=other"], "a device of that name exists"),
        (&["--group", "s=disk,s=other"], "a device of that name exists"),
    ];
    for (args, why) in refusals {
        let output = server.refuses(&[["snapshot", "create"].as_slice(), args].concat());
        assert!(output.contains(why) && output.lines().count() == 1, "{args:?}: {output}");
    }
    server.says(&["suspend", "disk"]);
    let output = server.refuses(&["snapshot", "create", "s", "--of", "disk"]);
    assert!(output.contains("it is suspended: resume it first"), "{output}");
    server.says(&["resume", "disk"]);
    server.says(&["remove", "part", "dead"]);
    for verb in ["remove", "merge", "diff", "export"] {
        let output = server.refuses(&["snapshot", verb, "disk"]);
        assert_eq!(output, "udm: disk: it is not a snapshot\n");
    }
    assert_eq!(server.says(&["table"]), before);
    assert_eq!(files(folder.path()), ["disk.img", "old.cow", "other.img"]);
    assert_eq!(server.log().lines().filter(|line| line.contains("WARN")).count(), 0, "{}", server.log());
}

/// A writer writes a mark into one volume and, after the acknowledgement, into the other. In each
/// group of snapshots, the second volume may lack the last mark and nothing else.
#[test]
fn a_group_is_one_instant() {
    if !has("nbdcopy") {
        return;
    }
    const ROUNDS: usize = 6;
    let (folder, server) = served(&["one", "two"]);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut clients = ["one", "two"].map(|name| Client::connect(&server.nbd, name));
            for sector in 0..(8 << 20) / 512 {
                for client in &mut clients {
                    assert_eq!(client.one(Nbd::Write, sector * 512, 512), 0);
                }
                if over.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        for round in 0..ROUNDS {
            let group = format!("a{round}=one,b{round}=two");
            server.says(&["snapshot", "create", "--group", &group]);
        }
        over.store(true, Ordering::Relaxed);
    });
    let mut last = 0;
    for round in 0..ROUNDS {
        let [a, b] = ["a", "b"].map(|name| marks(&server, folder.path(), &format!("{name}{round}")));
        assert!(a == b || a == b + 1, "round {round}: {a} marks and {b}");
        assert!(last <= b, "round {round}: {b} marks after {last}");
        last = b;
    }
    assert!(last > 0, "the writer came to nothing");
    for round in 0..ROUNDS {
        server.says(&["snapshot", "remove", &format!("a{round}"), &format!("b{round}")]);
    }
    assert_eq!(files(folder.path()), ["one.img", "two.img"]);
    assert_eq!((target(&server, "one"), target(&server, "two")), ("linear".into(), "linear".into()));
}

/// The number of consecutive marked sectors from the start of an export; no later sector may be
/// marked.
fn marks(server: &Server, folder: &Path, name: &str) -> usize {
    let copy: PathBuf = folder.join("copy");
    let out = Command::new("nbdcopy").arg(uri(server, name)).arg(&copy).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let bytes = std::fs::read(&copy).unwrap();
    std::fs::remove_file(&copy).unwrap();
    let count = bytes.iter().take_while(|byte| **byte == 1).count();
    assert!(count % 512 == 0 && bytes[count..].iter().all(|byte| *byte == 0), "{name}: {count} bytes");
    count / 512
}

#[test]
fn what_differs_comes_in_pages() {
    let (_folder, server) = served(&["disk"]);
    server.says(&["snapshot", "create", "s", "--of", "disk"]);
    let mut client = Client::connect(&server.nbd, "disk");
    for chunk in [0, 2, 3, 2047] {
        assert_eq!(client.one(Nbd::Write, chunk * 4096, 512), 0);
    }
    let page = |query: &str| -> serde_json::Value {
        let (status, _, body) = server.http("GET", &format!("/v1/snapshots/s/changes{query}"), "");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    };
    let mut seen = Vec::new();
    let mut from = Some(0);
    while let Some(at) = from {
        let page = page(&format!("?max=1&from={at}"));
        assert_eq!(page["ranges"].as_array().unwrap().len(), 1);
        let of = |key: &str| page["ranges"][0][key].as_u64().unwrap() / 4096;
        seen.push((of("start_bytes"), of("length_bytes")));
        from = page["next_bytes"].as_u64();
    }
    assert_eq!(seen, [(0, 1), (2, 2), (2047, 1)]);
    assert_eq!(page("?from=18446744073709551615")["ranges"], serde_json::json!([]));
    assert_eq!(server.http("GET", "/v1/snapshots/s/changes?from=-1", "").0, 400);
    assert_eq!(server.http("GET", "/v1/snapshots/nobody/changes", "").0, 404);
    // A snapshot in use is not removed, and its data stays.
    let mut user = Client::connect(&server.nbd, "s");
    assert!(server.refuses(&["snapshot", "remove", "s"]).contains("it is open 1 times"));
    assert!(server.refuses(&["snapshot", "merge", "s"]).contains("it is open 1 times"));
    assert_eq!(user.read(0), 0);
}

#[test]
fn backups_of_two_volumes_are_one_instant_and_send_what_changed() {
    let folder = tempfile::tempdir().unwrap();
    let out = support::udm(&["demo", "backup", "--json"]).env("TMPDIR", folder.path()).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let of = |key: &str| report[key].as_u64().unwrap();
    assert_eq!([of("blocks_wrong"), of("load_blocks_wrong"), of("stores_bytes_left")], [0, 0, 0]);
    assert_eq!((of("instants"), of("blocks_checked")), (6, 6 * of("volumes_bytes") / 4096), "{report}");
    assert_eq!(of("first_run_bytes"), of("volumes_bytes"));
    // The load writes an eighth of the volumes.
    assert!((1..=of("volumes_bytes") / 8).contains(&of("second_run_bytes")), "{report}");
    assert!(
        report["rates"].as_array().unwrap().iter().all(|rate| rate["writes_a_second"].as_f64() > Some(0.0))
    );
    assert!(files(folder.path()).is_empty(), "{:?}", files(folder.path()));
}

#[test]
fn a_hundred_disks_from_one_image_leave_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let out = support::udm(&["demo", "disks", "--json"]).env("TMPDIR", folder.path()).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let of = |key: &str| report[key].as_u64().unwrap();
    assert_eq!([of("disks"), of("blocks_written"), of("blocks_wrong"), of("diffs_wrong")], [100, 800, 0, 0]);
    assert!(of("blocks_checked") >= 2 * of("blocks_written"));
    // A header and an area, and one chunk per block; file systems allocate different amounts.
    assert!(of("fresh_disk_bytes_a_disk") <= 64 << 10, "{report}");
    assert!(of("used_disk_bytes_a_disk") <= 256 << 10, "{report}");
    assert!(of("fresh_memory_bytes_a_disk") <= 64 << 10, "{report}");
    assert!(files(folder.path()).is_empty(), "{:?}", files(folder.path()));
}

/// A server is killed while it creates stores. The next server removes the incomplete stores, and
/// the same command succeeds. Files of the user stay.
#[test]
fn what_a_killed_server_was_making_is_taken_away() {
    let folder = tempfile::tempdir().unwrap();
    let (state, image) = (folder.path().join("state"), folder.path().join("disk.img"));
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let device = format!("disk={}", image.display());
    let serve = || Server::start_with(&[&device], &["--state", state.to_str().unwrap()]);
    let group: Vec<String> = (0..64).map(|n| format!("s{n}=disk")).collect();
    let create = ["snapshot", "create", "--group", &group.join(",")];
    let of_kind = |folder: &Path, part: &str| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.to_string_lossy().contains(part)).collect()
    };
    for round in 0.. {
        assert!(round < 20, "nothing was ever left");
        let mut server = serve();
        let mut verb = udm(&create).env("UDM_SOCKET", &server.socket).stderr(Stdio::null()).spawn().unwrap();
        while of_kind(folder.path(), ".cow").is_empty() {
            std::thread::yield_now();
        }
        server.child.kill().unwrap();
        server.child.wait().unwrap();
        verb.wait().unwrap();
        let left = of_kind(folder.path(), ".cow");
        if !of_kind(&state, "making-").is_empty() && !left.is_empty() {
            break;
        }
        // The snapshot was already complete.
        left.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    }
    std::fs::write(folder.path().join("own.cow"), [0; 4096]).unwrap();
    let server = serve();
    assert_eq!(files(folder.path()), ["disk.img", "own.cow", "state"]);
    assert_eq!(of_kind(&state, "making-"), Vec::<PathBuf>::new());
    assert!(server.log().contains("removed, the server that was making it was killed"), "{}", server.log());
    server.says(&create);
    assert_eq!(of_kind(folder.path(), ".cow").len(), 65);
    assert_eq!(of_kind(&state, "making-"), Vec::<PathBuf>::new());
}

/// After a restart the origin is served without a snapshot-origin target, so its writes would
/// damage the snapshot.
#[test]
fn an_origin_that_copies_nothing_is_told() {
    let (folder, server) = served(&["disk"]);
    for name in ["monday", "tuesday"] {
        server.says(&["snapshot", "create", name, "--of", "disk"]);
    }
    drop(server);
    let at = |name: &str| folder.path().join(name).display().to_string();
    let snapshot =
        |name: &str| format!("{name}=0 16384 snapshot {} {} P 8", at("disk.img"), at(&format!("{name}.cow")));
    let (monday, tuesday) = (snapshot("monday"), snapshot("tuesday"));
    let line = "disk: its writes are not copied for snapshot monday and 1 more: load \"snapshot-origin ";
    let image = at("disk.img");
    for (table, is_logged) in
        [(format!("linear {image} 0"), true), (format!("snapshot-origin {image}"), false)]
    {
        let server = Server::start(&[&format!("disk=0 16384 {table}"), &monday, &tuesday]);
        assert_eq!(server.log().contains(line), is_logged, "{}", server.log());
    }
}

/// A client keeps the trims and write-zeroes that it was offered when it connected.
#[test]
fn a_client_from_before_the_snapshot_trims_and_zeroes() {
    let (folder, server) = served(&["disk"]);
    std::fs::write(folder.path().join("disk.img"), vec![7; 8 << 20]).unwrap();
    let mut client = Client::connect(&server.nbd, "disk");
    assert!(client.flags.contains(ExportFlags::SEND_TRIM | ExportFlags::SEND_WRITE_ZEROES));
    server.says(&["snapshot", "create", "monday", "--of", "disk"]);
    let zeroed = (64 << 10, 4 << 10);
    assert_eq!(client.one(Nbd::Trim, 128 << 10, 4 << 10), 0);
    assert_eq!(client.one(Nbd::WriteZeroes, zeroed.0, zeroed.1), 0);
    client.one(Nbd::Flush, 0, 0);
    let read = |client: &mut Client| {
        client.ask(Nbd::Read, 0, 1 << 20);
        client.answer().unwrap().2
    };
    assert_eq!(read(&mut Client::connect(&server.nbd, "monday")), vec![7; 1 << 20]);
    let mut expected = vec![7; 1 << 20];
    expected[zeroed.0 as usize..(zeroed.0 + zeroed.1) as usize].fill(0);
    assert_eq!(read(&mut client), expected, "a trim changes nothing, and zeroes are zeroes");
    let new = Client::connect(&server.nbd, "disk");
    assert!(!new.flags.contains(ExportFlags::SEND_TRIM));
}

/// A snapshot of a snapshot needs a device between them, which the refusal names. The origin of
/// snapshots stays as long as they do. A pattern is no name, and the refusal says so.
#[test]
fn snapshots_of_snapshots_and_removals_of_origins() {
    let (folder, server) = served(&["disk"]);
    server.says(&["snapshot", "create", "monday", "--of", "disk"]);
    let output = server.refuses(&["snapshot", "create", "noon", "--of", "monday"]);
    let (_, remedy) = output.split_once("create a device \"").unwrap();
    let (table, _) = remedy.split_once("\", and a snapshot of that").unwrap();
    server.says(&["create", "between", "--table", table]);
    let store = folder.path().display().to_string();
    server.says(&["snapshot", "create", "noon", "--of", "between", "--store", &store]);
    let mut client = Client::connect(&server.nbd, "between");
    assert_eq!(client.write(0), 0);
    let first = |name: &str| {
        let mut client = Client::connect(&server.nbd, name);
        client.ask_read(0);
        client.answer().unwrap().2[0]
    };
    assert_eq!(["disk", "monday", "between", "noon"].map(first), [0, 1, 1, 0]);

    let output = server.refuses(&["snapshot", "remove", "mon*"]);
    assert!(output.contains("no device of that name; a name is not a pattern"), "{output}");
    until("a device that nobody uses", || {
        let output = server.refuses(&["remove", "disk"]);
        output.contains("it has snapshots (monday): remove them first, or use --force").then_some(())
    });
    server.says(&["suspend", "disk"]);
    server.says(&["resume", "disk"]);
    drop(client);
    for (verb, name) in [(&["snapshot", "remove"][..], "noon"), (&["remove"], "between")] {
        until("a removal", || server.verb(&[verb, &[name]].concat()).status.success().then_some(()));
    }
    until("a removal", || server.verb(&["snapshot", "remove", "monday"]).status.success().then_some(()));
    server.says(&["remove", "disk"]);
}

/// A group of an origin and of the volume with the store of its snapshot, while the origin is
/// written: writes of the origin need the volume, so the origin is suspended first.
#[test]
fn a_group_of_an_origin_and_its_stores_volume_comes_to_rest() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.img");
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let image = image.display().to_string();
    // The volume answers slowly, so requests are in flight at each suspend.
    let volume = "volume=null:size=64M,memory_backed=1,irqmode=2,completion_nsec=5000000";
    let server = Server::start(&[
        &format!("org=0 16384 snapshot-origin {image}"),
        volume,
        "part=0 65536 linear @volume 65536",
        &format!("s=0 16384 snapshot {image} @part P 8"),
    ]);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut client = Client::connect(&server.nbd, "org");
            for chunk in (0..2048).take_while(|_| !over.load(Ordering::Relaxed)) {
                for part in 0..4 {
                    client.ask(Nbd::Write, (chunk * 4 + part) % 2048 * 4096, 4096);
                }
                (0..4).for_each(|_| assert_eq!(client.error(), 0));
            }
        });
        for round in 0..6 {
            let both = ["org,volume", "volume,org"][round % 2].split(',');
            let group: Vec<String> = both.map(|name| format!("{name}{round}={name}")).collect();
            let create =
                ["snapshot", "create", "--transient", "--timeout", "20", "--group", &group.join(",")];
            server.says(&[&create[..], &["--store", folder.path().to_str().unwrap()]].concat());
            let names: Vec<&str> = group.iter().map(|one| one.split('=').next().unwrap()).collect();
            server.says(&[&["snapshot", "remove"], &names[..]].concat());
        }
        over.store(true, Ordering::Relaxed);
        writer.join().unwrap();
    });
}
