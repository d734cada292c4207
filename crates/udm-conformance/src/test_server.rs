//! Servers of udm with a disk in memory, for devices under test that are their clients.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use udm_frontends::nbd::{Export, Exports, ListenAddress, NbdServer, NbdServerLimits, NbdServerTls};
use udm_frontends::nvme::{NvmeServer, NvmeServerOptions};
use udm_runtime::{Runtime, RuntimeOptions};
use udm_tls::TlsServerConfig;
use udm_wire::uri::{self, NbdAddress, NbdTlsParams, NbdUri, NvmeUri};

/// A server that runs until it is dropped.
pub struct NbdTestServer(Option<(NbdServer, Runtime)>);

impl NbdTestServer {
    /// Serves the device of a URI on a socket at `path`. Returns the URI of the export.
    ///
    /// # Panics
    /// If the device or the socket cannot be created.
    #[must_use]
    pub fn start(device: &str, path: &Path) -> (NbdTestServer, NbdUri) {
        NbdTestServer::start_with(device, path, None)
    }

    /// As [`NbdTestServer::start`], for clients that use TLS and have a certificate. The
    /// certificates are those of the tests of `udm-tls`.
    ///
    /// # Panics
    /// As [`NbdTestServer::start`].
    #[must_use]
    pub fn start_with_tls(device: &str, path: &Path) -> (NbdTestServer, NbdUri) {
        let certificates = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../udm-tls/tests/data"));
        let config = Arc::new(TlsServerConfig::load(certificates, true).expect("certificates"));
        let tls = NbdServerTls { config, is_required: true };
        let (server, uri) = NbdTestServer::start_with(device, path, Some(tls));
        let tls = NbdTlsParams { certificates: certificates.to_owned(), hostname: None };
        (server, NbdUri { tls: Some(tls), ..uri })
    }

    fn start_with(device: &str, path: &Path, tls: Option<NbdServerTls>) -> (NbdTestServer, NbdUri) {
        let spin_max = Duration::from_micros(20);
        let options = RuntimeOptions { cpus: vec![None], poll: false, spin_max };
        let runtime = Runtime::start(&options).expect("a core");
        let device = udm_backends::open_standalone_device(&uri::parse_device_uri(device).expect("a device"))
            .expect("a device");
        let exports = Arc::new(Exports::new());
        exports.add(Export::new("disk", "", false, device).expect("a name")).expect("the first export");
        let listen = [ListenAddress::Unix(path.to_owned())];
        let (core_set, limits) = (runtime.core_set(), NbdServerLimits::default());
        let server = NbdServer::start_with(core_set, exports, limits, tls, &listen, Vec::new(), true);
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

/// A target that runs until it is dropped.
pub struct NvmeTestTarget(Option<(NvmeServer, Runtime)>);

impl NvmeTestTarget {
    /// Serves the device of a URI on two cores. Returns the URI of the namespace.
    ///
    /// # Panics
    /// If the device or the target cannot be created.
    #[must_use]
    pub fn start(device: &str) -> (NvmeTestTarget, NvmeUri) {
        const SUBSYSTEM: &str = "nqn.2014-08.org.example:below";
        let spin_max = Duration::from_micros(20);
        let options = RuntimeOptions { cpus: vec![None; 2], poll: false, spin_max };
        let runtime = Runtime::start(&options).expect("two cores");
        let device = udm_backends::open_standalone_device(&uri::parse_device_uri(device).expect("a device"))
            .expect("a device");
        let exports = Arc::new(Exports::new());
        exports.add(Export::new("disk", "", false, device).expect("a name")).expect("the first export");
        let options = NvmeServerOptions { subsystem: SUBSYSTEM.to_owned(), ..NvmeServerOptions::default() };
        let listen = [SocketAddr::from(([127, 0, 0, 1], 0))];
        let server = NvmeServer::start(runtime.core_set(), &exports, options, &listen).expect("a target");
        let port = server.bound()[0].port();
        (NvmeTestTarget(Some((server, runtime))), NvmeUri::new("127.0.0.1", port, SUBSYSTEM, 1))
    }
}

impl Drop for NvmeTestTarget {
    fn drop(&mut self) {
        if let Some((server, runtime)) = self.0.take() {
            drop(server);
            runtime.stop();
        }
    }
}
