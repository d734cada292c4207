//! The image that the disks are of, and what is measured of the process.

use anyhow::{Context, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The size of the image.
pub(super) const IMAGE_BYTES: u64 = 2 << 30;

/// The name of its device.
pub(super) const IMAGE: &str = "image";

/// How far apart the image has data.
const DATA_EVERY: u64 = 16 << 20;

/// Mostly holes, as a fresh image is, with some data in it.
pub(super) fn make(path: &Path) -> std::io::Result<()> {
    let file = File::create_new(path)?;
    file.set_len(IMAGE_BYTES)?;
    (0..IMAGE_BYTES).step_by(DATA_EVERY as usize).try_for_each(|at| file.write_all_at(&block(at), at))
}

/// What the image has at `offset`, a multiple of 4 KiB.
pub(super) fn block(offset: u64) -> Vec<u8> {
    if !offset.is_multiple_of(DATA_EVERY) {
        return vec![0; 4096];
    }
    (offset / DATA_EVERY + 1).to_le_bytes().repeat(4096 / 8)
}

/// Bytes of memory of this process that are no file's.
pub(super) fn memory_bytes() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    Ok(kib.context("/proc/self/status: no RssAnon")? << 10)
}
