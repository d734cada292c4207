//! Cross-Controller Reset: a lost controller whose writes wait, and the live controllers of the
//! same subsystem that are asked to reset it.
//!
//! Every live path that supports it is asked at the same time, also the path itself once it has a
//! new controller. So a path that does not answer costs no time, and the first success counts: it
//! says that no command of the lost controller will be executed. If all refuse or fail, the writes
//! wait for their time.

use super::remote_namespace::{Association, RemoteNamespace};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use udm_core::WaitQueue;
use udm_wire::nvme::ControllerInstance;
use udm_wire::nvme::host::HostOptions;
use udm_wire::uri::NvmeUri;

/// A lost controller.
pub(super) struct LostController {
    pub(super) instance: ControllerInstance,
    /// Dropped by the last lane whose writes waited.
    association: Weak<Association>,
    /// Wakes the lanes of the lost controller.
    wait_queue: Arc<WaitQueue>,
    options: HostOptions,
    uri: NvmeUri,
}

impl LostController {
    /// Returns true while writes of the controller wait.
    pub(super) fn is_waited_for(&self) -> bool {
        self.association.upgrade().is_some_and(|association| !association.is_fenced())
    }

    /// Records that no command of the controller will be executed, because `source` has reset it.
    pub(super) fn fence(&self, source: &NvmeUri) {
        let Some(association) = self.association.upgrade() else { return };
        if association.fence() {
            tracing::warn!("{}: the lost controller was reset through {}", self.uri, source.plain());
        }
        self.wait_queue.wake_up();
    }

    /// Logs that `source` cannot fence the controller.
    pub(super) fn log_failure(&self, source: &NvmeUri, why: &str) {
        if self.is_waited_for() {
            tracing::warn!(
                "{}: the lost controller was not reset through {}: {why}",
                self.uri,
                source.plain()
            );
        }
    }

    /// Returns true if a controller of `namespace` is one of the same subsystem and host.
    fn is_reachable_through(&self, namespace: &RemoteNamespace) -> bool {
        let HostOptions { host, host_id, subsystem, .. } = &namespace.options;
        (host, host_id, subsystem) == (&self.options.host, &self.options.host_id, &self.options.subsystem)
    }
}

/// The lost controllers of a process, and the namespaces whose controllers may reset them.
#[derive(Default)]
pub struct ControllerResets {
    lost: Mutex<Vec<Arc<LostController>>>,
    /// Number of controllers lost so far. Admin queues compare it.
    count: AtomicU64,
    /// Wakes the admin queues of all namespaces.
    admin_queues: Mutex<Vec<Weak<WaitQueue>>>,
}

impl ControllerResets {
    /// Adds a namespace whose admin queue waits on `wait_queue`.
    pub(super) fn register(&self, wait_queue: &Arc<WaitQueue>) {
        let mut admin_queues = lock(&self.admin_queues);
        admin_queues.retain(|queue| queue.strong_count() > 0);
        admin_queues.push(Arc::downgrade(wait_queue));
    }

    /// Asks for a reset of the controller of `association`, which `namespace` has lost. Does
    /// nothing if the controller does not say by which numbers it can be reset.
    #[cold]
    pub(super) fn request(&self, association: &Arc<Association>, namespace: &RemoteNamespace) {
        let Some(instance) = association.controller.instance else { return };
        let mut lost = lock(&self.lost);
        lost.retain(|other| other.is_waited_for());
        let is_known = |other: &Arc<LostController>| other.association.ptr_eq(&Arc::downgrade(association));
        if association.is_fenced() || lost.iter().any(is_known) {
            return;
        }
        lost.push(Arc::new(LostController {
            instance,
            association: Arc::downgrade(association),
            wait_queue: Arc::clone(&namespace.wait_queue),
            options: namespace.options.clone(),
            uri: namespace.uri.plain(),
        }));
        drop(lost);
        self.count.fetch_add(1, Ordering::Release);
        for queue in lock(&self.admin_queues).iter().filter_map(Weak::upgrade) {
            queue.wake_up();
        }
    }

    /// Number of controllers lost so far. It is read before [`ControllerResets::lost_beside`].
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// The lost controllers that a controller of `namespace` may reset.
    pub(super) fn lost_beside(&self, namespace: &RemoteNamespace) -> Vec<Arc<LostController>> {
        let lost = lock(&self.lost);
        let reachable =
            |one: &&Arc<LostController>| one.is_waited_for() && one.is_reachable_through(namespace);
        lost.iter().filter(reachable).cloned().collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
