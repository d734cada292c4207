//! TLS for NBD connections: sessions without I/O, and certificates from a folder.
//!
//! A [`TlsSession`] turns received bytes into plaintext, and plaintext into bytes to send. Whoever
//! owns the socket moves the bytes, so a session works on a core with a ring and on a thread that
//! blocks. [`TlsServerConfig`] and [`TlsClientConfig`] make sessions from the files that nbdkit,
//! libnbd and QEMU use:
//!
//! | file | server | client |
//! |---|---|---|
//! | `ca-cert.pem` | with `verify_peer`: who signs certificates of clients | who signs the server's |
//! | `ca-crl.pem` | optional: revoked certificates of clients | optional: of servers |
//! | `server-cert.pem`, `server-key.pem` | needed | |
//! | `client-cert.pem`, `client-key.pem` | | both or none |
//!
//! Only TLS 1.3 is spoken, without tickets and without early data. A certificate must have its
//! names in the extension `subjectAltName`; the common name is not compared with host names.
//! The protocol is rustls's with the cryptography of ring.

mod config;
mod identity;
mod output;
mod session;

pub use config::{TlsClientConfig, TlsConfigError, TlsServerConfig};
pub use output::TlsOutputBuffer;
pub use session::{TlsSession, TlsSessionError};
