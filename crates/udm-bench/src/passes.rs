//! How much a job moves, and how often it goes over its region: `size`, `loops` and `number_ios`,
//! as fio 3.33 counts them.
//!
//! A pass goes over the whole region. A job makes `loops` passes, and moves at most `loops` times
//! its region. `number_ios` is multiplied in the same way. Random requests without a map have no
//! passes, so only these limits end them.

use crate::load::FioLoadOptions;
use crate::region::JobRegion;

impl FioLoadOptions {
    /// Maximum number of requests of a job.
    pub fn requests(&self, region: JobRegion) -> u64 {
        if self.time_based {
            return u64::MAX;
        }
        let number = self.number_ios.filter(|n| *n > 0).map_or(u64::MAX, |n| self.in_all_loops(n));
        number.min(self.in_all_loops(region.bytes).div_ceil(self.block_bytes()))
    }

    fn in_all_loops(&self, n: u64) -> u64 {
        n.saturating_mul(self.loops.into())
    }
}

/// The passes of a job after the current one.
#[derive(Clone)]
pub struct RemainingPasses {
    /// Passes that come in any case.
    loops: u32,
    /// There is always another pass.
    endless: bool,
}

impl RemainingPasses {
    /// The passes of a job before its first one.
    pub fn new(load: &FioLoadOptions) -> RemainingPasses {
        let endless = load.time_based || (load.rw.is_random() && !load.has_map());
        RemainingPasses { loops: load.loops - 1, endless }
    }

    /// Begins another pass, if there is one.
    pub fn again(&mut self) -> bool {
        if self.endless {
            return true;
        }
        let more = self.loops > 0;
        self.loops = self.loops.saturating_sub(1);
        more
    }

    /// Whether the job has only one pass.
    pub fn are_one(&self) -> bool {
        !self.endless && self.loops == 0
    }
}

#[cfg(test)]
mod tests {
    use crate::jobs::parse_fio_load_options;
    use crate::plan::AccessPlan;
    use udm_core::{Limits, Sectors};

    /// The number of requests of a load on a device of 1 MiB.
    fn requests(text: &str) -> u64 {
        let load = parse_fio_load_options(text);
        load.check().unwrap();
        let region = load.regions(&Limits::new(Sectors(2048))).unwrap()[0];
        let mut plan = AccessPlan::new(&load, 0, region);
        let most = load.requests(region).min(100_000);
        std::iter::from_fn(|| plan.next()).take(most as usize).count() as u64
    }

    /// Numbers of requests of fio 3.33 on a file of 1 MiB.
    #[test]
    fn as_fio_counts_them() {
        for (text, order, mapped, unmapped) in [
            ("--bs 4k --loops 3", 768, 768, 768),
            ("--bs 4k --number_ios 70 --loops 2", 140, 140, 140),
            ("--bs 12k --loops 3", 255, 255, 256),
            ("--bs 64k --size 100k --loops 3", 5, 3, 5),
            ("--bs 12k --offset 33%", 56, 56, 57),
            ("--bs 12k --offset 33% --size 33%", 28, 28, 28),
        ] {
            for (rw, want) in [("read", order), ("randwrite", mapped), ("randread --norandommap", unmapped)] {
                assert_eq!(requests(&format!("--rw {rw} {text}")), want, "{rw} {text}");
            }
        }
    }
}
