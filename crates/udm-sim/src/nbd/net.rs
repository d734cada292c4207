//! The simulated network: each connection has two byte streams, which are split anywhere, become
//! full, and break.
//!
//! udm, as server or client, has one end of each connection. The world has the other end, the peer.
//! Each connection also has a pair of real sockets that carry no data. udm uses its socket to
//! identify the connection, to query the peer, and to shut the connection down. The peer's socket
//! shows these actions to the world.

use super::clock;
use crate::environment::lock_mutex;
use crate::rng::SimRng;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use rustix::net::{SocketAddrAny, SocketAddrUnix};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};
use udm_backends::nbd::{ServerAddress, SocketOps};
use udm_core::{Nanos, Segments, errno};

/// A connection.
pub(crate) struct SimConnection {
    /// The peer's socket.
    peer: Option<OwnedFd>,
    /// Bytes from the peer that udm has not received.
    pub(crate) up: VecDeque<u8>,
    /// True if the peer sends nothing more.
    up_ended: bool,
    /// Bytes from udm that the peer has not read.
    pub(crate) down: VecDeque<u8>,
    /// Maximum number of bytes in `down`.
    pub(crate) room: usize,
    /// True if the connection is lost, with all bytes in transit.
    pub(crate) broken: bool,
    /// True if the peer has closed the connection and reads nothing.
    pub(crate) left: bool,
    /// True if udm has shut down or closed the connection.
    pub(crate) shut: bool,
    /// True if udm sends nothing more.
    pub(crate) half_shut: bool,
    /// True if an error occurred, so udm may close the connection.
    pub(crate) faulty: bool,
    /// Time of the last send that failed for lack of memory, if udm is the client.
    pub(crate) short_at: Option<Nanos>,
    /// Bytes that udm has received and sent since the last query.
    moved: (u64, u64),
    /// Server that a connect goes to; `connected` is the result of the connect.
    pub(crate) to: usize,
    pub(crate) connected: Option<i32>,
    /// True if udm is the client, which pauses after a memory shortage.
    pub(crate) is_client: bool,
}

/// New sockets for connects that the network has not adopted yet: the peer's end, the descriptor of
/// udm's end, and the server.
pub(crate) type PendingConnectSockets = Arc<Mutex<Vec<(OwnedFd, RawFd, usize)>>>;

/// Sockets of the lanes of a client. Each socket is one end of a pair without data; the other end
/// shows the actions on it.
pub(crate) struct SimSockets {
    pub(crate) dialled: PendingConnectSockets,
    /// The server to which all connections go.
    pub(crate) server: usize,
}

impl SocketOps for SimSockets {
    fn open(&self, _: &ServerAddress) -> io::Result<(OwnedFd, SocketAddrAny)> {
        let (ours, theirs) = create_socket_pair()?;
        lock_mutex(&self.dialled).push((ours, theirs.as_raw_fd(), self.server));
        Ok((theirs, SocketAddrUnix::new(format!("/n{}", self.server))?.into()))
    }

    /// Bytes already sent are with the server or in transit.
    fn reset(&self, _: &OwnedFd) {}
}

impl SimConnection {
    /// True if the peer need not expect more data.
    pub(crate) fn is_gone(&self) -> bool {
        self.shut || self.broken
    }
}

/// Returns two connected sockets.
pub(crate) fn create_socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}

/// The network with all connections.
pub(crate) struct SimNetwork {
    pub(crate) links: Vec<SimConnection>,
    by_fd: BTreeMap<RawFd, usize>,
    pub(crate) dialled: PendingConnectSockets,
    pub(crate) chance: SimRng,
    /// True if reads and writes are cut short.
    pub(crate) cuts: bool,
    /// One of this many operations fails; 0 for none.
    pub(crate) fails: u64,
    /// True if the system closes silent connections. udm disables this.
    pub(crate) gives_up: bool,
    /// True if nothing fails any more.
    pub(crate) calm: bool,
    /// Number of operations that were cut short; `failed` and `full` count errors and sends to a
    /// full socket.
    pub(crate) cut: u64,
    pub(crate) failed: u64,
    /// Number of failures that end a connection.
    pub(crate) lost: u64,
    pub(crate) full: u64,
}

/// Result of an I/O operation.
pub(crate) enum SocketIoResult {
    /// The operation completed with this result.
    Ended(i32),
    /// The operation waits.
    Waits,
}

impl SimNetwork {
    pub(crate) fn new(chance: SimRng) -> SimNetwork {
        SimNetwork {
            links: Vec::new(),
            by_fd: BTreeMap::new(),
            dialled: PendingConnectSockets::default(),
            chance,
            cuts: true,
            fails: 0,
            gives_up: true,
            calm: false,
            cut: 0,
            failed: 0,
            lost: 0,
            full: 0,
        }
    }

    /// Creates a connection. Returns its number and udm's end.
    pub(crate) fn connect(&mut self, room: usize) -> io::Result<(usize, OwnedFd)> {
        let (ours, theirs) = create_socket_pair()?;
        Ok((self.add(ours, theirs.as_raw_fd(), room, 0, Some(0)), theirs))
    }

    /// Adopts the new sockets that udm has created for connects.
    pub(crate) fn adopt(&mut self) {
        let dialled = std::mem::take(&mut *lock_mutex(&self.dialled));
        for (ours, theirs, to) in dialled {
            self.add(ours, theirs, 1, to, None);
        }
    }

    fn add(&mut self, ours: OwnedFd, theirs: RawFd, room: usize, to: usize, connected: Option<i32>) -> usize {
        self.by_fd.insert(theirs, self.links.len());
        self.links.push(SimConnection {
            peer: Some(ours),
            up: VecDeque::new(),
            up_ended: false,
            down: VecDeque::new(),
            room,
            broken: false,
            left: false,
            shut: false,
            half_shut: false,
            faulty: false,
            short_at: None,
            moved: (0, 0),
            to,
            is_client: connected.is_none(),
            connected,
        });
        self.links.len() - 1
    }

    /// Returns the connection of a socket of udm.
    pub(crate) fn of(&self, fd: &OwnedFd) -> Option<usize> {
        self.by_fd.get(&fd.as_raw_fd()).copied()
    }

    /// Detects the connections that udm has shut down or closed.
    pub(crate) fn look(&mut self) {
        let open: Vec<usize> =
            (0..self.links.len()).filter(|&l| !self.links[l].shut && self.links[l].peer.is_some()).collect();
        let (mut gone, mut half) = (Vec::new(), Vec::new());
        let mut fds: Vec<PollFd<'_>> = open
            .iter()
            .filter_map(|&l| self.links[l].peer.as_ref())
            .map(|fd| PollFd::new(fd, PollFlags::RDHUP))
            .collect();
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut fds, Some(&at_once)).is_ok_and(|n| n > 0) {
            let with = |flag| fds.iter().zip(&open).filter(move |(fd, _)| fd.revents().contains(flag));
            gone.extend(with(PollFlags::HUP).map(|(_, &l)| l));
            half.extend(with(PollFlags::RDHUP).map(|(_, &l)| l));
        }
        drop(fds);
        half.into_iter().for_each(|l| self.links[l].half_shut = true);
        for l in gone {
            let link = &mut self.links[l];
            link.shut = true;
            if link.left {
                link.peer = None;
            }
        }
    }

    /// Bytes received and sent on each connection since the last call.
    pub(crate) fn take_moved(&mut self) -> Vec<(usize, u64, u64)> {
        let moved = |link: &mut SimConnection| std::mem::take(&mut link.moved);
        let all = self.links.iter_mut().enumerate().map(|(l, link)| (l, moved(link)));
        all.filter(|(_, moved)| *moved != (0, 0)).map(|(l, (received, sent))| (l, received, sent)).collect()
    }

    /// Ends the stream from the peer of `l`, which still reads.
    pub(crate) fn end_up(&mut self, l: usize) {
        let link = &mut self.links[l];
        link.up_ended = true;
        if let Some(peer) = &link.peer {
            let _ = shutdown(peer, Shutdown::Write);
        }
    }

    /// Closes the peer's end of `l`. If `quietly`, udm notices only when a send fails, as with TCP.
    /// If `broken`, the bytes in transit are lost.
    pub(crate) fn leave(&mut self, l: usize, quietly: bool, broken: bool) {
        let link = &mut self.links[l];
        link.left = true;
        link.up_ended = true;
        link.down.clear();
        link.broken |= broken;
        if !quietly {
            link.peer = None;
        }
    }

    /// True if reads and writes are cut short now.
    pub(crate) fn is_cutting(&self) -> bool {
        self.cuts && !self.calm
    }

    /// Maximum number of bytes in transit to the peer of `l`.
    fn room(&self, l: usize) -> usize {
        self.links[l].room.max(if self.calm { 256 << 10 } else { 1 })
    }

    /// Draws how many of `most` bytes are moved now.
    fn cut(&mut self, most: usize) -> usize {
        if !self.is_cutting() || most < 2 || !self.chance.one_in(3) {
            return most;
        }
        self.cut += 1;
        match self.chance.below(4) {
            0 => 1,
            1 => self.chance.between(1, 64.min(most as u64)) as usize,
            _ => self.chance.between(1, most as u64) as usize,
        }
    }

    /// Draws an error, which is rare.
    fn error(&mut self, l: usize, errors: &[i32]) -> Option<i32> {
        if self.calm || self.fails == 0 || !self.chance.one_in(self.fails) {
            return None;
        }
        let error = match self.chance.pick(errors) {
            errno::ETIMEDOUT if !self.gives_up => errno::ECONNRESET,
            error => error,
        };
        self.failed += 1;
        self.lost += u64::from(!errno::is_transient_socket_errno(error));
        let link = &mut self.links[l];
        link.faulty = true;
        link.broken |= matches!(error, errno::ECONNRESET | errno::EPIPE);
        Some(-error)
    }

    /// Performs a receive into `data`.
    pub(crate) fn receive(&mut self, l: usize, data: &mut Segments) -> SocketIoResult {
        if self.links[l].broken {
            return SocketIoResult::Ended(-errno::ECONNRESET);
        }
        let there = self.links[l].up.len();
        if there == 0 {
            let over = self.links[l].up_ended || self.links[l].shut;
            return if over { SocketIoResult::Ended(0) } else { SocketIoResult::Waits };
        }
        if let Some(error) = self.error(l, &[errno::ECONNRESET, errno::EINTR, errno::ETIMEDOUT]) {
            return SocketIoResult::Ended(error);
        }
        let most = there.min(data.len());
        let n = self.cut(most);
        let mut left = n;
        for piece in data.iter_mut() {
            let now = left.min(piece.len());
            for (to, from) in piece[..now].iter_mut().zip(self.links[l].up.drain(..now)) {
                *to = from;
            }
            left -= now;
        }
        self.links[l].moved.0 += n as u64;
        SocketIoResult::Ended(n as i32)
    }

    /// Performs a send of `data` from offset `done`, and advances `done`. A send that waits
    /// continues when there is room.
    pub(crate) fn send(
        &mut self,
        l: usize,
        data: &Segments,
        done: &mut usize,
        quick: bool,
    ) -> SocketIoResult {
        let ended =
            |done: usize, error: i32| SocketIoResult::Ended(if done > 0 { done as i32 } else { error });
        if let Some(error) = self.error(l, &[errno::ECONNRESET, errno::EPIPE, errno::EINTR, errno::ENOBUFS]) {
            if errno::is_memory_shortage(-error) && *done == 0 && self.links[l].is_client {
                self.links[l].short_at = Some(clock::now());
            }
            return ended(*done, error);
        }
        let link = &self.links[l];
        if link.broken || link.left || link.shut {
            return ended(*done, if link.broken { -errno::ECONNRESET } else { -errno::EPIPE });
        }
        let room = self.room(l).saturating_sub(link.down.len());
        let all = data.len() - *done;
        let n = self.cut(all.min(room));
        let (mut skip, mut left) = (*done, n);
        for piece in data {
            let from = skip.min(piece.len());
            skip -= from;
            let now = left.min(piece.len() - from);
            self.links[l].down.extend(&piece[from..from + now]);
            left -= now;
        }
        *done += n;
        self.links[l].moved.1 += n as u64;
        self.full += u64::from(n < all);
        match n == all {
            true => SocketIoResult::Ended(*done as i32),
            false if quick => ended(*done, -errno::EAGAIN),
            // The kernel may also complete a partial send for other reasons.
            false if *done > 0 && !self.calm && self.chance.one_in(8) => SocketIoResult::Ended(*done as i32),
            false => SocketIoResult::Waits,
        }
    }

    /// True if a receive on `l` can complete now.
    pub(crate) fn can_receive(&self, l: usize) -> bool {
        let link = &self.links[l];
        !link.up.is_empty() || link.up_ended || link.shut || link.broken
    }

    /// True if a send on `l` can make progress now.
    pub(crate) fn can_send(&self, l: usize) -> bool {
        let link = &self.links[l];
        link.down.len() < self.room(l) || link.left || link.shut || link.broken
    }
}
