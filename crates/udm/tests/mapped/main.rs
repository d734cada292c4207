//! Mapped devices in the real program: the depth of stacks, limits, and cancelled suspends and
//! resumes.

mod checker;
mod claims;
mod looking;
mod making;
#[path = "../support/mod.rs"]
mod support;

use rustix::process::{Pid, Signal};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use support::nbd::Client;
use support::{Server, has, text, udm, until};
use udm_wire::nbd::ExportFlags;

impl Server {
    fn info(&self, name: &str) -> serde_json::Value {
        let (status, _, body) = self.http("GET", &format!("/v1/devices/{name}"), "");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    /// Starts a verb in the background.
    fn begin(&self, args: &[&str]) -> Child {
        let mut command = udm(args);
        command.env("UDM_SOCKET", &self.socket).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }
}

/// Devices without tables, loaded from the top down, each over the next, so that no load finds a
/// deep stack below. Then again with tables that name the device below twice.
#[test]
fn a_stack_has_an_end_however_it_grows() {
    let server = Server::start(&["s0=0 8 zero"]);
    for i in 1..402 {
        let (status, _, body) =
            server.http("POST", "/v1/devices", &json!({"name": format!("s{i}")}).to_string());
        assert_eq!(status, 200, "{body}");
    }
    let load = |i: usize, table: &str| {
        let path = format!("/v1/devices/s{i}/table");
        let (status, _, body) = server.http("PUT", &path, &json!({ "table": table }).to_string());
        (status, body)
    };
    for (from, line) in [(0, "0 8 linear @s{} 0"), (201, "0 4 linear @s{} 0\n4 4 linear @s{} 4")] {
        let mut refused = 0;
        assert_eq!(load(from + 200, "0 8 zero").0, 204);
        server.says(&["resume", &format!("s{}", from + 200)]);
        for i in from..from + 200 {
            let (status, body) = load(i, &line.replace("{}", &(i + 1).to_string()));
            if status != 204 {
                assert!(
                    status == 400 && (body.contains("mapped devices deep") || body.contains("open lanes")),
                    "{body}"
                );
                refused += 1;
                // The refused device is the bottom of one stack; the next stack begins below it.
                assert_eq!(load(i, "0 8 zero").0, 204);
            }
        }
        assert!(refused > 5, "{refused}");
        for i in (from..from + 200).rev() {
            server.http("POST", &format!("/v1/devices/s{i}/resume"), "");
        }
        for i in (from..from + 200).step_by(7) {
            let mut client = Client::connect(&server.nbd, &format!("s{i}"));
            assert_eq!((client.size, client.read(0)), (4096, 0), "s{i}");
        }
    }
    assert!(server.refuses(&["load", "s3", "--table", "0 8 linear @s3 0"]).contains("Device lookup failed"));
}

/// A device is loaded over one without a table. The device below becomes read-only, and the client
/// is told so.
#[test]
fn limits_are_those_of_the_resume() {
    let server = Server::start(&["other=0 8 zero"]);
    let file = server.folder.path().join("disk.img");
    std::fs::write(&file, vec![0; 1 << 20]).unwrap();
    for name in ["low", "up"] {
        server.says(&["create", name, "--notable"]);
    }
    server.says(&["load", "up", "--table", "0 2048 linear @low 0"]);
    let table = format!("0 2048 linear file:{}?readonly=on 0", file.display());
    server.says(&["load", "low", "--table", &table]);
    server.says(&["resume", "low", "up"]);
    assert_eq!(server.info("up")["read_only"], true);
    let mut client = Client::connect(&server.nbd, "up");
    assert!(client.flags.contains(ExportFlags::READ_ONLY));
    assert_eq!((client.read(0), client.write(0)), (0, 1));

    // The device below becomes read-only later. The device above keeps its announced limits, and
    // its writes fail.
    server.says(&["load", "low", "--table", "0 2048 linear mem:1M 0"]);
    server.says(&["resume", "low"]);
    server.says(&["load", "up", "--table", "0 2048 linear @low 0"]);
    server.says(&["resume", "up"]);
    let mut client = Client::connect(&server.nbd, "up");
    assert_eq!((client.flags.contains(ExportFlags::READ_ONLY), client.write(0)), (false, 0));
    server.says(&["load", "low", "--table", &table]);
    server.says(&["resume", "low"]);
    assert_eq!((server.info("up")["read_only"].clone(), client.write(0)), (json!(false), 1));
    assert_eq!(client.read(0), 0);
}

/// A client keeps the size and block size that it was told. Requests that the device no longer
/// supports are refused; all others are served.
#[test]
fn what_a_client_was_told_may_be_refused_later() {
    let server = Server::start(&["d=0 2048 linear mem:1M 0"]);
    let mut client = Client::connect(&server.nbd, "d");
    assert_eq!((client.size, client.write(2047)), (1 << 20, 0));
    server.says(&["load", "d", "--table", "0 1024 linear mem:1M 0"]);
    server.says(&["resume", "d"]);
    let ends = |client: &mut Client| (client.read(1023), client.read(1024), client.write(2047));
    let (inside, read, write) = ends(&mut client);
    assert!(inside == 0 && read != 0 && write != 0, "{inside} {read} {write}");
    let mut late = Client::connect(&server.nbd, "d");
    assert_eq!((late.size, late.read(1023)), (1 << 19, 0));
    server.says(&["load", "d", "--table", "0 2048 linear mem:1M 0"]);
    server.says(&["resume", "d"]);
    assert_eq!(ends(&mut client), (0, 0, 0));
}

/// A server whose device `up` has a read in flight that does not complete: the read waits in `low`,
/// which is suspended.
fn hung() -> (Server, Client) {
    let server =
        Server::start(&["low=0 1024 linear mem:1M 0", "up=0 1024 linear @low 0\n1024 1024 linear mem:1M 0"]);
    server.says(&["suspend", "low"]);
    let mut client = Client::connect(&server.nbd, "up");
    client.ask_read(0);
    // The second read is answered, so the first one is in flight.
    assert_eq!(client.read(1500), 0);
    (server, client)
}

/// `up` is active with its old table and serves requests; the pending read completes when it can.
fn goes_on(server: &Server, client: &mut Client) {
    until("an active device", || (server.info("up")["state"] == "active").then_some(()));
    assert!(server.says(&["table", "up"]).starts_with("0 1024 linear 254:0 0\n"));
    assert_eq!(client.read(1501), 0);
    server.says(&["resume", "low"]);
    assert_eq!(client.reply(), (0, 0));
    // The device can be suspended now.
    server.says(&["suspend", "up"]);
    server.says(&["resume", "up"]);
    assert_eq!(client.read(3), 0);
}

fn waits(server: &Server, verb: &mut Child) {
    until("a suspend under way", || {
        assert!(verb.try_wait().unwrap().is_none(), "it did not wait");
        (server.info("up")["state"] == "suspended").then_some(())
    });
}

fn refused(verb: Child) -> String {
    let out = verb.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
    assert_eq!(text(&out.stdout), "");
    text(&out.stderr)
}

/// Ends a verb with SIGTERM, because `nohup` and a shell's `&` would ignore SIGINT; the verb has no
/// handler.
fn interrupt(mut verb: Child) {
    kill(&verb, Signal::TERM);
    assert!(!until("the end of the verb", || verb.try_wait().unwrap()).success());
}

fn kill(child: &Child, signal: Signal) {
    support::signal(Pid::from_child(child), signal);
}

#[test]
fn a_suspend_that_waits_ends_with_its_client() {
    let (server, mut client) = hung();
    let mut suspend = server.begin(&["suspend", "up"]);
    waits(&server, &mut suspend);
    interrupt(suspend);
    goes_on(&server, &mut client);
}

#[test]
fn a_suspend_that_waits_too_long_is_called_off() {
    let (server, mut client) = hung();
    let error = server.refuses(&["suspend", "up", "--timeout", "0.2"]);
    assert_eq!(error, "udm: up: not at rest within 200 ms; the device is active: Connection timed out\n");
    let (status, _, body) = server.http("POST", "/v1/devices/up/suspend", r#"{"timeout_ms": 10}"#);
    assert!(status == 504 && body.contains(r#""errno":110"#), "{status} {body}");
    goes_on(&server, &mut client);
}

#[test]
fn a_resume_calls_a_suspend_off_that_waits() {
    let (server, mut client) = hung();
    let mut suspend = server.begin(&["suspend", "up"]);
    waits(&server, &mut suspend);
    server.says(&["resume", "up"]);
    assert_eq!(
        refused(suspend),
        "udm: up: cancelled by a resume; the device is active: Interrupted system call\n"
    );
    goes_on(&server, &mut client);
}

/// A file whose reads can be made to hang: nbdfuse over an nbdkit that can be stopped.
struct SlowFile {
    nbdkit: Child,
    nbdfuse: Child,
    path: PathBuf,
}

impl SlowFile {
    fn new(folder: &Path) -> SlowFile {
        let (socket, path) = (folder.join("kit.sock"), folder.join("slow"));
        std::fs::write(&path, "").unwrap();
        let quiet = |program: &str| {
            let mut command = Command::new(program);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            command
        };
        let nbdkit = quiet("nbdkit").args(["-f", "-U"]).arg(&socket).args(["memory", "1M"]).spawn().unwrap();
        until("nbdkit", || socket.exists().then_some(()));
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        let nbdfuse = quiet("nbdfuse").arg(&path).arg(uri).spawn().unwrap();
        let file = SlowFile { nbdkit, nbdfuse, path };
        until("nbdfuse", || (std::fs::metadata(&file.path).ok()?.len() == 1 << 20).then_some(()));
        file
    }

    fn stop(&self) {
        kill(&self.nbdkit, Signal::STOP);
    }

    fn go_on(&self) {
        kill(&self.nbdkit, Signal::CONT);
    }
}

impl Drop for SlowFile {
    fn drop(&mut self) {
        self.go_on();
        for program in ["fusermount3", "umount"] {
            let lazy = if program == "umount" { "-l" } else { "-uz" };
            let _ = Command::new(program).arg(lazy).arg(&self.path).stderr(Stdio::null()).status();
        }
        for child in [&mut self.nbdfuse, &mut self.nbdkit] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Storage that hangs below a device cannot give requests back. So a suspend without a flush waits
/// too, and so does a resume with another table. Each is cancelled with its client, and the live
/// table stays.
#[test]
fn storage_that_hangs_holds_no_verb_for_good() {
    let fuse = std::fs::File::options().read(true).write(true).open("/dev/fuse");
    if !has("nbdkit") || !has("nbdfuse") || fuse.is_err() {
        return;
    }
    let mut server = Server::start(&["other=0 2048 linear mem:1M 0"]);
    let file = SlowFile::new(server.folder.path());
    let table = format!("0 1024 linear {} 0\n1024 1024 linear mem:1M 0", file.path.display());
    server.says(&["create", "up", "--table", &table]);
    let live = server.says(&["table", "up"]);
    let mut client = Client::connect(&server.nbd, "up");
    file.stop();
    client.ask_read(0);
    assert_eq!(client.read(1500), 0);

    for verb in [&["suspend", "up"][..], &["suspend", "--noflush", "up"]] {
        let mut verb = server.begin(verb);
        waits(&server, &mut verb);
        interrupt(verb);
        until("an active device", || (server.info("up")["state"] == "active").then_some(()));
        assert_eq!(client.read(1501), 0);
    }
    server.says(&["load", "up", "--table", "0 2048 linear mem:1M 0"]);
    let mut resume = server.begin(&["resume", "up"]);
    waits(&server, &mut resume);
    interrupt(resume);
    until("an active device", || (server.info("up")["state"] == "active").then_some(()));
    assert_eq!((server.says(&["table", "up"]), client.read(1502)), (live.clone(), 0));
    let error = server.refuses(&["resume", "up", "--timeout", "0.1"]);
    assert!(error.contains("not at rest within 100 ms; the device is active"), "{error}");
    assert_eq!((server.says(&["table", "up"]), client.read(1503)), (live, 0));

    file.go_on();
    assert_eq!(client.reply(), (0, 0));
    server.says(&["resume", "up"]);
    assert!(server.says(&["table", "up"]).starts_with("0 2048 linear"));
    assert_eq!(client.read(1), 0);
    drop(client);
    kill(&server.child, Signal::TERM);
    until("the end", || server.child.try_wait().unwrap());
}

/// A removal does not wait: it reports at once that the device is in use.
#[test]
fn a_device_in_use_is_not_removed_whatever_waits() {
    let (server, mut client) = hung();
    let mut suspend = server.begin(&["suspend", "up"]);
    waits(&server, &mut suspend);
    let error = server.refuses(&["remove", "up"]);
    assert!(error.contains("it is open 1 times"), "{error}");
    assert!(suspend.try_wait().unwrap().is_none(), "the suspend still waits");
    server.says(&["resume", "up"]);
    refused(suspend);
    goes_on(&server, &mut client);
}

/// At the end of the server, waiting clients get an answer: the change was cancelled, or it is done
/// because the shutdown failed the requests.
#[test]
fn the_end_of_the_server_ends_what_waits() {
    let (mut server, _client) = hung();
    let mut suspend = server.begin(&["suspend", "up"]);
    waits(&server, &mut suspend);
    kill(&server.child, Signal::TERM);
    let out = suspend.wait_with_output().unwrap();
    let output = text(&out.stderr);
    assert!(out.status.success() || output.contains("the server ends; the device is active"), "{output}");
    until("the end", || server.child.try_wait().unwrap());
}

/// Several devices are suspended and resumed together or not at all, in any order of names, under
/// load.
#[test]
fn several_change_together_or_not_at_all() {
    let (server, mut client) = hung();
    server.says(&["create", "other", "--table", "0 1024 zero"]);
    let states = |names: [&str; 3]| names.map(|name| server.info(name)["state"].as_str().unwrap().to_owned());

    let output = server.refuses(&["suspend", "other", "nobody"]);
    assert!(output.starts_with("udm: nobody: "), "{output}");
    // The request in flight in `up` waits in `low`.
    let output = server.refuses(&["suspend", "other", "up", "--timeout", "0.3"]);
    assert!(output.contains("the device is active"), "{output}");
    assert_eq!(states(["up", "low", "other"]), ["active", "suspended", "active"]);

    server.says(&["resume", "low"]);
    assert_eq!(client.reply(), (0, 0));
    server.says(&["suspend", "low", "other", "up"]);
    assert_eq!(states(["up", "low", "other"]), ["suspended"; 3].map(String::from));
    client.ask_read(3);
    // The new tables of `up` and `low` do not fit together. The third device keeps its table too.
    server.says(&["load", "other", "--table", "0 1024 linear mem:1M 0"]);
    server.says(&["load", "up", "--table", "0 1024 linear @low 0"]);
    server.says(&["load", "low", "--table", "0 8 zero"]);
    let output = server.refuses(&["resume", "up", "low", "other"]);
    assert!(output.starts_with("udm: up: ") && output.contains("too small for target"), "{output}");
    assert_eq!(states(["up", "low", "other"]), ["active"; 3].map(String::from));
    assert_eq!(client.reply(), (3 * 512, 0));
    assert_eq!(server.says(&["table", "other"]), "0 1024 zero \n");
    for name in ["up", "low", "other"] {
        server.says(&["load", name, "--table", "0 2048 linear mem:1M 0"]);
    }
    server.says(&["resume", "up", "low", "other"]);
    assert!(server.says(&["table", "other"]).contains("linear"));
    assert_eq!(client.read(5), 0);
}
