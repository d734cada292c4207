//! `selectors`: what each selector makes of paths that differ.
//!
//! The paths are simulated, on a clock that goes from event to event: each serves one request after
//! the other, in a time of its own. So this says the same on every machine.

use super::models::paced_path::{PacedPath, PathServiceTime};
use super::outcome::{ExperimentOutcome, Finding, ResultTable};
use super::{Experiment, ExperimentOptions, over};
use crate::page::{Axis, AxisUnit, Bar, Bars};
use crate::stats::median;
use anyhow::{Result, ensure};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tracing::subscriber::{NoSubscriber, with_default};
use udm_core::{Batch, Bio, Device, Nanos, Sector, Sectors};
use udm_dm::testing::TestWorld;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "selectors",
    question: "What does each selector make of paths that are slow, become slow, or die?",
    source: "udm's own bar: 0.85 of the ideal with one path of two ten times slower",
    run,
};

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const LEN: Sectors = Sectors(4 << 21);
/// How long each runs.
const TIME: u64 = 2_000 * MS;

const SELECTORS: [&str; 4] = ["round-robin", "queue-length", "service-time", "historical-service-time"];

/// Who asks.
#[derive(Clone, Copy)]
enum RequestPattern {
    /// So many requests all the time.
    Always(usize),
    /// Two all the time, and so many more at once, so long after the last such burst was over. What
    /// counts is the rate in bursts.
    Bursts(usize, Nanos),
}

/// Paths and a load.
struct SelectorScenario {
    name: &'static str,
    paths: [PathServiceTime; 2],
    ask: RequestPattern,
    /// Requests in a second of the best choice; `None`: what the best of [`SELECTORS`] does.
    ideal: Option<f64>,
    /// Those of [`SELECTORS`] that are to reach 0.85 of it.
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
        ask: RequestPattern::Always(32),
        ideal: Some(20_000.0),
        fit: &SELECTORS,
    },
    SelectorScenario {
        name: "10 times slower, depth 8",
        paths: [fixed_service_time(100 * US), fixed_service_time(1_000 * US)],
        ask: RequestPattern::Always(8),
        ideal: Some(11_000.0),
        fit: FIT,
    },
    SelectorScenario {
        name: "10 times slower, depth 32",
        paths: [fixed_service_time(100 * US), fixed_service_time(1_000 * US)],
        ask: RequestPattern::Always(32),
        ideal: Some(11_000.0),
        fit: FIT,
    },
    SelectorScenario {
        name: "10 times slower, bursts of 32",
        paths: [fixed_service_time(100 * US), fixed_service_time(1_000 * US)],
        ask: RequestPattern::Bursts(32, Nanos(20 * MS)),
        ideal: None,
        fit: &["historical-service-time"],
    },
    SelectorScenario {
        name: "becomes 10 times slower",
        paths: [
            fixed_service_time(100 * US),
            PathServiceTime::Turns(Nanos(100 * US), Nanos(TIME / 2), Nanos(1_000 * US)),
        ],
        ask: RequestPattern::Always(32),
        ideal: Some((20_000.0 + 11_000.0) / 2.0),
        fit: FIT,
    },
];

/// The last: one of two dies half way.
const DEAD: SelectorScenario = SelectorScenario {
    name: "dies",
    paths: [fixed_service_time(100 * US), PathServiceTime::Dies(Nanos(100 * US), Nanos(TIME / 2))],
    ask: RequestPattern::Always(32),
    ideal: Some(15_000.0),
    fit: &SELECTORS,
};

/// Of the ideal.
const AIM: f64 = 0.85;

fn run(effort: &ExperimentOptions<'_>, outcome: &mut ExperimentOutcome) -> Result<()> {
    let scenes = SCENES.iter().chain([&DEAD]);
    let mut table = ResultTable::new(
        "requests a second of simulated time",
        [""].into_iter().chain(SELECTORS).chain(["ideal"]),
    );
    let mut bars =
        Bars::new("Of the ideal", Axis::new("of the ideal", AxisUnit::Ratio), SELECTORS).reference("aim");
    for scene in scenes {
        ensure!(!effort.stop.load(Relaxed), "stopped before anything was measured");
        // That a path fails is what is asked for: the log has no line of it.
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
            let finding = Finding::more(format!("{}: {selector}, of the ideal", scene.name), rate / ideal);
            outcome.found(if scene.fit.contains(&selector) { finding.aim(AIM) } else { finding });
        }
    }
    outcome.table(table);
    outcome.bars(bars);
    outcome.note(
        "Of two paths one serves a request in 100 us, and the other is as said; what happens to it happens half way, at \
         depth 32. Round-robin gives each path as many requests as the other, so the slower one sets the pace: twice its \
         own. Of bursts the ideal is what the best of the four does.",
    );
    Ok(())
}

impl SelectorScenario {
    /// Requests that succeed in a second of simulated time.
    fn rate(&self, selector: &str) -> Result<f64> {
        let disk = |(n, pace): (u64, &PathServiceTime)| -> Arc<dyn Device> {
            Arc::new(PacedPath::new(*pace, Sectors(LEN.0 + 8 * n)))
        };
        let disks: Vec<_> = (0..).zip(&self.paths).map(disk).collect();
        let table = format!("0 {} multipath 0 0 1 1 {selector} 0 2 0 253:0 253:1", LEN.0);
        let mut world = TestWorld::new(1);
        let cores = world.cores();
        let device = over::mapped(&*cores, 1, &table, &disks, || world.deliver(0))?;
        let mut lane = world.open(0, &*device).map_err(|why| anyhow::anyhow!("a lane: {why}"))?;
        let (mut clients, mut now) = (LoadClients::new(self.ask), Nanos(1));
        let (mut batch, mut done, mut served) = (Batch::new(), Batch::new(), 0u64);
        // Behind the end what is under way comes back.
        while now.0 < TIME || clients.under_way > 0 {
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
            ensure!(wake != Nanos::NEVER || clients.under_way == 0, "{selector}: nothing is under way");
            now = now.max(wake);
        }
        Ok(match clients.bursts() {
            Some(rate) => rate,
            None => served as f64 * 1e9 / TIME as f64,
        })
    }
}

/// Where requests come from.
struct LoadClients {
    ask: RequestPattern,
    idle: Batch,
    under_way: usize,
    /// The burst under way: when it began, and how many requests it takes to end it.
    burst: (Nanos, usize),
    /// When the next is, while none is under way.
    next: Nanos,
    /// How long each took.
    times: Vec<f64>,
}

/// What is under way between bursts.
const STEADY: usize = 2;

impl LoadClients {
    fn new(ask: RequestPattern) -> LoadClients {
        let (count, next) = match ask {
            RequestPattern::Always(count) => (count, Nanos::NEVER),
            RequestPattern::Bursts(count, pause) => (count + STEADY, pause),
        };
        let bio = |_| Bio::read(Sector(0), Sectors(8), Default::default());
        let idle = (0..count).map(bio).collect();
        LoadClients { ask, idle, under_way: 0, burst: (Nanos(0), 0), next, times: Vec::new() }
    }

    /// Puts into `batch` what goes out now, behind what has come back in `done`.
    fn again(&mut self, now: Nanos, done: &mut Batch, batch: &mut Batch) {
        let came_back = done.len();
        self.came_back(done);
        let out = match self.ask {
            RequestPattern::Always(_) => self.idle.len(),
            RequestPattern::Bursts(count, pause) => self.burst(now, came_back, count, pause),
        };
        self.under_way += out;
        batch.extend(self.idle.drain(..out));
        batch.iter_mut().for_each(|bio| bio.start());
    }

    fn came_back(&mut self, done: &mut Batch) {
        self.under_way -= done.len();
        done.iter_mut().for_each(|bio| bio.finish());
        self.idle.append(done);
    }

    /// How many go out.
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
        let steady = STEADY.saturating_sub(self.under_way);
        if now < self.next {
            return steady;
        }
        (self.burst, self.next) = ((now, count), Nanos::NEVER);
        steady + count
    }

    /// Requests a second in bursts.
    fn bursts(&self) -> Option<f64> {
        match self.ask {
            RequestPattern::Always(_) => None,
            RequestPattern::Bursts(count, _) => Some(count as f64 * 1e9 / median(self.times.clone())?),
        }
    }
}
