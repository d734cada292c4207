//! The clones of the state folder that have not returned, or not completely: why, and when they are
//! tried again.

use crate::state_folder::clones::CloneRecord;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// The first pause before an attempt, and the longest. It doubles, because an attempt may wait for
/// a server that does not answer.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// A clone that waits.
#[derive(Clone)]
pub(crate) struct WaitingClone {
    pub record: CloneRecord,
    /// Why it waits, in one line.
    pub why: String,
    /// True if its device is served with a stand-in of the source.
    pub is_served: bool,
    pause: Duration,
    retry_at: Instant,
}

/// The clones that wait, by the identifiers of their records.
#[derive(Default)]
pub(crate) struct WaitingClones {
    waiting: Mutex<HashMap<String, WaitingClone>>,
    changed: Notify,
}

impl WaitingClones {
    fn waiting(&self) -> MutexGuard<'_, HashMap<String, WaitingClone>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The clone waits, or waits on. A new reason is logged.
    pub(super) fn wait(&self, record: &CloneRecord, why: String, is_served: bool) {
        let mut waiting = self.waiting();
        let before = waiting.get(&record.id);
        if before.is_none_or(|before| before.why != why || before.is_served != is_served) {
            let name = &record.name;
            match is_served {
                true => tracing::warn!("{name}: the clone is served without its source: {why}"),
                false => tracing::warn!("{name}: the clone has not returned: {why}"),
            }
        }
        let pause = before.map_or(PAUSE_FIRST, |before| (before.pause * 2).min(PAUSE_MAX));
        let retry_at = Instant::now() + pause;
        waiting.insert(
            record.id.clone(),
            WaitingClone { record: record.clone(), why, is_served, pause, retry_at },
        );
        drop(waiting);
        self.changed.notify_one();
    }

    /// The clone does not wait any more.
    pub(super) fn forget(&self, id: &str) {
        self.waiting().remove(id);
    }

    /// True if the clone is served with a stand-in of its source.
    pub(super) fn waits(&self, id: &str) -> bool {
        self.waiting().get(id).is_some_and(|one| one.is_served)
    }

    /// All that wait, by name.
    pub(super) fn all(&self) -> Vec<WaitingClone> {
        let mut all: Vec<_> = self.waiting().values().cloned().collect();
        all.sort_by(|one, other| one.record.name.cmp(&other.record.name));
        all
    }

    /// Waits until clones are to be tried again, and returns them.
    pub(crate) async fn due(&self) -> Vec<WaitingClone> {
        loop {
            let next = self.waiting().values().map(|one| one.retry_at).min();
            let pause = async {
                match next {
                    Some(next) => tokio::time::sleep_until(next.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.changed.notified() => {}
                () = pause => {
                    let now = Instant::now();
                    let due: Vec<_> = self.all().into_iter().filter(|one| one.retry_at <= now).collect();
                    if !due.is_empty() {
                        return due;
                    }
                }
            }
        }
    }
}
