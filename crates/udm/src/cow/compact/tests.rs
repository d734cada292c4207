//! Compaction with a power cut at every step.

#[path = "../../../../udm-targets/tests/snapshot/reader.rs"]
mod reader;

use super::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use reader::read_torn;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use udm_wire::cow::ChunkSize;

/// Bytes of a sector, which is written completely or not at all.
const SECTOR: usize = 512;

/// A medium whose power is cut before its operation number `left`. Each sector that was not synced
/// is then old or new.
struct PowerCutMedium {
    durable: RefCell<Vec<u8>>,
    now: RefCell<Vec<u8>>,
    left: Cell<u32>,
}

impl PowerCutMedium {
    fn step(&self) -> io::Result<()> {
        let left = self.left.get().checked_sub(1).ok_or(io::ErrorKind::Interrupted)?;
        self.left.set(left);
        Ok(())
    }

    /// The content after the cut.
    fn after(&self, seed: u64) -> Vec<u8> {
        let (durable, now, mut rng) =
            (self.durable.borrow(), self.now.borrow(), SmallRng::seed_from_u64(seed));
        let longest = if rng.random() { &*durable } else { &*now };
        let mut found = longest.clone();
        for (at, sector) in found.chunks_mut(SECTOR).enumerate() {
            let from = if rng.random() { &*durable } else { &*now };
            match from.get(at * SECTOR..at * SECTOR + sector.len()) {
                Some(bytes) => sector.copy_from_slice(bytes),
                None => sector.fill(0),
            }
        }
        found
    }
}

impl StoreFileIo for PowerCutMedium {
    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let (now, at) = (self.now.borrow(), at as usize);
        bytes.copy_from_slice(now.get(at..at + bytes.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.step()?;
        self.now.borrow_mut()[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.step()?;
        self.durable.borrow_mut().clone_from(&self.now.borrow());
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.step()?;
        self.now.borrow_mut().resize(len as usize, 0);
        Ok(())
    }
}

/// A store of `exceptions` exceptions in random chunks, with invalid bytes after the last record.
fn store(rng: &mut SmallRng, exceptions: usize) -> Vec<u8> {
    let chunk = ChunkSize::new(1 << rng.random_range(0..3)).unwrap();
    let (layout, bytes) = (ExceptionStoreLayout::new(chunk), chunk.bytes() as usize);
    let chunks = layout.chunks_for(exceptions as u64) + rng.random_range(0..200);
    let mut image = vec![0; chunks as usize * bytes];
    ExceptionStoreHeader { valid: true, chunk }.encode(&mut image[..bytes]);
    let mut places: Vec<u64> = (2..chunks).filter(|chunk| !layout.is_metadata(*chunk)).collect();
    for index in 0..exceptions {
        let new = places.swap_remove(rng.random_range(0..places.len()));
        let (area, place) = (index as u64 / layout.records(), index % layout.records() as usize);
        let at = layout.area(area) as usize * bytes;
        SnapshotException { old: index as u64 * 3, new }.encode(&mut image[at..at + bytes], place);
        image[new as usize * bytes..][..bytes].fill(index as u8 | 1);
        if exceptions % layout.records() as usize > index {
            // The bytes after the last record look like a record.
            let last = layout.area(exceptions as u64 / layout.records()) as usize * bytes;
            image[last + bytes - RECORD_LEN..last + bytes].fill(7);
        }
    }
    image
}

/// Reads the store with the independent reader of the tests. Returns the data of each chunk of the
/// origin, and the number of chunks in use. With `torn` there may be something after the records.
fn read_back(image: &[u8], torn: bool) -> (BTreeMap<u64, Vec<u8>>, u64) {
    let read =
        |sector: u64, count: u64| image[sector as usize * SECTOR..][..count as usize * SECTOR].to_vec();
    let sectors = (image.len() / SECTOR) as u64;
    let store = read_torn(sectors, u64::MAX, read, torn).unwrap().expect("a store that is not blank");
    assert!(store.valid);
    let data = |new: u64| read(new * store.chunk, store.chunk);
    let chunks: BTreeMap<_, _> = store.records.iter().map(|&(old, new)| (old, data(new))).collect();
    (chunks, store.usage.0 / store.chunk)
}

#[test]
fn a_cut_at_any_point_leaves_what_was_kept() {
    let (mut cuts, mut moved) = (0, 0);
    for seed in 0..40 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let count = rng.random_range(0..100);
        let image = store(&mut rng, count);
        let (expected, _) = read_back(&image, true);
        assert_eq!(expected.len(), count);
        for left in 0.. {
            let medium = PowerCutMedium {
                durable: RefCell::new(image.clone()),
                now: RefCell::new(image.clone()),
                left: Cell::new(left),
            };
            let header = ExceptionStoreHeader::decode(&image).unwrap().unwrap();
            let plan = CompactPlan::new(&medium, header, image.len() as u64).unwrap();
            let len = if seed % 2 == 0 { plan.least() } else { plan.size };
            let done = plan.carry_out(&medium, len, |_| {});
            for chance in 0..4 {
                assert_eq!(read_back(&medium.after(chance), true).0, expected, "seed {seed}, cut {left}");
            }
            cuts += 1;
            if done.is_ok() {
                let after = medium.now.borrow();
                assert_eq!((&*after, after.len() as u64), (&*medium.durable.borrow(), len));
                let (_, used) = read_back(&after, false);
                assert!(used <= plan.layout.chunks_for(plan.found.exceptions), "seed {seed}: holes");
                moved += plan.moves;
                break;
            }
        }
    }
    assert!(cuts > 1000 && moved > 500, "{cuts} cuts, {moved} chunks moved");
}
