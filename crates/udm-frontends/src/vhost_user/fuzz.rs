//! Properties that must hold for any guest and any front end, one function per part that reads what
//! they control. Tests run them with generated input, fuzzers with discovered input.
//!
//! Each function takes any bytes, and panics if a property is violated.

use super::chain::{DescriptorChain, buffers_len, consume_front_16, take_last_byte};
use super::channel::VhostUserChannel;
use super::handover::DetachedVhostUserFrontEnd;
use super::inflight_record::InflightRecord;
use super::memory::GuestMemory;
use super::packed_record::PackedInflightRecord;
use super::packed_ring::PackedRing;
use super::queue_wait::QueueWait;
use super::ring::SplitRing;
use super::session::{SessionStep, VhostUserSession};
use super::virt_ring::VirtRing;
use crate::nbd::{Export, Exports};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    recv, sendmsg, socketpair,
};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use udm_core::errno::EIO;
use udm_core::{Cx, Device, DeviceControlError, DeviceId, Lane, Limits, Sectors};
use udm_runtime::ProcessCores;
use udm_wire::vhost_user::{
    GuestMemoryRegion, HEADER_SIZE, InflightArea, VhostUserMessageHeader, VhostUserProtocolFeatures,
    VhostUserRequest, encode_message,
};
use udm_wire::virtio::VirtioFeatures;
use udm_wire::virtio::packed::PackedPosition;
use udm_wire::virtio::ring::SplitRingLayout;

/// First guest address of the memory, and first addresses of its two regions in the front end.
const GUEST: u64 = 0x1000;
const USER: [u64; 2] = [1 << 40, 1 << 41];
/// Bytes of each region. The second one adjoins the first one in the guest.
const REGION: usize = 8192;
/// Offsets of the parts of the ring in the second region; its data is after them.
const RING_PARTS: [usize; 3] = [0, 2048, 4096];
/// Messages of a front end.
const MESSAGES_MAX: usize = 64;

fn memory_file(len: usize) -> OwnedFd {
    let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("memory");
    ftruncate(&file, len as u64).expect("memory");
    file
}

fn two_regions() -> GuestMemory {
    let region = |index: usize| GuestMemoryRegion {
        guest_address: GUEST + (index * REGION) as u64,
        size: REGION as u64,
        user_address: USER[index],
        file_offset: 0,
    };
    let files = vec![memory_file(REGION), memory_file(REGION)];
    GuestMemory::default().replaced(&[region(0), region(1)], files).expect("two regions")
}

/// Rings and chains, over memory that begins with `data`: two bytes for the size and the kind of
/// the ring, two for the next index, the ring, and then other memory. A packed ring may have a
/// record of requests in flight, which is the other memory.
pub fn fuzz_descriptor_chains(data: &[u8]) {
    let Some(([size, kind, next @ ..], bytes)) = data.split_first_chunk::<4>() else { return };
    thread_local! {
        static MEMORY: GuestMemory = two_regions();
    }
    MEMORY.with(|memory| {
        let mut image = bytes[..bytes.len().min(2 * REGION)].to_vec();
        image.resize(2 * REGION, 0);
        // The ring is in the second region.
        image.rotate_right(REGION);
        assert!(memory.write(GUEST, &image));
        let (size, next) = (1 << (size % 8), u16::from_le_bytes(*next));
        let parts = RING_PARTS.map(|at| memory.find_user(USER[1] + at as u64, 8, 8).expect("in the region"));
        if kind & 2 == 0 {
            let layout = SplitRingLayout { size };
            return fuzz_ring(&mut SplitRing::new(layout, parts, kind % 2 == 1, next), memory);
        }
        let PackedPosition { index, wrap } = PackedPosition::decode(next);
        let base = PackedPosition { index: index % size, wrap };
        let mut ring = PackedRing::new(size, parts, kind % 2 == 1, base);
        if kind & 4 != 0 {
            let area = InflightArea { size: REGION as u64, offset: 0, queues: 1, ring_size: size };
            let record = PackedInflightRecord::new(memory.map(0), &area, 0, size).expect("it fits");
            if !ring.continue_with(record) {
                return;
            }
        }
        fuzz_ring(&mut ring, memory);
    });
}

fn fuzz_ring<R: VirtRing>(ring: &mut R, memory: &GuestMemory) {
    ring.suppress_notifications();
    while let Some(slot) = ring.resubmit() {
        assert_chain_properties(ring, memory, slot);
        ring.push_used(slot, 1);
    }
    let Ok(available) = ring.available() else { return };
    assert!(available <= ring.slots());
    for _ in 0..available {
        match ring.take() {
            Ok(None) => break,
            Ok(Some(slot)) => {
                ring.begin(slot);
                assert_chain_properties(ring, memory, slot);
                ring.push_used(slot, 1);
            }
            Err(_) => return,
        }
    }
    ring.publish();
    assert!(!ring.request_notification(), "all entries were taken");
}

/// A chain is broken, or each of its bytes is found once.
fn assert_chain_properties<R: VirtRing>(ring: &R, memory: &GuestMemory, slot: u16) {
    assert!(usize::from(slot) < ring.slots());
    let mut chain = DescriptorChain::default();
    if ring.read_chain(slot, memory, &mut chain).is_err() {
        return;
    }
    let DescriptorChain { readable, writable } = &mut chain;
    assert!((1..=1024).contains(&(readable.len() + writable.len())));
    for (address, len) in readable.iter().chain(&*writable) {
        let mut total = 0;
        let is_inside = memory.parts(*address, *len, |part| {
            assert!(part.len > 0 && part.at + part.len <= REGION && part.region < 2, "{part:?}");
            total += part.len;
        });
        assert!(total <= *len && is_inside == (total == *len));
    }
    let before = buffers_len(readable);
    if consume_front_16(memory, readable).is_some() {
        assert_eq!(buffers_len(readable), before - 16);
    }
    let before = buffers_len(writable);
    match take_last_byte(writable) {
        Some(_) => assert_eq!(buffers_len(writable), before - 1),
        // The last buffer may end after the last address.
        None => assert!(before == 0 || buffers_len(writable) == before - 1),
    }
}

/// A device that no core opens.
struct UnopenableFuzzDevice(DeviceId);

impl Device for UnopenableFuzzDevice {
    fn id(&self) -> DeviceId {
        self.0
    }

    fn open(&self, _: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Err(DeviceControlError::new(EIO, "it has no lanes"))
    }

    fn limits(&self) -> Limits {
        Limits::new(Sectors(64))
    }
}

/// The input as a source of small numbers; zeroes at its end.
struct FuzzInput<'a>(&'a [u8]);

impl FuzzInput<'_> {
    fn byte(&mut self) -> u8 {
        self.0.split_off_first().copied().unwrap_or(0)
    }

    fn below(&mut self, n: u8) -> u64 {
        u64::from(self.byte() % n)
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::from(self.byte()) % of.len()]
    }

    /// `all` bits, or a part of them.
    fn bits(&mut self, all: u64) -> u64 {
        let mask = u64::from(self.byte());
        all & !(mask | mask << 9 | mask << 24 | mask << 32)
    }

    fn region(&mut self) -> Vec<u8> {
        let [guest, size, user] = [self.below(8), self.below(6), self.below(8)];
        let size = [4096, 8192, 16_384, 5000, 0, u64::MAX - 8000][size as usize];
        let offset = self.pick(&[0, 0, 4096, 1, u64::MAX]);
        u64s_to_ne_bytes(&[GUEST + guest * 4096, size, USER[0] + user * 4096, offset])
    }

    fn descriptor(&mut self) -> OwnedFd {
        match self.byte() % 4 {
            0 | 1 => memory_file(16_384),
            2 => eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"),
            _ => rustix::pipe::pipe().expect("a pipe").0,
        }
    }

    /// The payload of a message, and the number of its descriptors. Most are valid.
    fn payload(&mut self, number: u32) -> (Vec<u8>, usize) {
        let index = self.pick(&[0, 0, 1, 1, 2, 63, 64, 255]);
        match number {
            2 => (u64s_to_ne_bytes(&[self.bits(0x5_7000_7e44)]), 0),
            16 => (u64s_to_ne_bytes(&[self.bits(VhostUserProtocolFeatures::all().bits())]), 0),
            5 => {
                let count = self.below(4) as usize;
                let regions: Vec<u8> = (0..count).flat_map(|_| self.region()).collect();
                ([u64s_to_ne_bytes(&[count as u64]), regions].concat(), count)
            }
            8 | 10 | 11 | 18 => {
                let value = self.pick(&[0u64, 1, 1, 2, 64, 256, 1024, 2048, 65_535, 3]);
                (u64s_to_ne_bytes(&[index | value << 32]), 0)
            }
            9 => {
                let mut place = || USER[0] + 64 * u64::from(self.byte());
                (u64s_to_ne_bytes(&[index, place(), place(), place(), 0]), 0)
            }
            12..=14 => {
                let has_fd = self.byte() > 0;
                (u64s_to_ne_bytes(&[index | u64::from(!has_fd) << 8]), usize::from(has_fd))
            }
            21 => (Vec::new(), 1),
            24 | 25 => {
                let (offset, len) = (self.below(70) as u32, self.below(70) as u32);
                let bytes: Vec<u8> = (0..len).map(|_| self.byte()).collect();
                let head = [offset, len, 0].iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
                ([head, bytes].concat(), 0)
            }
            31 | 32 => {
                let ring = self.pick(&[1u64, 64, 256, 1024, 0, 4096]);
                let size = self.pick(&[4096, 8192, 16_384, 65_536, 100]);
                (u64s_to_ne_bytes(&[size, 0, index | ring << 16]), usize::from(number == 32))
            }
            37 | 38 => ([vec![0; 8], self.region()].concat(), usize::from(number == 37)),
            39 => (u64s_to_ne_bytes(&[self.pick(&[0, 1, 15, 256])]), 0),
            _ => (Vec::new(), 0),
        }
    }
}

fn u64s_to_ne_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn new_session(core_set: &Arc<ProcessCores>, exports: &Exports) -> (OwnedFd, VhostUserSession) {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("sockets");
    let event = || Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd"));
    let channel = VhostUserChannel { socket: theirs, stop: event(), event: event() };
    let export = exports.acquire("disk").expect("the export");
    // The queues are never run: this is about the session.
    let wait = QueueWait::Step(|| false);
    (ours, VhostUserSession::new(channel, Arc::clone(core_set), export, wait))
}

/// Sessions: messages in any order with any descriptors, and the setup of the session in another
/// process. Each message that asks for a reply gets one. If no message was refused, another session
/// can be set up as this one.
pub fn fuzz_session(data: &[u8]) {
    let mut input = FuzzInput(data);
    let exports = Exports::new();
    let device = Arc::new(UnopenableFuzzDevice(DeviceId::new()));
    let export = Export::new("disk", "", false, device).expect("a name");
    exports.add(export).expect("the first export");
    let core_set = ProcessCores::new(1).expect("a core");
    let (front_end, mut session) = new_session(&core_set, &exports);
    let mut refused = false;
    for _ in 0..MESSAGES_MAX {
        if input.0.is_empty() {
            break;
        }
        match send_and_step(&mut input, &front_end, &mut session) {
            Ok(is_success) => refused |= !is_success,
            Err(error) => {
                let error = error.to_string();
                assert!(!error.is_empty() && !error.contains('\n') && error.len() < 500, "{error}");
                return session.stop_all();
            }
        }
    }
    let state = describe_session(&session);
    let is_sound = keeps_memory_of_rings(&session);
    session.stop_all();
    let DetachedVhostUserFrontEnd { messages, .. } = session.detach().expect("descriptors");
    let (_front_end, mut second) = new_session(&core_set, &exports);
    match second.set_up(messages) {
        // A refused message may have had a part of its effect.
        Ok(()) if refused => {}
        Ok(()) => {
            let pairs = state.iter().zip(describe_session(&second));
            pairs.for_each(|(old, new)| assert_eq!(old, &new, "the second session differs"));
        }
        Err(error) => assert!(refused || !is_sound, "a session cannot be set up again: {error}"),
    }
    second.stop_all();
}

/// True unless the front end has removed memory of a ring that runs, which it must not.
fn keeps_memory_of_rings(session: &VhostUserSession) -> bool {
    let is_in_memory = |address| session.memory.find_user(address, 8, 2).is_some();
    (0..).zip(&session.rings).filter(|(_, ring)| ring.running.is_some()).all(|(index, ring)| {
        let parts = ring.addresses.map(|of| [of.descriptors, of.avail, of.used]);
        let is_recorded = session.inflight.as_ref().is_none_or(|memory| {
            let fits = ring.size.is_some_and(|size| size <= memory.area.ring_size);
            let size = ring.size.unwrap_or(0);
            fits && match session.features.contains(VirtioFeatures::RING_PACKED) {
                true => PackedInflightRecord::new(&memory.map, &memory.area, index, size).is_some(),
                false => InflightRecord::new(&memory.map, &memory.area, index).is_some(),
            }
        });
        is_recorded && parts.is_some_and(|parts| parts.into_iter().all(is_in_memory))
    })
}

/// The state that another process must set up.
fn describe_session(session: &VhostUserSession) -> Vec<String> {
    let VhostUserSession { features, protocol, writeback, status, .. } = session;
    let area = session.inflight.as_ref().map(|memory| memory.area);
    let has_back_channel = session.back_channel.is_some();
    let all = format!("{features:?} {protocol:?} {writeback} {status} {area:?} {has_back_channel}");
    let regions = session.memory.files().map(|(region, _)| format!("{region:?}"));
    let rings = session.rings.iter().map(|ring| {
        let descriptors = [&ring.kick, &ring.call].map(Option::is_some);
        let (size, addresses, base) = (ring.size, ring.addresses, ring.base);
        // A ring that was started and disabled is started again when it is enabled.
        let is_served = ring.is_enabled && ring.running.is_some();
        format!("{size:?} {addresses:?} {base} {descriptors:?} {} {is_served}", ring.is_enabled)
    });
    [all].into_iter().chain(regions).chain(rings).collect()
}

/// Sends a message, lets the session handle it, and checks the reply. Returns false if the reply
/// reports a failure.
fn send_and_step(
    input: &mut FuzzInput<'_>,
    front_end: &OwnedFd,
    session: &mut VhostUserSession,
) -> std::io::Result<bool> {
    let number = u32::from(input.byte() % 42);
    let flags = input.byte();
    let needs_reply = flags & 3 > 0;
    let (payload, mut count) = input.payload(number);
    if flags >= 0xf0 {
        count = usize::from(flags & 7);
    }
    let fds: Vec<OwnedFd> = (0..count).map(|_| input.descriptor()).collect();
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let message = encode_message(number, needs_reply, &payload);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if count > 0 {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)));
    }
    let sent = sendmsg(front_end, &[IoSlice::new(&message)], &mut ancillary, SendFlags::empty());
    assert_eq!(sent, Ok(message.len()));
    let decode = |bytes: &[u8]| {
        let header = bytes.first_chunk::<HEADER_SIZE>().expect("a header");
        VhostUserMessageHeader::decode(header).expect("a header")
    };
    let request = VhostUserRequest::decode(&decode(&message), &payload, count);
    let has_own_reply = request.as_ref().is_ok_and(VhostUserRequest::has_own_reply);
    let acks = needs_reply && session.protocol.contains(VhostUserProtocolFeatures::REPLY_ACK);
    let step = session.step()?;
    assert!(matches!(step, SessionStep::Handled) && request.is_ok(), "an invalid message was handled");
    let mut reply = [0; 1024];
    let len = match recv(front_end, &mut reply[..], RecvFlags::DONTWAIT) {
        Ok((_, len)) => len,
        Err(_) => 0,
    };
    assert_eq!(len > 0, has_own_reply || acks, "{request:?}");
    if len == 0 {
        return Ok(true);
    }
    let header = decode(&reply);
    assert!(header.is_reply && header.request == number && len == HEADER_SIZE + header.size, "{header:?}");
    Ok(has_own_reply || reply[HEADER_SIZE..len].iter().all(|byte| *byte == 0))
}
