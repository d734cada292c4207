//! The certificates of an NBD server over TLS.

use super::client::NbdClientError;
use udm_tls::TlsClientConfig;
use udm_wire::uri::NbdUri;

/// Reads the certificates that `uri` names; `None` if it uses no TLS.
///
/// # Errors
/// A file is missing or not valid.
pub(super) fn load_tls_client_config(uri: &NbdUri) -> Result<Option<TlsClientConfig>, NbdClientError> {
    let Some(tls) = &uri.tls else { return Ok(None) };
    let config = TlsClientConfig::load(&tls.certificates, uri.tls_hostname());
    config.map(Some).map_err(|error| NbdClientError::Tls(error.to_string()))
}
