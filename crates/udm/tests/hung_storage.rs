//! A server some of whose storage hangs: a mount whose file system was stopped.

mod support;

use serde_json::json;
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use support::{Server, has, text, until};
use tempfile::TempDir;

/// A mount with one file, `nbd`, by a FUSE server that can be stopped. It is ended and taken down with its owner.
struct Mount {
    fuse: Child,
    folder: TempDir,
}

impl Mount {
    /// `None`, said aloud, where there is no FUSE.
    fn new() -> Option<Mount> {
        if !has("nbdfuse") || !has("nbdkit") || !has("fusermount3") {
            return None;
        }
        if fs::File::options().read(true).write(true).open("/dev/fuse").is_err() {
            support::skipped("/dev/fuse can't be opened");
            return None;
        }
        let folder = TempDir::new().unwrap();
        let mut fuse = Command::new("nbdfuse");
        fuse.arg(folder.path()).args(["--command", "nbdkit", "-s", "memory", "1M"]).stderr(Stdio::null());
        let mount = Mount { fuse: fuse.spawn().unwrap(), folder };
        until("the mount", || mount.file().exists().then_some(()));
        Some(mount)
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("nbd")
    }

    fn signal(&self, signal: &str) {
        Command::new("kill").arg(signal).arg(self.fuse.id().to_string()).status().unwrap();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.signal("-KILL");
        let _ = self.fuse.wait();
        let _ = Command::new("fusermount3").arg("-uz").arg(self.folder.path()).status();
    }
}

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

/// Loads and messages that name something on it wait, or are refused. Nobody else does.
#[test]
fn storage_that_hangs_holds_up_nobody_else() {
    let Some(mount) = Mount::new() else { return };
    let server = Server::start(&[
        "mp=0 2048 multipath 1 queue_if_no_path 0 1 1 round-robin 0 2 1 mem:1M 1 null:size=1M 1",
    ]);
    server.says(&["create", "d", "--notable"]);
    server.says(&["create", "used", "--table", &linear(&mount.file())]);
    mount.signal("-STOP");
    let mut waiting = Vec::new();
    // By a name that was used before, by its number, and by names that nobody has looked at yet.
    for i in 0..12 {
        let names = [
            linear(&mount.file()),
            "0 8 linear 253:2 0".into(),
            linear(&mount.folder.path().join(format!("n{i}"))),
        ];
        for table in names {
            waiting.push(begin(&server, "PUT", "/v1/devices/d/table", &json!({"table": table})));
        }
    }
    for i in 0..12 {
        let message = format!("fail_path {}", mount.folder.path().join(format!("n{i}")).display());
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
    // Closing it may take as long.
    waiting.push(begin(&server, "DELETE", "/v1/devices/used", &json!(null)));
    until("the device is gone", || (!server.says(&["ls"]).contains("used")).then_some(()));
    // Named as the table names it, what hangs can be failed and replaced.
    let said =
        text(&server.verb(&["message", "mp", "0", "fail_path", mount.file().to_str().unwrap()]).stderr);
    assert!(said.contains("no path over device") && said.ends_with("Invalid argument\n"), "{said}");
    // When it answers again, so does all that waited for it.
    mount.signal("-CONT");
    until("the loads that waited", || {
        let loaded = server.says(&["table", "d", "--inactive"]);
        (loaded == "0 8 linear 253:2 0\n").then_some(())
    });
    drop(waiting);
    server.says(&["load", "d", "--table", &linear(&mount.file())]);
    server.says(&["remove", "d"]);
}
