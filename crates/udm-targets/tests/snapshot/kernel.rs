//! Stores written by Linux 6.12, and the contents of origin and snapshot at that moment.

use crate::rig::SnapshotRig;
use std::collections::BTreeMap;
use std::io::Read;
use std::sync::OnceLock;
use udm_core::Status;

/// A recorded file.
pub fn image(name: &str) -> &'static [u8] {
    static FILES: OnceLock<BTreeMap<String, Vec<u8>>> = OnceLock::new();
    let files = FILES.get_or_init(|| {
        let packed = include_bytes!("../../../udm-wire/tests/data/cow-images.tar.xz");
        let mut tar = Vec::new();
        lzma_rs::xz_decompress(&mut &packed[..], &mut tar).unwrap();
        let mut files = BTreeMap::new();
        for entry in tar::Archive::new(&tar[..]).entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().file_name().map(|name| name.to_str().unwrap().to_owned());
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            files.extend(path.map(|path| (path, bytes)));
        }
        files
    });
    &files[name]
}

/// The kernel's stores are read as the kernel read them.
#[test]
fn f22_stores_of_a_kernel() {
    for name in ["a_P8", "a_P32", "a_PO8", "b_P8"] {
        let read = |what: &str| image(&format!("{name}.{what}"));
        let mut host = SnapshotRig::new(1);
        for (disk, bytes) in [("O", read("origview")), ("W", read("cow"))] {
            host.disk(disk, bytes.len() as u64 / 512).put(0, bytes);
        }
        let before = host.get_disk("W");
        host.create("sn", "0 32768 snapshot O W P 8").unwrap();
        let seen: Vec<u8> = (0..32).flat_map(|part| host.read("sn", part * 1024, 1024).unwrap()).collect();
        assert!(seen == read("snapview"), "{name}");
        assert!(
            before.bytes(0, read("cow").len() as u64 / 512) == read("cow"),
            "{name}: looked at, and changed"
        );
        let store = host.store("W").unwrap();
        assert_eq!(
            host.status("sn"),
            format!("{}/{} {}", store.usage.0, read("cow").len() / 512, store.usage.1)
        );
    }
    for (name, status) in [
        ("c_P8_full_by_snap", "Invalid"),
        ("c_P8_invalid_by_origin", "Invalid"),
        ("c_PO8_invalid_by_origin", "Invalid"),
        ("d_P8_cowerr", "Invalid"),
        ("c_PO8_full_by_snap", "128/128 16"),
        ("e_P8_after_merge", "16/4096 16"),
    ] {
        let mut host = SnapshotRig::new(1);
        let store = image(&format!("{name}.cow"));
        host.disk("O", 32768);
        host.disk("W", store.len() as u64 / 512).put(0, store);
        host.create("sn", "0 32768 snapshot O W P 8").unwrap();
        assert_eq!(host.status("sn"), status, "{name}");
    }
}

/// The kernel's steps leave the kernel's store, byte for byte, in all bytes with a meaning.
#[test]
fn f22_the_same_steps_leave_the_same_store() {
    for (name, words, origin) in [("a_P8", "P 8", 8), ("a_P32", "P 32", 8), ("a_PO8", "PO 8", 8)] {
        let pattern = |name: &str, sector: u64, sectors: u64| {
            image(name)[sector as usize * 512..][..sectors as usize * 512].to_vec()
        };
        let mut host = SnapshotRig::new(1);
        host.disk("O", 32768).put(0, image("org.img"));
        let theirs = image(&format!("{name}.cow"));
        let ours = host.disk("W", theirs.len() as u64 / 512);
        host.create("sn", &format!("0 32768 snapshot O W {words}")).unwrap();
        host.create("od", "0 32768 snapshot-origin O").unwrap();
        let steps = [0, 1, 2, 100, 4095, 100].map(|chunk| ("od", "new.img", chunk * origin, origin));
        let more = [("od", "new.img", 1603, 1)];
        let own = [3, 100, 500, 3].map(|chunk| ("sn", "snp.img", chunk * 8, 8));
        let last = [("sn", "snp.img", 4805, 1), ("sn", "snp.img", 1605, 1)];
        for (device, file, sector, sectors) in steps.into_iter().chain(more).chain(own).chain(last) {
            let data = pattern(file, sector, sectors);
            assert_eq!(host.write_bytes(device, sector, &data), Status::Ok);
        }
        let used = host.store("W").unwrap().usage.0;
        assert!(ours.bytes(0, used) == theirs[..used as usize * 512], "{name}");
    }
}
