//! Devices measured against each other, in turn.
//!
//! A round measures each device once, on all cores at the same time, and the result of a device is
//! the median of its rounds: what disturbs the machine disturbs all alike. Requests are reads of
//! 4 KiB at random places that carry no data.

use crate::cores;
use crate::stats::{CpuUsage, median};
use anyhow::{Context, Result, ensure};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::time::Duration;
use udm_core::{Batch, Bio, CoreId, Device, Lane, Nanos, Sector, Sectors};
use udm_runtime::{CoreOptions, CoreSet, LocalCore};

/// Sectors of a request.
pub(crate) const REQUEST: u64 = 8;

/// Who competes, and how.
pub(crate) struct DeviceContest<'a> {
    /// How each core behaves.
    pub cores: Vec<CoreOptions>,
    /// Requests in flight, a core: each device is measured with each.
    pub depths: &'a [usize],
    /// How often each device is measured.
    pub rounds: usize,
    /// When a measurement is over, on each core.
    pub until: StopCondition,
    /// Sectors of the smallest device.
    pub len: u64,
}

/// When a measurement is over.
#[derive(Debug, Clone, Copy)]
pub(crate) enum StopCondition {
    /// So many requests are done. The core takes turn after turn.
    Requests(u64),
    /// So much time is over. Between turns that bring nothing the core waits as a server's does.
    Time(Nanos),
}

/// What came of a device.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DeviceScore {
    /// Nanoseconds a request, as one core sees it: the median of the rounds.
    pub ns: f64,
    /// Context switches in a million requests of all rounds, wanted and not.
    pub switches: f64,
    /// How much of the time the cores were at work, from 0 to 1: over all rounds.
    pub cpu: f64,
}

impl DeviceScore {
    /// Requests a second of `cores`.
    pub(crate) fn iops(&self, cores: usize) -> f64 {
        cores as f64 * 1e9 / self.ns
    }
}

/// One measurement of one device on one core.
#[derive(Clone, Copy)]
struct Measurement {
    requests: u64,
    took: Nanos,
    usage: CpuUsage,
}

impl DeviceContest<'_> {
    /// The scores by depth and device; fewer, or of fewer rounds, once `stop` says so. `make` gives
    /// the devices.
    ///
    /// # Errors
    /// When cores or devices can't be had.
    pub(crate) fn run(
        &self,
        make: impl FnOnce(&Arc<CoreSet>) -> Result<Vec<Arc<dyn Device>>>,
        stop: &AtomicBool,
    ) -> Result<Vec<Vec<DeviceScore>>> {
        ensure!(self.rounds > 0, "nothing to measure");
        let barrier = Barrier::new(self.cores.len());
        let start = RoundBarrier { barrier, stop, last: AtomicUsize::new(usize::MAX) };
        let measured = cores::run(&self.cores, make, |core, lanes| self.measure(core, lanes, &start))?;
        let of_depth = |d: usize| {
            let devices = measured[0][d].len();
            let counts = measured.iter().flat_map(|core| core[d].iter().map(Vec::len));
            let rounds = counts.min().unwrap_or_default();
            let score =
                |i: usize| score(&measured.iter().map(|core| &core[d][i][..rounds]).collect::<Vec<_>>());
            if rounds == 0 { Vec::new() } else { (0..devices).map(score).collect() }
        };
        Ok((0..self.depths.len()).map(of_depth).filter(|scores: &Vec<_>| !scores.is_empty()).collect())
    }

    /// The scores of the devices, of which there is at least one, at the only depth.
    ///
    /// # Errors
    /// As [`DeviceContest::run_task`]; when it was stopped before its first round was over.
    pub(crate) fn scores(
        &self,
        make: impl FnOnce(&Arc<CoreSet>) -> Result<Vec<Arc<dyn Device>>>,
        stop: &AtomicBool,
    ) -> Result<Vec<DeviceScore>> {
        self.run(make, stop)?.pop().context("stopped before anything was measured")
    }

    /// By depth, device and round.
    fn measure(
        &self,
        core: &mut LocalCore,
        mut lanes: Vec<Box<dyn Lane>>,
        start: &RoundBarrier<'_>,
    ) -> Vec<Vec<Vec<Measurement>>> {
        let mut load = RandomReadLoad::new(u64::from(core.id().0), self.len);
        let mut number = 0;
        let all = self.depths.iter().map(|&depth| {
            load.set_depth(depth);
            let mut of_depth = vec![Vec::with_capacity(self.rounds); lanes.len()];
            // One round more than is counted: the first warms up.
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

/// What the rounds of each core come to, of which there are as many on each.
fn score(cores: &[&[Measurement]]) -> DeviceScore {
    // A round's result is what all cores together have done.
    let round = |r: usize| {
        let rate = |core: &&[Measurement]| core[r].requests as f64 / core[r].took.0.max(1) as f64;
        cores.len() as f64 / cores.iter().map(rate).sum::<f64>()
    };
    let all = || cores.iter().copied().flatten();
    let (requests, mut usage) = (all().map(|m| m.requests).sum::<u64>(), CpuUsage::default());
    all().for_each(|m| usage.add(&m.usage));
    DeviceScore {
        ns: median((0..cores[0].len()).map(round).collect()).unwrap_or_default(),
        switches: usage.switches as f64 * 1e6 / requests as f64,
        cpu: (usage.user + usage.system).as_secs_f64() / usage.of.as_secs_f64(),
    }
}

/// Where cores begin a measurement together, or all stop in front of the same one.
struct RoundBarrier<'a> {
    barrier: Barrier,
    stop: &'a AtomicBool,
    /// The number of the first that is not made. Core 0 sets it, in front of the barrier.
    last: AtomicUsize,
}

impl RoundBarrier<'_> {
    /// Waits for the others in front of measurement `number`; false when it is not made.
    fn wait(&self, core: CoreId, number: usize) -> bool {
        if core == CoreId(0) && self.stop.load(Relaxed) {
            self.last.fetch_min(number, Relaxed);
        }
        self.barrier.wait();
        number < self.last.load(Relaxed)
    }
}

/// So many cores, each on a CPU of its own as far as there are as many.
pub(crate) fn pinned_cores(cores: usize) -> Vec<CoreOptions> {
    let cpus = cpus();
    (0..cores)
        .map(|i| CoreOptions { cpus: cpus.get(i).copied().into_iter().collect(), ..unpinned_core() })
        .collect()
}

/// A core that goes where the scheduler puts it.
pub(crate) fn unpinned_core() -> CoreOptions {
    CoreOptions { ring_optional: true, ..CoreOptions::default() }
}

/// The CPUs that this process may use.
pub(crate) fn cpus() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
}

/// The load: the same bios over and over, to random places.
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

    fn run(&mut self, core: &mut LocalCore, lane: &mut dyn Lane, until: StopCondition) -> Measurement {
        let (before, begin) = (CpuUsage::now(), core.clock());
        let requests = match until {
            StopCondition::Requests(requests) => self.requests(core, lane, requests),
            StopCondition::Time(time) => self.time(core, lane, begin + time),
        };
        let took = core.clock().since(begin);
        Measurement { requests, took, usage: CpuUsage::now().since(&before, Duration::from_nanos(took.0)) }
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

    /// What came back goes out again, `left` times at the most.
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
