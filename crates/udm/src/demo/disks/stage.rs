//! What the disks are on: an image in a private folder, and a server in this process.

use crate::interrupt;
use crate::serve::descriptors;
use anyhow::{Context, Result};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use udm_control::exports::{ExportOptions, Exporter};
use udm_control::{Registry, verbs};
use udm_core::SECTOR_SIZE;
use udm_frontends::nbd::{Exports, Listen, NbdServer, ServerOptions};
use udm_runtime::{CoreOptions, Runtime, RuntimeOptions};

/// The size of the image.
pub(super) const IMAGE_BYTES: u64 = 2 << 30;

/// The name of its device.
pub(super) const IMAGE: &str = "image";

/// How far apart the image has data.
const DATA_EVERY: u64 = 16 << 20;

/// Cores at the most.
const CORES_MAX: usize = 2;

/// How long the end may take.
const END_MAX: Duration = Duration::from_secs(10);

/// The scene. Dropping it ends the server and removes the folder.
pub(super) struct Stage {
    folder: TempDir,
    pub registry: Arc<Registry>,
    running: Option<(NbdServer, Runtime)>,
}

impl Stage {
    /// Makes the image and serves it.
    pub fn set() -> Result<Stage> {
        descriptors::raise();
        let folder = crate::private::folder("udm-demo-").context("demo: temporary folder")?;
        let leftover = folder.path().to_owned();
        interrupt::on_signal(move |signal| {
            let _ = std::fs::remove_dir_all(leftover);
            interrupt::end(signal);
        })
        .context("demo: signals")?;
        let image = folder.path().join("image.img");
        make_image(&image).with_context(|| image.display().to_string())?;

        let count = std::thread::available_parallelism().map_or(1, usize::from).min(CORES_MAX);
        let spin_max = CoreOptions::default().spin_max;
        let options = RuntimeOptions { cpus: vec![None; count], poll: false, spin_max };
        let cores = Runtime::start(&options).context("demo: cores")?;
        let cluster = Arc::clone(cores.cluster());
        let registry = Registry::new(cluster.clone(), cluster.len());
        let exports = Arc::new(Exports::new());
        registry.export_by(Exporter::new(Arc::clone(&exports), ExportOptions::default()));
        let listen = [Listen::Unix(folder.path().join("nbd.sock"))];
        let server = NbdServer::start(&cluster, exports, ServerOptions::default(), &listen)
            .context("demo: NBD server")?;
        let stage = Stage { folder, registry, running: Some((server, cores)) };
        let word = udm_wire::words::escape(&image.to_string_lossy()).into_owned();
        let table = format!("0 {} linear {word} 0", IMAGE_BYTES / SECTOR_SIZE);
        verbs::wait(verbs::create(&stage.registry, IMAGE, None, Some(&table)))?;
        Ok(stage)
    }

    /// Where everything is.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Where clients find the disks.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("nbd.sock")
    }

    /// Bytes of disk that all files but the image take.
    pub fn disk_bytes(&self) -> Result<u64> {
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

impl Drop for Stage {
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

/// Mostly holes, as a fresh image is, with some data in it.
fn make_image(path: &Path) -> std::io::Result<()> {
    let file = File::create_new(path)?;
    file.set_len(IMAGE_BYTES)?;
    (0..IMAGE_BYTES).step_by(DATA_EVERY as usize).try_for_each(|at| file.write_all_at(&block(at), at))
}

/// What the image has at `offset`, a multiple of 4 KiB.
pub(super) fn block(offset: u64) -> Vec<u8> {
    if !offset.is_multiple_of(DATA_EVERY) {
        return vec![0; 4096];
    }
    (offset / DATA_EVERY + 1).to_le_bytes().repeat(4096 / 8)
}

/// Bytes of memory of this process that are no file's.
pub(super) fn memory_bytes() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    Ok(kib.context("/proc/self/status: no RssAnon")? << 10)
}
