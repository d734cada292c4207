//! `udm snapshot copy`: a backup of a snapshot, in full or of the changes since an older one.
//!
//! The server says which ranges differ, and the data is read from the snapshot's NBD export, as any
//! other client reads it. A full copy gets its name when it is complete and durable. An incremental
//! copy writes into the file in place: the same command completes one that was interrupted, because
//! the two snapshots do not change.

use super::diff::SnapshotDiffPages;
use super::qcow2::{self, BackingFile, CLUSTER, Qcow2Writer};
use super::{CopyFormat, SnapshotCopyArgs, find_snapshot_export};
use crate::output::{format_bytes, print_json_to_stdout, print_to_stdout};
use crate::progress;
use crate::requests::call_verb_without_body;
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags};
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use udm_control::api::{self, verbs};
use udm_control::client::ControlClient;
use udm_core::{Batch, Bio, Buf, CoreId, Device, ExtentKind, Extents, SECTOR_SIZE, Sector, Sectors};
use udm_runtime::{CoreOptions, LocalCore, ProcessCores};
use udm_wire::uri;

/// Bytes that one request reads, and requests in flight.
const REQUEST: u64 = 1 << 20;
const DEPTH: usize = 8;

/// Runs of data and holes that are asked for at a time.
const EXTENTS_MAX: usize = 4096;

/// The result, for `--json`.
#[derive(Debug, Serialize)]
struct SnapshotCopyReport {
    /// The size of the snapshot.
    size_bytes: u64,
    /// Bytes that were read from it and written to the file.
    copied_bytes: u64,
    elapsed_ns: u64,
}

/// Bytes of the snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SnapshotByteRange {
    start: u64,
    len: u64,
}

/// # Errors
/// One line that names the snapshot or the file, and what to do.
pub(super) fn run(args: &SnapshotCopyArgs) -> Result<()> {
    let begun = Instant::now();
    let client = args.server.client()?;
    let snapshot = call_verb_without_body(&client, verbs::GET_SNAPSHOT.on(&args.name))?;
    let export = find_snapshot_export(&client, &snapshot.name)?;
    let uri = export.uris.first().with_context(|| format!("{}: its export has no URI", args.name))?;
    // Before the file is opened: a wrong name must not leave a file.
    let changed = args.since.as_deref().map(|old| changed_ranges(&client, &args.name, old)).transpose()?;
    let device = udm_backends::open_standalone_device(&uri::parse_device_uri(uri)?)?;
    let size = device.limits().size.bytes();
    let ranges = match changed {
        Some(ranges) => ranges,
        None => data_ranges(&*device),
    };
    let name = args.file.display();
    let mut output = match (args.format, &args.since) {
        (CopyFormat::Raw, _) if args.backing.is_some() => bail!("--backing: only with --format qcow2"),
        (CopyFormat::Raw, Some(old)) => {
            CopyOutput::Raw(open_old_snapshot_copy(&args.file, size, &args.name, old)?)
        }
        (CopyFormat::Raw, None) => CopyOutput::Raw(create_unnamed_copy_file(&args.file, size)?),
        (CopyFormat::Qcow2, _) => {
            let backing = backing_file(args, size)?;
            let file = create_unnamed_copy_file(&args.file, 0)?;
            CopyOutput::Qcow2(Qcow2Writer::new(file, size, backing)?)
        }
    };
    let ranges = match args.format {
        CopyFormat::Raw => ranges,
        CopyFormat::Qcow2 => {
            let most = request_len(&*device);
            ensure!(most.is_multiple_of(CLUSTER), "{name}: the server takes requests of {most} bytes only");
            whole_clusters(&ranges, size)
        }
    };
    let copied_bytes =
        copy_ranges_to_file(&device, &mut output, &ranges).with_context(|| name.to_string())?;
    let is_new = args.format == CopyFormat::Qcow2 || args.since.is_none();
    let file = output.finish().with_context(|| name.to_string())?;
    if is_new {
        link_tmpfile_to_path(&file, &args.file)?;
    }
    let elapsed = begun.elapsed();
    if args.print.json {
        return print_json_to_stdout(&SnapshotCopyReport {
            size_bytes: size,
            copied_bytes,
            elapsed_ns: u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX),
        });
    }
    let (copied, size, seconds) = (format_bytes(copied_bytes), format_bytes(size), elapsed.as_secs_f64());
    print_to_stdout(&format!("copied {copied}B of {size}B in {seconds:.2} s\n"))
}

/// The ranges that may differ between the snapshots `new` and `old`.
fn changed_ranges(client: &ControlClient, new: &str, old: &str) -> Result<Vec<SnapshotByteRange>> {
    let mut pages = SnapshotDiffPages::new(client, new, Some(old));
    let mut ranges = Vec::new();
    while let Some(page) = pages.next()? {
        let range = |range: api::ChangedByteRange| SnapshotByteRange {
            start: range.start_bytes,
            len: range.length_bytes,
        };
        ranges.extend(page.ranges.into_iter().map(range));
    }
    Ok(ranges)
}

/// The ranges of `device` that are not known to be zeroes.
fn data_ranges(device: &dyn Device) -> Vec<SnapshotByteRange> {
    let (mut at, size, mut ranges) = (0, device.limits().size.0, Vec::new());
    while at < size {
        let mut extents = Extents::new(EXTENTS_MAX);
        device.extents(Sector(at), Sectors(size - at), &mut extents);
        let before = at;
        for run in extents.list() {
            if run.content == ExtentKind::Data {
                ranges.push(SnapshotByteRange { start: at * SECTOR_SIZE, len: run.len.bytes() });
            }
            at += run.len.0;
        }
        if at == before {
            // Nothing is known of the rest.
            ranges.push(SnapshotByteRange { start: at * SECTOR_SIZE, len: (size - at) * SECTOR_SIZE });
            break;
        }
    }
    ranges
}

/// Where the data of a copy goes.
enum CopyOutput {
    /// To the same places of this file.
    Raw(File),
    /// Into an image.
    Qcow2(Qcow2Writer),
}

impl CopyOutput {
    fn write(&mut self, at: u64, data: &[u8]) -> Result<()> {
        match self {
            CopyOutput::Raw(file) => write_to_sparse_file(file, at, data),
            CopyOutput::Qcow2(image) => image.write(at, data),
        }
    }

    /// Makes the copy complete and durable.
    fn finish(self) -> Result<File> {
        match self {
            CopyOutput::Raw(file) => {
                file.sync_all()?;
                Ok(file)
            }
            CopyOutput::Qcow2(image) => image.finish(),
        }
    }
}

/// The image below an incremental copy, which must have the same size.
fn backing_file(args: &SnapshotCopyArgs, size: u64) -> Result<Option<BackingFile>> {
    let (old, path) = match (&args.since, &args.backing) {
        (None, _) => return Ok(None),
        (Some(old), Some(path)) => (old, path),
        (Some(old), None) => bail!("--since {old}: --backing FILE names its copy"),
    };
    let name = path.display();
    let file = File::open(path).with_context(|| name.to_string())?;
    let mut header = Vec::new();
    (&file).take(64).read_to_end(&mut header).with_context(|| name.to_string())?;
    let (format, has) = match qcow2::image_size(&header) {
        Some(size) => ("qcow2", size),
        None => ("raw", (&file).seek(SeekFrom::End(0)).with_context(|| name.to_string())?),
    };
    ensure!(has == size, "{name}: {has} bytes, but {} has {size}: not a copy of {old}", args.name);
    // Images of one folder can be moved together.
    let path = path.canonicalize().with_context(|| name.to_string())?;
    let folder = folder_of(&args.file).canonicalize().with_context(|| args.file.display().to_string())?;
    let kept =
        if path.parent() == Some(&folder) { Path::new(path.file_name().unwrap_or_default()) } else { &path };
    let kept = kept.to_str().with_context(|| format!("{name}: a name in an image is UTF-8"))?;
    // QEMU takes what is before a colon for a protocol.
    let kept = if kept.contains(':') && !kept.starts_with('/') { format!("./{kept}") } else { kept.into() };
    Ok(Some(BackingFile { name: kept, format }))
}

/// `ranges`, which are in ascending order, widened to whole clusters of an image of `size` bytes.
fn whole_clusters(ranges: &[SnapshotByteRange], size: u64) -> Vec<SnapshotByteRange> {
    let mut wide: Vec<SnapshotByteRange> = Vec::new();
    for range in ranges {
        let start = range.start / CLUSTER * CLUSTER;
        let end = (range.start + range.len).next_multiple_of(CLUSTER).min(size);
        match wide.last_mut() {
            Some(last) if last.start + last.len >= start => last.len = last.len.max(end - last.start),
            _ => wide.push(SnapshotByteRange { start, len: end - start }),
        }
    }
    wide
}

/// Opens the copy of `old`, to be made a copy of `new`.
fn open_old_snapshot_copy(path: &Path, size: u64, new: &str, old: &str) -> Result<File> {
    let name = path.display();
    let mut file = match OpenOptions::new().read(true).write(true).open(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => {
            bail!("{name}: no such file: omit --since {old} to copy all of {new}")
        }
        opened => opened.with_context(|| name.to_string())?,
    };
    let has = file.seek(SeekFrom::End(0)).with_context(|| name.to_string())?;
    ensure!(has == size, "{name}: {has} bytes, but {new} has {size}: not a copy of {old}");
    Ok(file)
}

/// A file without a name, of `size` bytes of zeroes, in the folder of `path`.
fn create_unnamed_copy_file(path: &Path, size: u64) -> Result<File> {
    let name = path.display();
    let exists = || format!("{name}: the file exists: name another, or update a copy with --since OLD");
    ensure!(!path.try_exists().with_context(|| name.to_string())?, exists());
    let folder = folder_of(path);
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(folder, flags, Mode::from_raw_mode(0o666));
    let file = File::from(file.with_context(|| format!("{name}: a file in {}", folder.display()))?);
    file.set_len(size).with_context(|| name.to_string())?;
    Ok(file)
}

/// The folder that has, or will have, the file.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Gives a complete copy its name.
fn link_tmpfile_to_path(file: &File, path: &Path) -> Result<()> {
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::linkat(CWD, unnamed, CWD, path, AtFlags::SYMLINK_FOLLOW)
        .with_context(|| format!("{}: the copy is complete and can't have this name", path.display()))?;
    let folder = folder_of(path);
    File::open(folder).and_then(|folder| folder.sync_all()).with_context(|| folder.display().to_string())
}

/// Copies `ranges` of `device` to `output`. Returns the number of bytes.
fn copy_ranges_to_file(
    device: &Arc<dyn Device>,
    output: &mut CopyOutput,
    ranges: &[SnapshotByteRange],
) -> Result<u64> {
    let progress = progress::bytes_bar(ranges.iter().map(|range| range.len).sum());
    let mut core = LocalCore::attach(&ProcessCores::new(1)?, CoreId(0), CoreOptions::default())?;
    let mut lane = core.open(&**device)?;
    let mut pieces = split_long_ranges(ranges, request_len(&**device));
    let mut bytes = vec![0; REQUEST as usize];
    let (mut batch, mut done, mut in_flight, mut copied) = (Batch::new(), Batch::new(), 0, 0);
    let mut result = Ok(());
    loop {
        // After an error only the requests in flight are waited for.
        while in_flight < DEPTH
            && result.is_ok()
            && let Some(piece) = pieces.next()
        {
            batch.push(build_read_bio(piece));
            in_flight += 1;
        }
        if in_flight == 0 {
            break;
        }
        core.turn(|cx| {
            if !batch.is_empty() {
                lane.submit(&mut batch, cx);
            }
            lane.poll(&mut done, cx);
        });
        if done.is_empty() {
            core.park();
        }
        for mut bio in done.drain(..) {
            bio.finish();
            in_flight -= 1;
            copied += bio.sectors.bytes();
            result = result.and_then(|()| write_bio(output, &bio, &mut bytes));
        }
        progress.set_position(copied);
    }
    progress.finish_and_clear();
    result.map(|()| copied)
}

/// The length of a request: whole clusters of an image, unless the device takes less.
fn request_len(device: &dyn Device) -> u64 {
    let most = device.limits().max_sectors.bytes().min(REQUEST);
    if most > CLUSTER { most / CLUSTER * CLUSTER } else { most }
}

/// `ranges`, cut into pieces of at most `max` bytes.
fn split_long_ranges(ranges: &[SnapshotByteRange], max: u64) -> impl Iterator<Item = SnapshotByteRange> {
    ranges.iter().flat_map(move |range| {
        let end = range.start + range.len;
        (range.start..end)
            .step_by(max as usize)
            .map(move |start| SnapshotByteRange { start, len: max.min(end - start) })
    })
}

/// A read of `range`, ready to be submitted.
fn build_read_bio(range: SnapshotByteRange) -> Box<Bio> {
    let data = Buf::zeroed(range.len as usize).into();
    let mut bio = Bio::read(Sector(range.start / SECTOR_SIZE), Sectors::from_bytes(range.len), data);
    bio.start();
    bio
}

/// Writes what a completed read holds.
fn write_bio(output: &mut CopyOutput, bio: &Bio, bytes: &mut [u8]) -> Result<()> {
    let at = bio.sector.0 * SECTOR_SIZE;
    ensure!(bio.status.is_ok(), "byte {at} of the snapshot can't be read: {}", bio.status);
    let len = bio.data.copy_to(bytes);
    output.write(at, &bytes[..len])
}

/// Writes zeroes as a hole, where the file can have one.
fn write_to_sparse_file(file: &File, at: u64, data: &[u8]) -> Result<()> {
    if data.iter().all(|&byte| byte == 0) {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if rustix::fs::fallocate(file, hole, at, data.len() as u64).is_ok() {
            return Ok(());
        }
    }
    Ok(file.write_all_at(data, at)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_each_range_once() {
        let ranges = [SnapshotByteRange { start: 0, len: 10 }, SnapshotByteRange { start: 20, len: 4 }];
        let pieces: Vec<_> = split_long_ranges(&ranges, 4).map(|piece| (piece.start, piece.len)).collect();
        assert_eq!(pieces, [(0, 4), (4, 4), (8, 2), (20, 4)]);
    }
}
