//! One read of a range: its requests, its pauses, its deadline, and the checks of answers.
//!
//! Does no I/O and reads no clock. `source` sends its requests to servers, and the simulator to
//! models of servers that lie.
//!
//! ```text
//!             ┌── pause ◄── unavailable ──┐
//!             ▼                           │
//!  begin ──► send ──► wait for an answer ─┴─► data, refused or changed: the end
//!                       │ slower than recent ones: send a second request
//!                       └ deadline: the last failure
//! ```

use crate::failure::ReadFailure;
use crate::hedge::HedgePolicy;
use bytes::{Bytes, BytesMut};
use std::ops::Range;
use udm_core::Nanos;

/// Pauses between attempts double from the first to the longest.
const PAUSE_FIRST: Nanos = Nanos::from_millis(50);
const PAUSE_MAX: Nanos = Nanos::from_millis(2000);

/// A server that sends nothing for this long gets another request. A shorter deadline shortens it,
/// so that there are several attempts.
const SILENCE_MAX: Nanos = Nanos::from_millis(10_000);
const ATTEMPTS_MIN: u64 = 3;

/// How long a server may send nothing, if reads have this deadline.
#[must_use]
pub fn silence_max(deadline: Option<Nanos>) -> Nanos {
    deadline.map_or(SILENCE_MAX, |deadline| Nanos(deadline.0 / ATTEMPTS_MIN).min(SILENCE_MAX))
}

/// A version of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectVersion {
    /// Length in bytes.
    pub len: u64,
    /// Strong ETag, with its quotes.
    pub etag: String,
}

/// The head of a 206 answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangeAnswerHead {
    /// The ETag, with its quotes.
    pub etag: Option<String>,
    /// Length of the whole object in bytes.
    pub object_len: u64,
    /// The bytes of the object that the body has, as the server says.
    pub range: Range<u64>,
}

impl ObjectVersion {
    /// Compares an answer with this version: a server may ignore `If-Match`.
    ///
    /// # Errors
    /// The object has changed, or the answer is wrong.
    pub fn check(&self, head: &RangeAnswerHead) -> Result<(), ReadFailure> {
        if head.object_len != self.len {
            let text = format!("the object has changed: {} bytes instead of {}", head.object_len, self.len);
            return Err(ReadFailure::Changed(text));
        }
        match &head.etag {
            Some(etag) if *etag == self.etag => Ok(()),
            Some(_) => Err(ReadFailure::Changed("the object has changed: another ETag".into())),
            None => Err(ReadFailure::Refused("a wrong answer: no ETag".into())),
        }
    }
}

/// The body of an answer, as it arrives.
pub struct RangeBody {
    len: usize,
    bytes: BytesMut,
}

impl RangeBody {
    /// The body of an answer to a request of `range`.
    ///
    /// # Errors
    /// The answer has another range.
    pub fn begin(range: &Range<u64>, head: &RangeAnswerHead) -> Result<RangeBody, ReadFailure> {
        if head.range != *range {
            let text = format!(
                "a wrong answer: bytes {}-{} instead of {}-{}",
                head.range.start, head.range.end, range.start, range.end
            );
            return Err(ReadFailure::Refused(text));
        }
        let len = (range.end - range.start) as usize;
        Ok(RangeBody { len, bytes: BytesMut::with_capacity(len) })
    }

    /// Adds the next bytes.
    ///
    /// # Errors
    /// The body is too long.
    pub fn add(&mut self, part: &[u8]) -> Result<(), ReadFailure> {
        if self.bytes.len() + part.len() > self.len {
            return Err(ReadFailure::Refused(format!("a wrong answer: more than {} bytes", self.len)));
        }
        self.bytes.extend_from_slice(part);
        Ok(())
    }

    /// The bytes of the whole body.
    ///
    /// # Errors
    /// The body is too short.
    pub fn end(self) -> Result<Bytes, ReadFailure> {
        if self.bytes.len() < self.len {
            let text = format!("a wrong answer: {} bytes instead of {}", self.bytes.len(), self.len);
            return Err(ReadFailure::Refused(text));
        }
        Ok(self.bytes.freeze())
    }
}

/// What a read does next.
#[derive(Debug, PartialEq, Eq)]
pub enum ReadStep {
    /// Sends a request of the range. [`RangeRead::answer`] takes its end.
    Send,
    /// Waits for an answer, at most until this time.
    Wait(Nanos),
    /// The read has failed. Requests in flight are abandoned.
    Fail(ReadFailure),
}

/// A read in progress.
pub struct RangeRead {
    len: u64,
    begin: Nanos,
    /// The deadline.
    until: Nanos,
    in_flight: u32,
    /// The time of the next request, if none is in flight.
    send_at: Nanos,
    /// The time at which the request in flight gets a second one.
    hedge_at: Nanos,
    pause: Nanos,
    jitter: u64,
    last: ReadFailure,
    /// The failure after which no attempt follows.
    end: Option<ReadFailure>,
}

impl RangeRead {
    /// A read of `len` bytes that begins `now` and fails at `until`. The pauses of reads with
    /// another `jitter` differ.
    #[must_use]
    pub fn new(len: u64, now: Nanos, until: Option<Nanos>, jitter: u64) -> RangeRead {
        RangeRead {
            len,
            begin: now,
            until: until.unwrap_or(Nanos::NEVER),
            in_flight: 0,
            send_at: now,
            hedge_at: Nanos::NEVER,
            pause: PAUSE_FIRST,
            jitter,
            last: ReadFailure::Unavailable("no answer".into()),
            end: None,
        }
    }

    /// When it began.
    #[must_use]
    pub fn began(&self) -> Nanos {
        self.begin
    }

    /// The next step. After `Send` it is called again.
    pub fn step(&mut self, now: Nanos, hedges: &mut HedgePolicy) -> ReadStep {
        if let Some(failure) = self.end.take() {
            return ReadStep::Fail(failure);
        }
        if now >= self.until {
            return ReadStep::Fail(self.last.clone());
        }
        if self.in_flight > 0 {
            if now < self.hedge_at {
                return ReadStep::Wait(self.hedge_at.min(self.until));
            }
            self.hedge_at = Nanos::NEVER;
            if !hedges.take() {
                return ReadStep::Wait(self.until);
            }
        } else if now < self.send_at {
            return ReadStep::Wait(self.send_at.min(self.until));
        } else {
            // A server in trouble gets no more requests than it must.
            let delay = hedges.begin(self.len).filter(|_| self.pause == PAUSE_FIRST);
            self.hedge_at = delay.map_or(Nanos::NEVER, |delay| now + delay);
        }
        self.in_flight += 1;
        ReadStep::Send
    }

    /// Takes the end of a request: data, or a failure. After data, the read is done.
    pub fn answer(&mut self, now: Nanos, result: Result<(), &ReadFailure>, hedges: &mut HedgePolicy) {
        self.in_flight -= 1;
        match result {
            Ok(()) => hedges.end(self.len, now.since(self.begin)),
            Err(failure @ ReadFailure::Unavailable(_)) => {
                self.last = failure.clone();
                self.hedge_at = Nanos::NEVER;
                if self.in_flight == 0 {
                    // The pauses of several readers must not coincide: 75 to 122 %.
                    let pause = self.pause.0 / 32 * (24 + self.jitter % 16);
                    self.send_at = now + Nanos(pause);
                    self.jitter += 1;
                    self.pause = Nanos(self.pause.0 * 2).min(PAUSE_MAX);
                }
            }
            Err(failure) => self.end = Some(failure.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_wire::uri::HedgeSetting;

    fn ms(ms: u64) -> Nanos {
        Nanos::from_millis(ms)
    }

    #[test]
    fn an_unavailable_server_is_asked_until_the_deadline() {
        let mut hedges = HedgePolicy::new(HedgeSetting::Off);
        let busy = ReadFailure::Unavailable("503".into());
        let mut read = RangeRead::new(512, ms(0), Some(ms(1000)), 8);
        let (mut now, mut sent) = (ms(0), Vec::new());
        loop {
            match read.step(now, &mut hedges) {
                ReadStep::Send => {
                    sent.push(now.0 / 1_000_000);
                    read.answer(now, Err(&busy), &mut hedges);
                }
                ReadStep::Wait(at) => now = at,
                ReadStep::Fail(failure) => break assert_eq!(failure, busy),
            }
        }
        assert_eq!((now, sent), (ms(1000), vec![0, 50, 153, 365, 803]));
    }

    #[test]
    fn other_failures_end_a_read() {
        let mut hedges = HedgePolicy::new(HedgeSetting::Off);
        for failure in [ReadFailure::Refused("403".into()), ReadFailure::Changed("412".into())] {
            let mut read = RangeRead::new(512, ms(0), None, 0);
            assert_eq!(read.step(ms(0), &mut hedges), ReadStep::Send);
            assert_eq!(read.step(ms(0), &mut hedges), ReadStep::Wait(Nanos::NEVER));
            read.answer(ms(5), Err(&failure), &mut hedges);
            assert_eq!(read.step(ms(5), &mut hedges), ReadStep::Fail(failure));
        }
        // Nothing arrives at all.
        let mut read = RangeRead::new(512, ms(0), Some(ms(9)), 0);
        assert_eq!(read.step(ms(0), &mut hedges), ReadStep::Send);
        assert_eq!(read.step(ms(0), &mut hedges), ReadStep::Wait(ms(9)));
        let silent = ReadFailure::Unavailable("no answer".into());
        assert_eq!(read.step(ms(9), &mut hedges), ReadStep::Fail(silent));
    }

    #[test]
    fn a_slow_request_gets_one_other() {
        let mut hedges = HedgePolicy::new(HedgeSetting::After(ms(10)));
        (0..40).for_each(|_| assert_eq!(hedges.begin(1), Some(ms(10))));
        let busy = ReadFailure::Unavailable("503".into());
        let mut read = RangeRead::new(512, ms(0), Some(ms(900)), 8);
        assert_eq!(read.step(ms(0), &mut hedges), ReadStep::Send);
        assert_eq!(read.step(ms(1), &mut hedges), ReadStep::Wait(ms(10)));
        assert_eq!(read.step(ms(10), &mut hedges), ReadStep::Send);
        assert_eq!(read.step(ms(11), &mut hedges), ReadStep::Wait(ms(900)), "there is no third one");
        // One of them fails: the other one is waited for.
        read.answer(ms(12), Err(&busy), &mut hedges);
        assert_eq!(read.step(ms(12), &mut hedges), ReadStep::Wait(ms(900)));
        read.answer(ms(20), Err(&busy), &mut hedges);
        assert_eq!(read.step(ms(20), &mut hedges), ReadStep::Wait(ms(70)));
        assert_eq!(read.step(ms(70), &mut hedges), ReadStep::Send);
        assert_eq!(read.step(ms(70), &mut hedges), ReadStep::Wait(ms(900)), "none while a server fails");
        // Without credit there is no second one.
        while hedges.take() {}
        let mut read = RangeRead::new(512, ms(0), Some(ms(900)), 8);
        assert_eq!(read.step(ms(0), &mut hedges), ReadStep::Send);
        assert_eq!(read.step(ms(10), &mut hedges), ReadStep::Wait(ms(900)));
    }

    #[test]
    fn wrong_answers_are_no_data() {
        let version = ObjectVersion { len: 4096, etag: "\"a\"".into() };
        let head = RangeAnswerHead { etag: Some("\"a\"".into()), object_len: 4096, range: 512..1024 };
        let body = || RangeBody::begin(&(512..1024), &head).expect("the range");
        assert_eq!(version.check(&head), Ok(()));
        let mut whole = body();
        whole.add(&[1; 500]).and_then(|()| whole.add(&[2; 12])).expect("512 bytes");
        assert_eq!(whole.end().expect("a whole body")[499..501], [1, 2]);
        let is_refused = |result| matches!(result, Err(ReadFailure::Refused(_)));
        let mut short = body();
        short.add(&[0; 511]).expect("within the range");
        assert!(is_refused(short.end().map(drop)));
        assert!(is_refused(body().add(&[0; 513])));
        for range in [511..1023, 513..1025, 512..1025, 512..1023] {
            let head = RangeAnswerHead { range, ..head.clone() };
            assert!(is_refused(RangeBody::begin(&(512..1024), &head).map(drop)), "{head:?}");
        }
        let is_changed = |head| matches!(version.check(&head), Err(ReadFailure::Changed(_)));
        assert!(is_changed(RangeAnswerHead { object_len: 4095, ..head.clone() }));
        assert!(is_changed(RangeAnswerHead { etag: Some("\"b\"".into()), ..head.clone() }));
        assert!(is_refused(version.check(&RangeAnswerHead { etag: None, ..head.clone() })));
    }
}
