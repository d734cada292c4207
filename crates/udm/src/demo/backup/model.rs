//! The expected content of the volumes, with which copies are compared.
//!
//! There are several *writers*, each with one write in flight. The n-th write of a writer is *mark*
//! n. Odd marks go to one volume, even marks to the other, and a writer sends the next mark when
//! the last was acknowledged. So at any instant the two volumes together hold the marks 1 to n of a
//! writer and no others. The block of a mark follows from its number, so n determines the expected
//! content of every block.

use anyhow::{Context, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The volumes; they are consistent only with each other.
pub(super) const VOLUMES: [&str; 2] = ["data", "log"];

/// The size of a volume in bytes.
pub(super) const BYTES: u64 = 64 << 20;

/// Bytes per write.
pub(super) const BLOCK: u64 = 4096;

/// Number of writers.
pub(super) const WRITERS: u64 = 4;

/// Blocks of each volume per writer. The blocks of all writers are an eighth of the volume.
pub(super) const SLOTS: u64 = BYTES / BLOCK / 8 / WRITERS;

/// Bytes per comparison.
const PIECE: u64 = 1 << 20;

/// Second word of a block that was never written, different from that of any mark.
const BEFORE: u64 = u64::MAX;

/// The volume and the slot of mark `n` of `writer`.
pub(super) fn volume_and_slot_of_mark(writer: u64, n: u64) -> (usize, u64) {
    // SplitMix of Steele, Lea and Flood: pseudo-random and repeatable.
    let mut x = (n << 8 | writer).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((n % 2) as usize, (x ^ x >> 31) % SLOTS)
}

/// Byte offset of a writer's slot. Between two slots there are blocks that nobody writes.
pub(super) fn writer_slot_offset(writer: u64, slot: u64) -> u64 {
    (slot * WRITERS + writer) * 8 * BLOCK
}

/// Two words that a block repeats.
type BlockPattern = [u64; 2];

fn pattern_to_bytes(pattern: BlockPattern) -> [u8; 16] {
    let mut out = [0; 16];
    out[..8].copy_from_slice(&pattern[0].to_le_bytes());
    out[8..].copy_from_slice(&pattern[1].to_le_bytes());
    out
}

fn block_from_pattern(pattern: BlockPattern) -> Vec<u8> {
    pattern_to_bytes(pattern).repeat(BLOCK as usize / 16)
}

/// The content of a slot after mark `n`, or the initial content if `n` is 0.
pub(super) fn expected_slot_content(volume: usize, writer: u64, slot: u64, n: u64) -> Vec<u8> {
    block_from_pattern(block_pattern(volume, writer, slot, n))
}

fn block_pattern(volume: usize, writer: u64, slot: u64, n: u64) -> BlockPattern {
    if n == 0 { initial_block_pattern(volume, writer_slot_offset(writer, slot)) } else { [n, writer] }
}

/// The initial words of a block; no block is empty.
fn initial_block_pattern(volume: usize, offset: u64) -> BlockPattern {
    [offset | volume as u64, BEFORE]
}

/// Creates a volume with its initial content.
pub(super) fn create_patterned_volume(volume: usize, path: &Path) -> Result<()> {
    let file = File::create_new(path)?;
    let step = 256 * BLOCK;
    for at in (0..BYTES).step_by(step as usize) {
        let bytes: Vec<u8> = (at..at + step)
            .step_by(BLOCK as usize)
            .flat_map(|at| block_from_pattern(initial_block_pattern(volume, at)))
            .collect();
        file.write_all_at(&bytes, at)?;
    }
    Ok(())
}

/// The last mark in each slot of a writer.
pub(super) struct LastMarkPerSlot([Vec<u64>; 2]);

impl LastMarkPerSlot {
    /// No marks.
    pub fn new() -> LastMarkPerSlot {
        LastMarkPerSlot([vec![0; SLOTS as usize], vec![0; SLOTS as usize]])
    }

    /// Records mark `n`.
    pub fn put(&mut self, writer: u64, n: u64) {
        let (volume, slot) = volume_and_slot_of_mark(writer, n);
        self.0[volume][slot as usize] = n;
    }

    /// The last mark in a slot.
    pub fn at(&self, volume: usize, slot: u64) -> u64 {
        self.0[volume][slot as usize]
    }
}

/// The result of a comparison.
#[derive(Default)]
pub(super) struct BlockCheckCounts {
    pub blocks: u64,
    pub wrong: u64,
}

/// Compares copies of both volumes with the expected content at one instant. The last mark of each
/// writer must be within `bounds`: from the last mark acknowledged before the snapshot to the last
/// mark sent after it.
pub(super) fn compare_volume_copies(
    copies: &[impl AsRef<Path>; 2],
    bounds: &[(u64, u64)],
) -> Result<BlockCheckCounts> {
    let mut checked = BlockCheckCounts::default();
    let open = |path: &Path| File::open(path).with_context(|| path.display().to_string());
    let copies = [open(copies[0].as_ref())?, open(copies[1].as_ref())?];
    let untouched = |volume| {
        (0..BYTES).step_by(BLOCK as usize).map(move |at| initial_block_pattern(volume, at)).collect()
    };
    let mut expected: [Vec<BlockPattern>; 2] = [untouched(0), untouched(1)];
    for (writer, &(least, most)) in bounds.iter().enumerate() {
        let writer = writer as u64;
        // A last mark out of bounds shows as wrong blocks: missing marks, or marks that are too
        // new.
        let last = last_mark_in_copies(&copies, writer)?.clamp(least, most);
        let mut marks = LastMarkPerSlot::new();
        (1..=last).for_each(|n| marks.put(writer, n));
        for (volume, expected) in expected.iter_mut().enumerate() {
            for slot in 0..SLOTS {
                let at = (writer_slot_offset(writer, slot) / BLOCK) as usize;
                expected[at] = block_pattern(volume, writer, slot, marks.at(volume, slot));
            }
        }
    }
    let mut piece = vec![0; PIECE as usize];
    for (copy, expected) in copies.iter().zip(&expected) {
        for (i, expected) in expected.chunks((PIECE / BLOCK) as usize).enumerate() {
            copy.read_exact_at(&mut piece, i as u64 * PIECE).context("a copy")?;
            let same = |(got, expected): &(&[u8], &BlockPattern)| {
                let expected = pattern_to_bytes(**expected);
                got.chunks_exact(16).all(|part| part == expected)
            };
            let right = piece.chunks(BLOCK as usize).zip(expected).filter(same).count();
            checked.blocks += expected.len() as u64;
            checked.wrong += (expected.len() - right) as u64;
        }
    }
    Ok(checked)
}

/// The highest mark of a writer in copies of both volumes.
fn last_mark_in_copies(copies: &[File; 2], writer: u64) -> Result<u64> {
    let (mut last, mut head) = (0, [0; 16]);
    for copy in copies {
        for slot in 0..SLOTS {
            copy.read_exact_at(&mut head, writer_slot_offset(writer, slot)).context("a copy")?;
            let n = u64::from_le_bytes(head[..8].try_into()?);
            last = if head == pattern_to_bytes([n, writer]) { last.max(n) } else { last };
        }
    }
    Ok(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use tempfile::TempDir;

    /// Writes both volumes to files, with the marks of each writer up to `last`.
    fn volumes(folder: &TempDir, last: u64) -> [PathBuf; 2] {
        let paths = [0, 1].map(|volume| folder.path().join(VOLUMES[volume]));
        paths.iter().enumerate().for_each(|(volume, path)| create_patterned_volume(volume, path).unwrap());
        for writer in 0..WRITERS {
            (1..=last).for_each(|n| put(&paths, writer, n));
        }
        paths
    }

    fn put(paths: &[PathBuf; 2], writer: u64, n: u64) {
        let (volume, slot) = volume_and_slot_of_mark(writer, n);
        let file = File::options().write(true).open(&paths[volume]).unwrap();
        file.write_all_at(&block_from_pattern([n, writer]), writer_slot_offset(writer, slot)).unwrap();
    }

    #[test]
    fn an_instant_is_all_up_to_one_mark() {
        let folder = TempDir::new().unwrap();
        let wrong = |paths: &[PathBuf; 2], bounds| {
            compare_volume_copies(paths, &[bounds; WRITERS as usize]).unwrap().wrong
        };
        let paths = volumes(&folder, 1000);
        for bounds in [(1000, 1000), (990, 1001), (0, u64::MAX)] {
            assert_eq!(wrong(&paths, bounds), 0, "{bounds:?}");
        }
        // First case: acknowledged marks are missing. Second case: there are marks that were not
        // sent yet.
        assert_eq!((wrong(&paths, (1001, 1010)), wrong(&paths, (0, 999))), (WRITERS, WRITERS));
        // One volume is older than the other by a write.
        put(&paths, 2, 1002);
        assert_eq!(wrong(&paths, (990, 1010)), 1, "mark 1001 is missing");
        put(&paths, 2, 1001);
        assert_eq!(wrong(&paths, (990, 1010)), 0);
        // A torn block, and a changed block that nobody writes.
        let file = File::options().write(true).open(&paths[1]).unwrap();
        file.write_all_at(&[7], writer_slot_offset(1, 5) + 17).unwrap();
        file.write_all_at(&[7], writer_slot_offset(1, 5) + BLOCK).unwrap();
        assert_eq!(wrong(&paths, (990, 1010)), 2);
    }
}
