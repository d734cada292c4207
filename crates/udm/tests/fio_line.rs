//! A command line of fio given to `udm bench`, and fio's example jobs: each runs as with fio, or is
//! refused with the name of an option.

mod support;

use serde_json::Value;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use support::{has, report_skip, text, udm, until};

const MIB: u64 = 1 << 20;

/// Status, standard output and standard error of a command.
fn outcome(mut command: Command, folder: &Path) -> (Option<i32>, String, String) {
    let out = command.current_dir(folder).output().unwrap();
    (out.status.code(), text(&out.stdout), text(&out.stderr))
}

fn line(program: &str, words: &str) -> Command {
    let mut command = if program == "udm" { udm(&["bench"]) } else { Command::new(program) };
    command.args(words.split_whitespace());
    command
}

/// The name of each job, and its requests and bytes.
fn moved(out: &str) -> Vec<(String, Vec<(u64, u64)>)> {
    let report: Value = serde_json::from_str(&out[out.find('{').unwrap_or(0)..]).unwrap_or_default();
    let number = |value: &Value| value.as_u64().unwrap_or_default();
    let of = |job: &Value| {
        ["read", "write", "trim"]
            .map(|d| (number(&job[d]["total_ios"]), number(&job[d]["io_bytes"])))
            .to_vec()
    };
    let jobs = report["jobs"].as_array().cloned().unwrap_or_default();
    jobs.iter().map(|job| (job["jobname"].as_str().unwrap_or_default().to_owned(), of(job))).collect()
}

const LINES: [&str; 9] = [
    "--name=a --filename=f --ioengine=psync --direct=1 --rw=randread --bs=4k --size=2M --eta=never",
    "--filename f --size 2M --direct 0 --name=a --rw=read --name=b --stonewall --rw=write --bs=64k",
    "--name=global --filename=f --filesize=2M --bs=16k --name=a --rw=randrw --rwmixread=100 --name=global --bs=8k --name=b",
    "--name=a --filename=f --size=1M --rw=write --verify=crc32c --do_verify=0",
    "--name=a --filename=f --size=1M --offset=1M --rw=randwrite --buffered=1 --invalidate=0 --thread",
    "--name=a --filename=f --size=2M --bs=12k --rw=read --group_reporting",
    "--name=a --filename=f --filesize=2M --offset=33% --bs=64k --rw=read",
    "--name=a --filename=f --size=2M --rw=randread --ioengine=sync --timeout=60",
    "--name=a --ioengine=null --size=2M --rw=randwrite --disable_lat=1",
];

#[test]
fn pasted_lines_move_what_fio_moves() {
    for words in LINES {
        let run = |program: &str| {
            let folder = tempfile::tempdir().unwrap();
            // fio takes a percentage of the existing size.
            if words.contains("33%") {
                fs::write(folder.path().join("f"), vec![1; 2 * MIB as usize]).unwrap();
            }
            let mut command = line(program, words);
            command.arg("--output-format=json");
            let (status, out, output) = outcome(command, folder.path());
            assert_eq!(status, Some(0), "{program} {words}: {out}{output}");
            let length = folder.path().join("f").metadata().map_or(0, |data| data.len());
            (moved(&out), length)
        };
        let ours = run("udm");
        assert!(!ours.0.is_empty(), "{words}");
        if has("fio") {
            assert_eq!(ours, run("fio"), "{words}");
        }
    }
}

/// True if a program has its file open with `O_DIRECT`; `None` if the file is not open.
fn is_open_direct(child: &Child, file: &Path) -> Option<bool> {
    let folder = PathBuf::from(format!("/proc/{}", child.id()));
    let mut found = None;
    for entry in fs::read_dir(folder.join("fd")).ok()?.flatten() {
        if fs::read_link(entry.path()).is_ok_and(|path| path == file) {
            let info = fs::read_to_string(folder.join("fdinfo").join(entry.file_name())).ok()?;
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?.trim().to_owned();
            let direct =
                i64::from_str_radix(&flags, 8).ok()? & i64::from(rustix::fs::OFlags::DIRECT.bits()) != 0;
            found = Some(found.unwrap_or(false) || direct);
        }
    }
    found
}

/// `direct` in the command line or in a job file opens the file with `O_DIRECT`.
#[test]
fn direct_is_direct() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().canonicalize().unwrap().join("disk");
    fs::write(&disk, vec![7; MIB as usize]).unwrap();
    let job = folder.path().join("job.fio");
    let name = disk.display();
    for (words, want) in [("--direct=1", true), ("--buffered=0", true), ("--direct=0", false), ("", false)] {
        let load = "--name=a --rw=randread --runtime=60 --time_based";
        let in_file =
            format!("{load} --filename={name} {words}").replace(" --", "\n").replace("--name=a", "[a]");
        fs::write(&job, in_file).unwrap();
        for words in [format!("{load} --filename={name} {words}"), job.display().to_string()] {
            let mut bench = line("udm", &words).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            let is = until("the file is open, or refused", || {
                let over = bench.try_wait().unwrap().is_some();
                is_open_direct(&bench, &disk).map(Some).or(over.then_some(None))
            });
            let _ = bench.kill();
            let output = text(&bench.wait_with_output().unwrap().stderr);
            match is {
                Some(is) => assert_eq!(is, want, "{words}"),
                // A file system without `O_DIRECT` gives an error.
                None => assert!(want && output.contains("does not support O_DIRECT"), "{words}: {output}"),
            }
        }
    }
}

#[test]
fn what_udm_does_not_have_is_named_with_the_way_out() {
    let folder = tempfile::tempdir().unwrap();
    for (words, want) in [
        ("--name=a --filename=f --size=1M --startdelay=5", "--startdelay"),
        ("--name=a --filename=f --size=1M --rw=write --verify=md5", "--verify"),
        ("--name=a --filename=f --size=1M --flow=8 --rw=read", "--flow"),
        ("--name=a --filename=f --size=1M --ioengine=mmap", "--ioengine"),
        ("--name=a --filename=f --size=1M --random_distribution=zipf", "--random_distribution"),
        ("--name=a --filename=f --size=1M --thinktime=100", "--thinktime"),
        ("--name=a --filename=f --size=1M --bssplit=4k:8k", "--bssplit"),
        ("--name=a --filename=f", "no such file"),
        ("--name=a --device d=0~2048~linear~/tmp/x~0 --direct=1", "direct"),
    ] {
        let words: Vec<_> = words.split(' ').map(|word| word.replace('~', " ")).collect();
        let mut bench = udm(&["bench"]);
        bench.args(&words);
        let (status, _, output) = outcome(bench, folder.path());
        assert!(status != Some(0) && output.contains(want), "{words:?}: {output}");
        let known = ["startdelay", "md5", "flow=", "mmap", "zipf", "think", "split"]
            .iter()
            .any(|word| words.join(" ").contains(word));
        assert_eq!(output.contains("make fio-engine"), known, "{words:?}: {output}");
        assert!(!folder.path().join("f").exists(), "{words:?} made a file");
    }
}

/// A device that completes nothing: the load ends at its run time, or at the first signal.
#[test]
fn a_device_that_answers_nothing_does_not_hold_a_bench() {
    let start = |more: &str| {
        let mut bench =
            udm(&["bench", "--device", "d=0 2048 delay null:size=1M 0 3600000", "--iodepth", "4"]);
        bench.args(more.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
        bench.spawn().unwrap()
    };
    let (by_time, by_signal) = (start("--runtime 1"), start(""));
    let caught = || {
        let status = fs::read_to_string(format!("/proc/{}/status", by_signal.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim().to_owned();
        (u64::from_str_radix(&line, 16).unwrap() & 1 << 1 != 0).then_some(())
    };
    until("a bench that takes signals", caught);
    // Its requests are sent soon afterwards.
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert!(Command::new("kill").args(["-INT", &by_signal.id().to_string()]).status().unwrap().success());
    for mut bench in [by_time, by_signal] {
        until("the end of the bench", || bench.try_wait().unwrap());
        let out = bench.wait_with_output().unwrap();
        let (report, output) = (text(&out.stdout), text(&out.stderr));
        assert_eq!(out.status.code(), Some(1), "{output}");
        assert!(output.contains("4 requests are in flight 1 s after the end"), "{output}");
        assert!(output.contains("4 requests were not answered within 10 s"), "{output}");
        assert!(report.contains("Run status group 0"), "{report}");
    }
}

/// fio's example jobs, from its package or its source.
fn examples() -> Vec<PathBuf> {
    let source = std::env::var_os("FIO_SOURCE").map(PathBuf::from);
    let folders = source.iter().flat_map(|source| [source.join("examples"), source.join("t/jobs")]);
    let installed = PathBuf::from("/usr/share/doc/fio/examples");
    let entries =
        folders.chain([installed]).filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
    let mut all: Vec<_> = entries.map(|entry| entry.path()).collect();
    all.retain(|path| path.extension().is_some_and(|end| end == "fio"));
    all.sort();
    all
}

/// Similar jobs, for machines without fio's examples.
const OWN: [(&str, &str); 10] = [
    (
        "[global]\nioengine=libaio\ndirect=1\niodepth=16\nname=all\n[r]\nrw=randread\n[w]\nrw=randwrite\nstonewall\n",
        "",
    ),
    ("[global]\nfilesize=1m\nbs=4k\n[v]\nrw=write\nverify=crc32c\ndo_verify=1\n[z]\nrw=randread\n", ""),
    ("[z]\nrw=randread\nrandom_distribution=zipf:0.9\n", "random_distribution"),
    ("[b]\nrw=randrw\nbs=4k,8k\n", "bs"),
    ("[n]\nioengine=null\nsize=4m\nrw=randwrite\n", ""),
    ("[f]\nrw=randread\nflow=8\n", "flow"),
    ("[d]\ndirectory=/tmp\nrw=read\n", "directory"),
    ("[m]\nrw=write\nverify=md5\n", "verify"),
    ("[z]\nrw=randwrite\nzonemode=zbd\n", "zonemode"),
    ("[s]\nrw=read:8k\n", "rw"),
];

/// The same jobs, reduced: each section moves up to 1 MiB of a file of 1 MiB.
fn small(job: &str) -> String {
    let limits = "filename=f\nsize=1m\nfilesize=1m\noffset=0\nruntime=5\ntime_based=0\nramp_time=0\n\
                  loops=1\nnumber_ios=0\nnumjobs=1\nrate=0\nrate_iops=0\n";
    let mut out = String::new();
    let mut inside = false;
    for line in job.lines() {
        if line.trim_start().starts_with('[') {
            out += if inside { limits } else { "" };
            inside = !line.contains("[global]");
        }
        out += line;
        out.push('\n');
    }
    out + if inside { limits } else { "" }
}

#[test]
fn each_example_runs_as_with_fio_or_is_refused_by_name() {
    let files: Vec<(String, String)> = examples()
        .into_iter()
        .map(|path| (path.display().to_string(), fs::read_to_string(path).unwrap_or_default()))
        .collect();
    let none = files.is_empty();
    let own = OWN.iter().map(|(text, want)| (format!("own job, {want}"), (*text).to_owned()));
    let (mut run, mut refused) = (0, 0);
    for (name, job) in own.chain(files) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.fio");
        fs::write(&path, small(&job)).unwrap();
        let (status, out, output) = outcome(line("udm", "job.fio --output-format=json"), folder.path());
        let last = output.lines().last().unwrap_or_default();
        if status == Some(0) {
            run += 1;
            if !has("fio") {
                continue;
            }
            let theirs = tempfile::tempdir().unwrap();
            fs::write(theirs.path().join("job.fio"), small(&job)).unwrap();
            let (fios, report, _) = outcome(line("fio", "job.fio --output-format=json"), theirs.path());
            // A job that this machine's fio cannot run is not compared.
            if fios == Some(0) {
                let all = |jobs: &[(String, Vec<(u64, u64)>)]| {
                    jobs.iter()
                        .map(|(name, moved)| (name.clone(), moved.iter().map(|m| m.1).sum::<u64>()))
                        .collect::<Vec<_>>()
                };
                let (ours, fios) = (all(&moved(&out)), all(&moved(&report)));
                assert_eq!(ours.len(), fios.len(), "{name}\n{output}");
                // The last request may be long.
                let near = |a: u64, b: u64| a.abs_diff(b) <= 64 << 10;
                let same = ours.iter().zip(&fios).all(|(a, b)| a.0 == b.0 && near(a.1, b.1));
                assert!(same, "{name}: {ours:?}, fio {fios:?}\n{output}");
            }
            continue;
        }
        refused += 1;
        assert_eq!(status, Some(1), "{name}: {output}");
        let mut option = last.split(['\'', ' ', '=', ':']).map(|word| word.trim_start_matches("--"));
        let is_option = |word: &&str| {
            word.len() > 1
                && job.lines().any(|line| {
                    line.trim_start().strip_prefix(*word).is_some_and(|rest| {
                        !rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
                    })
                })
        };
        let named = option.find(is_option);
        assert!(named.is_some(), "{name}: {last}");
        if let Some(want) = name.strip_prefix("own job, ") {
            assert_eq!(named, Some(want), "{last}");
        }
    }
    assert!(run >= 3 && refused >= 5, "{run} run, {refused} refused");
    if none {
        report_skip("fio's own examples are not installed");
    }
}

/// A file that is too short is extended to the length that fio gives it; a longer file is
/// unchanged.
#[test]
fn files_are_laid_out() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("f");
    let run = |words: &str| outcome(line("udm", words), folder.path());
    let (status, _, output) = run("--name=a --filename=f --size=1M --rw=randread --number_ios=1");
    assert!(status == Some(0) && output.contains("laid out"), "{output}");
    let data = disk.metadata().unwrap();
    assert!(data.len() == MIB && data.blocks() * 512 >= MIB, "a hole would be read as nothing");
    let (status, _, output) = run("--name=a --filename=f --filesize=512k --rw=read --bs=64k");
    assert!(status == Some(0) && !output.contains("laid out"), "{output}");
    assert_eq!(disk.metadata().unwrap().len(), MIB);
    let (status, out, _) =
        run("--name=a --filename=f --filesize=512k --rw=read --bs=64k --output-format=json");
    assert_eq!((status, moved(&out)[0].1[0]), (Some(0), (8, MIB / 2)));
}
