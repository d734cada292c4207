//! udm's engine for fio over devices of udm, run by the installed fio.

#![expect(clippy::print_stdout, reason = "what is skipped says so")]

mod built;

use built::{archive, root};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// Exit status of `engines/fio/build` if the engine can't be built.
const SKIPPED: i32 = 77;

/// The engine; `None` if it can't be built.
fn engine() -> Option<&'static Path> {
    static ENGINE: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fio");
        let out = Command::new(root().join("engines/fio/build")).arg(archive()).arg(&folder).output();
        let out = out.expect("engines/fio/build");
        let output = String::from_utf8_lossy(&out.stderr);
        if out.status.code() == Some(SKIPPED) {
            println!("{}", output.trim());
            return None;
        }
        assert!(out.status.success(), "{output}");
        Some(folder.join("udm.so"))
    });
    ENGINE.as_deref()
}

/// Runs fio with the engine; returns its report and its output.
fn fio(devices: &[&str], options: &str) -> Option<(Value, String)> {
    let folder = tempfile::tempdir().expect("a folder");
    let report = folder.path().join("report.json");
    let mut fio = Command::new("fio");
    fio.current_dir(&folder).arg("--output-format=json").arg(format!("--output={}", report.display()));
    fio.args(options.split_whitespace().take_while(|word| !word.starts_with("--ioengine")));
    fio.arg(format!("--ioengine=external:{}", engine()?.display()));
    fio.args(devices.iter().map(|device| format!("--udm_device={device}")));
    fio.args(options.split_whitespace().skip_while(|word| !word.starts_with("--ioengine")).skip(1));
    let out = fio.output().expect("fio");
    let output = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    let text = std::fs::read_to_string(report).unwrap_or_default();
    // fio may print errors before its report.
    let report = text.find('{').and_then(|at| serde_json::from_str(&text[at..]).ok()).unwrap_or_default();
    Some((report, output + &text))
}

/// The counts of a job without an error: reads, writes, trims, syncs.
fn counts(report: &Value, job: usize, output: &str) -> [u64; 4] {
    let job = &report["jobs"][job];
    assert_eq!(job["error"], 0, "{output}");
    let ios = |direction: &str| job[direction]["total_ios"].as_u64().unwrap_or_default();
    [ios("read"), ios("write"), ios("trim"), ios("sync")]
}

const PATHS: [&str; 2] = ["a=0 65536 linear mem:32M 0", "b=0 65536 linear mem:32M 0"];

fn multipath(selector: &str) -> String {
    let arguments = |path: u32| match selector {
        "io-affinity" => format!(" {}", 1 << path),
        "service-time" => " 1 1".into(),
        "historical-service-time" => String::new(),
        _ => " 1".into(),
    };
    let count = arguments(0).split_whitespace().count();
    let paths = [0, 1].map(|path| format!("@{}{}", ["a", "b"][path as usize], arguments(path))).join(" ");
    format!("dm_mq=0 65536 multipath 2 queue_mode bio 0 1 1 {selector} 0 2 {count} {paths}")
}

const SELECTORS: [&str; 5] =
    ["round-robin", "queue-length", "service-time", "historical-service-time", "io-affinity"];

/// The scripts of the measurements of the lockless dm-mpath: their command line with another engine
/// and file name.
#[test]
fn the_command_lines_of_the_measurements_run() {
    for selector in SELECTORS {
        let table = multipath(selector);
        let devices = [PATHS[0], PATHS[1], &table];
        let line = "--cpus_allowed_policy=split --group_reporting --rw=randread --bs=4k --numjobs=2 --iodepth=32 \
                    --runtime=1 --time_based --loops=1 --ioengine=libaio --direct=1 --invalidate=1 --randrepeat=1 \
                    --norandommap --exitall --name task_dm_mq --filename=dm_mq --runtime=250ms";
        let Some((report, output)) = fio(&devices, line) else { return };
        let [reads, rest @ ..] = counts(&report, 0, &output);
        assert!(reads > 64 && rest == [0; 3], "{selector}: {reads} reads, {rest:?}\n{output}");
        // fio counts both jobs of the group together.
        assert_eq!(report["jobs"].as_array().map(Vec::len), Some(1), "{output}");
    }
}

/// The command line of docs/library.md, with a shorter run time.
#[test]
fn the_line_of_the_manual_runs() {
    let Some(engine) = engine() else { return };
    let page = std::fs::read_to_string(root().join("docs/library.md")).expect("the page");
    let line = page
        .split("```sh\n")
        .find(|block| block.starts_with("fio "))
        .and_then(|rest| rest.split("```").next());
    let line = line.expect("a line").replace("target/fio/udm.so", &engine.display().to_string());
    assert!(line.contains("--runtime=10 "), "{line}");
    let folder = tempfile::tempdir().expect("a folder");
    let line = line.replace("--runtime=10 ", "--runtime=200ms --output-format=json ");
    let out = Command::new("sh").current_dir(&folder).arg("-c").arg(&line).output().expect("sh");
    let output = String::from_utf8_lossy(&out.stdout);
    let report: Value = serde_json::from_str(&output).unwrap_or_else(|error| panic!("{error}: {output}"));
    assert!(counts(&report, 0, &output)[0] > 64, "{output}");
}

/// fio reads back its writes, with checksums, over several kinds of devices.
#[test]
fn what_is_written_is_read_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("disk");
    std::fs::File::create(&file).and_then(|file| file.set_len(64 << 20)).expect("a disk");
    let table = multipath("queue-length");
    let on_file = format!("vol=0 65536 linear {} 0", file.display());
    let subjects: [(&str, Vec<&str>); 5] = [
        ("mem\\:32M", vec![]),
        ("vol", vec!["vol=mem:32M"]),
        ("vol", vec!["vol=0 65536 striped 2 128 mem:32M 0 mem:32M 32768"]),
        ("dm_mq", vec![PATHS[0], PATHS[1], &table]),
        ("vol", vec![&on_file]),
    ];
    for (name, devices) in subjects {
        let line = format!(
            "--ioengine=libaio --filename={name} --size=8M --iodepth=32 --verify=crc32c --verify_fatal=1 --direct=1 \
             --name=short --rw=randwrite --bs=4k --stonewall \
             --name=mixed --rw=randrw --bssplit=512/30:4k/40:64k/30 --fsync=8 --stonewall \
             --name=durable --rw=write --bs=1M --sync=1 --stonewall"
        );
        let Some((report, output)) = fio(&devices, &line) else { return };
        for (job, load) in ["short", "mixed", "durable"].into_iter().enumerate() {
            let [reads, writes, _, syncs] = counts(&report, job, &output);
            assert!(
                writes > 0 && reads >= writes,
                "{name}, {load}: {reads} read, {writes} written\n{output}"
            );
            assert_eq!(syncs > 0, load == "mixed", "{name}, {load}: {syncs} syncs");
        }
    }
    assert!(std::fs::read(&file).expect("the disk").iter().any(|&byte| byte != 0), "nothing got to the disk");
}

#[test]
fn jobs_share_a_device_and_trims_reach_it() {
    let line = "--ioengine=libaio --filename=vol --bs=64k --size=4M --iodepth=4 --verify=pattern \
                --verify_pattern=0xdecade --name=first --rw=write --do_verify=0 --name=second --stonewall --rw=read";
    let Some((report, output)) = fio(&["vol=mem:8M"], line) else { return };
    assert_eq!(counts(&report, 0, &output), [0, 64, 0, 0]);
    // The second job reads what the first has written.
    assert_eq!(counts(&report, 1, &output), [64, 0, 0, 0]);
    let line = "--name=t --ioengine=libaio --filename=vol --rw=randtrim --bs=64k --size=4M --iodepth=8";
    let Some((report, output)) = fio(&["vol=mem:8M"], line) else { return };
    assert_eq!(counts(&report, 0, &output), [0, 0, 64, 0]);
}

#[test]
fn what_is_wrong_is_said() {
    let line = "--name=t --ioengine=libaio --filename=vol --rw=read --size=4k";
    for (devices, want) in [
        (&["vol=0 8 nothing"][..], "unknown target type"),
        (&["vol"], "not NAME=TABLE"),
        (&["vol=mem:1M", "vol=mem:2M"], "vol has two tables"),
        (&["other=mem:1M"], "udm: vol: "),
    ] {
        let Some((report, output)) = fio(devices, line) else { return };
        assert!(output.contains(want), "{want}: {output}");
        assert!(report["jobs"][0]["read"]["total_ios"].as_u64().unwrap_or(0) == 0, "{output}");
    }
    // An error of the device becomes an error of the job.
    let Some((report, output)) = fio(&["vol=0 8 error"], line) else { return };
    assert_eq!(report["jobs"][0]["error"], 5, "{output}");
}

/// Requests beyond the limit of a core wait in the engine and are submitted later.
#[test]
fn a_depth_beyond_the_limit_is_sent_in_parts() {
    let line = "--name=t --ioengine=libaio --filename=vol --rw=randread --bs=512 --size=64M --number_ios=131000 \
                --iodepth=70000 --norandommap";
    let table = "vol=0 131072 delay mem:64M 0 300";
    let Some((report, output)) = fio(&[table], line) else { return };
    assert_eq!(counts(&report, 0, &output), [131_000, 0, 0, 0]);
}
