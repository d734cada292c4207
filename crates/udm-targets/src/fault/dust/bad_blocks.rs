//! The set of bad blocks, shared by cores and messages.

use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use udm_core::{Bio, Op, Status};
use udm_dm::TargetError;

/// The state of a bad block: how many more writes of it fail, or [`GOOD`].
pub(super) type BadBlockWriteFailCount = Arc<AtomicU16>;

/// The state of a block that a write has made good.
pub(super) const GOOD: u16 = u16::MAX;

/// The set that lanes use. A change replaces it as a whole.
#[derive(Clone, Default)]
pub(super) struct BadBlockSet {
    /// False in bypass mode: bad blocks do not fail.
    pub(super) enabled: bool,
    /// Sorted by block.
    pub(super) blocks: Vec<(u64, BadBlockWriteFailCount)>,
}

impl BadBlockSet {
    pub(super) fn find(&self, block: u64) -> Option<&BadBlockWriteFailCount> {
        let at = self.blocks.binary_search_by_key(&block, |(block, _)| *block).ok()?;
        Some(&self.blocks[at].1)
    }

    /// The status for `bio`, which covers the blocks `first` to `last`.
    pub(super) fn status_for(&self, bio: &Bio, first: u64, last: u64) -> Status {
        let from = self.blocks.partition_point(|(block, _)| *block < first);
        let hit = self.blocks[from..].iter().take_while(|(block, _)| *block <= last);
        for (_, state) in hit {
            // Relaxed: no other data is published with the state.
            let bad = if bio.op == Op::Read {
                state.load(Ordering::Relaxed) != GOOD
            } else {
                let write = |left: u16| match left {
                    GOOD => None,
                    0 => Some(GOOD),
                    left => Some(left - 1),
                };
                state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, write).is_ok_and(|left| left > 0)
            };
            if bad {
                return Status::IoErr;
            }
        }
        Status::Ok
    }
}

/// The state shared by the control half and the lanes.
#[derive(Default)]
pub(super) struct SharedBadBlocks {
    /// The generation of the set, increased with each change.
    pub(super) generation: AtomicU64,
    set: Mutex<Arc<BadBlockSet>>,
}

impl SharedBadBlocks {
    pub(super) fn lock(&self) -> MutexGuard<'_, Arc<BadBlockSet>> {
        self.set.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Replaces the set with a changed copy, unless `change` returns an error. Blocks that writes
    /// made good are left out of the copy.
    pub(super) fn change<R>(
        &self,
        change: impl FnOnce(&mut BadBlockSet) -> Result<R, TargetError>,
    ) -> Result<R, TargetError> {
        let mut current = self.lock();
        let mut set = BadBlockSet::clone(&current);
        set.blocks.retain(|(_, state)| state.load(Ordering::Relaxed) != GOOD);
        let result = change(&mut set)?;
        *current = Arc::new(set);
        // Release: a lane that sees the generation finds this set, or a later one, under the mutex.
        self.generation.fetch_add(1, Ordering::Release);
        Ok(result)
    }
}
