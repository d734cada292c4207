//! The setup of the multipath demo: the image, the cores with their loads, and the device.

use super::load::{BLOCK, DemoLoadCounters, LoadCounters, VerifyLoad};
use super::{DemoStepReport, PathCounters};
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use udm_control::{DeviceRegistry, verbs};
use udm_core::{CoreCommandSender, CoreId, Device, LaneCommand, SECTOR_SIZE};
use udm_dm::{MappedDevice, Table};
use udm_runtime::{CoreOptions, LocalCore, ProcessCores};

/// The size of the image in bytes.
pub(super) const IMAGE_BYTES: u64 = 64 << 20;

/// Names of the image: two links to one file, which udm opens as two devices.
pub(super) const PATHS: [&str; 2] = ["path-a", "path-b"];

/// The name of the device.
const NAME: &str = "mp";

/// Maximum number of cores.
const CORES_MAX: usize = 2;

/// Maximum time of the final check of all blocks.
const CHECK_MAX: Duration = Duration::from_secs(60);

/// Time for requests in flight to complete.
const SETTLE: Duration = Duration::from_millis(50);

/// The image, cores and device. Dropping it ends the loads and removes the image.
pub(super) struct MultipathDemoSetup {
    folder: TempDir,
    core_set: Arc<ProcessCores>,
    registry: Arc<DeviceRegistry>,
    device: Arc<MappedDevice>,
    progress: Arc<DemoLoadCounters>,
    threads: Vec<JoinHandle<()>>,
    /// All tables that have been live; their targets have the counters of the paths.
    tables: Mutex<Vec<Arc<Table>>>,
}

/// The data that a core's thread starts with.
struct CoreThreadParams {
    core_set: Arc<ProcessCores>,
    progress: Arc<DemoLoadCounters>,
    device: Arc<OnceLock<Arc<MappedDevice>>>,
    ready: SyncSender<Result<()>>,
}

impl MultipathDemoSetup {
    /// Creates the image, starts the cores, creates the device and starts the loads.
    pub fn start() -> Result<MultipathDemoSetup> {
        let folder = super::create_demo_temp_folder()?;
        let image = folder.path().join(PATHS[0]);
        let name = || image.display().to_string();
        std::fs::File::create(&image).and_then(|f| f.set_len(IMAGE_BYTES)).with_context(name)?;
        std::fs::hard_link(&image, folder.path().join(PATHS[1])).with_context(name)?;

        let cores = std::thread::available_parallelism().map_or(1, usize::from).min(CORES_MAX);
        let core_set = ProcessCores::new(cores).context("demo: cores")?;
        let registry = DeviceRegistry::new(core_set.clone(), cores);
        let progress = Arc::new(DemoLoadCounters::default());
        let place = Arc::new(OnceLock::new());
        let (ready, answers) = sync_channel(2 * cores);
        let threads = start_core_load_threads(cores, &core_set, &progress, &place, &ready)?;
        let wait = |answers: &Receiver<Result<()>>| -> Result<()> {
            (0..cores).try_for_each(|_| answers.recv().context("demo: a core ended")?)
        };
        wait(&answers)?;
        let text = two_path_multipath_table(folder.path(), "service-time");
        verbs::block_on_verb(verbs::create_mapped_device(&registry, NAME, None, Some(&text)))?;
        let device = Arc::clone(&registry.find(NAME)?.device);
        let _ = place.set(Arc::clone(&device));
        core_set.broadcast(device.id(), LaneCommand::Kick);
        wait(&answers)?;
        let live = device.live().into_iter().collect();
        Ok(MultipathDemoSetup {
            folder,
            core_set,
            registry,
            device,
            progress,
            threads,
            tables: Mutex::new(live),
        })
    }

    /// The folder of the image.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Number of cores.
    pub fn cores(&self) -> usize {
        self.threads.len()
    }

    /// Sends a message with a path as its argument.
    pub fn message(&self, word: &str, path: &str) -> Result<()> {
        let path = self.folder.path().join(path);
        let path = udm_wire::words::escape_table_word(&path.to_string_lossy()).into_owned();
        verbs::send_target_message(&self.registry, NAME, 0, &format!("{word} {path}"))?;
        // Requests in flight on the path still complete there.
        std::thread::sleep(SETTLE);
        Ok(())
    }

    /// Reloads the device with another selector under the running load.
    pub fn reload(&self, selector: &str) -> Result<()> {
        verbs::load_inactive_table(
            &self.registry,
            NAME,
            &two_path_multipath_table(self.folder.path(), selector),
        )?;
        verbs::block_on_verb(verbs::suspend_mapped_devices(&self.registry, &[NAME], false))?;
        verbs::block_on_verb(verbs::resume_mapped_devices(&self.registry, &[NAME]))?;
        self.tables.lock().expect("one thread").extend(self.device.live());
        Ok(())
    }

    /// Runs `act`, and returns the requests of each path meanwhile.
    pub fn step(&self, name: &str, act: &mut dyn FnMut() -> Result<()>) -> Result<DemoStepReport> {
        let (paths, counts) = (self.paths(), self.progress.counts());
        act()?;
        let share = |(name, now): (String, PathCounters)| {
            let before = paths.get(&name);
            let since = |of: fn(&PathCounters) -> u64| of(&now) - before.map_or(0, of);
            PathCounters {
                bios: since(|p| p.bios),
                bytes: since(|p| p.bytes),
                errors: since(|p| p.errors),
                name,
            }
        };
        Ok(DemoStepReport {
            name: name.into(),
            paths: self.paths().into_iter().map(share).collect(),
            verified_blocks: self.progress.counts().verified - counts.verified,
        })
    }

    /// Sum of the path counters over all tables.
    fn paths(&self) -> BTreeMap<String, PathCounters> {
        let mut paths = BTreeMap::new();
        for table in self.tables.lock().expect("one thread").iter() {
            for report in table.path_reports() {
                let name = report.name.rsplit('/').next().unwrap_or_default().to_string();
                let none = PathCounters { name: name.clone(), bios: 0, bytes: 0, errors: 0 };
                let share = paths.entry(name).or_insert(none);
                share.bios += report.bios;
                share.bytes += report.bytes;
                share.errors += report.errors;
            }
        }
        paths
    }

    /// Ends the load and reads every block back once. Returns the counters of the whole run and the
    /// number of blocks.
    pub fn check_all(&self) -> Result<(LoadCounters, u64)> {
        self.progress.check();
        self.core_set.broadcast(self.device.id(), LaneCommand::Kick);
        let begin = Instant::now();
        while self.progress.checked() < self.cores() as u64 {
            if begin.elapsed() > CHECK_MAX {
                bail!("demo: the last check does not end: {:?}", self.progress.counts());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok((self.progress.counts(), IMAGE_BYTES / BLOCK))
    }
}

impl Drop for MultipathDemoSetup {
    fn drop(&mut self) {
        self.progress.end();
        self.core_set.broadcast(self.device.id(), LaneCommand::Kick);
        for thread in self.threads.drain(..) {
            // The panic hook has reported a panicked thread.
            let _ = thread.join();
        }
    }
}

/// A multipath table with both paths in one group.
fn two_path_multipath_table(folder: &Path, selector: &str) -> String {
    let path = |name: &str| {
        let path = folder.join(name);
        udm_wire::words::escape_table_word(&path.to_string_lossy()).into_owned()
    };
    let [a, b] = PATHS.map(path);
    // Path arguments of the selector: the repeat count, and for service-time also the relative
    // throughput.
    let (words, args) = if selector == "service-time" { (2, "1 1") } else { (1, "1") };
    let sectors = IMAGE_BYTES / SECTOR_SIZE;
    format!("0 {sectors} multipath 1 queue_if_no_path 0 1 1 {selector} 0 2 {words} {a} {args} {b} {args}")
}

/// Starts one thread per core. Each thread reports once when its core has joined, and once when its
/// load runs.
fn start_core_load_threads(
    cores: usize,
    core_set: &Arc<ProcessCores>,
    progress: &Arc<DemoLoadCounters>,
    device: &Arc<OnceLock<Arc<MappedDevice>>>,
    ready: &SyncSender<Result<()>>,
) -> Result<Vec<JoinHandle<()>>> {
    let blocks = IMAGE_BYTES / BLOCK / cores as u64;
    let thread = |i: usize| {
        let begin = CoreThreadParams {
            core_set: Arc::clone(core_set),
            progress: Arc::clone(progress),
            device: Arc::clone(device),
            ready: ready.clone(),
        };
        let name = format!("udm-demo{i}");
        let run = move || begin.run(CoreId(i as u16), i as u64 * blocks, blocks as usize);
        std::thread::Builder::new().name(name).spawn(run).context("demo: cannot start a thread")
    };
    (0..cores).map(thread).collect()
}

impl CoreThreadParams {
    fn run(self, id: CoreId, first: u64, blocks: usize) {
        let mut core = match LocalCore::attach(&self.core_set, id, CoreOptions::default()) {
            Ok(core) => core,
            Err(error) => return self.report(Err(anyhow::Error::new(error).context("demo: core"))),
        };
        self.report(Ok(()));
        // The resume of the device needs the cores, so they run turns before they have a load. The
        // main thread sets the device and then wakes the cores. A core that checks after each turn
        // and before it parks therefore cannot miss it.
        let device = loop {
            core.turn(|_| ());
            if let Some(device) = self.device.get() {
                break device;
            }
            core.park();
        };
        match VerifyLoad::new(core, &**device, Arc::clone(&self.progress), first, blocks) {
            Ok(load) => {
                self.report(Ok(()));
                load.run();
            }
            Err(error) => self.report(Err(anyhow::Error::new(error).context("demo: device"))),
        }
    }

    /// The receiver may be dropped if another core has failed.
    fn report(&self, result: Result<()>) {
        let _ = self.ready.send(result);
    }
}
