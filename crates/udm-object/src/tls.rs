//! The certificates that servers are checked against: those of the system.

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use std::path::PathBuf;
use std::sync::Arc;

/// The files with the certificates of the system, by distribution.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The configuration of connections with TLS. `SSL_CERT_FILE` names another file with certificates.
///
/// # Errors
/// The reason in one line: no file has a certificate.
pub(crate) fn client_config() -> Result<Arc<ClientConfig>, String> {
    let own = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    let files = match own {
        Some(file) => vec![file],
        None => BUNDLES.iter().map(PathBuf::from).collect(),
    };
    let mut roots = RootCertStore::empty();
    for file in &files {
        let Ok(certificates) = CertificateDer::pem_file_iter(file) else { continue };
        // A certificate that cannot be parsed proves nothing and is left out.
        roots.add_parsable_certificates(certificates.flatten());
        if !roots.is_empty() {
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
            let config = config.map_err(|e| e.to_string())?;
            return Ok(Arc::new(config.with_root_certificates(roots).with_no_client_auth()));
        }
    }
    let names: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    Err(format!("no certificates of authorities in {} (SSL_CERT_FILE names a file)", names.join(", ")))
}
