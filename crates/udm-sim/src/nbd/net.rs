//! The simulated network: two streams of bytes a connection, which are cut anywhere, fill up, and
//! break.
//!
//! Each connection has a pair of sockets besides that carries no data. The server knows its end
//! by its descriptor, asks it who the client is and whether it is gone, and shuts it down; the
//! other end says what the server did.

use crate::chance::Chance;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use udm_core::{Segments, errno};

/// What a send fails with for want of memory; nothing else in udm has a use for it.
const ENOBUFS: i32 = 105;

/// A connection.
pub(super) struct Link {
    /// The client's end.
    peer: Option<OwnedFd>,
    /// Bytes from the client that the server has not received.
    pub(super) up: VecDeque<u8>,
    /// The client sends no more.
    up_ended: bool,
    /// Bytes from the server that the client has not read.
    pub(super) down: VecDeque<u8>,
    /// How many of those there may be.
    room: usize,
    /// The connection is lost: what is on its way is gone.
    broken: bool,
    /// The client is gone, and takes nothing.
    pub(super) left: bool,
    /// The server is through with it.
    pub(super) shut: bool,
    /// Something went wrong on it, so the server may close it.
    pub(super) faulty: bool,
    /// Bytes that the server has received and sent since somebody asked.
    moved: (u64, u64),
}

impl Link {
    /// The client has nothing more to expect.
    pub(super) fn is_gone(&self) -> bool {
        self.shut || self.broken
    }
}

/// All connections.
pub(super) struct Net {
    pub(super) links: Vec<Link>,
    by_fd: BTreeMap<RawFd, usize>,
    pub(super) chance: Chance,
    /// Reads and writes are cut.
    pub(super) cuts: bool,
    /// One operation in so many fails; 0 for none.
    pub(super) fails: u64,
    /// Nothing fails any more.
    pub(super) calm: bool,
    /// What happened: operations that were cut short, that failed, and sends that found no room.
    pub(super) cut: u64,
    pub(super) failed: u64,
    pub(super) full: u64,
}

/// What became of a piece of I/O.
pub(super) enum Io {
    /// It ended so.
    Ended(i32),
    /// It has to wait.
    Waits,
}

impl Net {
    pub(super) fn new(chance: Chance) -> Net {
        Net {
            links: Vec::new(),
            by_fd: BTreeMap::new(),
            chance,
            cuts: true,
            fails: 0,
            calm: false,
            cut: 0,
            failed: 0,
            full: 0,
        }
    }

    /// A new connection: its number, and the server's end.
    pub(super) fn connect(&mut self, room: usize) -> io::Result<(usize, OwnedFd)> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        self.by_fd.insert(theirs.as_raw_fd(), self.links.len());
        self.links.push(Link {
            peer: Some(ours),
            up: VecDeque::new(),
            up_ended: false,
            down: VecDeque::new(),
            room,
            broken: false,
            left: false,
            shut: false,
            faulty: false,
            moved: (0, 0),
        });
        Ok((self.links.len() - 1, theirs))
    }

    /// The connection whose server's end this is.
    pub(super) fn of(&self, fd: &OwnedFd) -> Option<usize> {
        self.by_fd.get(&fd.as_raw_fd()).copied()
    }

    /// Looks which connections the server is through with.
    pub(super) fn look(&mut self) {
        let open: Vec<usize> =
            (0..self.links.len()).filter(|&l| !self.links[l].shut && self.links[l].peer.is_some()).collect();
        let mut gone = Vec::new();
        let mut fds: Vec<PollFd<'_>> = open
            .iter()
            .filter_map(|&l| self.links[l].peer.as_ref())
            .map(|fd| PollFd::new(fd, PollFlags::empty()))
            .collect();
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut fds, Some(&at_once)).is_ok_and(|n| n > 0) {
            let hung = fds.iter().zip(&open).filter(|(fd, _)| fd.revents().contains(PollFlags::HUP));
            gone.extend(hung.map(|(_, &l)| l));
        }
        drop(fds);
        for l in gone {
            let link = &mut self.links[l];
            link.shut = true;
            if link.left {
                link.peer = None;
            }
        }
    }

    /// What was received and sent on each connection since the last call.
    pub(super) fn take_moved(&mut self) -> Vec<(usize, u64, u64)> {
        let moved = |link: &mut Link| std::mem::take(&mut link.moved);
        let all = self.links.iter_mut().enumerate().map(|(l, link)| (l, moved(link)));
        all.filter(|(_, moved)| *moved != (0, 0)).map(|(l, (received, sent))| (l, received, sent)).collect()
    }

    /// The client of `l` sends no more; it still reads.
    pub(super) fn end_up(&mut self, l: usize) {
        let link = &mut self.links[l];
        link.up_ended = true;
        if let Some(peer) = &link.peer {
            let _ = shutdown(peer, Shutdown::Write);
        }
    }

    /// The client of `l` is gone. `quietly` as over TCP, where nobody hears of it before a send
    /// fails; `broken` when what it sent last is lost too.
    pub(super) fn leave(&mut self, l: usize, quietly: bool, broken: bool) {
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
    pub(super) fn is_cutting(&self) -> bool {
        self.cuts && !self.calm
    }

    /// How many bytes may be on their way to the client of `l`.
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
        self.failed += 1;
        let error = self.chance.pick(errors);
        let link = &mut self.links[l];
        link.faulty = true;
        link.broken |= matches!(error, errno::ECONNRESET | errno::EPIPE);
        Some(-error)
    }

    /// What a receive into `data` does now.
    pub(super) fn receive(&mut self, l: usize, data: &mut Segments) -> Io {
        if self.links[l].broken {
            return Io::Ended(-errno::ECONNRESET);
        }
        let there = self.links[l].up.len();
        if there == 0 {
            let over = self.links[l].up_ended || self.links[l].shut;
            return if over { Io::Ended(0) } else { Io::Waits };
        }
        if let Some(error) = self.error(l, &[errno::ECONNRESET, errno::EINTR, errno::ETIMEDOUT]) {
            return Io::Ended(error);
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
        Io::Ended(n as i32)
    }

    /// What a send of `data`, of which `done` bytes have left, does now; what left is added. A
    /// send that waits goes on when there is room.
    pub(super) fn send(&mut self, l: usize, data: &Segments, done: &mut usize, quick: bool) -> Io {
        let ended = |done: usize, error: i32| Io::Ended(if done > 0 { done as i32 } else { error });
        if let Some(error) = self.error(l, &[errno::ECONNRESET, errno::EPIPE, ENOBUFS]) {
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
            true => Io::Ended(*done as i32),
            false if quick => ended(*done, -errno::EAGAIN),
            // The kernel gives up waiting for room for reasons of its own, too.
            false if *done > 0 && !self.calm && self.chance.one_in(8) => Io::Ended(*done as i32),
            false => Io::Waits,
        }
    }

    /// Could a receive on `l` end now?
    pub(super) fn can_receive(&self, l: usize) -> bool {
        let link = &self.links[l];
        !link.up.is_empty() || link.up_ended || link.shut || link.broken
    }

    /// Could a send on `l` get on now?
    pub(super) fn can_send(&self, l: usize) -> bool {
        let link = &self.links[l];
        link.down.len() < self.room(l) || link.left || link.shut || link.broken
    }
}
