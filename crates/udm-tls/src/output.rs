//! Encrypted bytes on their way to the socket.

use crate::session::TlsSession;
use udm_buf::Buf;

/// Puts the bytes that a session has to send into a buffer, one at a time, whose memory is used
/// again: a large one is mapped by the system, and cleared page by page.
#[derive(Default)]
pub struct TlsOutputBuffer {
    bytes: Vec<u8>,
    /// The buffer of the last send.
    free: Option<Buf>,
}

impl TlsOutputBuffer {
    /// The bytes that `session` has to send; `None` if there are none.
    pub fn take(&mut self, session: &mut TlsSession) -> Option<Buf> {
        session.take_output(&mut self.bytes);
        let len = self.bytes.len();
        if len == 0 {
            return None;
        }
        let reused = self.free.take_if(|buf| buf.reclaim() && buf.len() >= len);
        let mut buf = reused.unwrap_or_else(|| Buf::zeroed(len));
        buf.truncate(len);
        buf.copy_from_slice(&self.bytes);
        self.bytes.clear();
        Some(buf)
    }

    /// Takes the buffer of a completed send back.
    pub fn put_back(&mut self, sent: Option<Buf>) {
        self.free = sent;
    }

    /// Bytes of memory.
    #[must_use]
    pub fn held(&self) -> usize {
        self.bytes.capacity() + self.free.as_ref().map_or(0, Buf::slab_len)
    }

    /// Frees memory that is only kept for reuse.
    pub fn trim(&mut self) {
        *self = TlsOutputBuffer::default();
    }
}
