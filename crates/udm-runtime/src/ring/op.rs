//! What can be asked of the ring, and what comes back.

use rustix::net::SocketAddrAny;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use udm_core::Segments;

/// An operation, with the memory and the file it needs. The ring holds both until it is done.
#[derive(Debug)]
pub enum RingOp {
    /// `preadv` into the pieces.
    Read {
        /// From where.
        fd: Arc<OwnedFd>,
        /// Byte offset in the file; no matter for an eventfd.
        offset: u64,
        /// Into what.
        data: Segments,
        /// Only what is in memory already (`RWF_NOWAIT`): EAGAIN for the rest, EOPNOTSUPP where
        /// that can't be told.
        cached: bool,
    },
    /// `pwritev` of the pieces.
    Write {
        /// To where.
        fd: Arc<OwnedFd>,
        /// Byte offset in the file.
        offset: u64,
        /// What.
        data: Segments,
        /// Complete when durable (`RWF_DSYNC`).
        dsync: bool,
    },
    /// `fsync`, or `fdatasync` with `data_only`.
    Fsync {
        /// Which file.
        fd: Arc<OwnedFd>,
        /// Leave out metadata that reading the data does not need.
        data_only: bool,
    },
    /// `fallocate`.
    Fallocate {
        /// Which file.
        fd: Arc<OwnedFd>,
        /// `FALLOC_FL_*`.
        mode: i32,
        /// Byte offset.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// `connect`.
    Connect {
        /// A stream socket.
        fd: Arc<OwnedFd>,
        /// To whom.
        to: Box<SocketAddrAny>,
    },
    /// One `recvmsg` into the pieces: the result is the bytes that came, 0 at the end of the
    /// stream.
    Recv {
        /// A stream socket.
        fd: Arc<OwnedFd>,
        /// Into what.
        data: Segments,
    },
    /// `sendmsg` of all pieces, without a signal. The result may still be short.
    Send {
        /// A stream socket.
        fd: Arc<OwnedFd>,
        /// What.
        data: Segments,
        /// The kernel goes on until all has left, where it has to wait for room. An error behind a
        /// part is lost then: the result is short, and whatever comes next sees a connection that
        /// is closed, without why.
        whole: bool,
    },
}

impl RingOp {
    /// The most pieces that one operation moves (`IOV_MAX`); of a longer list only the first so
    /// many are, and the result is short.
    pub const MAX_PIECES: usize = 1024;
}

/// A finished operation.
#[derive(Debug)]
pub struct Done {
    /// The user's tag.
    pub tag: u64,
    /// Bytes (0 where there are none to count), or the errno.
    pub result: Result<u32, i32>,
    /// The operation's memory.
    pub data: Segments,
}
