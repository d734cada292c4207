//! The control socket with curl and with faulty clients.

mod support;

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use support::nbd::Client;
use support::{Server, answer, has, raw, text, until};

fn server() -> Server {
    Server::start(&["d=0 2048 linear mem:1M 0"])
}

/// Checks that the server still works.
fn alive(server: &Server) {
    assert_eq!(server.says(&["ls"]), "d\t(254:0)\n");
}

/// Parses an error in the API's format.
fn refusal(body: &str) -> Value {
    let error: Value = serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {body}"));
    assert!(error["error"].as_str().is_some_and(|e| !e.is_empty() && !e.contains('\n')), "{body}");
    assert!(error["errno"].as_u64().is_some_and(|n| n > 0), "{body}");
    error
}

/// Checks `value` against a schema of the document; handles the parts of JSON Schema that the
/// document uses.
fn conforms(document: &Value, schema: &Value, value: &Value, at: &str) {
    if let Some(name) = schema["$ref"].as_str() {
        let schema = document.pointer(name.trim_start_matches('#')).unwrap_or_else(|| panic!("{at}: {name}"));
        return conforms(document, schema, value, at);
    }
    if let Some(choices) = schema["anyOf"].as_array() {
        let choice = if value.is_null() { &choices[1] } else { &choices[0] };
        return conforms(document, choice, value, at);
    }
    let kind = match &schema["type"] {
        // An optional value: its type, or null.
        Value::Array(kinds) => &kinds[usize::from(value.is_null())],
        kind => kind,
    };
    match kind.as_str().unwrap_or_else(|| panic!("{at}: {schema}")) {
        "object" => {
            let object = value.as_object().unwrap_or_else(|| panic!("{at}: {value}"));
            let Some(properties) = schema["properties"].as_object() else { return };
            for name in schema["required"].as_array().unwrap() {
                assert!(object.contains_key(name.as_str().unwrap()), "{at}: no {name}");
            }
            for (name, value) in object {
                let schema = properties.get(name).unwrap_or_else(|| panic!("{at}: {name} is not described"));
                conforms(document, schema, value, &format!("{at}.{name}"));
            }
        }
        "array" => {
            for item in value.as_array().unwrap_or_else(|| panic!("{at}: {value}")) {
                conforms(document, &schema["items"], item, at);
            }
        }
        "string" => assert!(value.is_string(), "{at}: {value}"),
        "integer" => assert!(value.is_u64(), "{at}: {value}"),
        "boolean" => assert!(value.is_boolean(), "{at}: {value}"),
        "null" => assert!(value.is_null(), "{at}: {value}"),
        other => panic!("{at}: {other}"),
    }
}

/// Every GET of the OpenAPI description exists and answers as described; every other method exists.
#[test]
fn the_description_is_true() {
    let server = server();
    server.says(&["load", "d", "--table", "0 8 error"]);
    server.says(&["create", "o", "--table", "0 2048 linear mem:1M 0"]);
    server.says(&["snapshot", "create", "s", "--of", "o", "--store", "mem:2M"]);
    let clone = ["clone", "create", "c", "--from", "mem:1M", "--to", "mem:6M", "--metadata", "mem:7M"];
    server.says(&clone);
    let place = |name: &str| server.folder.path().join(name).display().to_string();
    std::fs::write(place("here"), [1; 4096]).unwrap();
    server.says(&["create", "m", "--table", &format!("0 8 linear {} 0", place("here"))]);
    server.says(&["move", "m", "--to", &place("there"), "--pause"]);
    let (status, _, body) = server.http("GET", "/openapi.json", "");
    assert_eq!(status, 200);
    let document: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(document["openapi"], "3.1.0");
    let mut seen = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            // A stream without an end; `tests/events.rs` reads it.
            if operation["responses"]["200"]["content"].get("text/event-stream").is_some() {
                continue;
            }
            let described = |status: u16| {
                &operation["responses"][status.to_string()]["content"]["application/json"]["schema"]
            };
            let error = &operation["responses"]["default"]["content"]["application/json"]["schema"];
            let device = match path.split('/').nth(2) {
                Some("snapshots") => "s",
                Some("clones") => "c",
                Some("moves") => "m",
                _ => "d",
            };
            if method == "get" {
                for query in ["", "?inactive=1"] {
                    let (status, head, body) =
                        server.http("GET", &(path.replace("{name}", device) + query), "");
                    if query.is_empty() || path.ends_with("/table") || path.ends_with("/status") {
                        assert_eq!(status, 200, "{path}{query}: {body}");
                    }
                    let content = &operation["responses"]["200"]["content"];
                    let kind = content.as_object().and_then(|all| all.keys().next());
                    if status == 200 && kind.is_some_and(|kind| kind != "application/json") {
                        assert!(head.contains(&format!("content-type: {}", kind.unwrap())), "{head}");
                    } else if status == 200 {
                        assert!(head.contains("content-type: application/json"), "{head}");
                        conforms(&document, described(200), &serde_json::from_str(&body).unwrap(), path);
                        seen += 1;
                    }
                }
            }
            // A device that does not exist is refused as described, so the route exists.
            let (status, _, body) = server.http(&method.to_uppercase(), &path.replace("{name}", "none"), "");
            if path.contains("{name}") {
                let body = refusal(&body);
                assert!([404, 400].contains(&status), "{method} {path}: {status}");
                conforms(&document, error, &body, path);
            }
        }
    }
    assert!(seen >= 12, "{seen}");
    server.says(&["remove", "c"]);
    server.says(&["move", "stop", "m"]);
    server.says(&["remove", "m"]);
    server.says(&["snapshot", "remove", "s"]);
    server.says(&["remove", "o"]);
    alive(&server);
}

#[test]
fn curl_does_all_that_the_verbs_do() {
    let server = server();
    let call = |method: &str, path: &str, body: Value, expected: u16| {
        let (status, _, answer) = server.http(method, path, &body.to_string());
        assert_eq!(status, expected, "{method} {path}: {answer}");
        if answer.is_empty() { Value::Null } else { serde_json::from_str(&answer).unwrap() }
    };
    let created = call("POST", "/v1/devices", json!({"name": "a b", "table": "0 8 zero"}), 200);
    assert_eq!((&created["number"], &created["size_bytes"]), (&json!("254:1"), &json!(4096)));
    call("PUT", "/v1/devices/a%20b/table", json!({"table": "0 16 zero"}), 204);
    call("POST", "/v1/devices/a%20b/suspend", json!({"noflush": true}), 204);
    assert_eq!(call("GET", "/v1/devices/a%20b", Value::Null, 200)["state"], "suspended");
    call("POST", "/v1/devices/a%20b/resume", json!({}), 204);
    let table = call("GET", "/v1/devices/254:1/table", Value::Null, 200);
    assert_eq!(table["text"], "0 16 zero ");
    assert_eq!(
        table["lines"][0],
        json!({"start_bytes": 0, "length_bytes": 8192, "target": "zero", "params": ""})
    );
    let error = call("POST", "/v1/devices/a%20b/message", json!({"sector": 0, "message": "x"}), 400);
    assert_eq!(error["text"], "Target type zero does not support messages");
    call("POST", "/v1/devices", json!({"name": "a b"}), 409);
    call("POST", "/v1/devices", json!({"name": "top", "table": "0 8 linear @d 0"}), 200);
    call("DELETE", "/v1/devices/d", Value::Null, 409);
    call("DELETE", "/v1/devices/a%20b", Value::Null, 204);
    call("GET", "/v1/devices/a%20b", Value::Null, 404);
    let error = call("PUT", "/v1/devices/d/table", json!({"table": "0 8 zero\n8 8 linear mem:1M ü"}), 400);
    assert_eq!((&error["line"], &error["column"], &error["width"]), (&json!(2), &json!(19), &json!(1)));
    if has("curl") {
        let out = Command::new("curl")
            .args(["-s", "--unix-socket"])
            .arg(&server.socket)
            .arg("http://udm/v1/version")
            .output();
        let version: Value = serde_json::from_slice(&out.unwrap().stdout).unwrap();
        assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
    }
}

#[test]
fn bad_requests_are_refused_in_json() {
    let server = server();
    let long = format!("{{\"table\": \"{}\"}}", "0 8 zero\\n".repeat(200_000));
    let deep = "[".repeat(100_000);
    let cases = [
        ("GET", "/v1/nothing", "", 404),
        ("GET", "/", "", 404),
        ("GET", "/v1/devices/%FF", "", 400),
        ("GET", "/v1/devices/%00", "", 404),
        ("GET", "/v1/devices/..%2F..%2Fetc", "", 404),
        ("PATCH", "/v1/devices", "", 405),
        ("DELETE", "/v1/version", "", 405),
        ("POST", "/v1/devices/d/table", "{}", 405),
        ("GET", "/v1/devices/d/table?inactive=2", "", 400),
        ("GET", "/v1/devices/d/table?inactive=x", "", 400),
        ("GET", "/v1/devices/d/table?active=1", "", 400),
        ("POST", "/v1/devices", "", 400),
        ("POST", "/v1/devices", "{", 400),
        ("POST", "/v1/devices", "[]", 400),
        ("POST", "/v1/devices", "{\"name\": 7}", 400),
        ("POST", "/v1/devices", "{\"name\": \"x\", \"tabel\": \"0 8 zero\"}", 400),
        ("POST", "/v1/devices", "{\"name\": \"x\u{1}y\"}", 400),
        ("POST", "/v1/devices", "{\"name\": \"a/b\"}", 400),
        ("POST", "/v1/devices", "{\"name\": \"x\", \"table\": \"0 8 linear\"}", 400),
        ("POST", "/v1/devices", "{\"name\": \"x\", \"table\": \"\"}", 400),
        ("PUT", "/v1/devices/d/table", &long, 400),
        ("PUT", "/v1/devices/d/table", &deep, 400),
        ("POST", "/v1/devices/d/message", "{\"sector\": -1, \"message\": \"x\"}", 400),
        ("POST", "/v1/devices/d/message", "{\"sector\": 18446744073709551615, \"message\": \"x\"}", 400),
        ("POST", "/v1/devices/d/suspend", "{\"noflush\": \"yes\"}", 400),
        ("GET", "/v1/devices/d/rename", "", 405),
        ("POST", "/v1/devices/d/rename", "", 400),
        ("POST", "/v1/devices/d/rename", "{\"name\": null}", 400),
        ("POST", "/v1/devices/d/rename", "{\"name\": \"x\", \"uuid\": \"u\"}", 400),
        ("POST", "/v1/devices/d/rename", "{\"name\": \"x\", \"to\": \"y\"}", 400),
        ("POST", "/v1/devices/d/rename", "{\"name\": \"x\", \"name\": \"y\"}", 400),
        ("POST", "/v1/devices/d/rename", "{\"name\": [\"x\"]}", 400),
        ("POST", "/v1/devices/d/rename", "{\"name\": \"\\u0000\"}", 400),
        ("POST", "/v1/devices/d/rename", "{\"name\": \"\\ud800\"}", 400),
        ("POST", "/v1/devices/d/rename", "{\"uuid\": \"\"}", 400),
        ("POST", "/v1/devices/d/rename", "{\"uuid\": \"254:0\"}", 400),
        ("POST", "/v1/devices/d/rename", "{\"name\": \"d\"}", 409),
        ("POST", "/v1/devices/x/rename", "{\"name\": \"y\"}", 404),
        ("POST", "/v1/devices/x/rename", "{\"name\": \"d\"}", 409),
    ];
    for (method, path, body, expected) in cases {
        let (status, head, answer) = server.http(method, path, body);
        assert_eq!(status, expected, "{method} {path} {}: {answer}", &body[..body.len().min(80)]);
        assert!(refusal(&answer).to_string().len() < 2000);
        assert_eq!(head.contains("\r\nallow: "), expected == 405, "{head}");
    }
    let huge = format!("{{\"table\": \"{}\"}}", "x".repeat(4 << 20));
    let (status, _, answer) = server.http("PUT", "/v1/devices/d/table", &huge);
    // The response may be lost if the server closes while the client is still sending.
    assert!(status == 413 && refusal(&answer)["errno"] == 7 || status == 0, "{status}");
    alive(&server);
}

#[test]
fn garbage_harms_nobody() {
    let server = server();
    let flood = format!("GET / HTTP/1.1\r\n{}\r\n", "X-Y: zzzzzzzzzzzzzzzzzzzzzzzzzzzzzz\r\n".repeat(20_000));
    let endless = format!(
        "PUT /v1/devices/d/table HTTP/1.1\r\nHost: udm\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        "1000\r\n".to_string() + &"x".repeat(0x1000) + "\r\n"
    );
    let many = endless.clone() + &("1000\r\n".to_string() + &"x".repeat(0x1000) + "\r\n").repeat(2000);
    let inputs: [&[u8]; 9] = [
        b"",
        b"\r\n\r\n\r\n",
        b"\x00\xff\xfe garbage \x80\r\n\r\n",
        &[0; 100_000],
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/version HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /v1/devices HTTP/1.1\r\nContent-Length: 100\r\n\r\n{",
        flood.as_bytes(),
        many.as_bytes(),
    ];
    for input in inputs {
        let (status, ..) = answer(&raw(&server.socket, input));
        assert!(
            status == 0 || (400..500).contains(&status),
            "{status} for {:?}",
            text(&input[..input.len().min(60)])
        );
        alive(&server);
    }
    // Clients that send nothing, and clients that disconnect in the middle of a request.
    let silent: Vec<_> = (0..40).map(|_| UnixStream::connect(&server.socket).unwrap()).collect();
    for _ in 0..100 {
        let mut stream = UnixStream::connect(&server.socket).unwrap();
        let _ = stream.write_all(b"POST /v1/devices/d/resume HTTP/1.1\r\nContent-Le");
    }
    alive(&server);
    drop(silent);
}

/// Clients that announce a body and send none, that send their head byte by byte, or that send
/// nothing: more of them than connection slots. A new client is served at once.
#[test]
fn clients_that_say_nothing_lock_nobody_out() {
    let server = server();
    let body = b"POST /v1/devices HTTP/1.1\r\nHost: udm\r\nContent-Length: 100\r\n\r\n{";
    let mut held = Vec::new();
    for round in 0..100 {
        for bytes in [&body[..], b"POST /v1/dev", b"", b"GET /v1/version HTTP/1.1\r\nHost: udm\r\n\r\n"] {
            let mut stream = UnixStream::connect(&server.socket).unwrap();
            let _ = stream.write_all(bytes);
            held.push(stream);
        }
        if round % 25 == 0 {
            alive(&server);
        }
    }
    alive(&server);
    // Among connections of one process, the one idle for longest is closed first.
    let (status, ..) = server.http("GET", "/v1/version", "");
    assert_eq!(status, 200);
}

/// Clients of both kinds want more descriptors than there are; the control socket still answers.
#[test]
fn a_server_without_descriptors_can_be_controlled() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, nbd) = (folder.path().join("control.sock"), folder.path().join("nbd.sock"));
    let script = format!(
        "ulimit -n 60; exec {} serve --cores 0 --device 'd=0 2048 linear mem:1M 0' --unix {} --socket {}",
        support::UDM,
        nbd.display(),
        socket.display()
    );
    let child = Command::new("sh").args(["-c", &script]).stderr(std::process::Stdio::null()).spawn().unwrap();
    let server = Server { child, folder, socket, nbd, successor: None };
    for place in [&server.socket, &server.nbd] {
        until("a server that answers", || UnixStream::connect(place).ok());
    }
    for place in [&server.nbd, &server.socket, &server.nbd] {
        let clients: Vec<_> = (0..150).map(|_| UnixStream::connect(place).unwrap()).collect();
        for _ in 0..3 {
            alive(&server);
        }
        drop(clients);
    }
}

/// A peer of another user gets the reason in one line, with curl and with the verbs.
#[test]
fn another_user_is_refused_with_the_reason() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    let server = server();
    if !rustix::process::geteuid().is_root() {
        return support::report_skip("it takes root to be another user");
    }
    let open = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    open(server.folder.path(), 0o755);
    open(&server.socket, 0o666);
    let program = server.folder.path().join("udm");
    std::fs::copy(support::UDM, &program).unwrap();
    open(&program, 0o755);
    for args in [&["ls"][..], &["create", "x", "--table", "0 8 zero"], &["remove", "d"]] {
        let output = Command::new(&program)
            .args(args)
            .env("UDM_SOCKET", &server.socket)
            .uid(65534)
            .gid(65534)
            .output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(
            text(&output.stderr),
            "udm: control socket: only the user that runs the server, and root, may use it: Operation not permitted\n"
        );
    }
    alive(&server);
}

/// A client that has sent a read of the first sector.
fn begin_read(server: &Server, export: &str) -> Client {
    let mut client = Client::connect(&server.nbd, export);
    client.ask_read(0);
    client
}

/// A suspend waits for requests in flight until its client disconnects.
#[test]
fn an_abandoned_suspend_is_called_off() {
    // Not the delay target: it releases held requests when it is suspended.
    let server = Server::start(&["slow=0 2048 linear null:size=1M,irqmode=2,completion_nsec=2000000000 0"]);
    let mut read = begin_read(&server, "slow");
    // A request that is refused at once: when its reply arrives, the read before it is in flight.
    assert_ne!(read.read(1 << 31), 0);
    let mut client = UnixStream::connect(&server.socket).unwrap();
    client
        .write_all(b"POST /v1/devices/slow/suspend HTTP/1.1\r\nHost: udm\r\nContent-Length: 0\r\n\r\n")
        .unwrap();
    let state = |expected: &str| {
        until(expected, || {
            let (_, _, body) = server.http("GET", "/v1/devices/slow", "");
            body.contains(&format!("\"state\":\"{expected}\"")).then_some(())
        });
    };
    state("suspended");
    drop(client);
    state("active");
    assert_eq!(read.error(), 0, "what was in flight is answered");
    assert_eq!(begin_read(&server, "slow").error(), 0);
}

/// Requests wait while a device is suspended, and a device that a client has open is not removed.
#[test]
fn a_suspended_device_lets_clients_wait() {
    let server = server();
    server.says(&["suspend", "d"]);
    let mut read = begin_read(&server, "d");
    until("the client is seen", || {
        let output = text(&server.verb(&["remove", "d"]).stderr);
        output.contains("it is open 1 times").then_some(())
    });
    server.says(&["load", "d", "--table", "0 2048 zero"]);
    server.says(&["resume", "d"]);
    assert_eq!(read.error(), 0);
}

/// `udm status --json` has the counters and the state of each path of a multipath device.
#[test]
fn status_has_numbers_for_each_path() {
    let (first, second) = ("null:size=1M", "null:size=2M");
    let table = format!("0 2048 multipath 0 0 1 1 round-robin 0 2 1 {first} 1 {second} 1");
    let server = Server::start(&[&format!("mp={table}")]);
    let paths = || -> Value {
        let all: Value = serde_json::from_str(&server.says(&["status", "mp", "--json"])).unwrap();
        all[0]["paths"].clone()
    };
    let mut client = Client::connect(&server.nbd, "mp");
    (0..4).for_each(|sector| assert_eq!(client.read(sector), 0));
    server.says(&["message", "mp", "0", "fail_path", first]);
    assert_eq!(client.write(0), 0);
    let now = paths();
    let moved = |requests: u64| json!({ "requests": requests, "bytes": requests * 512 });
    assert_eq!((&now[0]["name"], &now[1]["name"]), (&json!(first), &json!(second)));
    assert_eq!((&now[0]["state"], &now[1]["state"]), (&json!("failed"), &json!("active")));
    assert_eq!((&now[0]["failures"], &now[1]["failures"]), (&json!(1), &json!(0)));
    assert_eq!((&now[0]["served"]["read"], &now[0]["served"]["write"]), (&moved(2), &moved(0)));
    assert_eq!((&now[1]["served"]["read"], &now[1]["served"]["write"]), (&moved(2), &moved(1)));
    assert_eq!((&now[0]["in_flight"], &now[0]["errors"]), (&json!(0), &json!({})));
    assert_eq!(now[0]["state_ns"], now[0]["failed_ns"], "it has failed once");
    assert!(now[1]["state_ns"].as_u64() > now[0]["state_ns"].as_u64() && now[1]["failed_ns"] == 0);
    server.says(&["message", "mp", "0", "reinstate_path", first]);
    let failed = paths()[0]["failed_ns"].clone();
    assert!(failed.as_u64() > Some(0) && failed == paths()[0]["failed_ns"], "that time is over");
}

/// A server that was taken over cannot send commands to the terminal of an operator.
#[test]
fn what_a_server_says_is_no_command_of_a_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control");
    let listener = UnixListener::bind(&socket).unwrap();
    let name = r"\u001b]0;x\u0007\u009b2J\u202eevil\nline";
    let rest = r#""uuid":null,"number":"254:0","size_bytes":1048576,"state":"active","live_table":true,
        "inactive_table":false,"open_count":0,"event_nr":0,"targets":1,"read_only":false,
        "deferred_remove":false,"queues":[],"power":[]"#;
    let devices = format!(r#"{{"devices":[{{"name":"{name}",{rest}}}]}}"#);
    let place = r#""text":"","line":null,"column":null,"width":null"#;
    let error = format!(r#"{{"error":"{name}","errno":22,"reason":"{name}",{place}}}"#);
    let (sent, answers) = mpsc::channel::<(u16, String)>();
    let fake = thread::spawn(move || {
        for (status, body) in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = BufReader::new(stream.try_clone().unwrap());
            let mut line = String::new();
            while request.read_line(&mut line).unwrap() > 2 {
                line.clear();
            }
            let length = body.len();
            let head = format!("HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n");
            let rest = format!("content-length: {length}\r\nconnection: close\r\n\r\n{body}");
            stream.write_all((head + &rest).as_bytes()).unwrap();
        }
    });
    for (status, body, options) in [
        (200, &devices, &["ls"][..]),
        (200, &devices, &["ls", "--json"]),
        (400, &error, &["ls"]),
        (400, &error, &["info", "d"]),
    ] {
        sent.send((status, body.clone())).unwrap();
        let out = support::udm(options).env("UDM_SOCKET", &socket).output().unwrap();
        let said = text(&out.stdout) + &text(&out.stderr);
        assert!(said.contains("evil"), "{options:?}: {said:?}");
        let is_harmful = |c: char| !matches!(c, '\n' | '\t') && (c.is_control() || c == '\u{202e}');
        assert!(!said.contains(is_harmful), "{options:?}: {said:?}");
    }
    drop(sent);
    fake.join().unwrap();
}
