//! The server with a scripted client, over a disk that the tests control. Real clients: `udm`'s
//! `nbd_clients`.

mod admission;
mod client;
mod commands;
mod disk;
mod extended;
mod hostile;
mod life;
mod limits;
mod migration;
mod partial_blocks;
mod status;

use client::ScriptedClient;
use disk::TestDisk;
use std::sync::Arc;
use std::time::{Duration, Instant};
use udm_frontends::nbd::{Export, Exports, ListenAddress, NbdServer, NbdServerLimits, NbdServerStats};
use udm_runtime::{Runtime, RuntimeOptions};

/// A server with one export, `disk`, on two cores.
struct ServerFixture {
    disk: Arc<TestDisk>,
    exports: Arc<Exports>,
    server: NbdServer,
    runtime: Runtime,
}

impl ServerFixture {
    fn new(disk: TestDisk) -> ServerFixture {
        ServerFixture::with(disk, NbdServerLimits::default(), &[])
    }

    fn with(disk: TestDisk, options: NbdServerLimits, listen: &[ListenAddress]) -> ServerFixture {
        let spin_max = Duration::from_micros(20);
        let runtime = Runtime::start(&RuntimeOptions { cpus: vec![None; 2], poll: false, spin_max }).unwrap();
        let (disk, exports) = (Arc::new(disk), Arc::new(Exports::new()));
        exports.add(Export::new("disk", "a disk for tests", false, disk.clone()).unwrap()).unwrap();
        let server = NbdServer::start(runtime.core_set(), exports.clone(), options, listen).unwrap();
        ServerFixture { disk, exports, server, runtime }
    }

    /// A client that has chosen the export.
    fn client(&self, structured: bool) -> ScriptedClient {
        let mut client = self.unnegotiated_client();
        client.go("disk", structured);
        client
    }

    /// A client that has sent nothing yet.
    fn unnegotiated_client(&self) -> ScriptedClient {
        let (client, socket) = ScriptedClient::pair();
        self.server.adopt(socket).unwrap();
        client
    }

    /// Waits until `wish` accepts the counters. The time is a limit against hanging, not a
    /// measurement.
    fn wait_for(&self, what: &str, wish: impl Fn(&NbdServerStats) -> bool) -> NbdServerStats {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let stats = self.server.stats();
            if wish(&stats) {
                return stats;
            }
            assert!(Instant::now() < end, "{what}: {stats:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until no client has anything left, and checks that.
    fn wait_until_empty(&self) {
        // A block-status thread may use the export a little longer than its client.
        let users = || self.exports.all().iter().map(|e| e.users()).sum::<usize>();
        let stats = self.wait_for("something stays", |s| s.connections + s.orphans + users() == 0);
        assert_eq!(stats.in_flight, 0, "{stats:?}");
        assert_eq!(self.disk.held(), 0);
    }

    fn end(self) {
        self.server.stop();
        self.runtime.stop();
    }
}
