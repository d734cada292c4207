//! Metadata contexts of an export: selection by clients, and block status.
//!
//! Every device has `base:allocation`. A device that tracks changes since a checkpoint
//! ([`udm_core::Device::checkpoints`]) has a `qemu:dirty-bitmap:NAME` for each checkpoint, with
//! QEMU's name and flag. A chosen context means that checkpoint until the connection ends. If the
//! checkpoint is deleted, everything is dirty, even if another checkpoint has its name.

use std::collections::HashSet;
use udm_core::{ChangeTrackingCheckpoint, Device, ExtentKind, Extents, RangeChangeStatus, Sector, Sectors};
use udm_wire::nbd::{CONTEXT_ALLOCATION, CONTEXT_DIRTY, STATE_DIRTY, STATE_HOLE, STATE_ZERO};

/// Limit of contexts that a client may choose: each adds a part to every answer.
const CHOSEN_MAX: usize = 16;

/// Limit of contexts in a list, so that an answer is bounded. A client that knows the name of
/// another context can still choose it.
const LISTED_MAX: usize = 1025;

/// A run of sectors, and the flags of a context for them.
pub(super) type BlockStatusExtent = (Sectors, u32);

/// A metadata context.
#[derive(Clone)]
pub(super) struct MetaContext {
    /// Number of the context on the wire.
    pub(super) id: u32,
    kind: MetaContextKind,
}

/// Kind of a metadata context.
#[derive(Clone)]
enum MetaContextKind {
    Allocation,
    Dirty(ChangeTrackingCheckpoint),
}

impl MetaContext {
    pub(super) fn name(&self) -> String {
        match &self.kind {
            MetaContextKind::Allocation => CONTEXT_ALLOCATION.to_owned(),
            MetaContextKind::Dirty(since) => format!("{CONTEXT_DIRTY}{}", since.name),
        }
    }

    /// Queries `device` for `len` sectors from `from` on. Returns at least one and at most `max`
    /// runs, in order. May block.
    pub(super) fn ask(
        &self,
        device: &dyn Device,
        from: Sector,
        len: Sectors,
        max: usize,
    ) -> Vec<BlockStatusExtent> {
        match &self.kind {
            MetaContextKind::Allocation => {
                let mut out = Extents::new(max);
                device.extents(from, len, &mut out);
                to_block_status_extents(&out, |content| match content {
                    ExtentKind::Data => 0,
                    ExtentKind::Hole => STATE_HOLE | STATE_ZERO,
                })
            }
            MetaContextKind::Dirty(since) => {
                let mut out = Extents::new(max);
                device.changed(since, from, len, &mut out);
                to_block_status_extents(&out, |since| {
                    if since == RangeChangeStatus::Changed { STATE_DIRTY } else { 0 }
                })
            }
        }
    }

    /// Flags that are always valid, for an answer without a query.
    pub(super) fn unknown(&self) -> u32 {
        match self.kind {
            MetaContextKind::Allocation => 0,
            MetaContextKind::Dirty(_) => STATE_DIRTY,
        }
    }
}

fn to_block_status_extents<T: Copy + PartialEq>(
    found: &Extents<T>,
    flags: impl Fn(T) -> u32,
) -> Vec<BlockStatusExtent> {
    found.list().iter().map(|run| (run.len, flags(run.content))).collect()
}

/// Returns the contexts of `device` that match one of `queries`, numbered from 1. For a list, no
/// query means all contexts, and a namespace (`base:`, `qemu:`, `qemu:dirty-bitmap:`) means those
/// in it.
///
/// # Errors
/// More contexts match than a client may have.
pub(super) fn match_contexts(
    device: &dyn Device,
    queries: &[String],
    list: bool,
) -> Result<Vec<MetaContext>, &'static str> {
    let wanted: HashSet<&str> = queries.iter().map(String::as_str).collect();
    // The device is queried only if a dirty bitmap may match.
    let dirty = |query: &&str| CONTEXT_DIRTY.starts_with(query) || query.starts_with(CONTEXT_DIRTY);
    let asks = list && queries.is_empty() || wanted.iter().any(dirty);
    let checkpoints = if asks { device.checkpoints() } else { Vec::new() };
    let all =
        [MetaContextKind::Allocation].into_iter().chain(checkpoints.into_iter().map(MetaContextKind::Dirty));
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

/// The contexts of `device` with these numbers on the wire and names, in this order.
///
/// # Errors
/// One of them does not exist any more, or there are more than a client may have.
pub(super) fn find_contexts(
    device: &dyn Device,
    wanted: &[(u32, String)],
) -> Result<Vec<MetaContext>, String> {
    let names: Vec<String> = wanted.iter().map(|(_, name)| name.clone()).collect();
    let found = match_contexts(device, &names, false)?;
    let one = |(id, name): &(u32, String)| {
        let context = found.iter().find(|context| context.name() == *name);
        let context = context.ok_or_else(|| format!("there is no metadata context {name:?}"))?;
        Ok(MetaContext { id: *id, ..context.clone() })
    };
    wanted.iter().map(one).collect()
}

#[cfg(test)]
#[path = "contexts_tests.rs"]
mod tests;
