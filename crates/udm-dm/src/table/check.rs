//! Limits of a table, and whether the devices below can bear it: sizes, alignment to their blocks,
//! and paths that agree.
//!
//! The kernel checks this at the first load only, later at resume; udm checks at every load and
//! again at resume.

use super::TableEntry;
use crate::error::TargetError;
use crate::target::{DeviceRange, DmQueueMode, LowerLimits};
use udm_core::bugs::{self, Bug};
use udm_core::{Limits, SECTOR_SIZE, Sectors};

/// What a table and its targets can take, as of one moment.
pub(super) struct TableLimits {
    /// Of the table.
    pub whole: Limits,
    /// Of each target.
    pub parts: Vec<Limits>,
}

/// The stacked limits of `entries` (kernel `dm_calculate_queue_limits`), or the first device area
/// that does not fit.
pub(super) fn table_limits(
    entries: &[TableEntry],
    below: LowerLimits<'_>,
) -> Result<TableLimits, TargetError> {
    check_request_stackable(entries, below)?;
    let size = entries.last().map_or(Sectors::ZERO, |e| Sectors(e.end().0));
    let mut all = Limits::new(size);
    let mut parts = Vec::with_capacity(entries.len());
    for (i, entry) in entries.iter().enumerate() {
        let mut own = entry.target.limits(below);
        own.read_only &= !bugs::on(Bug::ReadOnlyLost);
        let devices = entry.target.devices();
        for used in &devices {
            check_device_area(used, &devices, own.logical_block, below)
                .map_err(|e| TargetError { line: Some(i), ..e })?;
        }
        if entry.target.is_over_one_disk() && !own.read_only {
            check_path_caches(&devices, below).map_err(|e| TargetError { line: Some(i), ..e })?;
        }
        all = all.stack(&own);
        parts.push(own);
    }
    check_block_alignment(entries, &parts, &all)?;
    Ok(TableLimits { whole: all, parts })
}

/// Checks that a request-based target has only request-based devices below (kernel
/// `dm_table_determine_type`). A mapped device without a table is neither yet.
fn check_request_stackable(entries: &[TableEntry], below: LowerLimits<'_>) -> Result<(), TargetError> {
    for (line, entry) in entries.iter().enumerate().filter(|(_, e)| e.target.kind() == DmQueueMode::Request) {
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

/// Checks that several paths to one disk have no cache each: what is written through one would not
/// be seen through the others, and what a flush of one makes durable would be its own writes only.
fn check_path_caches(paths: &[DeviceRange], below: LowerLimits<'_>) -> Result<(), TargetError> {
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

/// Checks the range that a target uses of one of its `devices` (kernel `device_area_is_invalid`);
/// `block` is the target's logical block in bytes.
fn check_device_area(
    used: &DeviceRange,
    devices: &[DeviceRange],
    block: u32,
    below: LowerLimits<'_>,
) -> Result<(), TargetError> {
    let name = base_name(&used.device.name);
    let (start, len, size) = (used.start.0, used.len.0, below.limits(&used.device).size.0);
    // A mapped device that has no table yet has no size; what it gets is checked when this table is
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
            // The kernel names the device that it looks at, which need not be the one whose block
            // that is.
            let has_it = |one: &&DeviceRange| below.limits(&one.device).logical_block == block;
            let whose = Some(used).filter(has_it).or_else(|| devices.iter().find(has_it)).unwrap_or(used);
            let same = (whose.start, whose.len) == (used.start, used.len);
            let of = if same { String::new() } else { format!(" of {name}") };
            let whose = base_name(&whose.device.name);
            let text = format!("{what}={value}{of} not aligned to h/w logical block size {block} of {whose}");
            return Err(TargetError::new(text));
        }
    }
    Ok(())
}

/// Paths are named by their last part, as the kernel names block devices; other words as they are.
fn base_name(name: &str) -> &str {
    match name.rsplit_once('/') {
        Some((_, last)) if !name.contains("://") && !last.is_empty() => last,
        _ => name,
    }
}

/// Checks that no block of the whole device lies across a target whose own blocks are as large
/// (kernel `validate_hardware_logical_block_alignment`).
fn check_block_alignment(entries: &[TableEntry], parts: &[Limits], all: &Limits) -> Result<(), TargetError> {
    let device_block = block_sectors(all.logical_block);
    let mut remaining = 0;
    let mut next_start = 0;
    let mut blamed = entries.len();
    for (i, (entry, own)) in entries.iter().zip(parts).enumerate() {
        let block = block_sectors(own.logical_block);
        // What of the block before spills into this target must suit its own blocks.
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
