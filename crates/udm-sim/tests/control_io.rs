//! Control-side I/O in busy worlds: loads read the disks, fail as disks fail, and affect no other
//! request.

use std::sync::Arc;
use udm_core::control_io::{flush_device, read_sectors};
use udm_core::errno::ETIMEDOUT;
use udm_core::{Device, Sector, Sectors};
use udm_sim::RunPlan;
use udm_sim::control_io::SimTableLoadIo;
use udm_sim::world::MappedDeviceStackWorld;

/// Counts of the reads of a world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ReadCounts {
    read: u64,
    failed: u64,
    silent: u64,
    hash: u64,
}

fn world(seed: u64) -> ReadCounts {
    let mut world = MappedDeviceStackWorld::new(&RunPlan::new(seed, 3000)).unwrap();
    let mut seen = ReadCounts::default();
    for round in 0..60 {
        for _ in 0..50 {
            world.step().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
        }
        let mut all: Vec<Arc<dyn Device>> = Vec::new();
        all.extend(world.machine.paths.iter().map(|path| Arc::clone(path) as Arc<dyn Device>));
        all.extend(world.devices.iter().map(|device| Arc::clone(device.mapped()) as Arc<dyn Device>));
        let device = &all[round % all.len()];
        let limits = device.limits();
        let block = u64::from(limits.logical_block) / 512;
        let sectors = Sectors((limits.size.0.min(64) / block * block).max(block));
        let io = SimTableLoadIo::new(&mut world);
        let done = match round % 5 {
            0 => flush_device(&io, device).map(|()| Vec::new()),
            _ => read_sectors(&io, device, Sector(0), sectors),
        };
        io.verdict().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
        match done {
            Ok(bytes) => {
                seen.read += 1;
                let word = |c: &[u8]| u64::from_le_bytes(c.try_into().unwrap());
                seen.hash = bytes
                    .chunks(8)
                    .fold(seen.hash, |hash, c| (hash ^ word(c)).wrapping_mul(0x1000_0000_01b3));
            }
            Err(error) if error.errno == ETIMEDOUT && error.text.contains("does not answer") => {
                seen.silent += 1;
            }
            Err(_) => seen.failed += 1,
        }
    }
    world.run().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    seen
}

#[test]
fn loads_read_beside_everything_else() {
    let mut all = ReadCounts::default();
    for seed in 1..=10 {
        let seen = world(seed);
        (all.read, all.failed, all.silent) =
            (all.read + seen.read, all.failed + seen.failed, all.silent + seen.silent);
    }
    assert!(all.read > 250 && all.failed > 10, "{all:?} is no test");
}

#[test]
fn the_same_seed_reads_the_same() {
    assert_eq!(world(1), world(1));
}
