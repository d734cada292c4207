//! Control I/O in bytes instead of bios.

use super::ControlIo;
use crate::{Batch, Bio, Buf, Device, DeviceControlError, Op, SECTOR_SIZE, Sector, Sectors};
use std::ops::ControlFlow;
use std::sync::Arc;

/// Maximum length of a request in bytes.
const PIECE_MAX: u64 = 256 << 10;

/// Maximum bytes of one run: the memory of a reader in addition to its result.
const RUN_MAX: u64 = 1 << 20;

/// Bytes of the first run of [`read_sector_ranges`], which may be enough. The size doubles with
/// each run.
const RUN_FIRST: u64 = 64 << 10;

/// Reads `sectors` sectors at `sector`.
///
/// # Errors
/// The errno of the first request that failed, or an error of [`ControlIo::run`].
pub fn read_sectors(
    io: &dyn ControlIo,
    device: &Arc<dyn Device>,
    sector: Sector,
    sectors: Sectors,
) -> Result<Vec<u8>, DeviceControlError> {
    let mut all = Vec::new();
    read_sector_ranges(io, device, &[(sector, sectors)], |_, bytes| {
        all.extend_from_slice(bytes);
        Ok::<_, DeviceControlError>(ControlFlow::Continue(()))
    })?;
    Ok(all)
}

/// Writes `data`, whole sectors, at `sector`, in any order. The data is not yet durable.
///
/// # Errors
/// As [`read_sectors`]. Any part of the data may have been written.
pub fn write_sectors(
    io: &dyn ControlIo,
    device: &Arc<dyn Device>,
    sector: Sector,
    data: &[u8],
) -> Result<(), DeviceControlError> {
    let piece = max_request_bytes(device);
    let mut at = sector;
    for run in data.chunks(RUN_MAX as usize) {
        let mut bios = Vec::new();
        for bytes in run.chunks(piece as usize) {
            let mut buf = Buf::zeroed(bytes.len());
            buf.copy_from_slice(bytes);
            let sectors = Sectors::from_bytes(bytes.len() as u64);
            bios.push(Bio::write(at, sectors, buf.into()));
            at += sectors;
        }
        run_bios_or_first_error(io, device, bios)?;
    }
    Ok(())
}

/// Makes earlier writes durable.
pub fn flush_device(io: &dyn ControlIo, device: &Arc<dyn Device>) -> Result<(), DeviceControlError> {
    let mut bio = Bio::new();
    bio.op = Op::Flush;
    run_bios_or_first_error(io, device, vec![bio]).map(drop)
}

/// Reads `ranges`, several at a time. Calls `each` with the index and data of each range, in order,
/// until it breaks. Uses the memory of the longest range plus 1 MiB. After a break, up to 1 MiB may
/// have been read in vain; less near the begin of the list.
///
/// # Errors
/// As [`read_sectors`], and errors of `each`. `each` is not called after an error.
pub fn read_sector_ranges<E: From<DeviceControlError>>(
    io: &dyn ControlIo,
    device: &Arc<dyn Device>,
    ranges: &[(Sector, Sectors)],
    mut each: impl FnMut(usize, &[u8]) -> Result<ControlFlow<()>, E>,
) -> Result<(), E> {
    let max_request_bytes = max_request_bytes(device);
    let mut pieces = ranges
        .iter()
        .enumerate()
        .flat_map(|(place, &range)| split_range_into_requests(range, max_request_bytes, place))
        .peekable();
    let mut whole: Vec<u8> = Vec::new();
    let mut run_max = RUN_FIRST;
    while pieces.peek().is_some() {
        let (mut bios, mut of, mut bytes) = (Vec::new(), Vec::new(), 0);
        while let Some(piece) = pieces.next_if(|piece| bytes == 0 || bytes + piece.sectors.bytes() <= run_max)
        {
            bytes += piece.sectors.bytes();
            let buf = Buf::zeroed(piece.sectors.bytes() as usize);
            bios.push(Bio::read(piece.sector, piece.sectors, buf.into()));
            of.push(piece);
        }
        run_max = (run_max * 2).min(RUN_MAX);
        for (bio, piece) in run_bios_or_first_error(io, device, bios)?.iter().zip(of) {
            let from = whole.len();
            whole.resize(from + bio.data.len(), 0);
            bio.data.copy_to(&mut whole[from..]);
            if piece.last {
                if each(piece.place, &whole)?.is_break() {
                    return Ok(());
                }
                whole.clear();
            }
        }
    }
    Ok(())
}

/// A part of a range that fits into one request.
struct RequestSizedRange {
    sector: Sector,
    sectors: Sectors,
    /// Index of the range.
    place: usize,
    /// True for the last piece of the range.
    last: bool,
}

fn split_range_into_requests(
    (sector, sectors): (Sector, Sectors),
    max_request_bytes: u64,
    place: usize,
) -> impl Iterator<Item = RequestSizedRange> {
    let most = max_request_bytes / SECTOR_SIZE;
    // An empty range has one piece too, which the device refuses.
    (0..sectors.0.div_ceil(most).max(1)).map(move |i| {
        let from = i * most;
        let len = Sectors(most.min(sectors.0 - from));
        RequestSizedRange {
            sector: Sector(sector.0.saturating_add(from)),
            sectors: len,
            place,
            last: from + len.0 == sectors.0,
        }
    })
}

/// Maximum length of a request in bytes, in whole blocks.
fn max_request_bytes(device: &Arc<dyn Device>) -> u64 {
    let limits = device.limits();
    let block = u64::from(limits.logical_block).max(SECTOR_SIZE);
    let most = limits.max_sectors.min(Sectors::from_bytes(PIECE_MAX)).bytes();
    (most / block * block).max(block)
}

/// Runs `bios`; the first one that failed is the error.
fn run_bios_or_first_error(
    io: &dyn ControlIo,
    device: &Arc<dyn Device>,
    bios: Batch,
) -> Result<Batch, DeviceControlError> {
    let bios = io.run(device, bios)?;
    match bios.iter().find(|bio| !bio.status.is_ok()) {
        None => Ok(bios),
        Some(bio) => {
            let text = match bio.op {
                Op::Read => format!("sector {} can't be read", bio.sector),
                Op::Flush => "it can't be flushed".into(),
                _ => format!("sector {} can't be written", bio.sector),
            };
            Err(DeviceControlError::new(bio.status.errno(), text))
        }
    }
}
