//! The socket of a session: messages with file descriptors.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use udm_wire::vhost_user::{HEADER_SIZE, VhostUserMessageHeader};

/// File descriptors per message: the kernel's limit is 253, the protocol's is 8.
const FDS_MAX: usize = 8;

/// A message as it was received.
pub(super) struct ReceivedVhostUserMessage {
    pub(super) header: VhostUserMessageHeader,
    pub(super) payload: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

/// Why no message came.
#[derive(Debug)]
pub(super) enum ReceiveInterruption {
    /// The peer has closed the connection.
    Closed,
    /// The server stops.
    Stopped,
    /// Another event: the owner of the session looks at its state.
    Event,
}

/// A connected socket and the descriptor that ends waits.
pub(super) struct VhostUserChannel {
    pub(super) socket: OwnedFd,
    /// Readable when the server stops.
    pub(super) stop: Arc<OwnedFd>,
    /// Readable when the session has to look at its device.
    pub(super) event: Arc<OwnedFd>,
}

impl VhostUserChannel {
    /// Waits for a message.
    ///
    /// # Errors
    /// The connection is broken, or the peer sends nonsense.
    pub(super) fn receive(&self) -> io::Result<Result<ReceivedVhostUserMessage, ReceiveInterruption>> {
        let mut header = [0; HEADER_SIZE];
        let mut fds = Vec::new();
        if let Err(end) = self.fill(&mut header, &mut fds, true)? {
            return Ok(Err(end));
        }
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        let header = VhostUserMessageHeader::decode(&header).map_err(invalid)?;
        let mut payload = vec![0; header.size];
        match self.fill(&mut payload, &mut fds, false)? {
            Ok(()) => Ok(Ok(ReceivedVhostUserMessage { header, payload, fds })),
            Err(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Receives until `out` is full. Events end the wait only before the first byte of a message,
    /// and a stop in its middle is an error: a part of the message is lost.
    fn fill(
        &self,
        out: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        is_start: bool,
    ) -> io::Result<Result<(), ReceiveInterruption>> {
        let mut done = 0;
        while done < out.len() {
            if let Err(end) = self.wait(is_start && done == 0)? {
                return if done == 0 { Ok(Err(end)) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut out[done..])];
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let received = match recvmsg(&self.socket, &mut parts, &mut ancillary, flags) {
                Ok(received) => received,
                Err(Errno::AGAIN | Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = message {
                    fds.extend(more);
                }
            }
            if received.bytes == 0 {
                return Ok(Err(ReceiveInterruption::Closed));
            }
            if received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > FDS_MAX {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "more than 8 file descriptors in a message",
                ));
            }
            done += received.bytes;
        }
        Ok(Ok(()))
    }

    /// Waits until the socket is readable.
    fn wait(&self, with_events: bool) -> io::Result<Result<(), ReceiveInterruption>> {
        loop {
            let fd = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
            let mut fds = [fd(self.socket.as_fd()), fd(self.stop.as_fd()), fd(self.event.as_fd())];
            let count = if with_events { 3 } else { 2 };
            match poll(&mut fds[..count], None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            if !fds[1].revents().is_empty() {
                return Ok(Err(ReceiveInterruption::Stopped));
            }
            if with_events && !fds[2].revents().is_empty() {
                // Nonblocking; another session may have read it.
                let _ = rustix::io::read(&*self.event, &mut [0; 8]);
                return Ok(Err(ReceiveInterruption::Event));
            }
            if !fds[0].revents().is_empty() {
                return Ok(Ok(()));
            }
        }
    }

    /// Sends a message, with a descriptor if one is given.
    ///
    /// # Errors
    /// The connection is broken, or the peer does not read.
    pub(super) fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        send_message(self.socket.as_fd(), bytes, fd)
    }
}

/// Sends `bytes`, with a descriptor if one is given, on a connected socket.
///
/// # Errors
/// The connection is broken, or the peer does not read: a message fits into the buffer of a socket.
pub(super) fn send_message(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = fd.as_slice();
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Makes the descriptor of a notification nonblocking, as QEMU's servers do. The ring of a core
/// gives a write that could block to a kernel thread, which costs each notification about 70 us.
/// The flag also applies to the front end, which has the same open file.
///
/// # Errors
/// Errors of `fcntl(2)`.
pub(super) fn nonblocking_event_fd(fd: OwnedFd) -> io::Result<Arc<OwnedFd>> {
    fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
    Ok(Arc::new(fd))
}
