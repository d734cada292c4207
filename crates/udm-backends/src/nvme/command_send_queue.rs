//! The send side of an I/O queue: commands and data in order, copied into one buffer per send.

use super::request::{CommandParams, NvmeRequest};
use slab::Slab;
use std::collections::VecDeque;
use udm_core::{Buf, BufPool};
use udm_wire::nvme::DataPdu;
use udm_wire::nvme::host::{HostData, HostQueue, append_data_digest};

/// The most bytes per send.
const SEND_MAX: usize = 256 << 10;
/// Room for the longest header.
const HEADER_ROOM: usize = 128;
/// Bytes of a data digest.
const DIGEST: usize = 4;

/// A PDU to be sent.
enum QueuedPdu {
    /// The command of a slot.
    Command(usize),
    /// The rest of the data that an R2T asked for.
    Data(DataPdu),
}

/// The data of a PDU that is partly sent.
struct PartialData {
    key: usize,
    from: usize,
    end: usize,
    /// CRC-32C of the data so far, if a digest follows.
    digest: Option<u32>,
}

/// PDUs to be sent on a connection.
#[derive(Default)]
pub(super) struct CommandSendQueue {
    queue: VecDeque<QueuedPdu>,
    partial: Option<PartialData>,
}

impl CommandSendQueue {
    /// Queues the command of slot `key`.
    pub(super) fn push_command(&mut self, key: usize) {
        self.queue.push_back(QueuedPdu::Command(key));
    }

    /// Queues data that an R2T asked for.
    pub(super) fn push_data(&mut self, data: DataPdu) {
        self.queue.push_back(QueuedPdu::Data(data));
    }

    /// Returns true if nothing waits to be sent.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.partial.is_none()
    }

    /// Returns true while data of slot `key` is still to be sent, in a capsule or after an R2T.
    pub(super) fn is_sending(&self, key: usize) -> bool {
        self.partial.as_ref().is_some_and(|partial| partial.key == key)
    }

    /// Removes everything. Returns the slots whose command was not sent.
    pub(super) fn take_unsent(&mut self) -> impl Iterator<Item = usize> {
        self.partial = None;
        self.queue.drain(..).filter_map(|pdu| match pdu {
            QueuedPdu::Command(key) => Some(key),
            QueuedPdu::Data(_) => None,
        })
    }

    /// Fills the buffer of the next send.
    pub(super) fn gather(
        &mut self,
        slots: &Slab<NvmeRequest>,
        params: &CommandParams,
        queue: &mut HostQueue,
        pool: &mut BufPool,
    ) -> Buf {
        let mut buf = pool.get(self.len(slots));
        let mut at = self.put_partial(slots, params, &mut buf);
        while self.partial.is_none() && at + HEADER_ROOM <= buf.len() {
            let Some(pdu) = self.queue.pop_front() else { break };
            let mut header = [0; HEADER_ROOM];
            let (len, key, from, data) = match pdu {
                QueuedPdu::Command(key) => {
                    let command = slots[key].command(params);
                    let len = queue.put_command(&mut header, key as u16, &command);
                    let data = if let HostData::InCapsule(len) = command.data { len } else { 0 };
                    (len, key, 0, data)
                }
                QueuedPdu::Data(data) => {
                    let sent = DataPdu { len: data.len.min(queue.max_h2c_data()), ..data };
                    let rest = DataPdu { offset: data.offset + sent.len, len: data.len - sent.len, ..data };
                    let len = queue.put_data(&mut header, &sent, rest.len == 0);
                    if rest.len > 0 {
                        self.queue.push_front(QueuedPdu::Data(rest));
                    }
                    (len, usize::from(data.command), data.offset as usize, sent.len)
                }
            };
            buf[at..at + len].copy_from_slice(&header[..len]);
            at += len;
            if data > 0 {
                let digest = queue.has_data_digest().then_some(0);
                self.partial = Some(PartialData { key, from, end: from + data as usize, digest });
                at += self.put_partial(slots, params, &mut buf[at..]);
            }
        }
        buf.truncate(at);
        buf
    }

    /// Number of bytes of the next send, or more. A header always fits.
    fn len(&self, slots: &Slab<NvmeRequest>) -> usize {
        let mut len = self.partial.as_ref().map_or(0, |partial| partial.end - partial.from + DIGEST);
        for pdu in &self.queue {
            if len >= SEND_MAX {
                break;
            }
            len += HEADER_ROOM
                + DIGEST
                + match pdu {
                    // A discard has 16 bytes, and a write may have all its data in the capsule.
                    QueuedPdu::Command(key) => slots[*key].bio.data.len().clamp(16, 64 << 10),
                    QueuedPdu::Data(data) => data.len as usize,
                };
        }
        len.clamp(HEADER_ROOM, SEND_MAX)
    }

    /// Continues with the data of a PDU. Returns the number of bytes.
    fn put_partial(&mut self, slots: &Slab<NvmeRequest>, params: &CommandParams, room: &mut [u8]) -> usize {
        let Some(partial) = &mut self.partial else { return 0 };
        let n = room.len().min(partial.end - partial.from);
        let copied = slots[partial.key].copy_data(partial.from, params, &mut room[..n]);
        debug_assert_eq!(copied, n, "a write has all its data");
        partial.from += n;
        partial.digest = partial.digest.map(|crc| append_data_digest(crc, &room[..n]));
        if partial.from < partial.end {
            return n;
        }
        let Some(crc) = partial.digest else {
            self.partial = None;
            return n;
        };
        // The digest goes into the next send if it does not fit as a whole.
        let Some(place) = room[n..].first_chunk_mut() else { return n };
        *place = crc.to_le_bytes();
        self.partial = None;
        n + DIGEST
    }
}
