//! Restores the sectors of bios that come back from a child.

use super::TableEntry;
use super::child_layout::TargetChildMap;
use super::run_index::SectorRunIndex;
use crate::stripes::{StripeFailureObserver, StripeLayout};
use crate::target::TargetDataPath;
use std::sync::Arc;
use udm_core::{Bio, BioFlags, Status};

/// The change that was made to a bio's sector on its way to a child, by the sector there.
pub(super) enum ReverseMap {
    /// The same offset was added to all sectors, modulo 2^64.
    Whole(u64),
    /// The offset depends on the run of sectors.
    Runs {
        /// The first sector of the first run.
        begin: u64,
        /// Finds the run of a sector, counted from `begin`.
        index: SectorRunIndex,
        shifts: Box<[u64]>,
    },
    /// The child is a stripe.
    Stripe(StripeReverseMap),
}

/// A stripe of a striped target.
pub(super) struct StripeReverseMap {
    layout: StripeLayout,
    by_shifts: bool,
    /// The first sector of the stripe on its device.
    begin: u64,
    /// The first sector of the stripe's first chunk in the table.
    place: u64,
    stripe: usize,
    failures: Arc<dyn StripeFailureObserver>,
}

impl ReverseMap {
    /// The reverse map of each child.
    pub fn of_all(children: &TargetChildMap, entries: &[TableEntry]) -> Vec<ReverseMap> {
        let mut runs = vec![Vec::new(); children.first.len()];
        for (i, entry) in entries.iter().enumerate() {
            let shift = children.shift(entries, i);
            let begin = entry.start.0.wrapping_add(shift);
            runs[children.lines[i].1].push((begin, begin.saturating_add(entry.len.0), shift));
        }
        let back = |(&(target, stripe), runs): (&(usize, usize), _)| match &children.lines[target].0 {
            TargetDataPath::Striped(striped) => ReverseMap::Stripe(StripeReverseMap {
                layout: striped.layout,
                by_shifts: striped.layout.is_by_shifts(),
                begin: striped.stripes[stripe].1.0,
                place: entries[target].start.0 + stripe as u64 * striped.layout.chunk(),
                stripe,
                failures: Arc::clone(&striped.failures),
            }),
            _ => ReverseMap::new(runs),
        };
        children.first.iter().zip(runs).map(back).collect()
    }

    /// Creates a map from runs: begin, end, and the offset that was added.
    fn new(mut runs: Vec<(u64, u64, u64)>) -> ReverseMap {
        runs.sort_unstable();
        let (begin, _, shift) = runs[0];
        if runs.iter().all(|run| run.2 == shift) {
            return ReverseMap::Whole(shift);
        }
        let index = SectorRunIndex::new(runs.iter().map(|run| run.1 - begin).collect());
        ReverseMap::Runs { begin, index, shifts: runs.iter().map(|run| run.2).collect() }
    }

    /// Restores the sectors of bios that came back. The sector of a flush becomes meaningless, but
    /// a flush here is always a fragment.
    #[inline(always)]
    pub fn restore_sectors(&self, bios: &mut [Box<Bio>]) {
        match self {
            ReverseMap::Whole(0) => {}
            ReverseMap::Whole(shift) => {
                for bio in bios {
                    bio.sector.0 = bio.sector.0.wrapping_sub(*shift);
                }
            }
            _ => self.restore_by_run(bios),
        }
    }

    /// Kept out of line, so that the code for a constant offset stays short.
    #[inline(never)]
    fn restore_by_run(&self, bios: &mut [Box<Bio>]) {
        match self {
            ReverseMap::Whole(_) => {}
            ReverseMap::Runs { begin, index, shifts } => {
                for bio in bios {
                    let run = index.find(bio.sector.0.wrapping_sub(*begin));
                    let shift = shifts.get(run).copied().unwrap_or_default();
                    bio.sector.0 = bio.sector.0.wrapping_sub(shift);
                }
            }
            ReverseMap::Stripe(stripe) if stripe.by_shifts => stripe.restore_sectors::<true>(bios),
            ReverseMap::Stripe(stripe) => stripe.restore_sectors::<false>(bios),
        }
    }
}

impl StripeReverseMap {
    #[inline(always)]
    fn restore_sectors<const SHIFTS: bool>(&self, bios: &mut [Box<Bio>]) {
        let StripeReverseMap { layout, begin, place, .. } = *self;
        for bio in bios {
            if bio.op.has_data() {
                let at = bio.sector.0.wrapping_sub(begin);
                bio.sector.0 = place + at + layout.before::<SHIFTS>(at);
            }
            if !bio.status.is_ok() {
                self.failed(bio);
            }
        }
    }

    /// Reports a failure as the kernel does (`stripe_end_io`). An unsupported operation or a failed
    /// read-ahead does not blame the device.
    #[cold]
    fn failed(&self, bio: &Bio) {
        if bio.status != Status::NotSupp && !bio.flags.contains(BioFlags::RAHEAD) {
            self.failures.failed(self.stripe);
        }
    }
}
