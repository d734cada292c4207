//! fio's options for amounts, rates, percentiles and CPUs, compared with fio itself.

mod support;

use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{has, report_skip, text, udm};
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
[e]
percentile_list=0:50
[f]
percentile_list=99:5:0:50
";

/// The percentiles of the text report, without the latencies.
fn percentile_lines(text: &str) -> Vec<String> {
    let lines = text.lines().filter(|line| line.contains(" percentiles (") || line.starts_with("     |"));
    let shape = |line: &str| {
        let units = ["(nsec)", "(usec)", "(msec)"];
        let line = units.iter().fold(line.to_owned(), |line, unit| line.replace(unit, "(unit)"));
        line.split('[').map(|part| part.split_once(']').map_or(part, |(_, rest)| rest)).collect::<String>()
    };
    // The number of percentiles per line depends on the width of the latencies.
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
    assert_eq!(listed.collect::<Vec<_>>(), [4, 4, 4, 1, 1, 1, 1, 5, 5, 0, 0, 0, 2, 2, 2]);
    let lines = |mut command: Command| {
        let out = command.arg(&path).env("DISK", &disk).output().unwrap();
        assert!(out.status.success(), "{}", text(&out.stderr));
        percentile_lines(&text(&out.stdout))
    };
    let output = lines(udm(&["bench"]));
    assert!(output.contains(&"     |  0.125th=,  1.000th=, 50.000th=, 99.900th=".to_owned()), "{output:?}");
    if !has("fio") {
        return report_skip("fio is not installed");
    }
    assert_eq!(ours, percentiles(&report(&mut Command::new("fio"), &path, &disk)));
    assert_eq!(output, lines(Command::new("fio")));
}

/// The CPUs of each of two jobs, which are threads of a program that was just started.
fn cpus_of(mut program: Child) -> Vec<String> {
    let until = Instant::now() + Duration::from_secs(60);
    let tasks = format!("/proc/{}/task", program.id());
    let mut found = Vec::new();
    while Instant::now() < until && found.len() < 2 {
        found.clear();
        // The first thread runs no job.
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

/// The CPUs that a thread may run on; `None` until it has used some CPU time.
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
        return report_skip("CPUs 0 and 1 are not both there");
    }
    let load = ["--rw=randread", "--numjobs=2", "--runtime=60", "--time_based"];
    let run = |command: &mut Command, words: &[&str]| {
        let command = command.args(load).args(words).stdout(Stdio::null()).stderr(Stdio::null());
        cpus_of(command.spawn().unwrap()).join(" ")
    };
    let ours = |words: &[&str]| run(&mut udm(&["bench", "--device", "null:size=4M"]), words);
    let lists: [&[&str]; 3] = [
        &["--cpus_allowed=0,1"],
        &["--cpus_allowed=0,1", "--cpus_allowed_policy=split"],
        &["--cpus_allowed=1,0-1,"],
    ];
    let all = lists.map(ours);
    assert_eq!(all, ["0-1 0-1", "0 1", "0-1 0-1"]);
    // fio reads 0:1 as 0, and stops at a gap. udm refuses both, since they are probably mistakes.
    let misread = [["--cpus_allowed=0:1"], ["--cpus_allowed=0,,1"]];
    for words in misread {
        let out = udm(&["bench", "--device", "null:size=4M"]).args(load).args(words).output().unwrap();
        assert!(!out.status.success() && text(&out.stderr).contains("is not a CPU number"), "{words:?}");
    }
    if has("fio") {
        let fios = |words: &[&str]| {
            let engine = ["--name=a", "--thread", "--ioengine=null", "--size=4M"];
            run(Command::new("fio").args(engine), words)
        };
        assert_eq!(all, lists.map(fios));
        assert_eq!(misread.map(|words| fios(&words)), ["0 0", "0 0"]);
    }
}

/// Each direction of a mixed load has its own rate.
const RATES: &str = r"
[global]
ioengine=psync
filename=${DISK}
rw=randrw
norandommap
number_ios=600
[requests]
rate_iops=500,1000
[bytes]
stonewall
rate=2m,4m,
[mix-of-no-matter]
stonewall
rate_iops=1k
rwmixread=90
[reads-go-on]
stonewall
rate_iops=,40
[writes-go-on]
stonewall
rate=200k,
[no-limit]
stonewall
rate=0
rate_iops=0,0
[of-others]
stonewall
rw=write
rate=1,,1
[in-order]
stonewall
rw=rw
rate_iops=400,200
";

#[test]
fn rates_are_of_directions() {
    let folder = tempfile::tempdir().unwrap();
    let (path, disk) = jobs(&folder, RATES);
    let shares = |command: &mut Command| {
        moved(&report(command, &path, &disk))
            .into_iter()
            .map(|(name, [(reads, _), (writes, _)])| {
                assert_eq!(reads + writes, 600, "{name}");
                // In tenths, because a load without a limit completes nearly everything.
                (name, (reads + 30) / 60)
            })
            .collect::<Vec<_>>()
    };
    let ours = shares(&mut udm(&["bench"]));
    let reads: Vec<u64> = ours.iter().map(|job| job.1).collect();
    assert_eq!(reads, [3, 3, 5, 10, 0, 5, 0, 7], "{ours:?}");
    if has("fio") {
        // On a busy machine a thread of fio that gets no CPU has other shares.
        let is_near = |theirs: &[(String, u64)]| {
            let near = |(a, b): (&(String, u64), &(String, u64))| a.0 == b.0 && a.1.abs_diff(b.1) <= 1;
            theirs.len() == ours.len() && ours.iter().zip(theirs).all(near)
        };
        let tries: Vec<_> =
            (0..4).map(|_| shares(&mut Command::new("fio"))).take_while(|it| !is_near(it)).collect();
        assert!(tries.len() < 4, "{ours:?} {tries:?}");
    }
}

/// Options that end a load, on a file of 1 MiB.
const AMOUNTS: [&str; 6] = [
    "loops=3",
    "number_ios=100",
    "number_ios=70\nloops=2",
    "size=100k\nloops=3",
    "size=300k\noffset=70k\nloops=2",
    "offset=33%",
];

/// The totals of requests and bytes are those of fio, for all orders.
#[test]
fn amounts_are_fios() {
    let orders = ["read", "randwrite", "randread\nnorandommap", "randrw"];
    let mut text = "[global]\nioengine=psync\nfilename=${DISK}\n".to_owned();
    for (order, bs) in orders.iter().flat_map(|order| [4, 64, 12].map(|bs| (order, bs))) {
        for (i, amount) in AMOUNTS.iter().enumerate() {
            let name = format!("{order} {bs} {amount}").replace('\n', " ");
            let wall = if i == 0 { "stonewall\n" } else { "" };
            text += &format!("[{name}]\n{wall}rw={order}\nbs={bs}k\n{amount}\n");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let run = |command: &mut Command| {
        let (path, disk) = jobs(&folder, &text);
        fs::File::options().write(true).open(&disk).unwrap().set_len(1 << 20).unwrap();
        moved(&report(command, &path, &disk))
            .into_iter()
            .map(|(name, [reads, writes])| (name, reads.0 + writes.0, reads.1 + writes.1))
            .collect::<Vec<_>>()
    };
    let ours = run(&mut udm(&["bench"]));
    assert_eq!(ours.len(), orders.len() * 3 * AMOUNTS.len());
    if has("fio") {
        let fios = run(&mut Command::new("fio"));
        let differ: Vec<_> = ours.iter().zip(&fios).filter(|(ours, fios)| ours != fios).collect();
        assert!(differ.is_empty(), "{differ:?}");
    }
}
