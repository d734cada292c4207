//! Limits of the requests and bytes per second of devices: `udm throttle`, the file, upgrades.

mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;
use support::{Server, has, signal, text, udm, until};
use tempfile::TempDir;

/// fio on `device`, with `words` more, as a process of its own.
fn fio(server: &Server, device: &str, words: &str) -> Child {
    let uri = format!("--uri=nbd+unix:///{device}?socket={}", server.nbd.display());
    Command::new("fio")
        .args(["--name=t", "--ioengine=nbd", &uri, "--output-format=json", "--bs=4k", "--time_based"])
        .args(words.split_whitespace())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// The report of fio for reads or writes: requests and run time in ms.
fn requests(done: &Output, kind: &str) -> (u64, u64) {
    let said = text(&done.stdout);
    assert!(done.status.success(), "{said}");
    // The engine says something before the report.
    let report: Value = serde_json::from_str(&said[said.find('{').unwrap()..]).unwrap();
    let job = &report["jobs"][0];
    assert_eq!(job["error"], 0);
    (job[kind]["total_ios"].as_u64().unwrap(), job[kind]["runtime"].as_u64().unwrap())
}

/// The limits in `udm throttle --json`.
fn limits(server: &Server, device: &str) -> Value {
    let all: Value = serde_json::from_str(&server.says(&["throttle", "--json"])).unwrap();
    all[device].clone()
}

/// fio never gets more than the limit and one burst, and is never stopped for good. Devices of a
/// group share their limit, whatever the depth.
#[test]
fn fio_gets_what_the_limits_allow() {
    if !has("fio") {
        return;
    }
    let server = Server::start_with(&["a=null:1G", "b=null:1G"], &["--cores", "0,1"]);
    server.says(&["throttle", "a", "iops=2000:100", "wbps=4M:64K"]);
    let (reads, time) = requests(
        &fio(&server, "a", "--rw=randread --iodepth=16 --runtime=2").wait_with_output().unwrap(),
        "read",
    );
    // A request counts before it is answered, so those in flight at the end come in addition.
    assert!(reads <= 2000 * (time + 1) / 1000 + 100 + 16, "{reads} in {time} ms");
    assert!(reads >= 500, "{reads} in {time} ms");
    let (writes, time) = requests(
        &fio(&server, "a", "--rw=randwrite --iodepth=16 --runtime=1").wait_with_output().unwrap(),
        "write",
    );
    assert!(writes <= 1024 * (time + 1) / 1000 + 16 + 16, "{writes} in {time} ms");
    let shown = limits(&server, "a");
    assert_eq!((&shown["limits"], &shown["waiting"]), (&"iops=2000:100 wbps=4M:64K".into(), &0.into()));
    assert!(shown["delayed"].as_u64().unwrap() > 500, "{shown}");
    assert_eq!(shown["rates"]["wbps"], serde_json::json!({ "per_second": 4 << 20, "burst": 64 << 10 }));
    assert!(limits(&server, "b").is_null());
    let metrics = server.http("GET", "/metrics", "").2;
    assert!(metrics.contains("udm_device_throttle_limit{device=\"a\",limit=\"iops\"} 2000"), "{metrics}");

    server.says(&["throttle", "a", "--group", "g", "iops=1000"]);
    server.says(&["throttle", "b", "--group", "g"]);
    // On a busy machine, the two may run one after the other.
    let begin = Instant::now();
    let deep = fio(&server, "a", "--rw=randread --iodepth=64 --runtime=2");
    let lone = fio(&server, "b", "--rw=randread --iodepth=1 --runtime=2").wait_with_output().unwrap();
    let (deep, lone) = (requests(&deep.wait_with_output().unwrap(), "read"), requests(&lone, "read"));
    let wall = begin.elapsed().as_millis() as u64;
    assert!(deep.0 + lone.0 <= wall + 1 + 100 + 65, "{deep:?} {lone:?} in {wall} ms");
    // How fair it is, the tests of udm-dm say; here fio shares a busy machine.
    assert!(lone.0 * 100 >= deep.0, "one request at a time beside 64: {lone:?} {deep:?}");
}

/// An upgrade hands limits and groups over, and a client whose requests wait notices nothing.
#[test]
fn limits_go_over_an_upgrade() {
    let mut server = Server::start(&["a=null:1G", "b=null:1G", "c=null:1G"]);
    server.says(&["throttle", "a", "iops=500:5", "rbps=1G"]);
    server.says(&["throttle", "b", "--group", "g", "iops=700"]);
    server.says(&["throttle", "c", "--group", "g"]);
    let client = has("fio").then(|| fio(&server, "a", "--rw=randread --iodepth=8 --runtime=3"));
    if client.is_some() {
        until("requests that wait", || {
            limits(&server, "a")["waiting"].as_u64().filter(|waiting| *waiting > 0)
        });
    }
    server.upgrade(&[support::UDM]);
    let shown = limits(&server, "a");
    assert_eq!((&shown["limits"], &shown["group"]), (&"iops=500:5 rbps=1G".into(), &Value::Null));
    if let Some(client) = client {
        let (reads, time) = requests(&client.wait_with_output().unwrap(), "read");
        // The new server begins with a burst of its own.
        assert!(reads <= 500 * (time + 1) / 1000 + 2 * 5 + 8 + 1, "{reads} in {time} ms");
    }
    // They are one group in the new server too.
    server.says(&["throttle", "c", "--group", "g", "iops=900"]);
    assert_eq!(limits(&server, "b")["limits"], "iops=900");
    server.says(&["throttle", "b", "none"]);
    assert!(limits(&server, "b").is_null());
    server.says(&["throttle", "c", "iops=3"]);
    assert_eq!(limits(&server, "c")["group"], Value::Null);
    let gone = server.refuses(&["throttle", "b", "--group", "g"]);
    assert!(gone.contains("no device is in this group: give its limits"), "{gone}");
}

/// Snapshots that were created by name have their limits when they come back: after a kill, an
/// upgrade and an orderly end, as they were last, and also those that a group's change has given.
#[test]
fn limits_come_back_with_snapshots() {
    let folder = TempDir::new().unwrap();
    let (disk, state) = (folder.path().join("disk"), folder.path().join("state"));
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let device = format!("d={}", disk.display());
    let serve = || Server::start_with(&[&device], &["--state", state.to_str().unwrap()]);
    let mut server = serve();
    for name in ["s", "t", "u", "free"] {
        server.says(&["snapshot", "create", name, "--of", "d"]);
    }
    server.says(&["throttle", "s", "--group", "g", "iops=500"]);
    server.says(&["throttle", "t", "--group", "g"]);
    server.says(&["throttle", "u", "wbps=1M:2M"]);
    server.says(&["throttle", "t", "--group", "g", "iops=700:9"]);
    let shown = "s: iops=700:9, shared by group g; 0 waiting, 0 delayed\n\
                 t: iops=700:9, shared by group g; 0 waiting, 0 delayed\n\
                 u: wbps=1M:2M; 0 waiting, 0 delayed\n";
    assert_eq!(server.says(&["throttle"]), shown);
    server.kill();
    let mut server = serve();
    assert_eq!(server.says(&["throttle"]), shown, "after a kill");
    server.upgrade(&[support::UDM]);
    server.says(&["rename", "u", "v"]);
    server.kill();
    let mut server = serve();
    let shown = shown.replace("u: ", "v: ");
    assert_eq!(server.says(&["throttle"]), shown, "after an upgrade, a rename and a kill");
    server.says(&["throttle", "v", "none"]);
    server.says(&["throttle", "s", "iops=3"]);
    signal(server.pid(), Signal::TERM);
    assert!(server.child.wait().unwrap().success(), "{}", server.log());
    let server = serve();
    let shown = "s: iops=3; 0 waiting, 0 delayed\nt: iops=700:9, shared by group g; 0 waiting, 0 delayed\n";
    assert_eq!(server.says(&["throttle"]), shown);
    // Limits that cannot be recorded hold, and the verb says so.
    fs::rename(state.join("snapshots"), state.join("away")).unwrap();
    fs::write(state.join("snapshots"), "").unwrap();
    let why = server.refuses(&["throttle", "t", "iops=1"]);
    assert!(why.contains("t: it is limited, but only until the server ends: "), "{why}");
    assert_eq!(limits(&server, "t")["limits"], "iops=1");
}

/// A device has the limits of the file from the start, and those that the file has changed after a
/// reconfigure.
#[test]
fn limits_of_a_file() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("udm.toml");
    let write = |a: &str, group: &str| {
        let device = |name: &str, key: &str| format!("[devices.{name}]\ntable = \"0 8 zero\"\n{key}\n");
        let group = format!("[throttle-groups]\ng = \"{group}\"\n");
        let [b, c] = ["b", "c"].map(|name| device(name, "throttle-group = \"g\""));
        fs::write(&file, device("a", a) + &b + &c + &group).unwrap();
    };
    write("throttle = \"iops=5\"", "bps=1M");
    let server = Server::start_with(&[], &[file.to_str().unwrap()]);
    let all = "a: iops=5; 0 waiting, 0 delayed\nb: bps=1M, shared by group g; 0 waiting, 0 delayed\n\
               c: bps=1M, shared by group g; 0 waiting, 0 delayed\n";
    assert_eq!(server.says(&["throttle"]), all);
    write("", "bps=2M");
    assert_eq!(server.says(&["reconfigure"]), "~ a: throttle\n~ b: throttle\n~ c: throttle\n= 0 unchanged\n");
    assert_eq!(server.says(&["throttle", "a"]), "a: none\n");
    assert_eq!(limits(&server, "c")["limits"], "bps=2M");
    assert_eq!(server.says(&["reconfigure"]), "= 3 unchanged\n");
    // What is wrong in the file changes nothing.
    for (a, group, why) in [
        ("throttle = \"iops=0\"", "bps=1M", "devices.a: throttle: iops: 0 is out of range"),
        ("throttle = \"iops=1k\"", "bps=1M", "iops: \"1k\" is not a number of requests"),
        (
            "throttle-group = \"h\"",
            "bps=1M",
            "devices.a: throttle-group: there is no \"h\" in [throttle-groups]",
        ),
        ("throttle = 5", "bps=1M", "devices.a: throttle: expected a string"),
        (
            "throttle-group = \"g\"\nthrottle = \"iops=1\"",
            "bps=1M",
            "expected one of throttle and throttle-group",
        ),
        ("", "none", "throttle-groups: g: \"none\" is not a limit"),
    ] {
        write(a, group);
        let out = udm(&["serve", "--check", file.to_str().unwrap()]).output().unwrap();
        let said = text(&out.stderr);
        assert!(!out.status.success() && said.contains(why), "{said}");
        assert!(said.contains("udm.toml:"), "the place: {said}");
        let refused = server.refuses(&["reconfigure"]);
        assert_eq!(refused.lines().count(), 1, "{refused}");
    }
    assert_eq!(limits(&server, "b")["limits"], "bps=2M");
}

/// Each mistake is refused in one line, and the old limits stay.
#[test]
fn what_is_no_limit_is_refused() {
    let server = Server::start(&["a=null:1M"]);
    server.says(&["throttle", "a", "iops=7"]);
    let long = "g".repeat(128);
    for (words, why) in [
        (&["a", "iops=0"][..], "leave iops out for no limit"),
        (&["a", "iops=9223372036854775808"], "is out of range"),
        (&["a", "bps=99999999999999999999E"], "is too large a size"),
        (&["a", "iop=5"], "use iops, riops, wiops, bps, rbps or wbps"),
        (&["a", "iops=5", "iops=6"], "iops is given twice"),
        (&["a", "none", "--group", "g"], "give no group with it"),
        (&["a", "--group", "g"], "no device is in this group"),
        (&["a", "--group", &long, "iops=5"], "the name of a group has 1 to 127 bytes"),
        (&["b", "iops=5"], "no device of that name"),
    ] {
        let line = server.refuses(&[&["throttle"], words].concat());
        assert!(line.contains(why) && line.lines().count() == 1, "{words:?}: {line}");
    }
    for (body, status) in [("{}", 400), (r#"{"limits":7}"#, 400), (r#"{"limit":"iops=5"}"#, 400)] {
        let (found, _, answer) = server.http("POST", "/v1/devices/a/throttle", body);
        assert!(found == status || found == 422, "{body}: {found} {answer}");
    }
    assert_eq!(server.says(&["throttle", "a"]), "a: iops=7; 0 waiting, 0 delayed\n");
}

/// A device whose requests wait can be suspended, resumed and removed as any other.
#[test]
fn requests_that_wait_hold_nothing_up() {
    if !has("fio") {
        return;
    }
    let mut server = Server::start(&["a=null:1G"]);
    server.says(&["throttle", "a", "iops=1"]);
    let client = fio(&server, "a", "--rw=randread --iodepth=32 --runtime=1");
    until("requests that wait", || limits(&server, "a")["waiting"].as_u64().filter(|waiting| *waiting > 16));
    assert!(server.says(&["top", "--once"]).contains("throttled"));
    server.says(&["suspend", "a"]);
    server.says(&["load", "a", "--table", "0 2097152 zero"]);
    server.says(&["resume", "a"]);
    assert!(limits(&server, "a")["waiting"].as_u64() > Some(16));
    server.says(&["throttle", "a", "none"]);
    requests(&client.wait_with_output().unwrap(), "read");
    assert!(limits(&server, "a").is_null());
    server.says(&["throttle", "a", "iops=1"]);
    let mut client = fio(&server, "a", "--rw=randread --iodepth=32 --runtime=60");
    until("requests that wait", || limits(&server, "a")["waiting"].as_u64().filter(|waiting| *waiting > 16));
    // An upgrade does not wait for 32 s.
    server.upgrade(&[support::UDM]);
    assert!(client.try_wait().unwrap().is_none());
    assert_eq!(limits(&server, "a")["limits"], "iops=1");
    until("requests that wait", || limits(&server, "a")["waiting"].as_u64().filter(|waiting| *waiting > 16));
    // A forced removal fails what waits. The device stays only if the client is still connected.
    server.verb(&["remove", "--force", "a"]);
    assert!(!client.wait().unwrap().success());
    until("a removed device", || {
        server.verb(&["remove", "a"]);
        (!server.says(&["ls"]).starts_with("a")).then_some(())
    });
}
