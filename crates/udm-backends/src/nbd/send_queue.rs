//! The send side of a connection: requests in order, with the data of writes, copied into one
//! buffer per send.

use slab::Slab;
use std::collections::VecDeque;
use udm_core::{Buf, BufPool, Op};
use udm_wire::nbd::NbdRequestHeader;
use udm_wire::nbd::client::ReplyParser;

use super::request::NbdRequest;

/// The most bytes per send.
const SEND_MAX: usize = 256 << 10;

/// Requests to be sent on a connection.
#[derive(Default)]
pub(super) struct SendQueue {
    /// Slots of requests to be sent.
    queue: VecDeque<usize>,
    /// The write whose data is partly sent: its slot and the number of bytes sent.
    partial: Option<(usize, usize)>,
}

impl SendQueue {
    /// Queues the request of slot `key`.
    pub(super) fn push(&mut self, key: usize) {
        self.queue.push_back(key);
    }

    /// Returns true if nothing waits to be sent.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.partial.is_none()
    }

    /// Returns true while a part of the slot's data is still to be sent.
    pub(super) fn is_sending(&self, key: usize) -> bool {
        self.partial.is_some_and(|(partial, _)| partial == key)
    }

    /// Removes the requests of which nothing was sent.
    pub(super) fn take_unsent(&mut self) -> impl Iterator<Item = usize> {
        self.queue.drain(..)
    }

    /// Drops the unsent rest of a slot that does not exist any more.
    pub(super) fn keep_only(&mut self, slots: &Slab<NbdRequest>) {
        self.partial.take_if(|(key, _)| !slots.contains(*key));
    }

    /// Fills the buffer of the next send. Slots that were answered early and whose last byte is in
    /// this buffer are added to `over`.
    pub(super) fn gather(
        &mut self,
        slots: &Slab<NbdRequest>,
        replies: &mut ReplyParser,
        pool: &mut BufPool,
        over: &mut Vec<usize>,
    ) -> Buf {
        let mut buf = pool.get(self.len(slots));
        let mut at = 0;
        if let Some((key, from)) = self.partial.take() {
            at += self.data(key, from, &slots[key], &mut buf);
            if self.partial.is_none() && slots[key].early.is_some() {
                over.push(key);
            }
        }
        while self.partial.is_none() && at + NbdRequestHeader::SIZE <= buf.len() {
            let Some(key) = self.queue.pop_front() else { break };
            let slot = &slots[key];
            let asked = slot.asked();
            buf[at..at + NbdRequestHeader::SIZE].copy_from_slice(&replies.ask(key as u64, asked));
            at += NbdRequestHeader::SIZE;
            if slot.sends_data() {
                at += self.data(key, 0, slot, &mut buf[at..]);
            }
        }
        buf.truncate(at);
        buf
    }

    /// Number of bytes of the next send.
    fn len(&self, slots: &Slab<NbdRequest>) -> usize {
        let data = |key: usize| slots[key].bio.sectors.bytes() as usize;
        let mut len = self.partial.map_or(0, |(key, from)| data(key) - from);
        for &key in &self.queue {
            if len >= SEND_MAX {
                break;
            }
            len += NbdRequestHeader::SIZE + if slots[key].sends_data() { data(key) } else { 0 };
        }
        len.min(SEND_MAX)
    }

    /// Copies the slot's data from byte `from` on, as much as fits into `room`.
    fn data(&mut self, key: usize, from: usize, slot: &NbdRequest, room: &mut [u8]) -> usize {
        debug_assert_eq!(slot.bio.op, Op::Write);
        let copied = slot.bio.data.copy_to_at(from, room);
        if from + copied < slot.bio.sectors.bytes() as usize {
            self.partial = Some((key, from + copied));
        }
        copied
    }
}
