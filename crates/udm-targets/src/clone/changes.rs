//! Counts the changes of the bitmap, so that a flush knows whether the metadata has those it needs.
//!
//! ```text
//! change:  started += 1;  set the bit;  mark its block;  finished += 1
//! commit:  read finished;  read started;  equal? take the marked blocks ... committed = started
//! flush:   (sees a bit)  read started;  committed >= started? nothing to commit
//! ```
//!
//! A change is counted before its bit can be seen. So a core that relies on a bit waits for a
//! commit that has it. A commit begins only while no change is in progress; it is tried again
//! otherwise. The loom test below tries the interleavings.

#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of the changes.
pub(super) struct ChangeCounter {
    started: AtomicU64,
    finished: AtomicU64,
    /// Number of changes that the metadata has.
    committed: AtomicU64,
}

impl ChangeCounter {
    pub(super) fn new() -> ChangeCounter {
        ChangeCounter {
            started: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            committed: AtomicU64::new(0),
        }
    }

    /// A change begins: its bit is not set yet. Returns true if the metadata had all earlier ones.
    pub(super) fn begin(&self) -> bool {
        let before = self.started.fetch_add(1, Ordering::AcqRel);
        self.is_committed(before)
    }

    /// A change ends: its bit is set and its block is marked. Release: a commit that sees the
    /// number sees both.
    pub(super) fn end(&self) {
        self.finished.fetch_add(1, Ordering::Release);
    }

    /// The number of changes that have begun. A caller that has seen a bit gets a number that
    /// includes its change.
    #[inline(always)]
    pub(super) fn started(&self) -> u64 {
        self.started.load(Ordering::Acquire)
    }

    /// True if the metadata has the first `changes` changes.
    #[inline(always)]
    pub(super) fn is_committed(&self, changes: u64) -> bool {
        self.committed.load(Ordering::Acquire) >= changes
    }

    /// The number of changes that a commit that begins now will have; `None` while a change is in
    /// progress.
    pub(super) fn begin_commit(&self) -> Option<u64> {
        // In this order: if they are equal, all changes had ended when `started` was read.
        let finished = self.finished.load(Ordering::Acquire);
        let started = self.started.load(Ordering::Acquire);
        (finished == started).then_some(started)
    }

    /// The metadata has the first `changes` changes.
    pub(super) fn set_committed(&self, changes: u64) {
        self.committed.fetch_max(changes, Ordering::AcqRel);
    }
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;

    struct Model {
        changes: ChangeCounter,
        bit: AtomicBool,
        marked: AtomicBool,
        durable: AtomicBool,
    }

    /// A core that sees the bit of another core, and finds nothing to commit, finds the bit in the
    /// metadata.
    #[test]
    fn loom_what_is_seen_is_committed_before_a_flush_passes() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let model = Arc::new(Model {
                changes: ChangeCounter::new(),
                bit: AtomicBool::new(false),
                marked: AtomicBool::new(false),
                durable: AtomicBool::new(false),
            });
            let hydrator = {
                let model = Arc::clone(&model);
                loom::thread::spawn(move || {
                    model.changes.begin();
                    model.bit.store(true, Ordering::Release);
                    model.marked.store(true, Ordering::Release);
                    model.changes.end();
                })
            };
            let committer = {
                let model = Arc::clone(&model);
                loom::thread::spawn(move || {
                    let Some(changes) = model.changes.begin_commit() else { return };
                    if model.marked.swap(false, Ordering::AcqRel) && model.bit.load(Ordering::Acquire) {
                        model.durable.store(true, Ordering::Relaxed);
                    }
                    model.changes.set_committed(changes);
                })
            };
            if model.bit.load(Ordering::Acquire) && model.changes.is_committed(model.changes.started()) {
                assert!(model.durable.load(Ordering::Relaxed), "a flush passed without the bit");
            }
            hydrator.join().unwrap();
            committer.join().unwrap();
        });
    }
}
