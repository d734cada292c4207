//! The send side of a queue: PDUs wait in line and are gathered into one send.
//!
//! Only one send is in flight at a time. It owns its buffers until it completes. Then the data
//! buffers return to their pool, and the memory of the headers is reused.

use crate::nbd::return_buffers_to_pool;
use std::collections::VecDeque;
use udm_core::{Buf, BufPool, Segments};
use udm_runtime::RingOp;
use udm_wire::nvme::{
    Completion, DataPdu, PduLimits, data_digest, encode_c2h_data, encode_capsule_response, encode_r2t,
};

/// The longest header in bytes: that of data with the largest padding.
const HEADER_MAX: usize = 128;
/// Memory for the headers of one send. PDUs whose headers do not fit leave with the next send.
const HEADERS_LEN: usize = 16 << 10;
/// Limit of bytes per send, so that a host that reads slowly shows progress.
const SEND_MAX: usize = 4 << 20;

/// A PDU that waits.
pub(super) enum QueuedPdu {
    /// A completion.
    Response(Completion),
    /// Data of a read. Without flow control, `is_completion` says that no response follows.
    Data {
        command: u16,
        data: Segments,
        is_completion: bool,
        /// Bytes that the command counts as.
        charge: usize,
    },
    /// The host may send data.
    ReadyToTransfer(DataPdu),
    /// A complete PDU.
    Whole(Vec<u8>),
}

/// Queue of PDUs, and the send in flight.
pub(super) struct PduSender {
    queue: VecDeque<QueuedPdu>,
    limits: PduLimits,
    host_alignment: u8,
    headers: Buf,
    /// Gathered bytes that were too many for the send in flight.
    rest: Segments,
    /// A vector with capacity for many buffers.
    free_segments: Segments,
    /// Bytes that the commands of the send in flight count as; `None` if there is none.
    sending: Option<usize>,
}

impl PduSender {
    pub(super) fn new(limits: PduLimits, host_alignment: u8) -> PduSender {
        PduSender {
            queue: VecDeque::new(),
            limits,
            host_alignment,
            headers: Buf::zeroed(HEADERS_LEN),
            rest: Segments::new(),
            free_segments: Segments::new(),
            sending: None,
        }
    }

    pub(super) fn push(&mut self, pdu: QueuedPdu) {
        self.queue.push_back(pdu);
    }

    /// True if nothing waits and no send is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.sending.is_none() && self.queue.is_empty()
    }

    /// True if nothing waits for the completion of the send in flight.
    pub(super) fn is_all_out(&self) -> bool {
        self.rest.is_empty() && self.queue.is_empty()
    }

    /// Number of PDUs that wait.
    pub(super) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Returns the next send, if none is in flight and PDUs wait.
    pub(super) fn next(&mut self) -> Option<Segments> {
        if self.sending.is_some() || self.queue.is_empty() {
            return None;
        }
        let mut out = std::mem::take(&mut self.free_segments);
        // The header memory is complete again: the previous send is done, and no one else has parts
        // of it.
        self.headers.reclaim();
        let (mut pieces, mut charges) = (0, 0);
        while let Some(pdu) = self.queue.front() {
            pieces += match pdu {
                QueuedPdu::Data { data, .. } => 2 + data.iter().count(),
                _ => 1,
            };
            let fits = pieces <= RingOp::MAX_PIECES && self.headers.len() >= HEADER_MAX + 4;
            if !fits && !out.is_empty() {
                break;
            }
            let Some(pdu) = self.queue.pop_front() else { break };
            self.put(&mut out, pdu, &mut charges);
        }
        self.sending = Some(charges);
        Some(self.cut(out))
    }

    /// Returns the part of `out` that fits into one send; keeps the rest.
    fn cut(&mut self, mut out: Segments) -> Segments {
        if out.len() <= SEND_MAX {
            return out;
        }
        let now = out.split_to(SEND_MAX);
        self.rest = out;
        now
    }

    fn put(&mut self, out: &mut Segments, pdu: QueuedPdu, charges: &mut usize) {
        let mut header = [0; HEADER_MAX];
        match pdu {
            QueuedPdu::Response(completion) => {
                let len = encode_capsule_response(&mut header, &completion, &self.limits);
                self.put_bytes(out, &header[..len]);
            }
            QueuedPdu::ReadyToTransfer(data) => {
                let len = encode_r2t(&mut header, &data, &self.limits);
                self.put_bytes(out, &header[..len]);
            }
            QueuedPdu::Data { command, data, is_completion, charge } => {
                *charges += charge;
                let pdu = DataPdu { command, tag: 0, offset: 0, len: data.len() as u32 };
                let len =
                    encode_c2h_data(&mut header, &pdu, is_completion, self.host_alignment, &self.limits);
                self.put_bytes(out, &header[..len]);
                let digest = self.limits.data_digest.then(|| data_digest(data.iter().map(|buf| &buf[..])));
                out.append(data);
                if let Some(digest) = digest {
                    self.put_bytes(out, &digest);
                }
            }
            QueuedPdu::Whole(bytes) => {
                let mut buf = Buf::zeroed(bytes.len());
                buf.copy_from_slice(&bytes);
                out.push(buf);
            }
        }
    }

    fn put_bytes(&mut self, out: &mut Segments, bytes: &[u8]) {
        let mut header = self.headers.split_to(bytes.len());
        header.copy_from_slice(bytes);
        out.push(header);
    }

    /// Handles the end of a send after `n` bytes. `Err` is the rest, to be sent at once; `Ok` is
    /// the number of bytes that the sent commands count as. Buffers return to `pool`.
    pub(super) fn sent(
        &mut self,
        n: usize,
        mut data: Segments,
        pool: &mut BufPool,
    ) -> Result<usize, Segments> {
        if n < data.len() {
            return_buffers_to_pool(data.split_to(n), pool);
            return Err(data);
        }
        while let Some(buf) = data.pop() {
            pool.put(buf);
        }
        if !self.rest.is_empty() {
            let rest = std::mem::take(&mut self.rest);
            return Err(self.cut(rest));
        }
        self.free_segments = data;
        Ok(self.sending.take().unwrap_or_default())
    }

    /// Frees vectors that have grown.
    pub(super) fn trim(&mut self) {
        if self.queue.is_empty() {
            self.queue = VecDeque::new();
        }
        self.free_segments = Segments::new();
    }

    /// Drops all PDUs that wait, and the state of the send in flight.
    pub(super) fn clear(&mut self, pool: &mut BufPool) {
        self.sending = None;
        return_buffers_to_pool(std::mem::take(&mut self.rest), pool);
        for pdu in self.queue.drain(..) {
            if let QueuedPdu::Data { data, .. } = pdu {
                return_buffers_to_pool(data, pool);
            }
        }
    }
}
