//! A server in this process, with everything it needs in a private folder.

use crate::serve::descriptors;
use anyhow::{Context, Result};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use udm_backends::nbd::NbdClient;
use udm_control::api;
use udm_control::exports::{ExportOptions, Exporter};
use udm_control::registry::BaseDir;
use udm_control::verbs::{CancelToken, snapshot};
use udm_control::{Registry, verbs};
use udm_core::SECTOR_SIZE;
use udm_frontends::nbd::{Exports, ListenAddress, NbdServer, ServerOptions};
use udm_runtime::{CoreOptions, Runtime, RuntimeOptions};
use udm_wire::uri::{NbdAddress, NbdUri};

/// Cores at the most.
const CORES_MAX: usize = 2;

/// How long the end may take.
const END_MAX: Duration = Duration::from_secs(10);

/// How long the server may take to know that a client has gone.
const LEAVE_MAX: Duration = Duration::from_secs(10);

/// The scene. Dropping it ends the server and removes the folder.
pub(super) struct DemoServer {
    folder: TempDir,
    pub registry: Arc<Registry>,
    running: Option<(NbdServer, Runtime)>,
}

impl DemoServer {
    /// An empty folder, and a server without devices.
    pub fn set() -> Result<DemoServer> {
        descriptors::raise();
        let folder = super::folder()?;
        let count = std::thread::available_parallelism().map_or(1, usize::from).min(CORES_MAX);
        let spin_max = CoreOptions::default().spin_max;
        let options = RuntimeOptions { cpus: vec![None; count], poll: false, spin_max };
        let cores = Runtime::start(&options).context("demo: cores")?;
        let cluster = Arc::clone(cores.cluster());
        let registry = Registry::new(cluster.clone(), cluster.len());
        let exports = Arc::new(Exports::new());
        registry.set_exporter(Exporter::new(Arc::clone(&exports), ExportOptions::default()));
        let listen = [ListenAddress::Unix(folder.path().join("nbd.sock"))];
        let server = NbdServer::start(&cluster, exports, ServerOptions::default(), &listen)
            .context("demo: NBD server")?;
        Ok(DemoServer { folder, registry, running: Some((server, cores)) })
    }

    /// Where everything is.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Where clients find the devices.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("nbd.sock")
    }

    /// How an export is reached.
    pub fn uri(&self, export: &str) -> NbdUri {
        NbdUri::new(NbdAddress::Unix(self.socket()), export)
    }

    /// A client of an export.
    pub fn client(&self, export: &str) -> Result<NbdClient> {
        Ok(NbdClient::connect(&self.uri(export), &[])?)
    }

    /// Makes a device of a whole image.
    pub fn map(&self, name: &str, image: &Path, bytes: u64) -> Result<()> {
        let word = udm_wire::words::escape(&image.to_string_lossy()).into_owned();
        let table = format!("0 {} linear {word} 0", bytes / SECTOR_SIZE);
        Ok(verbs::wait(verbs::create(&self.registry, name, None, Some(&table)))?)
    }

    /// Makes snapshots, each of the device behind it, at one instant. How long that took.
    pub fn take_snapshots(&self, snapshots: impl Iterator<Item = (String, String)>) -> Result<Duration> {
        let new = |(name, of)| api::NewSnapshot { name, of };
        let wanted = api::CreateSnapshots { snapshots: snapshots.map(new).collect(), ..Default::default() };
        let begin = Instant::now();
        snapshot::create(&self.registry, &wanted, &BaseDir::own(), &CancelToken::default())?;
        Ok(begin.elapsed())
    }

    /// Removes a snapshot, when the server knows that its client has gone.
    pub fn remove(&self, name: &str) -> Result<()> {
        let end = Instant::now() + LEAVE_MAX;
        loop {
            match snapshot::remove(&self.registry, name, false, &CancelToken::default()) {
                Err(e) if e.error.errno == udm_core::errno::EBUSY && Instant::now() < end => {
                    std::thread::sleep(Duration::from_micros(200));
                }
                done => return Ok(done?),
            }
        }
    }

    /// Bytes of disk that the stores of snapshots take.
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
