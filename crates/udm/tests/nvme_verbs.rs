//! `udm nvme` and the counters of the NVMe/TCP target, with a scripted host.

#[path = "../../udm-frontends/tests/nvme/host.rs"]
#[allow(dead_code, reason = "the front end's tests use all of it")]
mod host;
mod support;

use host::{ScriptedHost, command};
use serde_json::{Value, json};
use std::fs;
use std::net::SocketAddr;
use support::{Server, udm, until};
use tempfile::TempDir;

const SUBSYSTEM: &str = "nqn.2026-11.org.example:disks";
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555";

const TARGET: [&str; 4] = ["--nvme", "127.0.0.1:0", "--nvme-subsystem", SUBSYSTEM];

fn list(server: &Server) -> Value {
    let mut all: Vec<Value> = serde_json::from_str(&server.says(&["nvme", "ls", "--json"])).unwrap();
    assert_eq!(all.len(), 1);
    all.remove(0)
}

fn address(server: &Server) -> SocketAddr {
    list(server)["ports"][0]["address"].as_str().unwrap().parse().unwrap()
}

/// The list has the namespaces and the controllers of hosts, which are also counted.
#[test]
fn hosts_are_listed_and_counted() {
    let server = Server::start_with(&["a=mem:1M", "b=null:2M"], &TARGET);
    let samples = |server: &Server| {
        let text = server.http("GET", "/metrics", "").2;
        ["hosts", "controllers", "connections"].map(|what| {
            let start = format!("udm_nvme_{what} ");
            text.lines().find_map(|line| line.strip_prefix(&*start)?.parse::<u64>().ok())
        })
    };
    assert_eq!(samples(&server), [Some(0); 3]);
    let host = ScriptedHost::connect(address(&server), 0);
    let mut queue = host.queue(1, false);
    assert!(queue.ask(command(0x00, 1, &[])).status.is_ok());
    let shown = list(&server);
    assert_eq!(shown["nqn"], SUBSYSTEM);
    assert_eq!(shown["ports"][0]["ana_state"], "optimized");
    let namespace = |nsid: usize| {
        let one = &shown["namespaces"][nsid - 1];
        let nguid = one["nguid"].as_str().unwrap();
        assert_eq!(nguid, one["uuid"].as_str().unwrap().replace('-', ""));
        json!([one["nsid"], one["device"], one["size_bytes"], one["block_bytes"], one["read_only"]])
    };
    assert_eq!(namespace(1), json!([1, "a", 1 << 20, 512, false]));
    assert_eq!(namespace(2), json!([2, "b", 2 << 20, 512, false]));
    let controller = json!([{
        "cntlid": host.controller, "host_nqn": HOST, "address": "127.0.0.1", "discovery": false,
        "state": "live", "io_queues": 1,
    }]);
    assert_eq!(shown["controllers"], controller);
    let over_http: Value = serde_json::from_str(&server.http("GET", "/v1/nvme", "").2).unwrap();
    assert_eq!(over_http, json!({"subsystems": [shown]}));
    let text = server.says(&["nvme", "ls"]);
    let line = format!("  controller {}: {HOST} at 127.0.0.1  live, 1 I/O queue\n", host.controller);
    assert!(text.contains(&line), "{text}");
    assert_eq!(samples(&server), [Some(1), Some(1), Some(2)]);
    let stats: Value = serde_json::from_str(&server.http("GET", "/v1/stats", "").2).unwrap();
    assert_eq!(
        stats["nvme"],
        json!({"hosts": 1, "controllers": 1, "connections": 2, "accepted": 2, "refused": 0})
    );
    drop((host, queue));
    until("the end of the controller", || (samples(&server) == [Some(0); 3]).then_some(()));
    let none = Server::start(&["a=mem:1M"]);
    assert!(none.says(&["nvme", "ls"]).contains("no NVMe/TCP target"));
    assert!(!none.http("GET", "/metrics", "").2.contains("udm_nvme_"));
}

/// A device that gets a list of allowed clients in the file is taken from the hosts that use it.
#[test]
fn a_device_that_is_not_for_all_clients_any_more() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("udm.toml");
    let device = "[devices.a]\ntable = \"0 2048 zero\"\n";
    fs::write(&file, device).unwrap();
    let mut serve = udm(&["serve"]);
    serve.arg(&file);
    let server = Server::start_by(serve, &[], &TARGET);
    let host = ScriptedHost::connect(address(&server), 0);
    let mut queue = host.queue(1, false);
    assert!(queue.ask(command(0x00, 1, &[])).status.is_ok());
    fs::write(&file, format!("{device}allow = [\"user:1\"]\n")).unwrap();
    server.says(&["reconfigure"]);
    assert_eq!(list(&server)["namespaces"], json!([]));
    until("the end of the namespace", || (!queue.ask(command(0x00, 1, &[])).status.is_ok()).then_some(()));
    fs::write(&file, device).unwrap();
    server.says(&["reconfigure"]);
    assert_eq!(list(&server)["namespaces"][0]["nsid"], 1);
}
