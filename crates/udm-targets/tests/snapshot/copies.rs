//! What is copied, and when.

use crate::rig::{Host, SIZE};
use udm_core::Status;

const ORIGIN: &str = "0 131072 snapshot-origin O";

fn attached(table: &str) -> Host {
    let mut host = Host::recorded(2);
    host.create("od", ORIGIN).unwrap();
    host.attach("od", "sn", &format!("0 {SIZE} snapshot O W {table}")).unwrap();
    host
}

/// C01.
#[test]
fn c01_a_chunk_is_copied_once() {
    let mut host = attached("P 8");
    assert_eq!(host.status("sn"), "16/131072 16");
    assert_eq!(host.write("od", 43, 1, b'X'), Status::Ok);
    assert_eq!(host.status("sn"), "24/131072 16");
    assert_eq!(
        host.read("od", 40, 8).unwrap()[1024..2560],
        *[vec![b'f'; 512], vec![b'X'; 512], vec![b'f'; 512]].concat()
    );
    assert_eq!(host.write("od", 40, 8, b'X'), Status::Ok);
    assert_eq!(host.status("sn"), "24/131072 16");
    assert_eq!(host.read("sn", 40, 8).unwrap(), [b'f'; 4096]);
    assert_eq!(host.letters("od", 8), "abcdeXgh");
    assert_eq!(host.letters("sn", 8), "abcdefgh");
}

/// C03: a write to a part of a chunk of the snapshot.
#[test]
fn c03_a_partial_write_takes_the_rest_of_its_chunk_along() {
    for kind in ["P 8", "N 8"] {
        let mut host = attached(kind);
        assert_eq!(host.write("sn", 8, 1, b'Y'), Status::Ok);
        assert_eq!(host.read("sn", 8, 8).unwrap(), [vec![b'Y'; 512], vec![b'b'; 3584]].concat());
        assert_eq!(host.read("od", 8, 8).unwrap(), [b'b'; 4096]);
    }
}

/// F02: the recorded example, byte for byte.
#[test]
fn f02_the_worked_example() {
    let mut host = attached("P 8");
    for sector in [43, 48, 56, 16] {
        assert_eq!(host.write("od", sector, 1, b'X'), Status::Ok);
    }
    assert_eq!(host.write("sn", 72, 8, b'Z'), Status::Ok);
    assert_eq!(host.write("sn", 8, 1, b'Y'), Status::Ok);
    assert_eq!(host.status("sn"), "64/131072 16");
    let store = host.get_disk("W").bytes(0, 64);
    assert_eq!(store[..16], *b"SnAp\x01\0\0\0\x01\0\0\0\x08\0\0\0");
    let records: Vec<(u64, u64)> = store[4096..8192]
        .chunks(16)
        .map(|r| {
            (u64::from_le_bytes(r[..8].try_into().unwrap()), u64::from_le_bytes(r[8..].try_into().unwrap()))
        })
        .collect();
    assert_eq!(records[..7], [(5, 2), (6, 3), (7, 4), (2, 5), (9, 6), (1, 7), (0, 0)]);
    let first: Vec<u8> = (2..8).map(|chunk| store[chunk * 4096]).collect();
    assert_eq!(first, b"fghcZY");
}

/// C07: a snapshot is made while its origin is in use; nobody suspends that by hand.
#[test]
fn c07_an_origin_in_use_loses_no_chunk() {
    let mut host = Host::recorded(2);
    host.create("od", ORIGIN).unwrap();
    host.create("sn", &format!("0 {SIZE} snapshot O W N 8")).unwrap();
    assert_eq!(host.write("od", 0, 64, b'X'), Status::Ok);
    assert_eq!(host.letters("sn", 9), "abcdefghi");
    assert_eq!(host.letters("od", 9), "XXXXXXXXi");
    assert_eq!(host.status("sn"), "64/131072 0");
    host.remove("sn");
    assert_eq!(host.write("od", 64, 64, b'X'), Status::Ok);
    assert_eq!(host.letters("od", 14), "XXXXXXXXXXXXXX");
}
