//! Merges that go on with a server that did not begin them, until somebody sees to their end.

use crate::verbs::snapshot::PendingMerge;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct ResumedMerges {
    waiting: Mutex<VecDeque<PendingMerge>>,
    arrived: Notify,
}

impl ResumedMerges {
    fn waiting(&self) -> MutexGuard<'_, VecDeque<PendingMerge>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// These go on from now on.
    pub fn go_on(&self, merges: &[PendingMerge]) {
        if !merges.is_empty() {
            self.waiting().extend(merges.iter().cloned());
            self.arrived.notify_one();
        }
    }

    /// The next that goes on, as soon as there is one. For one caller at a time.
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
