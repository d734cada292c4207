//! A model of the content of a device: written data identifies its offset and write, and the model
//! knows the allowed results of a read.
//!
//! Each 16 bytes of a written sector hold their own byte offset and the generation of the write,
//! big-endian. So wrong data shows its source, and old data shows its age.

use crate::TestRequest;
use std::collections::BTreeMap;
use udm_core::{Op, SECTOR_SIZE};

/// Bytes of one stamp.
pub const STAMP: usize = 16;

const ZEROES: [u8; SECTOR_SIZE as usize] = [0; SECTOR_SIZE as usize];

/// Fills `out`, which begins at byte `offset` of the device, with stamps of `generation`.
pub fn fill_buffer_with_stamps(mut offset: u64, generation: u64, out: &mut [u8]) {
    for stamp in out.as_chunks_mut::<STAMP>().0 {
        *stamp = (u128::from(offset) << 64 | u128::from(generation)).to_be_bytes();
        offset = offset.wrapping_add(STAMP as u64);
    }
}

/// The content of unwritten sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitialContent {
    /// Zeroes. The device stores written data.
    Zeroes,
    /// Always zeroes. Written data is dropped.
    AlwaysZeroes,
    /// 64-bit words that hold their own byte offset; read-only.
    Offsets,
}

/// The allowed content of a sector.
#[derive(Clone, Debug, PartialEq, Eq)]
enum SectorContent {
    Zeroes,
    /// Stamps of one of these generations. If 0 is among them, zeroes are allowed, too.
    OneOf(Vec<u64>),
    Anything,
}

/// The content of a device, as far as its users may rely on it.
#[derive(Clone, Debug)]
pub struct ContentModel {
    fresh: InitialContent,
    /// Runs of sectors by their first sector: end and content. Other sectors are unwritten.
    runs: BTreeMap<u64, (u64, SectorContent)>,
}

impl ContentModel {
    /// The model of an unwritten device.
    #[must_use]
    pub fn new(fresh: InitialContent) -> ContentModel {
        ContentModel { fresh, runs: BTreeMap::new() }
    }

    fn get(&self, sector: u64) -> Option<&SectorContent> {
        let (_, (end, cell)) = self.runs.range(..=sector).next_back()?;
        (sector < *end).then_some(cell)
    }

    fn set(&mut self, start: u64, end: u64, cell: SectorContent) {
        while let Some((&from, &(to, _))) =
            self.runs.range(..end).next_back().filter(|(_, (to, _))| *to > start)
        {
            let Some((_, old)) = self.runs.remove(&from) else { break };
            if from < start {
                self.runs.insert(from, (start, old.clone()));
            }
            if to > end {
                self.runs.insert(end, (to, old));
            }
        }
        self.runs.insert(start, (end, cell));
    }

    /// Records a successful request.
    pub fn done(&mut self, request: &TestRequest) {
        let cell = match request.op {
            Op::Write => SectorContent::OneOf(vec![request.generation]),
            Op::WriteZeroes => SectorContent::Zeroes,
            Op::Discard => SectorContent::Anything,
            Op::Read | Op::Flush => return,
        };
        if self.fresh == InitialContent::Zeroes {
            self.set(request.sector, request.sector + request.sectors, cell);
        }
    }

    /// Records a request that may have taken effect completely, partially or not at all.
    pub fn may_have_written(&mut self, request: &TestRequest) {
        if self.fresh != InitialContent::Zeroes {
            return;
        }
        for sector in request.sector..request.sector + request.sectors {
            let new = match request.op {
                Op::Read | Op::Flush => return,
                Op::Write => Some(request.generation),
                Op::WriteZeroes => Some(0),
                Op::Discard => None,
            };
            let cell = match (self.get(sector).cloned().unwrap_or(SectorContent::Zeroes), new) {
                (SectorContent::Anything, _) | (_, None) => SectorContent::Anything,
                (SectorContent::Zeroes, Some(new)) => SectorContent::OneOf(vec![0, new]),
                (SectorContent::OneOf(mut list), Some(new)) => {
                    list.push(new);
                    SectorContent::OneOf(list)
                }
            };
            self.set(sector, sector + 1, cell);
        }
    }

    /// Compares data that was read from `sector` on. Each `atom` bytes must be from one write.
    ///
    /// # Errors
    /// A description of the first difference.
    pub fn check(&self, sector: u64, bytes: &[u8], atom: usize) -> Result<(), String> {
        for (sector, bytes) in (sector..).zip(bytes.chunks(SECTOR_SIZE as usize)) {
            self.check_sector(sector, bytes, atom).map_err(|what| format!("sector {sector}: {what}"))?;
        }
        Ok(())
    }

    fn check_sector(&self, sector: u64, bytes: &[u8], atom: usize) -> Result<(), String> {
        let offset = sector * SECTOR_SIZE;
        let zeroes = |bytes: &[u8]| {
            // Most sectors are right, and comparing whole ones is quick.
            if *bytes == ZEROES[..bytes.len()] {
                return Ok(());
            }
            let at = bytes.iter().position(|&b| b != 0).unwrap_or_default();
            Err(format!("expected zeroes; at byte {at} {}", describe_found_bytes(&bytes[at..])))
        };
        match (self.fresh, self.get(sector)) {
            (InitialContent::Offsets, _) => {
                let words = (offset..).step_by(8).zip(bytes.chunks(8));
                match words.clone().find(|(offset, word)| offset.to_be_bytes() != **word) {
                    None => Ok(()),
                    Some((offset, word)) => {
                        Err(format!("expected offset {offset}, {}", describe_found_bytes(word)))
                    }
                }
            }
            (_, None | Some(SectorContent::Zeroes)) => zeroes(bytes),
            (_, Some(SectorContent::Anything)) => Ok(()),
            (_, Some(SectorContent::OneOf(list))) => {
                let wanted: Vec<_> = list.iter().map(|&g| build_stamped_sector(offset, g)).collect();
                if wanted.iter().any(|want| want[..bytes.len()] == *bytes) {
                    return Ok(());
                }
                for (i, found) in bytes.chunks(atom).enumerate() {
                    let range = i * atom..i * atom + found.len();
                    if !wanted.iter().any(|want| want[range.clone()] == *found) {
                        let found = describe_found_bytes(found);
                        return Err(format!("expected generation {list:?} at offset {offset}, {found}"));
                    }
                }
                Ok(())
            }
        }
    }
}

/// The content of a sector of `generation`; zeroes if it is 0.
fn build_stamped_sector(offset: u64, generation: u64) -> [u8; SECTOR_SIZE as usize] {
    let mut sector = [0; SECTOR_SIZE as usize];
    if generation != 0 {
        fill_buffer_with_stamps(offset, generation, &mut sector);
    }
    sector
}

/// Describes the begin of `bytes` for an error text.
fn describe_found_bytes(bytes: &[u8]) -> String {
    let word = |at: usize| bytes.get(at..at + 8).map(|b| u64::from_be_bytes(b.try_into().expect("8 bytes")));
    match (word(0), word(8)) {
        (Some(offset), Some(generation)) if offset != 0 && generation < 1 << 32 => {
            format!("found generation {generation} of offset {offset}")
        }
        _ => format!("found {:02x?}", &bytes[..bytes.len().min(STAMP)]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sector(number: u64, generation: u64) -> Vec<u8> {
        let mut bytes = vec![0; 512];
        fill_buffer_with_stamps(number * 512, generation, &mut bytes);
        bytes
    }

    #[test]
    fn the_model_tells_wrong_places_times_and_torn_sectors() {
        let mut model = ContentModel::new(InitialContent::Zeroes);
        model.done(&TestRequest::write(3, 2, 7));
        assert!(model.check(3, &sector(3, 7), 512).is_ok());
        assert!(model.check(3, &sector(4, 7), 512).unwrap_err().contains("generation 7 of offset 2048"));
        assert!(model.check(3, &sector(3, 6), 512).is_err());
        assert!(model.check(5, &sector(5, 7), 512).is_err());
        model.may_have_written(&TestRequest::write(3, 1, 8));
        let mut torn = sector(3, 7);
        torn[256..].copy_from_slice(&sector(3, 8)[256..]);
        assert!(model.check(3, &sector(3, 8), 512).is_ok());
        assert!(model.check(3, &torn, 512).is_err() && model.check(3, &torn, 8).is_ok());
        model.done(&TestRequest::new(Op::WriteZeroes, 3, 1));
        assert!(model.check(3, &[0; 512], 512).is_ok() && model.check(3, &torn, 512).is_err());
    }
}
