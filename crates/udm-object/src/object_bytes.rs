//! The bytes of an object for the reader of qcow2 images, which runs on threads that may block.

use crate::client::RuntimeThread;
use crate::source::ObjectSource;
use bytes::Bytes;
use std::io;
use std::ops::Range;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Instant;
use udm_backends::ImageBytes;

/// Bytes from the start of the object that are kept: the header of an image is read in many small
/// pieces.
const HEAD: u64 = 64 << 10;

/// The longest range of one request.
const RANGE_MAX: u64 = 4 << 20;

pub(crate) struct ObjectBytes {
    source: Arc<ObjectSource>,
    thread: Arc<RuntimeThread>,
    head: OnceLock<Bytes>,
}

impl ObjectBytes {
    pub(crate) fn new(source: Arc<ObjectSource>, thread: Arc<RuntimeThread>) -> ObjectBytes {
        ObjectBytes { source, thread, head: OnceLock::new() }
    }

    /// Reads a range within the object, and waits for it.
    fn fetch(&self, range: Range<u64>) -> io::Result<Bytes> {
        let (reply, bytes) = mpsc::channel();
        let source = Arc::clone(&self.source);
        self.thread.handle.spawn(async move {
            let since = Instant::now();
            // The receiver waits below.
            let _ = reply.send(source.read(range, since).await);
        });
        let result = bytes.recv().map_err(|_| io::Error::other("the thread for objects has ended"))?;
        result.map_err(|failure| io::Error::other(failure.text().to_owned()))
    }
}

impl ImageBytes for ObjectBytes {
    fn len(&self) -> io::Result<u64> {
        Ok(self.source.len())
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let len = (buf.len() as u64).min(self.source.len().saturating_sub(offset)).min(RANGE_MAX);
        if len == 0 {
            return Ok(0);
        }
        let (bytes, from) = if offset + len <= HEAD {
            let head = match self.head.get() {
                Some(head) => head.clone(),
                None => {
                    let head = self.fetch(0..HEAD.min(self.source.len()))?;
                    self.head.get_or_init(|| head).clone()
                }
            };
            (head, offset as usize)
        } else {
            (self.fetch(offset..offset + len)?, 0)
        };
        let len = len as usize;
        buf[..len].copy_from_slice(&bytes[from..from + len]);
        Ok(len)
    }
}
