//! A server in this process, with all its files in a private folder.

use crate::serve::descriptors;
use anyhow::{Context, Result};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use udm_backends::BackendDeviceRegistry;
use udm_backends::nbd::BlockingNbdClient;
use udm_control::api;
use udm_control::exports::{DeviceExporter, ExportOptions};
use udm_control::registry::BaseDir;
use udm_control::verbs::{CancelToken, snapshot};
use udm_control::{DeviceRegistry, verbs};
use udm_core::SECTOR_SIZE;
use udm_frontends::nbd::{Exports, ListenAddress, NbdServer, NbdServerLimits};
use udm_object::ObjectClient;
use udm_runtime::{CoreOptions, Runtime, RuntimeOptions};
use udm_wire::uri::{NbdAddress, NbdUri};

/// Maximum number of cores.
const CORES_MAX: usize = 2;

/// Maximum time of the shutdown.
const END_MAX: Duration = Duration::from_secs(10);

/// Maximum time until the server has noticed that a client has disconnected.
const LEAVE_MAX: Duration = Duration::from_secs(10);

/// The server and its folder. Dropping it ends the server and removes the folder.
pub(super) struct DemoServer {
    folder: TempDir,
    pub registry: Arc<DeviceRegistry>,
    running: Option<(NbdServer, Runtime)>,
}

impl DemoServer {
    /// Creates an empty folder and a server without devices.
    pub fn start() -> Result<DemoServer> {
        descriptors::raise_open_file_limit();
        let folder = super::create_demo_temp_folder()?;
        let count = std::thread::available_parallelism().map_or(1, usize::from).min(CORES_MAX);
        let spin_max = CoreOptions::default().spin_max;
        let options = RuntimeOptions { cpus: vec![None; count], poll: false, spin_max };
        let cores = Runtime::start(&options).context("demo: cores")?;
        let core_set = Arc::clone(cores.core_set());
        let backends =
            BackendDeviceRegistry::new(core_set.len()).with_objects(Box::new(ObjectClient::default()));
        let registry = DeviceRegistry::with_opener(core_set.clone(), core_set.len(), Box::new(backends));
        let exports = Arc::new(Exports::new());
        registry.set_exporter(DeviceExporter::new(Arc::clone(&exports), ExportOptions::default()));
        let listen = [ListenAddress::Unix(folder.path().join("nbd.sock"))];
        let server = NbdServer::start(&core_set, exports, NbdServerLimits::default(), &listen)
            .context("demo: NBD server")?;
        Ok(DemoServer { folder, registry, running: Some((server, cores)) })
    }

    /// The private folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The path of the NBD socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("nbd.sock")
    }

    /// The URI of an export.
    pub fn uri(&self, export: &str) -> NbdUri {
        NbdUri::new(NbdAddress::Unix(self.socket()), export)
    }

    /// Connects a client to an export.
    pub fn client(&self, export: &str) -> Result<BlockingNbdClient> {
        Ok(BlockingNbdClient::connect(&self.uri(export), &[])?)
    }

    /// Creates a device that maps a whole image.
    pub fn map(&self, name: &str, image: &Path, bytes: u64) -> Result<()> {
        let word = udm_wire::words::escape_table_word(&image.to_string_lossy()).into_owned();
        let table = format!("0 {} linear {word} 0", bytes / SECTOR_SIZE);
        Ok(verbs::block_on_verb(verbs::create_mapped_device(&self.registry, name, None, Some(&table)))?)
    }

    /// Takes snapshots at one instant; each pair is a snapshot's name and its device. Returns the
    /// time needed.
    pub fn take_snapshots(&self, snapshots: impl Iterator<Item = (String, String)>) -> Result<Duration> {
        let new = |(name, of)| api::NewSnapshot { name, of };
        let body = api::CreateSnapshotsRequest {
            snapshots: snapshots.map(new).collect(),
            store: Some(self.folder().display().to_string()),
            ..Default::default()
        };
        let begin = Instant::now();
        snapshot::create_snapshots(&self.registry, &body, &BaseDir::own(), &CancelToken::default())?;
        Ok(begin.elapsed())
    }

    /// Removes a snapshot, once the server has noticed that its client has disconnected.
    pub fn remove(&self, name: &str) -> Result<()> {
        let end = Instant::now() + LEAVE_MAX;
        loop {
            match snapshot::remove_snapshot(&self.registry, name, false, &CancelToken::default()) {
                Err(e) if e.error.errno == udm_core::errno::EBUSY && Instant::now() < end => {
                    std::thread::sleep(Duration::from_micros(200));
                }
                done => return Ok(done?),
            }
        }
    }

    /// Disk space of all snapshot stores, in bytes.
    pub fn stores_bytes(&self) -> Result<u64> {
        let mut sum = 0;
        for entry in std::fs::read_dir(self.folder.path())? {
            let entry = entry?;
            if entry.path().extension().is_some_and(|extension| extension == "cow") {
                sum += entry.metadata()?.blocks() * SECTOR_SIZE;
            }
        }
        Ok(sum)
    }
}

impl Drop for DemoServer {
    fn drop(&mut self) {
        let Some((server, cores)) = self.running.take() else { return };
        server.stop();
        cores.end();
        let stopping = cores.stop_within(END_MAX);
        while !stopping.is_over() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
