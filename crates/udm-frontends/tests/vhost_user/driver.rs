//! The front end and driver of a small virtual machine. Its memory is a memfd, and its rings have
//! 128 entries.

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::collections::HashMap;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};
use udm_buf::{SharedMemoryMap, copy_from_shared, copy_to_shared};
use udm_wire::vhost_user::{HEADER_SIZE, InflightArea, VhostUserMessageHeader, encode_message};
use udm_wire::virtio::VirtioFeatures;
use udm_wire::virtio::blk::BLK_CONFIG_SIZE;
use udm_wire::virtio::ring::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, SplitRingLayout, needs_event};

pub const RING: u16 = 128;
/// First guest address of the memory, and first address in the front end's process.
pub const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7f00_0000_0000;
pub const MEMORY: usize = 8 << 20;
/// Offset of the data; the rings are before it.
pub const DATA: usize = 1 << 20;
const RING_BYTES: usize = 64 << 10;
const LIMIT: Duration = Duration::from_secs(20);

/// Numbers of messages that the tests send.
pub mod message {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
}

/// The driver's side of a ring.
struct TestDriverRing {
    start: usize,
    free: Vec<u16>,
    /// Descriptors of each request in flight, by its head.
    in_flight: HashMap<u16, Vec<u16>>,
    avail: u16,
    seen: u16,
    kick: OwnedFd,
    call: OwnedFd,
}

/// A virtual machine.
pub struct TestMachine {
    pub socket: UnixStream,
    pub memory: Arc<SharedMemoryMap>,
    pub memfd: OwnedFd,
    pub features: VirtioFeatures,
    rings: Vec<TestDriverRing>,
    pub inflight: Option<(OwnedFd, InflightArea)>,
    is_indirect: bool,
    /// The driver looks at the used ring and asks for no notification.
    pub polls: bool,
}

/// A buffer of a request: offset in the memory and length.
pub type Place = (usize, usize);

impl TestMachine {
    /// A machine with `rings` rings that is not connected to a back end yet.
    pub fn new(path: &Path, rings: usize) -> TestMachine {
        TestMachine::on(connect(path), rings)
    }

    /// A machine on a connected socket.
    pub fn on(socket: UnixStream, rings: usize) -> TestMachine {
        let memfd = memfd_create("machine", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memfd, MEMORY as u64).unwrap();
        let memory = Arc::new(SharedMemoryMap::of_guest_memory(&memfd, 0, MEMORY).unwrap());
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let ring = |index| TestDriverRing {
            start: index * RING_BYTES,
            free: (0..RING).rev().collect(),
            in_flight: HashMap::new(),
            avail: 0,
            seen: 0,
            kick: eventfd(0, flags).unwrap(),
            call: eventfd(0, flags).unwrap(),
        };
        let rings = (0..rings).map(ring).collect();
        let features = VirtioFeatures::empty();
        TestMachine {
            socket,
            memory,
            memfd,
            features,
            rings,
            inflight: None,
            is_indirect: false,
            polls: false,
        }
    }

    /// Negotiates `features` and starts all rings.
    pub fn start(&mut self, features: VirtioFeatures) {
        self.negotiate(features);
        self.add_memory();
        (0..self.rings.len()).for_each(|index| self.start_ring(index));
    }

    pub fn negotiate(&mut self, features: VirtioFeatures) {
        self.tell(message::SET_OWNER, &[], &[]);
        let offered = VirtioFeatures::from_bits_retain(self.number(message::GET_FEATURES));
        self.features = features | VirtioFeatures::VERSION_1 | VirtioFeatures::VHOST_PROTOCOL_FEATURES;
        assert!(offered.contains(self.features), "{offered:?}");
        self.is_indirect = features.contains(VirtioFeatures::INDIRECT_DESC);
        let protocol = self.number(message::GET_PROTOCOL_FEATURES);
        self.tell_plain(message::SET_PROTOCOL_FEATURES, &protocol.to_ne_bytes());
        let bits = self.features.bits().to_ne_bytes();
        self.tell(message::SET_FEATURES, &bits, &[]);
    }

    fn region(&self) -> Vec<u8> {
        [0, GUEST, MEMORY as u64, USER, 0].iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    pub fn add_memory(&mut self) {
        let (region, memfd) = (self.region(), self.memfd.try_clone().unwrap());
        self.tell(message::ADD_MEM_REG, &region, &[memfd.as_fd()]);
    }

    pub fn remove_memory(&mut self) {
        let region = self.region();
        self.tell(message::REM_MEM_REG, &region, &[]);
    }

    fn start_ring(&mut self, index: usize) {
        let ring = &self.rings[index];
        let (start, base) = (USER + ring.start as u64, u32::from(ring.seen));
        let (kick, call) = (ring.kick.try_clone().unwrap(), ring.call.try_clone().unwrap());
        let pair = |value: u32| [(index as u32).to_ne_bytes(), value.to_ne_bytes()].concat();
        self.tell(message::SET_VRING_NUM, &pair(RING.into()), &[]);
        self.tell(message::SET_VRING_BASE, &pair(base), &[]);
        let mut addresses = pair(0);
        for address in [start, start + 8192, start + 4096, 0] {
            addresses.extend(address.to_ne_bytes());
        }
        self.tell(message::SET_VRING_ADDR, &addresses, &[]);
        self.tell(message::SET_VRING_CALL, &(index as u64).to_ne_bytes(), &[call.as_fd()]);
        self.tell(message::SET_VRING_KICK, &(index as u64).to_ne_bytes(), &[kick.as_fd()]);
        self.tell(message::SET_VRING_ENABLE, &pair(1), &[]);
    }

    /// Stops a ring; returns the index at which it continues.
    pub fn stop_ring(&mut self, index: u32) -> u32 {
        let reply = self.ask(message::GET_VRING_BASE, &[index.to_ne_bytes(), [0; 4]].concat());
        u32::from_ne_bytes(reply[4..8].try_into().unwrap())
    }

    /// Creates the memory for requests in flight.
    pub fn create_inflight(&mut self) {
        let rings = self.rings.len() as u16;
        let asked = InflightArea { size: 0, offset: 0, queues: rings, ring_size: RING };
        self.send(message::GET_INFLIGHT_FD, false, &asked.encode(), &[]);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = rustix::net::RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; HEADER_SIZE + 24];
        let mut parts = [rustix::io::IoSliceMut::new(&mut bytes)];
        let flags = rustix::net::RecvFlags::WAITALL;
        rustix::net::recvmsg(&self.socket, &mut parts, &mut ancillary, flags).unwrap();
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let rustix::net::RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        let size = u64::from_ne_bytes(bytes[12..20].try_into().unwrap());
        self.inflight = Some((fds.pop().unwrap(), InflightArea { size, ..asked }));
        self.set_inflight();
    }

    fn set_inflight(&mut self) {
        let Some((fd, area)) = &self.inflight else { return };
        let (fd, area) = (fd.try_clone().unwrap(), area.encode());
        self.tell(message::SET_INFLIGHT_FD, &area, &[fd.as_fd()]);
    }

    /// Connects again and continues with the same rings, as after the end of a back end.
    pub fn reconnect(&mut self, path: &Path) {
        self.socket = connect(path);
        let features = self.features;
        self.negotiate(features);
        self.set_inflight();
        self.add_memory();
        (0..self.rings.len()).for_each(|index| self.start_ring(index));
    }

    /// The configuration space.
    pub fn config(&mut self) -> [u8; BLK_CONFIG_SIZE] {
        let mut payload: Vec<u8> =
            [0, BLK_CONFIG_SIZE as u32, 0].iter().flat_map(|w| w.to_ne_bytes()).collect();
        payload.resize(12 + BLK_CONFIG_SIZE, 0);
        self.ask(message::GET_CONFIG, &payload)[12..].try_into().unwrap()
    }

    // ---- messages ----

    fn send(&self, request: u32, needs_reply: bool, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let bytes = encode_message(request, needs_reply, payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
        }
        sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
    }

    fn receive(&mut self) -> std::io::Result<Vec<u8>> {
        let mut header = [0; HEADER_SIZE];
        self.socket.read_exact(&mut header)?;
        let header = VhostUserMessageHeader::decode(&header).unwrap();
        assert!(header.is_reply);
        let mut payload = vec![0; header.size];
        self.socket.read_exact(&mut payload)?;
        Ok(payload)
    }

    /// Sends a request with a reply of its own.
    pub fn ask(&mut self, request: u32, payload: &[u8]) -> Vec<u8> {
        self.send(request, false, payload, &[]);
        self.receive().unwrap()
    }

    pub fn number(&mut self, request: u32) -> u64 {
        u64::from_ne_bytes(self.ask(request, &[]).try_into().unwrap())
    }

    /// Sends a request and expects success.
    pub fn tell(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        assert!(self.try_tell(request, payload, fds), "message {request} was refused");
    }

    /// Sends a request; returns whether it succeeded. The first one needs no reply.
    pub fn try_tell(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        if request == message::SET_OWNER {
            self.send(request, false, payload, fds);
            return true;
        }
        self.send(request, true, payload, fds);
        self.is_success()
    }

    /// Receives the reply to a request; returns whether it reports success.
    fn is_success(&mut self) -> bool {
        self.receive().unwrap() == 0u64.to_ne_bytes()
    }

    /// Adds a second region, of one page, and calls `meanwhile` before it waits for the reply.
    pub fn add_page(&mut self, meanwhile: impl FnOnce(&mut TestMachine)) {
        let memfd = memfd_create("page", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memfd, 4096).unwrap();
        let region = [0, GUEST + (1 << 40), 4096, USER + (1 << 40), 0];
        let region: Vec<u8> = region.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.send(message::ADD_MEM_REG, true, &region, &[memfd.as_fd()]);
        meanwhile(self);
        assert!(self.is_success());
    }

    /// Sends a request that asks for a reply; returns whether the back end closes the connection.
    pub fn is_closed_by(&mut self, request: u32, payload: &[u8]) -> bool {
        self.send(request, true, payload, &[]);
        self.is_closed()
    }

    /// Sends a request that has no reply.
    pub fn tell_plain(&mut self, request: u32, payload: &[u8]) {
        self.send(request, false, payload, &[]);
    }

    /// Waits until the back end has closed the connection.
    pub fn is_closed(&mut self) -> bool {
        self.receive().is_err()
    }

    // ---- memory ----

    pub fn write(&self, at: usize, bytes: &[u8]) {
        copy_to_shared(self.memory.words(), at, bytes);
    }

    pub fn read(&self, (at, len): Place) -> Vec<u8> {
        let mut out = vec![0; len];
        copy_from_shared(self.memory.words(), at, &mut out);
        out
    }

    // ---- rings ----

    fn put_descriptor(&self, at: usize, (address, len, flags, next): (u64, usize, u16, u16)) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&(len as u32).to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.write(at, &bytes);
    }

    /// Adds a request without a kick: `readable` and `writable` buffers between header and status.
    /// Returns its head.
    pub fn add(
        &mut self,
        ring: usize,
        kind: u32,
        sector: u64,
        readable: &[Place],
        writable: &[Place],
    ) -> u16 {
        let head = *self.rings[ring].free.last().expect("the ring is full");
        let start = self.rings[ring].start;
        let header = start + 12_288 + 16 * usize::from(head);
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        self.write(header, &bytes);
        let status = self.status_at(ring, head);
        self.write(status, &[0xff]);
        let mut buffers = vec![(header, 16, false)];
        buffers.extend(readable.iter().map(|(at, len)| (*at, *len, false)));
        buffers.extend(writable.iter().map(|(at, len)| (*at, *len, true)));
        buffers.push((status, 1, true));
        self.add_chain(ring, &buffers)
    }

    pub fn status_at(&self, ring: usize, head: u16) -> usize {
        self.rings[ring].start + 16_384 + usize::from(head)
    }

    /// Adds a chain of buffers: offset, length, writable.
    pub fn add_chain(&mut self, ring: usize, buffers: &[(usize, usize, bool)]) -> u16 {
        let start = self.rings[ring].start;
        let count = if self.is_indirect { 1 } else { buffers.len() };
        let used: Vec<u16> =
            (0..count).map(|_| self.rings[ring].free.pop().expect("the ring is full")).collect();
        let head = used[0];
        let table = start + 20_480 + 256 * usize::from(head);
        for (i, (at, len, is_writable)) in buffers.iter().enumerate() {
            let mut flags = if *is_writable { DESC_F_WRITE } else { 0 };
            let is_last = i + 1 == buffers.len();
            flags |= if is_last { 0 } else { DESC_F_NEXT };
            let (place, next) = match self.is_indirect {
                true => (table + 16 * i, i as u16 + 1),
                false => (start + 16 * usize::from(used[i]), used.get(i + 1).copied().unwrap_or(0)),
            };
            self.put_descriptor(place, (GUEST + *at as u64, *len, flags, next));
        }
        if self.is_indirect {
            let at = start + 16 * usize::from(head);
            self.put_descriptor(at, (GUEST + table as u64, 16 * buffers.len(), DESC_F_INDIRECT, 0));
        }
        self.publish(ring, head);
        self.rings[ring].in_flight.insert(head, used);
        head
    }

    /// Adds an entry to the available ring.
    pub fn publish(&mut self, index: usize, head: u16) {
        let layout = SplitRingLayout { size: RING };
        let ring = &mut self.rings[index];
        let avail = ring.start + 4096;
        self.memory.u16_at(avail + layout.avail_entry(ring.avail)).store(head, Ordering::Relaxed);
        ring.avail = ring.avail.wrapping_add(1);
        self.memory.u16_at(avail + 2).store(ring.avail, Ordering::Release);
    }

    /// Notifies the back end, if it asks for that, of what was added since index `old`.
    pub fn kick(&self, index: usize, old: u16) -> bool {
        fence(Ordering::SeqCst);
        let ring = &self.rings[index];
        let used = ring.start + 8192;
        let wants = if self.features.contains(VirtioFeatures::EVENT_IDX) {
            let at = used + SplitRingLayout { size: RING }.avail_event();
            needs_event(self.memory.u16_at(at).load(Ordering::Relaxed), ring.avail, old)
        } else {
            self.memory.u16_at(used).load(Ordering::Relaxed) == 0
        };
        if wants {
            self.kick_always(index);
        }
        wants
    }

    pub fn kick_always(&self, index: usize) {
        rustix::io::write(&self.rings[index].kick, &1u64.to_ne_bytes()).unwrap();
    }

    pub fn avail(&self, index: usize) -> u16 {
        self.rings[index].avail
    }

    /// Waits for a notification.
    pub fn wait_for_call(&self, index: usize) {
        let call = &self.rings[index].call;
        let mut fds = [PollFd::new(call, PollFlags::IN)];
        let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "no notification");
        rustix::io::read(call, &mut [0; 8]).unwrap();
    }

    /// Takes the next used entry, if there is one: head and written bytes.
    pub fn take_used(&mut self, index: usize) -> Option<(u16, u32)> {
        let ring = &mut self.rings[index];
        let used = ring.start + 8192;
        if self.memory.u16_at(used + 2).load(Ordering::Acquire) == ring.seen {
            return None;
        }
        let at = used + SplitRingLayout { size: RING }.used_entry(ring.seen);
        ring.seen = ring.seen.wrapping_add(1);
        if !self.polls {
            // Asks for the next notification.
            let event = ring.start + 4096 + SplitRingLayout { size: RING }.used_event();
            self.memory.u16_at(event).store(ring.seen, Ordering::Relaxed);
        }
        let head = self.memory.u32_at(at).load(Ordering::Relaxed) as u16;
        let written = self.memory.u32_at(at + 4).load(Ordering::Relaxed);
        ring.free.extend(ring.in_flight.remove(&head).expect("a request that was in flight"));
        Some((head, written))
    }

    /// Waits for the next used entry.
    pub fn wait_used(&mut self, index: usize) -> (u16, u32) {
        let end = Instant::now() + LIMIT;
        loop {
            if let Some(used) = self.take_used(index) {
                return used;
            }
            assert!(Instant::now() < end, "no request completes");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Performs one request; returns its status byte and the written length.
    pub fn request(
        &mut self,
        ring: usize,
        kind: u32,
        sector: u64,
        readable: &[Place],
        writable: &[Place],
    ) -> (u8, u32) {
        let old = self.avail(ring);
        let head = self.add(ring, kind, sector, readable, writable);
        self.kick(ring, old);
        let (used, written) = self.wait_used(ring);
        assert_eq!(used, head);
        (self.read((self.status_at(ring, head), 1))[0], written)
    }
}

fn connect(path: &Path) -> UnixStream {
    let socket = UnixStream::connect(path).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}
