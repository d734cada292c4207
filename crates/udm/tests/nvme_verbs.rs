//! `udm nvme` and the counters of the NVMe/TCP target, with a scripted host.

#[path = "../../udm-frontends/tests/nvme/host.rs"]
#[allow(dead_code, reason = "the front end's tests use all of it")]
mod host;
#[path = "nvme_verbs/load.rs"]
mod load;
#[path = "nvme_verbs/peers.rs"]
mod peers;
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
    let port = shown["ports"][0]["address"].clone();
    assert_eq!(shown["namespaces"][0]["ana"], json!([{"port": port, "state": "optimized"}]));
    let namespace = |nsid: usize| {
        let one = &shown["namespaces"][nsid - 1];
        let nguid = one["nguid"].as_str().unwrap();
        assert_eq!(nguid, one["uuid"].as_str().unwrap().replace('-', ""));
        json!([one["nsid"], one["device"], one["size_bytes"], one["block_bytes"], one["read_only"]])
    };
    assert_eq!(namespace(1), json!([1, "a", 1 << 20, 512, false]));
    assert_eq!(namespace(2), json!([2, "b", 2 << 20, 512, false]));
    let controller = json!([{
        "cntlid": host.controller, "host_nqn": HOST, "address": "127.0.0.1", "port": port, "discovery": false,
        "state": "live", "io_queues": 1,
    }]);
    assert_eq!(shown["controllers"], controller);
    let over_http: Value = serde_json::from_str(&server.http("GET", "/v1/nvme", "").2).unwrap();
    assert_eq!(over_http, json!({"paths": [], "subsystems": [shown]}));
    let text = server.says(&["nvme", "ls"]);
    let line = format!("  controller {}: {HOST} at 127.0.0.1  live, 1 I/O queue\n", host.controller);
    assert!(text.contains(&line), "{text}");
    assert_eq!(samples(&server), [Some(1), Some(1), Some(2)]);
    let stats: Value = serde_json::from_str(&server.http("GET", "/v1/stats", "").2).unwrap();
    assert_eq!(
        stats["nvme"],
        json!({"hosts": 1, "controllers": 1, "connections": 2, "accepted": 2, "refused": 0, "late_quiesces": 0})
    );
    drop((host, queue));
    until("the end of the controller", || (samples(&server) == [Some(0); 3]).then_some(()));
    let none = Server::start(&["a=mem:1M"]);
    assert!(none.says(&["nvme", "ls"]).contains("no NVMe/TCP target"));
    assert!(!none.http("GET", "/metrics", "").2.contains("udm_nvme_"));
}

/// ANA states are set at the start and while the server runs; they stay over a reconfigure, and
/// what does not exist is refused.
#[test]
fn ana_states_are_set() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("udm.toml");
    let device = |name: &str| format!("[devices.{name}]\ntable = \"0 2048 zero\"\n");
    fs::write(&file, device("a") + &device("b")).unwrap();
    let mut serve = udm(&["serve"]);
    serve.arg(&file);
    let options = ["--nvme", "127.0.0.1:0", "--nvme-ana", "*=non-optimized", "--nvme-ana", "a=optimized"];
    let server = Server::start_by(serve, &[], &[&TARGET[..], &options].concat());
    let ports = [0, 1].map(|at| list(&server)["ports"][at]["address"].as_str().unwrap().to_owned());
    let states = || {
        let text = server.says(&["nvme", "ana"]);
        let words = text.lines().map(|line| line.split("  ").collect::<Vec<_>>().join(" "));
        words.collect::<Vec<_>>()
    };
    let expected = |all: [&str; 4]| {
        let places = [("a", 0), ("a", 1), ("b", 0), ("b", 1)];
        places
            .iter()
            .zip(all)
            .map(|((name, at), state)| format!("{name} {} {state}", ports[*at]))
            .collect::<Vec<_>>()
    };
    assert_eq!(states(), expected(["optimized", "optimized", "non-optimized", "non-optimized"]));
    server.says(&["nvme", "ana", "b", "inaccessible", "--port", &ports[1]]);
    let inaccessible = expected(["optimized", "optimized", "non-optimized", "inaccessible"]);
    assert_eq!(states(), inaccessible);
    let host = ScriptedHost::connect(ports[1].parse().unwrap(), 0);
    let mut queue = host.queue(1, false);
    assert!(queue.ask(command(0x00, 1, &[])).status.is_ok());
    let inaccessible_status = udm_wire::nvme::NvmeStatus::ANA_INACCESSIBLE;
    assert_eq!(queue.ask(command(0x00, 2, &[])).status, inaccessible_status);
    // b is removed and comes back.
    fs::write(&file, device("a")).unwrap();
    drop((queue, host));
    until("a reconfigure", || server.verb(&["reconfigure"]).status.success().then_some(()));
    assert_eq!(states(), inaccessible[..2]);
    fs::write(&file, device("a") + &device("b")).unwrap();
    server.says(&["reconfigure"]);
    assert_eq!(states(), inaccessible);
    let json: Value = serde_json::from_str(&server.says(&["nvme", "ana", "--json"])).unwrap();
    assert_eq!(json[1]["ana"][1], json!({"port": ports[1], "state": "inaccessible"}));
    server.says(&["nvme", "ana", "--all", "persistent-loss"]);
    assert_eq!(states(), expected(["persistent-loss"; 4]));
    for (words, why) in [
        (&["a", "change"][..], "\"change\" is no ANA state: expected optimized, non-optimized, inaccessible"),
        (&["c", "optimized"], "it is not served to NVMe hosts"),
        (
            &["a", "optimized", "--port", "127.0.0.1:1"],
            "the target does not listen on 127.0.0.1:1: its addresses",
        ),
        (&["a", "optimized", "--port", "x"], "\"x\" is no port: expected ADDRESS:PORT"),
        (&["a"], "expected DEVICE STATE, or --all STATE"),
    ] {
        let said = server.refuses(&[&["nvme", "ana"], words].concat());
        assert!(said.contains(why), "{said}");
    }
    assert_eq!(states(), expected(["persistent-loss"; 4]));
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
