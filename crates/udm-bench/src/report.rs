//! The report: fio's summary, line for line, so that parsers of fio's output can read it.
//!
//! One difference: there are no separate values for `slat` and `lat`. With one clock reading per
//! turn, the time in `submit` cannot be separated. So `clat` is the whole latency, and `lat`
//! repeats it.

use crate::job::JobFailure;
use crate::job::JobOutcome;
use crate::jobs::BenchJob;
use crate::load::FioLoadOptions;
use crate::mapped::PathTotals;
use crate::percentiles::PercentileList;
use crate::stats::{BatchSizeCounts, DirectionStats, IntervalRateStats, JobStats, LatencyStats};
use crate::units::{format_fio_bandwidth, format_with_binary_prefix, format_with_decimal_prefix, time_unit};
use crate::{html, json};
use std::fmt::Write;
use std::time::SystemTime;

/// Upper ends of the classes of the `lat (nsec)`, `(usec)` and `(msec)` lines, in the unit.
pub const CLASSES: [u64; 10] = [2, 4, 10, 20, 50, 100, 250, 500, 750, 1000];

/// Names of the classes of the `submit` and `complete` lines.
pub const BATCH_NAMES: [&str; 7] = ["0", "4", "8", "16", "32", "64", ">=64"];
/// Names of the classes of the `IO depths` line.
pub const DEPTH_NAMES: [&str; 7] = ["1", "2", "4", "8", "16", "32", ">=64"];

/// One job, or all jobs of a group with `group_reporting`.
pub struct JobOrGroupReport {
    pub name: String,
    /// Index of the job in the report.
    pub job: usize,
    pub group: usize,
    pub jobs: usize,
    pub thread: i32,
    pub stats: JobStats,
    pub failure: Option<JobFailure>,
}

/// The result of a measurement.
pub struct BenchReport {
    pub(crate) jobs: Vec<BenchJob>,
    /// One entry per thread; one per group with `group_reporting`.
    pub(crate) entries: Vec<JobOrGroupReport>,
}

impl BenchReport {
    /// Builds the report from the outcomes of threads. Each outcome comes with the index of its
    /// job.
    pub(crate) fn new(jobs: &[BenchJob], outcomes: impl Iterator<Item = (usize, JobOutcome)>) -> BenchReport {
        let mut entries: Vec<JobOrGroupReport> = Vec::new();
        for (job, JobOutcome { stats, failure, thread }) in outcomes {
            let BenchJob { load, group, .. } = &jobs[job];
            match entries.last_mut() {
                Some(all) if load.group_reporting && all.group == *group => {
                    all.jobs += 1;
                    all.stats.add(&stats);
                    all.failure = all.failure.take().or(failure);
                }
                _ => {
                    let (name, group) = (load.name.clone(), *group);
                    entries.push(JobOrGroupReport { name, job, group, jobs: 1, thread, stats, failure });
                }
            }
        }
        BenchReport { jobs: jobs.to_vec(), entries }
    }

    /// The report as text.
    #[must_use]
    pub fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a string can't fail.
        let _ = write_fio_text_report(&mut out, &self.jobs, &self.entries);
        out
    }

    /// The report in fio's JSON layout. With `bins`, it has fio's `json+` layout, which adds the
    /// number of requests per latency. `device` is the device's name on the command line.
    #[must_use]
    pub fn json(&self, device: Option<&str>, bins: bool) -> serde_json::Value {
        json::build_fio_json_report(&self.jobs, device, &self.entries, bins)
    }

    /// The report as an HTML page with plots. `paths` are the paths of the device.
    #[must_use]
    pub fn html(&self, device: Option<&str>, paths: &[PathTotals]) -> String {
        html::render_html_report(&self.jobs, device, &self.entries, paths)
    }

    /// The first request that failed: the name of its job, and the error.
    #[must_use]
    pub fn failure(&self) -> Option<(&str, &str)> {
        self.entries.iter().find_map(|e| Some((e.name.as_str(), e.failure.as_ref()?.text.as_str())))
    }
}

fn write_fio_text_report(
    out: &mut String,
    jobs: &[BenchJob],
    entries: &[JobOrGroupReport],
) -> std::fmt::Result {
    for BenchJob { load, group, .. } in jobs {
        let [r, w, t] = [0, 1, 2].map(|direction| {
            let bs = format_with_binary_prefix(load.bs_of(direction) as f64, 4);
            format!("{bs}B-{bs}B")
        });
        write!(out, "{}: (g={group}): rw={}, bs=(R) {r}, (W) {w}, (T) {t}, ", load.name, load.rw.name())?;
        writeln!(out, "ioengine=udm, iodepth={}", load.iodepth)?;
    }
    writeln!(out, "udm-{}", env!("CARGO_PKG_VERSION"))?;
    let threads: u32 = jobs.iter().map(|job| u32::from(job.load.numjobs)).sum();
    let s = if threads == 1 { "" } else { "s" };
    writeln!(out, "Starting {threads} thread{s}")?;
    for entry in entries {
        writeln!(out)?;
        write_job_or_group_report(out, &jobs[entry.job].load, entry)?;
    }
    for group in 0..=jobs.iter().map(|job| job.group).max().unwrap_or(0) {
        writeln!(out, "\nRun status group {group} (all jobs):")?;
        for (i, name) in ["READ", "WRITE", "TRIM"].iter().enumerate() {
            group_line(out, name, i, entries.iter().filter(|e| e.group == group))?;
        }
    }
    Ok(())
}

fn write_job_or_group_report(
    out: &mut String,
    load: &FioLoadOptions,
    entry: &JobOrGroupReport,
) -> std::fmt::Result {
    let JobOrGroupReport { name, group, jobs, thread, stats, failure, .. } = entry;
    let errno = failure.as_ref().map_or(0, |f| f.errno);
    let date = httpdate::fmt_http_date(SystemTime::now());
    write!(out, "{name}: (groupid={group}, jobs={jobs}): err={errno:2}")?;
    if let Some(failure) = failure {
        write!(out, " ({})", failure.text)?;
    }
    writeln!(out, ": pid={thread}: {date}")?;
    for (name, direction) in ["read", "write", "trim"].iter().zip(&stats.directions) {
        if direction.ios > 0 {
            direction_lines(out, name, direction, load)?;
        }
    }
    write_latency_bucket_lines(out, stats)?;
    if stats.sync.count() > 0 {
        writeln!(out, "  fsync/fdatasync/sync_file_range:")?;
        latency_line(out, "    sync", &stats.sync)?;
        percentile_lines(out, "sync", &stats.sync, &load.percentile_list)?;
    }
    let u = &stats.usage;
    let (user, system) = (u.percent(u.user), u.percent(u.system));
    write!(out, "  cpu          : usr={user:3.2}%, sys={system:3.2}%, ctx={}, ", u.switches)?;
    writeln!(out, "majf={}, minf={}", u.major_faults, u.minor_faults)?;
    write_percentages_line(out, "  IO depths    ", &DEPTH_NAMES, &stats.depths)?;
    write_batch_size_percentages(out, "     submit    ", &stats.submits)?;
    write_batch_size_percentages(out, "     complete  ", &stats.completes)?;
    let [r, w, t] = &stats.directions;
    writeln!(
        out,
        "     issued rwts: total={},{},{},{} short=0,0,0,0 dropped=0,0,0,0",
        r.ios,
        w.ios,
        t.ios,
        stats.sync.count()
    )?;
    writeln!(out, "     latency   : target=0, window=0, percentile=100.00%, depth={}", load.iodepth)
}

/// Bytes per second and requests per second.
pub fn bandwidth_and_iops(direction: &DirectionStats) -> (f64, f64) {
    let seconds = direction.runtime.0 as f64 / 1e9;
    if seconds == 0.0 {
        return (0.0, 0.0);
    }
    (direction.bytes as f64 / seconds, direction.ios as f64 / seconds)
}

fn direction_lines(
    out: &mut String,
    name: &str,
    d: &DirectionStats,
    load: &FioLoadOptions,
) -> std::fmt::Result {
    let (bytes, ios) = bandwidth_and_iops(d);
    let moved = format_with_binary_prefix(d.bytes as f64, 4);
    let ms = d.runtime.0.div_ceil(1_000_000);
    write!(
        out,
        "  {name}: IOPS={}, BW={}({moved}B/{ms}msec)",
        format_with_decimal_prefix(ios, 4),
        format_fio_bandwidth(bytes)
    )?;
    writeln!(out, "{}", if name == "write" { "; 0 zone resets" } else { "" })?;
    latency_line(out, "    clat", &d.latency)?;
    latency_line(out, "     lat", &d.latency)?;
    for (name, _) in [("clat", load.clat_percentiles), ("lat", load.lat_percentiles)].iter().filter(|p| p.1) {
        percentile_lines(out, name, &d.latency, &load.percentile_list)?;
    }
    if d.bandwidth.count > 0 {
        let (unit, scale) = if d.bandwidth.max > 99_999.0 { ("MiB/s", 1024.0) } else { ("KiB/s", 1.0) };
        write_interval_rate_line(out, &format!("bw (  {unit})"), &d.bandwidth, scale, "per=100.00%, ")?;
        write_interval_rate_line(out, "iops        ", &d.iops, 1.0, "")?;
    }
    Ok(())
}

fn write_interval_rate_line(
    out: &mut String,
    name: &str,
    s: &IntervalRateStats,
    scale: f64,
    per: &str,
) -> std::fmt::Result {
    let (min, max) = ((s.min / scale) as u64, (s.max / scale) as u64);
    write!(out, "   {name}: min={min:5}, max={max:5}, {per}")?;
    let (avg, dev) = (s.mean / scale, s.stdev() / scale);
    writeln!(out, "avg={avg:5.02}, stdev={dev:5.02}, samples={}", s.count)
}

fn latency_line(out: &mut String, name: &str, l: &LatencyStats) -> std::fmt::Result {
    let (unit, ns) = time_unit(l.min(), l.max);
    let scale = ns as f64;
    let (min, max) = (
        format_with_decimal_prefix((l.min() / ns) as f64, 6),
        format_with_decimal_prefix((l.max / ns) as f64, 6),
    );
    writeln!(
        out,
        "{name} ({unit}): min={min}, max={max}, avg={:5.02}, stdev={:5.02}",
        l.mean() / scale,
        l.stdev() / scale
    )
}

fn percentile_lines(out: &mut String, name: &str, l: &LatencyStats, of: &PercentileList) -> std::fmt::Result {
    let PercentileList { list, digits } = of;
    let all: Vec<_> = list.iter().map(|p| (p, l.histogram.value_at_percentile(*p))).collect();
    let (Some((_, first)), Some((_, last))) = (all.first(), all.last()) else { return Ok(()) };
    let (unit, ns) = time_unit(*first, *last);
    writeln!(out, "    {name} percentiles ({unit}):")?;
    let (width, longest) = (digits + 3, last / ns);
    let digits_of_time = longest.checked_ilog10().map_or(1, |power| power as usize + 1).max(5);
    let word = |(p, value): &(&f64, u64)| {
        let time = value / ns;
        format!(" {p:width$.digits$}th=[{time:digits_of_time$}]")
    };
    let words: Vec<_> = all.iter().map(word).collect();
    // As many per line as in fio.
    let lines = words.chunks((73 / (digits + 10 + digits_of_time)).max(1));
    let lines: Vec<_> = lines.map(|line| format!("     |{}", line.join(","))).collect();
    writeln!(out, "{}", lines.join(",\n"))
}

/// Percentages of all requests by latency: per unit and class, up to two seconds, and above.
pub fn latency_shares(stats: &JobStats) -> ([[f64; 10]; 3], f64, f64) {
    let total: u64 = stats.directions.iter().map(|d| d.latency.count()).sum();
    let up_to = |ns: u64| -> u64 {
        let below =
            |d: &DirectionStats| if ns == 0 { 0 } else { d.latency.histogram.count_between(0, ns - 1) };
        stats.directions.iter().map(below).sum()
    };
    let percent = |n: u64| if total == 0 { 0.0 } else { 100.0 * n as f64 / total as f64 };
    let mut shares = [[0.0; 10]; 3];
    let mut below = 0;
    for (unit, ns) in [1, 1000, 1_000_000].into_iter().enumerate() {
        for (class, end) in CLASSES.into_iter().enumerate() {
            let now = up_to(end * ns);
            shares[unit][class] = percent(now - below);
            below = now;
        }
    }
    let two_seconds = up_to(2_000_000_000);
    (shares, percent(two_seconds - below), percent(total - two_seconds))
}

fn write_latency_bucket_lines(out: &mut String, stats: &JobStats) -> std::fmt::Result {
    let (shares, second, more) = latency_shares(stats);
    for (unit, shares) in ["nsec", "usec", "msec"].iter().zip(shares) {
        let mut classes: Vec<(String, f64)> =
            CLASSES.iter().zip(shares).map(|(end, share)| (end.to_string(), share)).collect();
        if *unit == "msec" {
            classes.push(("2000".into(), second));
            classes.push((">=2000".into(), more));
        }
        classes.retain(|(_, share)| *share > 0.0);
        for line in classes.chunks(5) {
            // As in fio, a share that would print as 0.00 prints as 0.01.
            let line: Vec<_> =
                line.iter().map(|(end, share)| format!("{end}={:3.2}%", share.max(0.01))).collect();
            writeln!(out, "  lat ({unit})   : {}", line.join(", "))?;
        }
    }
    Ok(())
}

/// Counts as percentages of their sum.
pub fn counts_to_percentages(counts: &[u64; 7]) -> [f64; 7] {
    let total: u64 = counts.iter().sum();
    counts.map(|n| if total == 0 { 0.0 } else { 100.0 * n as f64 / total as f64 })
}

fn write_batch_size_percentages(out: &mut String, title: &str, sizes: &BatchSizeCounts) -> std::fmt::Result {
    write_percentages_line(out, title, &BATCH_NAMES, &sizes.0)
}

fn write_percentages_line(
    out: &mut String,
    title: &str,
    names: &[&str; 7],
    counts: &[u64; 7],
) -> std::fmt::Result {
    let all: Vec<_> =
        names.iter().zip(counts_to_percentages(counts)).map(|(n, p)| format!("{n}={p:3.1}%")).collect();
    writeln!(out, "{title}: {}", all.join(", "))
}

fn group_line<'a>(
    out: &mut String,
    name: &str,
    direction: usize,
    entries: impl Iterator<Item = &'a JobOrGroupReport>,
) -> std::fmt::Result {
    let all: Vec<&DirectionStats> =
        entries.map(|e| &e.stats.directions[direction]).filter(|d| d.ios > 0).collect();
    let times = || all.iter().map(|d| d.runtime.0.div_ceil(1_000_000));
    let speeds = || all.iter().map(|d| bandwidth_and_iops(d).0);
    let (Some(shortest), Some(longest)) = (times().min(), times().max()) else { return Ok(()) };
    let bytes: u64 = all.iter().map(|d| d.bytes).sum();
    let nanos = all.iter().map(|d| d.runtime.0).max().unwrap_or(1).max(1);
    let total = bytes as f64 * 1e9 / nanos as f64;
    let (slowest, fastest) = (speeds().fold(f64::INFINITY, f64::min), speeds().fold(0.0, f64::max));
    let range = |f: fn(f64, usize) -> String| format!("{}B/s-{}B/s", f(slowest, 4), f(fastest, 4));
    write!(
        out,
        "{name:>7}: bw={}, {} ({}), ",
        format_fio_bandwidth(total),
        range(format_with_binary_prefix),
        range(format_with_decimal_prefix)
    )?;
    let (moved, decimals) =
        (format_with_binary_prefix(bytes as f64, 4), format_with_decimal_prefix(bytes as f64, 4));
    writeln!(out, "io={moved}B ({decimals}B), run={shortest}-{longest}msec")
}
