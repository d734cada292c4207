//! Null devices that share their tags, through the program: fio on both, and the tags that each
//! holds.

mod support;

use serde_json::Value;
use std::process::Child;
use support::servers::fio;
use support::{Server, has, report_skip, text, until};

fn disk(ms: u64, more: &str) -> String {
    format!("null:size=1G,irqmode=2,completion_nsec={ms}000000,shared_tags=1{more}")
}

/// The shared tags of a device's disk with one hardware queue: held, limit, total, and number of
/// disks.
fn shared(server: &Server, device: &str) -> Option<[u64; 4]> {
    let queues: Value = serde_json::from_str(&server.says(&["queue", device, "--json"])).unwrap();
    let shared = &queues[0]["hw_queues"][0]["shared"];
    let number = |name: &str| shared[name].as_u64();
    Some([number("held")?, number("most")?, number("tags")?, number("disks")?])
}

fn read(server: &Server, device: &str) -> Child {
    let load =
        "--rw=randread --size=1g --verify=0 --iodepth=128 --time_based --runtime=3 --output-format=json";
    fio(server, device, load).spawn().unwrap()
}

/// Number of reads completed.
fn reads(run: Child) -> u64 {
    let run = run.wait_with_output().unwrap();
    assert!(run.status.success(), "{}{}", text(&run.stdout), text(&run.stderr));
    // fio may print messages first.
    let output = text(&run.stdout);
    let report: Value = serde_json::from_str(&output[output.find('{').unwrap()..]).unwrap();
    report["jobs"][0]["read"]["total_ios"].as_u64().unwrap()
}

/// A disk of 1 ms and one of 100 ms per request: the slow one does not take the tags from the fast
/// one.
#[test]
fn b09_two_devices_share_64_tags() {
    if !has("fio") {
        return report_skip("fio is not installed");
    }
    let device = |name: &str, disk: &str| format!("{name}=0 2097152 linear {disk} 0");
    let (fast, slow) = (disk(1, ",nomerges=2"), disk(100, ""));
    let devices =
        [device("fast", &fast), device("slow", &slow), device("other", &disk(1, ",hw_queue_depth=8"))];
    let devices = devices.each_ref().map(String::as_str);
    let server = Server::start_with(&devices, &["--cores", "0,1"]);
    let of_slow = read(&server, "slow");
    let alone = until("the slow one alone", || shared(&server, "slow").filter(|now| now[0] > 32));
    assert_eq!(alone[1..], [64, 64, 1], "all tags are there for one");
    let of_fast = read(&server, "fast");
    // The slow disk keeps its tags until its requests complete.
    until("each has its share", || {
        let both = ["fast", "slow"].map(|name| shared(&server, name));
        both.iter().flatten().all(|now| now[0] <= 32 && now[0] > 0 && now[3] == 2).then_some(())
    });
    for _ in 0..20 {
        let both = ["fast", "slow"].map(|name| shared(&server, name).unwrap());
        assert!(both.iter().all(|now| now[0] <= 32 && now[1..] == [32, 64, 2]), "{both:?}");
    }
    assert_eq!(shared(&server, "other"), None, "of another number of tags, and nobody uses it");
    let (of_slow, of_fast) = (reads(of_slow), reads(of_fast));
    assert!(of_fast >= of_slow && of_slow > 0, "{of_fast} and {of_slow}");
    let shown = server.says(&["queue", "slow"]);
    assert!(
        shown.contains("0 of 64 tags in use; 0 of 64 shared with other disks, 64 at the most, 0 active"),
        "{shown}"
    );
}

/// Data is correct with four tags for two disks while the queue settings change.
#[test]
fn fio_verifies_over_shared_tags() {
    if !has("fio") {
        return report_skip("fio is not installed");
    }
    let disk = "null:size=8M,memory_backed=1,irqmode=2,completion_nsec=20000,hw_queue_depth=4,shared_tags=1";
    let devices = ["a", "b"].map(|name| format!("{name}=0 16384 linear {disk} 0"));
    let second = devices[1].replace("shared_tags=1", "shared_tags=1,max_segments=64");
    let server = Server::start_with(&[&devices[0], &second], &["--cores", "0,1"]);
    let mut runs = ["a", "b"].map(|name| {
        let load = "--rw=randwrite --bsrange=4k-64k --size=8m --io_size=32m --do_verify=1 --verify_fatal=1";
        fio(&server, name, load).spawn().unwrap()
    });
    let mut changes = 0;
    while runs.iter_mut().any(|run| run.try_wait().unwrap().is_none()) {
        let scheduler = ["scheduler=mq-deadline", "scheduler=none"][changes % 2];
        assert_eq!(server.says(&["queue", "a", scheduler]), "");
        changes += 1;
    }
    for run in runs {
        let run = run.wait_with_output().unwrap();
        assert!(run.status.success(), "{}{}", text(&run.stdout), text(&run.stderr));
    }
    assert!(changes > 1, "{changes} changes");
}
