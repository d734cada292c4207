//! Snapshot stores: stores that a kernel wrote, invalid stores, and the arithmetic of the layout.
//!
//! `data/cow-images.tar.xz` was recorded on Linux 6.12: stores as the kernel left them, and the
//! data that origin and snapshot returned at that moment.

use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::sync::OnceLock;
use udm_core::Sectors;
use udm_wire::cow::{
    ChunkSize, ChunkSizeError, ExceptionStoreError, ExceptionStoreErrorKind, ExceptionStoreHeader,
    ExceptionStoreLayout, ExceptionStoreScanResult, ExceptionStoreScanner, RECORD_LEN, SnapshotException,
};

/// The recorded files by name.
fn recorded(name: &str) -> &'static [u8] {
    static FILES: OnceLock<BTreeMap<String, Vec<u8>>> = OnceLock::new();
    let files = FILES.get_or_init(|| {
        let (mut packed, mut tar) = (&include_bytes!("data/cow-images.tar.xz")[..], Vec::new());
        lzma_rs::xz_decompress(&mut packed, &mut tar).unwrap();
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

/// Header, exceptions and summary of a store.
fn load(
    store: &[u8],
    origin: Option<u64>,
) -> Result<(ExceptionStoreHeader, HashMap<u64, u64>, ExceptionStoreScanResult), ExceptionStoreError> {
    let header = ExceptionStoreHeader::decode(store)?.expect("a store that is not blank");
    let layout = ExceptionStoreLayout::new(header.chunk);
    let chunks = layout.chunks(Sectors::from_bytes(store.len() as u64));
    let (mut walk, mut found) = (ExceptionStoreScanner::new(layout, chunks, origin), HashMap::new());
    while let Some(area) = walk.next()? {
        let sink = |SnapshotException { old, new }| found.insert(old, new).is_none();
        walk.take(&store[area.start as usize..area.end as usize], sink)?;
    }
    Ok((header, found, walk.end()))
}

/// The content of a snapshot: the store if it has the chunk, else the origin.
fn view(store: &[u8], origin: &[u8]) -> Vec<u8> {
    let (header, found, _) = load(store, None).unwrap();
    let size = header.chunk.bytes() as usize;
    let mut view = origin.to_vec();
    for (old, new) in found {
        let (to, from) = (old as usize * size, new as usize * size);
        view[to..to + size].copy_from_slice(&store[from..from + size]);
    }
    view
}

#[test]
fn a_store_of_the_kernel_reads_as_the_kernel_read_it() {
    for (name, exceptions, area) in [("a_P8", 9, 0), ("a_P32", 6, 0), ("a_PO8", 9, 0), ("b_P8", 600, 2)] {
        let store = recorded(&format!("{name}.cow"));
        let (header, found, summary) = load(store, None).unwrap();
        assert!(header.valid, "{name}");
        let next_free = ExceptionStoreLayout::new(header.chunk).data_from(2 + exceptions + area);
        assert_eq!(
            summary,
            ExceptionStoreScanResult {
                exceptions,
                area,
                committed: exceptions % (header.chunk.bytes() / 16),
                next_free,
                holes: Vec::new(),
                leftover: None
            },
            "{name}"
        );
        assert_eq!(found.len() as u64, exceptions);
        let expected = recorded(&format!("{name}.snapview"));
        assert!(view(store, recorded(&format!("{name}.origview"))) == expected, "{name}");
    }
}

#[test]
fn a_store_invalidated_by_the_kernel_is_invalid() {
    for (name, valid) in [
        ("c_P8_full_by_snap", false),
        ("c_P8_invalid_by_origin", false),
        ("c_PO8_full_by_snap", true),
        ("c_PO8_invalid_by_origin", false),
        ("d_P8_cowerr", false),
        ("e_P8_after_merge", true),
    ] {
        let (header, _, summary) = load(recorded(&format!("{name}.cow")), None).unwrap();
        assert_eq!(header.valid, valid, "{name}");
        let (exceptions, next_free) = match name.as_bytes()[0] {
            b'c' => (14, 16),
            b'd' => (6, 8),
            _ => (0, 2),
        };
        assert_eq!((summary.exceptions, summary.next_free), (exceptions, next_free), "{name}");
    }
    // A transient store holds only data.
    let text = load(recorded("c_N8_full_by_snap.cow"), None).unwrap_err().to_string();
    assert_eq!(text, "at byte 0: Invalid or corrupt snapshot: the magic number is 0x50414e53");
}

/// A store of `chunks` chunks of 4 KiB with these records.
fn store(chunks: u64, records: &[(u64, u64)]) -> Vec<u8> {
    let chunk = ChunkSize::new(8).unwrap();
    let mut bytes = vec![0; (chunks * chunk.bytes()) as usize];
    ExceptionStoreHeader { valid: true, chunk }.encode(&mut bytes[..4096]);
    let layout = ExceptionStoreLayout::new(chunk);
    for (i, &(old, new)) in records.iter().enumerate() {
        let (area, index) = (i as u64 / layout.records(), i % layout.records() as usize);
        let at = (layout.area(area) * chunk.bytes()) as usize;
        SnapshotException { old, new }.encode(&mut bytes[at..at + 4096], index);
    }
    bytes
}

/// The first bytes are those of the worked example that a kernel confirmed.
#[test]
fn records_and_header_byte_for_byte() {
    let bytes = store(8, &[(5, 2), (6, 3)]);
    assert_eq!(bytes[..16], *b"SnAp\x01\0\0\0\x01\0\0\0\x08\0\0\0");
    assert_eq!(
        bytes[4096..4128],
        *b"\x05\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x06\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0"
    );
    let mut invalid = bytes;
    ExceptionStoreHeader { valid: false, chunk: ChunkSize::new(8).unwrap() }.encode(&mut invalid[..4096]);
    assert_eq!(invalid[..16], *b"SnAp\0\0\0\0\x01\0\0\0\x08\0\0\0");
}

fn refusal(bytes: &[u8], origin: Option<u64>) -> String {
    load(bytes, origin).unwrap_err().to_string()
}

#[test]
fn a_bad_header_is_refused_where_it_is_bad() {
    let mut bytes = store(8, &[]);
    bytes[8] = 2;
    assert_eq!(refusal(&bytes, None), "at byte 8: unable to handle snapshot disk version 2");
    bytes = store(8, &[]);
    for (size, why) in [(9, "not a power of 2"), (0, "not a power of 2"), (1 << 22, "too high")] {
        bytes[12..16].copy_from_slice(&u32::to_le_bytes(size));
        let text = format!("at byte 12: invalid on-disk chunk size {size}: Chunk size is {why}");
        assert_eq!(refusal(&bytes, None), text);
    }
    assert_eq!(refusal(&bytes[..15], None), "at byte 0: the store ends inside its header");
    assert_eq!(ExceptionStoreHeader::decode(&[0; 16]), Ok(None));
}

#[test]
fn a_bad_record_is_refused_where_it_stands() {
    let cases: [(&[(u64, u64)], &str); 6] = [
        (
            &[(1, 8)],
            "at byte 4096: record 0 keeps chunk 1 in chunk 8, beyond the end of the store (8 chunks)",
        ),
        (&[(1, 2), (3, 1)], "at byte 4112: record 1 keeps chunk 3 in chunk 1, which holds metadata"),
        (&[(1, 2), (3, 2)], "at byte 4112: record 1 keeps chunk 3 in chunk 2, where another one is kept"),
        (
            &[(1, 2), (1, 3)],
            "at byte 4112: record 1 keeps chunk 1 in chunk 3, and an earlier one keeps it elsewhere",
        ),
        (&[(100, 2)], "at byte 4096: record 0 keeps chunk 100, beyond the end of the origin (100 chunks)"),
        (
            &[(1, u64::MAX)],
            "at byte 4096: record 0 keeps chunk 1 in chunk 18446744073709551615, beyond the end of the store (8 chunks)",
        ),
    ];
    for (records, text) in cases {
        assert_eq!(refusal(&store(8, records), Some(100)), text);
    }
    // Chunk 258 is the second area.
    let text = "at byte 4096: record 0 keeps chunk 1 in chunk 258, which holds metadata";
    assert_eq!(refusal(&store(300, &[(1, 258)]), None), text);
    // A full area without an area after it.
    let full: Vec<(u64, u64)> = (0..256).map(|k| (k, k + 2)).collect();
    let text = "at byte 1056768: area 1 of records is beyond the end of the store (258 chunks)";
    assert_eq!(refusal(&store(258, &full), None), text);
    assert_eq!(load(&store(259, &full), None).unwrap().2.next_free, 259);
}

/// A torn write leaves records after the end; a crash leaves holes.
#[test]
fn leftovers_of_a_crash_are_reported() {
    let (_, found, summary) = load(&store(16, &[(1, 2), (0, 0), (5, 4)]), None).unwrap();
    assert_eq!((found.len(), summary.next_free, summary.leftover), (1, 3, Some(4096 + 32)));
    let (_, _, summary) = load(&store(16, &[(1, 9), (2, 5)]), None).unwrap();
    assert_eq!((summary.next_free, summary.holes), (10, vec![2..5, 6..9]));
    let (_, _, summary) = load(&store(300, &[(1, 256), (2, 260)]), None).unwrap();
    assert_eq!((summary.next_free, summary.holes), (261, vec![2..256, 257..260]));
    let (_, _, summary) = load(&store(300, &[(1, 257), (2, 259)]), None).unwrap();
    assert_eq!((summary.next_free, &summary.holes[..]), (260, std::slice::from_ref(&(2..257))));
}

#[test]
fn chunk_sizes_match_the_kernel() {
    assert_eq!(ChunkSize::new(7), Err(ChunkSizeError::NotAPower));
    assert_eq!(ChunkSize::new(1 << 21), Ok(ChunkSize::MAX));
    assert_eq!(ChunkSize::new(1 << 22), Err(ChunkSizeError::TooHigh));
    assert_eq!(ChunkSize::new(1 << 40), Err(ChunkSizeError::TooHigh));
    let chunk = ChunkSize::new(4).unwrap();
    assert_eq!((chunk.check_blocks(512), chunk.check_blocks(4096)), (Ok(()), Err(ChunkSizeError::NotBlocks)));
}

/// Areas and capacities as a kernel uses them.
#[test]
fn chunk_positions_match_the_kernel() {
    for (sectors, records, area) in [(1, 32, 34), (8, 256, 258), (32, 1024, 1026), (1024, 32768, 32770)] {
        let layout = ExceptionStoreLayout::new(ChunkSize::new(sectors).unwrap());
        assert_eq!((layout.records(), layout.area(1)), (records, area));
    }
    let layout = ExceptionStoreLayout::new(ChunkSize::new(8).unwrap());
    for (chunks, exceptions) in [(0, 0), (1, 0), (2, 0), (3, 1), (258, 255), (259, 256), (260, 257)] {
        assert_eq!(layout.capacity(chunks), exceptions, "{chunks}");
    }
}

proptest! {
    /// A store that was written in order is read back, and its capacity follows from the layout.
    #[test]
    fn a_store_written_in_order_reads_back(sectors in 0_u32..6, count in 0_u64..5000) {
        let layout = ExceptionStoreLayout::new(ChunkSize::new(1 << sectors).unwrap());
        let mut next = layout.data_from(2);
        for k in 0..count {
            prop_assert_eq!(next, 2 + k + k / layout.records());
            next = layout.data_from(next + 1);
        }
        let chunks = layout.chunks_for(count);
        prop_assert_eq!(layout.capacity(chunks), count);
        prop_assert!(layout.capacity(chunks - 1) < count.max(1));
        let mut walk = ExceptionStoreScanner::new(layout, chunks, Some(count));
        let size = layout.chunk().bytes() as usize;
        while let Some(at) = walk.next().unwrap() {
            let area = (at.start / size as u64 - 1) / (layout.records() + 1);
            let mut bytes = vec![0; size];
            for (index, k) in (area * layout.records()..count).take(size / RECORD_LEN).enumerate() {
                SnapshotException { old: count - 1 - k, new: 2 + k + k / layout.records() }.encode(&mut bytes, index);
            }
            walk.take(&bytes, |_| true).unwrap();
        }
        let end = walk.end();
        prop_assert_eq!((end.exceptions, end.next_free, end.holes), (count, next, vec![]));
    }

    /// A store of a kernel with some bytes changed.
    #[test]
    fn a_damaged_store_is_read_or_refused(
        name in prop::sample::select(vec!["a_P8", "a_P32", "b_P8", "e_P8_after_merge"]),
        len in 0_usize..1 << 21,
        damage in prop::collection::vec((0_usize..20 * 512, any::<u8>()), 0..8),
    ) {
        let mut bytes = recorded(&format!("{name}.cow"))[..len].to_vec();
        for (at, byte) in damage {
            bytes.get_mut(at).into_iter().for_each(|old| *old = byte);
        }
        udm_wire::fuzz::fuzz_exception_store(&bytes);
    }

    /// Any bytes are read or refused. The byte to blame is within them or at their end.
    #[test]
    fn any_records_are_read_or_refused(records in prop::collection::vec((0_u64..40, 0_u64..300), 0..512)) {
        let bytes = store(290, &records);
        udm_wire::fuzz::fuzz_exception_store(&bytes);
        match load(&bytes, Some(30)) {
            Ok((_, found, summary)) => {
                prop_assert_eq!(found.len() as u64, summary.exceptions);
                prop_assert!(found.values().all(|&new| new < summary.next_free));
            }
            Err(ExceptionStoreError { offset, fault }) => {
                prop_assert!(offset < bytes.len() as u64, "{}", fault);
                prop_assert!(!matches!(fault, ExceptionStoreErrorKind::Magic(_) | ExceptionStoreErrorKind::Version(_)));
            }
        }
    }
}
