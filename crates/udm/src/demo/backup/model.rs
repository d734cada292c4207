//! What the volumes hold, as the load knows it: the model that copies are compared with.
//!
//! Several *writers* go their own ways, each one write after the other. Its n-th write is
//! *mark* n; it goes to the one volume when n is odd and to the other when n is even, and the next
//! one is sent when it was acknowledged. So an instant of both volumes has a writer's marks up to
//! one of them, all of these and none later, whichever volume they are in. Which block a mark goes
//! to follows from its number, so the number of the last one says what every block must hold.

use anyhow::{Context, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The volumes: what one of them has means nothing without the other.
pub(super) const VOLUMES: [&str; 2] = ["data", "log"];

/// The size of a volume.
pub(super) const BYTES: u64 = 64 << 20;

/// What is written at once.
pub(super) const BLOCK: u64 = 4096;

/// How many writers there are.
pub(super) const WRITERS: u64 = 4;

/// Blocks of each volume that a writer writes. All of them are an eighth of the volume.
pub(super) const SLOTS: u64 = BYTES / BLOCK / 8 / WRITERS;

/// What is compared at once.
const PIECE: u64 = 1 << 20;

/// The second half of a block's content, so that no mark is taken for what was there before.
const BEFORE: u64 = u64::MAX;

/// Where mark `n` of `writer` goes: the volume, and the writer's block in it.
pub(super) fn mark_position(writer: u64, n: u64) -> (usize, u64) {
    // Steele, Lea and Flood's split-mix: as good as chance, and the same each time.
    let mut x = (n << 8 | writer).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((n % 2) as usize, (x ^ x >> 31) % SLOTS)
}

/// Where a writer's block begins. Between two of them there are others that nobody writes.
pub(super) fn offset(writer: u64, slot: u64) -> u64 {
    (slot * WRITERS + writer) * 8 * BLOCK
}

/// The words that a block holds over and over.
type BlockPattern = [u64; 2];

fn bytes(block_pattern: BlockPattern) -> [u8; 16] {
    let mut out = [0; 16];
    out[..8].copy_from_slice(&block_pattern[0].to_le_bytes());
    out[8..].copy_from_slice(&block_pattern[1].to_le_bytes());
    out
}

fn content(block_pattern: BlockPattern) -> Vec<u8> {
    bytes(block_pattern).repeat(BLOCK as usize / 16)
}

/// What a writer's block holds that got mark `n`; without one, what was there before.
pub(super) fn block(volume: usize, writer: u64, slot: u64, n: u64) -> Vec<u8> {
    content(block_pattern(volume, writer, slot, n))
}

fn block_pattern(volume: usize, writer: u64, slot: u64, n: u64) -> BlockPattern {
    if n == 0 { initial_words(volume, offset(writer, slot)) } else { [n, writer] }
}

/// What a volume has at a place before anybody writes: data all over.
fn initial_words(volume: usize, offset: u64) -> BlockPattern {
    [offset | volume as u64, BEFORE]
}

/// Fills a volume.
pub(super) fn fill(volume: usize, path: &Path) -> Result<()> {
    let file = File::create_new(path)?;
    let step = 256 * BLOCK;
    for at in (0..BYTES).step_by(step as usize) {
        let bytes: Vec<u8> = (at..at + step)
            .step_by(BLOCK as usize)
            .flat_map(|at| content(initial_words(volume, at)))
            .collect();
        file.write_all_at(&bytes, at)?;
    }
    Ok(())
}

/// A writer's marks, block by block, as of its last one.
pub(super) struct WriterMarks([Vec<u64>; 2]);

impl WriterMarks {
    /// None.
    pub fn new() -> WriterMarks {
        WriterMarks([vec![0; SLOTS as usize], vec![0; SLOTS as usize]])
    }

    /// Mark `n` is written.
    pub fn put(&mut self, writer: u64, n: u64) {
        let (volume, slot) = mark_position(writer, n);
        self.0[volume][slot as usize] = n;
    }

    /// What is in a writer's block.
    pub fn at(&self, volume: usize, slot: u64) -> u64 {
        self.0[volume][slot as usize]
    }
}

/// What came of a comparison.
#[derive(Default)]
pub(super) struct CheckResult {
    pub blocks: u64,
    pub wrong: u64,
}

/// Compares copies of both volumes with what they must hold at one instant, at which each writer's
/// last mark was one of `bounds`: between what was acknowledged before and what was sent behind it.
pub(super) fn compare(copies: &[impl AsRef<Path>; 2], bounds: &[(u64, u64)]) -> Result<CheckResult> {
    let mut checked = CheckResult::default();
    let open = |path: &Path| File::open(path).with_context(|| path.display().to_string());
    let copies = [open(copies[0].as_ref())?, open(copies[1].as_ref())?];
    let untouched =
        |volume| (0..BYTES).step_by(BLOCK as usize).map(move |at| initial_words(volume, at)).collect();
    let mut wanted: [Vec<BlockPattern>; 2] = [untouched(0), untouched(1)];
    for (writer, &(least, most)) in bounds.iter().enumerate() {
        let writer = writer as u64;
        // One that is out of bounds makes blocks wrong: those that it lacks, or has too early.
        let last = last_mark(&copies, writer)?.clamp(least, most);
        let mut marks = WriterMarks::new();
        (1..=last).for_each(|n| marks.put(writer, n));
        for (volume, wanted) in wanted.iter_mut().enumerate() {
            for slot in 0..SLOTS {
                let at = (offset(writer, slot) / BLOCK) as usize;
                wanted[at] = block_pattern(volume, writer, slot, marks.at(volume, slot));
            }
        }
    }
    let mut piece = vec![0; PIECE as usize];
    for (copy, wanted) in copies.iter().zip(&wanted) {
        for (i, wanted) in wanted.chunks((PIECE / BLOCK) as usize).enumerate() {
            copy.read_exact_at(&mut piece, i as u64 * PIECE).context("a copy")?;
            let same = |(got, wanted): &(&[u8], &BlockPattern)| {
                let wanted = bytes(**wanted);
                got.chunks_exact(16).all(|part| part == wanted)
            };
            let right = piece.chunks(BLOCK as usize).zip(wanted).filter(same).count();
            checked.blocks += wanted.len() as u64;
            checked.wrong += (wanted.len() - right) as u64;
        }
    }
    Ok(checked)
}

/// The latest mark of a writer in copies of both volumes.
fn last_mark(copies: &[File; 2], writer: u64) -> Result<u64> {
    let (mut last, mut head) = (0, [0; 16]);
    for copy in copies {
        for slot in 0..SLOTS {
            copy.read_exact_at(&mut head, offset(writer, slot)).context("a copy")?;
            let n = u64::from_le_bytes(head[..8].try_into()?);
            last = if head == bytes([n, writer]) { last.max(n) } else { last };
        }
    }
    Ok(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use tempfile::TempDir;

    /// Both volumes in files, with each writer's marks up to one of them.
    fn volumes(folder: &TempDir, last: u64) -> [PathBuf; 2] {
        let paths = [0, 1].map(|volume| folder.path().join(VOLUMES[volume]));
        paths.iter().enumerate().for_each(|(volume, path)| fill(volume, path).unwrap());
        for writer in 0..WRITERS {
            (1..=last).for_each(|n| put(&paths, writer, n));
        }
        paths
    }

    fn put(paths: &[PathBuf; 2], writer: u64, n: u64) {
        let (volume, slot) = mark_position(writer, n);
        let file = File::options().write(true).open(&paths[volume]).unwrap();
        file.write_all_at(&content([n, writer]), offset(writer, slot)).unwrap();
    }

    #[test]
    fn an_instant_is_all_up_to_one_mark() {
        let folder = TempDir::new().unwrap();
        let wrong = |paths: &[PathBuf; 2], bounds| compare(paths, &[bounds; WRITERS as usize]).unwrap().wrong;
        let paths = volumes(&folder, 1000);
        for bounds in [(1000, 1000), (990, 1001), (0, u64::MAX)] {
            assert_eq!(wrong(&paths, bounds), 0, "{bounds:?}");
        }
        // Marks that were acknowledged are missing; there are some that nobody had sent yet.
        assert_eq!((wrong(&paths, (1001, 1010)), wrong(&paths, (0, 999))), (WRITERS, WRITERS));
        // One volume is a moment older than the other.
        put(&paths, 2, 1002);
        assert_eq!(wrong(&paths, (990, 1010)), 1, "mark 1001 is missing");
        put(&paths, 2, 1001);
        assert_eq!(wrong(&paths, (990, 1010)), 0);
        // A block is torn, and one is changed that nobody writes.
        let file = File::options().write(true).open(&paths[1]).unwrap();
        file.write_all_at(&[7], offset(1, 5) + 17).unwrap();
        file.write_all_at(&[7], offset(1, 5) + BLOCK).unwrap();
        assert_eq!(wrong(&paths, (990, 1010)), 2);
    }
}
