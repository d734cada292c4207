//! End and reason of a quarantine of a path that keeps failing. The checker writes it, reports
//! print it.

use udm_core::Nanos;
use udm_wire::multipath_conf::MarginalPathPolicy;

/// End and reason of a quarantine, for reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QuarantineStatus {
    /// End of the sample, or start of the next one.
    pub end: Nanos,
    /// Reads of the completed sample; 0 while a sample runs.
    pub sent: u64,
    /// Failed reads of the completed sample; 0 while a sample runs.
    pub bad: u64,
}

impl QuarantineStatus {
    /// The reason in a few words, as of `now`.
    pub fn why(&self, now: Nanos, rule: &MarginalPathPolicy) -> String {
        let seconds = |time: Nanos| time.0.div_ceil(1_000_000_000);
        let left = seconds(self.end.since(now));
        match self.sent {
            0 => {
                let within = seconds(rule.double_failed_time);
                format!("it failed twice within {within} s, and is watched for {left} s")
            }
            sent => format!("{} of {sent} reads failed, and it is watched again in {left} s", self.bad),
        }
    }
}
