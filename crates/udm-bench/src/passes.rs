//! How much a job moves, and how often it goes over its region: `size`, `io_size`, `loops` and
//! `number_ios`, as fio 3.33 counts them.
//!
//! A pass goes over the whole region. A job makes `loops` passes, and more while the rest of
//! `io_size` is at least one request.
//!
//! A job moves at most `loops` times `io_size`, or `loops` times its region if there is no
//! `io_size`. `number_ios` is multiplied in the same way. Random requests without a map have no
//! passes, so only these limits end them.

use crate::load::{BytesOrPercent, FioLoadOptions};
use crate::region::{JobRegion, multiply_by_percent};

impl FioLoadOptions {
    /// Maximum bytes that a job moves. The request that reaches this limit is the last.
    pub fn most_bytes(&self, region: JobRegion) -> u64 {
        if self.time_based {
            return u64::MAX;
        }
        let io_size = match self.io_size {
            Some(BytesOrPercent::Percent(percent)) => multiply_by_percent(region.bytes, percent),
            Some(BytesOrPercent::Bytes(size)) if size > 0 => size,
            _ => region.bytes,
        };
        self.in_all_loops(io_size)
    }

    /// Maximum number of requests of a job.
    pub fn requests(&self, region: JobRegion) -> u64 {
        if self.time_based {
            return u64::MAX;
        }
        let number = self.number_ios.filter(|n| *n > 0).map_or(u64::MAX, |n| self.in_all_loops(n));
        // If lengths differ, the plan counts bytes instead.
        let of_bytes = self.fixed().map(|bs| self.most_bytes(region).div_ceil(bs));
        number.min(of_bytes.unwrap_or(u64::MAX))
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
    /// More passes come while the rest of `io_size` is at least `longest`, the longest request.
    io_size: u64,
    longest: u64,
    /// There is always another pass.
    endless: bool,
}

impl RemainingPasses {
    /// The passes of a job before its first one.
    pub fn new(load: &FioLoadOptions) -> RemainingPasses {
        let endless = load.time_based || (load.rw.is_random() && !load.has_map());
        // A percentage of `io_size` is less than a pass.
        let io_size = match load.io_size {
            Some(BytesOrPercent::Bytes(size)) => size,
            _ => 0,
        };
        let loops = load.loops - 1;
        RemainingPasses { loops, io_size, longest: load.longest(), endless }
    }

    /// Begins another pass, if there is one. `moved` is the number of bytes that the job has moved.
    pub fn again(&mut self, moved: u64) -> bool {
        if self.endless {
            return true;
        }
        if let Some(left) = self.loops.checked_sub(1) {
            self.loops = left;
            return true;
        }
        self.io_size.saturating_sub(moved) >= self.longest
    }

    /// Whether the job has only one pass, which moves `pass` bytes.
    pub fn are_one(&self, pass: u64) -> bool {
        let more = self.io_size.saturating_sub(pass) >= self.longest;
        !self.endless && self.loops == 0 && !more
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
            ("--bs 4k --io_size 3m", 768, 768, 768),
            ("--bs 4k --io_size 3m --loops 3", 768, 768, 2304),
            ("--bs 4k --io_size 1000k --loops 2", 500, 500, 500),
            ("--bs 4k --io_size 1025k", 256, 256, 257),
            ("--bs 4k --io_size 1025k --loops 2", 512, 512, 513),
            ("--bs 4k --io_size 2k --loops 3", 2, 2, 2),
            ("--bs 4k --loops 3", 768, 768, 768),
            ("--bs 4k --io_size 100m --number_ios 700", 700, 700, 700),
            ("--bs 4k --io_size 3m --number_ios 100 --loops 2", 200, 200, 200),
            ("--bs 4k --io_size 3m --size 300k --offset 70k --loops 2", 825, 825, 1536),
            ("--bs 64k --io_size 3000k", 47, 47, 47),
            ("--bs 64k --io_size 1025k --loops 2", 32, 32, 33),
            ("--bs 64k --io_size 3m --size 300k --offset 70k --loops 2", 50, 48, 96),
            ("--bs 12k --io_size 3m --loops 3", 340, 340, 768),
            ("--bs 12k --io_size 1000k --loops 2", 167, 167, 167),
            ("--bs 12k --loops 3", 255, 255, 256),
            ("--bs 64k --size 100k --loops 3", 5, 3, 5),
            ("--bs 12k --io_size 33%", 29, 29, 29),
            ("--bs 12k --io_size 50%", 43, 43, 43),
            ("--bs 12k --io_size 50% --loops 2", 86, 86, 86),
            ("--bs 12k --io_size 50% --size 50%", 21, 21, 21),
            ("--bs 64k --io_size 33%", 6, 6, 6),
            ("--bs 12k --offset 33%", 56, 56, 57),
            ("--bs 12k --offset 33% --size 33%", 28, 28, 28),
        ] {
            for (rw, want) in [("read", order), ("randwrite", mapped), ("randread --norandommap", unmapped)] {
                assert_eq!(requests(&format!("--rw {rw} {text}")), want, "{rw} {text}");
            }
        }
    }
}
