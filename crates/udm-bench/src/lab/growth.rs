//! `growth`: the cost of one more path, table line or stacked device.

use super::outcome::{ExperimentOutcome, RatioVsPublished, ResultTable, format_ratio};
use super::{ExperimentRunOptions, PublishedExperiment};
use crate::compare::{LEN, multipath_table_line, nth_null_device_uri};
use crate::device_contest::{self, InterleavedDeviceBenchmark, StopCondition};
use crate::mapped::{NamedTable, make_mapped_devices};
use crate::page::{Axis, AxisUnit, LinePlot};
use anyhow::Result;

pub(super) const EXPERIMENT: PublishedExperiment = PublishedExperiment {
    name: "growth",
    question: "What does one more path, table line or stacked device cost?",
    source: "udm's own aim: costs grow as they should",
    run,
};

const DEPTH: usize = 32;
const ROUNDS: usize = 15;
const REQUESTS: u64 = 20_000;

const PATHS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const SELECTORS: [&str; 4] = ["round-robin", "queue-length", "service-time", "historical-service-time"];
const LINES: [usize; 5] = [1, 10, 100, 1_000, 10_000];
const LAYERS: [usize; 5] = [1, 2, 4, 8, 16];

/// Sectors of a line, so that ten thousand lines fit.
const LINE: u64 = 256;

fn run(effort: &ExperimentRunOptions<'_>, outcome: &mut ExperimentOutcome) -> Result<()> {
    measure_cost_per_path(effort, outcome)?;
    measure_cost_per_table_line(effort, outcome)?;
    measure_cost_per_stacked_device(effort, outcome)
}

fn measure_cost_per_path(effort: &ExperimentRunOptions<'_>, outcome: &mut ExperimentOutcome) -> Result<()> {
    let heads = ["".to_owned()].into_iter().chain(PATHS.map(|n| n.to_string()));
    let mut table = ResultTable::new("ns per request added to the raw device, by paths", heads);
    let mut plot = new_added_latency_plot("Paths", "paths");
    for selector in SELECTORS {
        let tables = PATHS.map(|n| vec![multipath_table_line(selector, n, 1)]);
        let added_latency = measure_stack_added_latency(effort, tables.to_vec(), LEN)?;
        let points: Vec<(f64, f64)> = PATHS.iter().map(|&n| n as f64).zip(added_latency).collect();
        table.row(selector, points.iter().map(|(_, ns)| *ns));
        let (slope, _) = fit_least_squares_line(&points);
        outcome.found(RatioVsPublished::less(format!("{selector}: ns per additional path"), slope));
        plot = plot.line(format!("{selector}: {} ns per path", format_ratio(slope)), points);
    }
    outcome.table(table);
    outcome.lines(plot);
    Ok(())
}

fn measure_cost_per_table_line(
    effort: &ExperimentRunOptions<'_>,
    outcome: &mut ExperimentOutcome,
) -> Result<()> {
    let table = |n: usize| {
        let line = |i: u64| {
            format!("{} {LINE} linear {} {}", i * LINE, nth_null_device_uri((i % 2) as usize), (i / 2) * LINE)
        };
        vec![(0..n as u64).map(line).collect::<Vec<_>>().join("\n")]
    };
    let mut points = Vec::new();
    for n in LINES {
        let added_latency = measure_stack_added_latency(effort, vec![table(n)], n as u64 * LINE)?;
        points.extend(added_latency.into_iter().map(|ns| (n as f64, ns)));
    }
    let doublings: Vec<(f64, f64)> = points.iter().map(|(n, ns)| (n.log2(), *ns)).collect();
    let (slope, _) = fit_least_squares_line(&doublings);
    let mut grid = ResultTable::new("lines of a table", ["", "ns per request added to the raw device"]);
    points.iter().for_each(|(n, ns)| grid.row(format!("{n}"), [*ns]));
    outcome.table(grid);
    outcome.found(RatioVsPublished::less("linear: ns per doubling of the lines", slope));
    let name = format!("linear: {} ns per doubling", format_ratio(slope));
    outcome.lines(new_added_latency_plot("Lines of a table", "lines").line(name, points));
    Ok(())
}

fn measure_cost_per_stacked_device(
    effort: &ExperimentRunOptions<'_>,
    outcome: &mut ExperimentOutcome,
) -> Result<()> {
    let stack = |n: usize| {
        let below = |i: usize| {
            if i == 0 { nth_null_device_uri(0) } else { format!("@{}", stacked_device_name(i - 1)) }
        };
        (0..n).map(|i| format!("0 {LEN} linear {} 0", below(i))).collect::<Vec<_>>()
    };
    let mut points = Vec::new();
    for n in LAYERS {
        let added_latency = measure_stack_added_latency(effort, vec![stack(n)], LEN)?;
        points.extend(added_latency.into_iter().map(|ns| (n as f64, ns)));
    }
    let (slope, _) = fit_least_squares_line(&points);
    let mut grid = ResultTable::new("stacked linear devices", ["", "ns per request added to the raw device"]);
    points.iter().for_each(|(n, ns)| grid.row(format!("{n}"), [*ns]));
    outcome.table(grid);
    outcome.found(RatioVsPublished::less("linear: ns per additional device", slope));
    let name = format!("linear: {} ns per device", format_ratio(slope));
    outcome.lines(new_added_latency_plot("Stacked devices", "devices").line(name, points));
    Ok(())
}

fn new_added_latency_plot(title: &str, what: &str) -> LinePlot {
    LinePlot::new(
        title,
        Axis::new(what, AxisUnit::Number).log(),
        Axis::new("time added to the raw device", AxisUnit::Nanos),
    )
}

fn stacked_device_name(number: usize) -> String {
    format!("d{number}")
}

/// The time in ns that the last device of each of `stacks` adds to a request of the raw device. A
/// table may refer to earlier devices of its stack as `@d0` and so on.
fn measure_stack_added_latency(
    effort: &ExperimentRunOptions<'_>,
    stacks: Vec<Vec<String>>,
    len: u64,
) -> Result<Vec<f64>> {
    let contest = InterleavedDeviceBenchmark {
        cores: device_contest::pinned_core_options(1),
        depths: &[DEPTH],
        rounds: effort.rounds(ROUNDS),
        until: StopCondition::Requests(effort.requests(REQUESTS)),
        len,
    };
    let scores = contest.scores(
        |core_set| {
            let raw = udm_backends::open_standalone_device(&udm_wire::uri::parse_device_uri(
                &nth_null_device_uri(0),
            )?)?;
            let mut devices = vec![raw as std::sync::Arc<dyn udm_core::Device>];
            for stack in stacks {
                let tables: Vec<NamedTable> = (0..)
                    .zip(stack)
                    .map(|(i, text)| NamedTable { name: stacked_device_name(i), text })
                    .collect();
                devices.extend(make_mapped_devices(core_set, &tables)?.pop());
            }
            Ok(devices)
        },
        effort.stop,
    )?;
    Ok(scores[1..].iter().map(|score| score.ns - scores[0].ns).collect())
}

/// The straight line through `points` by least squares: its slope, and its value at 0.
fn fit_least_squares_line(points: &[(f64, f64)]) -> (f64, f64) {
    let n = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let along: f64 = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum();
    let across: f64 = points.iter().map(|p| (p.0 - x).powi(2)).sum();
    (along / across, y - along / across * x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_straight_line() {
        let (rise, begin) = fit_least_squares_line(&[(1.0, 5.0), (2.0, 7.0), (4.0, 11.0)]);
        assert!((rise - 2.0).abs() < 1e-9 && (begin - 3.0).abs() < 1e-9);
    }
}
