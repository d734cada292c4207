//! How a bio that comes back from a leg is told its place in the table.

use super::Entry;
use super::index::Index;
use super::legs_of::{Form, LegsOf};
use crate::stripes::{Failures, Layout};
use std::sync::Arc;
use udm_core::bugs::{self, Bug};
use udm_core::{Bio, BioFlags, Status};

/// What was done to a bio's sector on its way to a leg, by where it is there.
pub(super) enum Back {
    /// It was made larger by so much, modulo 2^64, wherever it is.
    Whole(u64),
    /// By what its run says.
    Runs {
        /// Where the first begins.
        begin: u64,
        /// Of sectors from there on.
        index: Index,
        shifts: Box<[u64]>,
    },
    /// The leg is a stripe.
    Stripe(Stripe),
}

/// A stripe of a striped target.
pub(super) struct Stripe {
    layout: Layout,
    by_shifts: bool,
    /// Where it begins on its device.
    begin: u64,
    /// Where its first chunk lies in the table.
    place: u64,
    stripe: usize,
    failures: Arc<dyn Failures>,
}

impl Back {
    /// Of each leg.
    pub fn of_all(legs: &LegsOf, entries: &[Entry]) -> Vec<Back> {
        let mut runs = vec![Vec::new(); legs.first.len()];
        for (i, entry) in entries.iter().enumerate() {
            let shift = legs.shift(entries, i);
            let begin = entry.start.0.wrapping_add(shift);
            runs[legs.lines[i].1].push((begin, begin.saturating_add(entry.len.0), shift));
        }
        let back = |(&(target, stripe), runs): (&(usize, usize), _)| match &legs.lines[target].0 {
            Form::Striped(striped) => Back::Stripe(Stripe {
                layout: striped.layout,
                by_shifts: striped.layout.is_by_shifts(),
                begin: striped.stripes[stripe].1.0,
                place: entries[target].start.0 + stripe as u64 * striped.layout.chunk(),
                stripe,
                failures: Arc::clone(&striped.failures),
            }),
            _ => Back::new(runs),
        };
        legs.first.iter().zip(runs).map(back).collect()
    }

    /// Of runs from one sector to another, and what is added in each.
    fn new(mut runs: Vec<(u64, u64, u64)>) -> Back {
        runs.sort_unstable();
        let (begin, _, shift) = runs[0];
        if runs.iter().all(|run| run.2 == shift) {
            return Back::Whole(shift);
        }
        let index = Index::new(runs.iter().map(|run| run.1 - begin).collect());
        Back::Runs { begin, index, shifts: runs.iter().map(|run| run.2).collect() }
    }

    /// Undoes it for bios that came back. Of no use for a flush, which has no place, nor is it
    /// needed: it is a piece.
    #[inline(always)]
    pub fn undo(&self, bios: &mut [Box<Bio>]) {
        match self {
            Back::Whole(0) => {}
            Back::Whole(shift) => {
                for bio in bios.iter_mut().filter(moved) {
                    bio.sector.0 = bio.sector.0.wrapping_sub(*shift);
                }
            }
            _ => self.undo_by_place(bios),
        }
    }

    /// Out of line, so that the way of a bio that was only shifted stays short.
    #[inline(never)]
    fn undo_by_place(&self, bios: &mut [Box<Bio>]) {
        match self {
            Back::Whole(_) => {}
            Back::Runs { begin, index, shifts } => {
                for bio in bios.iter_mut().filter(moved) {
                    let run = match bugs::on(Bug::NeighboursOffset) {
                        true => 0,
                        false => index.find(bio.sector.0.wrapping_sub(*begin)),
                    };
                    let shift = shifts.get(run).copied().unwrap_or_default();
                    bio.sector.0 = bio.sector.0.wrapping_sub(shift);
                }
            }
            Back::Stripe(stripe) if stripe.by_shifts => stripe.undo::<true>(bios),
            Back::Stripe(stripe) => stripe.undo::<false>(bios),
        }
    }
}

/// What was moved; all of them, unless a bug is planted.
fn moved(bio: &&mut Box<Bio>) -> bool {
    bio.status.is_ok() || !bugs::on(Bug::OffsetKeptOnError)
}

impl Stripe {
    #[inline(always)]
    fn undo<const SHIFTS: bool>(&self, bios: &mut [Box<Bio>]) {
        let Stripe { layout, begin, place, .. } = *self;
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
