//! The metadata contexts of an export, what clients ask for them, and what they say of blocks.
//!
//! `base:allocation` is everybody's. A device that knows what has changed since an instant
//! ([`udm_core::Device::checkpoints`]) has a `qemu:dirty-bitmap:NAME` for each: QEMU's name for
//! such a map, and its flag. A context that was chosen means that instant for as long as the
//! connection lasts: when what kept it is gone, all is dirty, whatever bears its name by then.

use std::collections::HashSet;
use udm_core::{ChangeStatus, Checkpoint, Device, ExtentKind, Extents, Sector, Sectors};
use udm_wire::nbd::{CONTEXT_ALLOCATION, CONTEXT_DIRTY, STATE_DIRTY, STATE_HOLE, STATE_ZERO};

/// Contexts that one client may choose: each is another part of every answer.
const CHOSEN_MAX: usize = 16;

/// Contexts that are listed at once, so that an answer has an end; who knows the name of one can
/// choose it all the same.
const LISTED_MAX: usize = 1025;

/// A run of sectors, and the flags of a context for them.
pub(super) type FlaggedRun = (Sectors, u32);

/// A metadata context.
#[derive(Clone)]
pub(super) struct MetaContext {
    /// Its number on the wire, once it is chosen.
    pub(super) id: u32,
    kind: ContextKind,
}

/// What it says of blocks.
#[derive(Clone)]
enum ContextKind {
    Allocation,
    Dirty(Checkpoint),
}

impl MetaContext {
    /// Its name.
    pub(super) fn name(&self) -> String {
        match &self.kind {
            ContextKind::Allocation => CONTEXT_ALLOCATION.to_owned(),
            ContextKind::Dirty(since) => format!("{CONTEXT_DIRTY}{}", since.name),
        }
    }

    /// What `device` says of `len` sectors from `from` on: `max` runs at the most, in order, of
    /// which there is one. It may block.
    pub(super) fn ask(&self, device: &dyn Device, from: Sector, len: Sectors, max: usize) -> Vec<FlaggedRun> {
        match &self.kind {
            ContextKind::Allocation => {
                let mut out = Extents::new(max);
                device.extents(from, len, &mut out);
                runs(&out, |content| match content {
                    ExtentKind::Data => 0,
                    ExtentKind::Hole => STATE_HOLE | STATE_ZERO,
                })
            }
            ContextKind::Dirty(since) => {
                let mut out = Extents::new(max);
                device.changed(since, from, len, &mut out);
                runs(&out, |since| if since == ChangeStatus::Changed { STATE_DIRTY } else { 0 })
            }
        }
    }

    /// What is true enough when the device was not asked.
    pub(super) fn unknown(&self) -> u32 {
        match self.kind {
            ContextKind::Allocation => 0,
            ContextKind::Dirty(_) => STATE_DIRTY,
        }
    }
}

fn runs<T: Copy + PartialEq>(found: &Extents<T>, flags: impl Fn(T) -> u32) -> Vec<FlaggedRun> {
    found.list().iter().map(|run| (run.len, flags(run.content))).collect()
}

/// The contexts of `device` that one of `queries` names, numbered from 1. To list, no query at all
/// is a query for all of them, and a namespace (`base:`, `qemu:`, `qemu:dirty-bitmap:`) for those
/// in it.
///
/// # Errors
/// There are more than a client may have.
pub(super) fn match_contexts(
    device: &dyn Device,
    queries: &[String],
    list: bool,
) -> Result<Vec<MetaContext>, &'static str> {
    let wanted: HashSet<&str> = queries.iter().map(String::as_str).collect();
    // Whoever asks for nothing else does not have the device asked.
    let dirty = |query: &&str| CONTEXT_DIRTY.starts_with(query) || query.starts_with(CONTEXT_DIRTY);
    let asks = list && queries.is_empty() || wanted.iter().any(dirty);
    let checkpoints = if asks { device.checkpoints() } else { Vec::new() };
    let all = [ContextKind::Allocation].into_iter().chain(checkpoints.into_iter().map(ContextKind::Dirty));
    let mut found: Vec<MetaContext> = Vec::new();
    for kind in all {
        let context = MetaContext { id: found.len() as u32 + 1, kind };
        let name = context.name();
        let spaces = name.match_indices(':').map(|(at, _)| &name[..=at]).take(2);
        let fits = wanted.contains(name.as_str())
            || list && (queries.is_empty() || spaces.into_iter().any(|space| wanted.contains(space)));
        match (fits, found.len()) {
            (false, _) => {}
            (true, LISTED_MAX) if list => return Err("too many metadata contexts: ask by name"),
            (true, CHOSEN_MAX) if !list => return Err("at most 16 metadata contexts at a time"),
            (true, _) => found.push(context),
        }
    }
    Ok(found)
}

#[cfg(test)]
#[path = "contexts_tests.rs"]
mod tests;
