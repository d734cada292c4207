//! Queues in front of disks, through the program: fio verifies its data, the disk never has more
//! requests than tags, and the settings are shown.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use support::nbd::Client;
use support::servers::fio;
use support::{Server, has, report_skip, text};

/// Two cores that share a queue: without a scheduler, with one scheduler for both, and without
/// merging.
#[test]
fn fio_verifies_through_a_queue() {
    if !has("fio") {
        return report_skip("fio is not installed");
    }
    for words in [
        "queue_depth=2&nr_hw_queues=1",
        "scheduler=mq-deadline&queue_depth=4",
        "queue_depth=1&nr_hw_queues=1&nomerges=2&max_sectors_kb=4",
    ] {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk.img");
        fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
        let device = format!("d=0 16384 linear file:{}?{words} 0", image.display());
        let server = Server::start_with(&[&device], &["--cores", "0,1"]);
        for load in ["--rw=randwrite --bsrange=4k-64k", "--rw=write", "--rw=randrw --rwmixread=30"] {
            let load = format!("{load} --size=8m --numjobs=1 --do_verify=1 --verify_fatal=1");
            let run = fio(&server, "d", &load).output().unwrap();
            assert!(run.status.success(), "{words}, {load}: {}{}", text(&run.stdout), text(&run.stderr));
        }
        // Two clients, one per core.
        let halves = ["--offset=0", "--offset=4m"].map(|half| {
            let load = format!("{half} --size=4m --rw=randwrite --do_verify=1 --verify_fatal=1");
            fio(&server, "d", &load).spawn().unwrap()
        });
        for run in halves {
            let run = run.wait_with_output().unwrap();
            assert!(run.status.success(), "{words}: {}{}", text(&run.stdout), text(&run.stderr));
        }
    }
}

/// A disk that needs 20 ms per request, and 64 requests: with four tags for all cores, that takes
/// at least 16 rounds.
#[test]
fn the_depth_is_that_of_all_cores_together() {
    for (queues, least) in [(1, 16), (2, 8)] {
        let device = format!(
            "null:size=1G,irqmode=2,completion_nsec=20000000,hw_queue_depth=4,submit_queues={queues},scheduler=none"
        );
        let load = "--rw randread --iodepth 16 --numjobs 2 --number_ios 32 --json";
        let run = support::udm(&["bench", "--device", &device]).args(load.split(' ')).output().unwrap();
        assert!(run.status.success(), "{}", text(&run.stderr));
        let report: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
        let jobs = report["jobs"].as_array().unwrap();
        let done: u64 = jobs.iter().map(|job| job["read"]["total_ios"].as_u64().unwrap()).sum();
        let took = jobs.iter().map(|job| job["read"]["runtime"].as_u64().unwrap()).max().unwrap();
        assert_eq!(done, 64);
        assert!(took >= least * 20, "{queues} queues of 4 tags: 64 requests of 20 ms took {took} ms");
    }
}

/// The settings are shown with their defaults; dmsetup's output does not contain them.
#[test]
fn info_shows_the_queues_of_a_table() {
    let table = "d=0 16 linear mem:1M,queue_depth=3,scheduler=none 0\n16 16 linear null:hw_queue_depth=7,submit_queues=1,scheduler=mq-deadline 0\n32 16 linear mem:1M 0";
    let server = Server::start_with(&[table], &["--cores", "0,1"]);
    let shown = server.says(&["info", "d"]);
    let queues = shown.split_once("Number of targets: 3\n").unwrap().1;
    assert_eq!(
        queues,
        "Queue of 253:0 mem:1M,queue_depth=3:\n  scheduler=none fifo_batch=16 front_merges=1 \
         max_hw_sectors_kb=2147483647 max_sectors_kb=1280 max_segments=128 nomerges=0 nr_hw_queues=2 \
         nr_requests=3 queue_depth=3 read_expire=500 write_expire=5000 writes_starved=2\n  \
         core 0: 0 of 3 tags in use\n  core 1: 0 of 3 tags in use\n\
         Queue of 253:1 null:size=250G,hw_queue_depth=7,scheduler=mq-deadline:\n  \
         scheduler=mq-deadline fifo_batch=16 front_merges=1 \
         max_hw_sectors_kb=2147483647 max_sectors_kb=1280 max_segments=128 nomerges=0 nr_hw_queues=1 \
         nr_requests=14 queue_depth=7 read_expire=500 write_expire=5000 writes_starved=2\n  \
         cores 0,1: 0 of 7 tags in use\n\n"
    );
    let info: serde_json::Value = serde_json::from_str(&server.says(&["info", "d", "--json"])).unwrap();
    let queues = &info[0]["queues"];
    assert_eq!((&queues[0]["number"], &queues[0]["scheduler"]), (&"253:0".into(), &"none".into()));
    assert_eq!(
        (&queues[1]["settings"]["nr_requests"], &queues[1]["settings"]["queue_depth"]),
        (&14.into(), &7.into())
    );
    assert_eq!(queues[1]["hw_queues"][0]["cores"], serde_json::json!([0, 1]));
    assert!(queues[2].is_null(), "{queues}");
    // A limit of the URI cannot be changed.
    server.says(&["create", "n", "--table", "0 16 linear null:no_sched=1,hw_queue_depth=9,scheduler=none 0"]);
    assert_eq!(
        server.refuses(&["queue", "n", "scheduler=mq-deadline"]),
        "udm: n: 253:3: no_sched=1 forbids a scheduler\n"
    );
    assert_eq!(server.says(&["queue", "n", "scheduler=none", "nr_requests=5"]), "");
}

/// Two clients on one core each verify their data while the scheduler and all other settings change
/// repeatedly, as in blktests block/047.
#[test]
fn fio_verifies_over_changes_of_the_scheduler() {
    if !has("fio") {
        return report_skip("fio is not installed");
    }
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.img");
    fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let words = "queue_depth=3&nr_hw_queues=1";
    let device = format!("d=0 32768 linear file:{}?{words} 0", image.display());
    let server = Server::start_with(&[&device], &["--cores", "0,1"]);
    let mut runs = ["--offset=0", "--offset=8m"].map(|half| {
        let load = "--rw=randwrite --bsrange=4k-64k --size=8m --io_size=64m --do_verify=1 --verify_fatal=1";
        fio(&server, "d", &format!("{half} {load}")).spawn().unwrap()
    });
    let mut changes = 0;
    while runs.iter_mut().any(|run| run.try_wait().unwrap().is_none()) {
        let scheduler = ["scheduler=mq-deadline", "scheduler=none"][changes % 2];
        let nomerges = ["nomerges=0", "nomerges=2"][changes / 2 % 2];
        assert_eq!(server.says(&["queue", "d", scheduler, nomerges, "max_sectors_kb=32"]), "");
        changes += 1;
        let shown = server.says(&["queue", "d"]);
        assert!(shown.contains(scheduler) && shown.contains(nomerges), "{shown}");
    }
    for run in runs {
        let run = run.wait_with_output().unwrap();
        assert!(run.status.success(), "{}{}", text(&run.stdout), text(&run.stderr));
    }
    assert!(changes > 4, "{changes} changes");
    let refused = |settings: &[&str]| server.refuses(&[&["queue", "d"], settings].concat());
    assert_eq!(
        refused(&["scheduler=none", "nr_requests=4"]),
        "udm: d: 253:0: nr_requests=4 is more than 3, queue_depth\n"
    );
    assert_eq!(
        refused(&["queue_depth=4"]),
        "udm: d: 253:0: queue_depth can't be changed while the disk is in use\n"
    );
    assert_eq!(
        refused(&["nomerges=1", "--disk", "253:7"]),
        "udm: d: its table uses no \"253:7\" with a queue in front\n"
    );
    assert_eq!(refused(&["--disk", "x"]), "udm: d: its table uses no \"x\" with a queue in front\n");
    assert_eq!(refused(&["nomerges"]), "udm: \"nomerges\" is not NAME=VALUE\n");
    assert_eq!(refused(&["nomerges=0", "nomerges=1"]), "udm: nomerges is given twice\n");
}

/// Parameters of dm-mod for request-based multipath, with the kernel's defaults.
#[test]
fn a_request_based_device_has_its_own_queue() {
    let disk = "null:size=1G,irqmode=2,completion_nsec=100000000";
    let mp = format!("0 2097152 multipath 0 0 1 1 queue-length 0 2 1 {disk} 1 {disk},no_sched=1 1");
    let bio = mp.replace("multipath 0", "multipath 2 queue_mode bio");
    let devices = [format!("mp={mp}"), format!("bio={bio}"), "low=0 16 linear mem:1M 0".to_owned()];
    let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
    let more = ["--cores", "0,1", "--dm_mq_queue_depth", "4", "--dm_mq_nr_hw_queues=1"];
    let server = Server::start_with(&devices, &more);
    let shown = |name: &str| -> serde_json::Value {
        let info: serde_json::Value = serde_json::from_str(&server.says(&["info", name, "--json"])).unwrap();
        info[0]["queues"].clone()
    };
    let queue = |name: &str| {
        let queues = shown(name);
        let number = |name: &str| queues[0]["settings"][name].as_u64().unwrap();
        let scheduler = queues[0]["scheduler"].as_str().unwrap().to_owned();
        assert_eq!(queues[0]["uri"], format!("@{name}"));
        (scheduler, number("queue_depth"), number("nr_hw_queues"), number("nr_requests"))
    };
    assert_eq!(queue("mp"), ("mq-deadline".into(), 4, 1, 8));
    assert_eq!((shown("bio"), shown("low")), (serde_json::json!([]), serde_json::json!([])));
    // Parameters of the device take precedence, within the kernel's limits.
    server.says(&["create", "own", "--dm_mq_queue_depth=99999", "--dm_mq_nr_hw_queues=2", "--table", &mp]);
    assert_eq!(queue("own"), ("none".into(), 10240, 2, 10240));
    let refused = text(&server.verb(&["create", "x", "--dm_mq_queue_depth=-1", "--table", &mp]).stderr);
    assert!(refused.contains("invalid value '-1' for '--dm_mq_queue_depth <N>'"), "{refused}");
    if !has("fio") {
        return report_skip("fio is not installed");
    }
    // 64 reads of 100 ms: with 16 at a time they take 0.4 s, with four 1.6 s.
    let read = || {
        let begun = std::time::Instant::now();
        let load = "--rw=randread --size=1g --number_ios=64 --verify=0";
        let run = fio(&server, "mp", load).output().unwrap();
        assert!(run.status.success(), "{}{}", text(&run.stdout), text(&run.stderr));
        begun.elapsed().as_millis()
    };
    assert!(read() >= 1600);
    // The settings persist over a suspend, another scheduler and another table.
    server.says(&["queue", "mp", "scheduler=none"]);
    server.says(&["suspend", "mp"]);
    server.says(&["load", "mp", "--table", &mp]);
    server.says(&["resume", "mp"]);
    assert_eq!(queue("mp"), ("none".into(), 4, 1, 4));
    assert!(read() >= 1600);
}

/// A request that does not complete keeps its tag: the change is cancelled after a while, and other
/// requests continue.
#[test]
fn a_change_waits_for_requests_of_before_and_not_for_ever() {
    let mp = "mp=0 2048 multipath 1 queue_if_no_path 0 1 1 queue-length 0 1 1 mem:1M 1";
    let server = Server::start_with(&[mp], &["--dm_mq_queue_depth=8"]);
    server.says(&["message", "mp", "0", "fail_path 253:0"]);
    let mut client = Client::connect(&server.nbd, "mp");
    client.ask_read(0);
    support::until("a request with a tag", || server.says(&["queue", "mp"]).contains("1 of 8").then_some(()));
    // A request that is sent while the change waits has to wait too, and other changes are refused.
    let mut change = support::udm(&["queue", "mp", "nomerges=2", "--socket"])
        .arg(&server.socket)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    support::until("the change in line", || {
        server.says(&["queue", "mp"]).contains(", 1 in line").then_some(())
    });
    client.ask_read(8);
    support::until("both in line", || server.says(&["queue", "mp"]).contains(", 2 in line").then_some(()));
    assert_eq!(
        server.refuses(&["queue", "mp", "nomerges=1"]),
        "udm: mp: 254:0: another change of the queue is in progress: Device or resource busy\n"
    );
    support::until("the end of the change", || change.try_wait().unwrap());
    let refused = change.wait_with_output().unwrap();
    assert_eq!(
        text(&refused.stderr),
        "udm: mp: requests that were sent before do not complete; the settings are as they were: Connection \
         timed out\n"
    );
    assert!(server.says(&["queue", "mp"]).contains("nomerges=0"));
    // The tags are free again: the second request gets one, and so does a third.
    client.ask_read(16);
    support::until("three with a tag", || server.says(&["queue", "mp"]).contains("3 of 8").then_some(()));
    // A client that disconnects cancels its change as well.
    let mut change =
        support::udm(&["queue", "mp", "nomerges=2", "--socket"]).arg(&server.socket).spawn().unwrap();
    support::until("the change in line", || {
        server.says(&["queue", "mp"]).contains(", 1 in line").then_some(())
    });
    change.kill().unwrap();
    change.wait().unwrap();
    support::until("no change", || server.says(&["queue", "mp"]).contains("3 of 8").then_some(()));
    server.says(&["message", "mp", "0", "reinstate_path 253:0"]);
    assert_eq!((client.error(), client.error(), client.error()), (0, 0, 0));
    server.says(&["queue", "mp", "nomerges=2"]);
    assert!(server.says(&["queue", "mp"]).contains("nomerges=2"));
    // A device that is renamed during the wait is still the same device.
    server.says(&["message", "mp", "0", "fail_path 253:0"]);
    client.ask_read(0);
    support::until("a request with a tag", || server.says(&["queue", "mp"]).contains("1 of 8").then_some(()));
    let waits = support::udm(&["queue", "mp", "nomerges=0", "--socket"]).arg(&server.socket).spawn();
    support::until("the change in line", || {
        server.says(&["queue", "mp"]).contains(", 1 in line").then_some(())
    });
    server.says(&["rename", "mp", "other"]);
    server.says(&["message", "other", "0", "reinstate_path 253:0"]);
    assert_eq!(client.error(), 0);
    let mut waits = waits.unwrap();
    assert!(support::until("the end of the change", || waits.try_wait().unwrap()).success());
    assert!(server.says(&["queue", "other"]).contains("nomerges=0"));
}

/// Requests of the API that the verb never sends.
#[test]
fn a_change_of_nothing_or_of_one_thing_twice_is_refused() {
    let server = Server::start(&["d=0 2048 linear mem:1M,queue_depth=4 0"]);
    let asked = |body: &str| {
        let mut stream = UnixStream::connect(&server.socket).unwrap();
        let head = "POST /v1/devices/d/queue HTTP/1.1\r\nHost: udm\r\nConnection: close\r\nContent-Type: application/json";
        write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 400 "), "{answer}");
        let refused: serde_json::Value = serde_json::from_str(body).unwrap();
        refused["error"].as_str().unwrap().to_owned()
    };
    assert_eq!(asked(r#"{"settings":{}}"#), "d: there are no settings to change");
    let twice = asked(r#"{"settings":{"nomerges":"1","nomerges":"2"}}"#);
    assert!(twice.starts_with("request: \"nomerges\" is given twice at line 1 "), "{twice}");
    assert!(server.says(&["queue", "d"]).contains("nomerges=0"));
}

/// The same over a request-based device's own queue, which is suspended and reloaded, with one core
/// that owns the scheduler.
#[test]
fn fio_verifies_through_the_queue_of_a_request_based_device() {
    if !has("fio") {
        return report_skip("fio is not installed");
    }
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.img");
    fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let table = format!("0 32768 multipath 1 queue_if_no_path 0 1 1 round-robin 0 1 1 {} 1", image.display());
    let device = format!("mp={table}");
    let more = ["--cores", "0,1", "--dm_mq_queue_depth=3"];
    let server = Server::start_with(&[&device], &more);
    let mut runs = ["--offset=0", "--offset=8m"].map(|half| {
        let load = "--rw=randwrite --bsrange=4k-64k --size=8m --io_size=48m --do_verify=1 --verify_fatal=1";
        fio(&server, "mp", &format!("{half} {load}")).spawn().unwrap()
    });
    let mut turns = 0;
    while runs.iter_mut().any(|run| run.try_wait().unwrap().is_none()) {
        let suspend: &[&str] =
            if turns % 2 == 0 { &["suspend", "mp"] } else { &["suspend", "--noflush", "mp"] };
        server.says(suspend);
        server.says(&["load", "mp", "--table", &table]);
        server.says(&["resume", "mp"]);
        server.says(&["queue", "mp", ["scheduler=none", "scheduler=mq-deadline"][turns / 2 % 2]]);
        turns += 1;
    }
    for run in runs {
        let run = run.wait_with_output().unwrap();
        assert!(run.status.success(), "{}{}", text(&run.stdout), text(&run.stderr));
    }
    assert!(turns > 4, "{turns} turns");
}

/// Requests of a device above wait in the queue on the core with the scheduler. A suspend of that
/// device without flush gets them back, while the device with the queue is suspended or has no
/// path. Requests of other devices stay. At the resume the requests are sent to the table that is
/// then live.
#[test]
fn a_suspend_above_takes_back_what_waits_for_the_one_order() {
    let mp = "mp=0 2048 multipath 1 queue_if_no_path 0 1 1 queue-length 0 1 1 mem:1M 1";
    let (up, other) = ("up=0 2048 linear @mp 0", "other=0 2048 linear @mp 0");
    let server = Server::start_with(&[mp, up, other], &["--cores", "0,1", "--dm_mq_queue_depth=4"]);
    let in_use =
        |tags: &str| support::until(tags, || server.says(&["queue", "mp"]).contains(tags).then_some(()));
    let fails: [&[&str]; 2] = [&["suspend", "mp"], &["message", "mp", "0", "fail_path 253:0"]];
    let works: [&[&str]; 2] = [&["resume", "mp"], &["message", "mp", "0", "reinstate_path 253:0"]];
    let sectors = [0_u64, 1, 2, 40, 80];
    for (fail, work) in fails.into_iter().zip(works) {
        // Clients on both cores, more requests than there are tags, and some adjacent ones.
        let mut clients = [0; 4].map(|_| Client::connect(&server.nbd, "up"));
        let mut beside = Client::connect(&server.nbd, "other");
        server.says(fail);
        beside.ask_read(9);
        in_use("1 of 4 tags in use");
        for client in &mut clients {
            sectors.into_iter().for_each(|sector| client.ask_read(sector));
        }
        in_use("4 of 4 tags in use");
        assert!(server.refuses(&["suspend", "up", "--timeout", "0.2"]).contains("the device is active"));
        server.says(&["suspend", "--noflush", "up", "--timeout", "20"]);
        in_use("1 of 4 tags in use");
        // They are sent again through another table.
        server.says(&["load", "up", "--table", "0 2048 linear pattern:1M 0"]);
        server.says(&["resume", "up"]);
        for client in &mut clients {
            for _ in sectors {
                let (cookie, error, data) = client.answer().unwrap();
                let offset = sectors[cookie as usize] * 512;
                assert_eq!((error, &data[..8]), (0, &offset.to_be_bytes()[..]));
            }
        }
        server.says(work);
        assert_eq!(beside.error(), 0);
        in_use("0 of 4 tags in use");
        server.says(&["load", "up", "--table", "0 2048 linear @mp 0"]);
        server.says(&["resume", "up"]);
    }
}

/// A disk that would requeue its requests without end returns them at a suspend, also if one core
/// owns the scheduler.
#[test]
fn a_suspend_reaches_the_disk_behind_the_one_order() {
    let disk = "null:size=1M,irqmode=2,hw_queue_depth=4,scheduler=mq-deadline,requeue=1,100,0,-1";
    let server = Server::start_with(&[&format!("d=0 2048 linear {disk} 0")], &["--cores", "0,1"]);
    let mut clients = [0; 4].map(|_| Client::connect(&server.nbd, "d"));
    for client in &mut clients {
        (0..5).for_each(|sector| client.ask_read(sector * 8));
    }
    server.says(&["suspend", "--noflush", "d", "--timeout", "20"]);
    server.says(&["resume", "d"]);
    server.says(&["suspend", "d", "--timeout", "20"]);
    for client in &mut clients {
        (0..5).for_each(|_| assert_eq!(client.error(), 0));
    }
    server.says(&["resume", "d"]);
}

/// The same under load on both cores, repeatedly, without losing a request.
#[test]
fn fio_verifies_over_suspends_above_a_device_that_is_suspended() {
    if !has("fio") {
        return report_skip("fio is not installed");
    }
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.img");
    fs::File::create(&image).unwrap().set_len(24 << 20).unwrap();
    let mp = format!("mp=0 49152 multipath 1 queue_if_no_path 0 1 1 round-robin 0 1 1 {} 1", image.display());
    let (up, other) = ("up=0 32768 linear @mp 0", "other=0 16384 linear @mp 32768");
    let server = Server::start_with(&[&mp, up, other], &["--cores", "0,1", "--dm_mq_queue_depth=3"]);
    let mut runs =
        [("up", "--offset=0"), ("up", "--offset=8m"), ("other", "--offset=0")].map(|(name, part)| {
            let load =
                "--rw=randwrite --bsrange=4k-64k --size=8m --io_size=48m --do_verify=1 --verify_fatal=1";
            fio(&server, name, &format!("{part} {load}")).spawn().unwrap()
        });
    let mut turns = 0;
    while runs.iter_mut().any(|run| run.try_wait().unwrap().is_none()) {
        let flush: &[&str] = if turns % 2 == 0 { &[] } else { &["--noflush"] };
        server.says(&[&["suspend", "mp"], flush].concat());
        server.says(&["suspend", "--noflush", "up", "--timeout", "20"]);
        let order = if turns % 3 == 0 { ["mp", "up"] } else { ["up", "mp"] };
        order.iter().for_each(|name| _ = server.says(&["resume", name]));
        turns += 1;
    }
    for run in runs {
        let run = run.wait_with_output().unwrap();
        assert!(run.status.success(), "{}{}", text(&run.stdout), text(&run.stderr));
    }
    assert!(turns > 4, "{turns} turns");
}

#[test]
fn words_that_make_no_queue_are_refused_in_one_line() {
    let refused = |word: &str| {
        let run = support::udm(&["bench", "--device", word, "--number_ios", "1"]).output().unwrap();
        assert!(!run.status.success());
        text(&run.stderr)
    };
    let output = refused("mem:1M,scheduler=bfq");
    assert!(output.contains("mem: scheduler=\"bfq\" is neither none nor mq-deadline"), "{output}");
    let output = refused("null:queue_depth=3");
    assert!(output.contains("null: a null device has hw_queue_depth for queue_depth"), "{output}");
}
