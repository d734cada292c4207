//! The reads of a machine that boots, one after the other.

use super::web_server::{IMAGE_BYTES, image_content};
use anyhow::{Result, ensure};
use std::time::{Duration, Instant};
use udm_backends::nbd::BlockingNbdClient;

/// Places of the image that a boot reads, and reads at each, one after the other.
const PLACES: u64 = 80;
const READS: u64 = 4;

/// Bytes of a read.
const READ: u64 = 32 << 10;

/// The number of reads of a boot.
pub(super) const BOOT_READS: u64 = PLACES * READS;

/// What a boot took.
#[derive(Clone, Copy, Debug)]
pub(super) struct BootTimes {
    /// From the first request to its answer.
    pub first: Duration,
    /// All reads.
    pub all: Duration,
}

/// The places that a boot reads: the same each time, all over the image.
fn boot_offsets() -> impl Iterator<Item = u64> {
    (0..PLACES).flat_map(|place| {
        let at = place.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        let at = at % (IMAGE_BYTES - READ * READS) / 4096 * 4096;
        (0..READS).map(move |read| at + read * READ)
    })
}

/// Reads as a machine that boots, with one request at a time, and checks the data.
pub(super) fn boot(client: &mut BlockingNbdClient) -> Result<BootTimes> {
    let begin = Instant::now();
    let mut first = None;
    for at in boot_offsets() {
        let found = client.read(at, READ as u32)?;
        first.get_or_insert_with(|| begin.elapsed());
        ensure!(found == image_content(at, READ), "demo: wrong data at byte {at}: this is a bug in udm");
    }
    let all = begin.elapsed();
    Ok(BootTimes { first: first.unwrap_or(all), all })
}
