//! The source of a job's requests: its plan, and its pace.

use crate::load::FioLoadOptions;
use crate::plan::{AccessPlan, SectorSpan};
use crate::request_pacing::RequestPacer;
use crate::stats::direction_index_of_op;
use udm_core::{Nanos, Op};

/// The requests of a job.
pub struct RequestSource {
    plan: AccessPlan,
    /// Requests taken from the plan, and the maximum.
    taken: u64,
    take_max: u64,
    /// Send times of a job with a rate; `None` if the job sends as fast as it can.
    pacer: Option<RequestPacer>,
    /// The operation that was drawn for the next request, while this request waits.
    held: Option<Op>,
    /// If set, the other operation may be sent while one waits.
    switches: bool,
    /// If set, writes of the plan are read back.
    reads_back: bool,
}

/// The next action of the job.
pub enum NextRequest {
    /// Send this request, which was due at the given time.
    Request(Op, SectorSpan, Nanos),
    /// Send nothing until this time.
    Wait(Nanos),
    /// The source has no more requests.
    Over,
}

impl RequestSource {
    /// Creates the source of a load with at most `most` requests.
    pub fn new(load: &FioLoadOptions, plan: AccessPlan, most: u64) -> RequestSource {
        let mixed = load.rw.op().is_none() && (1..100).contains(&load.read_percent());
        RequestSource {
            plan,
            taken: 0,
            take_max: most,
            pacer: RequestPacer::new(load),
            held: None,
            // With `verify`, the requests must follow the plan, because it is replayed later.
            switches: mixed && load.verify.is_none(),
            reads_back: false,
        }
    }

    /// Number of requests so far.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Switches to reading back the writes so far, with a fresh copy of the plan.
    pub fn read_back(&mut self, plan: AccessPlan) {
        (self.plan, self.take_max, self.taken) = (plan, self.taken, 0);
        (self.pacer, self.held, self.reads_back) = (None, None, true);
    }

    /// The next request.
    #[inline]
    pub fn next(&mut self, now: Nanos) -> NextRequest {
        if self.pacer.is_some() || self.reads_back {
            return self.next_of_some(now);
        }
        if self.taken >= self.take_max {
            return NextRequest::Over;
        }
        match self.plan.next() {
            Some((op, span)) => {
                self.taken += 1;
                NextRequest::Request(op, span, now)
            }
            None => NextRequest::Over,
        }
    }

    #[inline(never)]
    fn next_of_some(&mut self, now: Nanos) -> NextRequest {
        if self.reads_back {
            return self.next_read(now);
        }
        let Some(pacer) = &mut self.pacer else { return NextRequest::Over };
        if self.taken >= self.take_max {
            return NextRequest::Over;
        }
        let mut op = *self.held.get_or_insert_with(|| self.plan.draw_op());
        let mut due = pacer.due(direction_index_of_op(op), now);
        // As in fio, one direction does not wait for the other.
        if due > now && self.switches {
            let other = if op == Op::Read { Op::Write } else { Op::Read };
            let others = pacer.due(direction_index_of_op(other), now);
            if others < due {
                (op, due) = (other, others);
            }
        }
        if due > now {
            return NextRequest::Wait(due);
        }
        self.held = None;
        let Some(span) = self.plan.next_of(op) else { return NextRequest::Over };
        pacer.sent(direction_index_of_op(op), span.bytes());
        self.taken += 1;
        NextRequest::Request(op, span, due)
    }

    fn next_read(&mut self, now: Nanos) -> NextRequest {
        while self.taken < self.take_max {
            let Some((op, span)) = self.plan.next() else { break };
            self.taken += 1;
            if op == Op::Write {
                return NextRequest::Request(Op::Read, span, now);
            }
        }
        NextRequest::Over
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::parse_fio_load_options;
    use udm_core::{Limits, Sectors};

    fn source(text: &str) -> RequestSource {
        let load = parse_fio_load_options(&format!("{text} --randseed 1"));
        let region = load.regions(&Limits::new(Sectors(1 << 20))).unwrap()[0];
        RequestSource::new(&load, AccessPlan::new(&load, 0, region), load.requests(region))
    }

    /// Reads and writes that a job sends in ten seconds if all complete at once.
    fn sent(text: &str) -> [u64; 2] {
        let (mut source, mut now, mut sent) = (source(text), Nanos(0), [0; 2]);
        while now < Nanos::from_millis(10_000) {
            match source.next(now) {
                NextRequest::Request(op, _, since) => {
                    assert!(since <= now);
                    sent[direction_index_of_op(op)] += 1;
                }
                NextRequest::Wait(until) => {
                    assert!(until > now);
                    now = until;
                }
                NextRequest::Over => break,
            }
        }
        sent
    }

    /// Each direction has its rate, regardless of the mix. A direction without a rate does not
    /// wait.
    #[test]
    fn the_slower_one_holds_up_nobody() {
        assert_eq!(sent("--rw randrw --rate_iops 10,20"), [100, 200]);
        assert_eq!(sent("--rw randrw --rate_iops 10,20 --rwmixread 99"), [100, 200]);
        assert_eq!(sent("--rw rw --rate 40k,400k"), [100, 1000]);
        assert_eq!(sent("--rw randrw --rate_iops 10 --rwmixread 100"), [100, 0]);
        assert_eq!(sent("--rw randrw --rate_iops ,10 --number_ios 500").iter().sum::<u64>(), 500);
        // With `verify` the mix follows the plan.
        let [reads, writes] = sent("--rw randrw --rate_iops 10 --rwmixread 80 --verify crc32c");
        assert!(reads.abs_diff(100) < 3 && (10..50).contains(&writes), "{reads} {writes}");
    }

    #[test]
    fn what_was_written_is_read() {
        let text = "--rw randrw --rate_iops 1000 --number_ios 100 --verify crc32c";
        let mut source = source(text);
        let load = parse_fio_load_options(&format!("{text} --randseed 1"));
        let region = load.regions(&Limits::new(Sectors(1 << 20))).unwrap()[0];
        let mut now = Nanos(0);
        let mut next = |source: &mut RequestSource| loop {
            match source.next(now) {
                NextRequest::Request(op, span, _) => return Some((op, span)),
                NextRequest::Wait(until) => now = until,
                NextRequest::Over => return None,
            }
        };
        let written: Vec<_> = std::iter::from_fn(|| next(&mut source)).collect();
        assert_eq!((written.len(), source.taken()), (100, 100));
        source.read_back(AccessPlan::new(&load, 0, region));
        let read: Vec<_> = std::iter::from_fn(|| next(&mut source)).collect();
        let writes = written.iter().filter(|(op, _)| *op == Op::Write).map(|(_, span)| (Op::Read, *span));
        assert!(writes.eq(read));
    }
}
