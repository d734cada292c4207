//! The file of a job: opened with or without the page cache, and laid out in the length that the
//! job needs.

use crate::log;
use anyhow::{Context, Result, bail, ensure};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use udm_bench::{JobDevice, units};
use udm_wire::uri::{DeviceUri, FileUri};

/// Bytes per write.
const PIECE: usize = 1 << 20;

/// Applies the options of a job to its device, and lays out its file.
///
/// # Errors
/// If the device does not support `direct`, or the file cannot be extended to the required length.
pub fn lay_out_bench_job_file(uri: DeviceUri, job: &JobDevice, stop: &AtomicBool) -> Result<DeviceUri> {
    let DeviceUri::File(mut file) = uri else {
        if job.direct == Some(true)
            && let DeviceUri::Nbd(_) = uri
        {
            bail!("direct=1: an NBD server has the file: open it there with ?direct=on");
        }
        return Ok(uri);
    };
    if let Some(direct) = job.direct {
        let same = file.direct.is_none_or(|option| option == direct);
        ensure!(same, "direct={}: the URI has the opposite value of ?direct=", u8::from(direct));
        file.direct = Some(direct);
    }
    if job.filename.is_some() {
        lay_out_file(&file, job, stop).with_context(|| file.path.display().to_string())?;
    }
    Ok(DeviceUri::File(file))
}

/// Refuses `direct` for a table that uses a file through the page cache.
///
/// # Errors
/// One line that names the file.
pub fn refuse_direct_for_cached_file(text: &str, direct: Option<bool>) -> Result<()> {
    let cached = |word: &&str| {
        let is_path = word.contains('/') || word.starts_with("file:");
        is_path
            && matches!(udm_wire::uri::parse_device_uri(word), Ok(DeviceUri::File(file)) if file.direct.is_none())
    };
    match text.split_whitespace().find(cached) {
        Some(word) if direct.is_some() => {
            bail!("direct: set it for each file in the table: {word}?direct=on or ?direct=off")
        }
        _ => Ok(()),
    }
}

/// Extends a regular file to the length that its jobs need, as fio does. If it will be read, it is
/// filled with data.
fn lay_out_file(uri: &FileUri, job: &JobDevice, stop: &AtomicBool) -> Result<()> {
    let there = match uri.path.metadata() {
        Ok(data) if !data.is_file() => return Ok(()),
        Ok(data) => Some(data.len()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(error.into()),
    };
    if job.bytes == 0 {
        ensure!(there.is_some(), "no such file; size or filesize creates it");
        return Ok(());
    }
    if there.is_some_and(|there| there >= job.bytes) || uri.readonly {
        return Ok(());
    }
    log::queue_stderr_text(&format!(
        "udm: {}: laid out ({}B)\n",
        uri.path.display(),
        units::format_with_binary_prefix(job.bytes as f64, 4)
    ));
    let written = extend_bench_job_file(&uri.path, there.unwrap_or(0), job, stop);
    if written.is_err() && there.is_none() {
        // Removes the incomplete file.
        let _ = std::fs::remove_file(&uri.path);
    }
    written
}

fn extend_bench_job_file(path: &Path, from: u64, job: &JobDevice, stop: &AtomicBool) -> Result<()> {
    let mut file: File = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
    if !job.is_read {
        // If the file system cannot allocate, the file gets a hole.
        if fallocate(&file, FallocateFlags::empty(), from, job.bytes - from).is_err() {
            file.set_len(job.bytes)?;
        }
        return Ok(());
    }
    let mut rng = SmallRng::seed_from_u64(from);
    let mut piece = vec![0; PIECE];
    file.seek(SeekFrom::Start(from))?;
    let mut left = job.bytes - from;
    while left > 0 {
        ensure!(!stop.load(Relaxed), "a signal came before the file was laid out");
        rng.fill_bytes(&mut piece);
        let now = left.min(PIECE as u64);
        file.write_all(&piece[..now as usize])?;
        left -= now;
    }
    Ok(file.sync_all()?)
}
