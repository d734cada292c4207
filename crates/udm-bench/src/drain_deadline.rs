//! The end of a load: what is still in flight then has a limit.
//!
//! A device may answer nothing: a multipath device that queues without a path, a server that
//! hangs. Its requests can't be taken back, so the wait for them is what ends.

use udm_core::Nanos;

/// How long requests in flight may take before it is said that some are.
const QUIET: Nanos = Nanos::from_millis(1_000);

/// How long they may take at the most.
const LIMIT: Nanos = Nanos::from_millis(10_000);

/// When a load has ended by the clock, a signal or an error.
#[derive(Default)]
pub struct DrainDeadline {
    since: Option<Nanos>,
    said: bool,
}

impl DrainDeadline {
    /// The load ends now, if it has not already.
    pub fn begin(&mut self, now: Nanos) {
        self.since.get_or_insert(now);
    }

    /// True when `in_flight` requests of a job have taken too long since; before that one line says
    /// that they are waited for.
    pub fn is_due(&mut self, now: Nanos, in_flight: usize, job: &str) -> bool {
        let Some(since) = self.since.filter(|_| in_flight > 0) else { return false };
        let waited = now.since(since);
        if waited >= QUIET && !self.said {
            self.said = true;
            let (waited, limit) = (waited.0 / 1_000_000_000, LIMIT.0 / 1_000_000_000);
            tracing::warn!(
                "bench: {job}: {in_flight} requests are in flight {waited} s after the end of the load; \
                 it ends after {limit} s without them"
            );
        }
        waited >= LIMIT
    }

    /// Why the job has failed then.
    pub fn text(in_flight: usize) -> String {
        let limit = LIMIT.0 / 1_000_000_000;
        format!("{in_flight} requests were not answered within {limit} s of the end of the load")
    }
}
