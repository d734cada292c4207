//! Exclusive locks by name: two concurrent loads of one device open it once, and loads of other
//! devices do not wait.

use crate::wait_hook;
use std::collections::HashSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time limit for a lock. Storage that answers at all does so by then.
const WAIT_MAX: Duration = Duration::from_secs(3);

/// The locked names.
#[derive(Default)]
pub(super) struct NameLocks {
    names: Mutex<HashSet<String>>,
    freed: Condvar,
}

/// Exclusive lock of a name, until dropped.
pub(crate) struct NameLockGuard<'a> {
    alone: &'a NameLocks,
    name: String,
}

impl NameLocks {
    fn names(&self) -> MutexGuard<'_, HashSet<String>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks `name`. `None` if that takes longer than [`WAIT_MAX`].
    pub fn take(&self, name: String) -> Option<NameLockGuard<'_>> {
        let until = Instant::now() + WAIT_MAX;
        let mut names = self.names();
        while names.contains(&name) {
            if wait_hook::has_wait_hook() {
                return None;
            }
            let left = until.checked_duration_since(Instant::now())?;
            names = self.freed.wait_timeout(names, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        names.insert(name.clone());
        Some(NameLockGuard { alone: self, name })
    }
}

impl Drop for NameLockGuard<'_> {
    fn drop(&mut self) {
        self.alone.names().remove(&self.name);
        self.alone.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn one_at_a_time_for_each_name() {
        let (alone, inside) = (NameLocks::default(), AtomicUsize::new(0));
        let _other = alone.take("other".into()).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let _taken = alone.take("x".into()).unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0);
                        inside.fetch_sub(1, Ordering::Relaxed);
                    }
                });
            }
        });
    }
}
