//! Coverage counters of runs.

use crate::counts::{CombinedRunHash, RunReport, counts, format_count};
use crate::plan::DisturbanceClass;

counts! {
    /// Counters of one or several runs.
    pub struct NvmeTargetCounts {
        /// Steps taken.
        pub steps: u64,
        /// Answered reads and writes.
        pub requests: u64,
        /// Writes that landed on the disk.
        pub landed: u64,
        /// Reads that were compared.
        pub compared: u64,
        /// Associations.
        pub associations: u64,
        /// Associations that were cut off.
        pub cut: u64,
        /// Associations that fell silent.
        pub silent: u64,
        /// Shutdowns with writes in flight, to their end.
        pub shutdowns: u64,
        /// Resets that were done when they were answered.
        pub resets: u64,
        /// Resets that an event completed.
        pub late_resets: u64,
        /// Associations that were fenced by a time.
        pub waits: u64,
        /// Resets of associations that worked.
        pub mutual: u64,
        /// Connections whose last bytes arrived after the fence of their association.
        pub late: u64,
        /// Resets and connects that the target must refuse.
        pub forbidden: u64,
        /// Events.
        pub events: u64,
        /// Requests that were refused because of an ANA state.
        pub inaccessible: u64,
        /// Unanswered writes that were repeated.
        pub repeated: u64,
        /// Simulated time in ns.
        pub simulated: u64,
        /// The hash of all events.
        pub hash: CombinedRunHash,
    }
}

impl NvmeTargetCounts {
    /// The report of the runs.
    #[must_use]
    pub fn report(&self) -> RunReport {
        let lost = Some(DisturbanceClass::Lost);
        let hang = Some(DisturbanceClass::Hang);
        let disturbances = vec![
            ("associations cut off", lost, self.cut),
            ("associations that fell silent", hang, self.silent),
            ("shutdowns", lost, self.shutdowns),
            ("resets", hang, self.resets),
            ("resets that an event completed", hang, self.late_resets),
            ("waits for the quiesce time", hang, self.waits),
            ("resets of associations that work", lost, self.mutual),
            ("late bytes of silent hosts", Some(DisturbanceClass::Late), self.late),
            ("forbidden resets and connects", Some(DisturbanceClass::Nonsense), self.forbidden),
            ("events", Some(DisturbanceClass::Paths), self.events),
            ("refused because of an ANA state", Some(DisturbanceClass::Paths), self.inaccessible),
            ("repeated writes", hang, self.repeated),
        ];
        let list: Vec<String> =
            disturbances.iter().map(|(name, _, n)| format!("{} {name}", format_count(*n))).collect();
        RunReport {
            steps: self.steps,
            requests: self.requests,
            simulated: self.simulated,
            nothing: match (self.requests, self.compared) {
                (0, _) => Some("no request was answered"),
                (_, 0) => Some("no data was read and compared"),
                _ => None,
            },
            coverage: format!(
                "{}\nchecked: {} reads, {} writes on the disk, {} associations\n",
                list.join(", "),
                format_count(self.compared),
                format_count(self.landed),
                format_count(self.associations)
            ),
            disturbances,
        }
    }
}
