//! The send side of a connection: answers wait in a queue and are gathered into one send.
//!
//! Only one send is in flight at a time. It owns its buffers until it completes. Then the data
//! buffers return to their pool, and the memory of the headers is reused.

use super::stats::UnpublishedConnectionCounters;
use std::collections::VecDeque;
use udm_core::{Buf, BufPool, Segments};
use udm_runtime::RingOp;
use udm_wire::nbd::{
    AnsweredRequest, NbdHeaderStyle, SimpleReply, chunk_data_header, chunk_none, encode_extended_error_chunk,
    encode_textless_error_chunk, extended_chunk_data_header, extended_chunk_none,
};

/// The longest header in bytes: a data chunk with an extended header.
const HEADER_MAX: usize = 40;
/// Memory for the headers of one send. Answers whose headers do not fit leave with the next send.
const HEADERS_LEN: usize = 16 << 10;

/// Limit of bytes per send, so that a client that reads slowly shows progress.
const SEND_MAX: usize = 4 << 20;

/// Form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplyForm {
    /// A simple reply.
    Simple,
    /// Chunks, if structured replies were negotiated. With extended headers, all replies are.
    Chunks,
    /// The data is the complete reply, with its headers.
    Whole,
}

/// An answer to a request.
pub(super) struct QueuedReply {
    /// The client's cookie of the request.
    pub(super) cookie: u64,
    /// An NBD error, or 0.
    pub(super) error: u32,
    /// How it is put.
    pub(super) form: ReplyForm,
    /// Offset of the request, and of the data on the export.
    pub(super) offset: u64,
    /// Data of a successful read; empty otherwise.
    pub(super) data: Segments,
    /// Bytes that the request counts as.
    pub(super) charge: usize,
}

/// Queue of answers, and the send in flight.
pub(super) struct ReplySender {
    queue: VecDeque<QueuedReply>,
    header_style: NbdHeaderStyle,
    /// Bytes of the handshake, which are sent before all answers.
    raw: Segments,
    headers: Buf,
    /// Gathered data that was too long for the send in flight.
    rest: Segments,
    /// A vector with capacity for many buffers.
    free_segments: Segments,
    /// Answers of the send in flight; `None` if there is none.
    sending: Option<ReplyBatchCounts>,
}

/// Number of answers in a send, and the bytes that they count as.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub(super) struct ReplyBatchCounts {
    pub(super) answers: usize,
    pub(super) charge: usize,
}

impl ReplySender {
    pub(super) fn new() -> ReplySender {
        ReplySender {
            queue: VecDeque::new(),
            header_style: NbdHeaderStyle::Simple,
            raw: Segments::new(),
            headers: Buf::zeroed(HEADERS_LEN),
            rest: Segments::new(),
            free_segments: Segments::new(),
            sending: None,
        }
    }

    /// Sends answers with these headers from now on.
    pub(super) fn use_header_style(&mut self, style: NbdHeaderStyle) {
        self.header_style = style;
    }

    /// Queues bytes of the handshake.
    pub(super) fn push_raw(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            let mut buf = Buf::zeroed(bytes.len());
            buf.copy_from_slice(bytes);
            self.raw.push(buf);
        }
    }

    /// Queues an answer.
    pub(super) fn push(&mut self, answer: QueuedReply) {
        self.queue.push_back(answer);
    }

    /// Returns true if nothing waits and no send is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.sending.is_none() && self.raw.is_empty() && self.queue.is_empty()
    }

    /// Returns true if nothing waits for the completion of the send in flight.
    pub(super) fn is_all_out(&self) -> bool {
        self.raw.is_empty() && self.rest.is_empty() && self.queue.is_empty()
    }

    /// Returns the next send, if none is in flight and output waits.
    pub(super) fn next(&mut self, delta: &mut UnpublishedConnectionCounters) -> Option<Segments> {
        if self.sending.is_some() || (self.queue.is_empty() && self.raw.is_empty()) {
            return None;
        }
        let mut sent = ReplyBatchCounts::default();
        let out =
            if self.raw.is_empty() { self.gather(&mut sent, delta) } else { std::mem::take(&mut self.raw) };
        self.sending = Some(sent);
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

    /// Gathers as many answers as one send takes.
    fn gather(&mut self, sent: &mut ReplyBatchCounts, delta: &mut UnpublishedConnectionCounters) -> Segments {
        let mut out = std::mem::take(&mut self.free_segments);
        // The header memory is complete again: the previous send is done, and no one else has parts
        // of it.
        self.headers.reclaim();
        let mut pieces = 0;
        while let Some(answer) = self.queue.front() {
            pieces += 1 + answer.data.iter().count();
            let room = pieces <= RingOp::MAX_PIECES && self.headers.len() >= HEADER_MAX;
            if !room && sent.answers > 0 {
                break;
            }
            let Some(answer) = self.queue.pop_front() else { break };
            sent.answers += 1;
            sent.charge += answer.charge;
            delta.ended += 1;
            delta.errors += u64::from(answer.error != 0);
            if answer.form != ReplyForm::Whole {
                delta.bytes_out += answer.data.len() as u64;
            }
            self.put(&mut out, answer);
        }
        out
    }

    fn put(&mut self, out: &mut Segments, answer: QueuedReply) {
        let QueuedReply { cookie, error, form, offset, data, .. } = answer;
        let len = data.len() as u32;
        match (self.header_style, form) {
            (_, ReplyForm::Whole) => {}
            (NbdHeaderStyle::Extended, _) => {
                let request = AnsweredRequest { cookie, offset };
                match (error, len) {
                    (0, 0) => self.header(out, &extended_chunk_none(request)),
                    (0, _) => self.header(out, &extended_chunk_data_header(request, offset, len, true)),
                    (error, _) => self.header(out, &encode_extended_error_chunk(request, error)),
                }
            }
            (NbdHeaderStyle::Structured, ReplyForm::Chunks) => match (error, len) {
                (0, 0) => self.header(out, &chunk_none(cookie)),
                (0, _) => self.header(out, &chunk_data_header(cookie, offset, len, true)),
                (error, _) => self.header(out, &encode_textless_error_chunk(cookie, error)),
            },
            (NbdHeaderStyle::Structured | NbdHeaderStyle::Simple, _) => {
                self.header(out, &SimpleReply { error, cookie }.encode());
            }
        }
        out.append(data);
    }

    fn header(&mut self, out: &mut Segments, bytes: &[u8]) {
        let mut header = self.headers.split_to(bytes.len());
        header.copy_from_slice(bytes);
        out.push(header);
    }

    /// Handles the end of a send after `n` bytes. `Err` is the rest, to be sent at once; `Ok` is
    /// what was sent. Buffers return to `pool`.
    pub(super) fn sent(
        &mut self,
        n: usize,
        mut data: Segments,
        pool: &mut BufPool,
    ) -> Result<ReplyBatchCounts, Segments> {
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

    /// Bytes of memory for headers.
    pub(super) fn held(&self) -> usize {
        HEADERS_LEN
    }

    /// Frees vectors that have grown.
    pub(super) fn trim(&mut self) {
        if self.queue.is_empty() {
            self.queue = VecDeque::new();
        }
        self.free_segments = Segments::new();
    }

    /// Drops all waiting output and the state of the send in flight. Returns the number of waiting
    /// answers.
    pub(super) fn clear(&mut self, pool: &mut BufPool) -> usize {
        self.sending = None;
        let n = self.queue.len();
        self.raw = Segments::new();
        return_buffers_to_pool(std::mem::take(&mut self.rest), pool);
        for answer in self.queue.drain(..) {
            return_buffers_to_pool(answer.data, pool);
        }
        n
    }
}

/// Returns buffers to the pool.
pub(crate) fn return_buffers_to_pool(mut data: Segments, pool: &mut BufPool) {
    while let Some(buf) = data.pop() {
        pool.put(buf);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(cookie: u64, error: u32, data: usize) -> QueuedReply {
        let data = if data > 0 { Buf::zeroed(data).into() } else { Segments::new() };
        QueuedReply { cookie, error, form: ReplyForm::Chunks, offset: 512, charge: data.len(), data }
    }

    fn bytes(data: &Segments) -> Vec<u8> {
        data.iter().flat_map(|b| b.to_vec()).collect()
    }

    #[test]
    fn a_failed_read_sends_no_data() {
        let styles =
            [(NbdHeaderStyle::Simple, 16), (NbdHeaderStyle::Structured, 26), (NbdHeaderStyle::Extended, 38)];
        for (style, size) in styles {
            let (mut s, mut delta) = (ReplySender::new(), UnpublishedConnectionCounters::default());
            s.use_header_style(style);
            s.push(answer(7, 5, 0));
            assert_eq!(bytes(&s.next(&mut delta).unwrap()).len(), size);
            assert!(s.next(&mut delta).is_none(), "one send at a time");
        }
    }

    #[test]
    fn a_send_has_no_more_pieces_than_the_ring_takes_and_none_gets_lost() {
        for style in [NbdHeaderStyle::Structured, NbdHeaderStyle::Extended] {
            let (mut s, mut delta, mut pool) =
                (ReplySender::new(), UnpublishedConnectionCounters::default(), BufPool::new(1 << 20));
            s.use_header_style(style);
            (0..2000).for_each(|i| s.push(answer(i, 0, 16)));
            let mut answers = 0;
            while let Some(data) = s.next(&mut delta) {
                assert!(data.iter().count() <= RingOp::MAX_PIECES);
                let n = data.len();
                let sent = s.sent(n, data, &mut pool).unwrap();
                assert_eq!(sent.charge, sent.answers * 16);
                answers += sent.answers;
            }
            assert_eq!((answers, delta.bytes_out, s.is_idle()), (2000, 32000, true));
        }
    }

    #[test]
    fn each_style_has_its_headers() {
        let sent = |style, form, error, data| {
            let (mut s, mut delta) = (ReplySender::new(), UnpublishedConnectionCounters::default());
            s.use_header_style(style);
            s.push(QueuedReply { form, ..answer(7, error, data) });
            bytes(&s.next(&mut delta).unwrap())
        };
        let (simple, structured) = (NbdHeaderStyle::Simple, NbdHeaderStyle::Structured);
        let extended = NbdHeaderStyle::Extended;
        let request = AnsweredRequest { cookie: 7, offset: 512 };
        for form in [ReplyForm::Simple, ReplyForm::Chunks] {
            assert_eq!(
                sent(simple, form, 0, 3),
                [&SimpleReply { error: 0, cookie: 7 }.encode()[..], &[0; 3]].concat()
            );
            assert_eq!(sent(extended, form, 0, 0), extended_chunk_none(request));
            assert_eq!(sent(extended, form, 5, 0), encode_extended_error_chunk(request, 5));
        }
        let head = extended_chunk_data_header(request, 512, 3, true);
        assert_eq!(sent(extended, ReplyForm::Chunks, 0, 3), [&head[..], &[0; 3]].concat());
        assert_eq!(sent(structured, ReplyForm::Simple, 0, 0), SimpleReply { error: 0, cookie: 7 }.encode());
        assert_eq!(sent(structured, ReplyForm::Chunks, 0, 0), chunk_none(7));
        for style in [simple, structured, extended] {
            assert_eq!(sent(style, ReplyForm::Whole, 0, 3), [0; 3]);
        }
    }

    #[test]
    fn a_short_send_goes_on_where_it_stopped() {
        let (mut s, mut delta, mut pool) =
            (ReplySender::new(), UnpublishedConnectionCounters::default(), BufPool::new(1 << 20));
        s.push(answer(1, 0, 100));
        s.push(answer(2, 0, 100));
        let data = s.next(&mut delta).unwrap();
        let whole = bytes(&data);
        let rest = s.sent(120, data, &mut pool).unwrap_err();
        assert_eq!(bytes(&rest), whole[120..]);
        assert!(!s.is_idle() && s.next(&mut delta).is_none());
        let n = rest.len();
        assert_eq!(s.sent(n, rest, &mut pool).unwrap(), ReplyBatchCounts { answers: 2, charge: 200 });
        assert!(s.is_idle());
    }

    #[test]
    fn a_long_answer_leaves_in_several_sends() {
        let (mut s, mut delta, mut pool) =
            (ReplySender::new(), UnpublishedConnectionCounters::default(), BufPool::new(1 << 20));
        let len = 2 * SEND_MAX + 100;
        let data = pool.get_pieces(len);
        s.push(QueuedReply { cookie: 1, error: 0, form: ReplyForm::Chunks, offset: 0, charge: len, data });
        let mut part = s.next(&mut delta).unwrap();
        let mut lens = Vec::new();
        let sent = loop {
            lens.push(part.len());
            match s.sent(part.len(), part, &mut pool) {
                Ok(sent) => break sent,
                Err(rest) => part = rest,
            }
        };
        assert_eq!(
            (lens, sent),
            (vec![SEND_MAX, SEND_MAX, 116], ReplyBatchCounts { answers: 1, charge: len })
        );
        assert_eq!(
            (s.is_idle(), pool.total_bytes()),
            (true, pool.free_bytes()),
            "all buffers are back in the pool"
        );
    }

    #[test]
    fn headers_use_the_same_memory_again() {
        let (mut s, mut delta, mut pool) =
            (ReplySender::new(), UnpublishedConnectionCounters::default(), BufPool::new(1 << 20));
        let at = s.headers.addr();
        for i in 0..3000 {
            s.push(answer(i, 22, 0));
            let data = s.next(&mut delta).unwrap();
            assert_eq!(data.iter().next().unwrap().addr(), at);
            let n = data.len();
            s.sent(n, data, &mut pool).unwrap();
        }
        assert_eq!(pool.free_bytes(), 0);
    }
}
