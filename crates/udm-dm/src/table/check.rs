//! The limits of a table, and checks of the devices below: sizes, alignment, and paths to one disk.
//!
//! The kernel checks only the first load, and later tables at resume. udm checks every load, and
//! again at resume.

use super::TableEntry;
use crate::device_ref::{DeviceRange, LowerLimits};
use crate::error::TargetError;
use crate::target::DmQueueMode;
use udm_core::{Limits, SECTOR_SIZE, Sectors};

/// Limits of a table and its targets at one moment.
pub(super) struct TableLimits {
    /// Limits of the table.
    pub whole: Limits,
    /// Limits of each target.
    pub parts: Vec<Limits>,
}

/// The stacked limits of `entries` (kernel `dm_calculate_queue_limits`), or an error for the first
/// device range that does not fit.
pub(super) fn table_limits(
    entries: &[TableEntry],
    below: LowerLimits<'_>,
) -> Result<TableLimits, TargetError> {
    check_lower_request_stackable(entries, below)?;
    let size = entries.last().map_or(Sectors::ZERO, |e| Sectors(e.end().0));
    let mut all = Limits::new(size);
    let mut parts = Vec::with_capacity(entries.len());
    for (i, entry) in entries.iter().enumerate() {
        let own = entry.target.limits(below);
        let devices = entry.target.devices();
        for used in &devices {
            check_device_area(used, &devices, own.logical_block, below)
                .map_err(|e| TargetError { line: Some(i), ..e })?;
        }
        if entry.target.features().is_over_one_disk && !own.read_only {
            reject_private_path_caches(&devices, below).map_err(|e| TargetError { line: Some(i), ..e })?;
        }
        all = all.stack(&own);
        parts.push(own);
    }
    check_blocks_within_targets(entries, &parts, &all)?;
    Ok(TableLimits { whole: all, parts })
}

/// Checks that a request-based target has only request-based devices below (kernel
/// `dm_table_determine_type`). A mapped device without a table has no kind yet, so it passes.
fn check_lower_request_stackable(entries: &[TableEntry], below: LowerLimits<'_>) -> Result<(), TargetError> {
    let is_request_based = |e: &TableEntry| e.target.features().queue_mode == DmQueueMode::Request;
    for (line, entry) in entries.iter().enumerate().filter(|(_, e)| is_request_based(e)) {
        for used in entry.target.devices() {
            let limits = below.limits(&used.device);
            if !limits.request_stackable && limits.size > Sectors::ZERO {
                let text = "table load rejected: including non-request-stackable devices";
                let reason = format!("{} is bio-based; `queue_mode bio` takes it", used.device.name);
                return Err(TargetError { line: Some(line), ..TargetError::new(text).because(reason) });
            }
        }
    }
    Ok(())
}

/// Checks that several paths to one disk do not each have a cache. Other paths would not see a
/// write, and a flush of one path would make only its own writes durable.
fn reject_private_path_caches(paths: &[DeviceRange], below: LowerLimits<'_>) -> Result<(), TargetError> {
    let several = paths.iter().any(|path| path.device.number != paths[0].device.number);
    for path in paths.iter().filter(|_| several) {
        let (limits, name) = (below.limits(&path.device), &path.device.name);
        if limits.private_cache {
            let text = format!("multipath: {name} has a page cache of its own");
            let why = "other paths would read stale data; open it without direct=off";
            return Err(TargetError::new(text).because(why));
        }
        if limits.private_flush && limits.write_cache && !limits.read_only {
            let text = format!("multipath: {name} flushes the writes of its own connection only");
            let why = "the server does not offer CAN_MULTI_CONN; if it is right all the same, multi-conn=on in its \
                       URI says so";
            return Err(TargetError::new(text).because(why));
        }
    }
    Ok(())
}

fn block_sectors(bytes: u32) -> u64 {
    (u64::from(bytes) / SECTOR_SIZE).max(1)
}

/// Checks the range that a target uses of one of its `devices` (kernel `device_area_is_invalid`).
/// `block` is the target's logical block in bytes.
fn check_device_area(
    used: &DeviceRange,
    devices: &[DeviceRange],
    block: u32,
    below: LowerLimits<'_>,
) -> Result<(), TargetError> {
    let name = shorten_device_path(&used.device.name);
    let (start, len, size) = (used.start.0, used.len.0, below.limits(&used.device).size.0);
    // A mapped device without a table has no size. Its coming table is checked when this table is
    // resumed (kernel).
    if size == 0 {
        return Ok(());
    }
    if start >= size || len > size - start {
        let text = format!("{name} too small for target: start={start}, len={len}, dev_size={size}");
        return Err(TargetError::new(text));
    }
    for (what, value) in [("start", start), ("len", len)] {
        if value % block_sectors(block) != 0 {
            // The kernel names the device that it checks, which may not be the device with this
            // block size.
            let has_it = |one: &&DeviceRange| below.limits(&one.device).logical_block == block;
            let whose = Some(used).filter(has_it).or_else(|| devices.iter().find(has_it)).unwrap_or(used);
            let same = (whose.start, whose.len) == (used.start, used.len);
            let of = if same { String::new() } else { format!(" of {name}") };
            let whose = shorten_device_path(&whose.device.name);
            let text = format!("{what}={value}{of} not aligned to h/w logical block size {block} of {whose}");
            return Err(TargetError::new(text));
        }
    }
    Ok(())
}

/// Names a file path by its last component, as the kernel names block devices; other words stay
/// unchanged.
fn shorten_device_path(name: &str) -> &str {
    match name.rsplit_once('/') {
        Some((_, last)) if !name.contains("://") && !last.is_empty() => last,
        _ => name,
    }
}

/// Checks that no logical block of the whole device crosses a target boundary unless the blocks of
/// the targets allow it (kernel `validate_hardware_logical_block_alignment`).
fn check_blocks_within_targets(
    entries: &[TableEntry],
    parts: &[Limits],
    all: &Limits,
) -> Result<(), TargetError> {
    let device_block = block_sectors(all.logical_block);
    let mut remaining = 0;
    let mut next_start = 0;
    let mut blamed = entries.len();
    for (i, (entry, own)) in entries.iter().zip(parts).enumerate() {
        let block = block_sectors(own.logical_block);
        // The rest of a block that extends into this target must be a multiple of its own blocks.
        if remaining < entry.len.0 && remaining % block != 0 {
            blamed = i;
            break;
        }
        next_start = (next_start + entry.len.0) % device_block;
        remaining = if next_start == 0 { 0 } else { device_block - next_start };
    }
    if remaining == 0 {
        return Ok(());
    }
    let entry = &entries[blamed.min(entries.len() - 1)];
    let (start, len, block) = (entry.start, entry.len, all.logical_block);
    let text = format!(
        "table line {blamed} (start sect {start} len {len}) not aligned to h/w logical block size {block}"
    );
    Err(TargetError { line: Some(blamed.min(entries.len() - 1)), ..TargetError::new(text) })
}
