//! The stream of events: `/v1/events` and `udm events`.

mod support;

use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use support::listener::EventListener;
use support::nbd::Client;
use support::servers::Nbdkit;
use support::{Server, has, signal, text, udm, until};

/// Maximum number of clients that wait or listen at a time.
const WAITS_MAX: usize = 128;

fn id(event: &Value) -> u64 {
    event["id"].as_u64().unwrap()
}

#[test]
fn each_change_once_and_in_order() {
    let server = Server::start(&["other=0 8 zero"]);
    let mut listener = EventListener::start(&server, None);
    server.says(&["create", "d", "--uuid", "u", "--table", "0 8 zero"]);
    server.says(&["load", "d", "--table", "0 16 zero"]);
    server.says(&["clear", "d"]);
    server.says(&["clear", "d"]);
    server.says(&["suspend", "d"]);
    server.says(&["suspend", "d"]);
    server.says(&["load", "d", "--table", "0 16 zero"]);
    server.says(&["resume", "d"]);
    server.says(&["resume", "d"]);
    server.says(&["rename", "d", "e"]);
    assert!(server.refuses(&["load", "e", "--table", "0 8 nonsense"]).contains("unknown target type"));
    server.says(&["remove", "e"]);
    server.says(&["remove", "other"]);
    let all: Vec<Value> = (0..10).map(|_| listener.next()).collect();
    let output =
        |event: &Value| format!("{} {}", event["device"].as_str().unwrap(), event["kind"].as_str().unwrap());
    assert_eq!(
        all.iter().map(output).collect::<Vec<_>>(),
        [
            "d created",
            "d loaded",
            "d cleared",
            "d suspended",
            "d loaded",
            "d resumed",
            "e event",
            "e renamed",
            "e removed",
            "other removed"
        ]
    );
    // Commands without effect cause no event, and event numbers have no gaps.
    assert!(all.windows(2).all(|pair| id(&pair[1]) == id(&pair[0]) + 1), "{all:?}");
    assert!(all.windows(2).all(|pair| pair[0]["time_ms"].as_u64() <= pair[1]["time_ms"].as_u64()));
    assert_eq!(
        (&all[7]["uuid"], &all[7]["event_nr"], &all[7]["line"]),
        (&"u".into(), &1.into(), &"it was called d".into())
    );

    // A client that reconnects continues after its last event. A client with a number of another
    // server receives `lost`.
    let mut again = EventListener::start(&server, Some(id(&all[7])));
    assert_eq!(again.kinds(2), ["e removed", "other removed"]);
    let mut stranger = EventListener::start(&server, Some(7));
    let lost = stranger.next();
    assert_eq!((&lost["kind"], &lost["lost"]), (&"lost".into(), &Value::Null));
    assert_eq!(stranger.next(), all[0]);
    server.says(&["create", "f", "--notable"]);
    assert_eq!(again.kinds(1), ["f created"]);
    let (status, _, body) = support::answer(&support::ask(
        &server.socket,
        b"GET /v1/events HTTP/1.1\r\nHost: udm\r\nLast-Event-ID: x\r\nConnection: close\r\n\r\n",
    ));
    assert!(status == 400 && body.contains("Last-Event-ID"), "{body}");
}

#[test]
fn a_path_that_dies_and_returns() {
    if !has("nbdkit") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk.img");
    std::fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let disk = disk.to_str().unwrap();
    let mut kits: Vec<Nbdkit> =
        (0..2).map(|n| Nbdkit::start(folder.path().join(format!("{n}.sock")), &["file", disk])).collect();
    let table = format!(
        "mp=0 2048 multipath 1 queue_if_no_path 0 2 1 round-robin 0 1 1 {} 1 round-robin 0 1 1 {} 1",
        kits[0].uri(),
        kits[1].uri()
    );
    let server = Server::start_with(&[&table], &["--check-paths", "1"]);
    let mut listener = EventListener::start(&server, None);
    let mut client = Client::connect(&server.nbd, "mp");
    assert_eq!(client.write(0), 0);
    assert_eq!(listener.until("path-group").last().unwrap(), "path-group");
    kits[0].kill();
    assert_eq!(client.write(1), 0);
    let mut failed = listener.next();
    while failed["kind"] != "path-failed" {
        failed = listener.next();
    }
    assert_eq!(failed["path"], "253:0");
    assert!(failed["line"].as_str().unwrap().ends_with("1 of 2 paths left"), "{failed}");
    let switched = listener.until("path-group");
    assert!(!switched.contains(&"path-failed".to_owned()), "once: {switched:?}");
    kits[0].again();
    let returned = listener.until("path-reinstated");
    assert!(!returned.contains(&"path-failed".to_owned()), "once: {returned:?}");
    // The command of an administrator, and the checker's event about it.
    server.says(&["multipath", "fail", "path", "253:1"]);
    let all = listener.until("path-failed");
    assert!(all.iter().all(|kind| kind.starts_with("path-") || kind == "event"), "{all:?}");
}

#[test]
fn snapshots_that_end() {
    let server = Server::start(&["o=0 2048 linear null:size=1M 0"]);
    server.says(&["snapshot", "create", "s", "--of", "o", "--store", "mem:16K", "--transient"]);
    let mut listener = EventListener::start(&server, None);
    let mut client = Client::connect(&server.nbd, "o");
    (0..64).for_each(|n| assert_eq!(client.write(n * 8), 0));
    let all = listener.until("snapshot-invalid");
    assert_eq!(all.iter().filter(|kind| *kind == "snapshot-invalid").count(), 1);
}

/// A listener that does not read delays nobody. When it reads again, it receives the number of lost
/// events.
#[test]
fn who_is_slow_loses() {
    let server = Server::start(&["d=0 8 zero"]);
    let (mut slow, mut quick) = (EventListener::start(&server, None), EventListener::start(&server, None));
    let mut last = 0;
    for round in 0..2000 {
        let slot = if round % 2 == 0 { "PUT" } else { "DELETE" };
        let body = if round % 2 == 0 { r#"{"table":"0 8 zero"}"# } else { "" };
        assert_eq!(server.http(slot, "/v1/devices/d/table", body).0, 204);
        let event = quick.next();
        assert!(event["kind"] != "lost" && (last == 0 || id(&event) == last + 1), "{event}");
        last = id(&event);
    }
    let (mut seen, mut lost) = (Vec::new(), 0);
    while seen.last().is_none_or(|seen| *seen < last) {
        let event = slow.next();
        lost += event["lost"].as_u64().unwrap_or(0);
        if event["kind"] != "lost" {
            seen.push(id(&event));
        }
    }
    assert!(lost > 0 && seen.len() as u64 + lost == 2000, "{lost} lost, {} seen", seen.len());
    assert!(seen.windows(2).all(|pair| pair[0] < pair[1]));
}

/// The number of listeners is limited. Others are refused, delay nobody, and free their slots.
#[test]
fn places_are_bounded() {
    let server = Server::start(&["d=0 8 zero"]);
    let mut all: Vec<EventListener> = (0..WAITS_MAX).map(|_| EventListener::start(&server, None)).collect();
    let (status, _, body) = server.http("GET", "/v1/events", "");
    assert!(status == 409 && body.contains("128 clients wait for events already"), "{body}");
    assert!(server.refuses(&["events"]).contains("128 clients wait for events already"));
    // New clients get connection slots although all the others are idle; listeners keep theirs.
    let crowd: Vec<UnixStream> = (0..200).map(|_| UnixStream::connect(&server.socket).unwrap()).collect();
    server.says(&["rename", "d", "e"]);
    for listener in &mut all {
        assert_eq!(listener.kinds(2), ["e event", "e renamed"]);
    }
    drop((all, crowd));
    until("that places are free", || {
        let mut stream = UnixStream::connect(&server.socket).unwrap();
        write!(stream, "GET /v1/events HTTP/1.1\r\nHost: udm\r\n\r\n").unwrap();
        let mut head = [0; 12];
        stream.read_exact(&mut head).unwrap();
        (text(&head) == "HTTP/1.1 200").then_some(())
    });
}

fn events(server: &Server, args: &[&str]) -> Child {
    let mut command = udm(&["events"]);
    command.args(args).env("UDM_SOCKET", &server.socket);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_verb_prints_them() {
    let server = Server::start(&["d=0 8 zero"]);
    let mut first = EventListener::start(&server, None);
    server.says(&["rename", "d", "e"]);
    let before = id(&first.next()) - 1;
    let out = server.says(&["events", "--after", &before.to_string(), "-n", "2"]);
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[0].ends_with("Z e: event number 1") && lines[1].ends_with("Z e: it was called d"), "{out}");
    let out = server.says(&["events", "--json", "--after", &before.to_string(), "-n", "1"]);
    let event: Value = serde_json::from_str(out.trim_end()).unwrap();
    assert_eq!((id(&event), out.lines().count()), (before + 1, 1));
    // Only events of one device, printed as they occur.
    let mut child = events(&server, &["other", "--after", &before.to_string()]);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    server.says(&["create", "other", "--notable"]);
    assert!(lines.next().unwrap().unwrap().ends_with("Z other: created"));
    child.kill().unwrap();
    child.wait().unwrap();
}

/// As in `udm events | head -1`: the program ends with its reader, even without another event.
#[test]
fn it_ends_with_its_reader() {
    let server = Server::start(&["d=0 8 zero"]);
    let mut verb = events(&server, &[]);
    let mut lines = BufReader::new(verb.stdout.take().unwrap()).lines();
    // Events before the subscription are not printed.
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                server.says(&["rename", "d", "e"]);
                server.says(&["rename", "e", "d"]);
            }
        });
        assert!(lines.next().unwrap().unwrap().contains(": "));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(verb.try_wait().unwrap().is_none());
    drop(lines);
    // The next comment of the server has just been sent, so it is 10 s away.
    let begin = Instant::now();
    assert!(until("its end", || verb.try_wait().unwrap()).success());
    assert!(begin.elapsed() < Duration::from_secs(8), "it has waited for the server to say something");
}

#[test]
fn it_does_not_hold_up_the_end() {
    let mut server = Server::start(&["d=0 8 zero"]);
    let mut listener = EventListener::start(&server, None);
    let verb = events(&server, &["--after", "1"]);
    signal(Pid::from_child(&server.child), Signal::TERM);
    until("its end", || server.child.try_wait().unwrap());
    assert!(server.child.wait().unwrap().success(), "{}", server.log());
    // Changes made by the shutdown are reported as far as possible.
    let mut rest = Vec::new();
    listener.0.get_mut().set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let _ = listener.0.read_to_end(&mut rest);
    assert!(text(&rest).contains("\"kind\":\"removed\""), "{}", text(&rest));
    let out = verb.wait_with_output().unwrap();
    let output = text(&out.stderr);
    assert!(!out.status.success() && output.lines().count() == 1, "{output}");
}
