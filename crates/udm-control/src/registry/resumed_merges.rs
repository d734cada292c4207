//! Merges that an earlier server began, queued for the task that finishes them.

use crate::verbs::snapshot::PendingMerge;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// Queue of merges that an earlier server began.
#[derive(Default)]
pub(crate) struct ResumedMerges {
    waiting: Mutex<VecDeque<PendingMerge>>,
    arrived: Notify,
}

impl ResumedMerges {
    fn waiting(&self) -> MutexGuard<'_, VecDeque<PendingMerge>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds merges that continue from now on.
    pub fn go_on(&self, merges: &[PendingMerge]) {
        if !merges.is_empty() {
            self.waiting().extend(merges.iter().cloned());
            self.arrived.notify_one();
        }
    }

    /// Waits for the next merge. Only one task may call this.
    pub async fn next(&self) -> PendingMerge {
        loop {
            let next = self.waiting().pop_front();
            match next {
                Some(end) => return end,
                None => self.arrived.notified().await,
            }
        }
    }
}
