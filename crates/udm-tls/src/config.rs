//! Certificates and keys from a folder, and the configurations made from them.

use crate::session::TlsSession;
use rustls::client::WebPkiServerVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

const CA_CERT: &str = "ca-cert.pem";
const CA_CRL: &str = "ca-crl.pem";

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsConfigError {
    /// A file is missing, or cannot be read or parsed.
    #[error("{}: {why}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The files do not fit together.
    #[error("{}: {why}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The reason.
        why: String,
    },
    /// The server's name can be in no certificate.
    #[error("{0:?} is no host name and no IP address, so no certificate can prove it")]
    ServerName(String),
}

/// The certificates of a server, which can be read again while it runs.
#[derive(Debug)]
pub struct TlsServerConfig {
    folder: PathBuf,
    verifies_peer: bool,
    current: RwLock<Arc<ServerConfig>>,
}

impl TlsServerConfig {
    /// Reads the files of `folder`. With `verifies_peer`, a client needs a certificate that
    /// `ca-cert.pem` has signed.
    ///
    /// # Errors
    /// A file is missing or not valid; the error names it.
    pub fn load(folder: &Path, verifies_peer: bool) -> Result<TlsServerConfig, TlsConfigError> {
        let current = RwLock::new(load_server(folder, verifies_peer)?);
        Ok(TlsServerConfig { folder: folder.to_owned(), verifies_peer, current })
    }

    /// Reads the files again. Sessions that exist keep the old ones.
    ///
    /// # Errors
    /// As [`TlsServerConfig::load`]; the old files stay in use.
    pub fn reload(&self) -> Result<(), TlsConfigError> {
        let new = load_server(&self.folder, self.verifies_peer)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    /// The folder with the certificates.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Starts the server's side of a session.
    ///
    /// # Errors
    /// The reason, in one line.
    pub fn session(&self) -> Result<TlsSession, String> {
        let current = Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner));
        let connection = ServerConnection::new(current).map_err(|e| e.to_string())?;
        Ok(TlsSession::new(connection.into()))
    }
}

/// The certificates with which a client trusts a server, and proves who it is.
#[derive(Clone, Debug)]
pub struct TlsClientConfig {
    config: Arc<ClientConfig>,
    server: ServerName<'static>,
}

impl TlsClientConfig {
    /// Reads the files of `folder`, for connections to the server of this name.
    ///
    /// # Errors
    /// A file is missing or not valid, or the name is in no certificate.
    pub fn load(folder: &Path, server: &str) -> Result<TlsClientConfig, TlsConfigError> {
        let name = ServerName::try_from(server.to_owned());
        let server = name.map_err(|_| TlsConfigError::ServerName(server.to_owned()))?;
        let refused = |why: String| TlsConfigError::Folder { folder: folder.to_owned(), why };
        let provider = crypto_provider();
        let roots = Arc::new(read_roots(folder)?);
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .with_crls(read_crls(folder)?)
            .build()
            .map_err(|e| refused(e.to_string()))?;
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| refused(e.to_string()))?
            .with_webpki_verifier(verifier);
        let (cert, key) = (folder.join("client-cert.pem"), folder.join("client-key.pem"));
        let config = match (is_there(&cert), is_there(&key)) {
            (false, false) => builder.with_no_client_auth(),
            _ => builder
                .with_client_auth_cert(read_certificates(&cert)?, read_key(&key)?)
                .map_err(|e| refused(format!("client-cert.pem and client-key.pem: {e}")))?,
        };
        Ok(TlsClientConfig { config: Arc::new(config), server })
    }

    /// Starts the client's side of a session.
    ///
    /// # Errors
    /// The reason, in one line.
    pub fn session(&self) -> Result<TlsSession, String> {
        let connection = ClientConnection::new(Arc::clone(&self.config), self.server.clone());
        Ok(TlsSession::new(connection.map_err(|e| e.to_string())?.into()))
    }
}

fn crypto_provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn load_server(folder: &Path, verifies_peer: bool) -> Result<Arc<ServerConfig>, TlsConfigError> {
    let refused = |why: String| TlsConfigError::Folder { folder: folder.to_owned(), why };
    let certificates = read_certificates(&folder.join("server-cert.pem"))?;
    let key = read_key(&folder.join("server-key.pem"))?;
    let provider = crypto_provider();
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])
        .map_err(|e| refused(e.to_string()))?;
    let builder = if verifies_peer {
        let roots = Arc::new(read_roots(folder)?);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider)
            .with_crls(read_crls(folder)?)
            .build()
            .map_err(|e| refused(e.to_string()))?;
        builder.with_client_cert_verifier(verifier)
    } else {
        builder.with_no_client_auth()
    };
    let mut config = builder
        .with_single_cert(certificates, key)
        .map_err(|e| refused(format!("server-cert.pem and server-key.pem: {e}")))?;
    // A ticket would be sent in front of the first answer, and no NBD client resumes a session.
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// Runs `read` on a file; its errors name the file.
fn read_file<T>(
    path: &Path,
    read: impl FnOnce(&Path) -> Result<T, rustls::pki_types::pem::Error>,
) -> Result<T, TlsConfigError> {
    read(path).map_err(|error| {
        let why = match error {
            rustls::pki_types::pem::Error::Io(error) => error.to_string(),
            rustls::pki_types::pem::Error::NoItemsFound => "it has no such PEM section".to_owned(),
            error => format!("{error:?}"),
        };
        TlsConfigError::File { path: path.to_owned(), why }
    })
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsConfigError> {
    let read = |path: &Path| CertificateDer::pem_file_iter(path)?.collect::<Result<Vec<_>, _>>();
    let certificates = read_file(path, read)?;
    if certificates.is_empty() {
        return Err(TlsConfigError::File { path: path.to_owned(), why: "it has no certificate".to_owned() });
    }
    Ok(certificates)
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsConfigError> {
    read_file(path, |path| PrivateKeyDer::from_pem_file(path))
}

fn read_roots(folder: &Path) -> Result<RootCertStore, TlsConfigError> {
    let path = folder.join(CA_CERT);
    let mut roots = RootCertStore::empty();
    for certificate in read_certificates(&path)? {
        let added = roots.add(certificate);
        added.map_err(|e| TlsConfigError::File { path: path.clone(), why: e.to_string() })?;
    }
    Ok(roots)
}

/// Reads the list of revoked certificates, if there is one.
fn read_crls(folder: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsConfigError> {
    let path = folder.join(CA_CRL);
    if !is_there(&path) {
        return Ok(Vec::new());
    }
    let lists: Vec<_> =
        read_file(&path, |path| CertificateRevocationListDer::pem_file_iter(path)?.collect())?;
    if lists.is_empty() {
        // An empty file would mean that nobody is revoked.
        return Err(TlsConfigError::File { path, why: "it has no list of revoked certificates".to_owned() });
    }
    Ok(lists)
}

/// False only if there is no such name: a link that leads nowhere must not count as no file.
fn is_there(path: &Path) -> bool {
    path.symlink_metadata().map_or_else(|error| error.kind() != ErrorKind::NotFound, |_| true)
}
