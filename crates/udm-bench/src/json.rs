//! The report in fio's JSON layout.

use crate::jobs::BenchJob;
use crate::load::{FioLoadOptions, FioRwMode};
use crate::percentiles::PercentileList;
use crate::report::{
    BATCH_NAMES, CLASSES, DEPTH_NAMES, JobOrGroupReport, bandwidth_and_iops, counts_to_percentages,
    latency_shares,
};
use crate::stats::{DirectionStats, JobStats, LatencyStats};
use serde_json::{Map, Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

/// The whole report.
pub fn build_fio_json_report(
    jobs: &[BenchJob],
    device: Option<&str>,
    entries: &[JobOrGroupReport],
    bins: bool,
) -> Value {
    let now = SystemTime::now();
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    json!({
        "fio version": concat!("udm-", env!("CARGO_PKG_VERSION")),
        "timestamp": since.as_secs(),
        "timestamp_ms": since.as_millis() as u64,
        "time": httpdate::fmt_http_date(now),
        "jobs": entries.iter().map(|e| job_report_json(&jobs[e.job].load, device, e, bins)).collect::<Vec<_>>(),
    })
}

fn job_report_json(
    load: &FioLoadOptions,
    device: Option<&str>,
    entry: &JobOrGroupReport,
    bins: bool,
) -> Value {
    let stats = &entry.stats;
    let [read, write, trim] = &stats.directions;
    let u = &stats.usage;
    let ms = stats.runtime.0.div_ceil(1_000_000);
    let syncs = Some(&load.percentile_list).filter(|_| load.clat_percentiles || load.lat_percentiles);
    let mut job = json!({
        "jobname": entry.name,
        "groupid": entry.group,
        "error": entry.failure.as_ref().map_or(0, |f| f.errno),
        "eta": 0,
        "elapsed": ms.div_ceil(1000),
        "job options": fio_job_options_json(load, device),
        "read": direction_stats_json(read, load, bins),
        "write": direction_stats_json(write, load, bins),
        "trim": direction_stats_json(trim, load, bins),
        "sync": { "total_ios": stats.sync.count(), "lat_ns": latency_stats_json(&stats.sync, syncs, bins) },
        "job_runtime": u.of.as_millis() as u64,
        "usr_cpu": u.percent(u.user),
        "sys_cpu": u.percent(u.system),
        "ctx": u.switches,
        "majf": u.major_faults,
        "minf": u.minor_faults,
        "iodepth_level": names_and_values_to_json(&DEPTH_NAMES, counts_to_percentages(&stats.depths)),
        "iodepth_submit": names_and_values_to_json(&BATCH_NAMES, counts_to_percentages(&stats.submits.0)),
        "iodepth_complete": names_and_values_to_json(&BATCH_NAMES, counts_to_percentages(&stats.completes.0)),
        "latency_depth": load.iodepth,
        "latency_target": 0,
        "latency_percentile": 100.0,
        "latency_window": 0,
    });
    if let Value::Object(job) = &mut job {
        insert_latency_buckets_json(job, stats);
    }
    job
}

fn fio_job_options_json(load: &FioLoadOptions, device: Option<&str>) -> Value {
    let mut options = json!({
        "name": load.name,
        "ioengine": "udm",
        "device": device,
        "rw": load.rw.name(),
        "bs": load.block_bytes().to_string(),
        "iodepth": load.iodepth.to_string(),
        "numjobs": load.numjobs.to_string(),
    });
    if let Value::Object(map) = &mut options {
        map.extend(load.rate.iter().map(|rate| ("rate".into(), json!(rate.to_string()))));
        map.extend(load.rate_iops.iter().map(|rate| ("rate_iops".into(), json!(rate.to_string()))));
        if let Some(runtime) = load.runtime() {
            map.insert("runtime".into(), json!(format!("{}ms", runtime.as_millis())));
        }
        if matches!(load.rw, FioRwMode::Rw | FioRwMode::Randrw) {
            map.insert("rwmixread".into(), json!(load.read_percent().to_string()));
        }
        for (name, on) in
            [("time_based", load.time_based), ("norandommap", load.norandommap), ("bare", load.bare)]
        {
            if on {
                map.insert(name.into(), json!("1"));
            }
        }
    }
    options
}

fn direction_stats_json(d: &DirectionStats, load: &FioLoadOptions, bins: bool) -> Value {
    let percentiles = |on: bool| on.then_some(&load.percentile_list);
    let (bytes, ios) = bandwidth_and_iops(d);
    let none = json!({ "min": 0, "max": 0, "mean": 0.0, "stddev": 0.0, "N": 0 });
    let (bw, iops) = (&d.bandwidth, &d.iops);
    json!({
        "io_bytes": d.bytes,
        "io_kbytes": d.bytes / 1024,
        "bw_bytes": bytes as u64,
        "bw": (bytes / 1024.0) as u64,
        "iops": ios,
        "runtime": d.runtime.0.div_ceil(1_000_000),
        "total_ios": d.ios,
        "short_ios": 0,
        "drop_ios": 0,
        "slat_ns": none,
        "clat_ns": latency_stats_json(&d.latency, percentiles(load.clat_percentiles), bins),
        "lat_ns": latency_stats_json(&d.latency, percentiles(load.lat_percentiles), bins),
        "bw_min": bw.min as u64,
        "bw_max": bw.max as u64,
        "bw_agg": if bw.count > 0 { 100.0 } else { 0.0 },
        "bw_mean": bw.mean,
        "bw_dev": bw.stdev(),
        "bw_samples": bw.count,
        "iops_min": iops.min as u64,
        "iops_max": iops.max as u64,
        "iops_mean": iops.mean,
        "iops_stddev": iops.stdev(),
        "iops_samples": iops.count,
    })
}

fn latency_stats_json(l: &LatencyStats, percentiles: Option<&PercentileList>, bins: bool) -> Value {
    let mut value =
        json!({ "min": l.min(), "max": l.max, "mean": l.mean(), "stddev": l.stdev(), "N": l.count() });
    if let Some(percentiles) = percentiles
        && l.count() > 0
        && let Value::Object(map) = &mut value
    {
        let at = |p: &f64| (format!("{p:.6}"), json!(l.histogram.value_at_percentile(*p)));
        map.insert("percentile".into(), Value::Object(percentiles.list.iter().map(at).collect()));
        if bins {
            map.insert("bins".into(), self::latency_bins_json(l));
        }
    }
    value
}

/// The number of requests per latency, in fio's classes.
fn latency_bins_json(l: &LatencyStats) -> Value {
    let mut bins = Map::new();
    for recorded in l.histogram.iter_recorded() {
        let bin = bins
            .entry(fio_latency_bin_midpoint(recorded.value_iterated_to()).to_string())
            .or_insert(json!(0));
        *bin = json!(bin.as_u64().unwrap_or(0) + recorded.count_at_value());
    }
    Value::Object(bins)
}

/// The middle of fio's class of a latency. Each power of two has 64 classes.
fn fio_latency_bin_midpoint(ns: u64) -> u64 {
    match ns {
        0..128 => ns,
        _ => {
            let bits = ns.ilog2() - 6;
            (ns >> bits << bits) + (1 << bits) / 2
        }
    }
}

fn names_and_values_to_json<T: Into<Value>, const N: usize>(names: &[&str; N], values: [T; N]) -> Value {
    Value::Object(names.iter().map(|n| (*n).to_owned()).zip(values.map(Into::into)).collect())
}

fn insert_latency_buckets_json(job: &mut Map<String, Value>, stats: &JobStats) {
    let (shares, second, more) = latency_shares(stats);
    for (unit, shares) in ["latency_ns", "latency_us", "latency_ms"].into_iter().zip(shares) {
        let mut classes: Map<String, Value> =
            CLASSES.iter().zip(shares).map(|(end, share)| (end.to_string(), json!(share))).collect();
        if unit == "latency_ms" {
            classes.insert("2000".into(), json!(second));
            classes.insert(">=2000".into(), json!(more));
        }
        job.insert(unit.into(), Value::Object(classes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Classes of fio 3.33: `plat_idx_to_val(plat_val_to_idx(ns))`.
    #[test]
    fn classes_are_fios() {
        for (ns, class) in [
            (0, 0),
            (127, 127),
            (128, 129),
            (129, 129),
            (130, 131),
            (255, 255),
            (256, 258),
            (1000, 1004),
            (1_000_000, 1_003_520),
        ] {
            assert_eq!(fio_latency_bin_midpoint(ns), class, "{ns}");
        }
    }
}
