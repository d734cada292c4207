//! Ctrl-C and SIGTERM: the results so far are reported, and no files are left.

mod support;

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use support::{text, udm, until};

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

/// True if `child` handles the signals that end a program.
fn handles_signals(child: &Child) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim();
    // Bit 14 stands for SIGTERM.
    u64::from_str_radix(caught, 16).unwrap() & 1 << 14 != 0
}

#[test]
fn a_bench_that_is_interrupted_reports_what_it_has() {
    for (name, more) in [("-INT", ""), ("-TERM", "--ramp_time 60"), ("-TERM", "--rw write --verify crc32c")] {
        let mut bench = udm(&["bench", "--device", "mem:64M", "--runtime", "100", "--time_based"]);
        bench.args(more.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let bench = bench.spawn().unwrap();
        until("a bench that runs", || handles_signals(&bench).then_some(()));
        std::thread::sleep(Duration::from_millis(700));
        signal(&bench, name);
        let out = bench.wait_with_output().unwrap();
        let (output, report) = (text(&out.stderr), text(&out.stdout));
        assert_eq!(out.status.code(), Some(128), "fio's status: {output}");
        assert!(output.contains("terminating on signal"), "{output}");
        assert!(report.contains("IOPS=") && report.contains("Run status group 0"), "{more}: {report}");
    }
}

#[test]
fn the_second_signal_ends_a_bench_that_waits() {
    // A request of one minute is in flight.
    let mut bench = udm(&["bench", "--device", "null:size=1G,irqmode=2,completion_nsec=60000000000"]);
    let mut bench = bench.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until("a bench that runs", || handles_signals(&bench).then_some(()));
    std::thread::sleep(Duration::from_millis(300));
    signal(&bench, "-INT");
    std::thread::sleep(Duration::from_millis(300));
    assert!(bench.try_wait().unwrap().is_none(), "the first one waits for the request");
    signal(&bench, "-TERM");
    assert_eq!(until("the end of the bench", || bench.try_wait().unwrap()).code(), Some(143));
}

#[test]
fn a_demo_that_is_interrupted_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    for (name, status) in [("-INT", 130), ("-TERM", 143)] {
        let mut demo = udm(&["demo", "--runtime", "600"]);
        let mut demo = demo.env("TMPDIR", folder.path()).stdout(Stdio::null()).spawn().unwrap();
        let entries = || fs::read_dir(folder.path()).unwrap().count();
        until("a demo that runs", || (entries() > 0 && handles_signals(&demo)).then_some(()));
        std::thread::sleep(Duration::from_millis(500));
        signal(&demo, name);
        assert_eq!(until("the end of the demo", || demo.try_wait().unwrap()).code(), Some(status));
        assert_eq!(entries(), 0);
    }
}
