//! As much of an NBD client as these tests need.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;

/// What an export says of itself in its transmission flags.
pub const READ_ONLY: u16 = 1 << 1;

/// A connection to an export.
pub struct Client {
    stream: UnixStream,
    pub size: u64,
    pub flags: u16,
}

impl Client {
    pub fn connect(socket: &Path, export: &str) -> Client {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(crate::support::PATIENCE)).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        // Fixed newstyle, no zeroes; NBD_OPT_EXPORT_NAME.
        let mut hello = 3u32.to_be_bytes().to_vec();
        hello.extend(b"IHAVEOPT");
        hello.extend(1u32.to_be_bytes());
        hello.extend((export.len() as u32).to_be_bytes());
        hello.extend(export.as_bytes());
        stream.write_all(&hello).unwrap();
        let mut answer = [0; 10];
        stream.read_exact(&mut answer).unwrap();
        let (size, flags) = answer.split_at(8);
        let size = u64::from_be_bytes(size.try_into().unwrap());
        Client { stream, size, flags: u16::from_be_bytes(flags.try_into().unwrap()) }
    }

    /// Sends a request of one sector, with the sector as its cookie.
    pub fn ask(&mut self, kind: u16, sector: u64) {
        let mut request = 0x2560_9513u32.to_be_bytes().to_vec();
        request.extend(0u16.to_be_bytes());
        request.extend(kind.to_be_bytes());
        request.extend(sector.to_be_bytes());
        request.extend((sector * 512).to_be_bytes());
        request.extend(512u32.to_be_bytes());
        if kind == WRITE {
            request.extend([7; 512]);
        }
        self.stream.write_all(&request).unwrap();
    }

    /// The next reply: the sector that was asked for, and the errno. `kind` is that of the request.
    pub fn reply(&mut self, kind: u16) -> (u64, u32) {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head).unwrap();
        let error = u32::from_be_bytes(head[4..8].try_into().unwrap());
        if kind == READ && error == 0 {
            self.stream.read_exact(&mut [0; 512]).unwrap();
        }
        (u64::from_be_bytes(head[8..].try_into().unwrap()), error)
    }

    pub fn one(&mut self, kind: u16, sector: u64) -> u32 {
        self.ask(kind, sector);
        let (answered, error) = self.reply(kind);
        assert_eq!(answered, sector);
        error
    }
}
