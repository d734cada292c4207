//! Ring operations and their results.

use super::ublk_device::UblkDeviceQueue;
use rustix::net::SocketAddrAny;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use udm_core::Segments;

/// A ring operation, with the memory and the file that it needs. The ring holds both until the
/// operation completes.
#[derive(Debug)]
pub enum RingOp {
    /// `preadv` into the pieces.
    Read {
        /// File to read from.
        fd: Arc<OwnedFd>,
        /// Byte offset in the file; ignored for an eventfd.
        offset: u64,
        /// Destination.
        data: Segments,
        /// Read only data that is in the page cache (`RWF_NOWAIT`): EAGAIN for other data,
        /// EOPNOTSUPP if the file system has no support.
        cached: bool,
    },
    /// `pwritev` of the pieces.
    Write {
        /// File to write to.
        fd: Arc<OwnedFd>,
        /// Byte offset in the file.
        offset: u64,
        /// Data to write.
        data: Segments,
        /// Complete when the data is durable (`RWF_DSYNC`).
        dsync: bool,
    },
    /// `fsync`, or `fdatasync` with `data_only`.
    Fsync {
        /// File to sync.
        fd: Arc<OwnedFd>,
        /// Omit metadata that is not needed to read the data.
        data_only: bool,
    },
    /// `fallocate`.
    Fallocate {
        /// File to allocate in.
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
        /// Destination address.
        to: Box<SocketAddrAny>,
    },
    /// One `recvmsg` into the pieces. The result is the number of received bytes, 0 at the end of
    /// the stream.
    Recv {
        /// A stream socket.
        fd: Arc<OwnedFd>,
        /// Destination.
        data: Segments,
    },
    /// `sendmsg` of all pieces, without SIGPIPE. The result may be less than their length.
    Send {
        /// A stream socket.
        fd: Arc<OwnedFd>,
        /// Data to send.
        data: Segments,
        /// Wait for room until all data is sent. If an error follows a partial send, the error is
        /// lost: the result is short, and the next operation sees a closed connection without the
        /// reason.
        whole: bool,
    },
    /// A command to a tag of a ublk device. It completes when the kernel has a request for the tag,
    /// or never: see [`RingOp::is_endless`].
    Ublk {
        /// The queue of the device.
        queue: Arc<UblkDeviceQueue>,
        /// Number of the command: a fetch, or a commit and fetch.
        code: u32,
        /// The command (`struct ublksrv_io_cmd`). Its address is set to that of the data.
        command: [u8; 16],
        /// One piece of at least [`UblkDeviceQueue::io_bytes_max`] bytes, with the data of a
        /// completed read, and for that of the next write. If it is shorter, the kernel refuses the
        /// command.
        data: Segments,
    },
}

impl RingOp {
    /// Maximum number of pieces per operation (`IOV_MAX`). Of a longer list, only the first pieces
    /// are moved, and the result is short.
    pub const MAX_PIECES: usize = 1024;

    /// True for an operation that cannot be cancelled and may never complete. Its memory is leaked
    /// if its core exits.
    pub(crate) fn is_endless(&self) -> bool {
        matches!(self, RingOp::Ublk { .. })
    }
}

/// A completed operation.
#[derive(Debug)]
pub struct RingCompletion {
    /// The user's tag.
    pub tag: u64,
    /// Number of bytes (0 for operations without data), or the errno.
    pub result: Result<u32, i32>,
    /// The operation's memory.
    pub data: Segments,
}
