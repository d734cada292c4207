//! An NBD server of udm with a disk in memory, for devices under test that are its clients.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use udm_frontends::nbd::{Export, Exports, ListenAddress, NbdServer, NbdServerLimits};
use udm_runtime::{Runtime, RuntimeOptions};
use udm_wire::uri::{self, NbdAddress, NbdUri};

/// A server that runs until it is dropped.
pub struct NbdTestServer(Option<(NbdServer, Runtime)>);

impl NbdTestServer {
    /// Serves the device of a URI on a socket at `path`. Returns the URI of the export.
    ///
    /// # Panics
    /// If the device or the socket cannot be created.
    #[must_use]
    pub fn start(device: &str, path: &Path) -> (NbdTestServer, NbdUri) {
        let spin_max = Duration::from_micros(20);
        let options = RuntimeOptions { cpus: vec![None], poll: false, spin_max };
        let runtime = Runtime::start(&options).expect("a core");
        let device = udm_backends::open_standalone_device(&uri::parse_device_uri(device).expect("a device"))
            .expect("a device");
        let exports = Arc::new(Exports::new());
        exports.add(Export::new("disk", "", false, device).expect("a name")).expect("the first export");
        let listen = [ListenAddress::Unix(path.to_owned())];
        let server = NbdServer::start(runtime.core_set(), exports, NbdServerLimits::default(), &listen);
        let server = server.expect("a server");
        let address = NbdAddress::Unix(path.to_owned());
        (NbdTestServer(Some((server, runtime))), NbdUri::new(address, "disk"))
    }
}

impl Drop for NbdTestServer {
    fn drop(&mut self) {
        if let Some((server, runtime)) = self.0.take() {
            server.stop();
            runtime.stop();
        }
    }
}
