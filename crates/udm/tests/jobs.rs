//! fio job files: `udm bench` and fio run the same file, and fio's own tools read the report.

mod support;

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{has, report_skip, text, udm};
use tempfile::TempDir;

/// A file for both programs, with an option that udm ignores, a variable, jobs in parallel and in
/// sequence, and groups.
const FILE: &str = r"
; for fio and udm
[global]
ioengine=psync        # udm has one way to a file
filename=${DISK}
size=${MIB}m
bs=4k

[read]
rw=randread
iodepth=8
numjobs=2

[ends-inside]
rw=read
bs=64k
size=100k

[part]
rw=randread
size=50%
norandommap

[behind]
stonewall
rw=write
bs=16k
number_ios=10

[again]
rw=randread
loops=3
number_ios=20
offset=70k
size=512k

[shares]
rw=rw
number_ios=100
rwmixwrite=0
rwmixread=0

[slowly]
rw=randread
rate_iops=1000
number_ios=25

[mixed]
rw=randrw
rwmixwrite=100
offset=50%
size=100k

[apart]
new_group
rw=randwrite
bs=512
";

fn file(folder: &TempDir, text: &str) -> PathBuf {
    let path = folder.path().join("jobs.fio");
    fs::write(&path, text).unwrap();
    path
}

fn json(command: &mut Command) -> Value {
    let out = command.env("MIB", "1").output().unwrap();
    assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
    let all = text(&out.stdout);
    // fio may print messages first.
    serde_json::from_str(&all[all.find('{').unwrap()..]).unwrap()
}

/// Name and group of a job, and its requests and bytes by direction.
type JobTotals = (String, u64, Vec<(u64, u64)>);

/// The totals of all jobs.
fn totals(report: &Value) -> Vec<JobTotals> {
    let jobs = report["jobs"].as_array().unwrap().iter();
    jobs.map(|job| {
        let moved = ["read", "write", "trim"]
            .map(|d| (job[d]["total_ios"].as_u64().unwrap(), job[d]["io_bytes"].as_u64().unwrap()));
        (job["jobname"].as_str().unwrap().to_owned(), job["groupid"].as_u64().unwrap(), moved.to_vec())
    })
    .collect()
}

#[test]
fn a_job_file_does_what_it_does_with_fio() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(&folder, FILE);
    let disk = folder.path().join("disk.img");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let run = |mut command: Command| {
        totals(&json(command.arg("--output-format=json").arg(&path).env("DISK", &disk)))
    };
    let ours = run(udm(&["bench"]));
    assert_eq!(ours.iter().map(|j| j.1).collect::<Vec<_>>(), [0, 0, 0, 0, 1, 1, 1, 1, 1, 2]);
    if has("fio") {
        assert_eq!(ours, run(Command::new("fio")));
    }
}

#[test]
fn a_wall_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let text_of = "[global]\nverify=crc32c\niodepth=4\n[w]\nrw=write\n[r]\nstonewall\nrw=randread\n";
    let path = file(&folder, text_of);
    let out = udm(&["bench", path.to_str().unwrap(), "--device", "mem:8M"]).output().unwrap();
    let report = text(&out.stdout);
    assert!(out.status.success(), "what the first job wrote is there: {report}{}", text(&out.stderr));
    assert!(report.contains("\nRun status group 1 (all jobs):\n   READ: "), "{report}");
    // In parallel, the reader finds blocks that nobody has written.
    let path = file(&folder, &text_of.replace("stonewall\n", ""));
    let out = udm(&["bench", path.to_str().unwrap(), "--device", "null:size=8M"]).output().unwrap();
    assert!(!out.status.success() && text(&out.stderr).contains("verify: bad magic header"));
}

#[test]
fn what_is_left_out_or_refused_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let run = |jobs: &str, more: &[&str]| {
        let path = file(&folder, jobs);
        let out = udm(&["bench", path.to_str().unwrap()]).args(more).output().unwrap();
        (out.status.code(), text(&out.stderr))
    };
    let (status, output) = run("[a]\nioengine=libaio\nhipri\nfilename=null:size=4k", &[]);
    assert!(
        status == Some(0) && output.contains("options without effect here are ignored: hipri, ioengine"),
        "{output}"
    );
    let (status, output) = run("[a]\nfilename=null:size=4k\nnosuch=1", &[]);
    assert!(status == Some(1) && output.contains("job a: unexpected argument '--nosuch'"), "{output}");
    let (status, output) = run("[a]\nrw=read", &[]);
    assert!(status == Some(1) && output.contains("a job has no filename"), "{output}");
    // One job may have this amount of data, three parallel jobs may not.
    let data = "bs=1g\niodepth=9\nfilename=null:size=1g\n";
    let (status, output) = run(&format!("[global]\n{data}[a]\n[b]\n[c]\nrw=write"), &[]);
    assert!(
        status == Some(1) && output.contains("28991029248 bytes of data, more than 17179869184"),
        "{output}"
    );
    let requests = "[a]\nbare\niodepth=65536\nnumjobs=1024\nfilename=null:size=4k";
    let (status, output) = run(requests, &[]);
    assert!(status == Some(1) && output.contains("bytes of data, more than"), "{output}");
    let (status, output) = run("[a]\nrw=read", &["--rw", "write", "--device", "null:size=4k"]);
    assert!(status == Some(2) && output.contains("cannot be used with"), "{output}");
}

/// fio's own tool converts the latencies of each job from `json+`; the counts must agree.
#[test]
fn fios_tools_read_the_report() {
    let tool = "fio_jsonplus_clat2csv";
    let runs = Command::new(tool).arg("--help").output().is_ok_and(|out| out.status.success());
    if !runs {
        return report_skip("fio_jsonplus_clat2csv is not installed, or lacks python3's six");
    }
    let folder = tempfile::tempdir().unwrap();
    let options = ["--rw", "randrw", "--iodepth", "4", "--numjobs", "2", "--output-format", "json+"];
    let mut bench = udm(&["bench", "--device", "mem:8M"]);
    let report = json(bench.args(options));
    let source = folder.path().join("report.json");
    fs::write(&source, report.to_string()).unwrap();
    let table = folder.path().join("table.csv");
    for more in [None, Some("--validate")] {
        let out = Command::new(tool).args([&source, &table]).args(more).output().unwrap();
        assert!(out.status.success() && !text(&out.stdout).contains("mismatch"), "{}", text(&out.stderr));
    }
    for job in 0..2 {
        let name = format!("table_job{job}.csv");
        let sum = counted(&folder.path().join(name), "read_clat_ns_count");
        assert_eq!(Some(sum), report["jobs"][job]["read"]["total_ios"].as_u64(), "job {job}");
    }
}

/// The sum of a column.
fn counted(table: &Path, column: &str) -> u64 {
    let table = fs::read_to_string(table).unwrap();
    let mut lines = table.lines();
    let at = lines.next().unwrap().split(", ").position(|name| name == column).unwrap();
    lines.filter_map(|line| line.split(", ").nth(at)?.trim().parse::<u64>().ok()).sum()
}
