//! `selectors`: how each selector handles paths that differ.
//!
//! The paths are simulated, on a clock that jumps from event to event. Each path serves one request
//! after another, with its own service time. So the result is the same on every machine.

use super::models::paced_path::{PacedPath, PathServiceTime};
use super::outcome::{ExperimentOutcome, RatioVsPublished, ResultTable};
use super::{ExperimentRunOptions, PublishedExperiment, over};
use crate::page::{Axis, AxisUnit, Bar, BarPlot};
use crate::stats::median;
use anyhow::{Result, ensure};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tracing::subscriber::{NoSubscriber, with_default};
use udm_core::{Batch, Bio, Device, Nanos, Sector, Sectors};
use udm_dm::testing::SteppedTestCores;

pub(super) const EXPERIMENT: PublishedExperiment = PublishedExperiment {
    name: "selectors",
    question: "How does each selector handle paths that are slow, become slow, or fail?",
    source: "udm's own aim: 0.85 of the ideal if one of two paths is ten times slower",
    run,
};

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const LEN: Sectors = Sectors(4 << 21);
/// Simulated time of each run in nanoseconds.
const TIME: u64 = 2_000 * MS;

const SELECTORS: [&str; 4] = ["round-robin", "queue-length", "service-time", "historical-service-time"];

/// The pattern of the requests.
#[derive(Clone, Copy)]
enum ConstantDepthOrBurstLoad {
    /// A constant number of requests in flight.
    Always(usize),
    /// Two requests all the time, and bursts. A burst has the given number of requests and begins
    /// the given time after the end of the previous one. The result is the rate in bursts.
    Bursts(usize, Nanos),
}

/// Paths and a load.
struct SelectorScenario {
    name: &'static str,
    paths: [PathServiceTime; 2],
    ask: ConstantDepthOrBurstLoad,
    /// Requests per second with ideal choices; `None` for the rate of the best of [`SELECTORS`].
    ideal: Option<f64>,
    /// The selectors that should reach [`AIM`] of the ideal.
    fit: &'static [&'static str],
}

const fn fixed_service_time(ns: u64) -> PathServiceTime {
    PathServiceTime::Every(Nanos(ns))
}

const FIT: &[&str] = &["queue-length", "service-time", "historical-service-time"];

const SCENES: [SelectorScenario; 5] = [
    SelectorScenario {
        name: "alike, depth 32",
        paths: [fixed_service_time(100 * US), fixed_service_time(100 * US)],
        ask: ConstantDepthOrBurstLoad::Always(32),
        ideal: Some(20_000.0),
        fit: &SELECTORS,
    },
    SelectorScenario {
        name: "10 times slower, depth 8",
        paths: [fixed_service_time(100 * US), fixed_service_time(1_000 * US)],
        ask: ConstantDepthOrBurstLoad::Always(8),
        ideal: Some(11_000.0),
        fit: FIT,
    },
    SelectorScenario {
        name: "10 times slower, depth 32",
        paths: [fixed_service_time(100 * US), fixed_service_time(1_000 * US)],
        ask: ConstantDepthOrBurstLoad::Always(32),
        ideal: Some(11_000.0),
        fit: FIT,
    },
    SelectorScenario {
        name: "10 times slower, bursts of 32",
        paths: [fixed_service_time(100 * US), fixed_service_time(1_000 * US)],
        ask: ConstantDepthOrBurstLoad::Bursts(32, Nanos(20 * MS)),
        ideal: None,
        fit: &["historical-service-time"],
    },
    SelectorScenario {
        name: "becomes 10 times slower",
        paths: [
            fixed_service_time(100 * US),
            PathServiceTime::Turns(Nanos(100 * US), Nanos(TIME / 2), Nanos(1_000 * US)),
        ],
        ask: ConstantDepthOrBurstLoad::Always(32),
        ideal: Some((20_000.0 + 11_000.0) / 2.0),
        fit: FIT,
    },
];

/// The last scenario: one of two paths fails half way.
const DEAD: SelectorScenario = SelectorScenario {
    name: "fails",
    paths: [fixed_service_time(100 * US), PathServiceTime::Dies(Nanos(100 * US), Nanos(TIME / 2))],
    ask: ConstantDepthOrBurstLoad::Always(32),
    ideal: Some(15_000.0),
    fit: &SELECTORS,
};

/// The aim as a share of the ideal.
const AIM: f64 = 0.85;

fn run(effort: &ExperimentRunOptions<'_>, outcome: &mut ExperimentOutcome) -> Result<()> {
    let scenes = SCENES.iter().chain([&DEAD]);
    let mut table = ResultTable::new(
        "requests per second of simulated time",
        [""].into_iter().chain(SELECTORS).chain(["ideal"]),
    );
    let mut bars =
        BarPlot::new("Share of the ideal", Axis::new("share of the ideal", AxisUnit::Ratio), SELECTORS)
            .reference("aim");
    for scene in scenes {
        ensure!(!effort.stop.load(Relaxed), "stopped before anything was measured");
        // The failure of the path is intended, so it is not logged.
        let rate = |selector| with_default(NoSubscriber::default(), || scene.rate(selector));
        let rates: Vec<f64> = SELECTORS.into_iter().map(rate).collect::<Result<_>>()?;
        let ideal = scene.ideal.unwrap_or_else(|| rates.iter().copied().fold(0.0, f64::max));
        table.row(scene.name, rates.iter().copied().chain([ideal]));
        bars = bars.group(
            scene.name,
            rates.iter().zip(SELECTORS).map(|(rate, selector)| {
                let bar = Bar::new(rate / ideal);
                if scene.fit.contains(&selector) { bar.beside(AIM) } else { bar }
            }),
        );
        for (rate, selector) in rates.iter().zip(SELECTORS) {
            let finding = RatioVsPublished::more(
                format!("{}: {selector}, share of the ideal", scene.name),
                rate / ideal,
            );
            outcome.found(if scene.fit.contains(&selector) { finding.aim(AIM) } else { finding });
        }
    }
    outcome.table(table);
    outcome.bars(bars);
    outcome.note(
        "One of two paths serves a request in 100 us, the other one as named. Changes happen half way, at depth 32. \
         Round-robin gives both paths the same number of requests, so the total rate is twice that of the slower path. \
         The ideal of bursts is the best rate of the four selectors.",
    );
    Ok(())
}

impl SelectorScenario {
    /// Successful requests per second of simulated time.
    fn rate(&self, selector: &str) -> Result<f64> {
        let disk = |(n, service_time): (u64, &PathServiceTime)| -> Arc<dyn Device> {
            Arc::new(PacedPath::new(*service_time, Sectors(LEN.0 + 8 * n)))
        };
        let disks: Vec<_> = (0..).zip(&self.paths).map(disk).collect();
        let table = format!("0 {} multipath 0 0 1 1 {selector} 0 2 0 253:0 253:1", LEN.0);
        let mut world = SteppedTestCores::new(1);
        let cores = world.cores();
        let device = over::make_mapped_device_over_disks(&*cores, 1, &table, &disks, || world.deliver(0))?;
        let mut lane = world.open(0, &*device).map_err(|why| anyhow::anyhow!("a lane: {why}"))?;
        let (mut clients, mut now) = (SimulatedLoadGenerator::new(self.ask), Nanos(1));
        let (mut batch, mut done, mut served) = (Batch::new(), Batch::new(), 0u64);
        // After the end, requests in flight complete.
        while now.0 < TIME || clients.in_flight > 0 {
            let mut cx = world.state(0).cx(now);
            lane.poll(&mut done, &mut cx);
            if now.0 < TIME {
                served += done.iter().filter(|bio| bio.status.is_ok()).count() as u64;
                clients.again(now, &mut done, &mut batch);
                lane.submit(&mut batch, &mut cx);
            } else {
                clients.came_back(&mut done);
            }
            let wake = cx.wake().min(if now.0 < TIME { clients.next } else { Nanos::NEVER });
            ensure!(wake != Nanos::NEVER || clients.in_flight == 0, "{selector}: nothing is in flight");
            now = now.max(wake);
        }
        Ok(match clients.bursts() {
            Some(rate) => rate,
            None => served as f64 * 1e9 / TIME as f64,
        })
    }
}

/// The source of the requests.
struct SimulatedLoadGenerator {
    ask: ConstantDepthOrBurstLoad,
    idle: Batch,
    in_flight: usize,
    /// The current burst: its begin, and how many completions end it.
    burst: (Nanos, usize),
    /// When the next burst begins, while none is in flight.
    next: Nanos,
    /// The duration of each burst in nanoseconds.
    times: Vec<f64>,
}

/// Requests in flight between bursts.
const STEADY: usize = 2;

impl SimulatedLoadGenerator {
    fn new(ask: ConstantDepthOrBurstLoad) -> SimulatedLoadGenerator {
        let (count, next) = match ask {
            ConstantDepthOrBurstLoad::Always(count) => (count, Nanos::NEVER),
            ConstantDepthOrBurstLoad::Bursts(count, pause) => (count + STEADY, pause),
        };
        let bio = |_| Bio::read(Sector(0), Sectors(8), Default::default());
        let idle = (0..count).map(bio).collect();
        SimulatedLoadGenerator { ask, idle, in_flight: 0, burst: (Nanos(0), 0), next, times: Vec::new() }
    }

    /// Takes the completed requests in `done` and puts new ones into `batch`.
    fn again(&mut self, now: Nanos, done: &mut Batch, batch: &mut Batch) {
        let came_back = done.len();
        self.came_back(done);
        let out = match self.ask {
            ConstantDepthOrBurstLoad::Always(_) => self.idle.len(),
            ConstantDepthOrBurstLoad::Bursts(count, pause) => self.burst(now, came_back, count, pause),
        };
        self.in_flight += out;
        batch.extend(self.idle.drain(..out));
        batch.iter_mut().for_each(|bio| bio.start());
    }

    fn came_back(&mut self, done: &mut Batch) {
        self.in_flight -= done.len();
        done.iter_mut().for_each(|bio| bio.finish());
        self.idle.append(done);
    }

    /// The number of new requests.
    fn burst(&mut self, now: Nanos, came_back: usize, count: usize, pause: Nanos) -> usize {
        let (begin, left) = self.burst;
        if left > came_back {
            self.burst = (begin, left - came_back);
            return 0;
        }
        if left > 0 {
            self.times.push(now.since(begin).0 as f64);
            (self.burst, self.next) = ((begin, 0), now + pause);
        }
        let steady = STEADY.saturating_sub(self.in_flight);
        if now < self.next {
            return steady;
        }
        (self.burst, self.next) = ((now, count), Nanos::NEVER);
        steady + count
    }

    /// Requests per second in bursts.
    fn bursts(&self) -> Option<f64> {
        match self.ask {
            ConstantDepthOrBurstLoad::Always(_) => None,
            ConstantDepthOrBurstLoad::Bursts(count, _) => {
                Some(count as f64 * 1e9 / median(self.times.clone())?)
            }
        }
    }
}
