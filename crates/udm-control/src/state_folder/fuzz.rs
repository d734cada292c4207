//! Properties of any record in the state folder. The tests run them with changed records, the
//! fuzzers with found ones.
//!
//! A record is a file that only this user or root can have made, but a disk may damage it, and
//! another version may have written it. So a record that is read must be written as one that reads
//! the same, and what is derived from it must not overflow.

use super::clones::CloneRecord;
use super::moves::MoveRecord;
use super::records::SnapshotRecord;
use super::{StableDiskId, StoreInvalidMark};
use crate::verbs::clone::stand_in::{is_stand_in, table_without_source};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;

/// A record that is read, and reads the same after it was written.
fn read<R: Serialize + DeserializeOwned + PartialEq + Debug>(bytes: &[u8]) -> Option<R> {
    let record: R = serde_json::from_slice(bytes).ok()?;
    let written = serde_json::to_vec(&record).expect("a record is written");
    assert_eq!(serde_json::from_slice::<R>(&written).expect("a written record"), record);
    Some(record)
}

/// Records of clones, snapshots, moves and invalid stores: returns the number of kinds as which the
/// bytes can be read.
pub fn fuzz_state_record(data: &[u8]) -> usize {
    let (clone, snapshot) = (read::<CloneRecord>(data), read::<SnapshotRecord>(data));
    let (moved, mark) = (read::<MoveRecord>(data), read::<StoreInvalidMark>(data));
    clone.iter().for_each(use_clone);
    snapshot.iter().for_each(use_snapshot);
    moved.iter().for_each(use_move);
    mark.iter().for_each(|mark| assert!(mark.store.is(&mark.store)));
    [clone.is_some(), snapshot.is_some(), moved.is_some(), mark.is_some()]
        .iter()
        .filter(|read| **read)
        .count()
}

fn use_clone(record: &CloneRecord) {
    assert_eq!(CloneRecord::id_of(&record.destination).len(), 16);
    if let Some(table) = table_without_source(record) {
        let served = CloneRecord { table, ..record.clone() };
        assert!(table_without_source(&served).is_some(), "{served:?}");
        let uri = format!("null:size={}", record.source_sectors);
        assert!(!is_stand_in(&uri, &served), "its own source is one");
    }
}

fn use_snapshot(record: &SnapshotRecord) {
    assert!(record.file_name().ends_with(".json"));
    let old = record.origin.name().trim_start_matches('@').to_owned();
    for is_ours in [false, true] {
        if let Some(renamed) = record.renamed(&old, "new", is_ours) {
            assert!(renamed.origin != StableDiskId::mapped(&old) || old == "new", "{renamed:?}");
        }
    }
}

fn use_move(record: &MoveRecord) {
    let switched = record.switched();
    assert!(switched.destination.is_none() || record.destination.is_none());
    assert!(!switched.old.iter().any(|place| place.is(&switched.current)) || record.destination.is_none());
    let elsewhere = StableDiskId::mapped("elsewhere");
    for place in record.old.iter().chain([&record.current]).chain(&record.destination) {
        let _ = (place.overlaps(record.sectors, &place.disk, u64::MAX, u64::MAX), place.is_part(&elsewhere));
        let is_within = place.overlaps(record.sectors, &place.disk, place.start, 1);
        assert!(is_within || record.sectors == 0 || place.start == u64::MAX, "{place:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    /// Numbers and words at which something may break.
    const TOKENS: [&str; 8] = ["0", "18446744073709551615", "-1", "null", "\"\"", "[]", "{}", "\"@a\""];

    /// A generator of numbers below a bound.
    fn numbers(seed: u64) -> impl FnMut(usize) -> usize {
        let mut state = seed;
        move |below| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        }
    }

    fn change(bytes: &mut Vec<u8>, draw: &mut impl FnMut(usize) -> usize) {
        let at = draw(bytes.len());
        match draw(4) {
            0 => bytes[at] = draw(256) as u8,
            1 => drop(bytes.remove(at)),
            2 => bytes.insert(at, draw(256) as u8),
            // A number or a word is another one.
            _ => {
                let is_value = |byte: &u8| byte.is_ascii_digit();
                let Some(start) = bytes[at..].iter().position(is_value).map(|found| at + found) else {
                    return;
                };
                let len = bytes[start..].iter().take_while(|byte| is_value(byte)).count();
                let token = TOKENS[draw(TOKENS.len())];
                bytes.splice(start..start + len, token.bytes());
            }
        }
    }

    /// The fuzzers begin with the same records.
    #[test]
    fn changed_records_are_refused_or_read() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/state_records");
        let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.sort();
        assert!(names.len() >= 7, "{names:?}");
        let seeds: Vec<Vec<u8>> = names.iter().map(|name| fs::read(name).unwrap()).collect();
        for (seed, name) in seeds.iter().zip(&names) {
            assert_eq!(fuzz_state_record(seed), 1, "{} is a record of one kind", name.display());
        }
        let mut draw = numbers(1);
        let (mut read, mut refused) = (0, 0);
        for n in 0..6000 {
            let mut bytes = seeds[n % seeds.len()].clone();
            for _ in 0..=draw(3) {
                change(&mut bytes, &mut draw);
            }
            match fuzz_state_record(&bytes) {
                0 => refused += 1,
                _ => read += 1,
            }
        }
        assert!(read > 500 && refused > 500, "{read} were read, and {refused} refused");
    }
}
