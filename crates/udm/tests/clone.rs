//! Clones served by the program: external clients, hydration to the end, messages, reloads.

mod support;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use support::listener::EventListener;
use support::nbd::Client;
use support::{Server, has, text, until};
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, NbdCommand};

const SIZE: u64 = 8 << 20;
const SECTORS: u64 = SIZE / 512;

/// A source with data, a destination and zeroed metadata.
struct Disks {
    folder: TempDir,
}

impl Disks {
    fn new() -> Disks {
        let folder = tempfile::tempdir().unwrap();
        let disks = Disks { folder };
        fs::write(disks.path("source"), data()).unwrap();
        for (name, len) in [("destination", SIZE), ("metadata", 1 << 20)] {
            File::create(disks.path(name)).unwrap().set_len(len).unwrap();
        }
        disks
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The table of the clone, with `words` from the region size on.
    fn table(&self, words: &str) -> String {
        let [m, d, s] =
            ["metadata", "destination", "source"].map(|name| self.path(name).display().to_string());
        format!("0 {SECTORS} clone {m} {d} file:{s}?readonly=on {words}")
    }

    fn serve(&self, words: &str) -> Server {
        Server::start_with(&[&format!("c={}", self.table(words))], &["--cores", "0"])
    }
}

/// Data without two equal sectors.
fn data() -> Vec<u8> {
    (0..SIZE / 8).flat_map(|word| (word * 0x9e37_79b9).to_le_bytes()).collect()
}

fn uri(server: &Server) -> String {
    format!("nbd+unix:///c?socket={}", server.nbd.display())
}

fn run(program: &str, args: &[&str]) -> String {
    let out = Command::new(program).args(args).output().unwrap();
    assert!(out.status.success(), "{program} {args:?}: {}{}", text(&out.stdout), text(&out.stderr));
    text(&out.stdout)
}

/// The number of hydrated regions.
fn hydrated(server: &Server) -> u64 {
    let status = server.says(&["status", "c"]);
    let word = status.split(' ').nth(6).unwrap();
    word.split('/').next().unwrap().parse().unwrap_or_else(|_| panic!("{status}"))
}

#[test]
fn a_clone_ends_as_a_copy_and_then_as_a_linear_device() {
    let disks = Disks::new();
    let server = disks.serve("8 1 no_hydration 4 hydration_threshold 64 hydration_batch_size 16");
    let mut listener = EventListener::start(&server, None);
    assert_eq!(
        server.says(&["status", "c"]),
        format!(
            "0 {SECTORS} clone 8 4/256 8 0/2048 0 1 no_hydration 4 hydration_threshold 64 hydration_batch_size 16 rw\n"
        )
    );
    let mut client = Client::connect(&server.nbd, "c");
    assert_eq!(client.one(NbdCommand::Write, 4096 * 7 + 512, 1024), 0);
    assert_eq!(hydrated(&server), 1);
    server.says(&["message", "c", "0", "enable_hydration"]);
    until("a complete clone", || (hydrated(&server) == SECTORS / 8).then_some(()));
    let event = loop {
        let event = listener.next();
        if event["kind"] == "clone-hydrated" {
            break event;
        }
    };
    assert_eq!(
        (&event["device"], &event["line"]),
        (&"c".into(), &"all of the source is in the destination".into())
    );
    let mut expected = data();
    expected[4096 * 7 + 512..][..1024].fill(1);
    assert!(fs::read(disks.path("destination")).unwrap() == expected);
    assert!(fs::read(disks.path("source")).unwrap() == data(), "the source is only read");
    let linear = format!("0 {SECTORS} linear {} 0", disks.path("destination").display());
    server.says(&["load", "c", "--table", &linear]);
    server.says(&["resume", "c"]);
    // The client notices nothing, and the source and the metadata are not used any more.
    fs::remove_file(disks.path("source")).unwrap();
    fs::remove_file(disks.path("metadata")).unwrap();
    assert_eq!(client.one(NbdCommand::Read, 0, 1 << 20), 0);
    assert_eq!(client.one(NbdCommand::Write, 4096, 4096), 0);
    assert!(server.says(&["table", "c"]).contains(" linear "));
}

#[test]
fn external_clients() {
    if !["qemu-io", "nbdcopy", "nbdinfo"].into_iter().all(has) {
        return;
    }
    let disks = Disks::new();
    let server = disks.serve("128 1 no_hydration");
    let uri = uri(&server);
    let info = run("nbdinfo", &["--json", &uri]);
    for flag in ["\"can_flush\": true", "\"can_fua\": true", "\"can_trim\": true", "\"is_read_only\": false"]
    {
        assert!(info.contains(flag), "{flag}: {info}");
    }
    let copy = disks.path("copy");
    run("nbdcopy", &[&uri, copy.to_str().unwrap()]);
    assert!(fs::read(&copy).unwrap() == data(), "it reads as its source");
    assert_eq!(hydrated(&server), 0, "reads hydrate nothing");
    // Unaligned writes, FUA, a discard of two whole regions, a flush.
    run(
        "qemu-io",
        &[
            "-f",
            "raw",
            "-c",
            "write -P 0x11 70000 5000",
            "-c",
            "write -f -P 0x22 1M 64k",
            "-c",
            "discard 2M 128k",
            "-c",
            "flush",
            "-c",
            "read -P 0x11 70000 5000",
            "-c",
            "read -P 0x22 1M 64k",
            &uri,
        ],
    );
    assert_eq!(hydrated(&server), 4);
    drop(server);
    // The destination and the metadata have it, also after the kill.
    let server = disks.serve("128");
    let uri = format!("nbd+unix:///c?socket={}", server.nbd.display());
    until("a complete clone", || (hydrated(&server) == SECTORS / 128).then_some(()));
    run("nbdcopy", &[&uri, copy.to_str().unwrap()]);
    let (copy, mut expected) = (fs::read(&copy).unwrap(), data());
    expected[70_000..75_000].fill(0x11);
    expected[1 << 20..(1 << 20) + (64 << 10)].fill(0x22);
    let discarded = 2 << 20..(2 << 20) + (128 << 10);
    assert!(copy[..discarded.start] == expected[..discarded.start]);
    assert!(copy[discarded.end..] == expected[discarded.end..]);
    assert!(fs::read(disks.path("destination")).unwrap() == copy);
}

#[test]
fn what_is_not_metadata_is_refused_and_not_touched() {
    let disks = Disks::new();
    let metadata = File::options().write(true).open(disks.path("metadata")).unwrap();
    let server = Server::start(&[]);
    let refused = |bytes: &[u8], at: u64, why: &str| {
        metadata.write_all_at(bytes, at).unwrap();
        let before = fs::read(disks.path("metadata")).unwrap();
        let output = server.refuses(&["create", "c", "--table", &disks.table("8")]);
        assert!(output.contains("Failed to load metadata") && output.contains(why), "{output}");
        assert_eq!(
            output.trim_end().lines().filter(|line| line.contains(why)).count(),
            1,
            "one line: {output}"
        );
        assert!(fs::read(disks.path("metadata")).unwrap() == before);
        metadata.write_all_at(&vec![0; bytes.len()], at).unwrap();
    };
    refused(&0x8af2_7f64_u64.to_le_bytes(), 32, "this is metadata of the kernel's dm-clone");
    refused(b"_BHRfS_M", 65_600, "it has data at byte 65600");
    refused(b"something", 0, "this is no metadata of a clone");
    server.says(&["create", "c", "--table", &disks.table("8")]);
    let table = disks.table("8").replace("destination", "other");
    File::create(disks.path("other")).unwrap().set_len(SIZE).unwrap();
    let output = server.refuses(&["create", "d", "--table", &table]);
    assert!(output.contains("the live clone on it has the destination"), "{output}");
}

/// The source is over NBD, from a server that ends and comes back.
#[test]
fn a_source_that_is_away_for_a_while() {
    let disks = Disks::new();
    let source = || {
        let served = format!("s=0 {SECTORS} linear {} 0", disks.path("source").display());
        Server::start(&[&served])
    };
    let mut first = source();
    let [m, d] = ["metadata", "destination"].map(|name| disks.path(name).display().to_string());
    let table = format!(
        "c=0 {SECTORS} clone {m} {d} nbd+unix:///s?socket={} 128 1 no_hydration",
        first.nbd.display()
    );
    let server = Server::start(&[&table]);
    let mut client = Client::connect(&server.nbd, "c");
    assert_eq!(client.one(NbdCommand::Write, 0, 4096), 0);
    first.kill();
    // Hydrated regions are served, others fail; nothing is hydrated with wrong data.
    assert_eq!(client.one(NbdCommand::Read, 0, 65_536), 0);
    until("an error", || (client.one(NbdCommand::Read, 65_536, 4096) == 5).then_some(()));
    assert_eq!(client.one(NbdCommand::Write, 65_536, 4096), 5);
    server.says(&["message", "c", "0", "enable_hydration"]);
    let again = {
        let served = format!("s=0 {SECTORS} linear {} 0", disks.path("source").display());
        let _ = fs::remove_file(&first.nbd);
        let mut command = support::udm(&["serve"]);
        command.args(["--cores", "0", "--check-paths", "off", "--device", &served]);
        command.arg("--unix").arg(&first.nbd).arg("--socket").arg(first.folder.path().join("again"));
        support::ChildGuard(command.spawn().unwrap())
    };
    until("a complete clone", || (hydrated(&server) == SECTORS / 128).then_some(()));
    let mut expected = data();
    expected[..4096].fill(1);
    assert!(fs::read(disks.path("destination")).unwrap() == expected);
    drop(again);
}

/// The new server reads what the old one has committed at its last suspend.
#[test]
fn an_upgrade_keeps_what_was_written() {
    let disks = Disks::new();
    let mut server = disks.serve("128 1 no_hydration");
    let mut client = Client::connect(&server.nbd, "c");
    assert_eq!(client.one(NbdCommand::Write, 65_536 * 3 + 512, 1024), 0);
    server.upgrade(&[]);
    assert_eq!(hydrated(&server), 1, "{}", server.log());
    client.send(CommandFlags::empty(), NbdCommand::Read, 65_536 * 3, 4096, &[]).unwrap();
    let (_, error, found) = client.answer().unwrap();
    let mut expected = data()[65_536 * 3..][..4096].to_vec();
    expected[512..1536].fill(1);
    assert!(error == 0 && found == expected);
}
