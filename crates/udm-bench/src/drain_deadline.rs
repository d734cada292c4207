//! The limit for requests that are still in flight at the end of a load.
//!
//! A device may never complete its requests: a multipath device that queues without a path, or an
//! NBD server that hangs. Requests cannot be taken back, so the wait for them must end.

use udm_core::Nanos;

/// Time after which a log line reports requests in flight.
const QUIET: Nanos = Nanos::from_millis(1_000);

/// Maximum time to wait for requests in flight.
const LIMIT: Nanos = Nanos::from_millis(10_000);

/// The deadline of requests in flight after the clock, a signal or an error ended the load.
#[derive(Default)]
pub struct DrainDeadline {
    since: Option<Nanos>,
    reported: bool,
}

impl DrainDeadline {
    /// Starts the deadline, if it has not started.
    pub fn begin(&mut self, now: Nanos) {
        self.since.get_or_insert(now);
    }

    /// Returns true if `in_flight` requests of a job have passed the limit. Before that, logs once
    /// that the job waits for them.
    pub fn is_due(&mut self, now: Nanos, in_flight: usize, job: &str) -> bool {
        let Some(since) = self.since.filter(|_| in_flight > 0) else { return false };
        let waited = now.since(since);
        if waited >= QUIET && !self.reported {
            self.reported = true;
            let (waited, limit) = (waited.0 / 1_000_000_000, LIMIT.0 / 1_000_000_000);
            tracing::warn!(
                "bench: {job}: {in_flight} requests are in flight {waited} s after the end of the load; \
                 the job ends without them after {limit} s"
            );
        }
        waited >= LIMIT
    }

    /// The error text of the job if the limit has passed.
    pub fn text(in_flight: usize) -> String {
        let limit = LIMIT.0 / 1_000_000_000;
        format!("{in_flight} requests were not answered within {limit} s of the end of the load")
    }
}
