//! Limits of connections: slots for connections in the handshake, and slots for served clients.
//!
//! * A new connection takes a *handshake slot*. If all are taken, the oldest connection that has
//!   sent nothing is closed, or else the oldest. So clients that only connect cannot block others.
//! * A client that chooses an export takes a *serving slot*. One peer (a user, an address) and one
//!   device get only a part of these slots, and one peer only a part of those of a device.
//! * A client that disconnects, or ends its stream, frees its slot at once, even if the device
//!   still has its requests. Such an *orphan* still counts for its export and for the part of its
//!   peer in it, and its memory for its core. So no peer can take all the slots of a device by
//!   connecting, sending a request and leaving.
//!
//! The NVMe/TCP target admits its connections in the same way: each queue is a client, and its
//! subsystem is the device.

use super::NbdServerLimits;
use super::stats::{ServerCounters, UnpublishedConnectionCounters};
use nix::sys::socket::{VsockAddr, getpeername};
use rustix::net::{AddressFamily, Shutdown, sockopt};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use udm_core::{CoreId, DeviceId};

/// The other end of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Peer {
    /// A user of this machine.
    User(u32),
    /// An address.
    Address(IpAddr),
    /// A virtual machine, by its context ID of vsock. The hypervisor gives it.
    Machine(u32),
    /// The system cannot identify the peer.
    #[default]
    Unknown,
}

impl Peer {
    /// Its address, if it has one.
    pub(crate) fn address(self) -> Option<IpAddr> {
        match self {
            Peer::Address(address) => Some(address.to_canonical()),
            Peer::User(_) | Peer::Machine(_) | Peer::Unknown => None,
        }
    }

    /// The peer together with the others of its IPv6 network of 64 bits: one host may have all
    /// addresses of it.
    pub(crate) fn network(self) -> Peer {
        match self {
            Peer::Address(IpAddr::V6(address)) if address.to_ipv4_mapped().is_none() => {
                let network = address.to_bits() & !u128::from(u64::MAX);
                Peer::Address(Ipv6Addr::from_bits(network).into())
            }
            other => other,
        }
    }
}

/// For sentences about "the client ...".
impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::User(user) => write!(f, "of user {user}"),
            Peer::Address(address) => write!(f, "at {address}"),
            Peer::Machine(cid) => write!(f, "of machine {cid} (vsock)"),
            Peer::Unknown => f.write_str("without an address"),
        }
    }
}

impl Peer {
    pub(crate) fn of(fd: &OwnedFd) -> Peer {
        match sockopt::socket_domain(fd.as_fd()) {
            Ok(AddressFamily::UNIX) => {
                return sockopt::socket_peercred(fd.as_fd())
                    .map_or(Peer::Unknown, |peer| Peer::User(peer.uid.as_raw()));
            }
            Ok(AddressFamily::VSOCK) => {
                return getpeername::<VsockAddr>(fd.as_raw_fd())
                    .map_or(Peer::Unknown, |peer| Peer::Machine(peer.cid()));
            }
            _ => {}
        }
        let address = rustix::net::getpeername(fd).ok().flatten().map(SocketAddr::try_from);
        address.and_then(Result::ok).map_or(Peer::Unknown, |address| Peer::Address(address.ip()))
    }
}

/// Stages of a connection, for the accepting thread.
const QUIET: u8 = 0;
const TALKING: u8 = 1;
const SERVED: u8 = 2;
const GONE: u8 = 3;

/// The connections in the handshake, oldest first. Used only by the accepting side.
#[derive(Default)]
pub(crate) struct PendingHandshakes {
    handshaking: VecDeque<PendingHandshake>,
}

/// A connection in the handshake.
struct PendingHandshake {
    fd: Weak<OwnedFd>,
    stage: Arc<AtomicU8>,
    peer: Peer,
}

impl PendingHandshake {
    fn is_pending(&self) -> bool {
        self.stage.load(Ordering::Relaxed) < SERVED
    }
}

impl PendingHandshakes {
    /// Closes a connection of the peer that has the most: its oldest one that has sent nothing, or
    /// else its oldest one. So a peer with many connections closes none of another peer. Returns
    /// false if there is none.
    fn evict_oldest(&mut self) -> bool {
        self.handshaking.retain(PendingHandshake::is_pending);
        let mut counts: HashMap<Peer, usize> = HashMap::new();
        self.handshaking.iter().for_each(|one| *counts.entry(one.peer.network()).or_default() += 1);
        let most = counts.values().copied().max().unwrap_or(0);
        let is_of_most = |one: &PendingHandshake| counts.get(&one.peer.network()) == Some(&most);
        let is_quiet = |one: &PendingHandshake| one.stage.load(Ordering::Relaxed) == QUIET;
        let quiet = self.handshaking.iter().position(|one| is_of_most(one) && is_quiet(one));
        let oldest = quiet.or_else(|| self.handshaking.iter().position(is_of_most));
        let Some(one) = oldest.and_then(|oldest| self.handshaking.remove(oldest)) else { return false };
        // The core of the connection sees the end of the stream.
        one.fd.upgrade().is_some_and(|fd| rustix::net::shutdown(fd, Shutdown::Both).is_ok())
    }
}

impl ServerCounters {
    /// Returns true if no more connections may be accepted now. A connection that was evicted keeps
    /// its slot until its core has closed it, so the limit is twice the number of handshakes.
    pub(super) fn is_full(&self, options: &NbdServerLimits) -> bool {
        self.handshakes.load(Ordering::Relaxed) >= 2 * options.handshakes_max.max(1)
    }

    /// Takes a slot for the new connection `fd`, on the core with the fewest connections; the
    /// search begins at core `from`. Returns `None` if no slot is free. Called by one thread at a
    /// time.
    pub(crate) fn place(
        self: &Arc<Self>,
        fd: &Arc<OwnedFd>,
        handshake_slots: &mut PendingHandshakes,
        options: &NbdServerLimits,
        from: usize,
    ) -> Option<AdmittedConnectionSlot> {
        let max = options.handshakes_max.max(1);
        let full = self.handshakes.load(Ordering::Relaxed) >= max;
        if self.is_full(options) || (full && !handshake_slots.evict_oldest()) {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let n = self.cores.len();
        let order = (0..n).map(|i| (from + i) % n);
        let core = order.min_by_key(|&i| self.cores[i].connections.load(Ordering::Relaxed))?;
        self.accepted.fetch_add(1, Ordering::Relaxed);
        self.handshakes.fetch_add(1, Ordering::Relaxed);
        self.cores[core].connections.fetch_add(1, Ordering::Relaxed);
        let stage = Arc::new(AtomicU8::new(QUIET));
        if handshake_slots.handshaking.len() >= 2 * max {
            handshake_slots.handshaking.retain(PendingHandshake::is_pending);
        }
        let (counters, peer) = (self.clone(), Peer::of(fd));
        let pending = PendingHandshake { fd: Arc::downgrade(fd), stage: Arc::clone(&stage), peer };
        handshake_slots.handshaking.push_back(pending);
        Some(AdmittedConnectionSlot {
            counters,
            core,
            peer,
            device: None,
            stage,
            life: NbdConnectionSlotState::Connected,
        })
    }
}

/// The slot of one connection, counted until it is dropped.
pub(crate) struct AdmittedConnectionSlot {
    counters: Arc<ServerCounters>,
    core: usize,
    peer: Peer,
    /// Device of the chosen export.
    device: Option<DeviceId>,
    stage: Arc<AtomicU8>,
    life: NbdConnectionSlotState,
}

/// What a slot counts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NbdConnectionSlotState {
    /// A connection.
    Connected,
    /// A connection whose client has disconnected.
    Orphan,
    /// Nothing: another core has the slot.
    HandedOver,
}

impl AdmittedConnectionSlot {
    pub(crate) fn core(&self) -> CoreId {
        CoreId(self.core as u16)
    }

    /// The other end of the connection.
    pub(crate) fn peer(&self) -> Peer {
        self.peer
    }

    /// Records that the client has sent something.
    pub(crate) fn mark_active(&self) {
        if self.stage.load(Ordering::Relaxed) == QUIET {
            self.stage.store(TALKING, Ordering::Relaxed);
        }
    }

    /// Exchanges the handshake slot for a serving slot of `device`.
    ///
    /// # Errors
    /// No slot is left in all, or for this peer. The text is for the client.
    pub(crate) fn serve(&mut self, device: DeviceId, options: &NbdServerLimits) -> Result<(), String> {
        let refuse = |text: String| {
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
            Err(text)
        };
        let max = options.connections_max.max(1);
        if !try_increment(&self.counters.serving, max) {
            return refuse(format!("{max} clients are connected, which is the maximum"));
        }
        let mut peers = self.counters.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let bounds = [(None, options.peer_connections_max), (Some(device), options.peer_device_max())];
        let count = |of: Option<DeviceId>| peers.get(&(self.peer, of)).copied().unwrap_or(0);
        if let Some((of, max)) = bounds.into_iter().find(|&(of, max)| count(of) >= max.max(1)) {
            let to = if of.is_some() { " to this device, or have left requests in it" } else { "" };
            let text = format!(
                "{} clients of your user or address are connected{to}, which is the maximum",
                max.max(1)
            );
            drop(peers);
            self.counters.serving.fetch_sub(1, Ordering::Release);
            return refuse(text);
        }
        for of in [None, Some(device)] {
            *peers.entry((self.peer, of)).or_default() += 1;
        }
        drop(peers);
        self.device = Some(device);
        self.counters.handshakes.fetch_sub(1, Ordering::Release);
        self.stage.store(SERVED, Ordering::Relaxed);
        Ok(())
    }

    /// Records that the client has disconnected, although requests of it may be in flight.
    pub(crate) fn mark_client_gone(&mut self) {
        if self.life == NbdConnectionSlotState::Connected {
            self.life = NbdConnectionSlotState::Orphan;
            self.counters.orphans.fetch_add(1, Ordering::Relaxed);
            self.leave();
        }
    }

    /// Creates the same slot for core `to`. This slot counts for nothing any more.
    pub(crate) fn hand_over(&mut self, to: CoreId) -> AdmittedConnectionSlot {
        debug_assert_eq!(
            self.life,
            NbdConnectionSlotState::Connected,
            "only who has a place can hand it over"
        );
        self.life = NbdConnectionSlotState::HandedOver;
        let cores = &self.counters.cores;
        cores[self.core].connections.fetch_sub(1, Ordering::Relaxed);
        cores[to.index()].connections.fetch_add(1, Ordering::Relaxed);
        self.counters.moves.fetch_add(1, Ordering::Relaxed);
        let (counters, stage) = (self.counters.clone(), self.stage.clone());
        let (peer, device) = (self.peer, self.device);
        AdmittedConnectionSlot {
            counters,
            core: to.index(),
            peer,
            device,
            stage,
            life: NbdConnectionSlotState::Connected,
        }
    }

    /// Frees the slot, except for the part of the peer in the device.
    fn leave(&mut self) {
        self.counters.cores[self.core].connections.fetch_sub(1, Ordering::Relaxed);
        if self.stage.swap(GONE, Ordering::Relaxed) < SERVED {
            self.counters.handshakes.fetch_sub(1, Ordering::Release);
            return;
        }
        self.uncount(None);
        // Release: a reader that sees the connection closed also sees its last counters.
        self.counters.serving.fetch_sub(1, Ordering::Release);
    }

    /// Counts one client less of this peer: in all, or of a device.
    fn uncount(&self, of: Option<DeviceId>) {
        let mut peers = self.counters.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut count) = peers.entry((self.peer, of)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// Counters of the server.
    pub(super) fn counters(&self) -> &Arc<ServerCounters> {
        &self.counters
    }

    /// Adds `delta` to the counters of the slot's core ([`ServerCounters::publish`]).
    pub(super) fn publish(&self, delta: &mut UnpublishedConnectionCounters) {
        self.counters.publish(self.core, delta);
    }
}

impl Drop for AdmittedConnectionSlot {
    fn drop(&mut self) {
        match self.life {
            NbdConnectionSlotState::Connected => self.leave(),
            NbdConnectionSlotState::Orphan => drop(self.counters.orphans.fetch_sub(1, Ordering::Release)),
            NbdConnectionSlotState::HandedOver => return,
        }
        if self.device.is_some() {
            self.uncount(self.device);
        }
    }
}

/// Increments `count`, unless it is `max`.
fn try_increment(count: &AtomicUsize, max: usize) -> bool {
    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < max).then_some(n + 1)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    fn pair() -> (UnixStream, Arc<OwnedFd>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (ours, Arc::new(theirs.into()))
    }

    fn options() -> NbdServerLimits {
        NbdServerLimits {
            handshakes_max: 3,
            connections_max: 4,
            peer_connections_max: 3,
            ..NbdServerLimits::default()
        }
    }

    #[test]
    fn connections_go_to_the_emptiest_core() {
        let (c, mut handshake_slots, options) =
            (ServerCounters::new(3), PendingHandshakes::default(), NbdServerLimits::default());
        let sockets: Vec<_> = (0..7).map(|_| pair()).collect();
        let places: Vec<_> =
            (0..6).map(|i| c.place(&sockets[i].1, &mut handshake_slots, &options, i).unwrap()).collect();
        assert_eq!(places.iter().map(|p| p.core().0).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2]);
        assert_eq!((c.read().connections, c.read().handshakes), (6, 6));
        drop(places);
        assert_eq!(c.read().connections, 0);
        assert_eq!(c.place(&sockets[6].1, &mut handshake_slots, &options, 2).unwrap().core().0, 2);
    }

    /// Connections that have sent nothing are closed for new ones. A connection that has sent
    /// something stays as long as there is a silent one.
    #[test]
    fn a_full_lobby_shows_the_silent_out() {
        let (c, mut handshake_slots, options) =
            (ServerCounters::new(1), PendingHandshakes::default(), options());
        let mut sockets: Vec<_> = (0..6).map(|_| pair()).collect();
        let mut places = Vec::new();
        for (i, (_, fd)) in sockets.iter().enumerate() {
            let place = c.place(fd, &mut handshake_slots, &options, 0).unwrap();
            if i == 0 {
                place.mark_active();
            }
            places.push(place);
        }
        assert!(c.place(&pair().1, &mut handshake_slots, &options, 0).is_none(), "not without bound");
        let mut ended = |i: usize| {
            sockets[i].0.set_nonblocking(true).unwrap();
            sockets[i].0.read(&mut [0]).is_ok()
        };
        assert_eq!([0, 1, 2, 3, 4, 5].map(&mut ended), [false, true, true, true, false, false]);
        drop(places);
        assert_eq!((c.read().connections, c.read().refused), (0, 1));
    }

    /// A peer that holds most places loses its own, although its connections have sent something
    /// and the only one of another peer has not.
    #[test]
    fn a_peer_with_many_connections_evicts_its_own() {
        let (c, mut handshake_slots, options) =
            (ServerCounters::new(1), PendingHandshakes::default(), options());
        let mut sockets: Vec<_> = (0..4).map(|_| pair()).collect();
        let mut places = Vec::new();
        for (i, (_, fd)) in sockets.iter().enumerate() {
            places.push(c.place(fd, &mut handshake_slots, &options, 0).unwrap());
            match i {
                0 => handshake_slots.handshaking[0].peer = Peer::Address([192, 0, 2, 1].into()),
                _ => places[i].mark_active(),
            }
        }
        let mut ended = |i: usize| {
            sockets[i].0.set_nonblocking(true).unwrap();
            sockets[i].0.read(&mut [0]).is_ok()
        };
        assert_eq!([0, 1, 2, 3].map(&mut ended), [false, true, false, false]);
    }

    #[test]
    fn a_network_of_ipv6_is_one_peer() {
        let network = |address: &str| Peer::Address(address.parse().unwrap()).network();
        assert_eq!(network("2001:db8:0:1::1"), network("2001:db8:0:1:ffff::2"));
        assert_ne!(network("2001:db8:0:1::1"), network("2001:db8:0:2::1"));
        assert_ne!(network("::ffff:192.0.2.1"), network("::ffff:192.0.2.2"));
    }

    #[test]
    fn serving_places_are_bounded_in_all_and_a_peer() {
        let (c, mut handshake_slots, options) =
            (ServerCounters::new(1), PendingHandshakes::default(), options());
        let sockets: Vec<_> = (0..6).map(|_| pair()).collect();
        let mut places = Vec::new();
        for (i, (_, fd)) in sockets.iter().enumerate() {
            let mut place = c.place(fd, &mut handshake_slots, &options, 0).unwrap();
            if i >= 4 {
                place.peer = Peer::User(u32::MAX);
            }
            let device = DeviceId::new();
            assert_eq!(place.serve(device, &options).is_ok(), [0, 1, 2, 4].contains(&i), "connection {i}");
            places.push(place);
        }
        assert_eq!((c.read().connections, c.read().handshakes, c.read().refused), (6, 2, 2));
        // A client that disconnects frees its slot for the next one.
        places[0].mark_client_gone();
        assert!(places[3].serve(DeviceId::new(), &options).is_ok());
        assert_eq!((c.read().connections, c.read().orphans), (5, 1));
        drop(places);
        assert_eq!((c.read().connections, c.read().orphans), (0, 0));
        assert!(c.peers.lock().unwrap().is_empty());
    }

    /// One user cannot take all slots of a device, but may take more of other devices.
    #[test]
    fn a_device_has_room_for_more_than_one_peer() {
        let (c, mut handshake_slots) = (ServerCounters::new(1), PendingHandshakes::default());
        let options = NbdServerLimits { device_connections_max: 4, ..NbdServerLimits::default() };
        let sockets: Vec<_> = (0..6).map(|_| pair()).collect();
        let [a, b] = [DeviceId::new(), DeviceId::new()];
        let mut place = |i: usize| c.place(&sockets[i].1, &mut handshake_slots, &options, 0).unwrap();
        let mut places: Vec<_> = (0..3).map(&mut place).collect();
        places.iter_mut().for_each(|place| place.serve(a, &options).unwrap());
        let mut fourth = place(3);
        let why = fourth.serve(a, &options).unwrap_err();
        assert_eq!(
            why,
            "3 clients of your user or address are connected to this device, or have left requests in \
             it, which is the maximum"
        );
        assert_eq!(fourth.serve(b, &options), Ok(()));
        let mut others = place(4);
        others.peer = Peer::User(u32::MAX);
        assert_eq!(others.serve(a, &options), Ok(()));
        // Who is gone keeps its part of the device until its requests are answered.
        let mut fifth = place(5);
        places[2].mark_client_gone();
        assert!(fifth.serve(a, &options).is_err());
        places.pop();
        assert_eq!(fifth.serve(a, &options), Ok(()));
        drop((places, fourth, fifth, others));
        assert!(c.peers.lock().unwrap().is_empty());
    }
}
