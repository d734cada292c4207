//! Queues of a host over the cores, counts of hosts, and what idle associations cost.

use super::host::{
    Answer, BLOCK, Connection, READ, ScriptedHost, WRITE, command, connect_command, connect_data,
    property_set, rw,
};
use super::support::{Server, report_skip, until};
use super::{HOST, TARGET, address, list};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::thread::sleep;
use std::time::Duration;
use udm_wire::nvme::{ConnectCommand, ConnectData};

fn read(queue: &mut Connection, block: u64) {
    queue.command(rw(READ, block, 1, false), &[]);
    assert!(matches!(queue.answer(), Answer::Data { is_success: true, .. }));
}

/// A host with as many queues as cores uses all cores, and its requests are counted by operation and
/// by queue.
#[test]
fn queues_spread_over_the_cores() {
    let server = Server::start_with(&["a=mem:1M"], &[&TARGET[..], &["--cores", "0,1"]].concat());
    let host = ScriptedHost::connect(address(&server), 0);
    let mut queues: Vec<Connection> = (1..=2).map(|queue| host.queue(queue, false)).collect();
    for (queue, reads) in queues.iter_mut().zip([3, 5]) {
        (0..reads).for_each(|block| read(queue, block));
    }
    queues[1].command(rw(WRITE, 0, 8, true), &[1; 8 * BLOCK]);
    assert!(queues[1].answer().status().is_ok());
    queues[0].command(rw(READ, 1 << 40, 1, false), &[]);
    assert!(!queues[0].answer().status().is_ok());
    let by_queue = json!([{"queue": 1, "requests": 3}, {"queue": 2, "requests": 6}]);
    let shown = &list(&server)["hosts"];
    let expected = json!([{
        "host_nqn": HOST, "in_flight": 0, "requests": 9, "bytes": 8 * 512 + 4096, "errors": 0, "queues": by_queue,
    }]);
    assert_eq!(*shown, expected);
    let text = server.says(&["nvme", "ls"]);
    let line = format!(
        "  host {HOST}: 9 requests, 8192 bytes, 0 errors, 0 in flight (3 of queue 1, 6 of queue 2)\n"
    );
    assert!(text.contains(&line), "{text}");
    let metrics = server.http("GET", "/metrics", "").2;
    for line in [
        format!("udm_nvme_host_requests_total{{host=\"{HOST}\",op=\"read\"}} 8"),
        format!("udm_nvme_host_request_bytes_total{{host=\"{HOST}\",op=\"write\"}} 4096"),
        format!("udm_nvme_queue_requests_total{{host=\"{HOST}\",queue=\"2\"}} 6"),
    ] {
        assert!(metrics.lines().any(|one| one == line), "{line}: {metrics}");
    }
    let top: Value =
        serde_json::from_str(&server.says(&["top", "--hosts", "--once", "--json", "-i", "0.1"])).unwrap();
    assert_eq!((&top["devices"][0]["uuid"], top["devices"].as_array().unwrap().len()), (&json!(HOST), 1));
    // A host keeps its counts when it comes again.
    drop((queues, host));
    let host = ScriptedHost::connect(address(&server), 0);
    read(&mut host.queue(2, false), 0);
    assert_eq!(list(&server)["hosts"][0]["queues"][1], json!({"queue": 2, "requests": 7}));
}

/// Connects an admin queue and an I/O queue from the address `from`.
fn idle_host(from: [u8; 4], to: SocketAddr) -> [Connection; 2] {
    let mut admin = Connection::open_from(from, to);
    admin.initialize(false);
    let completion = admin.connect(&connect_command(0), &connect_data(0xffff));
    assert!(completion.status.is_ok(), "{completion:?}");
    assert!(admin.ask(property_set(0x14, 0x0046_0001)).status.is_ok());
    let mut queue = Connection::open_from(from, to);
    queue.initialize(false);
    let connect = ConnectCommand { queue_size: 127, ..connect_command(1) };
    let data: ConnectData = connect_data(completion.result as u16);
    assert!(queue.connect(&connect, &data).status.is_ok());
    assert!(queue.ask(command(0x00, 1, &[])).status.is_ok());
    [admin, queue]
}

/// Voluntary and other context switches of all threads of the server, and its ticks of CPU time.
fn activity(server: &Server) -> (u64, u64) {
    let process = format!("/proc/{}", server.pid().as_raw_nonzero());
    let tasks = fs::read_dir(format!("{process}/task")).unwrap();
    let of = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).unwrap();
        let switches = status.lines().filter_map(|line| line.split_once("ctxt_switches:"));
        switches.map(|(_, number)| number.trim().parse::<u64>().unwrap()).sum::<u64>()
    };
    let switches = tasks.map(|task| of(task.unwrap())).sum();
    let stat = fs::read_to_string(format!("{process}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    (switches, fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap())
}

/// With 100 idle associations, the server sleeps: no thread of it runs for five seconds.
#[test]
fn idle_associations_cost_no_time() {
    let server = Server::start_with(&["a=mem:1M"], &TARGET);
    let to = address(&server);
    let hosts: Vec<_> = (0..100).map(|_| idle_host([127, 0, 0, 1], to)).collect();
    until("five quiet seconds", || {
        let before = activity(&server);
        sleep(Duration::from_secs(5));
        (activity(&server) == before).then_some(())
    });
    assert_eq!(list(&server)["controllers"].as_array().unwrap().len(), hosts.len());
}

/// Memory of the server in KiB, in RAM.
fn memory(server: &Server) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid().as_raw_nonzero())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// A thousand idle associations, each with an I/O queue of 128 entries, need bounded memory.
#[test]
fn a_thousand_idle_associations() {
    const HOSTS: usize = 1000;
    let limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|max| max < 4 * HOSTS as u64) {
        return report_skip("too few descriptors are allowed");
    }
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let many = ["--max-connections", "8000"];
    let server = Server::start_with(&["a=mem:1M"], &[&TARGET[..], &many].concat());
    let to = address(&server);
    // One address gets three quarters of the controllers.
    let host = |number: usize| idle_host([127, 0, 0, 1 + (number % 2) as u8], to);
    let first: Vec<_> = (0..4).map(host).collect();
    let before = memory(&server);
    let hosts: Vec<_> = (4..HOSTS).map(host).collect();
    // Idle queues return what they keep for reuse after a second or two.
    sleep(Duration::from_secs(4));
    let each = (memory(&server) - before) * 1024 / (HOSTS as u64 - 4);
    let _ = writeln!(std::io::stderr(), "an idle association of two queues holds {each} bytes");
    assert!(each < 150 << 10, "{each} bytes");
    assert_eq!(list(&server)["controllers"].as_array().unwrap().len(), HOSTS);
    drop((first, hosts));
    until("the end of all", || list(&server)["controllers"].as_array().unwrap().is_empty().then_some(()));
}
