//! An NBD server on two cores with one export, and three clients. Two clients are on one core, one
//! is on the other. Some use structured replies, some simple ones.
//!
//! Clients may be *moved*: then each one changes to the other core before and after each operation.

use super::client::NbdTestClient;
use super::{DeviceWorld, HANG, WorldAction};
use crate::{DeviceFacts, RequestCheckingLayer, TestRequest, TestRequestResult};
use std::sync::Arc;
use std::time::{Duration, Instant};
use udm_core::{BioFlags, Device, SECTOR_SIZE, Sectors};
use udm_dm::{DeviceTransition, TargetError};
use udm_frontends::nbd::{Export, Exports, NbdServer, NbdServerLimits};
use udm_runtime::{Runtime, RuntimeOptions};
use udm_wire::nbd::{ExportFlags, ExportInfoItem};

const CLIENTS: usize = 3;

pub(super) struct NbdWorld {
    runtime: Option<Runtime>,
    server: Option<NbdServer>,
    clients: Vec<NbdTestClient>,
    /// Requests that the server had received before these clients. `sent` are the requests of these
    /// clients.
    taken_before: u64,
    sent: u64,
    moved: bool,
    facts: DeviceFacts,
}

impl NbdWorld {
    pub(super) fn new(device: &Arc<dyn Device>, facts: DeviceFacts, moved: bool) -> NbdWorld {
        let spin_max = Duration::from_micros(20);
        let options = RuntimeOptions { cpus: vec![None; 2], poll: false, spin_max };
        let runtime = Runtime::start(&options).expect("two cores");
        let exports = Arc::new(Exports::new());
        let export = Export::new("subject", "", false, device.clone()).expect("a name");
        exports.add(export).expect("the first export");
        let server = NbdServer::start(runtime.core_set(), exports, NbdServerLimits::default(), &[]);
        let server = server.expect("a server without listeners");
        let mut nbd = NbdWorld {
            runtime: Some(runtime),
            server: Some(server),
            clients: Vec::new(),
            taken_before: 0,
            sent: 0,
            moved,
            facts,
        };
        nbd.connect();
        nbd.facts = negotiated_facts(&nbd.facts, &nbd.clients[0].infos);
        nbd
    }

    fn connect(&mut self) {
        let server = self.server.as_ref().expect("connections are made while there is a server");
        for n in 0..CLIENTS {
            let (ours, theirs) = NbdTestClient::pair();
            server.adopt(theirs).expect("room for a client");
            self.clients.push(NbdTestClient::new(ours, n % 2 == 0));
        }
        let same = self.clients.iter().all(|client| {
            let geometry = |infos: &[ExportInfoItem]| negotiated_facts(&self.facts, infos).limits;
            geometry(&client.infos) == geometry(&self.clients[0].infos)
        });
        assert!(same, "all clients negotiate the same limits");
        (self.taken_before, self.sent) = (self.taken(), 0);
    }

    /// Moves the clients to the other core, if this world moves clients.
    fn move_all(&self) {
        if let Some(server) = self.server.as_ref().filter(|_| self.moved) {
            server.rotate();
        }
    }

    /// Requests that the server has received so far.
    fn taken(&self) -> u64 {
        let stats = self.server.as_ref().expect("there is a server").stats();
        stats.requests + stats.in_flight
    }

    /// Waits until the server has received all requests. When it stops, it need not answer requests
    /// that it has not received.
    fn wait_until_taken(&self) {
        let end = Instant::now() + HANG;
        while self.taken() - self.taken_before < self.sent {
            assert!(Instant::now() < end, "hung: the server does not receive all requests");
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    /// Waits until `connections` connections are open and nothing is in flight. The statistics lag
    /// by a turn.
    fn wait_for(&self, connections: usize) {
        let server = self.server.as_ref().expect("there is a server");
        let end = Instant::now() + HANG;
        loop {
            let stats = server.stats();
            if stats.connections == connections && stats.in_flight == 0 {
                return;
            }
            assert!(Instant::now() < end, "hung: {connections} connections expected: {stats:?}");
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    fn step(&self, change: &mut DeviceTransition, timeout: Duration) -> Option<Result<(), TargetError>> {
        let core_set = self.runtime.as_ref().expect("there are cores").core_set().clone();
        let end = Instant::now() + timeout;
        loop {
            match change.step(&*core_set) {
                None if Instant::now() < end => std::thread::sleep(Duration::from_micros(200)),
                result => return result,
            }
        }
    }
}

/// The properties of the device as negotiated in the handshake.
fn negotiated_facts(below: &DeviceFacts, infos: &[ExportInfoItem]) -> DeviceFacts {
    let mut facts = below.clone();
    facts.boundary = RequestCheckingLayer::Nbd;
    facts.flags = BioFlags::FUA | BioFlags::NOUNMAP;
    for info in infos {
        match info {
            ExportInfoItem::Export { size, flags } => {
                assert_eq!(size % SECTOR_SIZE, 0, "a size in whole sectors");
                let block = u64::from(below.limits.logical_block);
                let all = Sectors::from_bytes(u64::from(u32::MAX) / block * block);
                let can = |flag| if flags.contains(flag) { all } else { Sectors::ZERO };
                facts.limits.size = Sectors::from_bytes(*size);
                facts.limits.read_only = flags.contains(ExportFlags::READ_ONLY);
                facts.limits.max_discard = can(ExportFlags::SEND_TRIM);
                facts.limits.max_write_zeroes = can(ExportFlags::SEND_WRITE_ZEROES);
                let always = ExportFlags::SEND_FLUSH | ExportFlags::SEND_FUA | ExportFlags::CAN_MULTI_CONN;
                assert!(flags.contains(always), "{flags:?}");
            }
            ExportInfoItem::BlockSize(blocks) => {
                // These are the limits of the device; a request may begin and end at any byte.
                assert_eq!(blocks.minimum, 1);
                facts.limits.max_sectors = Sectors::from_bytes(blocks.maximum.into());
            }
            _ => {}
        }
    }
    facts
}

impl DeviceWorld for NbdWorld {
    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    fn handles(&self) -> usize {
        CLIENTS
    }

    fn submit(&mut self, handle: usize, requests: Vec<TestRequest>) {
        self.sent += requests.len() as u64;
        self.move_all();
        for request in requests {
            self.clients[handle].send(&request);
        }
        self.move_all();
    }

    fn collect(&mut self, handle: usize) -> Vec<TestRequestResult> {
        self.move_all();
        self.clients[handle].collect()
    }

    fn settle(&mut self) -> usize {
        std::thread::sleep(Duration::from_millis(20));
        self.clients.iter_mut().for_each(NbdTestClient::look);
        self.clients.iter().map(NbdTestClient::in_flight).sum()
    }

    fn change(&mut self, mut change: DeviceTransition) -> Result<(), TargetError> {
        self.step(&mut change, HANG).expect("hung: a change")
    }

    fn begin_change(&mut self, change: &mut DeviceTransition) -> bool {
        self.step(change, Duration::from_millis(20)).is_some()
    }

    fn cores(&self) -> Arc<dyn udm_core::CoreCommandSender> {
        self.runtime.as_ref().expect("there are cores").core_set().clone()
    }

    fn call_off(&mut self, change: &mut DeviceTransition) {
        let core_set = self.runtime.as_ref().expect("there are cores").core_set().clone();
        change.cancel(&*core_set);
    }

    fn vanish_and(&mut self, then: WorldAction) {
        // Dropping a client closes its socket and does not wait for the server.
        self.clients.clear();
        then(self);
        self.wait_for(0);
        self.connect();
    }

    fn reopen(&mut self) {
        self.clients.drain(..).for_each(NbdTestClient::leave);
        self.wait_for(0);
        self.connect();
    }

    fn quiet(&mut self) {
        self.wait_for(CLIENTS);
    }

    /// The first client disconnects, the second vanishes, and the third is connected when the
    /// server stops.
    fn close(&mut self) {
        if self.clients.len() == CLIENTS {
            self.wait_until_taken();
            let mut last = self.clients.pop().expect("the third");
            drop(self.clients.pop());
            self.clients.drain(..).for_each(NbdTestClient::leave);
            if let (Some(server), Some(runtime)) = (self.server.take(), self.runtime.take()) {
                server.stop();
                runtime.stop();
            }
            last.await_end();
            assert_eq!(last.in_flight(), 0, "the server stopped and did not answer");
        }
    }
}

impl Drop for NbdWorld {
    fn drop(&mut self) {
        // After a failure elsewhere. Requests may never complete, so the cores are not joined.
        self.clients.clear();
        drop(self.runtime.take());
    }
}
