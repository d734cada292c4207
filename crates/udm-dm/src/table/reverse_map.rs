//! How a bio that comes back from a leg is told its place in the table.

use super::TableEntry;
use super::child_layout::{ChildLayout, TargetDataPath};
use super::run_index::RunIndex;
use crate::stripes::{StripeFailureObserver, StripeLayout};
use std::sync::Arc;
use udm_core::bugs::{self, Bug};
use udm_core::{Bio, BioFlags, Status};

/// What was done to a bio's sector on its way to a leg, by where it is there.
pub(super) enum ReverseMap {
    /// It was made larger by so much, modulo 2^64, wherever it is.
    Whole(u64),
    /// By what its run says.
    Runs {
        /// Where the first begins.
        begin: u64,
        /// Of sectors from there on.
        index: RunIndex,
        shifts: Box<[u64]>,
    },
    /// The leg is a stripe.
    ReverseStripe(ReverseStripe),
}

/// A stripe of a striped target.
pub(super) struct ReverseStripe {
    layout: StripeLayout,
    by_shifts: bool,
    /// Where it begins on its device.
    begin: u64,
    /// Where its first chunk lies in the table.
    place: u64,
    stripe: usize,
    failures: Arc<dyn StripeFailureObserver>,
}

impl ReverseMap {
    /// Of each leg.
    pub fn of_all(legs: &ChildLayout, entries: &[TableEntry]) -> Vec<ReverseMap> {
        let mut runs = vec![Vec::new(); legs.first.len()];
        for (i, entry) in entries.iter().enumerate() {
            let shift = legs.shift(entries, i);
            let begin = entry.start.0.wrapping_add(shift);
            runs[legs.lines[i].1].push((begin, begin.saturating_add(entry.len.0), shift));
        }
        let back = |(&(target, stripe), runs): (&(usize, usize), _)| match &legs.lines[target].0 {
            TargetDataPath::StripeSet(striped) => ReverseMap::ReverseStripe(ReverseStripe {
                layout: striped.layout,
                by_shifts: striped.layout.is_by_shifts(),
                begin: striped.stripes[stripe].1.0,
                place: entries[target].start.0 + stripe as u64 * striped.layout.chunk(),
                stripe,
                failures: Arc::clone(&striped.failures),
            }),
            _ => ReverseMap::new(runs),
        };
        legs.first.iter().zip(runs).map(back).collect()
    }

    /// Of runs from one sector to another, and what is added in each.
    fn new(mut runs: Vec<(u64, u64, u64)>) -> ReverseMap {
        runs.sort_unstable();
        let (begin, _, shift) = runs[0];
        if runs.iter().all(|run| run.2 == shift) {
            return ReverseMap::Whole(shift);
        }
        let index = RunIndex::new(runs.iter().map(|run| run.1 - begin).collect());
        ReverseMap::Runs { begin, index, shifts: runs.iter().map(|run| run.2).collect() }
    }

    /// Undoes it for bios that came back. Of no use for a flush, which has no place, nor is it
    /// needed: it is a piece.
    #[inline(always)]
    pub fn restore_sectors(&self, bios: &mut [Box<Bio>]) {
        match self {
            ReverseMap::Whole(0) => {}
            ReverseMap::Whole(shift) => {
                for bio in bios.iter_mut().filter(needs_restore) {
                    bio.sector.0 = bio.sector.0.wrapping_sub(*shift);
                }
            }
            _ => self.restore_by_run(bios),
        }
    }

    /// Out of line, so that the way of a bio that was only shifted stays short.
    #[inline(never)]
    fn restore_by_run(&self, bios: &mut [Box<Bio>]) {
        match self {
            ReverseMap::Whole(_) => {}
            ReverseMap::Runs { begin, index, shifts } => {
                for bio in bios.iter_mut().filter(needs_restore) {
                    let run = match bugs::on(Bug::NeighboursOffset) {
                        true => 0,
                        false => index.find(bio.sector.0.wrapping_sub(*begin)),
                    };
                    let shift = shifts.get(run).copied().unwrap_or_default();
                    bio.sector.0 = bio.sector.0.wrapping_sub(shift);
                }
            }
            ReverseMap::ReverseStripe(stripe) if stripe.by_shifts => stripe.restore_sectors::<true>(bios),
            ReverseMap::ReverseStripe(stripe) => stripe.restore_sectors::<false>(bios),
        }
    }
}

/// What was moved; all of them, unless a bug is planted.
fn needs_restore(bio: &&mut Box<Bio>) -> bool {
    bio.status.is_ok() || !bugs::on(Bug::OffsetKeptOnError)
}

impl ReverseStripe {
    #[inline(always)]
    fn restore_sectors<const SHIFTS: bool>(&self, bios: &mut [Box<Bio>]) {
        let ReverseStripe { layout, begin, place, .. } = *self;
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

    /// Kernel `stripe_end_io`: what is not supported, and a read-ahead, says nothing of the device.
    #[cold]
    fn failed(&self, bio: &Bio) {
        if bio.status != Status::NotSupp && !bio.flags.contains(BioFlags::RAHEAD) {
            self.failures.failed(self.stripe);
        }
    }
}
