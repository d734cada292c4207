//! State of an export, shared by all its names and lanes.

use super::client::{self, BlockingNbdClient, NbdClientError};
use super::fence::{ExportFence, FenceCommandRuns};
use super::sockets::NbdSocketAndFenceOps;
use super::tls::load_tls_client_config;
use crate::stream::{ServerAddress, ServerReachability, SystemSockets};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use udm_core::errno::{EINVAL, ENXIO};
use udm_core::{DeviceControlError, Limits, Nanos, Sectors, SharedDiskState};
use udm_tls::{TlsClientConfig, TlsSession};
use udm_wire::nbd::ExportFlags;
use udm_wire::nbd::client::NegotiatedExportInfo;
use udm_wire::uri::{NbdUri, ServerStoppedProof};

/// The exports that a process uses.
#[derive(Default)]
pub(crate) struct RemoteExports {
    map: Mutex<HashMap<String, Weak<RemoteExport>>>,
    /// State shared by all names of an export. Such names differ in their `deadline` or `fence`.
    shared_disk_state: Mutex<HashMap<String, Weak<SharedDiskState>>>,
    /// Runs of the fence commands, by server address and command.
    runs: Mutex<HashMap<String, Weak<FenceCommandRuns>>>,
    /// Exports that another process has open, by name.
    known: Mutex<HashMap<String, NegotiatedExportInfo>>,
}

impl RemoteExports {
    /// Returns the export that `uri` names. If it is neither in use nor known, connects to the
    /// server to read its properties.
    ///
    /// # Errors
    /// The server cannot be reached, or refuses.
    pub(crate) fn open(&self, uri: &NbdUri) -> Result<Arc<RemoteExport>, DeviceControlError> {
        self.open_as(uri, self.known(&uri.unqueued().to_string()))
    }

    /// As [`RemoteExports::open`], without a connection: the export is taken to be like that of
    /// `other`, which is in use.
    ///
    /// # Errors
    /// The certificates of `uri` cannot be read, or its server has no address. ENXIO if `other` is
    /// not in use.
    pub(crate) fn open_like(
        &self,
        uri: &NbdUri,
        other: &NbdUri,
    ) -> Result<Arc<RemoteExport>, DeviceControlError> {
        let other = self.get(&other.unqueued().to_string());
        let other = other.ok_or_else(|| DeviceControlError::new(ENXIO, format!("{uri}: no other path")))?;
        self.open_as(uri, Some(other.export_now()))
    }

    /// Returns the export that `uri` names. If it is not in use, it is as `known` says, or as its
    /// server says now.
    fn open_as(
        &self,
        uri: &NbdUri,
        known: Option<NegotiatedExportInfo>,
    ) -> Result<Arc<RemoteExport>, DeviceControlError> {
        let name = uri.unqueued().to_string();
        if let Some(server) = self.get(&name) {
            return Ok(server);
        }
        let shared = (self.shared_disk_state(uri), self.runs(uri));
        let found = match known {
            Some(export) => RemoteExport::assume(uri, export, shared),
            None => RemoteExport::find(uri, shared),
        };
        let server = Arc::new(found.map_err(|error| error.opening(uri))?);
        if server.size() == Sectors::ZERO {
            return Err(DeviceControlError::new(EINVAL, format!("{uri}: an export of less than a block")));
        }
        let mut map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        map.retain(|_, server| server.strong_count() > 0);
        // Another thread may have opened the export meanwhile.
        if let Some(known) = map.get(&name).and_then(Weak::upgrade) {
            return Ok(known);
        }
        map.insert(name, Arc::downgrade(&server));
        Ok(server)
    }

    /// Reads the size of the export again, if it is in use and its server answers.
    pub(crate) fn look(&self, uri: &NbdUri) {
        if let Some(server) = self.get(&uri.unqueued().to_string()) {
            server.refresh_size();
        }
    }

    fn shared_disk_state(&self, uri: &NbdUri) -> Arc<SharedDiskState> {
        get_or_create_weak_entry(&self.shared_disk_state, uri.plain().to_string())
    }

    /// Returns the runs of the command that fences the server of `uri`, shared by all its exports.
    pub(super) fn runs(&self, uri: &NbdUri) -> Arc<FenceCommandRuns> {
        match &uri.silence.fence {
            ServerStoppedProof::Exec(command) => {
                let mut server = uri.plain();
                server.export.clear();
                get_or_create_weak_entry(&self.runs, format!("{server} {}", command.display()))
            }
            ServerStoppedProof::Closed | ServerStoppedProof::Wait(_) => Arc::default(),
        }
    }

    /// The exports in use, by name.
    pub(crate) fn in_use(&self) -> Vec<(String, NegotiatedExportInfo)> {
        let map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        let export = |(name, server): (&String, &Weak<RemoteExport>)| {
            Some((name.clone(), server.upgrade()?.export_now()))
        };
        let mut found: Vec<_> = map.iter().filter_map(export).collect();
        found.sort_by(|(one, _), (other, _)| one.cmp(other));
        found
    }

    /// Sets the exports that are opened without a connection.
    pub(crate) fn set_known(&self, exports: Vec<(String, NegotiatedExportInfo)>) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = exports.into_iter().collect();
    }

    fn known(&self, name: &str) -> Option<NegotiatedExportInfo> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    fn get(&self, name: &str) -> Option<Arc<RemoteExport>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner).get(name)?.upgrade()
    }
}

/// Returns the value of `name`; creates it if nobody uses it.
fn get_or_create_weak_entry<T: Default>(map: &Mutex<HashMap<String, Weak<T>>>, name: String) -> Arc<T> {
    let mut map = map.lock().unwrap_or_else(PoisonError::into_inner);
    map.retain(|_, entry| entry.strong_count() > 0);
    let known = map.entry(name).or_default();
    known.upgrade().unwrap_or_else(|| {
        let entry = Arc::default();
        *known = Arc::downgrade(&entry);
        entry
    })
}

/// An export of a server, with the properties from the handshake and the state of its connections.
pub(crate) struct RemoteExport {
    pub(super) uri: NbdUri,
    /// Addresses found when the export was opened, at least one; tried in turn.
    pub(super) addresses: Vec<ServerAddress>,
    /// The longest time without data while a request waits; `None` for no limit.
    pub(super) deadline: Option<Nanos>,
    /// The certificates as they were when the export was opened; `None` without TLS.
    tls: Option<TlsClientConfig>,
    /// Source of sockets for connections.
    pub(super) sockets: Box<dyn NbdSocketAndFenceOps>,
    pub(super) shared_disk_state: Arc<SharedDiskState>,
    /// Export properties when it was opened, and the limits that follow.
    export: NegotiatedExportInfo,
    limits: Limits,
    /// Size in bytes when it was last read.
    size: AtomicU64,
    reachability: ServerReachability,
    /// Reason why the server was refused when it last answered.
    refused: Mutex<Option<String>>,
    /// Time of the last ESHUTDOWN in ns; 0 before the first.
    left: AtomicU64,
    pub(super) fencing: ExportFence,
}

impl RemoteExport {
    /// Connects to the server and reads the properties of the export.
    fn find(
        uri: &NbdUri,
        shared: (Arc<SharedDiskState>, Arc<FenceCommandRuns>),
    ) -> Result<RemoteExport, NbdClientError> {
        let tls = load_tls_client_config(uri)?;
        let mut addresses = client::resolve_server_addresses(uri)?;
        let mut last = NbdClientError::Closed;
        for n in 0..addresses.len() {
            match BlockingNbdClient::connect_to(&addresses[n], uri, &[]) {
                Ok(client) => {
                    // The address that answers is tried first from now on.
                    addresses.rotate_left(n);
                    let export = client.export().clone();
                    let sockets = Box::new(SystemSockets);
                    let found = RemoteExport::new(uri.clone(), addresses, export, sockets, shared);
                    return Ok(RemoteExport { tls, ..found });
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// The properties of the export, with its size when it was last read.
    fn export_now(&self) -> NegotiatedExportInfo {
        NegotiatedExportInfo { size: self.size.load(Relaxed), ..self.export.clone() }
    }

    /// An export as another process or another path knew it. Its lanes connect later, as after a
    /// lost connection.
    fn assume(
        uri: &NbdUri,
        export: NegotiatedExportInfo,
        shared: (Arc<SharedDiskState>, Arc<FenceCommandRuns>),
    ) -> Result<RemoteExport, NbdClientError> {
        let tls = load_tls_client_config(uri)?;
        let addresses = client::resolve_server_addresses(uri)?;
        let assumed = RemoteExport::new(uri.clone(), addresses, export, Box::new(SystemSockets), shared);
        Ok(RemoteExport { tls, ..assumed })
    }

    /// Creates an export for which the server reported `export`.
    pub(super) fn new(
        uri: NbdUri,
        addresses: Vec<ServerAddress>,
        export: NegotiatedExportInfo,
        sockets: Box<dyn NbdSocketAndFenceOps>,
        (shared_disk_state, runs): (Arc<SharedDiskState>, Arc<FenceCommandRuns>),
    ) -> RemoteExport {
        let size = AtomicU64::new(export.size);
        let is_shared = export.flags.contains(ExportFlags::CAN_MULTI_CONN) || uri.multi_conn;
        let limits = Limits { private_flush: !is_shared, ..export.limits() };
        RemoteExport {
            deadline: uri.deadline(),
            tls: None,
            uri,
            addresses,
            sockets,
            shared_disk_state,
            export,
            limits,
            size,
            reachability: ServerReachability::default(),
            refused: Mutex::default(),
            left: AtomicU64::new(0),
            fencing: ExportFence::new(runs),
        }
    }

    /// Begins the TLS session of a connection.
    ///
    /// # Errors
    /// The reason, in one line.
    pub(super) fn begin_tls(&self) -> Result<TlsSession, String> {
        self.tls.as_ref().ok_or("TLS without certificates")?.session()
    }

    /// Limits, and the size when it was last read.
    pub(super) fn limits(&self) -> Limits {
        Limits { size: self.size(), ..self.limits }
    }

    /// Size when it was last read, in whole blocks.
    pub(super) fn size(&self) -> Sectors {
        let block = u64::from(self.limits.logical_block);
        // Relaxed is enough: the number is independent.
        Sectors::from_bytes(self.size.load(Relaxed) / block * block)
    }

    /// Checks whether a connection on which the server reports `now` may be used.
    ///
    /// # Errors
    /// The reason why not, in one line: the export has changed.
    pub(super) fn accept(&self, now: &NegotiatedExportInfo) -> Result<(), String> {
        let verdict = self.compare(now);
        *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = verdict.clone().err();
        verdict
    }

    /// Reason why the server was refused when it last answered.
    pub(super) fn rejection_reason(&self) -> Option<String> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn compare(&self, now: &NegotiatedExportInfo) -> Result<(), String> {
        let (was, size) = (&self.export, self.size.load(Relaxed));
        if now.size != size {
            return Err(format!("its size was {size} bytes and is {} now", now.size));
        }
        let read_only = ExportFlags::READ_ONLY;
        if now.flags.contains(read_only) && !was.flags.contains(read_only) {
            return Err("it was writable and is read-only now".into());
        }
        let needed = ExportFlags::SEND_FLUSH
            | ExportFlags::SEND_FUA
            | ExportFlags::SEND_TRIM
            | ExportFlags::SEND_WRITE_ZEROES
            | ExportFlags::CAN_MULTI_CONN;
        let lost = (was.flags & needed) - now.flags;
        if !lost.is_empty() {
            let names: Vec<_> = lost.iter_names().map(|(name, _)| name).collect();
            return Err(format!("it no longer has {}", names.join(", ")));
        }
        let (before, after) = (self.limits, now.limits());
        if after.logical_block > before.logical_block || after.max_sectors < before.max_sectors {
            return Err("its block sizes have changed".into());
        }
        Ok(())
    }

    /// Reads the size from the server again. If the server does not answer, the size stays. May
    /// block for ten seconds, unless the server is known to be down.
    pub(super) fn refresh_size(&self) {
        if !self.reachability.is_down()
            && let Ok(client) = BlockingNbdClient::connect(&self.uri, &[])
        {
            self.size.store(client.export().size, Relaxed);
        }
    }

    /// Records that a connection works.
    pub(super) fn mark_up(&self) {
        self.reachability.mark_up(&self.uri.plain());
    }

    /// Ends the back-off of all lanes, because an administrator reports that the server works.
    pub(super) fn retry_now(&self) {
        self.reachability.retry_now();
    }

    /// As [`ServerReachability::connections_made`].
    pub(super) fn connections_made(&self) -> u64 {
        self.reachability.connections_made()
    }

    /// Records that the server sent ESHUTDOWN on a connection.
    pub(super) fn note_shutdown(&self, now: Nanos) {
        self.left.fetch_max(now.0, Relaxed);
    }

    /// Returns true if the server sent ESHUTDOWN after `begun`.
    #[inline]
    pub(super) fn was_shut_down(&self, begun: Nanos) -> bool {
        self.left.load(Relaxed) > begun.0
    }

    /// As [`ServerReachability::mark_down`].
    pub(super) fn mark_down(&self, reason: &str, why: &str) {
        self.reachability.mark_down(&self.uri.plain(), reason, why);
    }

    /// Returns whether several connections may be used at the same time.
    pub(super) fn takes_many(&self) -> bool {
        self.uri.multi_conn
            || self.export.flags.intersects(ExportFlags::CAN_MULTI_CONN | ExportFlags::READ_ONLY)
    }
}
