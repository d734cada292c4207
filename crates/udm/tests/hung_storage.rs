//! A server with storage that hangs: a mount whose file system, or the server behind it, was
//! stopped.

mod support;

use rustix::process::Signal;
use serde_json::json;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use support::mount::Mount;
use support::shutdown::ShutdownServer;
use support::{Server, text, until};
use udm_wire::nbd::NbdCommand;

/// Sends a request and does not wait for its answer.
fn begin(server: &Server, method: &str, path: &str, body: &serde_json::Value) -> UnixStream {
    let mut stream = UnixStream::connect(&server.socket).unwrap();
    let (body, length) = (body.to_string(), body.to_string().len());
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: udm\r\nContent-Length: {length}\r\n\r\n{body}")
        .unwrap();
    stream
}

fn linear(file: &Path) -> String {
    format!("0 8 linear {} 0", file.display())
}

/// Loads and messages that name a file on the hung mount wait or are refused. All others are not
/// delayed.
#[test]
fn storage_that_hangs_holds_up_nobody_else() {
    let Some(mount) = Mount::new() else { return };
    let server = Server::start(&[
        "mp=0 2048 multipath 1 queue_if_no_path 0 1 1 round-robin 0 2 1 mem:1M 1 null:size=1M 1",
    ]);
    server.says(&["create", "d", "--notable"]);
    server.says(&["create", "used", "--table", &linear(&mount.file())]);
    mount.signal(Signal::STOP);
    let mut waiting = Vec::new();
    // By a name that was used before, by device number, and by names that were not used before.
    for i in 0..12 {
        let names =
            [linear(&mount.file()), "0 8 linear 253:2 0".into(), linear(&mount.path().join(format!("n{i}")))];
        for table in names {
            waiting.push(begin(&server, "PUT", "/v1/devices/d/table", &json!({"table": table})));
        }
    }
    for i in 0..12 {
        let message = format!("fail_path {}", mount.path().join(format!("n{i}")).display());
        let body = json!({"sector": 0, "message": message});
        waiting.push(begin(&server, "POST", "/v1/devices/mp/message", &body));
    }
    for _ in 0..3 {
        assert_eq!(server.says(&["ls"]).lines().count(), 3);
        server.says(&["status"]);
        server.says(&["message", "mp", "0", "fail_path", "mem:1M"]);
        server.says(&["message", "mp", "0", "reinstate_path", "253:0"]);
        server.says(&["suspend", "mp"]);
        server.says(&["resume", "mp"]);
        server.says(&["load", "mp", "--table", "0 2048 multipath 0 0 1 1 round-robin 0 1 1 mem:1M 1"]);
        server.says(&["clear", "mp"]);
        server.says(&["create", "new", "--table", "0 8 linear null:size=2M 0"]);
        server.says(&["remove", "new"]);
    }
    // Closing the file may hang as well.
    waiting.push(begin(&server, "DELETE", "/v1/devices/used", &json!(null)));
    until("the device is gone", || (!server.says(&["ls"]).contains("used")).then_some(()));
    // A path on the hung mount can be failed and replaced by its name in the table.
    let output =
        text(&server.verb(&["message", "mp", "0", "fail_path", mount.file().to_str().unwrap()]).stderr);
    assert!(output.contains("no path over device") && output.ends_with("Invalid argument\n"), "{output}");
    // When the storage answers again, all waiting requests complete.
    mount.signal(Signal::CONT);
    until("the loads that waited", || {
        let loaded = server.says(&["table", "d", "--inactive"]);
        (loaded == "0 8 linear 253:2 0\n").then_some(())
    });
    drop(waiting);
    server.says(&["load", "d", "--table", &linear(&mount.file())]);
    server.says(&["remove", "d"]);
}

/// A request that hangs in the kernel keeps the process alive, even after SIGKILL. To everybody
/// else the server has ended: its messages are printed, its sockets are removed, its clients are
/// disconnected, and it has an exit status.
#[test]
fn what_the_kernel_does_not_give_up_holds_up_nobody_else() {
    let limit = "udm: stopped waiting after 2 s: 1 request on d; flushed data is safe; \
        the process ends when the kernel has completed its requests\n";
    let second = "udm: ended at once; flushed data is safe\n";
    for (seconds, signals, output, status) in [("2", 1, limit, 1), ("3600", 2, second, 143)] {
        let Some(mount) = Mount::new() else { return };
        let devices = [&format!("d={}", linear(&mount.file())), "ok=0 8 linear mem:4k 0"];
        let mut server = ShutdownServer::start(&["--stop-timeout", seconds], &devices);
        let (mut hung, mut well) = (server.client("d"), server.client("ok"));
        // The mount's server accepts the request and passes it on to a server that does not answer.
        mount.signal_behind(Signal::STOP);
        hung.ask(NbdCommand::Write, 0, 512);
        assert_eq!(well.write(0), 0);
        std::thread::sleep(Duration::from_millis(500));
        server.signal(Signal::TERM);
        until("a word", || server.output().contains("udm: waiting for 1 request on d (").then_some(()));
        (1..signals).for_each(|_| server.signal(Signal::TERM));
        until("the end", || server.output().ends_with(output).then_some(()));
        assert!(server.is_clean());
        for client in [&mut hung, &mut well] {
            assert_eq!(client.stream.read(&mut [0]).unwrap(), 0, "the end of the connection");
        }
        assert_eq!(
            server.child.try_wait().unwrap(),
            None,
            "the kernel has let go by itself: this test shows nothing"
        );
        mount.signal_behind(Signal::CONT);
        assert_eq!(server.wait().code(), Some(status), "{}", server.output());
    }
}
