//! Maps of the changes since a snapshot, as `qemu:dirty-bitmap:NAME` over NBD.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use support::maps::DirtyMapClient;
use support::nbd::Client;
use support::{Server, has, report_skip, text};
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, MetaContextRequest, NbdCommand as Nbd, NbdOption, OptionReply};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 8 * MIB;
const NONE: CommandFlags = CommandFlags::empty();

/// A server with a device `name` that maps an image of 8 MiB.
fn served(name: &str) -> (TempDir, Server) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
    let server = Server::start(&[&format!("{name}={}", path.display())]);
    (folder, server)
}

fn write(client: &mut Client, at: &[u64]) {
    at.iter().for_each(|at| assert_eq!(client.one(Nbd::Write, *at, 512), 0));
}

fn context(name: &str) -> String {
    format!("qemu:dirty-bitmap:{name}")
}

#[test]
fn what_others_see_of_the_maps() {
    let (_folder, server) = served("disk");
    let mut client = Client::connect(&server.nbd, "disk");
    server.says(&["snapshot", "create", "monday", "--of", "disk"]);
    write(&mut client, &[MIB, SIZE - 512]);
    server.says(&["snapshot", "create", "tuesday", "--of", "disk", "--chunk", "64k", "--transient"]);
    write(&mut client, &[3 * MIB]);
    let since_monday = [(MIB, 0), (4096, 1), (2 * MIB - 4096, 0), (4096, 1), (5 * MIB - 8192, 0), (4096, 1)];
    let since_tuesday = [(3 * MIB, 0), (65536, 1), (5 * MIB - 65536, 0)];
    let between =
        [(MIB, 0), (4096, 1), (2 * MIB - 4096, 0), (65536, 1), (5 * MIB - 65536 - 4096, 0), (4096, 1)];
    let cases = [
        ("disk", "monday", &since_monday[..]),
        ("disk", "tuesday", &since_tuesday[..]),
        ("tuesday", "monday", &between[..]),
        ("monday", "tuesday", &between[..]),
    ];
    for (export, name, map) in cases {
        let uri = format!("nbd+unix:///{export}?socket={}", server.nbd.display());
        let own: Vec<(u64, u32)> = DirtyMapClient::of(&server.nbd, export, name)
            .map(0, SIZE as u32)
            .iter()
            .map(|(len, flags)| (u64::from(*len), *flags))
            .collect();
        assert_eq!(own, map, "{export} {name}");
        if has("nbdinfo") {
            assert_eq!(nbdinfo(&uri, name), map, "nbdinfo: {export} {name}");
        }
        if has("qemu-img") {
            assert_eq!(qemu_img(&server.nbd, export, name), map, "qemu-img: {export} {name}");
        }
        if has_python() {
            let output = libnbd(&["map", &uri, name]);
            let lists: Vec<u64> = output.split_whitespace().map(|word| word.parse().unwrap()).collect();
            let pairs: Vec<(u64, u32)> = lists.chunks(2).map(|pair| (pair[0], pair[1] as u32)).collect();
            assert_eq!(pairs, map, "libnbd: {export} {name}");
        }
    }
    // `udm snapshot diff` prints the same ranges.
    assert_eq!(server.says(&["snapshot", "diff", "tuesday"]), "3145728\t65536\n");
    let uri = format!("nbd+unix:///tuesday?socket={}", server.nbd.display());
    if has_python() {
        let names = ["base:allocation", "qemu:dirty-bitmap:monday"].join("\n");
        assert_eq!(libnbd(&["list", &uri]).trim(), names);
    }
}

/// `nbdinfo --map`: lengths and flags.
fn nbdinfo(uri: &str, name: &str) -> Vec<(u64, u32)> {
    let out = Command::new("nbdinfo").arg(format!("--map={}", context(name))).arg(uri).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let row = |line: &str| {
        let mut words = line.split_whitespace().skip(1).map(str::to_owned);
        (words.next().unwrap().parse().unwrap(), words.next().unwrap().parse().unwrap())
    };
    text(&out.stdout).lines().map(row).collect()
}

/// `qemu-img map`, which shows dirty ranges as not present.
fn qemu_img(socket: &Path, export: &str, name: &str) -> Vec<(u64, u32)> {
    let server = format!("driver=nbd,server.type=unix,server.path={}", socket.display());
    let options = format!("{server},export={export},x-dirty-bitmap={}", context(name));
    let out = Command::new("qemu-img").args(["map", "--output=json", "--image-opts", &options]).output();
    let out = out.unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let rows: Vec<serde_json::Value> = serde_json::from_slice(&out.stdout).unwrap();
    let row = |row: &serde_json::Value| (row["length"].as_u64().unwrap(), u32::from(row["data"] == false));
    rows.iter().map(row).collect()
}

/// Debian's Python: another one earlier in the path may lack libnbd.
const PYTHON: &str = "/usr/bin/python3";

fn has_python() -> bool {
    let found =
        Command::new(PYTHON).args(["-c", "import nbd"]).output().is_ok_and(|out| out.status.success());
    if !found {
        report_skip("python3-libnbd is not installed");
    }
    found
}

fn libnbd(args: &[&str]) -> String {
    const SCRIPT: &str = r#"
import nbd, sys
h = nbd.NBD()
what, uri = sys.argv[1:3]
if what == "list":
    h.set_opt_mode(True)
    h.connect_uri(uri)
    h.opt_list_meta_context(lambda name: print(name))
    h.opt_abort()
else:
    name = "qemu:dirty-bitmap:" + sys.argv[3]
    h.add_meta_context(name)
    h.connect_uri(uri)
    at, size, runs = 0, h.get_size(), []
    while at < size:
        def extent(context, offset, entries, error):
            global at
            assert context == name and offset == at
            for length, flags in zip(entries[::2], entries[1::2]):
                if runs and runs[-1][1] == flags:
                    runs[-1][0] += length
                else:
                    runs.append([length, flags])
                at += length
        h.block_status(min(size - at, 1 << 20), at, extent)
    for run in runs:
        print(*run)
"#;
    let out = Command::new(PYTHON).args(["-c", SCRIPT]).args(args).output().unwrap();
    assert!(out.status.success(), "{args:?}: {}", text(&out.stderr));
    text(&out.stdout)
}

#[test]
fn a_request_sees_its_own_range() {
    let (_folder, server) = served("disk");
    server.says(&["snapshot", "create", "s", "--of", "disk", "--chunk", "1M"]);
    write(&mut Client::connect(&server.nbd, "disk"), &[MIB]);
    let mut maps = DirtyMapClient::of(&server.nbd, "disk", "s");
    // Queries that are smaller than a chunk, at any byte.
    assert_eq!(maps.map(MIB + 7, 100), [(100, 1)]);
    assert_eq!(maps.map(MIB - 7, 8), [(7, 0), (1, 1)]);
    assert_eq!(maps.map(2 * MIB - 1, 100), [(1, 1), (99, 0)]);
    assert_eq!(maps.maps(CommandFlags::REQ_ONE, 0, SIZE as u32), [[(MIB as u32, 0)]]);
    assert_eq!(maps.maps(CommandFlags::REQ_ONE, MIB, SIZE as u32 - MIB as u32), [[(MIB as u32, 1)]]);
    // With two contexts, each has its own ranges.
    let mut both = DirtyMapClient::dial(&server.nbd);
    assert_eq!(both.set("disk", &[&context("s"), "base:allocation"]).unwrap().len(), 2);
    both.go("disk");
    let found = both.maps(NONE, 0, SIZE as u32);
    assert_eq!(found[0].iter().map(|run| run.1).collect::<Vec<_>>(), [3, 0, 3]);
    assert_eq!(found[1].iter().map(|run| run.1).collect::<Vec<_>>(), [0, 1, 0]);
}

/// A map describes the snapshot for which it was chosen. If that snapshot no longer exists,
/// everything is dirty.
#[test]
fn a_map_that_is_gone_is_all_dirty() {
    let (folder, server) = served("disk");
    let all = [(SIZE as u32, 1)];
    let none = [(SIZE as u32, 0)];
    let create = |name: &str| server.says(&["snapshot", "create", name, "--of", "disk"]);
    create("s");
    create("other");
    let mut maps = DirtyMapClient::of(&server.nbd, "disk", "s");
    let mut through = DirtyMapClient::of(&server.nbd, "other", "s");
    let mut still = DirtyMapClient::of(&server.nbd, "disk", "other");
    assert_eq!((maps.map(0, SIZE as u32), through.map(0, SIZE as u32)), (none.to_vec(), none.to_vec()));

    // Another table of the same snapshot does not change the map.
    let table = server.says(&["table", "s"]);
    server.says(&["load", "s", "--table", table.trim()]);
    // A snapshot that waits for a handover has no map yet.
    let waiting = DirtyMapClient::dial(&server.nbd).list("disk", &["qemu:"]);
    assert_eq!(waiting, Ok(vec![context("s"), context("other")]));
    server.says(&["resume", "s"]);
    assert_eq!((maps.map(0, SIZE as u32), through.map(0, SIZE as u32)), (none.to_vec(), none.to_vec()));

    // The snapshot is removed between SET_META_CONTEXT and GO. A new snapshot with the same name
    // does not match.
    let mut late = DirtyMapClient::dial(&server.nbd);
    assert_eq!(late.set("disk", &[&context("s")]), Ok(vec![context("s")]));
    server.says(&["snapshot", "remove", "s"]);
    late.go("disk");
    for map in [&mut maps, &mut through, &mut late] {
        assert_eq!(map.map(0, SIZE as u32), all);
    }
    create("s");
    for map in [&mut maps, &mut through, &mut late] {
        assert_eq!(map.map(0, SIZE as u32), all);
    }
    assert_eq!(DirtyMapClient::of(&server.nbd, "disk", "s").map(0, SIZE as u32), none);
    assert_eq!(still.map(0, SIZE as u32), none);

    // While a snapshot is merged into the origin, everything is dirty and the origin has no maps.
    // Afterwards it has the remaining maps, with the merged changes.
    write(&mut Client::connect(&server.nbd, "s"), &[MIB]);
    drop((maps, through, late));
    let mut merged = DirtyMapClient::of(&server.nbd, "disk", "s");
    server.says(&["snapshot", "merge", "s"]);
    assert_eq!(merged.map(0, SIZE as u32), all);
    assert_eq!(still.map(0, SIZE as u32), [(MIB as u32, 0), (4096, 1), ((7 * MIB) as u32 - 4096, 0)]);
    let mut lists = DirtyMapClient::dial(&server.nbd);
    assert_eq!(lists.list("disk", &["qemu:"]), Ok(vec![context("other")]));

    // A table that is no snapshot-origin has no maps; nor has another disk.
    drop((merged, lists));
    std::fs::File::create(folder.path().join("new.img")).unwrap().set_len(SIZE).unwrap();
    let new = format!("0 16384 linear {} 0", folder.path().join("new.img").display());
    server.says(&["load", "disk", "--table", &new]);
    server.says(&["resume", "disk"]);
    assert_eq!(still.map(0, SIZE as u32), all);
}

/// During a merge the content of the origin changes all the time.
#[test]
fn a_merge_under_way_is_all_dirty() {
    let (folder, server) = served("disk");
    for name in ["s", "other"] {
        server.says(&["snapshot", "create", name, "--of", "disk"]);
    }
    let mut writer = Client::connect(&server.nbd, "s");
    // Half of the origin, in so few ranges that one reply holds them.
    let half = (0..SIZE / 4096).filter(|chunk| chunk / 32 % 2 == 0);
    half.for_each(|chunk| write(&mut writer, &[chunk * 4096]));
    drop(writer);
    let mut since = DirtyMapClient::of(&server.nbd, "disk", "other");
    let mut lists = DirtyMapClient::dial(&server.nbd);
    server.says(&["snapshot", "merge", "s", "--background"]);
    let mut begun = false;
    loop {
        let map = since.map(0, SIZE as u32);
        let dirty: u64 = map.iter().filter(|run| run.1 == 1).map(|run| u64::from(run.0)).sum();
        assert!(dirty >= SIZE / 2, "it lacks what is being merged: {map:?}");
        let under_way = server.says(&["table", "disk"]).contains("snapshot-merge");
        if under_way {
            begun = true;
            // The merge may have ended by now.
            let out = server.verb(&["snapshot", "diff", "other"]);
            let output = text(&out.stderr);
            assert!(out.status.success() || output.contains("is being merged into its origin"), "{output}");
        } else if dirty == SIZE / 2 {
            break;
        }
    }
    if !begun {
        report_skip("the merge was over before it was seen");
    }
    assert_eq!(lists.list("disk", &["qemu:"]), Ok(vec![context("other")]));
    drop(folder);
}

#[test]
fn an_invalid_snapshot_has_no_map() {
    let (_folder, server) = served("disk");
    server.says(&["snapshot", "create", "s", "--of", "disk", "--size", "64k"]);
    let mut maps = DirtyMapClient::of(&server.nbd, "disk", "s");
    let mut writer = Client::connect(&server.nbd, "disk");
    (0..32).for_each(|chunk| write(&mut writer, &[chunk * 65536]));
    assert!(server.says(&["status", "s"]).contains("Invalid"));
    assert_eq!(maps.map(0, SIZE as u32), [(SIZE as u32, 1)]);
    let mut lists = DirtyMapClient::dial(&server.nbd);
    assert_eq!(lists.list("disk", &["qemu:"]), Ok(Vec::new()));
    assert_eq!(lists.set("disk", &[&context("s")]), Ok(Vec::new()));
}

/// A map contains all writes that were acknowledged before the query. Two writers query what they
/// have just written, while snapshots are created and removed.
#[test]
fn a_map_lacks_nothing_that_was_acknowledged() {
    let (_folder, server) = served("disk");
    server.says(&["snapshot", "create", "base", "--of", "disk"]);
    let over = AtomicBool::new(false);
    let checked = std::thread::scope(|scope| {
        let writer = |first: u64| {
            let (server, over) = (&server, &over);
            move || {
                let (mut client, mut maps) =
                    (Client::connect(&server.nbd, "disk"), DirtyMapClient::of(&server.nbd, "disk", "base"));
                let mut checked = 0;
                for chunk in (first..SIZE / 4096).step_by(2) {
                    write(&mut client, &[chunk * 4096]);
                    assert_eq!(maps.map(chunk * 4096, 4096), [(4096, 1)], "chunk {chunk}");
                    checked += 1;
                }
                over.store(true, Ordering::Relaxed);
                checked
            }
        };
        let writers = [scope.spawn(writer(0)), scope.spawn(writer(1))];
        while !over.load(Ordering::Relaxed) {
            server.says(&["snapshot", "create", "s", "--of", "disk"]);
            server.says(&["snapshot", "remove", "s"]);
        }
        writers.map(|writer| writer.join().unwrap())
    });
    assert_eq!(checked, [1024, 1024]);
    assert_eq!(DirtyMapClient::of(&server.nbd, "disk", "base").map(0, SIZE as u32), [(SIZE as u32, 1)]);
}

/// Snapshots may have any valid device name. A query for anything else returns nothing.
#[test]
fn names_and_clients_of_all_kinds() {
    let (_folder, server) = served("disk");
    let names = ["a b", "ä:ö", "x\"'", "qemu:dirty-bitmap:y", "base:allocation"];
    for (name, store) in names.iter().zip(["mem:1M", "mem:2M", "mem:3M", "mem:4M", "mem:5M"]) {
        server.says(&["snapshot", "create", name, "--of", "disk", "--transient", "--store", store]);
    }
    let contexts: Vec<String> = names.iter().map(|name| context(name)).collect();
    let mut lists = DirtyMapClient::dial(&server.nbd);
    assert_eq!(lists.list("disk", &["qemu:dirty-bitmap:"]), Ok(contexts.clone()));
    for query in &contexts {
        assert_eq!(lists.set("disk", &[query.as_str()]), Ok(vec![query.clone()]));
    }
    for query in ["", "qemu", "qemu:dirty-bitmap", "qemu:dirty-bitmap:none", "qemu:allocation-depth", "a b"] {
        assert_eq!(lists.set("disk", &[query]), Ok(Vec::new()), "{query:?}");
    }
    // More queries than there can be contexts, in one option and in several.
    let option = |queries: &[String]| {
        NbdOption::SetMetaContext(MetaContextRequest { name: "disk".into(), queries: queries.to_vec() })
    };
    lists.send(&option(&vec!["qemu:dirty-bitmap:none".to_owned(); 100_000]));
    assert!(matches!(lists.answer(), OptionReply::Error { .. }));
    let most: Vec<String> = (0..2000).map(|i| format!("qemu:dirty-bitmap:{i}")).collect();
    (0..50).for_each(|_| lists.send(&option(&most)));
    (0..50).for_each(|_| assert_eq!(lists.answer(), OptionReply::Ack));
    assert_eq!(lists.list("disk", &["base:"]), Ok(vec!["base:allocation".into()]));
}

/// A thousand maps of one disk are listed. A client that chooses more than a few at a time is
/// refused.
#[test]
fn a_thousand_maps() {
    let (_folder, server) = served("disk");
    let group = |from: usize| {
        let pairs: Vec<String> = (from..from + 100).map(|i| format!("s{i}=disk")).collect();
        pairs.join(",")
    };
    let stores: PathBuf = server.folder.path().join("stores");
    std::fs::create_dir(&stores).unwrap();
    for from in (0..1000).step_by(100) {
        let store = stores.display().to_string();
        server.says(&["snapshot", "create", "--group", &group(from), "--transient", "--store", &store]);
    }
    write(&mut Client::connect(&server.nbd, "disk"), &[MIB]);
    let mut maps = DirtyMapClient::dial(&server.nbd);
    let listed = maps.list("disk", &[]).unwrap();
    assert_eq!((listed.len(), listed[0].as_str()), (1001, "base:allocation"));
    let queries: Vec<&str> = listed.iter().map(String::as_str).collect();
    assert!(maps.set("disk", &queries).unwrap_err().contains("at most 16"));
    assert_eq!(maps.set("disk", &queries[985..]).map(|chosen| chosen.len()), Ok(16));
    maps.go("disk");
    let found = maps.maps(NONE, 0, SIZE as u32);
    let expected = vec![(MIB as u32, 0), (4096, 1), ((7 * MIB) as u32 - 4096, 0)];
    assert!(found.len() == 16 && found.iter().all(|map| *map == expected), "{found:?}");
}
