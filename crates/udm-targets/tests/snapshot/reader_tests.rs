//! Tests of the reader itself: bytes that a kernel left, and wrong ones.

use crate::kernel;
use crate::reader::{ParsedStore, read_store};

fn read_bytes(store: &[u8]) -> Result<Option<ParsedStore>, String> {
    let read = |sector: u64, sectors: u64| store[sector as usize * 512..][..sectors as usize * 512].to_vec();
    read_store(store.len() as u64 / 512, 32_768, read)
}

#[test]
fn what_the_kernel_wrote() {
    for (name, records, usage) in [
        ("a_P8", 9, (88, 16)),
        ("a_P32", 6, (256, 64)),
        ("b_P8", 600, (4832, 32)),
        ("e_P8_after_merge", 0, (16, 16)),
    ] {
        let found = read_bytes(kernel::image(&format!("{name}.cow"))).unwrap().unwrap();
        assert_eq!((found.records.len(), found.usage), (records, usage), "{name}");
        assert!(found.valid && found.is_in_order(), "{name}");
    }
    assert!(!read_bytes(kernel::image("d_P8_cowerr.cow")).unwrap().unwrap().valid);
}

#[test]
fn what_is_wrong_is_told() {
    let good = kernel::image("a_P8.cow");
    for (at, byte) in
        [(0, 0x54), (8, 2), (12, 9), (20, 1), (4096 + 8, 1), (4096 + 16, 0), (4096 + 4090, 1), (4096 + 15, 7)]
    {
        let mut bytes = good.to_vec();
        bytes[at] = byte;
        assert!(read_bytes(&bytes).is_err(), "byte {at} is {byte}");
    }
}
