//! Opening a store: its contents are read and checked at load, before anything is written to it.

use super::args::{SnapshotTableArgs, default_chunk_size};
use super::exception_map::{CHUNKS_MAX, ExceptionMap};
use super::record_commits::ExceptionRecordWriter;
use super::state::StoreContents;
use super::store_allocator::{StoreAllocator, StoreChunkLayout};
use std::ops::{ControlFlow, Range};
use udm_core::control_io;
use udm_core::errno::{EINVAL, EIO, ENXIO};
use udm_core::{ControlIo, DeviceControlError, SECTOR_SIZE, Sector, Sectors};
use udm_dm::target::ResolvedDevice;
use udm_dm::{InvalidStoreMark, TargetError};
use udm_wire::cow::{
    ChunkSize, ExceptionStoreError, ExceptionStoreErrorKind, ExceptionStoreHeader, ExceptionStoreLayout,
    ExceptionStoreScanResult, ExceptionStoreScanner, HEADER_LEN, RECORD_LEN, SnapshotException,
};

/// Maximum bytes cleared at a time.
const CLEAR_MAX: u64 = 1 << 20;

/// Number of record areas read at a time.
const AREAS: u64 = 4096;

/// Maximum bytes of a write of few records: a page.
const UNIT_MAX: usize = 4096;

fn snapshot_metadata_error(errno: i32, reason: impl Into<String>) -> TargetError {
    TargetError::new("Failed to read snapshot metadata").with_errno(errno).because(reason.into()).at(1)
}

/// The error of a refused store.
struct StoreLoadError(TargetError);

impl From<DeviceControlError> for StoreLoadError {
    fn from(error: DeviceControlError) -> StoreLoadError {
        StoreLoadError(snapshot_metadata_error(error.errno, error.text))
    }
}

impl From<StoreLoadError> for TargetError {
    fn from(refused: StoreLoadError) -> TargetError {
        refused.0
    }
}

fn store_io_error(error: DeviceControlError) -> TargetError {
    StoreLoadError::from(error).0
}

fn store_format_error(error: &ExceptionStoreError) -> StoreLoadError {
    let errno = if matches!(error.fault, ExceptionStoreErrorKind::Magic(_)) { ENXIO } else { EINVAL };
    StoreLoadError(snapshot_metadata_error(errno, error.to_string()))
}

/// Opens the store of `line`: reads it, or formats it if it is blank.
///
/// # Errors
/// If the store cannot be read or its contents are invalid. Nothing has been written to it then.
pub(super) fn load_store(
    line: &SnapshotTableArgs,
    len: Sectors,
    io: &dyn ControlIo,
    mark: Option<&dyn InvalidStoreMark>,
) -> Result<(ChunkSize, StoreContents), TargetError> {
    // A mapped device without a table has no size yet.
    let origin = line.origin.device.limits().size.max(len);
    let map_of = |chunk: ChunkSize| {
        let chunks = origin.0.div_ceil(u64::from(chunk.sectors()));
        if chunks > CHUNKS_MAX {
            let why = format!(
                "{} has {chunks} chunks of {} sectors, and at most {CHUNKS_MAX} are possible: use larger chunks",
                line.origin.name,
                chunk.sectors()
            );
            return Err(TargetError::new("Couldn't create exception store").because(why).at(3));
        }
        Ok(ExceptionMap::new(chunks))
    };
    if let (false, Some(chunk)) = (line.persistent, line.chunk) {
        let plan = StoreChunkLayout::Transient(chunk.sectors());
        let (map, space) = (map_of(chunk)?, StoreAllocator::new(plan, 0, Vec::new()));
        return Ok((chunk, StoreContents { valid: true, map, space, commits: None }));
    }
    let store = StoreLoadIo { device: &line.store, io, size: line.store.device.limits().size };
    let wanted = line.chunk.unwrap_or_else(|| default_chunk_size(&line.store.device));
    let header = ExceptionStoreHeader::decode(&store.head()?).map_err(|error| store_format_error(&error))?;
    let marked = mark.and_then(InvalidStoreMark::why).filter(|_| header.is_some_and(|header| header.valid));
    if let Some(why) = marked {
        return Err(snapshot_metadata_error(EINVAL, why));
    }
    let (chunk, valid) = match header {
        None => (wanted, true),
        Some(header) => {
            let blocks = [&line.store, &line.origin].map(|device| device.device.limits().logical_block);
            for block in blocks {
                header.chunk.check_blocks(block).map_err(|why| {
                    store_format_error(&ExceptionStoreError {
                        offset: 12,
                        fault: ExceptionStoreErrorKind::ChunkSize(header.chunk.sectors(), why),
                    })
                })?;
            }
            (header.chunk, header.valid)
        }
    };
    if line.chunk.is_some_and(|wanted| wanted != chunk) {
        let (found, wanted) = (chunk.sectors(), wanted.sectors());
        tracing::warn!("chunk size {found} in device metadata overrides table chunk size of {wanted}");
    }
    let layout = ExceptionStoreLayout::new(chunk);
    let map = map_of(chunk)?;
    let (summary, unit) = match (header.is_none(), valid) {
        (true, _) => {
            // Cleared before the store is formatted. Otherwise a crash in between could leave a new
            // store that is still marked invalid.
            mark.map_or(Ok(()), InvalidStoreMark::clear).map_err(|why| snapshot_metadata_error(EIO, why))?;
            store.make(layout)?;
            (None, vec![0; store.unit(layout)])
        }
        (false, false) => {
            tracing::warn!("{}: Snapshot is marked invalid.", line.store.name);
            (None, vec![0; store.unit(layout)])
        }
        (false, true) => {
            let (summary, unit) = store.read(layout, &map)?;
            (Some(summary), unit)
        }
    };
    let (records, begin, holes) = match summary {
        None => (0, 0, Vec::new()),
        Some(found) => (
            found.exceptions,
            layout.data_index(found.next_free),
            filter_data_chunk_ranges(layout, found.holes),
        ),
    };
    let plan = StoreChunkLayout::Persistent(layout);
    let commits = Some(ExceptionRecordWriter::new(layout, records, unit));
    Ok((chunk, StoreContents { valid, map, space: StoreAllocator::new(plan, begin, holes), commits }))
}

/// The parts of `ranges` that are data chunks.
fn filter_data_chunk_ranges(layout: ExceptionStoreLayout, ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let mut found = Vec::with_capacity(ranges.len());
    for mut range in ranges {
        while range.start < range.end {
            let (start, run) = layout.data_chunk(layout.data_index(range.start));
            let end = range.end.min(start + run);
            if start < end {
                found.push(start..end);
            }
            range.start = end.max(start);
        }
    }
    found
}

struct StoreLoadIo<'a> {
    device: &'a ResolvedDevice,
    io: &'a dyn ControlIo,
    size: Sectors,
}

impl StoreLoadIo<'_> {
    /// The block size in bytes.
    fn block(&self) -> usize {
        self.device.device.limits().logical_block as usize
    }

    /// Bytes of a unit of records, the smallest write of records.
    fn unit(&self, layout: ExceptionStoreLayout) -> usize {
        (layout.chunk().bytes() as usize).min(self.block().max(UNIT_MAX))
    }

    /// The bytes of the header.
    fn head(&self) -> Result<Vec<u8>, TargetError> {
        if self.size.bytes() < self.block() as u64 {
            return Err(snapshot_metadata_error(EIO, "the store is shorter than its header"));
        }
        let block = Sectors(self.block() as u64 / SECTOR_SIZE);
        let first = control_io::read_sectors(self.io, &self.device.device, Sector(0), block)
            .map_err(store_io_error)?;
        Ok(first[..HEADER_LEN].to_vec())
    }

    /// Formats a store without exceptions. Its first area is cleared before the header is written.
    /// So no crash leaves a header before old bytes that look like records (the kernel's order
    /// can).
    fn make(&self, layout: ExceptionStoreLayout) -> Result<(), TargetError> {
        let chunk = layout.chunk();
        if layout.chunks(self.size) < 2 {
            let text = format!("a store has at least two chunks of {} sectors", chunk.sectors());
            return Err(snapshot_metadata_error(EIO, text));
        }
        self.clear(layout.area(0) * chunk.bytes()..(layout.area(0) + 1) * chunk.bytes())?;
        let mut block = vec![0; self.block()];
        ExceptionStoreHeader { valid: true, chunk }.encode(&mut block);
        self.write(0, &block)?;
        control_io::flush_device(self.io, &self.device.device).map_err(store_io_error)
    }

    /// Writes zeroes to these bytes and flushes them.
    fn clear(&self, mut bytes: Range<u64>) -> Result<(), TargetError> {
        let zeroes = vec![0; (bytes.end - bytes.start).min(CLEAR_MAX) as usize];
        while bytes.start < bytes.end {
            let len = (bytes.end - bytes.start).min(CLEAR_MAX) as usize;
            self.write(bytes.start, &zeroes[..len])?;
            bytes.start += len as u64;
        }
        control_io::flush_device(self.io, &self.device.device).map_err(store_io_error)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), TargetError> {
        control_io::write_sectors(self.io, &self.device.device, Sector(at / SECTOR_SIZE), bytes)
            .map_err(store_io_error)
    }

    /// Reads the records into `map`. Returns the summary and the unit for the next record.
    fn read(
        &self,
        layout: ExceptionStoreLayout,
        map: &ExceptionMap,
    ) -> Result<(ExceptionStoreScanResult, Vec<u8>), TargetError> {
        let chunk = layout.chunk();
        let chunks = layout.chunks(self.size);
        let mut walk = ExceptionStoreScanner::new(layout, chunks, Some(map.chunks()));
        let sectors = Sectors(u64::from(chunk.sectors()));
        let (mut area, mut last) = (0, Vec::new());
        while walk.next().map_err(|error| store_format_error(&error))?.is_some() {
            let some = (area..area + AREAS).map(|area| layout.area(area)).filter(|at| *at < chunks);
            let ranges: Vec<_> = some.map(|at| (Sector(at * sectors.0), sectors)).collect();
            area += AREAS;
            control_io::read_sector_ranges(self.io, &self.device.device, &ranges, |_, bytes| {
                let take = |exception: SnapshotException| {
                    let is_new = map.get(exception.old).store_chunk().is_none();
                    map.load(exception.old, exception.new);
                    is_new
                };
                walk.take(bytes, take).map_err(|error| store_format_error(&error))?;
                last.clear();
                last.extend_from_slice(bytes);
                // A store that ends here is refused above.
                let ends = !matches!(walk.next(), Ok(Some(_)));
                Ok::<_, StoreLoadError>(if ends { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
            })?;
        }
        let summary = walk.end();
        let unit = self.unit(layout);
        let at = summary.committed as usize * RECORD_LEN;
        let from = at - at % unit;
        let mut tail = last[from..from + unit].to_vec();
        if let Some(leftover) = summary.leftover {
            // A later reader, for example the kernel, could take these bytes for records.
            tracing::warn!("{}: bytes after the records, at byte {leftover}, are cleared", self.device.name);
            tail[at - from..].fill(0);
            let start = layout.area(summary.area) * chunk.bytes();
            self.write(start + from as u64, &tail)?;
            self.clear(start + (from + unit) as u64..start + chunk.bytes())?;
        }
        Ok((summary, tail))
    }
}
