//! What is known of an export, for all names and lanes of it.

use super::client::{self, NbdClient, NbdClientError};
use super::fence::{ExportFence, FenceCommandRuns};
use super::sockets::{SocketFactory, SystemSockets};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use udm_core::bugs::{self, Bug};
use udm_core::errno::EINVAL;
use udm_core::{Limits, Nanos, OpenError, Sectors, SharedDiskState};
use udm_wire::nbd::ExportFlags;
use udm_wire::nbd::client::Export;
use udm_wire::uri::{Fence, NbdUri};

/// The servers of a process: one entry to an export.
#[derive(Default)]
pub(crate) struct RemoteExports {
    map: Mutex<HashMap<String, Weak<RemoteExport>>>,
    /// What is one for all names of an export: those that differ in what they say of silence.
    shared_disk_state: Mutex<HashMap<String, Weak<SharedDiskState>>>,
    /// The runs of a command that fences an address, whatever the exports.
    runs: Mutex<HashMap<String, Weak<FenceCommandRuns>>>,
}

impl RemoteExports {
    /// The export that `uri` names: asked for what it is, unless it is in use.
    ///
    /// # Errors
    /// The server can't be reached, or refuses.
    pub(crate) fn open(&self, uri: &NbdUri) -> Result<Arc<RemoteExport>, OpenError> {
        let name = uri.unqueued().to_string();
        if let Some(server) = self.get(&name) {
            return Ok(server);
        }
        let shared = (self.shared_disk_state(uri), self.runs(uri));
        let server = Arc::new(RemoteExport::find(uri, shared).map_err(|error| error.opening(uri))?);
        if server.size() == Sectors::ZERO {
            return Err(OpenError::new(EINVAL, format!("{uri}: an export of less than a block")));
        }
        let mut map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        map.retain(|_, server| server.strong_count() > 0);
        // Another thread may have been faster.
        if let Some(known) = map.get(&name).and_then(Weak::upgrade) {
            return Ok(known);
        }
        map.insert(name, Arc::downgrade(&server));
        Ok(server)
    }

    /// Asks again how large the export is, if it is in use and its server answers.
    pub(crate) fn look(&self, uri: &NbdUri) {
        if let Some(server) = self.get(&uri.unqueued().to_string()) {
            server.look();
        }
    }

    fn shared_disk_state(&self, uri: &NbdUri) -> Arc<SharedDiskState> {
        shared(&self.shared_disk_state, uri.plain().to_string())
    }

    /// The runs of the command that fences the server, for all its exports.
    pub(super) fn runs(&self, uri: &NbdUri) -> Arc<FenceCommandRuns> {
        match &uri.silence.fence {
            Fence::Exec(command) => {
                let mut server = uri.plain();
                server.export.clear();
                shared(&self.runs, format!("{server} {}", command.display()))
            }
            Fence::Closed | Fence::Wait(_) => Arc::default(),
        }
    }

    fn get(&self, name: &str) -> Option<Arc<RemoteExport>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner).get(name)?.upgrade()
    }
}

/// The entry of `name`, made if it is not there or not in use any more.
fn shared<T: Default>(map: &Mutex<HashMap<String, Weak<T>>>, name: String) -> Arc<T> {
    let mut map = map.lock().unwrap_or_else(PoisonError::into_inner);
    map.retain(|_, entry| entry.strong_count() > 0);
    let known = map.entry(name).or_default();
    known.upgrade().unwrap_or_else(|| {
        let entry = Arc::default();
        *known = Arc::downgrade(&entry);
        entry
    })
}

/// Where a server listens.
#[derive(Clone, Debug)]
pub enum ServerAddress {
    /// Over TCP.
    Tcp(SocketAddr),
    /// At this path.
    Unix(PathBuf),
}

/// See the module's documentation.
pub(crate) struct RemoteExport {
    pub(super) uri: NbdUri,
    /// Where it was found when it was opened, at least one; tried in turn.
    pub(super) addresses: Vec<ServerAddress>,
    /// For how long nothing may come of it though a request waits; `None` for ever.
    pub(super) deadline: Option<Nanos>,
    /// Where connections get their sockets from.
    pub(super) sockets: Box<dyn SocketFactory>,
    pub(super) shared_disk_state: Arc<SharedDiskState>,
    /// What it said when it was opened, and what that means.
    export: Export,
    limits: Limits,
    /// In bytes, as of the last look.
    size: AtomicU64,
    /// The last thing that was heard of a connection is that it is lost.
    down: AtomicBool,
    /// Why it was not taken back when it last answered.
    refused: Mutex<Option<String>>,
    /// How many connections have been made: one that works ends the wait of the others.
    made: AtomicU64,
    /// When it last said that it shuts down, in ns; 0 while it has not.
    left: AtomicU64,
    pub(super) fencing: ExportFence,
}

impl RemoteExport {
    /// Looks for it, and asks it for all that has to be known.
    fn find(
        uri: &NbdUri,
        shared: (Arc<SharedDiskState>, Arc<FenceCommandRuns>),
    ) -> Result<RemoteExport, NbdClientError> {
        let mut addresses = client::addresses(uri)?;
        let mut last = NbdClientError::Closed;
        for n in 0..addresses.len() {
            match NbdClient::connect_to(&addresses[n], uri, &[]) {
                Ok(client) => {
                    // Where it answers is tried first from then on.
                    addresses.rotate_left(n);
                    let export = client.into_socket().1;
                    return Ok(RemoteExport::new(
                        uri.clone(),
                        addresses,
                        export,
                        Box::new(SystemSockets),
                        shared,
                    ));
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// One that has said `export`, when it was asked.
    pub(super) fn new(
        uri: NbdUri,
        addresses: Vec<ServerAddress>,
        export: Export,
        sockets: Box<dyn SocketFactory>,
        (shared_disk_state, runs): (Arc<SharedDiskState>, Arc<FenceCommandRuns>),
    ) -> RemoteExport {
        let size = AtomicU64::new(export.size);
        let is_shared = export.flags.contains(ExportFlags::CAN_MULTI_CONN) || uri.multi_conn;
        let limits = Limits { private_flush: !is_shared, ..export.limits() };
        RemoteExport {
            deadline: uri.deadline(),
            uri,
            addresses,
            sockets,
            shared_disk_state,
            export,
            limits,
            size,
            down: AtomicBool::new(false),
            refused: Mutex::default(),
            made: AtomicU64::new(0),
            left: AtomicU64::new(0),
            fencing: ExportFence::new(runs),
        }
    }

    /// Its size and limits, as of the last look.
    pub(super) fn limits(&self) -> Limits {
        Limits { size: self.size(), ..self.limits }
    }

    /// Its size as of the last look, in whole blocks.
    pub(super) fn size(&self) -> Sectors {
        let block = u64::from(self.limits.logical_block);
        // Relaxed: a number that stands for itself.
        Sectors::from_bytes(self.size.load(Relaxed) / block * block)
    }

    /// Whether a connection on which the server says `now` may be used.
    ///
    /// # Errors
    /// It is not what it was: one line.
    pub(super) fn accept(&self, now: &Export) -> Result<(), String> {
        let verdict = self.compare(now);
        *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = verdict.clone().err();
        verdict
    }

    /// Why it was not taken back when it last answered.
    pub(super) fn refused(&self) -> Option<String> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn compare(&self, now: &Export) -> Result<(), String> {
        let (was, size) = (&self.export, self.size.load(Relaxed));
        if now.size != size && !bugs::on(Bug::SizeChangeTaken) {
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
            return Err(format!("it has {} no more", names.join(", ")));
        }
        let (before, after) = (self.limits, now.limits());
        if after.logical_block > before.logical_block || after.max_sectors < before.max_sectors {
            return Err("its block sizes were others".into());
        }
        Ok(())
    }

    /// Asks the server again how large it is; one that does not answer keeps the size that it had.
    /// May wait for ten seconds, unless it is known to be gone.
    pub(super) fn look(&self) {
        if !self.down.load(Relaxed)
            && let Ok(client) = NbdClient::connect(&self.uri, &[])
        {
            self.size.store(client.export().size, Relaxed);
        }
    }

    /// A connection works.
    pub(super) fn is_up(&self) {
        self.made.fetch_add(1, Relaxed);
        if self.down.swap(false, Relaxed) {
            tracing::warn!("{}: connected again", self.uri.plain());
        }
    }

    /// Somebody says that it works: no lane waits before it connects.
    pub(super) fn retry_now(&self) {
        self.made.fetch_add(1, Relaxed);
    }

    /// How many connections have been made, or how often somebody said that the next one will be.
    pub(super) fn made(&self) -> u64 {
        self.made.load(Relaxed)
    }

    /// It has said that it shuts down, on one of its connections.
    pub(super) fn leaves(&self, now: Nanos) {
        self.left.fetch_max(now.0, Relaxed);
    }

    /// True where it has said so of a connection that was `begun` then, or may have.
    #[inline]
    pub(super) fn has_left(&self, begun: Nanos) -> bool {
        self.left.load(Relaxed) > begun.0
    }

    /// A connection was lost, or could not be made. Says so once, until one works again.
    pub(super) fn is_down(&self, why: &str) {
        if !self.down.swap(true, Relaxed) {
            tracing::warn!("{}: {why}", self.uri.plain());
        }
    }

    /// Whether several connections may be used at the same time.
    pub(super) fn takes_many(&self) -> bool {
        self.uri.multi_conn
            || self.export.flags.intersects(ExportFlags::CAN_MULTI_CONN | ExportFlags::READ_ONLY)
    }
}
