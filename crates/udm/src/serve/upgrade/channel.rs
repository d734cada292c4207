//! The socket between the old server and the new one: messages in JSON, and descriptors.
//!
//! A message is its length (four bytes, little endian) and its text. The descriptors of a state
//! follow it, at most 128 with each byte.

use super::state::ServerState;
use rustix::io::{Errno, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Maximum length of a message: the unread bytes of a thousand clients.
const MESSAGE_MAX: usize = 512 << 20;

/// Descriptors per byte; the kernel's limit is 253.
const FDS_MAX: usize = 128;

/// A message of the new program.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum NewServerMessage {
    /// It has started.
    Ready {
        /// Its version.
        version: String,
        /// The formats of the state that it can read.
        formats: Vec<u32>,
    },
    /// All devices exist: it serves as soon as it may.
    Prepared,
    /// It cannot take over, and ends.
    Failed(String),
    /// It serves.
    Serving,
}

/// A message of the old server.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum OldServerMessage {
    /// The state; its descriptors follow.
    State(Box<ServerState>),
    /// The new program has everything.
    Commit,
}

/// One end of the socket.
pub(super) struct UpgradeChannel(UnixStream);

impl UpgradeChannel {
    /// The end on `socket`.
    pub(super) fn new(socket: OwnedFd) -> UpgradeChannel {
        UpgradeChannel(socket.into())
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The other side has ended, or does not read for 10 s.
    pub(super) fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        let text = serde_json::to_vec(message)?;
        if text.len() > MESSAGE_MAX {
            return Err(io::Error::other("the state is too long"));
        }
        self.0.set_write_timeout(Some(Duration::from_secs(10)))?;
        self.0.write_all(&(text.len() as u32).to_le_bytes())?;
        self.0.write_all(&text)
    }

    /// Receives a message.
    ///
    /// # Errors
    /// The other side has ended, sends nothing within `timeout`, or sends something else.
    pub(super) fn receive<M: DeserializeOwned>(&mut self, timeout: Duration) -> io::Result<M> {
        self.0.set_read_timeout(Some(timeout))?;
        let mut len = [0; 4];
        self.0.read_exact(&mut len)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > MESSAGE_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a message that is too long"));
        }
        let mut text = Vec::new();
        (&self.0).take(len as u64).read_to_end(&mut text)?;
        if text.len() < len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice(&text)?)
    }

    /// Sends descriptors.
    ///
    /// # Errors
    /// As for [`UpgradeChannel::send`].
    pub(super) fn send_descriptors(&mut self, all: &[BorrowedFd<'_>]) -> io::Result<()> {
        for some in all.chunks(FDS_MAX) {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !ancillary.push(SendAncillaryMessage::ScmRights(some)) {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            let sent = || sendmsg(&self.0, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL);
            rustix::io::retry_on_intr(sent)?;
        }
        Ok(())
    }

    /// Receives `count` descriptors.
    ///
    /// # Errors
    /// As for [`UpgradeChannel::receive`].
    pub(super) fn receive_descriptors(&mut self, count: usize) -> io::Result<Vec<OwnedFd>> {
        let mut all = Vec::new();
        while all.len() < count {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut byte = [0];
            let mut parts = [IoSliceMut::new(&mut byte)];
            let received = match recvmsg(&self.0, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => continue,
                received => received?,
            };
            let before = all.len();
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = message {
                    all.extend(more);
                }
            }
            if received.bytes == 0 || all.len() == before || received.flags.contains(ReturnFlags::CTRUNC) {
                let why = "not all descriptors have come: raise the limit on open files (ulimit -n)";
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn pair() -> [UpgradeChannel; 2] {
        let (one, other) = UnixStream::pair().unwrap();
        [UpgradeChannel(one), UpgradeChannel(other)]
    }

    #[test]
    fn descriptors_arrive_in_their_order() {
        let [mut old, mut new] = pair();
        let files: Vec<_> = (0..300).map(|_| tempfile::tempfile().unwrap()).collect();
        let sender = std::thread::scope(|scope| {
            let sent = scope.spawn(|| {
                old.send(&OldServerMessage::Commit).unwrap();
                let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
                old.send_descriptors(&fds).unwrap();
            });
            let first = new.receive(Duration::from_secs(5)).unwrap();
            assert!(matches!(first, OldServerMessage::Commit));
            let received = new.receive_descriptors(300).unwrap();
            sent.join().unwrap();
            received
        });
        let inode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_ino;
        let inodes = |fds: &[BorrowedFd<'_>]| fds.iter().map(|fd| inode(*fd)).collect::<Vec<_>>();
        let sent: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let received: Vec<_> = sender.iter().map(AsFd::as_fd).collect();
        assert_eq!(inodes(&sent), inodes(&received));
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        let (short, long) = (&[4, 0, 0, 0, b'{'][..], &[255, 255, 255, 255][..]);
        for bytes in [&b""[..], short, long, &[2, 0, 0, 0, b'{', b'}'][..]] {
            let [old, mut new] = pair();
            (&old.0).write_all(bytes).unwrap();
            drop(old);
            assert!(new.receive::<OldServerMessage>(Duration::from_secs(5)).is_err(), "{bytes:?}");
        }
        let [mut old, mut new] = pair();
        old.send(&NewServerMessage::Serving).unwrap();
        assert!(new.receive_descriptors(1).is_err(), "a byte without a descriptor");
    }
}
