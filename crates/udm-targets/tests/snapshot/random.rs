//! Random loads on an origin and its snapshots, over storage that completes at random times in
//! random order. A snapshot must read as its instant plus its own writes; the origin must read as
//! it was written.

use crate::rig::{SnapshotRig, filled_write};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::ops::Range;
use udm_core::Status;
use udm_dm::testing::{copy_bio_data, make_test_read_bio};

const SECTORS: u64 = 300;
const CORES: usize = 3;

/// A device, its expected content, and its requests in flight.
struct CheckedDevice {
    name: &'static str,
    image: Vec<u8>,
    under_way: Vec<SentRequest>,
}

struct SentRequest {
    id: u64,
    range: Range<u64>,
    /// The written byte; `None` for a read.
    fill: Option<u8>,
}

impl CheckedDevice {
    fn new(name: &'static str, image: &[u8]) -> CheckedDevice {
        CheckedDevice { name, image: image.to_vec(), under_way: Vec::new() }
    }

    /// True if no request in flight conflicts with the range.
    fn is_free(&self, range: &Range<u64>, write: bool) -> bool {
        let meets = |sent: &SentRequest| sent.range.start < range.end && range.start < sent.range.end;
        !self.under_way.iter().any(|sent| meets(sent) && (write || sent.fill.is_some()))
    }

    fn act(&mut self, host: &mut SnapshotRig, rng: &mut SmallRng) {
        let start = rng.random_range(0..SECTORS);
        let len = if rng.random_bool(0.3) { rng.random_range(1..60) } else { rng.random_range(1..9) };
        let (start, len) = if rng.random_bool(0.3) { (start & !7, 8) } else { (start, len) };
        let range = start..(start + len).min(SECTORS);
        let write = rng.random_bool(0.5);
        if !self.is_free(&range, write) {
            return;
        }
        let fill = write.then(|| rng.random_range(1..=255));
        let (len, core) = (range.end - range.start, rng.random_range(0..CORES));
        let id = match fill {
            Some(fill) => host.send(self.name, core, filled_write(start, len, fill)),
            None => host.send(self.name, core, make_test_read_bio(start, len)),
        };
        self.under_way.push(SentRequest { id, range, fill });
    }

    fn take_answers(&mut self, host: &mut SnapshotRig) {
        for sent in std::mem::take(&mut self.under_way) {
            let Some(bio) = host.answer(sent.id) else {
                self.under_way.push(sent);
                continue;
            };
            assert_eq!(bio.status, Status::Ok, "{}", self.name);
            let range = sent.range.start as usize..sent.range.end as usize;
            match sent.fill {
                Some(fill) => self.image[range].fill(fill),
                None => {
                    let found: Vec<u8> = copy_bio_data(&bio).chunks(512).map(|sector| sector[0]).collect();
                    assert_eq!(found, self.image[range.clone()], "{} at {range:?}", self.name);
                }
            }
        }
    }

    fn check(&self, host: &mut SnapshotRig) {
        let found = host.read(self.name, 0, SECTORS).unwrap();
        let found: Vec<u8> = found.chunks(512).map(|sector| sector[0]).collect();
        assert_eq!(found, self.image, "{}", self.name);
    }
}

fn run_seed(seed: u64, kinds: [&str; 2]) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut host = SnapshotRig::new(CORES);
    let origin = host.disk("O", SECTORS);
    let start: Vec<u8> = (0..SECTORS).map(|_| rng.random()).collect();
    start.iter().enumerate().for_each(|(sector, byte)| origin.put(sector as u64, &[*byte; 512]));
    let disks = ["W0", "W1"].map(|name| host.disk(name, 2000));
    host.create("s0", &format!("0 {SECTORS} snapshot O W0 {}", kinds[0])).unwrap();
    host.create("s1", &format!("0 {SECTORS} snapshot O W1 {}", kinds[1])).unwrap();
    host.create("od", &format!("0 {SECTORS} snapshot-origin O")).unwrap();
    let mut sides = ["od", "s0", "s1"].map(|name| CheckedDevice::new(name, &start));
    let all = [origin, Clone::clone(&disks[0]), Clone::clone(&disks[1])];
    all.iter().for_each(|disk| disk.hold(true));
    for _ in 0..600 {
        for disk in &all {
            if rng.random_bool(0.1) {
                disk.reverse(rng.random());
            }
            if rng.random_bool(0.4) {
                disk.release(rng.random_range(1..6));
            }
        }
        let side = rng.random_range(0..3);
        sides[side].act(&mut host, &mut rng);
        if rng.random_bool(0.5) {
            host.poll();
        }
        sides.iter_mut().for_each(|side| side.take_answers(&mut host));
    }
    all.iter().for_each(|disk| disk.hold(false));
    for _ in 0..200 {
        host.poll();
        sides.iter_mut().for_each(|side| side.take_answers(&mut host));
    }
    for side in &sides {
        assert!(side.under_way.is_empty(), "{} lost {}", side.name, side.under_way.len());
        side.check(&mut host);
    }
}

#[test]
fn random_loads() {
    let kinds = [["P 8", "N 8"], ["N 8", "N 16"], ["P 8", "P 8"], ["P 1", "N 32"], ["P 64", "P 4"]];
    for seed in 0..60 {
        for kinds in kinds {
            run_seed(seed, kinds);
        }
    }
}
