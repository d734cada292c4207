//! TLS on a connection: between the bytes of the socket and the protocol.
//!
//! Received bytes are decrypted into a second buffer, and a buffer to send is encrypted into
//! another one. Both cost a copy more than a plain connection. rustls allocates a vector per record
//! of 16 KiB.

use udm_core::{Buf, BufPool};
use udm_tls::{TlsOutputBuffer, TlsSession, TlsSessionError};

/// A record that has arrived in part, with its header: the plaintext that a receive may add to its
/// own length.
pub(crate) const RECORD_MAX: usize = (16 << 10) + 512;

/// Size of the receive buffer in bytes at most, so that the plaintext fits into a buffer too.
pub(crate) const TLS_ROOM_MAX: usize = 128 << 10;

/// The TLS of a connection.
pub(crate) struct ConnectionTls {
    session: TlsSession,
    /// The buffer whose bytes are being sent, encrypted.
    plaintext: Option<Buf>,
    output: TlsOutputBuffer,
    /// The peer has violated the protocol: nothing is decrypted or sent any more.
    is_broken: bool,
}

impl ConnectionTls {
    pub(crate) fn new(session: TlsSession) -> ConnectionTls {
        ConnectionTls { session, plaintext: None, output: TlsOutputBuffer::default(), is_broken: false }
    }

    /// True until requests can be encrypted.
    pub(crate) fn is_handshaking(&self) -> bool {
        self.session.is_handshaking()
    }

    /// True after an error of [`ConnectionTls::decrypt`].
    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Encrypts `plaintext`, and keeps it until the send is complete.
    pub(crate) fn encrypt(&mut self, plaintext: Buf) -> Buf {
        self.session.write(&plaintext);
        self.plaintext = Some(plaintext);
        self.take_output().unwrap_or_else(|| Buf::zeroed(0))
    }

    /// Bytes that must be sent now, if there are some.
    pub(crate) fn take_output(&mut self) -> Option<Buf> {
        self.output.take(&mut self.session)
    }

    /// Handles the end of a send of `encrypted`. Returns the buffer whose last byte has been sent.
    pub(crate) fn take_sent(&mut self, encrypted: Option<Buf>) -> Option<Buf> {
        self.output.put_back(encrypted);
        self.plaintext.take()
    }

    /// Decrypts received bytes. Returns a buffer, and the number of bytes at its start.
    ///
    /// # Errors
    /// The peer violates the protocol, or its certificate is refused.
    pub(crate) fn decrypt(
        &mut self,
        mut input: &[u8],
        pool: &mut BufPool,
    ) -> Result<(Buf, usize), TlsSessionError> {
        let mut plaintext = pool.get(input.len() + RECORD_MAX);
        let mut at = 0;
        while !input.is_empty() {
            self.session.receive(&mut input).inspect_err(|_| self.is_broken = true)?;
            while self.session.has_plaintext() {
                let n = self.session.read(&mut plaintext[at..]);
                assert!(n > 0, "the plaintext is no longer than its records");
                at += n;
            }
        }
        Ok((plaintext, at))
    }

    /// Encrypts the last message, and says that nothing follows.
    pub(crate) fn encrypt_last(&mut self, plaintext: &[u8]) -> Option<Buf> {
        self.session.write(plaintext);
        self.session.close();
        self.take_output()
    }
}
