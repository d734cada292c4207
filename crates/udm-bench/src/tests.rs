//! Tests of the bench as a whole, on real devices. Reports are compared with recordings of fio 3.33
//! (`tests/data`).

mod bounds;

use crate::job::JobOutcome;
use crate::report::{BenchReport, JobOrGroupReport};
use crate::stats::JobStats;
use crate::{
    BenchJob, DmLayerComparisonOptions, FioLoadOptions, LoadMeasurementPlan, MappedDevices, NamedTable,
    PathSampler, SnapshotCostOptions, WAY_OUT, compare_dm_layers, make_mapped_devices,
    measure_snapshot_costs,
};
use anyhow::Result;
use clap::Parser;
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use udm_core::errno::EIO;
use udm_core::{Limits, Nanos, Sectors};
use udm_wire::uri;

/// A load and its device: a URI, or `d=` and a table.
#[derive(Parser)]
struct LoadLine {
    #[arg(long)]
    device: String,
    #[command(flatten)]
    load: FioLoadOptions,
}

fn line(text: &str) -> LoadLine {
    LoadLine::try_parse_from(std::iter::once("bench").chain(text.split_whitespace())).unwrap()
}

fn with_table(table: &str, text: &str) -> LoadLine {
    LoadLine { device: table.into(), ..line(&format!("--device mem:1M {text}")) }
}

fn measure(line: &LoadLine) -> Result<Vec<JobOrGroupReport>> {
    let stop = AtomicBool::new(false);
    let run = LoadMeasurementPlan { load: &line.load, progress: None, stop: &stop };
    let report = run.measure(|core_set| match line.device.strip_prefix("d=") {
        Some(text) => {
            let table = NamedTable { name: "d".into(), text: text.into() };
            Ok(make_mapped_devices(core_set, &[table])?.remove(0))
        }
        None => Ok(udm_backends::open_standalone_device(&uri::parse_device_uri(&line.device)?)?),
    })?;
    Ok(report.entries)
}

fn error(line: &LoadLine) -> String {
    format!("{:#}", measure(line).err().expect("this must fail"))
}

fn one(line: &LoadLine) -> JobOrGroupReport {
    let mut entries = measure(line).unwrap();
    assert_eq!(entries.len(), 1);
    entries.pop().unwrap()
}

fn ios(entry: &JobOrGroupReport) -> [u64; 3] {
    entry.stats.directions.each_ref().map(|d| d.ios)
}

#[test]
fn each_block_once() {
    let entry = one(&line("--device null:size=4M --rw randread --iodepth 7 --bare"));
    assert_eq!((ios(&entry), entry.failure), ([1024, 0, 0], None));
    let entry = one(&line("--device null:size=4M --rw write --bs 64k --number_ios 10 --bare"));
    assert_eq!((ios(&entry), entry.stats.directions[1].bytes), ([0, 10, 0], 640 << 10));
    let entry = one(&line("--device null:size=4M --rw write --bs 4k,16k --bare"));
    assert_eq!((ios(&entry), entry.failure), ([0, 256, 0], None), "the length of writes");
}

/// As in fio, a load that ends during its ramp is reported.
#[test]
fn a_load_that_is_through_before_the_ramp_is_reported() {
    let entry = one(&line("--device null:size=1M --rw read --ramp_time 60 --bare"));
    assert_eq!(ios(&entry), [256, 0, 0]);
    assert!(entry.stats.directions[0].runtime > Nanos(0));
}

#[test]
fn what_was_written_is_read_back() {
    for load in ["write", "randwrite", "randwrite --norandommap"] {
        let entry = one(&line(&format!("--device mem:1M --rw {load} --iodepth 8 --verify crc32c")));
        assert_eq!((ios(&entry), entry.failure), ([256, 256, 0], None), "{load}");
    }
    let text = "--device mem:1M --rw randrw --rwmixread 30 --numjobs 3 --group_reporting --verify crc32c";
    let entry = one(&line(text));
    let [reads, writes, _] = ios(&entry);
    assert_eq!(
        (reads, entry.jobs, entry.failure),
        (255, 3, None),
        "each job has a third, reads and reads back"
    );
    assert!((100..255).contains(&writes));
}

/// A device that loses writes is detected.
#[test]
fn lost_writes_are_found() {
    let entry = one(&line("--device null:size=1M --rw write --verify crc32c"));
    let failure = entry.failure.unwrap();
    assert_eq!((failure.errno, &failure.text[..24]), (84, "verify: bad magic header"));
    // The two halves of the device are the same memory, so the second one overwrites the first.
    let folded =
        with_table("d=0 1024 linear mem:512K 0\n1024 1024 linear mem:512K 0", "--rw write --verify crc32c");
    let failure = one(&folded).failure.unwrap();
    assert!(failure.text.contains("the block of offset 524288 at offset 0"), "{}", failure.text);
}

#[test]
fn a_second_run_checks_what_the_first_has_written() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let run = |load: &str| {
        let text = format!("--device {} --rw {load} --iodepth 4 --verify crc32c", file.path().display());
        one(&line(&text)).failure.map(|f| f.text)
    };
    assert_eq!(run("randwrite --fsync 50"), None);
    assert_eq!(run("read"), None);
    std::os::unix::fs::FileExt::write_all_at(file.as_file(), b"x", 4096 * 7 + 100).unwrap();
    assert!(run("randread").unwrap().contains("bad crc32c"));
}

#[test]
fn errors_end_the_job() {
    let entry = one(&with_table("d=0 2048 error", "--rw randread"));
    let failure = entry.failure.unwrap();
    assert_eq!(failure.errno, EIO);
    assert!(failure.text.starts_with("Read of 4096 bytes at "), "{}", failure.text);
}

#[test]
fn flushes_come_between_writes() {
    let entry = one(&line("--device mem:1M --rw randwrite --iodepth 16 --fsync 10"));
    assert_eq!((ios(&entry), entry.stats.sync.count()), ([0, 256, 0], 25));
}

#[test]
fn time_limits_hold() {
    let entry =
        one(&line("--device null:size=1M --rw randread --runtime 50ms --time_based --ramp_time 20ms --bare"));
    assert!(ios(&entry)[0] > 256, "the region is gone over again");
    assert!(entry.stats.runtime >= Nanos::from_millis(50));
    let entry =
        one(&line("--device null:size=1M,irqmode=2,completion_nsec=100000 --rw read --number_ios 20"));
    assert!(entry.stats.directions[0].latency.min() >= 100_000, "completions by the timer are waited for");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let mem = |text: &str| error(&line(&format!("--device mem:1M {text}")));
    assert_eq!(mem("--bs 1000"), "bench: bs=1000: not a multiple of 512");
    assert_eq!(mem("--bs 2M"), "bench: bs=2097152: larger than the available part of the device");
    assert_eq!(mem("--size 2M"), "bench: size=2097152: the device has 1048576");
    assert_eq!(mem("--offset 1M"), "bench: offset=1048576: the device has 1048576");
    assert_eq!(mem("--offset 512k --size 1M"), "bench: size=1048576: the device has 524288");
    assert_eq!(mem("--time_based"), "bench: time_based needs runtime");
    assert_eq!(mem("--rw trim --verify crc32c"), "bench: verify: a trim carries no data");
    assert!(mem("--bs 1M --iodepth 65536").contains("more than"));
    assert_eq!(mem("--bs 2g"), "bench: bs=2147483648: more than 1073741824");
    assert_eq!(
        mem("--rw rw --bs 4k,8k"),
        format!("bench: bs=4k,8k: reads and writes of one job have one length. {WAY_OUT}")
    );
    let other = |device: &str, text: &str| error(&line(&format!("--device {device} {text}")));
    assert_eq!(other("pattern:1M", "--rw write"), "bench: the device is read-only");
    assert_eq!(other("null:size=1M", "--rw trim"), "bench: the device takes no Discard");
    assert_eq!(
        other("null:size=1M,bs=4k", "--bs 512"),
        "bench: bs=512: not a multiple of the device's block of 4096"
    );
    assert_eq!(error(&with_table("d=0 8 nosuch", "")).lines().last(), Some("    ^^^^^^"));
}

#[test]
fn jobs_share_the_device_when_they_verify() {
    let limits = Limits::new(Sectors(2048));
    let all = line("--device mem:1M --numjobs 3").load.regions(&limits).unwrap();
    assert!(all.iter().all(|r| (r.first, r.blocks) == (0, 256)));
    let own = line("--device mem:1M --numjobs 3 --verify crc32c").load.regions(&limits).unwrap();
    assert_eq!(own.iter().map(|r| (r.first, r.blocks)).collect::<Vec<_>>(), [(0, 85), (85, 85), (170, 85)]);
}

/// Each request takes 50 ms, and the rate is one per 10 ms. The tenth request is due at 90 ms, is
/// sent at 450 ms and completes at 500 ms. Its latency includes the delay.
#[test]
fn a_slow_device_hides_nothing_from_a_rate() {
    let device = "--device null:size=1M,irqmode=2,completion_nsec=50000000 --rw read --number_ios 10";
    let longest = |more: &str| {
        let entry = one(&line(&format!("{device} {more}")));
        assert_eq!(ios(&entry), [10, 0, 0]);
        entry.stats.directions[0].latency.max
    };
    assert!(longest("--rate_iops 100") >= 400_000_000);
    assert!(longest("--rate 400k") >= 400_000_000, "the same in bytes");
}

#[test]
fn rates_take_their_time() {
    let took = |text: &str| one(&line(&format!("--device null:size=1M --bare {text}"))).stats.runtime;
    assert!(took("--rw randread --rate_iops 500 --number_ios 101 --iodepth 8") >= Nanos::from_millis(200));
    // Writes that were still waiting at the end of the run time are not read back.
    let text = "--device mem:1M --rw randwrite --verify crc32c --rate_iops 100 --runtime 200ms --time_based";
    let entry = one(&line(text));
    let [reads, writes, _] = ios(&entry);
    assert!(reads == writes && entry.failure.is_none(), "{reads} of {writes}");
}

/// A report with a count in each of its lines.
fn report_with_everything(load: FioLoadOptions) -> BenchReport {
    let mut stats = JobStats::new();
    for direction in &mut stats.directions[..2] {
        for ns in [80, 150, 300, 700, 5_000, 17_792] {
            direction.count((ns, 350_000), 4096);
        }
        direction.runtime = Nanos::from_millis(2001);
        for x in [4_126_720.0, 4_691_968.0, 4_443_545.6] {
            direction.bandwidth.push(x);
            direction.iops.push(x / 4.0);
        }
    }
    stats.sync.record(147, 100);
    stats.depths[0] = 4_200_000;
    stats.submits.count(1);
    stats.completes.count(1);
    stats.runtime = Nanos::from_millis(2001);
    let outcome = JobOutcome { stats, failure: None, thread: 7670 };
    BenchReport::new(&[BenchJob::alone(load)], std::iter::once((0, outcome)))
}

/// The pattern of a line: its words without numbers, spaces and prefixes of units.
fn shape(line: &str) -> String {
    let words = line.split(|c: char| c.is_ascii_digit() || " .%".contains(c)).filter(|w| !w.is_empty());
    let units = ["k", "K", "Ki", "MiB", "GiB", "KiB", "MB", "GB", "kB", "M"];
    words
        .filter(|w| !units.contains(w))
        .collect::<Vec<_>>()
        .join(" ")
        .replace("GB/s", "MB/s")
        .replace("GiB/s", "MiB/s")
}

/// Apart from numbers, each line of the report is also a line of fio's. fio has no other lines,
/// except `slat`.
#[test]
fn the_report_is_fios() {
    let fio = include_str!("../tests/data/fio-3.33-randrw.txt");
    let load = line("--device null:size=4G --name t --rw randrw --iodepth 32 --group_reporting").load;
    let ours = report_with_everything(load).text();
    // These lines differ by design: engine, version, format of the date, latency classes.
    let own =
        ["ioengine=", "fio-", "udm-", "Starting", "err=", "lat (nsec)", "lat (usec)", "lat (msec)", "slat"];
    let shapes = |text: &str| -> BTreeSet<String> {
        text.lines().filter(|l| !own.iter().any(|own| l.contains(own))).map(shape).collect()
    };
    let (fio, ours) = (shapes(fio), shapes(&ours));
    assert_eq!(
        ours.difference(&fio).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "lines that fio does not print"
    );
    assert_eq!(fio.difference(&ours).collect::<Vec<_>>(), Vec::<&String>::new(), "lines that are missing");
}

/// The page has the values of the report for each job and path, and each plot has its lines.
#[test]
fn the_page_has_jobs_and_paths() {
    let line = with_table(
        "d=0 2048 multipath 0 0 1 1 round-robin 0 2 1 null:size=1M 1 null:size=2M 1",
        "--rw randrw --numjobs 2 --runtime 300ms --time_based --ramp_time 20ms --bare",
    );
    let stop = AtomicBool::new(false);
    let mut watch = None;
    let run = LoadMeasurementPlan { load: &line.load, progress: None, stop: &stop };
    let table = NamedTable { name: "d".into(), text: line.device[2..].into() };
    let report = run.measure(|core_set| {
        let made = Arc::new(MappedDevices::new(core_set, &[table])?);
        watch = Some(PathSampler::start(Arc::clone(&made))?);
        Ok(Arc::clone(&made.devices[0]))
    });
    let (report, paths) = (report.unwrap(), watch.unwrap().end());
    assert_eq!(paths.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["null:size=1M", "null:size=2M"]);
    let served: u64 = paths.iter().map(|p| p.requests).sum();
    let counted: u64 = report.entries.iter().flat_map(ios).sum();
    assert!(served >= counted && paths.iter().all(|p| p.requests > counted / 4 && p.errors == 0));
    let html = report.html(Some("d"), &paths);
    for heading in ["Throughput", "Latency", "Cores", "Paths"] {
        assert!(html.contains(&format!("<h2>{heading}</h2>")), "{heading}");
    }
    // Two jobs that read and write, over time; two latency curves; two paths over time.
    assert_eq!(html.matches("<polyline").count(), 4 + 2 + 2);
    for path in &paths {
        let (mut before, mut moved) = (0.0, 0.0);
        for (at, rate) in &path.rates {
            moved += rate * (at - std::mem::replace(&mut before, *at));
        }
        let share = moved / path.moved as f64;
        assert!(path.rates.len() >= 3 && (0.5..=1.0001).contains(&share), "the plot has {share} of {path:?}");
    }
    let moved = |entry: &JobOrGroupReport, i: usize| {
        let part = &entry.stats.parts[0];
        let mut before = 0.0;
        part.timeline.rates(i).map(|(at, rate)| rate * (at - std::mem::replace(&mut before, at))).sum::<f64>()
    };
    for entry in &report.entries {
        let d = &entry.stats.directions[0];
        let share = moved(entry, 0) / d.bytes as f64;
        assert!((0.5..=1.0001).contains(&share), "the plot shows {share} of the bytes read");
    }
}

/// The JSON has exactly fio's keys, with values of the same types.
#[test]
fn the_json_is_fios() {
    fn keys(value: &Value, path: &str, out: &mut BTreeSet<String>) {
        match value {
            Value::Object(map) if path != ".jobs.job options" => {
                map.iter().for_each(|(k, v)| keys(v, &format!("{path}.{k}"), out));
            }
            Value::Array(list) => list.iter().for_each(|v| keys(v, path, out)),
            Value::Number(_) => drop(out.insert(format!("{path}: number"))),
            Value::String(_) => drop(out.insert(format!("{path}: string"))),
            _ => drop(out.insert(path.to_owned())),
        }
    }
    let all = |value: &Value| {
        let mut out = BTreeSet::new();
        keys(value, "", &mut out);
        out
    };
    let fio = all(&serde_json::from_str(include_str!("../tests/data/fio-3.33-randrw.json")).unwrap());
    let load = line("--device null:size=4G --name t --rw randrw --iodepth 32").load;
    let ours = all(&report_with_everything(load).json(Some("null:size=4G"), false));
    assert_eq!(ours.symmetric_difference(&fio).collect::<Vec<_>>(), Vec::<&String>::new());
}

#[test]
fn a_comparison_has_every_device() {
    let options = DmLayerComparisonOptions {
        depths: vec![1, 4],
        cores: vec![1, 2],
        rounds: 2,
        requests: 100,
        paths: 3,
    };
    let comparison = compare_dm_layers(&options, &AtomicBool::new(false)).unwrap();
    let cores = std::thread::available_parallelism().unwrap().get().min(2);
    assert_eq!(comparison.rows.len(), 8 * 2 * cores);
    assert!(comparison.rows.iter().all(|r| r.ns > 0.0));
    let table = comparison.table();
    for name in ["1 core, depth 1 ", "1 core, depth 4 ", "null", "linear", "queue-length", "one mutex"] {
        assert!(table.contains(name), "{name} in\n{table}");
    }
}

/// A stop in the middle keeps the rounds so far, and no core waits for another.
#[test]
fn a_comparison_that_is_stopped_has_what_was_measured() {
    let options = DmLayerComparisonOptions {
        depths: vec![1, 4],
        cores: vec![1, 2],
        rounds: 1_000_000,
        requests: 20_000,
        paths: 2,
    };
    let stop = AtomicBool::new(false);
    let comparison = std::thread::scope(|scope| {
        let run = scope.spawn(|| compare_dm_layers(&options, &stop));
        // By this time, two rounds have ended.
        std::thread::sleep(std::time::Duration::from_secs(2));
        stop.store(true, Relaxed);
        run.join().unwrap().unwrap()
    });
    assert!(comparison.stopped && comparison.rows.len() == 8, "{} rows", comparison.rows.len());
    assert!(comparison.table().ends_with("stopped early\n"));
    let stopped = AtomicBool::new(true);
    assert!(compare_dm_layers(&options, &stopped).is_err(), "nothing was measured");
}

#[test]
fn snapshots_are_measured_on_several_threads() {
    let options = SnapshotCostOptions {
        depths: vec![1, 4],
        threads: vec![1, 3],
        rounds: 1,
        chunks: 256,
        exceptions: vec![100, 1000],
    };
    let done = AtomicUsize::new(0);
    let costs = measure_snapshot_costs(&options, &AtomicBool::new(false), &done).unwrap();
    // Devices, depths, threads, and devices below.
    assert_eq!((costs.first_writes.len(), costs.lookups.len()), (6 * 2 * 2 * 2, 2));
    assert!(
        costs.first_writes.iter().all(|row| row.iops > 0.0) && costs.lookups.iter().all(|row| row.ns > 0.0)
    );
    let later = &costs.later_writes;
    assert!(later.len() == 2 && later.iter().all(|row| row.copied > 0.0 && row.removed > 0.0));
    assert_eq!(done.load(Relaxed), options.steps());
    let table = costs.table();
    for name in [
        "null, depth 1 ",
        "mem, depth 4 ",
        "snapshot P",
        "N over one mutex",
        "1000 exceptions: ",
        "snapshot removed",
    ] {
        assert!(table.contains(name), "{name} in\n{table}");
    }
    assert!(
        measure_snapshot_costs(&options, &AtomicBool::new(true), &done).is_err(),
        "stopped before anything was measured"
    );
}
