//! The NVMe/TCP target with a scripted host, over a disk that the tests control. A real host:
//! `udm`'s `nvme_guest`.

mod admission;
mod authentication;
#[path = "../nbd_server/disk.rs"]
#[allow(dead_code, reason = "the tests of the NBD server use all of it")]
mod disk;
mod events;
mod fence;
mod host;
mod hostile;
mod io;
mod life;
mod peers;
mod queues;

use disk::{CompletionOrder, TestDisk};
use host::{Connection, ScriptedHost};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use udm_frontends::nbd::{AllowedClients, Export, Exports};
use udm_frontends::nvme::{NvmeServer, NvmeServerOptions, NvmeServerStats};
use udm_runtime::{Runtime, RuntimeOptions};

const SUBSYSTEM: &str = "nqn.2026-11.org.example:disks";
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555";
const SIZE: u64 = 8 << 20;

/// A target with one namespace and two ports on two cores.
struct TargetFixture {
    disk: Arc<TestDisk>,
    allowed: Arc<AllowedClients>,
    exports: Arc<Exports>,
    server: NvmeServer,
    runtime: Runtime,
}

fn options() -> NvmeServerOptions {
    NvmeServerOptions { subsystem: SUBSYSTEM.into(), ..NvmeServerOptions::default() }
}

impl TargetFixture {
    fn new() -> TargetFixture {
        TargetFixture::with(TestDisk::new(SIZE, CompletionOrder::AtOnce), options())
    }

    fn with(disk: TestDisk, options: NvmeServerOptions) -> TargetFixture {
        let spin_max = Duration::from_micros(20);
        let runtime = Runtime::start(&RuntimeOptions { cpus: vec![None; 2], poll: false, spin_max }).unwrap();
        let (disk, exports) = (Arc::new(disk), Arc::new(Exports::new()));
        let allowed = Arc::new(AllowedClients::default());
        let export = Export::new("disk", "", false, disk.clone()).unwrap();
        exports.add(export.for_clients(Arc::clone(&allowed))).unwrap();
        let listen = [SocketAddr::from(([127, 0, 0, 1], 0)); 2];
        let server = NvmeServer::start(runtime.core_set(), &exports, options, &listen).unwrap();
        TargetFixture { disk, allowed, exports, server, runtime }
    }

    /// A connection that has sent nothing.
    fn connection(&self) -> Connection {
        Connection::open(self.server.bound()[0])
    }

    /// A host with an enabled controller and no I/O queues.
    fn host(&self) -> ScriptedHost {
        ScriptedHost::connect(self.server.bound()[0], 0)
    }

    /// Waits until `wish` accepts the state. The time is a limit against hanging, not a
    /// measurement.
    fn wait_for(&self, what: &str, wish: impl Fn(&NvmeServerStats) -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !wish(&self.server.stats()) {
            assert!(Instant::now() < end, "{what}: {:?}", self.server.stats());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until no host has anything left, and ends.
    fn end(self) {
        self.wait_for("something stays", |stats| stats.connections + stats.controllers == 0);
        let users: usize = self.exports.all().iter().map(|export| export.users()).sum();
        assert_eq!((users, self.disk.held()), (0, 0));
        drop(self.server);
        self.runtime.stop();
    }
}
