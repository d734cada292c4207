//! Stores that are inconsistent, too small, or in use by another device or program. Each is refused
//! in one line with the byte at fault, and is not written to.

mod support;

use std::fs;
use std::path::Path;
use support::nbd::Client;
use support::{Server, text, udm};
use udm_wire::nbd::NbdCommand as Nbd;

const CHUNK: usize = 4096;

/// A store of 64 chunks with records of chunks 3, 7 and 9 of an origin of 256 chunks.
fn store() -> Vec<u8> {
    let mut bytes = vec![0; 64 * CHUNK];
    bytes[..16].copy_from_slice(b"SnAp\x01\0\0\0\x01\0\0\0\x08\0\0\0");
    for (place, (old, new)) in [(3, 2), (7, 3), (9, 4)].into_iter().enumerate() {
        record(&mut bytes, place, old, new);
    }
    bytes
}

fn record(bytes: &mut [u8], place: usize, old: u64, new: u64) {
    let at = CHUNK + 16 * place;
    bytes[at..at + 8].copy_from_slice(&old.to_le_bytes());
    bytes[at + 8..at + 16].copy_from_slice(&new.to_le_bytes());
}

/// The store with other bytes at one position.
fn with(at: usize, other: [u8; 4]) -> Vec<u8> {
    let mut bytes = store();
    bytes[at..at + 4].copy_from_slice(&other);
    bytes
}

/// The store with another second record.
fn with_record(old: u64, new: u64) -> Vec<u8> {
    let mut bytes = store();
    record(&mut bytes, 1, old, new);
    bytes
}

/// A store of `chunks` chunks with a full first area.
fn full(chunks: usize) -> Vec<u8> {
    let mut bytes = store();
    bytes.resize(chunks * CHUNK, 0);
    (0..256).for_each(|place| record(&mut bytes, place, place as u64, 2 + place as u64));
    bytes
}

fn table(disk: &Path, store: &Path) -> String {
    format!("0 2048 snapshot {} {} P 8", disk.display(), store.display())
}

#[test]
fn what_cannot_be_true_is_refused_with_the_byte_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (disk, cow) = (folder.path().join("disk"), folder.path().join("cow"));
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let server = Server::start(&["other=0 2048 linear mem:1M 0"]);
    let area_1 = {
        let mut bytes = store();
        bytes.resize(300 * CHUNK, 0);
        record(&mut bytes, 1, 7, 258);
        bytes
    };
    let end = |len: usize| store()[..len].to_vec();
    let cases = [
        (
            "at byte 0: Invalid or corrupt snapshot: the magic number is 0x12345678",
            with(0, [0x78, 0x56, 0x34, 0x12]),
        ),
        ("at byte 0: Invalid or corrupt snapshot: the magic number is 0x6c6c6568", b"hello\n".repeat(1024)),
        ("at byte 8: unable to handle snapshot disk version 2", with(8, [2, 0, 0, 0])),
        ("at byte 12: invalid on-disk chunk size 0: Chunk size is not a power of 2", with(12, [0; 4])),
        ("at byte 12: invalid on-disk chunk size 7: Chunk size is not a power of 2", with(12, [7, 0, 0, 0])),
        ("at byte 12: invalid on-disk chunk size 4194304: Chunk size is too high", with(12, [0, 0, 64, 0])),
        ("at byte 4096: area 0 of records is beyond the end of the store (0 chunks)", end(512)),
        ("at byte 4096: area 0 of records is beyond the end of the store (1 chunks)", end(CHUNK + 512)),
        ("at byte 1056768: area 1 of records is beyond the end of the store (258 chunks)", full(258)),
        (
            "at byte 4112: record 1 keeps chunk 7 in chunk 3, beyond the end of the store (3 chunks)",
            end(3 * CHUNK),
        ),
        (
            "at byte 4112: record 1 keeps chunk 256, beyond the end of the origin (256 chunks)",
            with_record(256, 3),
        ),
        ("at byte 4112: record 1 keeps chunk 18446744073709551615, beyond", with_record(u64::MAX, 3)),
        ("at byte 4112: record 1 keeps chunk 7 in chunk 64, beyond the end of the store", with_record(7, 64)),
        (
            "at byte 4112: record 1 keeps chunk 7 in chunk 18446744073709551615, beyond",
            with_record(7, u64::MAX),
        ),
        ("at byte 4112: record 1 keeps chunk 7 in chunk 1, which holds metadata", with_record(7, 1)),
        ("at byte 4112: record 1 keeps chunk 7 in chunk 258, which holds metadata", area_1),
        ("at byte 4112: record 1 keeps chunk 3 in chunk 3, and an earlier one keeps it", with_record(3, 3)),
        ("at byte 4112: record 1 keeps chunk 7 in chunk 2, where another one is kept", with_record(7, 2)),
        ("a store has at least two chunks of 8 sectors", vec![0; CHUNK]),
        ("shorter than a block (512 bytes)", vec![0; 100]),
        ("shorter than a block (512 bytes)", Vec::new()),
    ];
    let table = table(&disk, &cow);
    for (why, bytes) in &cases {
        fs::write(&cow, bytes).unwrap();
        let output = server.refuses(&["create", "s", "--table", &table]);
        assert!(output.lines().next().unwrap().contains(why), "{why}: {output}");
        assert!(fs::read(&cow).unwrap() == *bytes, "{why}: it was written to");
        assert_eq!(server.says(&["ls"]).lines().count(), 1, "{why}: something is left");
        // A server that is started with the store prints the same error and does not start.
        let serve = udm(&["serve", "--cores", "0", "--device", &format!("s={table}"), "--unix", "-"])
            .args(["--socket", "/dev/null/none"])
            .output()
            .unwrap();
        let output = text(&serve.stderr);
        assert!(serve.status.code() == Some(1) && output.contains(why), "{why}: {output}");
        assert!(fs::read(&cow).unwrap() == *bytes, "{why}: it was written to");
        if let (true, Some((byte, _))) = (why.starts_with("at byte"), why.split_once(": ")) {
            let check = udm(&["cow", "check", "--origin-size", "1M"]).arg(&cow).output().unwrap();
            assert!(
                text(&check.stderr).starts_with(&format!("udm: {}: {byte}: ", cow.display())),
                "{check:?}"
            );
        }
    }
    assert_eq!(server.log().lines().count(), 2, "{}", server.log());
    // The store that the bad ones were made from is good.
    fs::write(&cow, store()).unwrap();
    server.says(&["create", "s", "--table", &table]);
    assert_eq!(server.says(&["status", "s"]), "0 2048 snapshot 40/512 16\n");
}

#[test]
fn a_second_writer_of_a_store_is_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let (disk, cow) = (folder.path().join("disk"), folder.path().join("cow"));
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    fs::write(&cow, store()).unwrap();
    let server = Server::start(&[&format!("s={}", table(&disk, &cow))]);
    let link = folder.path().join("link");
    fs::hard_link(&cow, &link).unwrap();
    let before = fs::read(&cow).unwrap();
    let other = Server::start(&["m=0 2048 linear mem:1M 0"]);
    for name in [&cow, &link] {
        // The store belongs to another origin in this server, and is in use for any other server.
        let output = server.refuses(&[
            "create",
            "t",
            "--table",
            &format!("0 2048 snapshot mem:1M {} P 8", name.display()),
        ]);
        assert!(
            output.contains("254:0 uses") && output.contains("exclusively): Device or resource busy"),
            "{output}"
        );
        let output = other.refuses(&["create", "t", "--table", &table(Path::new("mem:1M"), name)]);
        let line = format!("{}: in use: another program writes it or forbids writes", name.display());
        assert!(output.contains(&line), "{output}");
        // A shared file does not make the store shared.
        let shared = format!("file:{}?exclusive=off", name.display());
        let output =
            other.refuses(&["create", "t", "--table", &table(Path::new("mem:1M"), Path::new(&shared))]);
        assert!(
            output.contains("another program uses")
                && output.contains("exclusively): Device or resource busy"),
            "{output}"
        );
        let out = udm(&["cow", "compact"]).arg(name).output().unwrap();
        assert!(text(&out.stderr).ends_with("it is in use by another program\n"), "{out:?}");
    }
    assert!(fs::read(&cow).unwrap() == before);
}

/// Reads of the missing part fail. If a chunk of that part cannot be copied, the snapshot becomes
/// invalid. A table that needs the part is refused.
#[test]
fn an_origin_that_is_resized_under_a_snapshot() {
    let folder = tempfile::tempdir().unwrap();
    let (disk, cow) = (folder.path().join("disk"), folder.path().join("cow"));
    let file = fs::File::create(&disk).unwrap();
    file.set_len(1 << 20).unwrap();
    fs::File::create(&cow).unwrap().set_len(1 << 20).unwrap();
    let origin = format!("0 2048 snapshot-origin {}", disk.display());
    let server = Server::start(&[&format!("v={origin}"), &format!("s={}", table(&disk, &cow))]);
    let mut clients = ["v", "s"].map(|name| Client::connect(&server.nbd, name));
    let mut one =
        |client: usize, kind, chunk: usize| clients[client].one(kind, (chunk * CHUNK) as u64, CHUNK as u64);
    assert_eq!(one(0, Nbd::Write, 1), 0);
    // Longer: live tables do not change, and a new table may use the additional part.
    file.set_len(2 << 20).unwrap();
    assert_eq!((one(0, Nbd::Write, 2), one(1, Nbd::Read, 255)), (0, 0));
    server.says(&["load", "v", "--table", &origin.replace("2048", "4096")]);
    server.says(&["resume", "v"]);
    assert_eq!(
        (one(0, Nbd::Write, 3), server.says(&["status", "s"])),
        (0, "0 2048 snapshot 40/2048 16\n".into())
    );
    // Shorter: the remaining part is intact.
    file.set_len(512 << 10).unwrap();
    assert_eq!((one(1, Nbd::Read, 200), one(1, Nbd::Read, 1), one(0, Nbd::Write, 4)), (5, 0, 0));
    for (name, table) in [("v", &origin), ("s", &table(&disk, &cow))] {
        let output = server.refuses(&["load", name, "--table", table]);
        let why = "disk too small for target: start=0, len=2048, dev_size=1024: Invalid argument";
        assert_eq!(output.lines().next(), Some(&*format!("udm: {name}: {why}")));
    }
    assert_eq!(server.says(&["status", "s"]), "0 2048 snapshot 48/2048 16\n");
    assert_eq!((one(0, Nbd::Write, 200), one(1, Nbd::Read, 1)), (5, 5));
    assert_eq!(server.says(&["status", "s"]), "0 2048 snapshot Invalid\n");
    assert_eq!(file.metadata().unwrap().len(), 512 << 10);
}
