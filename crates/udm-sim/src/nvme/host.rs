//! A host: the blocks that only it writes, and what it expects in them.

use super::disk::DiskContent;
use super::fence::RetryPolicy;
use crate::model::Violation;
use std::collections::BTreeSet;
use udm_core::Nanos;

/// A block of a host.
#[derive(Clone, Debug, Default)]
pub(super) struct BlockModel {
    /// The last acknowledged write.
    certain: u64,
    /// Later writes without an answer: each may have landed or not.
    uncertain: Vec<u64>,
    /// A request for the block is in flight.
    pub(super) is_busy: bool,
    /// Lost associations, not fenced yet, that have sent a write of the block.
    waits_for: BTreeSet<usize>,
}

impl BlockModel {
    /// True if the host may send a write of the block.
    pub(super) fn may_write(&self) -> bool {
        !self.is_busy && self.waits_for.is_empty()
    }

    /// True if a write of the block has to be repeated.
    pub(super) fn must_repeat(&self) -> bool {
        self.may_write() && !self.uncertain.is_empty()
    }

    pub(super) fn is_settled(&self) -> bool {
        !self.is_busy && self.waits_for.is_empty()
    }

    /// Sends a write.
    pub(super) fn write(&mut self, stamp: u64) {
        self.is_busy = true;
        self.uncertain.push(stamp);
    }

    /// The answer to a write: done, or refused without an effect.
    pub(super) fn written(&mut self, stamp: u64, is_done: bool, disk: &mut DiskContent) {
        self.is_busy = false;
        if is_done {
            let older = self.uncertain.drain(..).chain([self.certain]);
            disk.replaced.extend(older.filter(|other| *other != stamp && *other != 0));
            self.certain = stamp;
        } else {
            self.uncertain.retain(|other| *other != stamp);
            disk.replaced.insert(stamp);
        }
    }

    /// What a read that is sent now may return.
    pub(super) fn read(&mut self) -> Vec<u64> {
        self.is_busy = true;
        self.uncertain.iter().copied().chain([self.certain]).collect()
    }

    pub(super) fn was_read(&mut self, allowed: &[u64], stamp: u64) -> Result<(), Violation> {
        self.is_busy = false;
        match allowed.contains(&stamp) {
            true => Ok(()),
            false => Err(format!("a read returns {stamp:#x}, expected one of {allowed:x?}")),
        }
    }

    /// The association of a request of the block was lost.
    pub(super) fn lose(&mut self, association: usize, is_write: bool) {
        self.is_busy = false;
        if is_write {
            self.waits_for.insert(association);
        }
    }

    /// The host may repeat the writes of a lost association.
    pub(super) fn fenced(&mut self, association: usize) {
        self.waits_for.remove(&association);
    }
}

/// A host.
pub(super) struct SimHost {
    pub(super) name: String,
    pub(super) policy: RetryPolicy,
    pub(super) keep_alive: Nanos,
    /// First block of the host on the disk.
    pub(super) first: usize,
    pub(super) blocks: Vec<BlockModel>,
}
