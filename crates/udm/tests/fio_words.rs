//! fio's words for lengths, percentiles and CPUs, beside fio itself.

mod support;

use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{has, skipped, text, udm};
use tempfile::TempDir;

const SIZE: u64 = 32 << 20;

fn jobs(folder: &TempDir, jobs: &str) -> (String, String) {
    let (path, disk) = (folder.path().join("jobs.fio"), folder.path().join("disk.img"));
    fs::File::create(&disk).unwrap().set_len(SIZE).unwrap();
    fs::write(&path, jobs).unwrap();
    (path.to_str().unwrap().to_owned(), disk.to_str().unwrap().to_owned())
}

fn report(command: &mut Command, jobs: &str, disk: &str) -> Value {
    let out = command.args(["--output-format=json", jobs]).env("DISK", disk).output().unwrap();
    assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
    let all = text(&out.stdout);
    serde_json::from_str(&all[all.find('{').unwrap()..]).unwrap()
}

/// Requests and bytes of each job and direction.
fn moved(report: &Value) -> Vec<(String, [(u64, u64); 2])> {
    let number = |value: &Value| value.as_u64().unwrap();
    let of =
        |job: &Value| ["read", "write"].map(|d| (number(&job[d]["total_ios"]), number(&job[d]["io_bytes"])));
    let jobs = report["jobs"].as_array().unwrap().iter();
    jobs.map(|job| (job["jobname"].as_str().unwrap().to_owned(), of(job))).collect()
}

/// Two lengths a job, so that requests and bytes say how many had each; or all that there are.
const LENGTHS: &str = r"
[global]
ioengine=psync
filename=${DISK}
group_reporting=0
[rare]
rw=randread
norandommap
bssplit=4k/90:64k/10
[rest]
stonewall
rw=randread
norandommap
bssplit=64k:4k/70
[unsaid]
stonewall
rw=write
bssplit=8k/:32k/
[none-said]
stonewall
rw=read
bssplit=4k/0:16k
[less-than-all]
stonewall
rw=read
bssplit=4k/20:16k/30
[range]
stonewall
rw=randwrite
norandommap
bsrange=4k-16k
[uneven-range]
stonewall
rw=randread
norandommap
bsrange=4k-10k
[map]
stonewall
rw=randread
bssplit=4k/50:32k/50
[map-of-a-range]
stonewall
rw=randwrite
bsrange=1k-8k
[directions]
stonewall
rw=rw
bs=4k,16k
[directions-split]
stonewall
rw=randrw
norandommap
rwmixread=70
bssplit=4k/50:8k/50,16k/10:32k
[reads-only-said]
stonewall
rw=rw
bs=32k,
[writes-only-said]
stonewall
rw=rw
bs=,32k
[split-before-range]
stonewall
rw=read
bs=64k
bssplit=8k
";

#[test]
fn lengths_are_drawn_as_fio_draws_them() {
    let folder = tempfile::tempdir().unwrap();
    let (path, disk) = jobs(&folder, LENGTHS);
    let ours = moved(&report(&mut udm(&["bench"]), &path, &disk));
    assert!(ours.iter().all(|(_, d)| (SIZE..SIZE + (64 << 10)).contains(&(d[0].1 + d[1].1))), "{ours:?}");
    if !has("fio") {
        return skipped("fio is not installed");
    }
    let fios = moved(&report(&mut Command::new("fio"), &path, &disk));
    assert_eq!(ours.len(), fios.len());
    for ((name, ours), (_, fios)) in ours.iter().zip(&fios) {
        for (ours, fios) in ours.iter().zip(fios) {
            // Some thousands each: eight standard deviations and more.
            let near = |a: u64, b: u64| a.abs_diff(b) as f64 <= 0.1 * a.max(b) as f64;
            assert!(near(ours.0, fios.0) && near(ours.1, fios.1), "{name}: {ours:?}, fio {fios:?}");
        }
    }
}

/// The keys of the percentiles of each kind of latency.
fn percentiles(report: &Value) -> Vec<(String, Option<BTreeSet<String>>)> {
    let mut all = Vec::new();
    for job in report["jobs"].as_array().unwrap() {
        for (name, value) in [
            ("slat", &job["read"]["slat_ns"]),
            ("clat", &job["read"]["clat_ns"]),
            ("lat", &job["read"]["lat_ns"]),
            ("write", &job["write"]["clat_ns"]),
            ("sync", &job["sync"]["lat_ns"]),
        ] {
            let keys = value["percentile"].as_object().map(|map| map.keys().cloned().collect());
            all.push((format!("{} {name}", job["jobname"]), keys));
        }
    }
    all
}

const PERCENTILES: &str = r"
[global]
ioengine=psync
filename=${DISK}
size=256k
rw=randrw
fsync=8
[a]
percentile_list=99.9:50:1:0.125
[b]
clat_percentiles=0
[c]
lat_percentiles=1
percentile_list=100
[d]
clat_percentiles=0
lat_percentiles=1
percentile_list=5:10:15:20:25
";

/// Where each percentile stands in the text, without the latencies.
fn percentile_lines(text: &str) -> Vec<String> {
    let lines = text.lines().filter(|line| line.contains(" percentiles (") || line.starts_with("     |"));
    let shape = |line: &str| {
        let units = ["(nsec)", "(usec)", "(msec)"];
        let line = units.iter().fold(line.to_owned(), |line, unit| line.replace(unit, "(unit)"));
        line.split('[').map(|part| part.split_once(']').map_or(part, |(_, rest)| rest)).collect::<String>()
    };
    // How many stand on a line depends on how long the latencies are.
    let all: Vec<_> = lines.map(shape).collect();
    let joined = all.join("\n").replace("=,\n     |", "=,");
    joined.lines().map(str::to_owned).collect()
}

#[test]
fn percentiles_are_those_of_the_list() {
    let folder = tempfile::tempdir().unwrap();
    let (path, disk) = jobs(&folder, PERCENTILES);
    let ours = percentiles(&report(&mut udm(&["bench"]), &path, &disk));
    let listed = ours.iter().filter_map(|(_, keys)| keys.as_ref()).map(BTreeSet::len);
    assert_eq!(listed.collect::<Vec<_>>(), [4, 4, 4, 1, 1, 1, 1, 5, 5]);
    let lines = |mut command: Command| {
        let out = command.arg(&path).env("DISK", &disk).output().unwrap();
        assert!(out.status.success(), "{}", text(&out.stderr));
        percentile_lines(&text(&out.stdout))
    };
    let said = lines(udm(&["bench"]));
    assert!(said.contains(&"     |  0.125th=,  1.000th=, 50.000th=, 99.900th=".to_owned()), "{said:?}");
    if !has("fio") {
        return skipped("fio is not installed");
    }
    assert_eq!(ours, percentiles(&report(&mut Command::new("fio"), &path, &disk)));
    assert_eq!(said, lines(Command::new("fio")));
}

/// The CPUs of each of two jobs, which are threads of a program that was just started.
fn cpus_of(mut program: Child) -> Vec<String> {
    let until = Instant::now() + Duration::from_secs(60);
    let tasks = format!("/proc/{}/task", program.id());
    let mut found = Vec::new();
    while Instant::now() < until && found.len() < 2 {
        found.clear();
        // The first thread is no job.
        let threads = fs::read_dir(&tasks).into_iter().flatten().flatten();
        let jobs = threads.filter(|task| task.file_name() != *program.id().to_string());
        found.extend(jobs.filter_map(|task| busy_threads_cpus(&task.path())));
        std::thread::sleep(Duration::from_millis(20));
    }
    program.kill().unwrap();
    program.wait().unwrap();
    found.sort();
    found
}

/// The CPUs that a thread may run on, where it has worked for some time.
fn busy_threads_cpus(task: &Path) -> Option<String> {
    let stat = fs::read_to_string(task.join("stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().ok()? + fields[12].parse::<u64>().ok()?;
    let status = fs::read_to_string(task.join("status")).ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    (ticks > 10).then(|| list.trim().to_owned())
}

#[test]
fn cpus_are_shared_or_split() {
    let all = fs::read_to_string("/proc/self/status").unwrap();
    if !all.lines().any(|line| line.starts_with("Cpus_allowed_list:") && line.contains("0-")) {
        return skipped("CPUs 0 and 1 are not both there");
    }
    let load = ["--rw=randread", "--numjobs=2", "--runtime=60", "--time_based", "--cpus_allowed=0,1"];
    let run = |command: &mut Command, policy: &[&str]| {
        let command = command.args(load).args(policy).stdout(Stdio::null()).stderr(Stdio::null());
        cpus_of(command.spawn().unwrap())
    };
    let ours = |policy: &[&str]| run(&mut udm(&["bench", "--device", "null:size=4M"]), policy);
    let shared = ours(&[]);
    let split = ours(&["--cpus_allowed_policy=split"]);
    assert_eq!((shared.join(" "), split.join(" ")), ("0-1 0-1".into(), "0 1".into()));
    if has("fio") {
        let fios = |policy: &[&str]| {
            let engine = ["--name=a", "--thread", "--ioengine=null", "--size=4M"];
            run(Command::new("fio").args(engine), policy)
        };
        assert_eq!((shared, split), (fios(&[]), fios(&["--cpus_allowed_policy=split"])));
    }
}
