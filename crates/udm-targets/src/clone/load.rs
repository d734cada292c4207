//! Opening the metadata: it is read and checked when a table is loaded, or formatted if it is
//! blank.

use super::args::{CloneTableArgs, DiskIdentity};
use super::regions::RegionMap;
use super::state::{CloneOfMetadata, CloneState};
use std::ops::ControlFlow;
use std::sync::Arc;
use udm_core::control_io::{flush_device, read_sector_ranges, read_sectors, write_sectors};
use udm_core::errno::{EBUSY, EINVAL};
use udm_core::{ControlIo, DeviceControlError, SECTOR_SIZE, Sector, Sectors};
use udm_dm::TargetError;
use udm_wire::clone_metadata::{
    BLOCK_LEN, BitmapBlock, CloneHeader, MetadataCopy, SourceFingerprint, newest_bitmap_block,
    read_header_copies,
};

/// A new clone needs zeroes in its metadata and in this much of the device, so that a disk with a
/// file system is not taken for blank.
const BLANK_MIN: Sectors = Sectors((1 << 20) / SECTOR_SIZE);

/// Blocks of the bitmap that are read at a time.
const BLOCKS_AT_ONCE: u64 = 128;

/// Sectors of the pieces of a source whose checksums are kept.
const FINGERPRINT_PIECE: Sectors = Sectors(128);

const BLOCK_SECTORS: Sectors = Sectors(BLOCK_LEN as u64 / SECTOR_SIZE);

/// The error of refused metadata.
fn metadata_error(errno: i32, why: impl Into<String>) -> TargetError {
    TargetError::new("Failed to load metadata").with_errno(errno).because(why).at(0)
}

fn metadata_io_error(error: DeviceControlError) -> TargetError {
    metadata_error(error.errno, error.text)
}

/// Returns the state of the clone on the metadata of `line`: that of the live clone, or one that is
/// read from the metadata.
///
/// # Errors
/// The metadata cannot be read, is damaged, or belongs to another clone. Nothing has been written
/// then.
pub(super) fn load_clone(
    line: &CloneTableArgs,
    len: Sectors,
    io: &dyn ControlIo,
) -> Result<Arc<CloneState>, TargetError> {
    let map = RegionMap::new(len, line.region);
    let owner = CloneOfMetadata::of(&line.metadata);
    let metadata = MetadataReader { line, io, map, owner: &owner };
    metadata.check_device()?;
    if let Some(state) = owner.state() {
        check_takeover(&state, line, len)?;
        if !state.source.is_same(&DiskIdentity::of(&line.source)) {
            metadata.check_source(state.fingerprint, &state.map)?;
        }
        return Ok(state);
    }
    let HeaderCopies { header, intact } = metadata.header()?;
    let state = match header {
        None => metadata.format()?,
        Some(header) => {
            metadata.check_header(header)?;
            let state = metadata.read(header.source)?;
            metadata.check_source(header.source, &state.map)?;
            metadata.repair_header(&header, intact)?;
            state
        }
    };
    let state = Arc::new(state);
    owner.set_state(&state);
    Ok(state)
}

/// Refuses a table that cannot take the live clone over.
fn check_takeover(state: &CloneState, line: &CloneTableArgs, len: Sectors) -> Result<(), TargetError> {
    if state.map.len() != len || state.map.region() != line.region {
        return Err(metadata_error(EINVAL, "the live clone on it has another size or region size"));
    }
    if !state.destination.is_same(&DiskIdentity::of(&line.destination)) {
        let why = format!("the live clone on it has the destination {}", state.destination.name);
        return Err(metadata_error(EBUSY, why));
    }
    Ok(())
}

/// The header of the metadata, and which of its copies are intact.
struct HeaderCopies {
    /// `None` for a blank device.
    header: Option<CloneHeader>,
    intact: [bool; 2],
}

struct MetadataReader<'a> {
    line: &'a CloneTableArgs,
    io: &'a dyn ControlIo,
    /// An empty map of the table.
    map: RegionMap,
    owner: &'a Arc<CloneOfMetadata>,
}

impl MetadataReader<'_> {
    fn check_device(&self) -> Result<(), TargetError> {
        let limits = self.line.metadata.device.limits();
        let needed = self.map.layout().sectors();
        if limits.size.0 < needed {
            let why = format!("the device has {} sectors, and {needed} are needed", limits.size);
            return Err(metadata_error(EINVAL, why));
        }
        if limits.logical_block as usize > BLOCK_LEN {
            let why = format!("blocks of {} bytes are too large: at most {BLOCK_LEN}", limits.logical_block);
            return Err(metadata_error(EINVAL, why));
        }
        Ok(())
    }

    fn read_blocks(&self, at: Sector, blocks: u64) -> Result<Vec<u8>, TargetError> {
        let sectors = Sectors(blocks * BLOCK_SECTORS.0);
        read_sectors(self.io, &self.line.metadata.device, at, sectors).map_err(metadata_io_error)
    }

    fn header(&self) -> Result<HeaderCopies, TargetError> {
        let layout = self.map.layout();
        let blocks = self.read_blocks(layout.header(MetadataCopy::First), 2)?;
        let (first, second) = blocks.split_at(BLOCK_LEN);
        let header = read_header_copies([first, second]);
        let header = header.map_err(|error| metadata_error(EINVAL, error.to_string()))?;
        let intact = [first, second].map(|copy| CloneHeader::decode(copy) == Ok(header));
        Ok(HeaderCopies { header, intact })
    }

    /// Writes a copy of the header that is not intact.
    fn repair_header(&self, header: &CloneHeader, intact: [bool; 2]) -> Result<(), TargetError> {
        for (copy, intact) in MetadataCopy::ALL.into_iter().zip(intact) {
            if !intact {
                tracing::warn!("{}: a copy of the clone's header is written again", self.line.metadata.name);
                self.write_header(header, copy)?;
            }
        }
        Ok(())
    }

    /// Writes a copy of the header, and makes it durable.
    fn write_header(&self, header: &CloneHeader, copy: MetadataCopy) -> Result<(), TargetError> {
        let mut block = vec![0; BLOCK_LEN];
        header.encode(&mut block);
        let device = &self.line.metadata.device;
        write_sectors(self.io, device, self.map.layout().header(copy), &block)
            .and_then(|()| flush_device(self.io, device))
            .map_err(metadata_io_error)
    }

    fn check_header(&self, header: CloneHeader) -> Result<(), TargetError> {
        if header.len == self.map.len() && header.region == self.map.region() {
            return Ok(());
        }
        let why = format!(
            "Region and/or target size don't match the ones in metadata: it has {} sectors in regions of {}",
            header.len, header.region
        );
        Err(metadata_error(EINVAL, why))
    }

    /// Checks that the source is the one with which the clone began, as long as it is needed.
    fn check_source(&self, expected: Option<SourceFingerprint>, map: &RegionMap) -> Result<(), TargetError> {
        let Some(expected) = expected else { return Ok(()) };
        if map.is_complete() || self.line.source.device.is_pinned_version() {
            return Ok(());
        }
        match self.fingerprint() {
            Some(found) if found != expected => {
                let why = format!(
                    "{} is not the source with which this clone began, and {} of {} regions are still there",
                    self.line.source.name,
                    map.count() - map.hydrated(),
                    map.count()
                );
                Err(metadata_error(EINVAL, why))
            }
            _ => Ok(()),
        }
    }

    /// The fingerprint of the source; `None` if the source cannot be read now.
    fn fingerprint(&self) -> Option<SourceFingerprint> {
        let device = &self.line.source.device;
        let piece = Sectors(FINGERPRINT_PIECE.0.min(self.map.len().0));
        let checksum = |at| match read_sectors(self.io, device, at, piece) {
            Ok(bytes) => Some(crc32c::crc32c(&bytes)),
            Err(error) => {
                tracing::warn!("{}: the source cannot be checked: {error}", self.line.source.name);
                None
            }
        };
        // Whole blocks, whatever the block size of the source is.
        let last = (self.map.len().0 - piece.0) / FINGERPRINT_PIECE.0 * FINGERPRINT_PIECE.0;
        Some(SourceFingerprint { first: checksum(Sector(0))?, last: checksum(Sector(last))? })
    }

    /// Formats a blank device.
    fn format(&self) -> Result<CloneState, TargetError> {
        self.check_blank()?;
        let header =
            CloneHeader { region: self.map.region(), len: self.map.len(), source: self.fingerprint() };
        for copy in MetadataCopy::ALL {
            self.write_header(&header, copy)?;
        }
        Ok(self.state(RegionMap::new(self.map.len(), self.map.region()), header.source, 0))
    }

    /// Checks that the device has zeroes.
    fn check_blank(&self) -> Result<(), TargetError> {
        let device = &self.line.metadata.device;
        let size = device.limits().size.0;
        let end = self.map.layout().sectors().max(BLANK_MIN.0).min(size);
        let end = end - end % BLOCK_SECTORS.0;
        let ranges: Vec<(Sector, Sectors)> = (0..end)
            .step_by(BLANK_MIN.0 as usize)
            .map(|at| (Sector(at), Sectors(BLANK_MIN.0.min(end - at))))
            .collect();
        let mut found = None;
        read_sector_ranges(self.io, device, &ranges, |range, bytes| {
            let used = bytes.iter().position(|byte| *byte != 0);
            found = used.map(|at| ranges[range].0.bytes() + at as u64);
            Ok::<_, DeviceControlError>(match found {
                Some(_) => ControlFlow::Break(()),
                None => ControlFlow::Continue(()),
            })
        })
        .map_err(metadata_io_error)?;
        match found {
            None => Ok(()),
            Some(at) => {
                let why = format!(
                    "it has data at byte {at}: a new clone needs zeroes in the first {} bytes",
                    end * SECTOR_SIZE
                );
                Err(metadata_error(EINVAL, why))
            }
        }
    }

    /// Reads the bitmap.
    fn read(&self, source: Option<SourceFingerprint>) -> Result<CloneState, TargetError> {
        let layout = self.map.layout();
        let map = RegionMap::new(self.map.len(), self.map.region());
        let (mut generation, mut durable, mut unequal) = (0, Vec::new(), Vec::new());
        for from in (0..layout.bitmap_blocks()).step_by(BLOCKS_AT_ONCE as usize) {
            let blocks = BLOCKS_AT_ONCE.min(layout.bitmap_blocks() - from);
            let copies = [
                self.read_blocks(layout.bitmap(MetadataCopy::First, from), blocks)?,
                self.read_blocks(layout.bitmap(MetadataCopy::Second, from), blocks)?,
            ];
            for (at, index) in (from..from + blocks).enumerate() {
                let bytes = copies.each_ref().map(|copy| &copy[at * BLOCK_LEN..(at + 1) * BLOCK_LEN]);
                let found = bytes.map(|bytes| BitmapBlock::decode(bytes, index));
                if let Some(error) = found.iter().find_map(|copy| copy.as_ref().err()) {
                    // A power cut leaves this, and a device that loses data.
                    let name = &self.line.metadata.name;
                    tracing::warn!("{name}: one copy of block {index} of the bitmap is not used: {error}");
                }
                let block = newest_bitmap_block(found.clone());
                let block = block.map_err(|error| {
                    let why = format!("both copies of block {index} of the bitmap are damaged: {error}");
                    metadata_error(EINVAL, why)
                })?;
                let is_second = found[1].as_ref() == Ok(&block);
                durable.push(if is_second { MetadataCopy::Second } else { MetadataCopy::First });
                if bytes[0] != bytes[1] {
                    unequal.push(index as usize);
                }
                let Some(block) = block else { continue };
                if !layout.accepts(&block) {
                    return Err(metadata_error(EINVAL, "the bitmap has regions beyond the end"));
                }
                generation = generation.max(block.generation);
                map.load(index, &block.words[..layout.words(index)]);
            }
        }
        let state = self.state(map, source, generation);
        for (block, copy) in durable.into_iter().enumerate() {
            state.set_durable_copy(block, copy);
        }
        // The first commit makes the copies equal again.
        unequal.into_iter().for_each(|block| state.rewrite_block(block));
        Ok(state)
    }

    fn state(&self, map: RegionMap, source: Option<SourceFingerprint>, generation: u64) -> CloneState {
        CloneState::new(self.line, map, source, generation, self.owner)
    }
}
