//! An independent reader of stores, written from the description of the format only. It accepts
//! only what the format says, and refuses whatever udm must not write.
#![allow(dead_code, reason = "each test that has it uses its part")]

use std::collections::BTreeSet;

/// The contents of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsedStore {
    pub valid: bool,
    /// Sectors per chunk.
    pub chunk: u64,
    /// Chunks of the origin and of the store, in the order of the records.
    pub records: Vec<(u64, u64)>,
    /// The numbers of `status`: sectors in use, and metadata sectors among them.
    pub usage: (u64, u64),
}

impl ParsedStore {
    /// True if chunks were allocated in order and each has its record (a store that never failed).
    pub fn is_in_order(&self) -> bool {
        let per_area = self.chunk * 32;
        (0u64..).zip(&self.records).all(|(k, (_, new))| *new == 2 + k + k / per_area)
    }
}

fn le32(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 4].iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte))
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    le32(bytes, at + 4) << 32 | le32(bytes, at)
}

/// Reads a store of `size` sectors for an origin of `origin` sectors. `read` returns the bytes of a
/// range (first sector, number). `None` for a blank store.
pub fn read_store(
    size: u64,
    origin: u64,
    read: impl Fn(u64, u64) -> Vec<u8>,
) -> Result<Option<ParsedStore>, String> {
    read_torn(size, origin, read, false)
}

/// As [`read_store`]. If `torn` is set, any bytes are accepted after the last record: a power cut
/// may leave them, and the format does not define them.
pub fn read_torn(
    size: u64,
    origin: u64,
    read: impl Fn(u64, u64) -> Vec<u8>,
    torn: bool,
) -> Result<Option<ParsedStore>, String> {
    let head = read(0, 1);
    match &head[..4] {
        [0, 0, 0, 0] => return Ok(None),
        b"SnAp" => {}
        other => return Err(format!("magic {other:02x?}")),
    }
    let (valid, version, chunk) = (le32(&head, 4), le32(&head, 8), le32(&head, 12));
    if version != 1 || valid > 1 || !chunk.is_power_of_two() {
        return Err(format!("valid {valid}, version {version}, chunk {chunk}"));
    }
    if head[16..].iter().any(|byte| *byte != 0) {
        return Err("bytes behind the header".into());
    }
    if valid == 0 {
        return Ok(Some(ParsedStore { valid: false, chunk, records: Vec::new(), usage: (0, 0) }));
    }
    let per_area = chunk * 512 / 16;
    let is_area = |at: u64| at % (per_area + 1) == 1;
    let (chunks, old_end) = (size / chunk, origin.div_ceil(chunk));
    let (mut records, mut olds, mut news) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
    let mut area = 0;
    'areas: loop {
        let at = 1 + area * (per_area + 1);
        if at >= chunks {
            return Err(format!("area {area} would be chunk {at} of {chunks}"));
        }
        let bytes = read(at * chunk, chunk);
        for k in 0..per_area as usize {
            let (old, new) = (le64(&bytes, k * 16), le64(&bytes, k * 16 + 8));
            if new == 0 {
                if let Some(more) = bytes[k * 16..].iter().position(|byte| *byte != 0).filter(|_| !torn) {
                    return Err(format!("area {area} ends at record {k}; byte {} is set", k * 16 + more));
                }
                break 'areas;
            }
            if old >= old_end || new >= chunks || is_area(new) || new < 2 {
                return Err(format!("record {} says {old} -> {new}", records.len()));
            }
            if !olds.insert(old) || !news.insert(new) {
                return Err(format!("record {} repeats {old} -> {new}", records.len()));
            }
            records.push((old, new));
        }
        area += 1;
    }
    let next = news.last().map_or(2, |last| last + 1);
    let next = if is_area(next) { next + 1 } else { next };
    Ok(Some(ParsedStore { valid: true, chunk, records, usage: (next * chunk, (area + 2) * chunk) }))
}
