//! A virtual machine at a vhost-user server on two cores. Its three rings are the handles: two are
//! on one core, one is on the other. Each machine after the first one has another kind of
//! rings, split or packed, and of notifications, event indices or flags.

use super::machine::{RINGS, TestRing, VirtioTestMachine};
use super::{DeviceWorld, HANG, WorldAction};
use crate::{DeviceFacts, RequestCheckingLayer, TestRequest, TestRequestResult};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use udm_core::{BioFlags, Device, SECTOR_SIZE, Sectors};
use udm_dm::{DeviceTransition, TargetError};
use udm_frontends::nbd::{Export, Exports};
use udm_frontends::vhost_user::VhostUserServer;
use udm_runtime::{ProcessCores, Runtime, RuntimeOptions};
use virtio_driver::VirtioBlkFeatureFlags;

pub(super) struct VhostUserWorld {
    runtime: Option<Runtime>,
    server: Option<VhostUserServer>,
    machine: Option<VirtioTestMachine>,
    /// Machines so far.
    machines: usize,
    folder: TempDir,
    facts: DeviceFacts,
}

impl VhostUserWorld {
    pub(super) fn new(device: &Arc<dyn Device>, facts: DeviceFacts) -> VhostUserWorld {
        let spin_max = Duration::from_micros(20);
        let options = RuntimeOptions { cpus: vec![None; 2], poll: false, spin_max };
        let runtime = Runtime::start(&options).expect("two cores");
        let exports = Arc::new(Exports::new());
        let export = Export::new("subject", "", false, device.clone()).expect("a name");
        exports.add(export).expect("the first export");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let server = VhostUserServer::start(runtime.core_set(), &exports, "subject", &path);
        let server = server.expect("a server");
        let mut world = VhostUserWorld {
            runtime: Some(runtime),
            server: Some(server),
            machine: None,
            machines: 0,
            folder,
            facts,
        };
        world.connect();
        world.facts = world.negotiated_facts();
        world
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn connect(&mut self) {
        let has_event_index = self.machines.is_multiple_of(2);
        let is_packed = matches!(self.machines % 4, 1 | 2);
        self.machine = Some(VirtioTestMachine::new(&self.path(), has_event_index, is_packed));
        self.machines += 1;
    }

    fn machine(&mut self) -> &mut VirtioTestMachine {
        self.machine.as_mut().expect("a machine until the end")
    }

    fn core_set(&self) -> Arc<ProcessCores> {
        self.runtime.as_ref().expect("there are cores").core_set().clone()
    }

    fn in_flight(&mut self) -> usize {
        self.machine().rings.iter().map(TestRing::in_flight).sum()
    }

    /// Waits until the session of a machine that is gone has ended.
    fn wait_for_end(&self) {
        let server = self.server.as_ref().expect("there is a server");
        let end = Instant::now() + HANG;
        while server.is_connected() {
            assert!(Instant::now() < end, "hung: the session of a machine that is gone");
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    fn step(&self, change: &mut DeviceTransition, timeout: Duration) -> Option<Result<(), TargetError>> {
        let (core_set, end) = (self.core_set(), Instant::now() + timeout);
        loop {
            match change.step(&*core_set) {
                None if Instant::now() < end => std::thread::sleep(Duration::from_micros(200)),
                result => return result,
            }
        }
    }

    /// The properties of the disk as the machine sees them.
    fn negotiated_facts(&mut self) -> DeviceFacts {
        let (config, features) = self.machine().config();
        let mut facts = self.facts.clone();
        assert_eq!(u32::from(config.blk_size), facts.limits.logical_block);
        let can = |feature, max: u32| match features.contains(feature) {
            true => Sectors(max.into()),
            false => Sectors::ZERO,
        };
        facts.boundary = RequestCheckingLayer::VhostUser;
        facts.flags = BioFlags::FUA | BioFlags::NOUNMAP;
        facts.limits.size = Sectors(config.capacity.into());
        facts.limits.read_only = features.contains(VirtioBlkFeatureFlags::RO);
        facts.limits.max_discard = can(VirtioBlkFeatureFlags::DISCARD, config.max_discard_sectors.into());
        facts.limits.max_write_zeroes =
            can(VirtioBlkFeatureFlags::WRITE_ZEROES, config.max_write_zeroes_sectors.into());
        // The server splits reads and writes.
        facts.limits.max_sectors = Sectors(u64::from(u32::MAX) / SECTOR_SIZE);
        let always = VirtioBlkFeatureFlags::FLUSH | VirtioBlkFeatureFlags::MQ;
        assert!(features.contains(always) && u16::from(config.num_queues) >= RINGS as u16, "{features:?}");
        facts
    }
}

impl DeviceWorld for VhostUserWorld {
    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    fn handles(&self) -> usize {
        RINGS
    }

    fn submit(&mut self, handle: usize, requests: Vec<TestRequest>) {
        self.machine().rings[handle].submit(requests);
    }

    fn collect(&mut self, handle: usize) -> Vec<TestRequestResult> {
        self.machine().rings[handle].collect()
    }

    fn settle(&mut self) -> usize {
        std::thread::sleep(Duration::from_millis(20));
        self.machine().rings.iter_mut().for_each(TestRing::step);
        self.in_flight()
    }

    fn change(&mut self, mut change: DeviceTransition) -> Result<(), TargetError> {
        self.step(&mut change, HANG).expect("hung: a change")
    }

    fn begin_change(&mut self, change: &mut DeviceTransition) -> bool {
        self.step(change, Duration::from_millis(20)).is_some()
    }

    fn cores(&self) -> Arc<dyn udm_core::CoreCommandSender> {
        self.core_set()
    }

    fn call_off(&mut self, change: &mut DeviceTransition) {
        change.cancel(&*self.core_set());
    }

    fn vanish_and(&mut self, then: WorldAction) {
        // A front end that is killed: the server completes the requests that it has taken.
        self.machine = None;
        then(self);
        self.wait_for_end();
        self.connect();
    }

    fn reopen(&mut self) {
        assert_eq!(self.in_flight(), 0);
        self.vanish();
    }

    fn quiet(&mut self) {
        assert_eq!(self.in_flight(), 0);
        assert!(self.server.as_ref().expect("there is a server").is_connected());
    }

    /// The server stops while the machine is connected. Requests that it has not taken stay in the
    /// rings.
    fn close(&mut self) {
        if let (Some(server), Some(runtime)) = (self.server.take(), self.runtime.take()) {
            server.stop();
            runtime.stop();
            self.machine = None;
        }
    }
}

impl Drop for VhostUserWorld {
    fn drop(&mut self) {
        // After a failure elsewhere. Requests may never complete, so the cores are not joined.
        self.machine = None;
        drop(self.server.take());
        drop(self.runtime.take());
    }
}
