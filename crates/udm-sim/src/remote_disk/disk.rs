//! The disk of simulated servers, with a volatile cache.

use super::model::make_initial_sector_stamp;
use crate::disk::OWN;
use crate::rng::SimRng;
use udm_core::Op;

/// Stamp of each sector: the current content, and the content after a power cut.
pub(crate) struct ServerDisk {
    content: Vec<u64>,
    durable: Vec<u64>,
}

impl ServerDisk {
    pub(crate) fn new(export: usize, sectors: u64) -> ServerDisk {
        let content: Vec<u64> =
            (0..sectors).map(|sector| make_initial_sector_stamp(export, sector)).collect();
        ServerDisk { durable: content.clone(), content }
    }

    /// Adds sectors of zeroes.
    pub(crate) fn grow(&mut self, sectors: usize) {
        self.content.resize(self.content.len() + sectors, 0);
        self.durable.resize(self.content.len(), 0);
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
    pub(crate) fn crash(&mut self, chance: &mut SimRng) {
        let all = chance.one_in(2);
        for (content, durable) in self.content.iter_mut().zip(&mut self.durable) {
            if content != durable && (all || chance.one_in(2)) {
                *content = *durable;
            }
            *durable = *content;
        }
    }

    /// Executes a request for the sectors from `first` up to, not including, `end`, with the
    /// written `stamps`. A `durable` one is not cached. Returns the stamps of a read.
    pub(crate) fn carry_out(
        &mut self,
        op: Op,
        (first, end): (u64, u64),
        stamps: &[u64],
        durable: bool,
        chance: &mut SimRng,
    ) -> Vec<u64> {
        match op {
            Op::Read => return (first..end).map(|sector| self.get(sector)).collect(),
            Op::Write => {
                stamps.iter().zip(first..).for_each(|(stamp, sector)| self.put(sector, *stamp, durable));
            }
            Op::WriteZeroes => (first..end).for_each(|sector| self.put(sector, 0, durable)),
            Op::Discard => {
                for sector in first..end {
                    match chance.below(3) {
                        0 => {}
                        1 => self.put(sector, 0, durable),
                        _ => self.put(sector, OWN | 1 << 62 | sector, durable),
                    }
                }
            }
            Op::Flush => self.flush(),
        }
        Vec::new()
    }
}
