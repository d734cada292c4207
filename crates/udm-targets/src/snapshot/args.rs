//! Parser of a snapshot's table line, with the kernel's order of checks.

use std::sync::Arc;
use udm_core::errno::EINVAL;
use udm_core::{Device, Sectors, SharedDiskState};
use udm_dm::target::{DeviceNameResolver, ResolvedDevice, TargetArgs, parse_decimal_u64};
use udm_dm::{MappedDevice, TargetError, device_stack_contains};
use udm_wire::cow::{ChunkSize, ChunkSizeError};

/// The optional features of a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SnapshotFeatures {
    /// A discard of a chunk in the store clears the chunk there; other discards do nothing.
    pub discard_zeroes_cow: bool,
    /// A discard is also sent to the origin.
    pub discard_passdown_origin: bool,
    /// A full store makes the snapshot read-only instead of invalid (`PO`).
    pub overflow: bool,
}

/// A parsed table line.
pub(super) struct SnapshotTableArgs {
    pub origin: ResolvedDevice,
    pub store: ResolvedDevice,
    pub persistent: bool,
    /// The chunk size of the table; `None` for the store's own size, or the default for a new
    /// store.
    pub chunk: Option<ChunkSize>,
    pub features: SnapshotFeatures,
}

impl SnapshotTableArgs {
    /// The table's word for the type of the store.
    pub(super) fn kind(&self) -> &'static str {
        match (self.persistent, self.features.overflow) {
            (true, false) => "P",
            (true, true) => "PO",
            (false, _) => "N",
        }
    }
}

/// The kernel's text for every error in a store type or chunk size, with the reason that the kernel
/// does not show.
fn exception_store_arg_error(reason: impl Into<String>, word: usize) -> TargetError {
    TargetError::new("Couldn't create exception store").because(reason.into()).at(word)
}

/// Parses the table line of a `snapshot` or `snapshot-merge`.
///
/// # Errors
/// The kernel's, in its order.
pub(super) fn parse_snapshot_table_args(args: &mut TargetArgs<'_>) -> Result<SnapshotTableArgs, TargetError> {
    let words = args.args;
    if words.len() < 4 {
        return Err(TargetError::new("requires 4 or more arguments").at(words.len()));
    }
    let mut features = parse_snapshot_features(words)?;
    let origin = look_up_device(args.resolver, words, 0, "Cannot get origin device")?;
    let store = look_up_device(args.resolver, words, 1, "Cannot get COW device")?;
    if is_same_disk(&origin, &store) {
        return Err(TargetError::new("COW device cannot be the same as origin device").at(1));
    }
    let (persistent, overflow) = parse_store_type(&words[2])?;
    features.overflow = overflow;
    let chunk = parse_chunk_size(&words[3], persistent, &origin, &store)?;
    if args.start.0 != 0 {
        let error = TargetError::new("a snapshot begins at sector 0").with_errno(EINVAL);
        return Err(error.because("the kernel would read the origin at the sectors of the snapshot's device"));
    }
    Ok(SnapshotTableArgs { origin, store, persistent, chunk, features })
}

/// True if both names lead to the same disk.
pub(super) fn is_same_disk(one: &ResolvedDevice, other: &ResolvedDevice) -> bool {
    is_same_device(&*one.device, &*other.device)
}

fn is_same_device(one: &dyn Device, other: &dyn Device) -> bool {
    let shared_disk_state =
        |device: &dyn Device| device.shared_disk_state().map(std::ptr::from_ref::<SharedDiskState>);
    one.id() == other.id()
        || shared_disk_state(one).is_some() && shared_disk_state(one) == shared_disk_state(other)
}

/// Refuses a snapshot of `len` whose store is stacked on its origin, or the other way round. A copy
/// would otherwise need another copy, or overwrite its own source. `origin_devices` are the devices
/// that copy for the origin. A store may be stacked on the part of the origin beyond the snapshot.
///
/// # Errors
/// EINVAL, with the stacking.
pub(super) fn check_origin_store_not_stacked(
    line: &SnapshotTableArgs,
    len: Sectors,
    origin_devices: &[Arc<MappedDevice>],
) -> Result<(), TargetError> {
    let SnapshotTableArgs { origin, store, .. } = line;
    let on_node = device_stack_contains(&store.device, |device| {
        origin_devices.iter().any(|node| node.id() == device.id())
    });
    let whole = len >= origin.device.limits().size;
    let why = if on_node
        || whole && device_stack_contains(&store.device, |device| is_same_device(device, &*origin.device))
    {
        format!("{} lies on its own origin", store.name)
    } else if device_stack_contains(&origin.device, |device| is_same_device(device, &*store.device)) {
        format!("the origin {} lies on it", origin.name)
    } else {
        return Ok(());
    };
    Err(TargetError::new("COW device cannot be the same as origin device").because(why).at(1))
}

fn look_up_device(
    resolver: &mut dyn DeviceNameResolver,
    words: &[String],
    word: usize,
    text: &str,
) -> Result<ResolvedDevice, TargetError> {
    let refuse =
        |e: udm_dm::DeviceLookupError| TargetError::new(text).with_errno(e.errno).because(e.reason).at(word);
    resolver.get(&words[word]).map_err(refuse)
}

fn parse_snapshot_features(words: &[String]) -> Result<SnapshotFeatures, TargetError> {
    let Some(count) = words.get(4) else { return Ok(SnapshotFeatures::default()) };
    let invalid = |word| TargetError::new("Invalid number of feature arguments").at(word);
    let count = parse_decimal_u64(count).filter(|count| *count <= 2).ok_or_else(|| invalid(4))? as usize;
    let given = &words[5..];
    if given.len() < count {
        return Err(invalid(words.len()));
    }
    let mut features = SnapshotFeatures::default();
    for (at, word) in given[..count].iter().enumerate() {
        match word.to_ascii_lowercase().as_str() {
            "discard_zeroes_cow" => features.discard_zeroes_cow = true,
            "discard_passdown_origin" => features.discard_passdown_origin = true,
            _ => return Err(TargetError::new("Unrecognised feature requested").at(5 + at)),
        }
    }
    if features.discard_passdown_origin && !features.discard_zeroes_cow {
        let text = "discard_passdown_origin feature depends on discard_zeroes_cow";
        return Err(TargetError::new(text).at(5));
    }
    match given.get(count) {
        // The kernel ignores such words.
        Some(word) => Err(invalid(5 + count).because(format!("nothing may follow the features: {word:?}"))),
        None => Ok(features),
    }
}

/// Whether the store is persistent, and whether it may overflow.
fn parse_store_type(word: &str) -> Result<(bool, bool), TargetError> {
    let mut letters = word.chars();
    match letters.next().map(|letter| letter.to_ascii_uppercase()) {
        Some('N') => Ok((false, false)),
        Some('P') => match letters.next() {
            None => Ok((true, false)),
            Some('O' | 'o') => Ok((true, true)),
            Some(_) => Err(exception_store_arg_error(
                format!("Unsupported persistent store option: {}", &word[1..]),
                2,
            )),
        },
        _ => Err(exception_store_arg_error("Exception store type is not P or N", 2)),
    }
}

fn parse_chunk_size(
    word: &str,
    persistent: bool,
    origin: &ResolvedDevice,
    store: &ResolvedDevice,
) -> Result<Option<ChunkSize>, TargetError> {
    let sectors = parse_decimal_u64(word).and_then(|sectors| u32::try_from(sectors).ok());
    let sectors = sectors.ok_or_else(|| exception_store_arg_error("Invalid chunk size", 3))?;
    if sectors == 0 {
        return if persistent { Ok(None) } else { Err(TargetError::new("Chunk size not set").at(3)) };
    }
    let refuse = |why: ChunkSizeError| exception_store_arg_error(why.to_string(), 3);
    let chunk = ChunkSize::new(u64::from(sectors)).map_err(refuse)?;
    for device in [store, origin] {
        chunk.check_blocks(device.device.limits().logical_block).map_err(refuse)?;
    }
    Ok(Some(chunk))
}

/// The default chunk size of a new store.
pub(super) fn default_chunk_size(store: &Arc<dyn Device>) -> ChunkSize {
    let block = u64::from(store.limits().logical_block) / udm_core::SECTOR_SIZE;
    ChunkSize::new(block).map_or(ChunkSize::DEFAULT, |block| block.max(ChunkSize::DEFAULT))
}
