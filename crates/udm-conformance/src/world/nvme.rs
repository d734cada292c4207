//! Two hosts of an NVMe/TCP target on two cores. The three I/O queues are the handles: two of one
//! host, on both cores, and one of the other host, which uses digests.

use super::nvme_host::{NvmeTestHost, NvmeTestQueue};
use super::{DeviceWorld, HANG, WorldAction};
use crate::{DeviceFacts, RequestCheckingLayer, TestRequest, TestRequestResult};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use udm_core::{BioFlags, Device, SECTOR_SIZE, Sectors};
use udm_dm::{DeviceTransition, TargetError};
use udm_frontends::nbd::{Export, Exports};
use udm_frontends::nvme::{NvmeServer, NvmeServerOptions};
use udm_runtime::{ProcessCores, Runtime, RuntimeOptions};

const SUBSYSTEM: &str = "nqn.2014-08.org.example:subject";
const QUEUES: usize = 3;
/// Those of the queues, and two admin queues.
const CONNECTIONS: usize = QUEUES + 2;

pub(super) struct NvmeWorld {
    runtime: Option<Runtime>,
    server: Option<NvmeServer>,
    /// Dropped before the hosts.
    queues: Vec<NvmeTestQueue>,
    hosts: Vec<NvmeTestHost>,
    facts: DeviceFacts,
}

impl NvmeWorld {
    pub(super) fn new(device: &Arc<dyn Device>, facts: DeviceFacts) -> NvmeWorld {
        let spin_max = Duration::from_micros(20);
        let options = RuntimeOptions { cpus: vec![None; 2], poll: false, spin_max };
        let runtime = Runtime::start(&options).expect("two cores");
        let exports = Arc::new(Exports::new());
        let export = Export::new("subject", "", false, device.clone()).expect("a name");
        exports.add(export).expect("the first export");
        let options = NvmeServerOptions { subsystem: SUBSYSTEM.to_owned(), ..NvmeServerOptions::default() };
        let listen = [SocketAddr::from(([127, 0, 0, 1], 0))];
        let server = NvmeServer::start(runtime.core_set(), &exports, options, &listen).expect("a target");
        let (runtime, server) = (Some(runtime), Some(server));
        let mut world = NvmeWorld { runtime, server, queues: Vec::new(), hosts: Vec::new(), facts };
        world.connect();
        world.facts = world.negotiated_facts();
        world
    }

    fn server(&self) -> &NvmeServer {
        self.server.as_ref().expect("there is a server")
    }

    fn connect(&mut self) {
        let address = self.server().bound()[0];
        for digests in [false, true] {
            self.hosts.push(NvmeTestHost::new(address, SUBSYSTEM, digests));
        }
        let queue = |host: usize, queue| self.hosts[host].queue(queue);
        self.queues = vec![queue(0, 1), queue(0, 2), queue(1, 1)];
    }

    fn disconnect(&mut self) {
        self.queues.clear();
        self.hosts.clear();
    }

    fn core_set(&self) -> Arc<ProcessCores> {
        self.runtime.as_ref().expect("there are cores").core_set().clone()
    }

    fn in_flight(&self) -> usize {
        self.queues.iter().map(NvmeTestQueue::in_flight).sum()
    }

    /// Waits until `connections` connections are open.
    fn wait_for(&self, connections: usize) {
        let end = Instant::now() + HANG;
        while self.server().stats().connections != connections {
            assert!(Instant::now() < end, "hung: {connections} expected: {:?}", self.server().stats());
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

    /// The properties of the namespace as hosts see them.
    fn negotiated_facts(&self) -> DeviceFacts {
        let namespace = &self.hosts[0].namespace;
        let mut facts = self.facts.clone();
        let block = 1_u64 << namespace[130];
        assert_eq!(block, u64::from(facts.limits.logical_block));
        let blocks = u64::from_le_bytes(*namespace.first_chunk().expect("the size"));
        let in_sectors = |blocks: u64| Sectors(blocks.saturating_mul(block / SECTOR_SIZE));
        facts.boundary = RequestCheckingLayer::VhostUser;
        facts.flags = BioFlags::FUA | BioFlags::NOUNMAP;
        facts.limits.size = in_sectors(blocks);
        facts.limits.read_only = namespace[99] & 1 != 0;
        facts.limits.max_discard =
            if namespace[24] & 1 != 0 { in_sectors(u32::MAX.into()) } else { Sectors::ZERO };
        // The target writes zeroes as data if the device cannot.
        facts.limits.max_write_zeroes = in_sectors(65536);
        facts.limits.max_sectors = Sectors::from_bytes(1 << 20);
        facts
    }
}

impl DeviceWorld for NvmeWorld {
    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    fn handles(&self) -> usize {
        QUEUES
    }

    fn submit(&mut self, handle: usize, requests: Vec<TestRequest>) {
        self.queues[handle].submit(&requests);
    }

    fn collect(&mut self, handle: usize) -> Vec<TestRequestResult> {
        self.queues[handle].collect()
    }

    fn settle(&mut self) -> usize {
        std::thread::sleep(Duration::from_millis(20));
        self.queues.iter_mut().for_each(NvmeTestQueue::look);
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
        self.disconnect();
        then(self);
        self.wait_for(0);
        self.connect();
    }

    fn reopen(&mut self) {
        assert_eq!(self.in_flight(), 0);
        self.vanish();
    }

    fn quiet(&mut self) {
        assert_eq!(self.in_flight(), 0);
        self.wait_for(CONNECTIONS);
    }

    /// The server stops while the hosts are connected.
    fn close(&mut self) {
        if let (Some(server), Some(runtime)) = (self.server.take(), self.runtime.take()) {
            drop(server);
            runtime.stop();
            self.disconnect();
        }
    }
}

impl Drop for NvmeWorld {
    fn drop(&mut self) {
        // After a failure elsewhere. Requests may never complete, so the cores are not joined.
        self.disconnect();
        drop(self.server.take());
        drop(self.runtime.take());
    }
}
