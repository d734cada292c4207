//! What is copied, and when.

use crate::rig::{Host, ORIGIN, SIZE, attached};
use udm_core::Status;

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
