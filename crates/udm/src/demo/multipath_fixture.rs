//! What the demo plays on: the image, the cores with their loads, and the device.

use super::load::{BLOCK, LoadCounters, LoadProgress, VerifyLoad};
use super::{DemoStep, PathCounters};
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use udm_control::{Registry, verbs};
use udm_core::{CoreId, Cores, Device, LaneCommand, SECTOR_SIZE};
use udm_dm::{MappedDevice, Table};
use udm_runtime::{CoreOptions, CoreSet, LocalCore};

/// The size of the image.
pub(super) const IMAGE_BYTES: u64 = 64 << 20;

/// The names of the image: two links to one file, so two devices to udm.
pub(super) const PATHS: [&str; 2] = ["path-a", "path-b"];

/// The name of the device.
const NAME: &str = "mp";

/// Cores at the most.
const CORES_MAX: usize = 2;

/// How long the last check of all blocks may take.
const CHECK_MAX: Duration = Duration::from_secs(60);

/// How long what is on its way may take.
const SETTLE: Duration = Duration::from_millis(50);

/// The scene. Dropping it ends the loads and removes the image.
pub(super) struct MultipathFixture {
    folder: TempDir,
    core_set: Arc<CoreSet>,
    registry: Arc<Registry>,
    device: Arc<MappedDevice>,
    progress: Arc<LoadProgress>,
    threads: Vec<JoinHandle<()>>,
    /// Every table that has been live: their targets know what went where.
    tables: Mutex<Vec<Arc<Table>>>,
}

/// What a thread needs to begin.
struct CoreStart {
    core_set: Arc<CoreSet>,
    progress: Arc<LoadProgress>,
    device: Arc<OnceLock<Arc<MappedDevice>>>,
    ready: SyncSender<Result<()>>,
}

impl MultipathFixture {
    /// Makes the image, starts the cores, makes the device, lets the loads run.
    pub fn set() -> Result<MultipathFixture> {
        let folder = super::folder()?;
        let image = folder.path().join(PATHS[0]);
        let said = || image.display().to_string();
        std::fs::File::create(&image).and_then(|f| f.set_len(IMAGE_BYTES)).with_context(said)?;
        std::fs::hard_link(&image, folder.path().join(PATHS[1])).with_context(said)?;

        let cores = std::thread::available_parallelism().map_or(1, usize::from).min(CORES_MAX);
        let core_set = CoreSet::new(cores).context("demo: cores")?;
        let registry = Registry::new(core_set.clone(), cores);
        let progress = Arc::new(LoadProgress::default());
        let place = Arc::new(OnceLock::new());
        let (ready, answers) = sync_channel(2 * cores);
        let threads = start(cores, &core_set, &progress, &place, &ready)?;
        let wait = |answers: &Receiver<Result<()>>| -> Result<()> {
            (0..cores).try_for_each(|_| answers.recv().context("demo: a core ended")?)
        };
        wait(&answers)?;
        let text = table(folder.path(), "service-time");
        verbs::wait(verbs::create(&registry, NAME, None, Some(&text)))?;
        let device = Arc::clone(&registry.find(NAME)?.device);
        let _ = place.set(Arc::clone(&device));
        core_set.broadcast(device.id(), LaneCommand::Kick);
        wait(&answers)?;
        let live = device.live().into_iter().collect();
        Ok(MultipathFixture {
            folder,
            core_set,
            registry,
            device,
            progress,
            threads,
            tables: Mutex::new(live),
        })
    }

    /// Where the image is.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// How many cores there are.
    pub fn cores(&self) -> usize {
        self.threads.len()
    }

    /// Sends a message that names a path.
    pub fn message(&self, word: &str, path: &str) -> Result<()> {
        let path = self.folder.path().join(path);
        let path = udm_wire::words::escape(&path.to_string_lossy()).into_owned();
        verbs::message(&self.registry, NAME, 0, &format!("{word} {path}"))?;
        // What is on its way to a path still comes back from it.
        std::thread::sleep(SETTLE);
        Ok(())
    }

    /// Puts another selector in charge, under the running load.
    pub fn reload(&self, selector: &str) -> Result<()> {
        verbs::load(&self.registry, NAME, &table(self.folder.path(), selector))?;
        verbs::wait(verbs::suspend(&self.registry, &[NAME], false))?;
        verbs::wait(verbs::resume(&self.registry, &[NAME]))?;
        self.tables.lock().expect("one thread").extend(self.device.live());
        Ok(())
    }

    /// Does `act`, and says what went where meanwhile.
    pub fn step(&self, name: &str, act: &mut dyn FnMut() -> Result<()>) -> Result<DemoStep> {
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
        Ok(DemoStep {
            name: name.into(),
            paths: self.paths().into_iter().map(share).collect(),
            verified_blocks: self.progress.counts().verified - counts.verified,
        })
    }

    /// What went where so far, over all tables.
    fn paths(&self) -> BTreeMap<String, PathCounters> {
        let mut paths = BTreeMap::new();
        for table in self.tables.lock().expect("one thread").iter() {
            for report in table.targets().iter().flat_map(|entry| entry.target.path_reports()) {
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

    /// Ends the load and reads every block back once. Gives the numbers of the whole run and how
    /// many blocks there are.
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

impl Drop for MultipathFixture {
    fn drop(&mut self) {
        self.progress.end();
        self.core_set.broadcast(self.device.id(), LaneCommand::Kick);
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

/// The table over both paths.
fn table(folder: &Path, selector: &str) -> String {
    let path = |name: &str| {
        let path = folder.join(name);
        udm_wire::words::escape(&path.to_string_lossy()).into_owned()
    };
    let [a, b] = PATHS.map(path);
    // A selector's own words for each path: how many requests before it looks again, and for
    // service-time the relative speed.
    let (words, args) = if selector == "service-time" { (2, "1 1") } else { (1, "1") };
    let sectors = IMAGE_BYTES / SECTOR_SIZE;
    format!("0 {sectors} multipath 1 queue_if_no_path 0 1 1 {selector} 0 2 {words} {a} {args} {b} {args}")
}

/// Starts a thread a core. Each answers once when it is a core, and once when its load runs.
fn start(
    cores: usize,
    core_set: &Arc<CoreSet>,
    progress: &Arc<LoadProgress>,
    device: &Arc<OnceLock<Arc<MappedDevice>>>,
    ready: &SyncSender<Result<()>>,
) -> Result<Vec<JoinHandle<()>>> {
    let blocks = IMAGE_BYTES / BLOCK / cores as u64;
    let thread = |i: usize| {
        let begin = CoreStart {
            core_set: Arc::clone(core_set),
            progress: Arc::clone(progress),
            device: Arc::clone(device),
            ready: ready.clone(),
        };
        let name = format!("udm-demo{i}");
        let run = move || begin.run(CoreId(i as u16), i as u64 * blocks, blocks as usize);
        std::thread::Builder::new().name(name).spawn(run).context("demo: thread")
    };
    (0..cores).map(thread).collect()
}

impl CoreStart {
    fn run(self, id: CoreId, first: u64, blocks: usize) {
        let mut core = match LocalCore::attach(&self.core_set, id, CoreOptions::default()) {
            Ok(core) => core,
            Err(error) => return self.say(Err(anyhow::Error::new(error).context("demo: core"))),
        };
        self.say(Ok(()));
        // The device is resumed with the cores' help, so they take turns before there is any load.
        // Whoever sets the device kicks the cores behind it: a look between turn and park misses
        // neither.
        let device = loop {
            core.turn(|_| ());
            if let Some(device) = self.device.get() {
                break device;
            }
            core.park();
        };
        match VerifyLoad::new(core, &**device, Arc::clone(&self.progress), first, blocks) {
            Ok(load) => {
                self.say(Ok(()));
                load.run();
            }
            Err(error) => self.say(Err(anyhow::Error::new(error).context("demo: device"))),
        }
    }

    /// Nobody listens any more when another core has failed.
    fn say(&self, what: Result<()>) {
        let _ = self.ready.send(what);
    }
}
