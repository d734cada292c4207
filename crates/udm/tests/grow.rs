//! Stores that grow, and stores that other programs change, with the program and external clients.

#[path = "../../udm-targets/tests/snapshot/reader.rs"]
mod reader;
mod support;

use reader::{ParsedStore, read_store};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::nbd::Client;
use support::{Server, has, report_skip, text, until};
use tempfile::TempDir;
use udm_wire::nbd::NbdCommand as Nbd;

const CHUNK: u64 = 4096;

/// A folder with an image of `chunks` chunks; each chunk contains its number.
fn image(chunks: u64) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.img");
    let bytes: Vec<u8> = (0..chunks).flat_map(|chunk| chunk.to_le_bytes().repeat(512)).collect();
    std::fs::write(&path, bytes).unwrap();
    (folder, path)
}

fn uri(server: &Server, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", server.nbd.display())
}

fn nbdcopy(from: &str, to: &str) {
    let out = Command::new("nbdcopy").args([from, to]).output().unwrap();
    assert!(out.status.success(), "{from}: {}", text(&out.stderr));
}

/// All bytes of an export.
fn bytes(server: &Server, name: &str) -> Vec<u8> {
    let copy = server.folder.path().join("copy");
    nbdcopy(&uri(server, name), &copy.display().to_string());
    let bytes = std::fs::read(&copy).unwrap();
    std::fs::remove_file(copy).unwrap();
    bytes
}

/// Reads a store of an origin of `chunks` chunks with a reader that is independent of udm.
fn store(path: &Path, chunks: u64) -> ParsedStore {
    let file = File::open(path).unwrap();
    let size = file.metadata().unwrap().len() / 512;
    let read = |sector: u64, sectors: u64| {
        let mut bytes = vec![0; sectors as usize * 512];
        file.read_exact_at(&mut bytes, sector * 512).unwrap();
        bytes
    };
    read_store(size, chunks * CHUNK / 512, read).unwrap().expect("a store that is not blank")
}

fn message(server: &Server, text: &str) -> String {
    server.says(&["message", "s", "0", text])
}

fn state(server: &Server) -> String {
    let list: serde_json::Value =
        serde_json::from_str(&server.says(&["snapshot", "list", "--json"])).unwrap();
    list[0]["state"].as_str().unwrap().to_owned()
}

fn warnings(server: &Server) -> Vec<String> {
    let log = server.log();
    log.lines().filter(|line| line.contains("WARN") || line.contains("ERROR")).map(String::from).collect()
}

#[test]
fn a_small_store_grows_a_hundredfold_under_load_and_keeps_the_instant() {
    if !has("nbdcopy") {
        return;
    }
    const CHUNKS: u64 = 4096;
    for kind in [&[][..], &["--transient"]] {
        let (folder, disk) = image(CHUNKS);
        let before = std::fs::read(&disk).unwrap();
        let new = folder.path().join("new.img");
        std::fs::write(&new, vec![0xee; before.len()]).unwrap();
        let server = Server::start(&[&format!("disk={}", disk.display())]);
        let create = ["snapshot", "create", "s", "--of", "disk", "--grow", "128k"];
        server.says(&[&create[..], kind].concat());
        let cow = folder.path().join("s.cow");
        assert_eq!(std::fs::metadata(&cow).unwrap().len(), 128 << 10);
        nbdcopy(&new.display().to_string(), &uri(&server, "disk"));
        let long = std::fs::metadata(&cow).unwrap().len();
        assert!(long >= 128 * (128 << 10), "{long}");
        assert!(bytes(&server, "s") == before, "the snapshot is not the instant");
        assert!(bytes(&server, "disk") == [0xee; 16 << 20]);
        let list: serde_json::Value =
            serde_json::from_str(&server.says(&["snapshot", "list", "--json"])).unwrap();
        assert_eq!((&list[0]["total_bytes"], &list[0]["grow_bytes"]), (&long.into(), &(128 << 10).into()));
        assert!(list[0]["max_bytes"].as_u64().unwrap() >= long);
        let status = server.says(&["status", "s"]);
        assert!(status.contains(&format!("/{} ", long / 512)), "{status}");
        assert_eq!(warnings(&server), [""; 0]);
        if kind.is_empty() {
            let store = store(&cow, CHUNKS);
            assert!(store.is_in_order() && store.records.len() as u64 == CHUNKS);
        }
    }
}

/// A tmpfs of 2 MiB, unmounted on drop.
struct SmallTmpfs(TempDir);

impl SmallTmpfs {
    fn mount() -> Option<SmallTmpfs> {
        let dir = tempfile::tempdir().unwrap();
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=2M", "udm-test"]).arg(dir.path()).output();
        if !mount.is_ok_and(|out| out.status.success()) {
            report_skip("tmpfs can't be mounted");
            return None;
        }
        Some(SmallTmpfs(dir))
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_file_system_that_is_full_makes_writes_wait_until_there_is_room() {
    if !has("nbdcopy") {
        return;
    }
    // With an explicit step, and without: the initial size of the store is allocated too.
    for (chunks, other, grow) in [(256, 1536 << 10, Some("--grow=64k")), (384, 900 << 10, None)] {
        let Some(small) = SmallTmpfs::mount() else { return };
        let (_folder, disk) = image(chunks);
        let before = std::fs::read(&disk).unwrap();
        let at = |name: &str| small.0.path().join(name);
        std::fs::write(at("other"), vec![1; other]).unwrap();
        let server = Server::start(&[&format!("disk={}", disk.display())]);
        let place = at("s.cow").display().to_string();
        let create = ["snapshot", "create", "s", "--of", "disk", "--store", &place];
        server.says(&[&create[..], grow.as_slice()].concat());
        message(&server, "set on_full pause");
        let mut client = Client::connect(&server.nbd, "disk");
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                (0..chunks).for_each(|chunk| assert_eq!(client.one(Nbd::Write, chunk * CHUNK, 4096), 0));
            });
            let full = || warnings(&server).first().cloned();
            let output = until("a file system that is full", full);
            assert!(output.contains("No space left on device"), "{output}");
            assert!(!writer.is_finished() && state(&server) == "active");
            // Another program frees space, without a notification.
            std::fs::remove_file(at("other")).unwrap();
        });
        assert_eq!(warnings(&server).len(), 1, "{:?}", warnings(&server));
        assert!(bytes(&server, "s") == before);
        assert_eq!(store(&at("s.cow"), chunks).records.len() as u64, chunks);
    }
}

/// The first step of a store has its blocks before the file system is full: its copies are kept.
#[test]
fn the_first_step_of_a_store_has_its_room() {
    let Some(small) = SmallTmpfs::mount() else { return };
    let (_folder, disk) = image(512);
    let place = small.0.path().join("s.cow").display().to_string();
    let server = Server::start(&[&format!("disk={}", disk.display())]);
    server.says(&["snapshot", "create", "s", "--of", "disk", "--store", &place, "--grow", "1M"]);
    message(&server, "set on_full pause");
    // Takes what is left.
    std::fs::write(small.0.path().join("other"), vec![1; 2 << 20]).unwrap_err();
    let mut client = Client::connect(&server.nbd, "disk");
    (0..200).for_each(|chunk| assert_eq!(client.one(Nbd::Write, chunk * CHUNK, 4096), 0));
    assert_eq!(state(&server), "active");
}

/// A store of its full length, whose blocks are allocated as it fills: a full file system makes the
/// snapshot invalid, with that reason.
#[test]
fn a_sparse_store_on_a_full_file_system_is_invalid_with_the_reason() {
    let Some(small) = SmallTmpfs::mount() else { return };
    let (_folder, disk) = image(512);
    let place = small.0.path().join("s.cow").display().to_string();
    let server = Server::start(&[&format!("disk={}", disk.display())]);
    server.says(&["snapshot", "create", "s", "--of", "disk", "--store", &place, "--grow", "0"]);
    std::fs::write(small.0.path().join("other"), vec![1; 1536 << 10]).unwrap();
    let mut client = Client::connect(&server.nbd, "disk");
    (0..512).for_each(|chunk| assert_eq!(client.one(Nbd::Write, chunk * CHUNK, 4096), 0));
    assert_eq!(state(&server), "invalid");
    let why = "s: Invalidating snapshot: Error reading/writing: No space left on device";
    until(why, || server.log().contains(why).then_some(()));
}

/// Limits the size of files that the server can write from now on.
fn limit(server: &Server, bytes: Option<u64>) {
    let pid = Pid::from_child(&server.child);
    prlimit(Some(pid), Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
}

#[test]
fn growth_that_fails_ends_with_the_policy_and_one_line() {
    if !has("nbdcopy") {
        return;
    }
    for (policy, extra, end, answer) in [
        ("invalidate", None, "invalid", 0),
        ("invalidate", Some("--overflow"), "overflow", 0),
        ("fail", None, "active", 28),
    ] {
        let (folder, disk) = image(256);
        let before = std::fs::read(&disk).unwrap();
        let server = Server::start(&[&format!("disk={}", disk.display())]);
        let create = ["snapshot", "create", "s", "--of", "disk", "--grow", "64k"];
        server.says(&[&create[..], extra.as_slice()].concat());
        message(&server, &format!("set on_full {policy}"));
        limit(&server, Some(100 << 10));
        // Writes of the snapshot, because writes of the origin cause no overflow.
        let mut client = Client::connect(&server.nbd, if extra.is_some() { "s" } else { "disk" });
        let answers: Vec<_> = (0..20).map(|chunk| client.one(Nbd::Write, chunk * CHUNK, 4096)).collect();
        assert!(answers[..14].iter().all(|answer| *answer == 0), "{policy}: {answers:?}");
        match extra {
            Some(_) => assert_eq!(answers[19], 5),
            None => assert_eq!(answers[19], answer),
        }
        assert_eq!(state(&server), end);
        let log = warnings(&server);
        let grown: Vec<_> = log.iter().filter(|line| line.contains("stays at")).collect();
        assert!(
            grown.len() == 1 && grown[0].contains("the maximum length of a file is 102400 bytes here"),
            "{log:?}"
        );
        assert!(!server.says(&["info", "s"]).contains("Event number:      0"));
        assert_eq!(std::fs::metadata(folder.path().join("s.cow")).unwrap().len(), 64 << 10);
        if policy == "fail" {
            limit(&server, None);
            until("the next attempt", || (client.one(Nbd::Write, 19 * CHUNK, 4096) == 0).then_some(()));
            assert!(bytes(&server, "s") == before);
        }
    }
}

#[test]
fn killed_while_it_grows_it_is_the_instant_when_it_comes_back() {
    if !has("nbdcopy") {
        return;
    }
    const CHUNKS: u64 = 1024;
    let (folder, disk) = image(CHUNKS);
    let before = std::fs::read(&disk).unwrap();
    let cow = folder.path().join("s.cow");
    File::create(&cow).unwrap().set_len(64 << 10).unwrap();
    let origin = format!("disk=0 {} snapshot-origin {}", CHUNKS * 8, disk.display());
    let store_uri = format!("file:{}?grow=16k", cow.display());
    let snapshot = format!("s=0 {} snapshot {} {store_uri} P 8", CHUNKS * 8, disk.display());
    let mut lengths = vec![64 << 10];
    for round in 0..8 {
        let mut server = Server::start(&[&origin, &snapshot]);
        let mut client = Client::connect(&server.nbd, "disk");
        let line = client.stream.try_clone().unwrap();
        let writer = std::thread::spawn(move || {
            for chunk in 0..CHUNKS {
                // Until the server has ended.
                let sent = client.head(Nbd::Write, (chunk * 37 + round) % CHUNKS * CHUNK, 4096);
                if sent.and_then(|()| client.stream.write_all(&[1; 4096])).is_err() {
                    return;
                }
            }
        });
        let len = || std::fs::metadata(&cow).unwrap().len();
        let last = *lengths.last().unwrap();
        until("growth", || (len() >= last + (100 << 10) || len() > CHUNKS * CHUNK).then_some(()));
        server.child.kill().unwrap();
        server.child.wait().unwrap();
        // The kernel may keep the server's descriptors longer than the process.
        let _ = line.shutdown(std::net::Shutdown::Both);
        writer.join().unwrap();
        lengths.push(len());
        let out = support::udm(&["cow", "check"]).arg(&cow).output().unwrap();
        assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
        store(&cow, CHUNKS);
    }
    let server = Server::start(&[&origin, &snapshot]);
    assert!(bytes(&server, "s") == before, "{lengths:?}");
    assert!(lengths[8] > lengths[0] + (600 << 10), "{lengths:?}");
}

#[test]
fn a_store_that_others_change_is_told_of_in_one_line() {
    let (folder, disk) = image(256);
    let server = Server::start(&[&format!("disk={}", disk.display())]);
    server.says(&["snapshot", "create", "s", "--of", "disk", "--size", "256k", "--grow", "0"]);
    let cow = OpenOptions::new().write(true).open(folder.path().join("s.cow")).unwrap();
    let mut client = Client::connect(&server.nbd, "disk");
    let mut write = |chunk: u64| client.one(Nbd::Write, chunk * CHUNK, 4096);
    assert_eq!(write(0), 0);
    // Longer: used after the message `grown`.
    cow.set_len(512 << 10).unwrap();
    message(&server, "grown");
    assert!(server.says(&["status", "s"]).contains("/1024 "));
    assert!((0..80).all(|chunk| write(chunk) == 0) && state(&server) == "active");
    assert_eq!(warnings(&server), [""; 0]);
    // Shorter than its data: lost chunks are not replaced by zeroes.
    cow.set_len(64 << 10).unwrap();
    let mut reader = Client::connect(&server.nbd, "s");
    assert_eq!(reader.one(Nbd::Read, 79 * CHUNK, 4096), 5);
    assert!(write(100) == 0 && write(101) == 0, "the origin goes on");
    assert_eq!(state(&server), "invalid");
    let log = warnings(&server);
    assert!(log.len() == 1 && log[0].contains("Invalidating snapshot: "), "{log:?}");
    assert_eq!(std::fs::metadata(folder.path().join("s.cow")).unwrap().len(), 64 << 10);

    // Too short for any store at load time.
    let tiny = folder.path().join("tiny.cow");
    for (len, why) in [(4096, "a store has at least two chunks of 8 sectors"), (100, "shorter than a block")]
    {
        File::create(&tiny).unwrap().set_len(len).unwrap();
        let table = format!("0 2048 snapshot {} {} P 8", disk.display(), tiny.display());
        let output = server.refuses(&["create", "t", "--table", &table]);
        assert!(output.contains(why), "{len}: {output}");
    }
    let output =
        server.refuses(&["snapshot", "create", "u", "--of", "disk", "--store", "mem:1M", "--grow", "1M"]);
    assert_eq!(output, "udm: u: mem:1M: a store can grow only in a regular file\n");
}

/// The cut part would read as zeroes after a write beyond it.
#[test]
fn a_store_that_was_cut_is_found_out_though_writes_make_it_longer() {
    for (kind, header) in [(&[][..], Some(false)), (&["--transient"], None)] {
        let (folder, disk) = image(256);
        let server = Server::start(&[&format!("disk={}", disk.display())]);
        let create = ["snapshot", "create", "s", "--of", "disk", "--size", "1M", "--grow", "0"];
        server.says(&[&create[..], kind].concat());
        let path = folder.path().join("s.cow");
        let cow = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let (mut origin, mut snapshot) =
            (Client::connect(&server.nbd, "disk"), Client::connect(&server.nbd, "s"));
        assert!((0..240).all(|chunk| origin.one(Nbd::Write, chunk * CHUNK, 4096) == 0));
        cow.set_len(64 << 10).unwrap();
        // Overwrites chunks far beyond the remaining part.
        let mut seen = Vec::new();
        until("an invalid snapshot", || {
            seen.push(snapshot.one(Nbd::Write, 200 * CHUNK, 4096));
            (state(&server) == "invalid").then_some(())
        });
        assert!(seen.iter().all(|answer| [0, 5].contains(answer)), "{seen:?}");
        assert!((0..256).all(|chunk| snapshot.one(Nbd::Read, chunk * CHUNK, 512) == 5));
        assert_eq!(origin.one(Nbd::Write, 250 * CHUNK, 4096), 0, "the origin goes on");
        let log = warnings(&server);
        assert!(log.len() == 1 && log[0].ends_with("s: Invalidating snapshot: The store was made shorter."));
        assert!(cow.metadata().unwrap().len() < 1 << 20);
        assert!(header.is_none_or(|valid| store(&path, 256).valid == valid));
    }
}

/// The same, with a write to the very end of the store: the lost part does not come back.
#[test]
fn the_end_of_a_store_that_was_cut_stays_away() {
    let (folder, disk) = image(256);
    let server = Server::start(&[&format!("disk={}", disk.display())]);
    server.says(&["snapshot", "create", "s", "--of", "disk", "--size", "256k", "--grow", "0"]);
    let cow = OpenOptions::new().write(true).open(folder.path().join("s.cow")).unwrap();
    let (mut origin, mut snapshot) =
        (Client::connect(&server.nbd, "disk"), Client::connect(&server.nbd, "s"));
    assert!((0..62).all(|chunk| origin.one(Nbd::Write, chunk * CHUNK, 4096) == 0));
    assert!(server.says(&["status", "s"]).contains("512/512"), "a full store");
    cow.set_len(64 << 10).unwrap();
    assert_eq!(snapshot.one(Nbd::Write, 61 * CHUNK, 4096), 5);
    assert_eq!(cow.metadata().unwrap().len(), 64 << 10);
    until("an invalid snapshot", || {
        let answer = snapshot.one(Nbd::Read, 0, 512);
        (answer == 5 && state(&server) == "invalid").then_some(())
    });
    assert_eq!(warnings(&server).len(), 1, "{:?}", warnings(&server));
}

#[test]
fn who_waits_for_room_holds_up_no_end() {
    let (_folder, disk) = image(256);
    let mut server = Server::start(&[&format!("disk={}", disk.display())]);
    server.says(&["snapshot", "create", "s", "--of", "disk", "--size", "64k", "--grow", "16k"]);
    message(&server, "set on_full pause");
    let mut client = Client::connect(&server.nbd, "disk");
    (0..20).for_each(|chunk| client.ask(Nbd::Write, chunk * CHUNK, 4096));
    until("a full store", || server.says(&["status", "s"]).contains("128/128").then_some(()));
    rustix::process::kill_process(Pid::from_child(&server.child), rustix::process::Signal::TERM).unwrap();
    let status = until("the end", || server.child.try_wait().unwrap());
    assert!(status.success(), "{status:?}: {}", server.log());
}
