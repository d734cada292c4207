//! `/metrics` in the Prometheus text format, and the same numbers as JSON in `/v1/stats`.

mod support;

use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::process::{Command as Program, Stdio};
use support::nbd::Client;
use support::{Server, has, until};
use udm_wire::nbd::NbdCommand;

/// The value of each sample, by its metric with labels.
type Samples = BTreeMap<String, f64>;

fn look(server: &Server) -> (String, Samples) {
    let (status, head, text) = server.http("GET", "/metrics", "");
    assert_eq!(status, 200);
    assert!(head.contains("content-type: text/plain; version=0.0.4\r\n"), "{head}");
    let samples = parse(&text);
    (text, samples)
}

/// Parses the format by its rules. Each family has its help and its type before its samples, which
/// are consecutive. No series occurs twice, and histogram buckets are cumulative.
fn parse(text: &str) -> Samples {
    let (mut samples, mut kinds) = (Samples::new(), HashMap::new());
    let mut family = ("", "");
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            assert!(!help.is_empty() && kinds.insert(name, "").is_none(), "{name} comes twice");
            family = (name, "");
            continue;
        }
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(["counter", "gauge", "histogram"].contains(&kind) && name == family.0, "{line}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            family = (name, kind);
            continue;
        }
        let (series, value) = line.rsplit_once(' ').unwrap();
        let name = series.split('{').next().unwrap();
        let ends: &[&str] = if family.1 == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
        assert!(ends.iter().any(|end| name == format!("{}{end}", family.0)), "{line} in {}", family.0);
        let value: f64 = value.parse().unwrap();
        assert!(value >= 0.0 && samples.insert(series.into(), value).is_none(), "{line}");
    }
    let buckets = samples.iter().filter(|(series, _)| series.contains("le=\"+Inf\""));
    for (series, all) in buckets {
        let count = series.replace("_bucket", "_count").replace(",le=\"+Inf\"", "");
        assert_eq!(samples.get(&count), Some(all), "{series}");
        let (head, _) = series.split_once("le=").unwrap();
        let bound = |series: &str| series.split("le=\"").nth(1)?.split('"').next()?.parse::<f64>().ok();
        let mut steps: Vec<_> =
            samples.range(head.to_owned()..).take_while(|(s, _)| s.starts_with(head)).collect();
        steps.sort_by(|(a, _), (b, _)| bound(a).partial_cmp(&bound(b)).unwrap());
        assert!(steps.windows(2).all(|pair| pair[0].1 <= pair[1].1), "{steps:?}");
    }
    samples
}

/// Checks the text with promtool.
fn lint(text: &str) {
    if !has("promtool") {
        return;
    }
    let mut program = Program::new("promtool");
    program.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = program.spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    let output = support::text(&out.stdout) + &support::text(&out.stderr);
    assert!(out.status.success() && output.is_empty(), "{output}");
}

#[test]
fn what_clients_asked_for() {
    let server = Server::start(&["d=0 2048 linear mem:1M 0", "idle=0 8 zero", "e=0 8 error"]);
    let mut client = Client::connect(&server.nbd, "d");
    for (command, offset, len) in [
        (NbdCommand::Write, 0, 4096),
        (NbdCommand::Write, 4097, 512),
        (NbdCommand::Read, 0, 8192),
        (NbdCommand::Flush, 0, 0),
        (NbdCommand::Trim, 8192, 8192),
        (NbdCommand::WriteZeroes, 0, 1 << 20),
    ] {
        assert_eq!(client.one(command, offset, len), 0);
    }
    assert_ne!(client.one(NbdCommand::Read, 1 << 20, 512), 0);
    assert_ne!(Client::connect(&server.nbd, "e").write(0), 0);
    // A core counts requests before it replies, but publishes its own counters at the end of its
    // turn.
    let (text, all) = until("all that was counted", || {
        let (text, all) = look(&server);
        (all[r#"udm_core_requests_total{core="0"}"#] >= 8.0).then_some((text, all))
    });
    lint(&text);
    for (op, requests, bytes, errors, timed) in [
        ("write", 2.0, 4608.0, 0.0, 2.0),
        ("read", 2.0, 8192.0, 1.0, 1.0),
        ("flush", 1.0, 0.0, 0.0, 1.0),
        ("discard", 1.0, 8192.0, 0.0, 1.0),
        ("write-zeroes", 1.0, 1048576.0, 0.0, 1.0),
    ] {
        let of = |name: &str| all[&format!(r#"{name}{{device="d",op="{op}"}}"#)];
        assert_eq!(of("udm_requests_total"), requests, "{op}");
        assert_eq!(of("udm_request_bytes_total"), bytes, "{op}");
        assert_eq!(of("udm_request_errors_total"), errors, "{op}");
        // A refused request never reached the device.
        assert_eq!(of("udm_request_duration_seconds_count"), timed, "{op}");
    }
    assert_eq!(all[r#"udm_request_errors_total{device="e",op="write"}"#], 1.0);
    assert_eq!(all[r#"udm_requests_in_flight{device="d"}"#], 0.0);
    assert_eq!(all[r#"udm_device_users{device="d"}"#], 1.0);
    assert_eq!(all[r#"udm_device_size_bytes{device="idle"}"#], 4096.0);
    assert!(!text.contains(r#"device="idle",op"#), "nobody asked it for anything");

    // The counters belong to the device, across renames and reloads.
    server.says(&["rename", "d", r#"a "b"\c"#]);
    server.says(&["load", r#"a "b"\c"#, "--table", "0 2048 zero"]);
    server.says(&["resume", r#"a "b"\c"#]);
    assert_eq!(client.one(NbdCommand::Write, 0, 4096), 0);
    let (text, all) = look(&server);
    lint(&text);
    assert_eq!(all[r#"udm_requests_total{device="a \"b\"\\c",op="write"}"#], 3.0);
    server.says(&["suspend", r#"a "b"\c"#]);
    client.ask(NbdCommand::Read, 0, 4096);
    until("the request is held", || {
        (look(&server).1[r#"udm_requests_in_flight{device="a \"b\"\\c"}"#] == 1.0).then_some(())
    });
    assert_eq!(look(&server).1[r#"udm_device_suspended{device="a \"b\"\\c"}"#], 1.0);
    server.says(&["resume", r#"a "b"\c"#]);
    assert_eq!(client.error(), 0);
    assert!(look(&server).1[r#"udm_request_duration_seconds_sum{device="a \"b\"\\c",op="read"}"#] > 0.0);
}

/// A disk that needs 2 s per request: reads and writes in flight are counted separately, as in the
/// kernel's `inflight`.
#[test]
fn b07_reads_and_writes_in_flight() {
    let table = "d=0 8192 linear null:size=4M,irqmode=2,completion_nsec=2000000000 0";
    let server = Server::start_with(&[table], &["--cores", "0,1"]);
    let in_flight = || -> [f64; 2] {
        let (_, _, body) = server.http("GET", "/v1/stats", "");
        let stats: Value = serde_json::from_str(&body).unwrap();
        let one = &stats["devices"][0];
        let of = |op: &str| one["served"][op]["in_flight"].as_f64().unwrap_or(0.0);
        assert_eq!(one["in_flight"].as_f64(), Some(of("read") + of("write")));
        [of("read"), of("write")]
    };
    let reaches = |counts: [f64; 2]| until(&format!("{counts:?}"), || (in_flight() == counts).then_some(()));
    assert_eq!(in_flight(), [0.0, 0.0]);
    let mut clients = [(); 2].map(|()| Client::connect(&server.nbd, "d"));
    clients[0].ask(NbdCommand::Read, 0, 4096);
    reaches([1.0, 0.0]);
    clients[1].ask(NbdCommand::Write, 4096, 4096);
    reaches([1.0, 1.0]);
    let all = look(&server).1;
    let of = |op: &str| all[&format!("udm_requests_in_flight_by_op{{device=\"d\",op=\"{op}\"}}")];
    assert_eq!([of("read"), of("write")], [1.0, 1.0]);
    clients.iter_mut().for_each(|client| assert_eq!(client.error(), 0));
    reaches([0.0, 0.0]);
}

#[test]
fn paths_and_snapshots() {
    // The same disk twice in one group: the index of the path distinguishes them.
    let table = "mp=0 2048 multipath 0 0 1 1 round-robin 0 2 1 mem:1M 1 mem:1M 1";
    let server = Server::start(&[table, "o=0 2048 linear null:size=1M 0"]);
    server.says(&["snapshot", "create", "s", "--of", "o", "--store", "mem:2M", "--transient"]);
    let mut client = Client::connect(&server.nbd, "mp");
    (0..10).for_each(|sector| assert_eq!(client.write(sector), 0));
    assert_eq!(Client::connect(&server.nbd, "o").one(NbdCommand::Write, 0, 4096), 0);
    let (text, all) = look(&server);
    lint(&text);
    let paths = |name: &str, all: &Samples| -> Vec<f64> {
        all.iter().filter(|(s, _)| s.starts_with(&format!("{name}{{"))).map(|(_, value)| *value).collect()
    };
    assert_eq!(paths("udm_path_up", &all), [1.0, 1.0]);
    assert_eq!(paths("udm_path_requests_total", &all).iter().sum::<f64>(), 10.0);
    assert_eq!(paths("udm_path_bytes_total", &all).iter().sum::<f64>(), 5120.0);
    assert_eq!(all[r#"udm_snapshot_valid{device="s"}"#], 1.0);
    let used =
        all[r#"udm_snapshot_used_bytes{device="s"}"#] - all[r#"udm_snapshot_metadata_bytes{device="s"}"#];
    assert_eq!((used, all[r#"udm_snapshot_store_bytes{device="s"}"#]), (4096.0, 2097152.0));
    server.says(&["message", "mp", "0", "fail_path", "mem:1M"]);
    let (_, all) = look(&server);
    assert!(paths("udm_path_up", &all).contains(&0.0));
    assert!(paths("udm_path_failures_total", &all).iter().sum::<f64>() > 0.0);
    assert!(all[r#"udm_device_events_total{device="mp"}"#] > 0.0);
}

fn stats(server: &Server) -> Value {
    let (status, head, text) = server.http("GET", "/v1/stats", "");
    assert!(status == 200 && head.contains("content-type: application/json"), "{head}");
    serde_json::from_str(&text).unwrap()
}

/// The counts of a histogram by upper bound.
fn steps(served: &Value) -> BTreeMap<u64, u64> {
    let pairs = served["latency"].as_array().unwrap().iter();
    pairs.map(|pair| (pair[0].as_u64().unwrap(), pair[1].as_u64().unwrap())).collect()
}

#[test]
fn the_same_as_json() {
    let multipath = "mp=0 2048 multipath 0 0 1 1 round-robin 0 2 1 mem:1M 1 mem:1M 1";
    let devices = ["d=0 2048 linear mem:1M 0", multipath, "o=0 2048 linear null:size=1M 0", "e=0 8 error"];
    let server = Server::start_with(&devices, &["--export", "d", "--export", "mp", "--export", "e"]);
    server.says(&["snapshot", "create", "s", "--of", "o", "--store", "mem:2M", "--transient"]);
    let mut client = Client::connect(&server.nbd, "d");
    (0..10).for_each(|sector| assert_eq!(client.write(sector), 0));
    let before = stats(&server);
    (0..7).for_each(|sector| assert_eq!(client.write(sector), 0));
    assert_eq!(client.read(0), 0);
    assert_ne!(Client::connect(&server.nbd, "e").read(0), 0);
    let mut other = Client::connect(&server.nbd, "mp");
    (0..4).for_each(|sector| assert_eq!(other.write(sector), 0));
    let (after, (_, metrics)) = until("all that was counted", || {
        let looked = (stats(&server), look(&server));
        (looked.1.1[r#"udm_core_requests_total{core="0"}"#] >= 23.0).then_some(looked)
    });

    // A rate is the difference of two samples; so is a histogram of the time between them.
    let (was, is) = (&before["devices"][0]["served"]["write"], &after["devices"][0]["served"]["write"]);
    assert_eq!((&was["requests"], &is["requests"], &is["bytes"]), (&json!(10), &json!(17), &json!(17 * 512)));
    let (was, is) = (steps(was), steps(is));
    let part: u64 = is.iter().map(|(below, count)| count - was.get(below).copied().unwrap_or(0)).sum();
    assert_eq!((was.values().sum::<u64>(), part), (10, 7));
    assert!(before["up_ns"].as_u64() < after["up_ns"].as_u64());
    assert_eq!(before["started_ms"], after["started_ms"]);

    // The JSON contains the same values as the Prometheus text.
    for device in after["devices"].as_array().unwrap() {
        let name = device["device"]["name"].as_str().unwrap();
        for (op, served) in device["served"].as_object().unwrap() {
            let of = |metric: &str| metrics[&format!("{metric}{{device=\"{name}\",op=\"{op}\"}}")];
            assert_eq!(served["requests"].as_f64().unwrap(), of("udm_requests_total"), "{name} {op}");
            let in_flight = served["in_flight"].as_f64().unwrap();
            assert_eq!(in_flight, of("udm_requests_in_flight_by_op"), "{name} {op}");
            assert_eq!(served["bytes"].as_f64().unwrap(), of("udm_request_bytes_total"), "{name} {op}");
            assert_eq!(served["errors"].as_f64().unwrap(), of("udm_request_errors_total"), "{name} {op}");
            let timed = steps(served).values().sum::<u64>() as f64;
            assert_eq!(timed, of("udm_request_duration_seconds_count"), "{name} {op}");
        }
        let in_flight = metrics.get(&format!("udm_requests_in_flight{{device=\"{name}\"}}"));
        assert_eq!(device["in_flight"].as_f64(), in_flight.copied(), "{name}");
    }
    let names = |key: &str| -> Vec<Value> {
        after["devices"].as_array().unwrap().iter().map(|device| device[key].clone()).collect()
    };
    assert_eq!(names("target_types")[..2], [json!(["linear"]), json!(["multipath"])]);
    let paths = after["devices"][1]["paths"].as_array().unwrap();
    let served: u64 = paths.iter().map(|path| path["served"]["write"]["requests"].as_u64().unwrap()).sum();
    assert_eq!((paths.len(), served, &paths[0]["state"]), (2, 4, &json!("active")));
    let snapshots: Vec<Value> = names("snapshot").into_iter().filter(|one| !one.is_null()).collect();
    assert_eq!((snapshots.len(), &snapshots[0]["total_bytes"]), (1, &json!(2 << 20)));
    assert!(after["server"]["accepted"].as_u64().unwrap() >= 3 && after["cores"][0]["core"] == 0);
    assert_eq!(after["devices"][3]["served"]["read"]["errors"], 1);
}
