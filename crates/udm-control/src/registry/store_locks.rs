//! Locks of stores: changes that concern one store run one after the other, so the last recorded
//! state of a snapshot is the state of the last change.

use crate::state_folder::StableDiskId;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tokio::sync::{Mutex as Lock, OwnedMutexGuard};

/// Locks of stores by name. An entry exists while its lock is in use.
#[derive(Default)]
pub(crate) struct StoreLocks(Mutex<HashMap<String, Weak<Lock<()>>>>);

impl StoreLocks {
    /// Locks `stores`, sorted by name to prevent deadlocks.
    pub async fn lock(&self, stores: &[StableDiskId]) -> Vec<OwnedMutexGuard<()>> {
        let mut names: Vec<&str> = stores.iter().map(StableDiskId::name).collect();
        names.sort_unstable();
        names.dedup();
        let mut guards = Vec::with_capacity(names.len());
        for name in names {
            guards.push(self.of(name).lock_owned().await);
        }
        guards
    }

    fn of(&self, name: &str) -> Arc<Lock<()>> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = locks.get(name).and_then(Weak::upgrade) {
            return lock;
        }
        locks.retain(|_, lock| lock.strong_count() > 0);
        let lock = Arc::default();
        locks.insert(name.to_owned(), Arc::downgrade(&lock));
        lock
    }
}
