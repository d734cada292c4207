//! Messages of a front end, and its connection.

use super::memory::{AVAIL, MachineMemory, USED};
use super::ring::{DriverRing, is_readable};
use crate::model::Violation;
use rustix::io::IoSliceMut;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use udm_wire::vhost_user::{
    GuestMemoryRegion, HEADER_SIZE, InflightArea, VhostUserMessageHeader, encode_message,
};

/// Numbers of messages.
pub(super) mod number {
    pub(in super::super) const GET_FEATURES: u32 = 1;
    pub(in super::super) const SET_FEATURES: u32 = 2;
    pub(in super::super) const SET_OWNER: u32 = 3;
    pub(in super::super) const SET_MEM_TABLE: u32 = 5;
    pub(in super::super) const SET_VRING_NUM: u32 = 8;
    pub(in super::super) const SET_VRING_ADDR: u32 = 9;
    pub(in super::super) const SET_VRING_BASE: u32 = 10;
    pub(in super::super) const GET_VRING_BASE: u32 = 11;
    pub(in super::super) const SET_VRING_KICK: u32 = 12;
    pub(in super::super) const SET_VRING_CALL: u32 = 13;
    pub(in super::super) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(in super::super) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(in super::super) const SET_VRING_ENABLE: u32 = 18;
    pub(in super::super) const GET_CONFIG: u32 = 24;
    pub(in super::super) const SET_CONFIG: u32 = 25;
    pub(in super::super) const GET_INFLIGHT_FD: u32 = 31;
    pub(in super::super) const SET_INFLIGHT_FD: u32 = 32;
    pub(in super::super) const RESET_DEVICE: u32 = 34;
    pub(in super::super) const ADD_MEM_REG: u32 = 37;
    pub(in super::super) const REM_MEM_REG: u32 = 38;
    pub(in super::super) const SET_STATUS: u32 = 39;
    pub(in super::super) const GET_STATUS: u32 = 40;
}

/// Offset of the write cache in the configuration space.
const WRITEBACK: u32 = 32;

/// What a front end does next.
#[derive(Clone, Debug)]
pub(super) enum FrontEndStep {
    /// It sends a message with descriptors. With `is_wild` it may be refused.
    Send { number: u32, payload: Vec<u8>, fds: Vec<Arc<OwnedFd>>, is_wild: bool },
    /// It sends the memory for requests in flight.
    SendInflight,
    /// All requests of the guests are over: they begin with empty rings.
    ResetGuests,
    /// A stopped ring of a hostile guest begins again.
    ClearRing(usize),
    /// A ring continues at the index that the back end returned for it.
    SendBase(usize),
    /// Guests may use the region that was added, or not any more.
    OpenExtra(bool),
    /// The region was removed: no request uses it any more.
    CheckExtra,
    /// It closes the connection. With `in_order` all rings are stopped, and the next connection may
    /// have a new record.
    Close { in_order: bool },
}

/// A message without descriptors.
pub(super) fn plain(number: u32, payload: Vec<u8>) -> FrontEndStep {
    FrontEndStep::Send { number, payload, fds: Vec::new(), is_wild: false }
}

/// A message with a descriptor.
pub(super) fn with_fd(number: u32, payload: Vec<u8>, fd: &Arc<OwnedFd>) -> FrontEndStep {
    FrontEndStep::Send { number, payload, fds: vec![fd.clone()], is_wild: false }
}

/// A message that may be refused, or end the session.
pub(super) fn wild(number: u32, payload: Vec<u8>, fds: Vec<Arc<OwnedFd>>) -> FrontEndStep {
    FrontEndStep::Send { number, payload, fds, is_wild: true }
}

/// A number for a ring.
pub(super) fn ring_state(ring: usize, value: u32) -> Vec<u8> {
    [(ring as u32).to_ne_bytes(), value.to_ne_bytes()].concat()
}

/// Addresses of a ring.
pub(super) fn ring_addresses(ring: usize, [descriptors, used, avail]: [u64; 3]) -> Vec<u8> {
    let mut out = ring_state(ring, 0);
    [descriptors, used, avail, 0].iter().for_each(|address| out.extend(address.to_ne_bytes()));
    out
}

/// Addresses of ring `index` where its driver has it.
pub(super) fn addresses_of(memory: &MachineMemory, index: usize, ring: &DriverRing) -> Vec<u8> {
    ring_addresses(index, [0, USED, AVAIL].map(|at| memory.user_address(ring.block + at)))
}

/// A region of memory.
pub(super) fn encode_memory_region(region: &GuestMemoryRegion) -> Vec<u8> {
    let words = [region.guest_address, region.size, region.user_address, region.file_offset];
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Switches the write cache, or asks for it.
pub(super) fn write_cache(number: u32, is_on: bool) -> FrontEndStep {
    let mut payload: Vec<u8> = [WRITEBACK, 1, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
    payload.push(u8::from(is_on));
    plain(number, payload)
}

/// A reply, or what it was asked for.
pub(super) struct FrontEndReply {
    /// Number of the message.
    pub(super) number: u32,
    /// What the front end has sent with it.
    pub(super) asked: Vec<u8>,
    pub(super) is_wild: bool,
    pub(super) payload: Vec<u8>,
    pub(super) fd: Option<OwnedFd>,
}

impl FrontEndReply {
    /// The number in the reply.
    pub(super) fn value(&self) -> u64 {
        self.payload.first_chunk().map_or(u64::MAX, |bytes| u64::from_ne_bytes(*bytes))
    }

    /// The two 32-bit numbers in the reply.
    pub(super) fn pair(&self) -> [u32; 2] {
        let value = self.value();
        [value as u32, (value >> 32) as u32]
    }
}

/// The connection of a front end.
pub(super) struct FrontEndConnection {
    socket: OwnedFd,
    /// What the front end does next.
    pub(super) script: VecDeque<FrontEndStep>,
    /// The message that waits for its reply: its number, its payload, and if it may be refused.
    awaited: Option<(u32, Vec<u8>, bool)>,
    /// The back end acknowledges messages that have no reply of their own.
    pub(super) acks: bool,
}

/// Messages with a reply of their own.
fn has_own_reply(number: u32) -> bool {
    matches!(
        number,
        number::GET_FEATURES
            | number::GET_VRING_BASE
            | number::GET_PROTOCOL_FEATURES
            | number::GET_CONFIG
            | number::GET_INFLIGHT_FD
            | number::GET_STATUS
    )
}

impl FrontEndConnection {
    pub(super) fn new(socket: OwnedFd) -> FrontEndConnection {
        FrontEndConnection { socket, script: VecDeque::new(), awaited: None, acks: false }
    }

    /// True if a reply is awaited.
    pub(super) fn awaits(&self) -> bool {
        self.awaited.is_some()
    }

    /// True if a reply, or the end of the connection, has arrived.
    pub(super) fn has_reply(&self) -> bool {
        is_readable(&self.socket)
    }

    /// Sends a message: its first `part` bytes.
    pub(super) fn send(
        &mut self,
        number: u32,
        payload: Vec<u8>,
        fds: &[Arc<OwnedFd>],
        is_wild: bool,
        part: usize,
    ) -> Result<(), Violation> {
        let asks = has_own_reply(number);
        let bytes = encode_message(number, self.acks && !asks, &payload);
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err("too many descriptors".into());
        }
        let part = &bytes[..part.min(bytes.len())];
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.socket, &[IoSlice::new(part)], &mut ancillary, flags).map_err(|e| e.to_string())?;
        if asks || self.acks {
            self.awaited = Some((number, payload, is_wild));
        }
        Ok(())
    }

    /// Receives the awaited reply; `None` if the back end has closed the connection.
    pub(super) fn receive(&mut self) -> Result<Option<FrontEndReply>, Violation> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; 600];
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let Ok(received) = recvmsg(&self.socket, &mut parts, &mut ancillary, flags) else { return Ok(None) };
        if received.bytes == 0 {
            return Ok(None);
        }
        let mut fd = None;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(mut fds) = message {
                fd = fds.next();
            }
        }
        let header = bytes.first_chunk::<HEADER_SIZE>().map(VhostUserMessageHeader::decode);
        let Some(Ok(header)) = header else { return Err("the back end sends no header".into()) };
        let Some((number, asked, is_wild)) = self.awaited.take() else {
            return Err(format!("the back end replies to {} twice", header.request));
        };
        if header.request != number || !header.is_reply || received.bytes != HEADER_SIZE + header.size {
            return Err(format!("message {number} has the reply {header:?} of {} bytes", received.bytes));
        }
        let payload = bytes[HEADER_SIZE..received.bytes].to_vec();
        Ok(Some(FrontEndReply { number, asked, is_wild, payload, fd }))
    }
}

/// The area of a reply to GET_INFLIGHT_FD.
pub(super) fn decode_area(reply: &FrontEndReply) -> Option<InflightArea> {
    let word = |at: usize| reply.payload.get(at..at + 8)?.first_chunk().map(|b| u64::from_ne_bytes(*b));
    let (size, offset, rings) = (word(0)?, word(8)?, word(16)?);
    Some(InflightArea { size, offset, queues: rings as u16, ring_size: (rings >> 16) as u16 })
}
