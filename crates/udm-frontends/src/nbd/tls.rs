//! Whether a server does TLS.

use std::sync::Arc;
use udm_tls::TlsServerConfig;

/// TLS of a server.
#[derive(Clone, Debug)]
pub struct NbdServerTls {
    /// The certificates.
    pub config: Arc<TlsServerConfig>,
    /// A client without TLS gets nothing but the answer that it is required.
    pub is_required: bool,
}
