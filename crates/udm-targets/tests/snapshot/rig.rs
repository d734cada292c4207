//! Devices by name, on cores stepped by the test: disks, origins and their snapshots.
#![allow(dead_code, reason = "what the cases need")]

use crate::reader::{ParsedStore, read_store};
use std::collections::BTreeMap;
use std::sync::Arc;
use udm_core::{Batch, Bio, CoreCommandSender, DevNo, Device, Lane, Op, OwnWork, Status};
use udm_dm::testing::{
    SteppedTestCores, TestControlIo, TestDeviceNameResolver, TestDisk, copy_bio_data, make_test_read_bio,
};
use udm_dm::{DeviceSetTransition, MappedDevice, Table, TargetError};

/// Sectors of the disks of the recorded cases.
pub const SIZE: u64 = 131_072;

/// A mapped device and its lanes, one per core.
struct DeviceNode {
    device: Arc<MappedDevice>,
    lanes: Vec<Box<dyn Lane>>,
}

/// A host with disks and mapped devices.
pub struct SnapshotRig {
    pub world: SteppedTestCores,
    cores: Arc<dyn CoreCommandSender>,
    count: usize,
    pub resolver: TestDeviceNameResolver,
    disks: BTreeMap<String, Arc<TestDisk>>,
    nodes: BTreeMap<String, DeviceNode>,
    minor: u32,
    /// The last cookie, and completed requests by cookie.
    sent: u64,
    back: BTreeMap<u64, Box<Bio>>,
    /// Stores written by udm, with their origin and number of records. The independent reader reads
    /// them after each step.
    stores: BTreeMap<String, (String, usize)>,
    merging: bool,
}

impl SnapshotRig {
    /// A host of `count` cores without devices.
    pub fn new(count: usize) -> SnapshotRig {
        let world = SteppedTestCores::new(count);
        SnapshotRig {
            cores: world.cores(),
            world,
            count,
            resolver: TestDeviceNameResolver::new(),
            disks: BTreeMap::new(),
            nodes: BTreeMap::new(),
            minor: 0,
            sent: 0,
            back: BTreeMap::new(),
            stores: BTreeMap::new(),
            merging: false,
        }
    }

    /// The fixture of the recorded cases: an origin `O` whose first 14 chunks of 4 KiB are letters,
    /// and a blank `W`.
    pub fn recorded(count: usize) -> SnapshotRig {
        let mut host = SnapshotRig::new(count);
        let origin = host.disk("O", SIZE);
        for (chunk, letter) in (b'a'..=b'n').enumerate() {
            origin.put(chunk as u64 * 8, &[letter; 4096]);
        }
        host.disk("W", SIZE);
        host
    }

    /// Adds a disk of zeroes.
    pub fn disk(&mut self, name: &str, sectors: u64) -> Arc<TestDisk> {
        let disk = TestDisk::new(sectors);
        self.put_disk(name, &disk);
        disk
    }

    /// Adds `disk`, or replaces another with the same name.
    pub fn put_disk(&mut self, name: &str, disk: &Arc<TestDisk>) {
        let number = DevNo { major: 1, minor: self.disks.len() as u32 };
        self.resolver.add(name, number, Arc::<TestDisk>::clone(disk));
        self.disks.insert(name.into(), Arc::clone(disk));
    }

    pub fn get_disk(&self, name: &str) -> Arc<TestDisk> {
        Arc::clone(&self.disks[name])
    }

    pub fn device(&self, name: &str) -> Arc<MappedDevice> {
        Arc::clone(&self.nodes[name].device)
    }

    fn table(&mut self, table: &str) -> Result<Arc<Table>, TargetError> {
        let lines = udm_wire::table::parse_table(table).unwrap();
        Table::build(udm_targets::TARGETS, &lines, &mut self.resolver, &TestControlIo::new(), self.count)
    }

    /// Creates a device, loads `table` and resumes it. If that fails, the device is removed.
    pub fn create(&mut self, name: &str, table: &str) -> Result<(), TargetError> {
        self.make(name);
        let done = self.load(name, table).and_then(|()| self.resume(&[name]));
        if done.is_err() {
            self.nodes.remove(name);
        }
        done
    }

    /// Creates a device without a table.
    pub fn make(&mut self, name: &str) {
        let number = DevNo { major: 254, minor: self.minor };
        self.minor += 1;
        let device = MappedDevice::new(name, None, number).unwrap();
        let open = |core| self.world.open(core, &*device).unwrap();
        let lanes = (0..self.count).map(open).collect();
        self.resolver.add(&format!("@{name}"), number, Arc::<MappedDevice>::clone(&device));
        self.nodes.insert(name.into(), DeviceNode { device, lanes });
    }

    /// Builds a table without loading it.
    pub fn build(&mut self, table: &str) -> Result<Arc<Table>, TargetError> {
        self.table(table)
    }

    pub fn load_built(&mut self, name: &str, table: Arc<Table>) -> Result<(), TargetError> {
        self.nodes[name].device.load(table).map(drop)
    }

    pub fn load(&mut self, name: &str, table: &str) -> Result<(), TargetError> {
        let built = self.table(table)?;
        self.nodes[name].device.load(built)?;
        let words: Vec<&str> = table.split(' ').collect();
        if let [_, _, kind @ ("snapshot" | "snapshot-merge"), origin, store, persistent, ..] = words[..]
            && persistent.starts_with(['P', 'p'])
            && [origin, store].iter().all(|name| self.disks.contains_key(*name))
        {
            self.merging |= kind == "snapshot-merge";
            self.stores.entry(store.into()).or_insert((origin.into(), 0));
            self.audit();
        }
        Ok(())
    }

    /// Checks the stores with the independent reader: each is valid at any time, and loses records
    /// only by a merge.
    pub fn audit(&mut self) {
        let merging = self.merging;
        for name in self.stores.keys().cloned().collect::<Vec<_>>() {
            let found = self.store(&name);
            let (_, before) = self.stores.get_mut(&name).unwrap();
            if let Some(store) = found.filter(|store| store.valid) {
                assert!(store.records.len() >= *before || merging, "{name} had {before}, has {store:?}");
                *before = store.records.len();
            }
        }
    }

    /// The contents of a store, from the independent reader.
    pub fn store(&self, name: &str) -> Option<ParsedStore> {
        let origin = self.stores.get(name).map_or("O", |(origin, _)| origin);
        let size = |name: &str| self.disks[name].limits().size.0;
        let disk = &self.disks[name];
        read_store(size(name), size(origin), |sector, sectors| disk.bytes(sector, sectors))
            .unwrap_or_else(|why| panic!("{name}: {why}"))
    }

    /// The store is no longer checked.
    pub fn forget_store(&mut self, name: &str) {
        self.stores.remove(name);
    }

    pub fn resume(&mut self, names: &[&str]) -> Result<(), TargetError> {
        let devices: Vec<_> = names.iter().map(|name| self.device(name)).collect();
        let changes = DeviceSetTransition::resume(&devices, true, &wake()).map_err(|(_, error)| error)?;
        self.finish(changes)
    }

    pub fn suspend(&mut self, names: &[&str]) -> Result<(), TargetError> {
        let devices: Vec<_> = names.iter().map(|name| self.device(name)).collect();
        let changes = DeviceSetTransition::suspend(&devices, false, &wake()).map_err(|(_, error)| error)?;
        self.finish(changes)
    }

    /// Suspends without a flush while lanes are polled as cores do: a sleeping lane is polled only
    /// by `awake`. Returns false if the suspend does not end.
    pub fn suspend_asleep(
        &mut self,
        name: &str,
        mut awake: impl FnMut(&mut SnapshotRig, usize) -> bool,
    ) -> bool {
        let devices = [self.device(name)];
        let mut changes =
            DeviceSetTransition::suspend(&devices, true, &wake()).map_err(|(_, error)| error).unwrap();
        (0..100).any(|_| {
            let over = changes.step(&*self.cores).is_some();
            for core in 0..self.count {
                if awake(self, core) || self.nodes[name].lanes[core].own_work() == OwnWork::Required {
                    self.poll_lane(name, core);
                }
            }
            over
        })
    }

    /// Resumes, or suspends with a flush, while no task runs. Returns false if the change does not
    /// end.
    pub fn change_without_tasks(&mut self, name: &str, resumes: bool) -> bool {
        let devices = [self.device(name)];
        let begun = match resumes {
            true => DeviceSetTransition::resume(&devices, false, &wake()),
            false => DeviceSetTransition::suspend(&devices, false, &wake()),
        };
        let mut changes = begun.map_err(|(_, error)| error).unwrap();
        (0..100).any(|_| {
            let over = changes.step(&*self.cores).is_some();
            (0..self.count).for_each(|core| self.poll_lane(name, core));
            over
        })
    }

    /// Polls one lane once.
    pub fn poll_lane(&mut self, name: &str, core: usize) {
        let lane = &mut self.nodes.get_mut(name).unwrap_or_else(|| panic!("no device {name}")).lanes[core];
        let done = self.world.poll(core, &mut **lane);
        self.back.extend(done.into_iter().map(|bio| (bio.cookie, bio)));
    }

    fn finish(&mut self, mut changes: DeviceSetTransition) -> Result<(), TargetError> {
        for _ in 0..10_000 {
            if let Some(done) = changes.step(&*self.cores) {
                self.poll();
                return done.map_err(|(_, error)| error);
            }
            self.poll();
        }
        panic!("the change does not end");
    }

    /// Suspends the origin, creates the snapshot, and resumes the origin.
    pub fn attach(&mut self, origin: &str, snapshot: &str, table: &str) -> Result<(), TargetError> {
        self.suspend(&[origin])?;
        let made = self.create(snapshot, table);
        self.resume(&[origin])?;
        made
    }

    /// The text after the type in the line of `table`.
    pub fn table_of(&self, name: &str) -> String {
        behind_the_type(&self.nodes[name].device.table_text(false))
    }

    /// As [`SnapshotRig::table_of`], for the inactive table.
    pub fn inactive_table_of(&self, name: &str) -> String {
        behind_the_type(&self.nodes[name].device.table_text(true))
    }

    /// The text after the type in the line of `status`.
    pub fn status(&self, name: &str) -> String {
        behind_the_type(&self.nodes[name].device.status_text())
    }

    /// Sends a message to the first target.
    pub fn message(&mut self, name: &str, text: &str) -> Result<String, TargetError> {
        let words: Vec<String> = text.split(' ').map(String::from).collect();
        self.nodes[name].device.message(0, &words, &mut self.resolver, &*self.cores)
    }

    pub fn events(&self, name: &str) -> u32 {
        self.nodes[name].device.event_nr()
    }

    /// Polls every lane once and runs the tasks.
    pub fn poll(&mut self) {
        self.world.run_tasks();
        for node in self.nodes.values_mut() {
            for (core, lane) in node.lanes.iter_mut().enumerate() {
                let done: Batch = self.world.poll(core, &mut **lane);
                self.back.extend(done.into_iter().map(|bio| (bio.cookie, bio)));
            }
        }
    }

    /// Submits `bio` on `core`. Returns its cookie.
    pub fn send(&mut self, name: &str, core: usize, mut bio: Box<Bio>) -> u64 {
        self.sent += 1;
        bio.cookie = self.sent;
        let node = self.nodes.get_mut(name).unwrap_or_else(|| panic!("no device {name}"));
        self.world.submit(core, &mut *node.lanes[core], [bio]);
        self.sent
    }

    /// The completed bio, if it has completed.
    pub fn answer(&mut self, sent: u64) -> Option<Box<Bio>> {
        self.back.remove(&sent)
    }

    /// Polls until the bio completes.
    pub fn wait(&mut self, sent: u64) -> Box<Bio> {
        for _ in 0..10_000 {
            if let Some(bio) = self.answer(sent) {
                return bio;
            }
            self.poll();
        }
        panic!("request {sent} did not come back");
    }

    /// Submits `bio` and waits for it.
    pub fn run(&mut self, name: &str, bio: Box<Bio>) -> Box<Bio> {
        let sent = self.send(name, 0, bio);
        let bio = self.wait(sent);
        self.audit();
        bio
    }

    /// Polls until tasks have nothing left to do.
    pub fn settle(&mut self) {
        (0..200).for_each(|_| self.poll());
        self.audit();
    }

    pub fn flush(&mut self, name: &str) -> Status {
        self.run(name, udm_dm::testing::bio_without_data(Op::Flush, 0, 0)).status
    }

    pub fn discard(&mut self, name: &str, sector: u64, sectors: u64) -> Status {
        self.run(name, udm_dm::testing::bio_without_data(Op::Discard, sector, sectors)).status
    }

    /// Writes `sectors` sectors of `fill`.
    pub fn write(&mut self, name: &str, sector: u64, sectors: u64, fill: u8) -> Status {
        self.run(name, filled_write(sector, sectors, fill)).status
    }

    pub fn write_bytes(&mut self, name: &str, sector: u64, bytes: &[u8]) -> Status {
        let mut bio = udm_dm::testing::make_test_write_bio(sector, bytes.len() as u64 / 512, 0);
        bio.data.copy_from(bytes);
        self.run(name, bio).status
    }

    /// Reads; returns the bytes.
    pub fn read(&mut self, name: &str, sector: u64, sectors: u64) -> Result<Vec<u8>, Status> {
        let bio = self.run(name, make_test_read_bio(sector, sectors));
        if bio.status.is_ok() { Ok(copy_bio_data(&bio)) } else { Err(bio.status) }
    }

    /// The first byte of each of the first `chunks` chunks of 4 KiB, zero as `.`.
    pub fn letters(&mut self, name: &str, chunks: u64) -> String {
        let first = |chunk| self.read(name, chunk * 8, 1).map_or('!', |bytes| char::from(bytes[0]));
        (0..chunks).map(first).map(|c| if c == '\0' { '.' } else { c }).collect()
    }

    /// Removes a device that nobody uses.
    pub fn remove(&mut self, name: &str) {
        let device = self.device(name);
        let changes = DeviceSetTransition::remove(std::slice::from_ref(&device), &wake())
            .map_err(|(_, error)| error)
            .unwrap();
        self.finish(changes).unwrap();
        self.nodes.remove(name);
    }
}

/// Lanes complete their own work before they are dropped.
impl Drop for SnapshotRig {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            (0..50).for_each(|_| self.poll());
        }
    }
}

fn behind_the_type(text: &str) -> String {
    text.trim_end().splitn(4, ' ').nth(3).unwrap_or_default().to_owned()
}

fn wake() -> udm_dm::TransitionWakeFn {
    Arc::new(|| {})
}

/// The origin of the recorded cases.
pub const ORIGIN: &str = "0 131072 snapshot-origin O";

/// The recorded disks on two cores, with the origin as `od` and a snapshot with these words as
/// `sn`.
pub fn host_with_snapshot(words: &str) -> SnapshotRig {
    let mut host = SnapshotRig::recorded(2);
    host.create("od", ORIGIN).unwrap();
    host.attach("od", "sn", &format!("0 {SIZE} snapshot O W {words}")).unwrap();
    host
}

/// A write of `sectors` sectors of `fill`.
pub fn filled_write(sector: u64, sectors: u64, fill: u8) -> Box<Bio> {
    let mut bio = udm_dm::testing::make_test_write_bio(sector, sectors, 0);
    bio.data.fill(fill);
    bio
}
