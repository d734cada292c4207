//! Opening a log: it is read and checked when a table is loaded, or made if the device is blank.

use super::{MirrorLog, MirrorOfLog};
use crate::clone::mirror::args::{LogStart, MirrorLogArgs, MirrorTableArgs};
use std::sync::Arc;
use udm_core::control_io::{flush_device, read_sectors, write_sectors};
use udm_core::errno::{EBUSY, EINVAL, EIO, ENOSPC};
use udm_core::{ControlIo, DeviceControlError, SECTOR_SIZE, Sector, Sectors};
use udm_dm::TargetError;
use udm_wire::mirror_log::{
    HEADERS_LEN, MirrorLogHeader, MirrorLogLayout, MirrorLogLeg, MirrorLogOwner, UNIT, UNIT_LEN,
};

/// A new log needs zeroes at its place and in this much of the device, so that a disk with a file
/// system is not taken for blank.
const BLANK_MIN: Sectors = Sectors((64 << 10) / SECTOR_SIZE);

/// Sectors that are read or written at a time.
const PIECE: u64 = (1 << 20) / SECTOR_SIZE;

fn log_error(errno: i32, why: impl Into<String>) -> TargetError {
    TargetError::new("Error creating mirror dirty log").with_errno(errno).because(why).at(2)
}

fn log_io_error(error: DeviceControlError) -> TargetError {
    log_error(error.errno, error.text)
}

/// Returns the log of `line`: that of the live mirror, or one that is read or made.
///
/// # Errors
/// The log cannot be read, is damaged, or belongs to another mirror. Nothing has been written then.
pub(in crate::clone::mirror) fn load_log(
    line: &MirrorTableArgs,
    log: &MirrorLogArgs,
    len: Sectors,
    io: &dyn ControlIo,
) -> Result<Arc<MirrorLog>, TargetError> {
    let regions = len.0.div_ceil(line.region.0);
    let layout = MirrorLogLayout::new(regions);
    let limits = log.device.device.limits();
    if limits.size < layout.sectors() {
        let (has, needs) = (limits.size.bytes(), layout.sectors().bytes());
        let why = format!("{} has {has} bytes, and the log needs {needs}", log.device.name);
        return Err(log_error(ENOSPC, why));
    }
    if limits.logical_block as usize > UNIT_LEN {
        let why = format!("blocks of {} bytes are too large: at most {UNIT_LEN}", limits.logical_block);
        return Err(log_error(EINVAL, why));
    }
    let leg = |at: usize| MirrorLogLeg::new(&line.legs[at].device.name, line.legs[at].start);
    let owner = MirrorLogOwner { len, region: line.region, legs: [leg(0), leg(1)] };
    let header = MirrorLogHeader { regions, owner: Some(owner) };
    let shared = MirrorOfLog::of(&log.device);
    let file = LogFile { log, layout, io };
    if let Some(live) = shared.log() {
        if log.start != LogStart::Continue {
            let why = "a live mirror uses it: leave sync and nosync out to continue from it";
            return Err(log_error(EBUSY, why));
        }
        file.check(&live.header, &header)?;
        return Ok(live);
    }
    let (found, is_begun) = file.header(&header)?;
    let clean = match &found {
        // As in the kernel, these words begin a new log.
        Some(_) if log.start != LogStart::Continue => None,
        None if is_begun => None,
        None => {
            file.check_blank()?;
            None
        }
        Some(found) => {
            file.check(found, &header)?;
            Some(file.read(found)?)
        }
    };
    let is_new = clean.is_none();
    let all = if log.start == LogStart::InSync { u64::MAX } else { 0 };
    let clean = clean.unwrap_or_else(|| vec![all; regions.div_ceil(64) as usize]);
    let made = MirrorLog::new(log.device.clone(), header, clean, &shared);
    if is_new || found.as_ref().is_some_and(|found| found.owner.is_none()) {
        file.write(&made, found.is_some())?;
    }
    let made = Arc::new(made);
    shared.set_log(&made);
    Ok(made)
}

struct LogFile<'a> {
    log: &'a MirrorLogArgs,
    layout: MirrorLogLayout,
    io: &'a dyn ControlIo,
}

impl LogFile<'_> {
    fn read_sectors(&self, at: Sector, sectors: Sectors) -> Result<Vec<u8>, TargetError> {
        read_sectors(self.io, &self.log.device.device, at, sectors).map_err(log_io_error)
    }

    /// The header; `None` for a blank device. True if the power was cut while the header `expected`
    /// was written, and only its second sector is there.
    fn header(&self, expected: &MirrorLogHeader) -> Result<(Option<MirrorLogHeader>, bool), TargetError> {
        let bytes = self.read_sectors(Sector(0), UNIT)?;
        let headers = bytes.first_chunk::<HEADERS_LEN>();
        let headers = headers.ok_or_else(|| log_error(EIO, "a short read"))?;
        let (kernel, own) = headers.split_at(HEADERS_LEN / 2);
        if kernel.iter().all(|byte| *byte == 0) && *own == expected.encode()[HEADERS_LEN / 2..] {
            return Ok((None, true));
        }
        let found = MirrorLogHeader::decode(headers).map_err(|error| {
            let name = &self.log.device.name;
            let way = "name another device, or fill it with zeroes to copy all again";
            log_error(EINVAL, format!("{name}: {error}: {way}"))
        });
        Ok((found?, false))
    }

    /// Refuses a log of another mirror.
    fn check(&self, found: &MirrorLogHeader, expected: &MirrorLogHeader) -> Result<(), TargetError> {
        let refuse = |why: String| {
            let name = &self.log.device.name;
            Err(log_error(
                EINVAL,
                format!("{name} is the log of another mirror: {why}; to copy all again, use sync"),
            ))
        };
        if let (Some(found), Some(expected)) = (&found.owner, &expected.owner) {
            if (found.len, found.region) != (expected.len, expected.region) {
                return refuse(format!("it has {} sectors in regions of {}", found.len, found.region));
            }
            for (found, expected) in found.legs.iter().zip(&expected.legs) {
                if found != expected {
                    return refuse(format!("it is of {found}, and not of {expected}"));
                }
            }
        }
        if found.regions != expected.regions {
            return refuse(format!(
                "it has {} regions, and {} are expected",
                found.regions, expected.regions
            ));
        }
        Ok(())
    }

    /// Checks that a device without a log has zeroes.
    fn check_blank(&self) -> Result<(), TargetError> {
        let size = self.log.device.device.limits().size.0;
        let end = self.layout.sectors().0.max(BLANK_MIN.0).min(size / UNIT.0 * UNIT.0);
        for at in (0..end).step_by(PIECE as usize) {
            let bytes = self.read_sectors(Sector(at), Sectors(PIECE.min(end - at)))?;
            if let Some(used) = bytes.iter().position(|byte| *byte != 0) {
                let (name, at) = (&self.log.device.name, at * SECTOR_SIZE + used as u64);
                return Err(log_error(
                    EINVAL,
                    format!("{name} has data at byte {at}: a new log needs zeroes"),
                ));
            }
        }
        Ok(())
    }

    /// Reads the clean regions.
    fn read(&self, header: &MirrorLogHeader) -> Result<Vec<u64>, TargetError> {
        let (size, mut bytes) = (self.layout.sectors().0, Vec::new());
        for at in (0..size).step_by(PIECE as usize) {
            bytes.extend(self.read_sectors(Sector(at), Sectors(PIECE.min(size - at)))?);
        }
        let mut clean = Vec::new();
        let bad = self.layout.decode(&bytes, header.owner.is_some(), |word| clean.push(word));
        if bad > 0 {
            let name = &self.log.device.name;
            tracing::warn!("{name}: {bad} sectors of the log are damaged: their regions are copied again");
        }
        Ok(clean)
    }

    /// Writes a whole log, and makes it durable. On a blank device the header is first: what is not
    /// written yet is dirty. Over another log it is last: until then, this is the other log with
    /// fewer clean regions.
    fn write(&self, log: &MirrorLog, replaces: bool) -> Result<(), TargetError> {
        let device = &self.log.device.device;
        let write = |units: std::ops::Range<u64>| {
            let mut bytes = vec![0; (units.end - units.start) as usize * UNIT_LEN];
            for (unit, out) in units.clone().zip(bytes.as_chunks_mut().0) {
                log.encode_unit(unit, out);
            }
            write_sectors(self.io, device, Sector(units.start * UNIT.0), &bytes).map_err(log_io_error)
        };
        let flush = || flush_device(self.io, device).map_err(log_io_error);
        if !replaces {
            write(0..1)?;
            flush()?;
        }
        let units = self.layout.units();
        for first in (1..units).step_by((PIECE / UNIT.0) as usize) {
            write(first..units.min(first + PIECE / UNIT.0))?;
        }
        flush()?;
        if replaces {
            write(0..1)?;
            flush()?;
        }
        Ok(())
    }
}
