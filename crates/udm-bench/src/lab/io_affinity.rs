//! `io-affinity`: one path per core, compared with selectors that spread the requests of each core
//! over all paths.

use super::models::paced_path::{PacedPath, PathServiceTime};
use super::outcome::{ExperimentOutcome, RatioVsPublished, ResultTable};
use super::{ExperimentRunOptions, PublishedExperiment, over};
use crate::device_contest::{self, InterleavedDeviceBenchmark, StopCondition};
use crate::page::{Axis, AxisUnit, Bar, BarPlot};
use anyhow::Result;
use std::sync::Arc;
use std::time::Duration;
use udm_core::{Device, Nanos, Sectors};
use udm_runtime::ProcessCores;

pub(super) const EXPERIMENT: PublishedExperiment = PublishedExperiment {
    name: "io-affinity",
    question: "What does one path per core gain over selectors that use all paths?",
    source: "Christie, the io-affinity selector, 2020: one path per CPU, with 90K, 180K and more IOPS",
    run,
};

const DEPTH: usize = 32;
const ROUNDS: usize = 9;
const TIME: Nanos = Nanos(150_000_000);
const LEN: Sectors = Sectors(4 << 21);

/// The rate of a path, its time per request, and the gain of the original.
const PATHS: [(&str, Nanos, f64); 3] = [
    ("90K IOPS per path", Nanos(11_111), 1.035),
    ("180K IOPS per path", Nanos(5_556), 1.25),
    ("unlimited", Nanos(0), 1.5),
];

const SELECTORS: [&str; 3] = ["io-affinity", "round-robin", "queue-length"];

fn run(effort: &ExperimentRunOptions<'_>, outcome: &mut ExperimentOutcome) -> Result<()> {
    let cores = device_contest::get_process_cpu_affinity().len().clamp(1, u32::BITS as usize);
    let mut table = ResultTable::new(
        format!("{cores} cores and paths, depth {DEPTH}: thousand IOPS"),
        std::iter::once("").chain(SELECTORS),
    );
    let axis = Axis::new("io-affinity, relative to the other", AxisUnit::Ratio);
    let mut bars =
        BarPlot::new("Gain of io-affinity", axis, SELECTORS[1..].iter().copied()).reference("the original's");
    for (name, service, original) in PATHS {
        let contest = InterleavedDeviceBenchmark {
            cores: device_contest::pinned_core_options(cores),
            depths: &[DEPTH],
            rounds: effort.rounds(ROUNDS),
            until: StopCondition::Time(TIME),
            len: LEN.0,
        };
        let scores = contest.scores(|core_set| make_io_affinity_devices(core_set, service), effort.stop)?;
        table.row(name, scores.iter().map(|score| score.iops(cores) / 1e3));
        let gain = |other: usize| scores[other].ns / scores[0].ns;
        for (other, selector) in SELECTORS.iter().enumerate().skip(1) {
            outcome.found(
                RatioVsPublished::more(format!("{name}: io-affinity, relative to {selector}"), gain(other))
                    .beside(original),
            );
        }
        bars = bars.group(name, (1..SELECTORS.len()).map(|other| Bar::new(gain(other)).beside(original)));
    }
    outcome.table(table);
    outcome.bars(bars);
    outcome.note(
        "The original gained what the other selectors lost to locks and to requests that changed their CPU. \
         udm's selectors have neither, so if the paths are the limit, the other selectors reach it, too.",
    );
    Ok(())
}

fn make_io_affinity_devices(core_set: &Arc<ProcessCores>, service: Nanos) -> Result<Vec<Arc<dyn Device>>> {
    let paths = core_set.len();
    let device = |selector: &&str| -> Result<Arc<dyn Device>> {
        let disk = |n: usize| -> Arc<dyn Device> {
            Arc::new(PacedPath::new(PathServiceTime::Every(service), Sectors(LEN.0 + 8 * n as u64)))
        };
        let disks: Vec<_> = (0..paths).map(disk).collect();
        let words: Vec<String> = (0..paths)
            .map(|n| match *selector {
                "io-affinity" => format!("253:{n} {:x}", 1u32 << n),
                _ => format!("253:{n}"),
            })
            .collect();
        let own = u8::from(*selector == "io-affinity");
        let table = format!("0 {} multipath 0 0 1 1 {selector} 0 {paths} {own} {}", LEN.0, words.join(" "));
        let turn = || std::thread::sleep(Duration::from_micros(50));
        Ok(over::make_mapped_device_over_disks(&**core_set, paths, &table, &disks, turn)?)
    };
    SELECTORS.iter().map(device).collect()
}
