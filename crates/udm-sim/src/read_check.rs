//! Check of the data that a read returns.

use crate::environment::Env;
use crate::model::{TrackedRequest, Violation, describe_tracked_request};
use crate::register_model::{SectorRegisterModel, stamp_text};
use crate::stamp;
use crate::table_map::{ERROR, FlakeyRange, ModelTableMap, ZERO};
use crate::tables::FlakeyFault;
use std::sync::Arc;
use udm_core::Bio;

/// Longest read, in sectors, that certainly reaches a target in one piece.
const WHOLE_MAX: u64 = 8;

/// Compares the data of a read with the content that each sector may have.
///
/// # Errors
/// The first sector that differs.
pub(crate) fn check_read_data(
    cells: &mut SectorRegisterModel,
    r: &TrackedRequest,
    bio: &Bio,
    env: &Env,
    compared: &mut u64,
) -> Result<(), Violation> {
    let now = env.ending();
    let mut wrong = None;
    let maps = || r.map.iter().chain(&r.more);
    for (nr, map) in maps().enumerate() {
        wrong = None;
        stamp::for_each_sector(&bio.data, |i, bytes| {
            if wrong.is_some() {
                return;
            }
            *compared += 1;
            let sector = r.sector + i;
            let cell = map.cell(sector);
            let got = stamp::read_sector_stamp(bytes);
            let fine = match (cell, got) {
                (ERROR, _) => false,
                (_, None) if may_have_corrupt_bytes(map, sector, cell, cells, env) => {
                    let almost_of = stamp::read_damaged_sector_stamp(bytes);
                    almost_of
                        .is_some_and(|s| if cell == ZERO { s == 0 } else { cells.allows(cell, s, r.start) })
                }
                (_, None) => false,
                (ZERO, Some(s)) => s == 0,
                (cell, Some(s)) => {
                    let fine = cells.allows(cell, s, r.start);
                    if fine && nr == 0 && r.more.is_empty() {
                        cells.seen(cell, s, r.start, now);
                    }
                    fine
                }
            };
            if !fine {
                wrong = Some((i, cell, got));
            }
        });
        if wrong.is_none() {
            return check_corruption(r, bio);
        }
    }
    let Some((i, cell, got)) = wrong else { return Ok(()) };
    let place = match cell {
        ZERO => "must read as zeroes".to_string(),
        ERROR => "can only fail".to_string(),
        cell => {
            let (disk, sector) = cells.place(cell);
            format!("is sector {sector} of disk {disk}, which may hold{}", cells.describe(cell))
        }
    };
    let got = got.map_or_else(|| "mixed content".to_string(), stamp_text);
    Err(format!("{} returned {got} for its sector {i}, which {place}", describe_tracked_request(r)))
}

/// True if a few bytes may differ from the data written, because a target changes reads or changed
/// writes.
fn may_have_corrupt_bytes(
    map: &ModelTableMap,
    sector: u64,
    cell: u32,
    cells: &SectorRegisterModel,
    env: &Env,
) -> bool {
    let changes = |l: &FlakeyRange| l.flaw != FlakeyFault::DropWrites && l.covers(sector);
    map.lossy.iter().any(changes) || (cell < ERROR && env.disks[cells.place(cell).0].tainted)
}

/// Checks that a target that corrupts a byte of every read has done so.
fn check_corruption(r: &TrackedRequest, bio: &Bio) -> Result<(), Violation> {
    let maps: Vec<&Arc<ModelTableMap>> = r.map.iter().chain(&r.more).collect();
    let [map] = maps[..] else { return Ok(()) };
    let whole = |l: &&FlakeyRange| {
        l.always && r.len <= WHOLE_MAX && l.start <= r.sector && r.sector + r.len <= l.start + l.len
    };
    let Some(FlakeyRange { flaw: FlakeyFault::CorruptByte(nth, false, value), .. }) =
        map.lossy.iter().find(whole)
    else {
        return Ok(());
    };
    let got = bio.data.iter().flat_map(|piece| piece.iter()).nth(*nth as usize - 1);
    match got.is_none_or(|got| got == value) {
        true => Ok(()),
        false => Err(format!("{} came back with byte {nth} unchanged", describe_tracked_request(r))),
    }
}
