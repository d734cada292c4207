//! The bytes of an image, for its tables and its compressed clusters. All calls may block.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

/// The bytes of an image.
pub trait ImageBytes: Send + Sync {
    /// Length in bytes.
    ///
    /// # Errors
    /// It can't be found.
    fn len(&self) -> io::Result<u64>;

    /// True if there are no bytes.
    ///
    /// # Errors
    /// As [`ImageBytes::len`].
    fn is_empty(&self) -> io::Result<bool> {
        self.len().map(|len| len == 0)
    }

    /// Reads bytes from `offset` on; returns their number. It is 0 only at the end.
    ///
    /// # Errors
    /// The bytes can't be read.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Fills `buf`.
    ///
    /// # Errors
    /// As [`ImageBytes::read_at`], and at the end.
    fn read_exact_at(&self, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !buf.is_empty() {
            match self.read_at(buf, offset) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => (buf, offset) = (&mut buf[n..], offset + n as u64),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

impl ImageBytes for File {
    fn len(&self) -> io::Result<u64> {
        match self.metadata()? {
            stat if stat.is_file() => Ok(stat.len()),
            // A block device. Nothing else uses its file position.
            _ => (&mut &*self).seek(SeekFrom::End(0)),
        }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, buf, offset)
    }
}
