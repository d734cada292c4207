//! The simulated network: two streams of bytes a connection, which are cut anywhere, fill up, and
//! break.
//!
//! One end of each is udm's, a server or a client; the other, the peer, is the world's. Each
//! connection has a pair of sockets besides that carries no data. udm knows its end by its
//! descriptor, asks it who the peer is and whether it is gone, and shuts it down; the other end
//! says what udm did.

use super::clock;
use crate::rng::SimRng;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};
use udm_core::{Nanos, Segments, errno};

/// A connection.
pub(crate) struct SimConnection {
    /// The peer's end.
    peer: Option<OwnedFd>,
    /// Bytes from the peer that udm has not received.
    pub(crate) up: VecDeque<u8>,
    /// The peer sends no more.
    up_ended: bool,
    /// Bytes from udm that the peer has not read.
    pub(crate) down: VecDeque<u8>,
    /// How many of those there may be.
    pub(crate) room: usize,
    /// The connection is lost: what is on its way is gone.
    pub(crate) broken: bool,
    /// The peer is gone, and takes nothing.
    pub(crate) left: bool,
    /// udm is through with it.
    pub(crate) shut: bool,
    /// udm sends no more.
    pub(crate) half_shut: bool,
    /// Something went wrong on it, so udm may close it.
    pub(crate) faulty: bool,
    /// When the last send of udm, which is a client, found no memory.
    pub(crate) short_at: Option<Nanos>,
    /// Bytes that udm has received and sent since somebody asked.
    moved: (u64, u64),
    /// To whom, and how the attempt to connect ended, once it has.
    pub(crate) to: usize,
    pub(crate) connected: Option<i32>,
}

/// Sockets that were made to connect from, which the network has not yet seen: the peer's end, the
/// descriptor of udm's, and to whom.
pub(crate) type NewSockets = Arc<Mutex<Vec<(OwnedFd, RawFd, usize)>>>;

impl SimConnection {
    /// The peer has nothing more to expect.
    pub(crate) fn is_gone(&self) -> bool {
        self.shut || self.broken
    }
}

/// Two sockets that are connected.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}

/// All connections.
pub(crate) struct SimNetwork {
    pub(crate) links: Vec<SimConnection>,
    by_fd: BTreeMap<RawFd, usize>,
    pub(crate) dialled: NewSockets,
    pub(crate) chance: SimRng,
    /// Reads and writes are cut.
    pub(crate) cuts: bool,
    /// One operation in so many fails; 0 for none.
    pub(crate) fails: u64,
    /// The system gives up connections of which nothing is heard. udm asks it not to.
    pub(crate) gives_up: bool,
    /// udm's ends are clients, which wait when there is no memory to send.
    pub(crate) clients: bool,
    /// Nothing fails any more.
    pub(crate) calm: bool,
    /// What happened: operations that were cut short, that failed, and sends that found no room.
    pub(crate) cut: u64,
    pub(crate) failed: u64,
    /// Of those that failed, what ends a connection.
    pub(crate) lost: u64,
    pub(crate) full: u64,
}

/// What became of a piece of I/O.
pub(crate) enum IoProgress {
    /// It ended so.
    Ended(i32),
    /// It has to wait.
    Waits,
}

impl SimNetwork {
    pub(crate) fn new(chance: SimRng) -> SimNetwork {
        SimNetwork {
            links: Vec::new(),
            by_fd: BTreeMap::new(),
            dialled: NewSockets::default(),
            chance,
            cuts: true,
            fails: 0,
            gives_up: true,
            clients: false,
            calm: false,
            cut: 0,
            failed: 0,
            lost: 0,
            full: 0,
        }
    }

    /// A new connection: its number, and udm's end.
    pub(crate) fn connect(&mut self, room: usize) -> io::Result<(usize, OwnedFd)> {
        let (ours, theirs) = pair()?;
        Ok((self.add(ours, theirs.as_raw_fd(), room, 0, Some(0)), theirs))
    }

    /// Takes in the sockets that were made to connect from.
    pub(crate) fn adopt(&mut self) {
        let dialled = std::mem::take(&mut *self.dialled.lock().unwrap_or_else(PoisonError::into_inner));
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
            connected,
        });
        self.links.len() - 1
    }

    /// The connection whose end of udm's this is.
    pub(crate) fn of(&self, fd: &OwnedFd) -> Option<usize> {
        self.by_fd.get(&fd.as_raw_fd()).copied()
    }

    /// Looks which connections udm is through with.
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

    /// What was received and sent on each connection since the last call.
    pub(crate) fn take_moved(&mut self) -> Vec<(usize, u64, u64)> {
        let moved = |link: &mut SimConnection| std::mem::take(&mut link.moved);
        let all = self.links.iter_mut().enumerate().map(|(l, link)| (l, moved(link)));
        all.filter(|(_, moved)| *moved != (0, 0)).map(|(l, (received, sent))| (l, received, sent)).collect()
    }

    /// The peer of `l` sends no more; it still reads.
    pub(crate) fn end_up(&mut self, l: usize) {
        let link = &mut self.links[l];
        link.up_ended = true;
        if let Some(peer) = &link.peer {
            let _ = shutdown(peer, Shutdown::Write);
        }
    }

    /// The peer of `l` is gone. `quietly` as over TCP, where nobody hears of it before a send
    /// fails; `broken` when what it sent last is lost too.
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

    /// True while reads and writes are cut short.
    pub(crate) fn is_cutting(&self) -> bool {
        self.cuts && !self.calm
    }

    /// How many bytes may be on their way to the peer of `l`.
    fn room(&self, l: usize) -> usize {
        self.links[l].room.max(if self.calm { 256 << 10 } else { 1 })
    }

    /// How many of `most` bytes are moved now.
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

    /// An error, now and then.
    fn error(&mut self, l: usize, errors: &[i32]) -> Option<i32> {
        if self.calm || self.fails == 0 || !self.chance.one_in(self.fails) {
            return None;
        }
        let error = match self.chance.pick(errors) {
            errno::ETIMEDOUT if !self.gives_up => errno::ECONNRESET,
            error => error,
        };
        self.failed += 1;
        self.lost += u64::from(!errno::is_transient(error));
        let link = &mut self.links[l];
        link.faulty = true;
        link.broken |= matches!(error, errno::ECONNRESET | errno::EPIPE);
        Some(-error)
    }

    /// What a receive into `data` does now.
    pub(crate) fn receive(&mut self, l: usize, data: &mut Segments) -> IoProgress {
        if self.links[l].broken {
            return IoProgress::Ended(-errno::ECONNRESET);
        }
        let there = self.links[l].up.len();
        if there == 0 {
            let over = self.links[l].up_ended || self.links[l].shut;
            return if over { IoProgress::Ended(0) } else { IoProgress::Waits };
        }
        if let Some(error) = self.error(l, &[errno::ECONNRESET, errno::EINTR, errno::ETIMEDOUT]) {
            return IoProgress::Ended(error);
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
        IoProgress::Ended(n as i32)
    }

    /// What a send of `data`, of which `done` bytes have left, does now; what left is added. A
    /// send that waits goes on when there is room.
    pub(crate) fn send(&mut self, l: usize, data: &Segments, done: &mut usize, quick: bool) -> IoProgress {
        let ended = |done: usize, error: i32| IoProgress::Ended(if done > 0 { done as i32 } else { error });
        if let Some(error) = self.error(l, &[errno::ECONNRESET, errno::EPIPE, errno::EINTR, errno::ENOBUFS]) {
            if errno::is_memory_shortage(-error) && *done == 0 && self.clients {
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
            true => IoProgress::Ended(*done as i32),
            false if quick => ended(*done, -errno::EAGAIN),
            // The kernel gives up waiting for room for reasons of its own, too.
            false if *done > 0 && !self.calm && self.chance.one_in(8) => IoProgress::Ended(*done as i32),
            false => IoProgress::Waits,
        }
    }

    /// Could a receive on `l` end now?
    pub(crate) fn can_receive(&self, l: usize) -> bool {
        let link = &self.links[l];
        !link.up.is_empty() || link.up_ended || link.shut || link.broken
    }

    /// Could a send on `l` get on now?
    pub(crate) fn can_send(&self, l: usize) -> bool {
        let link = &self.links[l];
        link.down.len() < self.room(l) || link.left || link.shut || link.broken
    }
}
