//! A journal of the requests of disks, and the contents of the disks after a power cut at any
//! point. A disk has a volatile cache. Any part of it may be lost, sector by sector, until a flush.

use crate::rig::SnapshotRig;
use rand::RngExt;
use rand::rngs::SmallRng;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use udm_core::{BioFlags, Op, SECTOR_SIZE, Status};
use udm_dm::testing::{TestDisk, copy_bio_data};

/// The part of a disk's cache that survives the cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheSurvival {
    /// All sectors.
    Kept,
    /// No sector.
    Lost,
    /// Any sectors, each with any of its contents since the flush.
    Some,
}

#[derive(Clone)]
pub enum DiskRequest {
    Write { sector: u64, bytes: Vec<u8>, fua: bool },
    Flush,
}

impl DiskRequest {
    /// The letter of a request on disk 0 or 1: `w`, `W` a write, `R` a FUA write on disk 1, `f`,
    /// `F` a flush.
    pub fn letter(&self, disk: usize) -> char {
        match (self, disk) {
            (DiskRequest::Write { fua: true, .. }, 1) => 'R',
            (DiskRequest::Write { .. }, disk) => ['w', 'W'][disk],
            (DiskRequest::Flush, disk) => ['f', 'F'][disk],
        }
    }
}

/// The requests of several disks, in order.
#[derive(Clone, Default)]
pub struct DiskJournal(Arc<Mutex<Vec<(usize, DiskRequest)>>>);

impl DiskJournal {
    fn push(&self, disk: usize, what: DiskRequest) {
        self.0.lock().unwrap().push((disk, what));
    }

    /// Records the requests of `disk` under the number `number`.
    pub fn watch(&self, number: usize, disk: &TestDisk) {
        disk.set_limits(|limits| limits.write_cache = true);
        let journal = self.clone();
        disk.set_verdict(move |bio| {
            if bio.op == Op::Flush || bio.flags.contains(BioFlags::PREFLUSH) {
                journal.push(number, DiskRequest::Flush);
            }
            if bio.op == Op::Write {
                let fua = bio.flags.contains(BioFlags::FUA);
                journal.push(
                    number,
                    DiskRequest::Write { sector: bio.sector.0, bytes: copy_bio_data(bio), fua },
                );
            }
            Status::Ok
        });
    }

    pub fn entries(&self) -> Vec<(usize, DiskRequest)> {
        self.0.lock().unwrap().clone()
    }

    /// The content of `disk`, which began with `start`, after a power cut after the first `count`
    /// entries.
    pub fn cut(
        &self,
        disk: usize,
        start: &[u8],
        count: usize,
        cache: CacheSurvival,
        rng: &mut SmallRng,
    ) -> Vec<u8> {
        let mut image = start.to_vec();
        let mut volatile: BTreeMap<u64, Vec<Vec<u8>>> = BTreeMap::new();
        let size = SECTOR_SIZE as usize;
        let put = |image: &mut Vec<u8>, sector: u64, bytes: &[u8]| {
            image[sector as usize * size..][..size].copy_from_slice(bytes);
        };
        for (_, what) in self.0.lock().unwrap()[..count].iter().filter(|(of, _)| *of == disk) {
            match what {
                DiskRequest::Flush => {
                    for (sector, states) in std::mem::take(&mut volatile) {
                        put(&mut image, sector, states.last().unwrap());
                    }
                }
                DiskRequest::Write { sector, bytes, fua } => {
                    for (sector, bytes) in (*sector..).zip(bytes.chunks(size)) {
                        if *fua {
                            volatile.remove(&sector);
                            put(&mut image, sector, bytes);
                        } else {
                            volatile.entry(sector).or_default().push(bytes.to_vec());
                        }
                    }
                }
            }
        }
        for (sector, states) in volatile {
            let kept = match cache {
                CacheSurvival::Kept => states.len(),
                CacheSurvival::Lost => 0,
                CacheSurvival::Some => rng.random_range(0..=states.len()),
            };
            if kept > 0 {
                put(&mut image, sector, &states[kept - 1]);
            }
        }
        image
    }
}

/// A host with disks `O` and `W` as a power cut after `count` entries leaves them.
pub fn host_after(
    journal: &DiskJournal,
    starts: &[Vec<u8>; 2],
    count: usize,
    cache: CacheSurvival,
    rng: &mut SmallRng,
) -> SnapshotRig {
    let mut host = SnapshotRig::new(1);
    for (number, name) in ["O", "W"].into_iter().enumerate() {
        let image = journal.cut(number, &starts[number], count, cache, rng);
        host.disk(name, image.len() as u64 / SECTOR_SIZE).put(0, &image);
    }
    host
}
