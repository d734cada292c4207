//! Measurement of several devices in rotation.
//!
//! Each round measures each device once, on all cores at the same time. The result of a device is
//! the median of its rounds, so a disturbance affects all devices alike. Requests are reads of 4
//! KiB at random offsets that carry no data.

use crate::cores;
use crate::stats::{ThreadRusage, median};
use anyhow::{Context, Result, ensure};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::time::Duration;
use udm_core::{Batch, Bio, CoreId, Device, Lane, Nanos, Sector, Sectors};
use udm_runtime::{CoreOptions, LocalCore, ProcessCores};

/// Sectors per request.
pub(crate) const REQUEST: u64 = 8;

/// The parameters of a contest.
pub(crate) struct InterleavedDeviceBenchmark<'a> {
    /// Options of each core.
    pub cores: Vec<CoreOptions>,
    /// Requests in flight per core. Each device is measured with each depth.
    pub depths: &'a [usize],
    /// Measurements per device.
    pub rounds: usize,
    /// When a measurement ends, on each core.
    pub until: StopCondition,
    /// Size of the smallest device in sectors.
    pub len: u64,
}

/// When a measurement ends.
#[derive(Debug, Clone, Copy)]
pub(crate) enum StopCondition {
    /// After this many requests. The core takes turns without pause.
    Requests(u64),
    /// After this time. After a turn that moves nothing, the core waits as a server's core does.
    Time(Nanos),
}

/// The result of one device.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DeviceCostPerRequest {
    /// Nanoseconds per request, as seen by one core: the median of the rounds.
    pub ns: f64,
    /// Context switches per million requests of all rounds, voluntary and involuntary.
    pub switches: f64,
    /// CPU time of the cores as a share of the time of all rounds, from 0 to 1.
    pub cpu: f64,
}

impl DeviceCostPerRequest {
    /// Requests per second of `cores` cores.
    pub(crate) fn iops(&self, cores: usize) -> f64 {
        cores as f64 * 1e9 / self.ns
    }
}

/// One measurement of one device on one core.
#[derive(Clone, Copy)]
struct OneCoreRoundResult {
    requests: u64,
    took: Nanos,
    usage: ThreadRusage,
}

impl InterleavedDeviceBenchmark<'_> {
    /// Measures the devices that `make` makes, and returns their scores by depth and device. If
    /// `stop` is set, there are fewer scores, or scores of fewer rounds.
    ///
    /// # Errors
    /// If cores or devices are not available.
    pub(crate) fn run(
        &self,
        make: impl FnOnce(&Arc<ProcessCores>) -> Result<Vec<Arc<dyn Device>>>,
        stop: &AtomicBool,
    ) -> Result<Vec<Vec<DeviceCostPerRequest>>> {
        ensure!(self.rounds > 0, "nothing to measure");
        let barrier = Barrier::new(self.cores.len());
        let start = RoundBarrier { barrier, stop, last: AtomicUsize::new(usize::MAX) };
        let measured =
            cores::run_on_attached_cores(&self.cores, make, |core, lanes| self.measure(core, lanes, &start))?;
        let of_depth = |d: usize| {
            let devices = measured[0][d].len();
            let counts = measured.iter().flat_map(|core| core[d].iter().map(Vec::len));
            let rounds = counts.min().unwrap_or_default();
            let score = |i: usize| {
                compute_device_cost_per_request(
                    &measured.iter().map(|core| &core[d][i][..rounds]).collect::<Vec<_>>(),
                )
            };
            if rounds == 0 { Vec::new() } else { (0..devices).map(score).collect() }
        };
        Ok((0..self.depths.len()).map(of_depth).filter(|scores: &Vec<_>| !scores.is_empty()).collect())
    }

    /// Measures at the only depth and returns the scores of the devices, at least one.
    ///
    /// # Errors
    /// As [`InterleavedDeviceBenchmark::run`]; or if it was stopped before its first round ended.
    pub(crate) fn scores(
        &self,
        make: impl FnOnce(&Arc<ProcessCores>) -> Result<Vec<Arc<dyn Device>>>,
        stop: &AtomicBool,
    ) -> Result<Vec<DeviceCostPerRequest>> {
        self.run(make, stop)?.pop().context("stopped before anything was measured")
    }

    /// The measurements of this core by depth, device and round.
    fn measure(
        &self,
        core: &mut LocalCore,
        mut lanes: Vec<Box<dyn Lane>>,
        start: &RoundBarrier<'_>,
    ) -> Vec<Vec<Vec<OneCoreRoundResult>>> {
        let mut load = RandomReadLoad::new(u64::from(core.id().0), self.len);
        let mut number = 0;
        let all = self.depths.iter().map(|&depth| {
            load.set_depth(depth);
            let mut of_depth = vec![Vec::with_capacity(self.rounds); lanes.len()];
            // The first round only warms up and is not counted.
            for round in 0..=self.rounds {
                for (lane, out) in lanes.iter_mut().zip(&mut of_depth) {
                    if !start.wait(core.id(), number) {
                        return of_depth;
                    }
                    number += 1;
                    let measured = load.run(core, &mut **lane, self.until);
                    if round > 0 {
                        out.push(measured);
                    }
                }
            }
            of_depth
        });
        all.collect()
    }
}

/// The score of a device from the rounds of each core. All cores have the same number of rounds.
fn compute_device_cost_per_request(cores: &[&[OneCoreRoundResult]]) -> DeviceCostPerRequest {
    // The rate of a round is the sum of the rates of all cores.
    let round = |r: usize| {
        let rate = |core: &&[OneCoreRoundResult]| core[r].requests as f64 / core[r].took.0.max(1) as f64;
        cores.len() as f64 / cores.iter().map(rate).sum::<f64>()
    };
    let all = || cores.iter().copied().flatten();
    let (requests, mut usage) = (all().map(|m| m.requests).sum::<u64>(), ThreadRusage::default());
    all().for_each(|m| usage.add(&m.usage));
    DeviceCostPerRequest {
        ns: median((0..cores[0].len()).map(round).collect()).unwrap_or_default(),
        switches: usage.switches as f64 * 1e6 / requests as f64,
        cpu: (usage.user + usage.system).as_secs_f64() / usage.of.as_secs_f64(),
    }
}

/// A barrier at which all cores begin a measurement, or all stop before the same measurement.
struct RoundBarrier<'a> {
    barrier: Barrier,
    stop: &'a AtomicBool,
    /// The number of the first measurement that is not made. Core 0 sets it before the barrier.
    last: AtomicUsize,
}

impl RoundBarrier<'_> {
    /// Waits for the other cores before measurement `number`. Returns false if it is not made.
    fn wait(&self, core: CoreId, number: usize) -> bool {
        if core == CoreId(0) && self.stop.load(Relaxed) {
            self.last.fetch_min(number, Relaxed);
        }
        self.barrier.wait();
        number < self.last.load(Relaxed)
    }
}

/// Options of `cores` cores, each on a CPU of its own as long as there are enough CPUs.
pub(crate) fn pinned_core_options(cores: usize) -> Vec<CoreOptions> {
    let cpus = get_process_cpu_affinity();
    (0..cores)
        .map(|i| CoreOptions { cpus: cpus.get(i).copied().into_iter().collect(), ..unpinned_core_options() })
        .collect()
}

/// Options of a core that the scheduler places.
pub(crate) fn unpinned_core_options() -> CoreOptions {
    CoreOptions { ring_optional: true, ..CoreOptions::default() }
}

/// The CPUs that this process may use.
pub(crate) fn get_process_cpu_affinity() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
}

/// The load: the same bios again and again, at random offsets.
struct RandomReadLoad {
    idle: Batch,
    batch: Batch,
    done: Batch,
    rng: SmallRng,
    places: u64,
}

impl RandomReadLoad {
    fn new(seed: u64, len: u64) -> RandomReadLoad {
        let rng = SmallRng::seed_from_u64(seed);
        RandomReadLoad {
            idle: Batch::new(),
            batch: Batch::new(),
            done: Batch::new(),
            rng,
            places: len / REQUEST,
        }
    }

    fn set_depth(&mut self, depth: usize) {
        self.idle.resize_with(depth, Bio::new);
    }

    fn run(&mut self, core: &mut LocalCore, lane: &mut dyn Lane, until: StopCondition) -> OneCoreRoundResult {
        let (before, begin) = (ThreadRusage::now(), core.clock());
        let requests = match until {
            StopCondition::Requests(requests) => self.requests(core, lane, requests),
            StopCondition::Time(time) => self.time(core, lane, begin + time),
        };
        let took = core.clock().since(begin);
        OneCoreRoundResult {
            requests,
            took,
            usage: ThreadRusage::now().since(&before, Duration::from_nanos(took.0)),
        }
    }

    fn requests(&mut self, core: &mut LocalCore, lane: &mut dyn Lane, requests: u64) -> u64 {
        let (mut left, mut in_flight) = (requests, 0);
        loop {
            core.turn(|cx| {
                lane.poll(&mut self.done, cx);
                in_flight -= self.done.len();
                self.again(&mut left);
                in_flight += self.batch.len();
                lane.submit(&mut self.batch, cx);
            });
            if left == 0 && in_flight == 0 {
                return requests;
            }
        }
    }

    fn time(&mut self, core: &mut LocalCore, lane: &mut dyn Lane, end: Nanos) -> u64 {
        let (mut left, mut in_flight, mut count) = (u64::MAX, 0, 0);
        loop {
            let moved = core.turn(|cx| {
                lane.poll(&mut self.done, cx);
                let came_back = self.done.len();
                in_flight -= came_back;
                if cx.now() < end {
                    count += self.done.iter().filter(|bio| bio.status.is_ok()).count() as u64;
                } else {
                    left = 0;
                }
                self.again(&mut left);
                in_flight += self.batch.len();
                let more = !self.batch.is_empty();
                if more {
                    lane.submit(&mut self.batch, cx);
                }
                came_back > 0 || more
            });
            if left == 0 && in_flight == 0 {
                return count;
            }
            if !moved {
                core.park();
            }
        }
    }

    /// Reuses completed bios for at most `left` new requests.
    #[inline(always)]
    fn again(&mut self, left: &mut u64) {
        for mut bio in self.done.drain(..) {
            bio.finish();
            self.idle.push(bio);
        }
        while *left > 0
            && let Some(mut bio) = self.idle.pop()
        {
            *left -= 1;
            bio.sector = Sector((self.rng.next_u64() % self.places) * REQUEST);
            bio.sectors = Sectors(REQUEST);
            bio.start();
            self.batch.push(bio);
        }
    }
}
