//! Targets with partners, and a fixture of two cores for them.
//!
//! `top DISK` and `side DISK` are like an origin and its snapshots. Each lane of a top reads which
//! sides are live when it begins, and every request through it records this. Both count their
//! requests in flight. Each hook checks that nothing is in flight where nothing may be.
#![allow(dead_code, reason = "each test program uses its part")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use udm_core::{
    Batch, Cx, DevNo, Device, DeviceControlError, DeviceId, DrainMode, Lane, Limits, Sector, Sectors,
};
use udm_dm::testing::{SteppedTestCores, TestControlIo, TestCoreInboxes, TestDeviceNameResolver, TestDisk};
use udm_dm::{
    DeviceRange, DeviceSetTransition, IndexedDeviceError, LowerLimits, MappedDevice, ResolvedDevice, Table,
    Target, TargetArgs, TargetError, TargetHostServices, TargetType, TransitionWakeFn,
};

/// State that the targets over one disk share.
#[derive(Default)]
pub struct LayerLog {
    tops: Mutex<Vec<Weak<HostCell>>>,
    /// The names of devices with a live side.
    live: Mutex<Vec<String>>,
    in_flight: AtomicUsize,
    /// Hooks that were called, in order, with the device's name.
    pub log: Mutex<Vec<String>>,
    /// For each request through a top, the sides that its lane knows.
    pub met: Mutex<Vec<(u64, String)>>,
    /// If true, sides refuse to resume.
    pub refuse: AtomicBool,
    /// The core on which tops cannot be opened.
    pub no_lane: Mutex<Option<usize>>,
    /// While true, tops complete nothing.
    pub hold: AtomicBool,
    /// Called when a side gets `preresume`.
    pub on_ask: Mutex<Option<Box<dyn FnMut() + Send>>>,
}

impl LayerLog {
    pub fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut *self.log.lock().unwrap())
    }

    fn says(&self, what: &str, place: &HostCell) {
        self.log.lock().unwrap().push(format!("{what} {}", place.name()));
    }

    fn sides(&self) -> String {
        self.live.lock().unwrap().join(" ")
    }
}

/// The host of a target, once the target is attached.
#[derive(Default)]
struct HostCell(OnceLock<Arc<dyn TargetHostServices>>);

impl HostCell {
    fn name(&self) -> String {
        self.0.get().map_or_else(String::new, |notify| notify.device())
    }
}

struct LayeredTarget {
    is_top: bool,
    disk: ResolvedDevice,
    len: Sectors,
    place: Arc<HostCell>,
    shared: Arc<LayerLog>,
}

impl LayeredTarget {
    fn is_live(&self) -> bool {
        self.shared.live.lock().unwrap().contains(&self.place.name())
    }

    fn hook(&self, what: &str) {
        self.shared.says(what, &self.place);
        // If the target was live already, this resume may end a cancelled suspend.
        let comes = what == "resume" && !self.is_top && !self.is_live();
        if what == "retired" || comes {
            assert_eq!(self.shared.in_flight.load(Relaxed), 0, "{what} while something is in flight");
        }
    }
}

impl Target for LayeredTarget {
    fn type_name(&self) -> &'static str {
        if self.is_top { "top" } else { "side" }
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        if self.is_top && *self.shared.no_lane.lock().unwrap() == Some(cx.core().index()) {
            return Err(DeviceControlError::new(24, "no lane of a top"));
        }
        let (shared, lane) = (Arc::clone(&self.shared), self.disk.device.open(cx)?);
        Ok(Box::new(LayeredLane { is_top: self.is_top, shared, lane, sides: None }))
    }

    fn table(&self) -> String {
        self.disk.number.to_string()
    }

    fn limits(&self, below: LowerLimits<'_>) -> Limits {
        Limits { size: self.len, ..below.limits(&self.disk) }
    }

    fn devices(&self) -> Vec<DeviceRange> {
        vec![DeviceRange::new(&self.disk, Sector(0), self.len)]
    }

    /// One sector if a side is live; otherwise unlimited.
    fn max_io_len(&self) -> Option<Sectors> {
        (self.is_top && !self.shared.sides().is_empty()).then_some(Sectors(1))
    }

    fn attach(&self, notify: Arc<dyn TargetHostServices>) {
        let _ = self.place.0.set(notify);
        if self.is_top {
            self.shared.tops.lock().unwrap().push(Arc::downgrade(&self.place));
        }
    }

    fn preresume(&self, _: DeviceId) -> Result<(), TargetError> {
        self.hook("preresume");
        if let Some(on_ask) = self.shared.on_ask.lock().unwrap().as_mut().filter(|_| !self.is_top) {
            on_ask();
        }
        let refuses = !self.is_top && self.shared.refuse.load(Relaxed);
        if refuses { Err(TargetError::new("side: not now")) } else { Ok(()) }
    }

    fn presuspend(&self, _: bool) {
        self.hook("presuspend");
    }

    fn postsuspend(&self) {
        self.hook("postsuspend");
    }

    fn resume(&self) {
        self.hook("resume");
        let (name, mut live) = (self.place.name(), self.shared.live.lock().unwrap());
        if !self.is_top && !live.contains(&name) {
            live.push(name);
        }
    }

    fn retired(&self) {
        self.hook("retired");
        if !self.is_top {
            self.shared.live.lock().unwrap().retain(|name| *name != self.place.name());
        }
    }

    fn partners(&self) -> Vec<Arc<MappedDevice>> {
        if self.is_top {
            return Vec::new();
        }
        let mut tops = self.shared.tops.lock().unwrap();
        tops.retain(|top| top.strong_count() > 0);
        tops.iter().filter_map(|top| top.upgrade()?.0.get()?.mapped()).collect()
    }
}

struct LayeredLane {
    is_top: bool,
    shared: Arc<LayerLog>,
    lane: Box<dyn Lane>,
    /// The sides that were live when the lane began.
    sides: Option<String>,
}

impl Lane for LayeredLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let sides = self.sides.as_ref().expect("begun before it is given something");
        self.shared.in_flight.fetch_add(batch.len(), Relaxed);
        if self.is_top {
            assert_eq!(*sides, self.shared.sides(), "the lane knows who is live");
            let met = batch.iter().map(|bio| (bio.sector.0, sides.clone()));
            self.shared.met.lock().unwrap().extend(met);
        }
        self.lane.submit(batch, cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        if self.is_top && self.shared.hold.load(Relaxed) {
            return;
        }
        let before = done.len();
        self.lane.poll(done, cx);
        self.shared.in_flight.fetch_sub(done.len() - before, Relaxed);
    }

    fn drain(&mut self, _: DrainMode, _: &mut Batch, _: &mut Cx<'_>) {}

    fn begin(&mut self, _: &mut Cx<'_>) -> Option<Box<dyn Lane>> {
        assert!(self.sides.is_none(), "once");
        self.sides = Some(self.shared.sides());
        None
    }
}

fn make_layered_target(args: &mut TargetArgs<'_>, is_top: bool) -> Result<Arc<dyn Target>, TargetError> {
    let disk = args.resolver.get(&args.args[0]).map_err(|e| TargetError::errno(e.errno))?;
    let shared = disk.device.shared_disk_state().expect("a disk").get_or_default();
    Ok(Arc::new(LayeredTarget { is_top, disk, len: args.len, place: Arc::default(), shared }))
}

const TYPES: &[TargetType] = &[
    TargetType { name: "top", version: [1, 0, 0], new: |args| make_layered_target(args, true) },
    TargetType { name: "side", version: [1, 0, 0], new: |args| make_layered_target(args, false) },
];

/// Mapped devices over disks in memory on two cores.
pub struct Fixture {
    pub world: SteppedTestCores,
    pub resolver: TestDeviceNameResolver,
    types: Vec<TargetType>,
    made: u32,
}

pub fn no_wake() -> TransitionWakeFn {
    Arc::new(|| {})
}

impl Fixture {
    pub fn new() -> Fixture {
        let known = TYPES.iter().chain(udm_targets::TARGETS);
        let types = known.map(|t| TargetType { name: t.name, version: t.version, new: t.new }).collect();
        Fixture { world: SteppedTestCores::new(2), resolver: TestDeviceNameResolver::new(), types, made: 0 }
    }

    /// Creates a disk that stores nothing, and the shared state of tops and sides over it.
    pub fn disk(&mut self, name: &str) -> (Arc<TestDisk>, Arc<LayerLog>) {
        let disk = TestDisk::null(Limits::new(Sectors(64)));
        self.made += 1;
        self.resolver.add(name, DevNo { major: 7, minor: self.made }, Arc::<TestDisk>::clone(&disk));
        let shared = disk.shared_disk_state().unwrap().get_or_default();
        (disk, shared)
    }

    pub fn make(&mut self, name: &str) -> Arc<MappedDevice> {
        self.made += 1;
        let number = DevNo { major: 254, minor: self.made };
        let device = MappedDevice::new(name, None, number).unwrap();
        self.resolver.add(&format!("@{name}"), number, Arc::<MappedDevice>::clone(&device));
        device
    }

    pub fn load(&mut self, device: &MappedDevice, text: &str) {
        let lines = udm_wire::table::parse_table(text).unwrap();
        let table = Table::build(&self.types, &lines, &mut self.resolver, &TestControlIo::new(), 2).unwrap();
        device.load(table).unwrap();
    }

    /// A device with a live table.
    pub fn live(&mut self, name: &str, text: &str, lanes: &mut LanePairs) -> Arc<MappedDevice> {
        let device = self.make(name);
        self.load(&device, text);
        self.resume(&[&device], lanes).unwrap();
        device
    }

    /// Opens a lane of `device` on each core.
    pub fn open(&mut self, device: &MappedDevice, lanes: &mut LanePairs) -> usize {
        lanes.0.push([0, 1].map(|core| self.world.open(core, device).unwrap()));
        lanes.0.len() - 1
    }

    pub fn suspend(
        &mut self,
        devices: &[&Arc<MappedDevice>],
        lanes: &mut LanePairs,
    ) -> Result<(), IndexedDeviceError> {
        let changes = DeviceSetTransition::suspend(&to_vec_of_devices(devices), true, &no_wake()).unwrap();
        self.all(changes, lanes)
    }

    pub fn resume(
        &mut self,
        devices: &[&Arc<MappedDevice>],
        lanes: &mut LanePairs,
    ) -> Result<(), IndexedDeviceError> {
        let changes = DeviceSetTransition::resume(&to_vec_of_devices(devices), true, &no_wake()).unwrap();
        self.all(changes, lanes)
    }

    pub fn remove(
        &mut self,
        device: &Arc<MappedDevice>,
        lanes: &mut LanePairs,
    ) -> Result<(), IndexedDeviceError> {
        let changes = DeviceSetTransition::remove(&to_vec_of_devices(&[device]), &no_wake()).unwrap();
        self.all(changes, lanes)
    }

    /// Steps `changes` to their end.
    pub fn all(
        &mut self,
        mut changes: DeviceSetTransition,
        lanes: &mut LanePairs,
    ) -> Result<(), IndexedDeviceError> {
        for _ in 0..100 {
            if let Some(result) = changes.step(&*self.cores()) {
                return result;
            }
            self.turn(lanes);
        }
        panic!("the changes do not end");
    }

    pub fn cores(&self) -> Arc<TestCoreInboxes> {
        self.world.cores()
    }

    /// One turn of each core. Returns the bios that came back.
    pub fn turn(&mut self, lanes: &mut LanePairs) -> Batch {
        let mut done = Batch::new();
        for core in 0..2 {
            self.world.deliver(core);
            for pair in &mut lanes.0 {
                done.extend(self.world.poll(core, &mut *pair[core]));
            }
        }
        done
    }

    pub fn submit(&mut self, core: usize, lane: usize, bio: Box<udm_core::Bio>, lanes: &mut LanePairs) {
        self.world.submit(core, &mut *lanes.0[lane][core], [bio]);
    }
}

/// Open lanes, one pair per device.
#[derive(Default)]
pub struct LanePairs(pub Vec<[Box<dyn Lane>; 2]>);

pub fn to_vec_of_devices(devices: &[&Arc<MappedDevice>]) -> Vec<Arc<MappedDevice>> {
    devices.iter().map(|&device| Arc::clone(device)).collect()
}
