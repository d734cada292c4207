//! Clones over disks in memory, on cores stepped by the test.

#[path = "../snapshot/reader.rs"]
mod reader;
#[path = "../snapshot/rig.rs"]
mod rig;

mod failures;
mod grammar;
mod hydration;
mod metadata;
mod mirror;
mod mirror_log;
mod mirror_transcript;
mod order;
mod random;
mod suspend;

use rig::SnapshotRig;
use udm_core::Nanos;

/// Sectors of the source: 15 regions of 8 sectors, and a short one.
const SIZE: u64 = 125;
const REGIONS: u64 = 16;

/// Sectors of the metadata device.
const METADATA: u64 = 2048;

const TABLE: &str = "0 125 clone M D S 8";
const STILL: &str = "0 125 clone M D S 8 1 no_hydration";

/// A host with a source `S` whose sector `i` is full of `i + 1`, a destination `D` of 0xdd and
/// zeroed metadata `M`.
fn host(cores: usize) -> SnapshotRig {
    let mut host = SnapshotRig::new(cores);
    let source = host.disk("S", SIZE);
    (0..SIZE).for_each(|sector| source.put(sector, &[sector as u8 + 1; 512]));
    let destination = host.disk("D", SIZE);
    (0..SIZE).for_each(|sector| destination.put(sector, &[0xdd; 512]));
    host.disk("M", METADATA);
    host
}

/// The host with the clone `c`.
fn host_with(cores: usize, table: &str) -> SnapshotRig {
    let mut host = host(cores);
    host.create("c", table).unwrap();
    host
}

/// The first byte of each sector.
fn bytes(host: &mut SnapshotRig, from: u64, sectors: u64) -> Vec<u8> {
    host.read("c", from, sectors).unwrap().chunks(512).map(|sector| sector[0]).collect()
}

/// What the source has in these sectors.
fn source(from: u64, sectors: u64) -> Vec<u8> {
    (from..from + sectors).map(|sector| sector as u8 + 1).collect()
}

/// The numbers of hydrated and hydrating regions, and the mode.
fn progress(host: &SnapshotRig) -> (u64, u64, String) {
    let status = host.status("c");
    let words: Vec<&str> = status.split(' ').collect();
    let hydrated = words[3].split('/').next().unwrap().parse().unwrap();
    (hydrated, words[4].parse().unwrap(), words.last().unwrap().to_string())
}

/// Lets `seconds` pass, in steps of 5 ms.
fn pass(host: &mut SnapshotRig, seconds: u64) {
    for _ in 0..seconds * 200 {
        host.world.now = host.world.now + Nanos::from_millis(5);
        host.poll();
    }
}
