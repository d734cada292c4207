//! The namespaces that a process uses.

use super::client::{NvmeClientError, read_association_facts, resolve_addresses};
use super::controller_resets::ControllerResets;
use super::host_identity::host_options;
use super::path_report::NvmePathReport;
use super::remote_namespace::RemoteNamespace;
use crate::stream::SystemSockets;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use udm_core::errno::ENXIO;
use udm_core::{DeviceControlError, SharedDiskState};
use udm_wire::nvme::host::NamespaceFacts;
use udm_wire::uri::NvmeUri;

/// A namespace in use, as its controller described it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownNamespace {
    /// The namespace.
    pub namespace: NamespaceFacts,
    /// Number of I/O queues that the controller grants.
    pub queues: u16,
}

/// The namespaces that a process uses.
pub(crate) struct RemoteNamespaceRegistry {
    /// I/O queues to ask for, unless a URI tells a number.
    queues: u16,
    map: Mutex<HashMap<String, Weak<RemoteNamespace>>>,
    resets: Arc<ControllerResets>,
    /// State shared by all names of a namespace at an address.
    shared_disk_state: Mutex<HashMap<String, Weak<SharedDiskState>>>,
    /// Namespaces that another process has open, by name.
    known: Mutex<HashMap<String, KnownNamespace>>,
}

impl RemoteNamespaceRegistry {
    /// Creates a list for a process with `cores` cores.
    pub(crate) fn new(cores: usize) -> RemoteNamespaceRegistry {
        // A core opens the lanes of a new table before it closes those of the old one. One queue is
        // for path checks, and one is shared by lanes without one.
        let queues = (cores * 2 + 2).min(128) as u16;
        RemoteNamespaceRegistry {
            queues,
            map: Mutex::default(),
            resets: Arc::default(),
            shared_disk_state: Mutex::default(),
            known: Mutex::default(),
        }
    }

    /// Returns the namespace that `uri` names. If it is neither in use nor known, connects to the
    /// controller to read its properties.
    ///
    /// # Errors
    /// The controller cannot be reached, refuses, or cannot be used.
    pub(crate) fn open(&self, uri: &NvmeUri) -> Result<Arc<RemoteNamespace>, DeviceControlError> {
        let known = lock(&self.known).get(&uri.unqueued().to_string()).cloned();
        self.open_as(uri, known)
    }

    /// As [`RemoteNamespaceRegistry::open`], without a connection: the namespace is taken to be
    /// that of `other`, which is in use.
    ///
    /// # Errors
    /// The controller has no address. ENXIO if `other` is not in use.
    pub(crate) fn open_like(
        &self,
        uri: &NvmeUri,
        other: &NvmeUri,
    ) -> Result<Arc<RemoteNamespace>, DeviceControlError> {
        let other = self.get(&other.unqueued().to_string());
        let other = other.ok_or_else(|| DeviceControlError::new(ENXIO, format!("{uri}: no other path")))?;
        self.open_as(uri, Some(other.known_now()))
    }

    fn open_as(
        &self,
        uri: &NvmeUri,
        known: Option<KnownNamespace>,
    ) -> Result<Arc<RemoteNamespace>, DeviceControlError> {
        let name = uri.unqueued().to_string();
        if let Some(namespace) = self.get(&name) {
            return Ok(namespace);
        }
        let found = self.find(&uri.unqueued(), known);
        let namespace = Arc::new(found.map_err(|error| error.opening(uri))?);
        let mut map = lock(&self.map);
        map.retain(|_, namespace| namespace.strong_count() > 0);
        // Another thread may have opened the namespace meanwhile.
        if let Some(known) = map.get(&name).and_then(Weak::upgrade) {
            return Ok(known);
        }
        map.insert(name, Arc::downgrade(&namespace));
        Ok(namespace)
    }

    fn find(&self, uri: &NvmeUri, known: Option<KnownNamespace>) -> Result<RemoteNamespace, NvmeClientError> {
        let options = host_options(uri, uri.queues.unwrap_or(self.queues))?;
        let mut addresses = resolve_addresses(uri)?;
        let known = match known {
            Some(known) => known,
            None => {
                let (at, facts) = read_association_facts(&addresses, &options, uri.deadline())?;
                // The address that answers is tried first from now on.
                addresses.rotate_left(at);
                KnownNamespace { namespace: facts.namespace, queues: facts.queues }
            }
        };
        let shared = self.shared_disk_state(uri);
        let sockets = Box::new(SystemSockets);
        let resets = Arc::clone(&self.resets);
        Ok(RemoteNamespace::new(uri.clone(), addresses, options, known, sockets, shared, resets))
    }

    fn shared_disk_state(&self, uri: &NvmeUri) -> Arc<SharedDiskState> {
        let mut map = lock(&self.shared_disk_state);
        map.retain(|_, state| state.strong_count() > 0);
        let entry = map.entry(uri.plain().to_string()).or_default();
        entry.upgrade().unwrap_or_else(|| {
            let state = Arc::default();
            *entry = Arc::downgrade(&state);
            state
        })
    }

    /// The namespaces in use, by name.
    pub(crate) fn in_use(&self) -> Vec<(String, KnownNamespace)> {
        let namespace = |(name, namespace): (&String, &Weak<RemoteNamespace>)| {
            Some((name.clone(), namespace.upgrade()?.known_now()))
        };
        let mut found: Vec<_> = lock(&self.map).iter().filter_map(namespace).collect();
        found.sort_by(|(one, _), (other, _)| one.cmp(other));
        found
    }

    /// The namespaces in use as users see them, by URI.
    pub(crate) fn reports(&self) -> Vec<NvmePathReport> {
        let all = lock(&self.map);
        let mut reports: Vec<_> = all.values().filter_map(Weak::upgrade).map(|one| one.report()).collect();
        reports.sort_by(|one, other| one.uri.cmp(&other.uri));
        reports
    }

    /// Sets the namespaces that are opened without a connection.
    pub(crate) fn set_known(&self, namespaces: Vec<(String, KnownNamespace)>) {
        *lock(&self.known) = namespaces.into_iter().collect();
    }

    fn get(&self, name: &str) -> Option<Arc<RemoteNamespace>> {
        lock(&self.map).get(name)?.upgrade()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
