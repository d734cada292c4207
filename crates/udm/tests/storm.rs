//! Eight clients create, remove, rename, load, suspend, resume, message and list devices
//! concurrently, under a verifying load.
//!
//! The run is short in the test suite. For a long manual run set `UDM_STORM_SECONDS=120
//! UDM_STORM_DEVICES=5000`, with `--release --nocapture`. The longest time of a list is printed,
//! not asserted.

mod support;

use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};
use support::{PATIENCE, Server, has, text, until};

/// Number of names that all clients compete for.
const NAMES: u64 = 12;

const CLIENTS: u64 = 8;

/// The device under load, over two paths to one disk. Paths fail and are reinstated; requests wait
/// if there is no path.
const DISK: [&str; 4] = [
    "base=0 32768 linear mem:16M 0",
    "p0=0 32768 linear @base 0",
    "p1=0 32768 linear @base 0",
    "disk=0 32768 multipath 3 queue_if_no_path queue_mode bio 0 1 1 round-robin 0 2 1 @p0 1 @p1 1",
];

fn from_env(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |v| v.parse().expect(name))
}

/// A pseudo-random generator (xorshift).
struct Random(u64);

impl Random {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

fn list(server: &Server, path: &str, key: &str) -> BTreeSet<String> {
    let (status, _, body) = server.http("GET", path, "");
    assert_eq!(status, 200, "{body}");
    let all: Value = serde_json::from_str(&body).unwrap();
    all[key].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap().to_owned()).collect()
}

/// Sends one random request; returns the time of a list.
fn step(server: &Server, dice: &mut Random) -> Option<Duration> {
    let name = format!("s{}", dice.roll(NAMES));
    let other = dice.roll(NAMES);
    let table = match dice.roll(5) {
        0 => "0 8 zero".into(),
        1 => format!("0 8 linear @s{other} 0"),
        2 => "0 8 linear mem:1M 0\n8 8 linear mem:1M 64".into(),
        3 => "0 8 linear @s0 0\n8 8 bad".into(),
        _ => (0..500).map(|i| format!("{i} 1 zero\n")).collect::<String>(),
    };
    let device = format!("/v1/devices/{name}");
    let (method, path, body) = match dice.roll(11) {
        0 | 1 => ("POST", "/v1/devices".into(), json!({"name": name, "table": table})),
        2 | 3 => ("DELETE", device, Value::Null),
        4 => ("PUT", device + "/table", json!({"table": table})),
        5 => ("POST", device + "/resume", json!({})),
        6 => ("POST", device + "/suspend", json!({"noflush": true})),
        7 => {
            let verb = ["fail_path", "reinstate_path"][dice.roll(2) as usize];
            let message = format!("{verb} @p{}", dice.roll(2));
            ("POST", "/v1/devices/disk/message".into(), json!({"sector": 0, "message": message}))
        }
        8 => ("GET", device + "/status", Value::Null),
        9 => ("POST", device + "/rename", json!({"name": format!("s{other}")})),
        _ => ("GET", "/v1/devices".into(), Value::Null),
    };
    let begun = Instant::now();
    let (status, _, answer) = server.http(method, &path, &body.to_string());
    assert!([200, 204, 400, 404, 409].contains(&status), "{method} {path} {body}: {status} {answer}");
    (path == "/v1/devices" && method == "GET").then(|| begun.elapsed())
}

#[test]
#[expect(clippy::print_stdout, reason = "the times are the report of a manual run")]
fn nothing_is_lost_in_a_storm_of_verbs() {
    let seconds = from_env("UDM_STORM_SECONDS", 4);
    let idle = from_env("UDM_STORM_DEVICES", 100);
    let server = Server::start(&DISK);
    for i in 0..idle {
        let (status, _, answer) = server.http(
            "POST",
            "/v1/devices",
            &json!({"name": format!("idle{i}"), "table": "0 8 zero"}).to_string(),
        );
        assert_eq!(status, 200, "{answer}");
    }
    let until_then = Instant::now() + Duration::from_secs(seconds);
    let load = has("fio").then(|| {
        let uri = format!("nbd+unix:///disk?socket={}", server.nbd.display());
        let mut fio = Command::new("timeout");
        fio.args(["-k", "5", &(seconds + 60).to_string(), "fio", "--name=storm", "--ioengine=nbd"]);
        // Leaves no state file in the source folder.
        fio.arg("--verify_state_save=0");
        fio.args([
            "--rw=randrw",
            "--bs=4k",
            "--iodepth=8",
            "--size=4M",
            "--verify=crc32c",
            "--verify_fatal=1",
        ]);
        fio.args([format!("--uri={uri}"), format!("--runtime={seconds}"), "--time_based".into()]);
        thread::spawn(move || fio.output().unwrap())
    });
    let (mut calls, mut lists) = (0u64, Vec::new());
    thread::scope(|scope| {
        let clients: Vec<_> = (1..=CLIENTS)
            .map(|seed| {
                let server = &server;
                scope.spawn(move || {
                    let (mut dice, mut calls, mut lists) = (Random(seed * 0x9e37_79b9), 0u64, Vec::new());
                    while Instant::now() < until_then {
                        lists.extend(step(server, &mut dice));
                        calls += 1;
                    }
                    (calls, lists)
                })
            })
            .collect();
        for client in clients {
            let (did, took) = client.join().unwrap();
            calls += did;
            lists.extend(took);
        }
    });
    server.says(&["message", "disk", "0", "reinstate_path", "@p0"]);
    if let Some(load) = load {
        let out = load.join().unwrap();
        assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
    }
    lists.sort();
    println!(
        "{calls} calls, {} lists: median {:?}, longest {:?}",
        lists.len(),
        lists[lists.len() / 2],
        lists.last()
    );
    assert!(lists.last().unwrap() < &PATIENCE);

    let listed = list(&server, "/v1/devices", "devices");
    assert_eq!(listed, list(&server, "/v1/exports", "exports"), "an export a device");
    let stormed: Vec<String> = listed.iter().filter(|name| name.starts_with('s')).cloned().collect();
    for name in &stormed {
        assert!(server.says(&["info", name]).contains(name.as_str()));
        server.says(&["clear", name]);
        server.says(&["resume", name]);
    }
    // Devices above others are removed first; repeated until all are removed.
    let mut left = stormed;
    until("all are removed", || {
        left.retain(|name| server.http("DELETE", &format!("/v1/devices/{name}"), "").0 != 204);
        left.is_empty().then_some(())
    });
    for i in 0..NAMES {
        server.says(&["create", &format!("s{i}"), "--table", "0 8 zero"]);
    }
    assert_eq!(list(&server, "/v1/devices", "devices").len() as u64, DISK.len() as u64 + idle + NAMES);
}
