//! The image of the disks, and the memory usage of the process.

use anyhow::{Context, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The size of the image in bytes.
pub(super) const IMAGE_BYTES: u64 = 2 << 30;

/// The name of the image's device.
pub(super) const IMAGE: &str = "image";

/// Distance between the data blocks of the image, in bytes.
const DATA_EVERY: u64 = 16 << 20;

/// Creates the image: mostly holes, as a fresh image, with some data.
pub(super) fn create_sparse_image(path: &Path) -> std::io::Result<()> {
    let file = File::create_new(path)?;
    file.set_len(IMAGE_BYTES)?;
    (0..IMAGE_BYTES)
        .step_by(DATA_EVERY as usize)
        .try_for_each(|at| file.write_all_at(&image_block_content(at), at))
}

/// The content at `offset`, a multiple of 4 KiB.
pub(super) fn image_block_content(offset: u64) -> Vec<u8> {
    if !offset.is_multiple_of(DATA_EVERY) {
        return vec![0; 4096];
    }
    (offset / DATA_EVERY + 1).to_le_bytes().repeat(4096 / 8)
}

/// Anonymous memory of this process, in bytes.
pub(super) fn read_rss_anon_bytes() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    Ok(kib.context("/proc/self/status: no RssAnon")? << 10)
}
