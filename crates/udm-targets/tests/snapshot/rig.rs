//! Devices by name on cores stepped by hand: disks, origins and snapshots of them.
#![allow(dead_code, reason = "what the cases need")]

use std::collections::BTreeMap;
use std::sync::Arc;
use udm_core::{Batch, Bio, Cores, DevNo, Lane, Status};
use udm_dm::testing::{TestDisk, TestIo, TestResolver, TestWorld, data, read};
use udm_dm::{Changes, MappedDevice, Table, TargetError};

/// Sectors of the disks of the recorded cases.
pub const SIZE: u64 = 131_072;

/// A mapped device and its lanes, one a core.
struct Node {
    device: Arc<MappedDevice>,
    lanes: Vec<Box<dyn Lane>>,
}

/// See the module's documentation.
pub struct Host {
    pub world: TestWorld,
    cores: Arc<dyn Cores>,
    count: usize,
    pub resolver: TestResolver,
    disks: BTreeMap<String, Arc<TestDisk>>,
    nodes: BTreeMap<String, Node>,
    minor: u32,
    /// Requests that are under way, and their answers: by their cookie.
    sent: u64,
    back: BTreeMap<u64, Box<Bio>>,
}

impl Host {
    /// A host of `count` cores without devices.
    pub fn new(count: usize) -> Host {
        let world = TestWorld::new(count);
        Host {
            cores: world.cores(),
            world,
            count,
            resolver: TestResolver::new(),
            disks: BTreeMap::new(),
            nodes: BTreeMap::new(),
            minor: 0,
            sent: 0,
            back: BTreeMap::new(),
        }
    }

    /// The fixture of the recorded cases: an origin `O` whose first 14 chunks of 4 KiB are letters,
    /// and a blank `W`.
    pub fn recorded(count: usize) -> Host {
        let mut host = Host::new(count);
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

    /// Adds `disk`, or puts it in the place of another.
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
        let lines = udm_wire::table::parse(table).unwrap();
        Table::build(udm_targets::TARGETS, &lines, &mut self.resolver, &TestIo::new(), self.count)
    }

    /// Makes a device, loads `table` and resumes it; there is no device when that fails.
    pub fn create(&mut self, name: &str, table: &str) -> Result<(), TargetError> {
        self.make(name);
        let done = self.load(name, table).and_then(|()| self.resume(&[name]));
        if done.is_err() {
            self.nodes.remove(name);
        }
        done
    }

    /// Makes a device without a table.
    pub fn make(&mut self, name: &str) {
        let number = DevNo { major: 254, minor: self.minor };
        self.minor += 1;
        let device = MappedDevice::new(name, None, number).unwrap();
        let open = |core| self.world.open(core, &*device).unwrap();
        let lanes = (0..self.count).map(open).collect();
        self.resolver.add(&format!("@{name}"), number, Arc::<MappedDevice>::clone(&device));
        self.nodes.insert(name.into(), Node { device, lanes });
    }

    pub fn load(&mut self, name: &str, table: &str) -> Result<(), TargetError> {
        let table = self.table(table)?;
        self.nodes[name].device.load(table)
    }

    pub fn resume(&mut self, names: &[&str]) -> Result<(), TargetError> {
        let devices: Vec<_> = names.iter().map(|name| self.device(name)).collect();
        let changes = Changes::resume(&devices, true, &wake()).map_err(|(_, error)| error)?;
        self.finish(changes)
    }

    pub fn suspend(&mut self, names: &[&str]) -> Result<(), TargetError> {
        let devices: Vec<_> = names.iter().map(|name| self.device(name)).collect();
        let changes = Changes::suspend(&devices, false, &wake()).map_err(|(_, error)| error)?;
        self.finish(changes)
    }

    fn finish(&mut self, mut changes: Changes) -> Result<(), TargetError> {
        for _ in 0..10_000 {
            if let Some(done) = changes.step(&*self.cores) {
                self.poll();
                return done.map_err(|(_, error)| error);
            }
            self.poll();
        }
        panic!("the change does not end");
    }

    /// Suspends the origin, makes the snapshot, lets the origin go on.
    pub fn attach(&mut self, origin: &str, snapshot: &str, table: &str) -> Result<(), TargetError> {
        self.suspend(&[origin])?;
        let made = self.create(snapshot, table);
        self.resume(&[origin])?;
        made
    }

    /// What stands behind the type in `table`'s line.
    pub fn table_of(&self, name: &str) -> String {
        self.nodes[name].device.table_text(false)
    }

    /// What stands behind the type in `status`' line.
    pub fn status(&self, name: &str) -> String {
        let text = self.nodes[name].device.status_text();
        text.splitn(4, ' ').nth(3).unwrap_or_default().to_owned()
    }

    pub fn events(&self, name: &str) -> u32 {
        self.nodes[name].device.event_nr()
    }

    /// Polls every lane once.
    pub fn poll(&mut self) {
        for node in self.nodes.values_mut() {
            for (core, lane) in node.lanes.iter_mut().enumerate() {
                let done: Batch = self.world.poll(core, &mut **lane);
                self.back.extend(done.into_iter().map(|bio| (bio.cookie, bio)));
            }
        }
    }

    /// Submits `bio` on `core`: what its answer is asked for by.
    pub fn send(&mut self, name: &str, core: usize, mut bio: Box<Bio>) -> u64 {
        self.sent += 1;
        bio.cookie = self.sent;
        let node = self.nodes.get_mut(name).unwrap_or_else(|| panic!("no device {name}"));
        self.world.submit(core, &mut *node.lanes[core], [bio]);
        self.sent
    }

    /// The answer, if it is there.
    pub fn answer(&mut self, sent: u64) -> Option<Box<Bio>> {
        self.back.remove(&sent)
    }

    /// Polls until the answer is there.
    pub fn wait(&mut self, sent: u64) -> Box<Bio> {
        for _ in 0..10_000 {
            if let Some(bio) = self.answer(sent) {
                return bio;
            }
            self.poll();
        }
        panic!("request {sent} did not come back");
    }

    /// Does `bio` and waits for it.
    pub fn run(&mut self, name: &str, bio: Box<Bio>) -> Box<Bio> {
        let sent = self.send(name, 0, bio);
        self.wait(sent)
    }

    /// Writes `sectors` sectors of `fill`.
    pub fn write(&mut self, name: &str, sector: u64, sectors: u64, fill: u8) -> Status {
        self.run(name, filled(sector, sectors, fill)).status
    }

    /// Reads; the bytes.
    pub fn read(&mut self, name: &str, sector: u64, sectors: u64) -> Result<Vec<u8>, Status> {
        let bio = self.run(name, read(sector, sectors));
        if bio.status.is_ok() { Ok(data(&bio)) } else { Err(bio.status) }
    }

    /// The first byte of each of the first `chunks` chunks of 4 KiB, zero as `.`.
    pub fn letters(&mut self, name: &str, chunks: u64) -> String {
        let first = |chunk| self.read(name, chunk * 8, 1).map_or('!', |bytes| char::from(bytes[0]));
        (0..chunks).map(first).map(|c| if c == '\0' { '.' } else { c }).collect()
    }

    /// Removes a device that nobody uses.
    pub fn remove(&mut self, name: &str) {
        let device = self.device(name);
        let changes =
            Changes::leave(std::slice::from_ref(&device), &wake()).map_err(|(_, error)| error).unwrap();
        self.finish(changes).unwrap();
        self.nodes.remove(name);
    }
}

fn wake() -> udm_dm::Wake {
    Arc::new(|| {})
}

/// A write of `sectors` sectors of `fill`.
pub fn filled(sector: u64, sectors: u64, fill: u8) -> Box<Bio> {
    let mut bio = udm_dm::testing::write(sector, sectors, 0);
    bio.data.fill(fill);
    bio
}
