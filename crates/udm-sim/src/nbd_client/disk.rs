//! The disk of an export, with a volatile cache.

use super::model::make_initial_sector_stamp;
use crate::disk::OWN;
use crate::rng::SimRng;
use udm_wire::nbd::{CommandFlags, ExportFlags, NbdCommand, NbdRequestHeader};

/// Stamp of each sector: the current content, and the content after a power cut.
pub(super) struct ServerDisk {
    content: Vec<u64>,
    durable: Vec<u64>,
}

impl ServerDisk {
    pub(super) fn new(export: usize, sectors: u64) -> ServerDisk {
        let content: Vec<u64> =
            (0..sectors).map(|sector| make_initial_sector_stamp(export, sector)).collect();
        ServerDisk { durable: content.clone(), content }
    }

    fn get(&self, sector: u64) -> u64 {
        self.content[sector as usize]
    }

    /// Writes a sector; if `durable`, past the cache.
    fn put(&mut self, sector: u64, stamp: u64, durable: bool) {
        self.content[sector as usize] = stamp;
        if durable {
            self.durable[sector as usize] = stamp;
        }
    }

    fn flush(&mut self) {
        self.durable.copy_from_slice(&self.content);
    }

    /// Cuts the power. Some of the cached sectors are lost.
    pub(super) fn crash(&mut self, chance: &mut SimRng) {
        let all = chance.one_in(2);
        for (content, durable) in self.content.iter_mut().zip(&mut self.durable) {
            if content != durable && (all || chance.one_in(2)) {
                *content = *durable;
            }
            *durable = *content;
        }
    }

    /// Executes `request` with the written `stamps`. Returns the stamps of a read. `has` are the
    /// flags of the export.
    pub(super) fn carry_out(
        &mut self,
        request: &NbdRequestHeader,
        stamps: &[u64],
        has: ExportFlags,
        chance: &mut SimRng,
    ) -> Vec<u64> {
        let NbdRequestHeader { command, flags, offset, len, .. } = *request;
        let (first, end) = (offset / 512, (offset + len) / 512);
        let durable = flags.contains(CommandFlags::FUA) || !has.contains(ExportFlags::SEND_FLUSH);
        match command {
            NbdCommand::Read => return (first..end).map(|sector| self.get(sector)).collect(),
            NbdCommand::Write => {
                stamps.iter().zip(first..).for_each(|(stamp, sector)| self.put(sector, *stamp, durable));
            }
            NbdCommand::WriteZeroes => (first..end).for_each(|sector| self.put(sector, 0, durable)),
            NbdCommand::Trim => {
                for sector in first..end {
                    match chance.below(3) {
                        0 => {}
                        1 => self.put(sector, 0, durable),
                        _ => self.put(sector, OWN | 1 << 62 | sector, durable),
                    }
                }
            }
            _ => self.flush(),
        }
        Vec::new()
    }
}
