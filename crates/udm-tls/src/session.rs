//! One session: received bytes in, plaintext out, and the reverse.

use crate::identity::certificate_names;
use rustls::Connection;
use std::io::{Read, Write};

/// Why a session ends: the peer violates the protocol, or its certificate is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("TLS: {0}")]
pub struct TlsSessionError(String);

/// A TLS session without I/O.
pub struct TlsSession {
    connection: Connection,
    /// Bytes of plaintext that were not read.
    plaintext: usize,
}

impl TlsSession {
    pub(crate) fn new(mut connection: Connection) -> TlsSession {
        // The owner bounds what it writes.
        connection.set_buffer_limit(None);
        TlsSession { connection, plaintext: 0 }
    }

    /// True until both sides have proved what they must. Plaintext is neither read nor sent before.
    #[must_use]
    pub fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// Takes received bytes from `input` until it is used up or plaintext is available
    /// ([`TlsSession::read`]). Bytes to send may result.
    ///
    /// # Errors
    /// The session is over. An alert for the peer may be among the bytes to send.
    pub fn receive(&mut self, input: &mut &[u8]) -> Result<(), TlsSessionError> {
        while !input.is_empty() && !self.has_plaintext() {
            match self.connection.read_tls(input) {
                // The peer has ended the session: what follows is not read.
                Ok(0) => *input = &[],
                Ok(_) => {}
                Err(error) => return Err(TlsSessionError(error.to_string())),
            }
            let state = self.connection.process_new_packets();
            let state = state.map_err(|error| TlsSessionError(error.to_string()))?;
            self.plaintext = state.plaintext_bytes_to_read();
        }
        Ok(())
    }

    /// True if [`TlsSession::read`] returns bytes.
    #[must_use]
    pub fn has_plaintext(&self) -> bool {
        self.plaintext > 0
    }

    /// Reads plaintext into `out`; returns the number of bytes, 0 if there is none.
    pub fn read(&mut self, out: &mut [u8]) -> usize {
        // An error says that there is none, or that the peer has ended the session.
        let n = self.connection.reader().read(out).unwrap_or(0);
        self.plaintext -= n;
        n
    }

    /// Encrypts `plaintext`: bytes to send result.
    pub fn write(&mut self, plaintext: &[u8]) {
        let written = self.connection.writer().write_all(plaintext);
        debug_assert!(written.is_ok(), "a session takes all plaintext in memory");
    }

    /// Tells the peer that nothing follows: bytes to send result.
    pub fn close(&mut self) {
        self.connection.send_close_notify();
    }

    /// True if there are bytes to send.
    #[must_use]
    pub fn has_output(&self) -> bool {
        self.connection.wants_write()
    }

    /// Appends the bytes to send to `out`.
    pub fn take_output(&mut self, out: &mut Vec<u8>) {
        while self.connection.wants_write() {
            let written = self.connection.write_tls(out);
            debug_assert!(written.is_ok_and(|n| n > 0), "a vector takes all bytes");
        }
    }

    /// The names in the peer's verified certificate: its common name, and its `subjectAltName`s.
    /// None if it has proved nothing.
    #[must_use]
    pub fn peer_names(&self) -> Vec<String> {
        let certificates = self.connection.peer_certificates();
        certificates.and_then(|all| all.first()).map(|peer| certificate_names(peer)).unwrap_or_default()
    }
}
