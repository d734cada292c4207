//! `udm cow` on stores made here. Stores that a kernel wrote are in tests/cow.rs of `udm-wire`.

use std::fs;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;
use udm_wire::cow::{ChunkSize, ExceptionStoreHeader, SnapshotException};

const UDM: &str = env!("CARGO_BIN_EXE_udm");

/// A store of 16 chunks of 4 KiB with these records, as `store` in `folder`.
fn store(folder: &TempDir, valid: bool, records: &[(u64, u64)]) {
    let mut bytes = vec![0; 16 * 4096];
    ExceptionStoreHeader { valid, chunk: ChunkSize::new(8).unwrap() }.encode(&mut bytes[..4096]);
    for (index, &(old, new)) in records.iter().enumerate() {
        SnapshotException { old, new }.encode(&mut bytes[4096..8192], index);
    }
    fs::write(folder.path().join("store"), bytes).unwrap();
}

/// Exit status, standard output and standard error of `udm cow`.
fn cow(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let output = Command::new(UDM).arg("cow").args(args).current_dir(folder).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_store_is_described() {
    let folder = TempDir::new().unwrap();
    store(&folder, true, &[(7, 2), (3, 6), (0, 0), (1, 4)]);
    let text = "state       valid\nsize        65536 bytes\nchunk       4096 bytes, 8 sectors\nexceptions  2, 14 fit\n\
                status      56/128 16\nunused      bytes 12288 to 24576: a crash left them\n\
                leftover    at byte 4144, after the last record: left by a torn write\n";
    for verb in ["info", "check"] {
        assert_eq!(cow(folder.path(), &[verb, "store"]), (0, text.into(), String::new()));
    }
    let text = "# chunks of 4096 bytes: ORIGIN STORE\n7 2\n3 6\n";
    assert_eq!(cow(folder.path(), &["dump", "store"]).1, text);
    let json = |verb| -> serde_json::Value {
        serde_json::from_str(&cow(folder.path(), &[verb, "store", "--json"]).1).unwrap()
    };
    let rows = serde_json::json!([
        {"origin_bytes": 28672, "store_bytes": 8192},
        {"origin_bytes": 12288, "store_bytes": 24576},
    ]);
    assert_eq!(json("dump"), serde_json::json!({"chunk_bytes": 4096, "exceptions": rows}));
    assert_eq!(json("info")["records"]["status"], "56/128 16");
}

#[test]
fn a_store_that_is_no_use_fails_the_check() {
    let folder = TempDir::new().unwrap();
    let check = |args: &[&str]| cow(folder.path(), &[&["check", "store"], args].concat());
    store(&folder, false, &[(7, 2)]);
    let (status, reply, error) = check(&[]);
    assert!(status == 1 && reply.starts_with("state       invalid\n") && error.is_empty(), "{reply}{error}");
    assert_eq!(cow(folder.path(), &["info", "store"]).0, 0);
    store(&folder, true, &[(7, 2)]);
    assert_eq!(check(&["--origin-size", "32K"]).0, 0);
    let error = "udm: store: at byte 4096: record 0 keeps chunk 7, beyond the end of the origin (7 chunks)\n";
    assert_eq!(check(&["--origin-size", "28K"]), (1, String::new(), error.into()));
    fs::write(folder.path().join("store"), b"not a store at all").unwrap();
    let error = "udm: store: at byte 0: Invalid or corrupt snapshot: the magic number is 0x20746f6e\n";
    assert_eq!(check(&[]), (1, String::new(), error.into()));
    fs::write(folder.path().join("store"), [0; 65536]).unwrap();
    assert_eq!(check(&[]), (0, "state       blank\nsize        65536 bytes\n".into(), String::new()));
    fs::remove_file(folder.path().join("store")).unwrap();
    assert_eq!(check(&[]), (1, String::new(), "udm: store: No such file or directory\n".into()));
}

/// The byte that fills each chunk of the origin, read without the code of udm.
fn chunks_of(folder: &Path) -> Vec<(u64, u8)> {
    let bytes = fs::read(folder.join("store")).unwrap();
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let records = (4096..8192).step_by(16).map(|at| (number(at), number(at + 8)));
    let mut chunks: Vec<_> = records
        .take_while(|record| record.1 != 0)
        .map(|(old, new)| (old, bytes[new as usize * 4096]))
        .collect();
    chunks.sort_unstable();
    chunks
}

#[test]
fn a_store_is_compacted() {
    let folder = TempDir::new().unwrap();
    store(&folder, true, &[(7, 12), (3, 6), (9, 2), (0, 0), (1, 4)]);
    let path = folder.path().join("store");
    let mut bytes = fs::read(&path).unwrap();
    for chunk in [2, 6, 12] {
        bytes[chunk * 4096..(chunk + 1) * 4096].fill(chunk as u8);
    }
    fs::write(&path, &bytes).unwrap();
    let before = chunks_of(folder.path());
    assert_eq!(before, [(3, 6), (7, 12), (9, 2)]);

    let (status, reply, error) = cow(folder.path(), &["compact", "--dry-run", "--shrink", "store"]);
    assert_eq!((status, error.as_str()), (0, ""));
    assert_eq!(reply, "exceptions  3\nto move     8192 bytes\nsize        20480 bytes, 65536 before\n");
    assert_eq!(fs::read(&path).unwrap(), bytes, "a dry run writes nothing");

    // The file keeps its length, and so its free space.
    let (status, reply, _) = cow(folder.path(), &["compact", "store"]);
    assert!(
        status == 0 && reply.contains("moved       8192 bytes\nsize        65536 bytes, 65536 before\n"),
        "{reply}"
    );
    assert_eq!((chunks_of(folder.path()), fs::metadata(&path).unwrap().len()), (before.clone(), 65536));
    let text = "state       valid\nsize        65536 bytes\nchunk       4096 bytes, 8 sectors\nexceptions  3, 14 fit\n\
                status      40/128 16\n";
    assert_eq!(cow(folder.path(), &["check", "store"]), (0, text.into(), String::new()));

    let reply = cow(folder.path(), &["compact", "--shrink", "--json", "store"]).1;
    let report: serde_json::Value = serde_json::from_str(&reply).unwrap();
    assert_eq!(
        (&report["moved_bytes"], &report["size_bytes"]),
        (&0.into(), &serde_json::json!([65536, 20480]))
    );
    assert_eq!((chunks_of(folder.path()), fs::metadata(&path).unwrap().len()), (before, 20480));
    assert_eq!(cow(folder.path(), &["check", "store"]).0, 0);
}

#[test]
fn what_can_not_be_compacted_is_refused_and_left_alone() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("store");
    let refused = |why: &str| {
        let bytes = fs::read(&path).unwrap();
        assert_eq!(
            cow(folder.path(), &["compact", "store"]),
            (1, String::new(), format!("udm: store: {why}\n"))
        );
        assert_eq!(fs::read(&path).unwrap(), bytes);
    };
    store(&folder, false, &[(7, 12)]);
    refused("the snapshot in it is invalid: nothing of it is of use");
    store(&folder, true, &[(7, 12), (8, 12)]);
    refused("at byte 4112: record 1 keeps chunk 8 in chunk 12, where another one is kept");
    store(&folder, true, &[(7, 12)]);
    let held = fs::File::open(&path).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    refused("it is in use by another program");
    drop(held);
    fs::write(&path, [0; 65536]).unwrap();
    refused("it is blank");
    fs::write(&path, []).unwrap();
    refused("at byte 0: the store ends inside its header");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(cow(folder.path(), &["compact", "store"]).0, 1);
}
