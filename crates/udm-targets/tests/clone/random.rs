//! Random requests from several cores against a model, with suspends, reloads and restarts.

use crate::rig::{SnapshotRig, filled_write};
use crate::{SIZE, bytes, host, pass};
use udm_core::{BioFlags, Op, Status};
use udm_dm::testing::{TestDisk, bio_without_data, copy_bio_data, make_test_read_bio};

/// A small generator of random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

const TABLES: [&str; 3] = [
    "0 125 clone M D S 8",
    "0 125 clone M D S 8 1 no_hydration",
    "0 125 clone M D S 8 0 4 hydration_threshold 6 hydration_batch_size 3",
];

/// One request at a time on random cores, while the background works.
fn life(seed: u64) {
    let mut random = Random(seed);
    let mut host = host(2);
    let mut model: Vec<Option<u8>> = (0..SIZE).map(|sector| Some(sector as u8 + 1)).collect();
    host.create("c", TABLES[random.below(3) as usize]).unwrap();
    for _ in 0..300 {
        let core = random.below(2) as usize;
        let from = random.below(SIZE);
        let sectors = 1 + random.below((SIZE - from).min(24));
        let range = from as usize..(from + sectors) as usize;
        match random.below(12) {
            0..4 => {
                let sent = host.send("c", core, make_test_read_bio(from, sectors));
                let bio = host.wait(sent);
                assert_eq!(bio.status, Status::Ok);
                for (found, expected) in copy_bio_data(&bio).chunks(512).zip(&model[range]) {
                    assert!(expected.is_none_or(|byte| found.iter().all(|one| *one == byte)), "seed {seed}");
                }
            }
            4..8 => {
                let (from, sectors) = if random.below(3) == 0 { (from / 8 * 8, 8) } else { (from, sectors) };
                let sectors = sectors.min(SIZE - from);
                let fill = random.below(256) as u8;
                let mut bio = filled_write(from, sectors, fill);
                bio.flags = if random.below(4) == 0 { BioFlags::FUA } else { BioFlags::empty() };
                let sent = host.send("c", core, bio);
                assert_eq!(host.wait(sent).status, Status::Ok);
                model[from as usize..(from + sectors) as usize].fill(Some(fill));
            }
            8 => {
                let sent = host.send("c", core, bio_without_data(Op::Discard, from, sectors));
                assert_eq!(host.wait(sent).status, Status::Ok);
                model[range].fill(None);
            }
            9 => {
                host.suspend(&["c"]).unwrap();
                if random.below(2) == 0 {
                    host.load("c", TABLES[random.below(3) as usize]).unwrap();
                }
                host.resume(&["c"]).unwrap();
            }
            10 => host.world.now = host.world.now + udm_core::Nanos::from_millis(random.below(2000)),
            _ => {
                assert_eq!(host.flush("c"), Status::Ok);
                host = restarted(&host);
                host.create("c", TABLES[random.below(3) as usize]).unwrap();
            }
        }
        host.poll();
    }
    host.message("c", "enable_hydration").unwrap();
    pass(&mut host, 5);
    assert!(host.status("c").contains(" 16/16 0 "), "seed {seed}: {}", host.status("c"));
    for (sector, (found, expected)) in bytes(&mut host, 0, SIZE).into_iter().zip(model).enumerate() {
        assert!(expected.is_none_or(|byte| byte == found), "seed {seed}: sector {sector}");
    }
}

/// Copies of the disks on another host.
fn restarted(host: &SnapshotRig) -> SnapshotRig {
    let mut again = SnapshotRig::new(2);
    for name in ["S", "D", "M"] {
        let old = host.get_disk(name);
        let sectors = udm_core::Device::limits(&*old).size.0;
        let new = TestDisk::new(sectors);
        new.put(0, &old.bytes(0, sectors));
        again.put_disk(name, &new);
    }
    again
}

#[test]
fn random_lives() {
    (1..=40).for_each(life);
}
