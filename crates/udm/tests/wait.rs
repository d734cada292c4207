//! `udm wait` against a running server.

mod support;

use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use support::{Server, signal, text, udm, until};

/// Maximum number of clients that wait at a time.
const WAITS_MAX: usize = 128;

/// Starts `udm wait`.
fn waits(server: &Server, args: &[&str]) -> Child {
    let mut command = udm(&["wait"]);
    command.args(args).env("UDM_SOCKET", &server.socket);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for the end; returns true on success, and the output.
fn end(child: Child) -> (bool, String) {
    let out = child.wait_with_output().unwrap();
    (out.status.success(), text(&out.stdout) + &text(&out.stderr))
}

fn event_nr(server: &Server, name: &str) -> u64 {
    let (_, _, body) = server.http("GET", &format!("/v1/devices/{name}"), "");
    serde_json::from_str::<Value>(&body).unwrap()["event_nr"].as_u64().unwrap()
}

/// A client that waits for an event and sends nothing more.
fn holds(server: &Server, event_nr: u64) -> UnixStream {
    let body = json!({"event_nr": event_nr}).to_string();
    let mut stream = UnixStream::connect(&server.socket).unwrap();
    let length = body.len();
    write!(stream, "POST /v1/devices/d/wait HTTP/1.1\r\nHost: udm\r\nContent-Length: {length}\r\n\r\n{body}")
        .unwrap();
    stream
}

/// The error text of the server if all slots for waiting clients are taken.
fn are_taken(server: &Server) -> Option<String> {
    let body = json!({"event_nr": event_nr(server, "d"), "timeout_ms": 1}).to_string();
    let (status, _, body) = server.http("POST", "/v1/devices/d/wait", &body);
    assert!([409, 504].contains(&status), "{status}: {body}");
    (status == 409).then_some(body)
}

#[test]
fn until_the_next_event() {
    let table = "mp=0 2048 multipath 0 0 1 1 round-robin 0 1 1 mem:1M 1";
    let server = Server::start(&[table]);
    let first = waits(&server, &["mp", "-v"]);
    let second = waits(&server, &["mp", "0", "--json"]);
    server.says(&["message", "mp", "0", "fail_path", "mem:1M"]);
    let (done, output) = end(first);
    assert!(
        done && output.contains("Name:              mp\n") && output.contains("Event number:      1\n"),
        "{output}"
    );
    let (done, output) = end(second);
    let device: Value = serde_json::from_str(&output).unwrap();
    assert_eq!((done, &device["name"], &device["event_nr"]), (true, &json!("mp"), &json!(1)));
    // Returns at once for an older number, and also for a number that never existed.
    assert_eq!(server.says(&["wait", "mp"]), "");
    server.says(&["wait", "mp", "7"]);
    let third = waits(&server, &["254:0", "1", "-v"]);
    server.says(&["rename", "mp", "other"]);
    let (done, output) = end(third);
    assert!(done && output.contains("Name:              other\n"), "{output}");

    let output = server.refuses(&["wait", "other", "2", "--timeout", "0.05"]);
    assert!(
        output.starts_with("udm: other: no event within ") && output.ends_with("timed out\n"),
        "{output}"
    );
    let output = server.refuses(&["wait", "none"]);
    assert_eq!(output, "udm: none: no device of that name: No such device or address\n");
}

#[test]
fn until_it_is_gone() {
    let server = Server::start(&["d=0 8 zero"]);
    server.says(&["create", "bare", "--notable"]);
    let words = [&["d", "-v"][..], &["bare"]];
    let mut both = words.map(|words| waits(&server, words));
    let _others: Vec<UnixStream> = (2..WAITS_MAX).map(|_| holds(&server, 0)).collect();
    until("that all wait", || {
        // The query itself needs a slot for a moment, and may have taken the last one.
        for (child, words) in both.iter_mut().zip(words) {
            if child.try_wait().unwrap().is_some() {
                *child = waits(&server, words);
            }
        }
        are_taken(&server)
    });
    let [full, bare] = both;
    server.says(&["remove", "d"]);
    server.says(&["create", "d", "--table", "0 8 zero"]);
    let (done, output) = end(full);
    assert!(
        done && output.contains("Name:              d\n") && output.contains("Event number:      1\n"),
        "{output}"
    );
    server.says(&["remove", "bare"]);
    let (done, output) = end(bare);
    assert_eq!(
        (done, output.as_str()),
        (false, "udm: bare: it has been removed meanwhile: No such device or address\n")
    );
}

/// Waiting clients do not block other requests, and a client that disconnects frees its slot.
#[test]
fn places_are_bounded_and_come_free() {
    let server = Server::start(&["d=0 8 zero"]);
    let all: Vec<UnixStream> = (0..WAITS_MAX).map(|_| holds(&server, 0)).collect();
    let output = until("that all places are taken", || are_taken(&server));
    assert!(output.contains("128 clients wait for events already"), "{output}");
    assert_eq!(server.says(&["ls"]), "d\t(254:0)\n");
    drop(all);
    until("that places are free", || are_taken(&server).is_none().then_some(()));
    let all: Vec<UnixStream> = (0..WAITS_MAX).map(|_| holds(&server, 0)).collect();
    until("that all places are taken", || are_taken(&server));
    server.says(&["rename", "d", "e"]);
    assert_eq!(event_nr(&server, "e"), 1);
    for mut stream in all {
        let mut head = [0; 15];
        std::io::Read::read_exact(&mut stream, &mut head).unwrap();
        assert_eq!(text(&head), "HTTP/1.1 200 OK");
    }
}

#[test]
fn it_does_not_hold_up_the_end() {
    let mut server = Server::start(&["d=0 8 zero"]);
    let waiting = waits(&server, &["d"]);
    let _held = holds(&server, 0);
    let quiet = waits(&server, &["d", "0", "--timeout", "1"]);
    assert!(!end(quiet).0);
    signal(Pid::from_child(&server.child), Signal::TERM);
    until("its end", || server.child.try_wait().unwrap());
    assert!(server.child.wait().unwrap().success(), "{}", server.log());
    end(waiting);
}
