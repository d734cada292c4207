//! What a table has below it: a leg for each device of linear targets, however many of them lie
//! there, and one for each other target. And how a bio that comes back from a leg is told its place
//! in the table.

use super::Entry;
use super::index::Index;
use crate::bugs::{self, Bug};
use std::collections::BTreeMap;
use udm_core::{Bio, DeviceId};

/// The legs of a table.
pub(super) struct LegsOf {
    /// The leg of each target.
    pub of: Vec<usize>,
    /// The first target of each leg.
    pub first: Vec<usize>,
}

/// What a bio's sector was made larger by on its way down, modulo 2^64, by where it is on the leg.
pub(super) enum Shift {
    /// By so much, wherever it is.
    Whole(u64),
    /// By what its run says.
    Runs {
        /// Where the first begins.
        begin: u64,
        /// Of sectors from there on.
        index: Index,
        shifts: Box<[u64]>,
    },
}

impl LegsOf {
    /// Linear targets that overlap on their device have a leg each: there is no telling from its
    /// place of which of them a bio is.
    pub fn new(entries: &[Entry]) -> LegsOf {
        let mut lines: BTreeMap<DeviceId, Vec<(u64, u64)>> = BTreeMap::new();
        let linear = |entry: &Entry| entry.target.as_linear().map(|(device, at)| (device.device.id(), at.0));
        for entry in entries {
            if let Some((device, at)) = linear(entry) {
                lines.entry(device).or_default().push((at, at.saturating_add(entry.len.0)));
            }
        }
        for runs in lines.values_mut() {
            runs.sort_unstable();
        }
        let shared = |device: &DeviceId| lines[device].windows(2).all(|two| two[0].1 <= two[1].0);
        let (mut known, mut legs) = (BTreeMap::new(), LegsOf { of: Vec::new(), first: Vec::new() });
        for (i, entry) in entries.iter().enumerate() {
            let device = linear(entry).map(|(device, _)| device).filter(shared);
            let next = legs.first.len();
            let leg = device.map_or(next, |device| *known.entry(device).or_insert(next));
            if leg == next {
                legs.first.push(i);
            }
            legs.of.push(leg);
        }
        legs
    }

    /// For each leg what is added on the way to it, where target `i` adds `shift(i)`.
    pub fn shifts(&self, entries: &[Entry], shift: impl Fn(usize) -> u64) -> Vec<Shift> {
        let mut lines = vec![Vec::new(); self.first.len()];
        for (i, entry) in entries.iter().enumerate() {
            let begin = entry.start.0.wrapping_add(shift(i));
            lines[self.of[i]].push((begin, begin.saturating_add(entry.len.0), shift(i)));
        }
        lines.into_iter().map(Shift::new).collect()
    }
}

impl Shift {
    /// Of runs from one sector to another, and what is added in each.
    fn new(mut runs: Vec<(u64, u64, u64)>) -> Shift {
        runs.sort_unstable();
        let (begin, _, shift) = runs[0];
        if runs.iter().all(|run| run.2 == shift) {
            return Shift::Whole(shift);
        }
        let index = Index::new(runs.iter().map(|run| run.1 - begin).collect());
        Shift::Runs { begin, index, shifts: runs.iter().map(|run| run.2).collect() }
    }

    /// Undoes it for bios that came back. Of no use for a flush, which has no place, nor is it
    /// needed: it is a piece.
    #[inline(always)]
    pub fn undo(&self, bios: &mut [Box<Bio>]) {
        let moved = |bio: &&mut Box<Bio>| bio.status.is_ok() || !bugs::on(Bug::OffsetKeptOnError);
        match self {
            Shift::Whole(0) => {}
            Shift::Whole(shift) => {
                for bio in bios.iter_mut().filter(moved) {
                    bio.sector.0 = bio.sector.0.wrapping_sub(*shift);
                }
            }
            Shift::Runs { begin, index, shifts } => {
                for bio in bios.iter_mut().filter(moved) {
                    let run = match bugs::on(Bug::NeighboursOffset) {
                        true => 0,
                        false => index.find(bio.sector.0.wrapping_sub(*begin)),
                    };
                    let shift = shifts.get(run).copied().unwrap_or_default();
                    bio.sector.0 = bio.sector.0.wrapping_sub(shift);
                }
            }
        }
    }
}
