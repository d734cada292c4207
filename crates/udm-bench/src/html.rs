//! The report as an HTML page with plots.

use crate::jobs::BenchJob;
use crate::mapped::PathTotals;
use crate::page::{Axis, AxisUnit, Bar, BarPlot, HtmlPage, HtmlPageSection, LinePlot};
use crate::report::{JobOrGroupReport, bandwidth_and_iops};
use crate::stats::{DIRECTIONS, LatencyStats};

/// fio's names of the directions.
const NAMES: [&str; DIRECTIONS] = ["read", "write", "trim"];

/// Percentiles of the latency curve.
const CURVE: [f64; 15] =
    [0.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 97.5, 99.0, 99.5, 99.75, 99.9, 99.95, 99.99, 99.999];

/// Maximum number of lines in one plot.
const LINES_MAX: usize = 16;

/// The whole page. `device` is the device's name on the command line.
pub fn render_html_report(
    jobs: &[BenchJob],
    device: Option<&str>,
    entries: &[JobOrGroupReport],
    paths: &[PathTotals],
) -> String {
    let mut page = HtmlPage::new(format!("udm bench: {}", jobs[0].load.name));
    page.text(device.unwrap_or("The device has no name."));
    for BenchJob { load, .. } in jobs {
        let (name, rw) = (&load.name, load.rw.name());
        let (bs, depth, n) = (load.block_bytes(), load.iodepth, load.numjobs);
        page.text(&format!("{name}: rw={rw}, bs={bs}, iodepth={depth}, numjobs={n}"));
    }
    for failure in entries.iter().filter_map(|e| e.failure.as_ref()) {
        page.text(&format!("Failed: {}", failure.text));
    }
    render_html_summary_section(page.section("Summary"), entries);
    render_html_throughput_section(page.section("Throughput"), entries);
    render_html_latency_section(page.section("Latency"), entries);
    render_html_cores_section(page.section("Cores"), entries);
    if !paths.is_empty() {
        self::render_html_paths_section(page.section("Paths"), paths);
    }
    page.html()
}

fn format_nanos_for_html(ns: u64) -> String {
    Axis::new("", AxisUnit::Nanos).text(ns as f64)
}

fn render_html_summary_section(section: &mut HtmlPageSection, entries: &[JobOrGroupReport]) {
    let number = Axis::new("", AxisUnit::Number);
    let bytes = Axis::new("", AxisUnit::Bytes);
    let mut rows = Vec::new();
    for (i, entry) in entries.iter().enumerate() {
        for (name, d) in NAMES.iter().zip(&entry.stats.directions).filter(|(_, d)| d.ios > 0) {
            let (moved, ios) = bandwidth_and_iops(d);
            let at = |p| format_nanos_for_html(d.latency.histogram.value_at_percentile(p));
            rows.push([
                if entries.len() == 1 {
                    (*name).to_owned()
                } else {
                    format!("{name}, {}", numbered_report_job_name(entry, i))
                },
                d.ios.to_string(),
                number.text(ios),
                format!("{}/s", bytes.text(moved)),
                format_nanos_for_html(d.latency.mean() as u64),
                at(50.0),
                at(99.0),
                at(99.9),
                format_nanos_for_html(d.latency.max),
            ]);
        }
    }
    section.table(&["", "requests", "IOPS", "BW", "mean", "50%", "99%", "99.9%", "longest"], rows);
}

fn numbered_report_job_name(entry: &JobOrGroupReport, i: usize) -> String {
    format!("{} {}", entry.name, i + 1)
}

/// The jobs of all entries, each with its name.
fn job_timelines_of_report(
    entries: &[JobOrGroupReport],
) -> Vec<(String, &crate::timeline::JobBytesMovedTimeline)> {
    let all = entries.iter().flat_map(|e| e.stats.parts.iter().map(move |part| (e, part)));
    all.enumerate().map(|(i, (entry, part))| (numbered_report_job_name(entry, i), part)).collect()
}

fn render_html_throughput_section(section: &mut HtmlPageSection, entries: &[JobOrGroupReport]) {
    let jobs = job_timelines_of_report(entries);
    let mut lines = LinePlot::new(
        "Bytes moved",
        Axis::new("time since the job began", AxisUnit::Seconds),
        Axis::new("bytes per second", AxisUnit::Bytes),
    );
    let mut drawn = 0;
    for (direction, name) in NAMES.iter().enumerate() {
        for (job, part) in jobs.iter().filter(|(_, part)| part.ios[direction] > 0) {
            if drawn < LINES_MAX {
                let title = if jobs.len() == 1 { (*name).to_owned() } else { format!("{name}, {job}") };
                lines = lines.line(title, part.timeline.rates(direction));
            }
            drawn += 1;
        }
    }
    section.plot(&lines);
    if drawn > LINES_MAX {
        section.text(&format!("The first {LINES_MAX} of {drawn} lines."));
    }
}

fn render_html_latency_section(section: &mut HtmlPageSection, entries: &[JobOrGroupReport]) {
    let mut lines = LinePlot::new(
        "Latency by percentile",
        Axis::new("percentile", AxisUnit::Percent).nines(),
        Axis::new("latency", AxisUnit::Nanos).log(),
    );
    let mut bars = BarPlot::new(
        "Distribution of latencies",
        Axis::new("share of requests", AxisUnit::Percent).log(),
        NAMES
            .iter()
            .enumerate()
            .filter(|(i, _)| has_requests_in_direction(entries, *i))
            .map(|(_, name)| *name),
    );
    let all: Vec<(&str, LatencyStats)> = (0..DIRECTIONS)
        .filter(|i| has_requests_in_direction(entries, *i))
        .map(|i| {
            let mut sum = entries[0].stats.directions[i].latency.clone();
            entries[1..].iter().for_each(|e| sum.add(&e.stats.directions[i].latency));
            (NAMES[i], sum)
        })
        .collect();
    for (name, latency) in &all {
        // A percentile is known only if at least one request is above it.
        let known = CURVE.into_iter().filter(|p| (1.0 - p / 100.0) * latency.count() as f64 >= 1.0);
        let at = |p| (p, latency.histogram.value_at_percentile(p) as f64);
        lines = lines.line(*name, known.map(at));
    }
    section.plot(&lines);
    let (shortest, longest) = (
        all.iter().map(|(_, l)| l.min()).min().unwrap_or(0).max(1),
        all.iter().map(|(_, l)| l.max).max().unwrap_or(0).max(1),
    );
    for power in shortest.ilog2()..=longest.ilog2() {
        let (from, to) = (1u64 << power, (2u64 << power) - 1);
        let share =
            |l: &LatencyStats| 100.0 * l.histogram.count_between(from, to) as f64 / l.count().max(1) as f64;
        bars = bars.group(
            format!("up to {}", format_nanos_for_html(2u64 << power)),
            all.iter().map(|(_, l)| Bar::new(share(l))),
        );
    }
    section.plot(&bars);
}

fn has_requests_in_direction(entries: &[JobOrGroupReport], direction: usize) -> bool {
    entries.iter().any(|e| e.stats.directions[direction].ios > 0)
}

fn render_html_cores_section(section: &mut HtmlPageSection, entries: &[JobOrGroupReport]) {
    let used: Vec<usize> = (0..DIRECTIONS).filter(|i| has_requests_in_direction(entries, *i)).collect();
    let names = used.iter().map(|i| NAMES[*i]);
    let mut bars = BarPlot::new("Requests per second, by job", Axis::new("IOPS", AxisUnit::Number), names);
    for (job, part) in job_timelines_of_report(entries) {
        let seconds = part.runtime.0.max(1) as f64 / 1e9;
        bars = bars.group(job, used.iter().map(|i| Bar::new(part.ios[*i] as f64 / seconds)));
    }
    section.text("Each job is a thread that runs as a core of udm.");
    section.plot(&bars);
    let rows = entries.iter().enumerate().map(|(i, entry)| {
        let u = &entry.stats.usage;
        let ios: u64 = entry.stats.directions.iter().map(|d| d.ios).sum();
        [
            numbered_report_job_name(entry, i),
            entry.jobs.to_string(),
            format!("{:.1}%", u.percent(u.user)),
            format!("{:.1}%", u.percent(u.system)),
            u.switches.to_string(),
            format!("{:.3}", 1e6 * u.switches as f64 / ios.max(1) as f64),
        ]
    });
    section.table(&["", "jobs", "usr", "sys", "ctx", "ctx per million requests"], rows);
}

fn render_html_paths_section(section: &mut HtmlPageSection, paths: &[PathTotals]) {
    let mut lines = LinePlot::new(
        "Bytes moved, by path",
        Axis::new("time since the table was loaded", AxisUnit::Seconds),
        Axis::new("bytes per second", AxisUnit::Bytes),
    );
    let watched: Vec<_> = paths.iter().filter(|path| !path.rates.is_empty()).collect();
    for path in watched.iter().take(LINES_MAX) {
        lines = lines.line(&path.name, path.rates.iter().copied());
    }
    if !watched.is_empty() {
        section.plot(&lines);
    }
    if watched.len() > LINES_MAX {
        section.text(&format!("The first {LINES_MAX} of {} lines.", watched.len()));
    }
    let mut bars = BarPlot::new(
        "Requests, by path",
        Axis::new("requests since the table was loaded", AxisUnit::Number),
        ["requests"],
    );
    for path in paths {
        bars = bars.group(&path.name, [Bar::new(path.requests as f64)]);
    }
    section.plot(&bars);
    let bytes = Axis::new("", AxisUnit::Bytes);
    let rows = paths.iter().map(|path| {
        let PathTotals { name, state, requests, moved, errors, .. } = path;
        [name.clone(), state.clone(), requests.to_string(), bytes.text(*moved as f64), errors.to_string()]
    });
    section.table(&["path", "state", "requests", "moved", "errors"], rows);
}
