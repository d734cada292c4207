//! Shared parts of the program's tests: a running `udm serve`, and its verbs.
#![allow(dead_code, reason = "each test file is a separate program and uses a part of this module")]

pub mod browser;
pub mod guest;
pub mod listener;
pub mod maps;
pub mod mount;
pub mod moved_disk;
pub mod nbd;
pub mod servers;
pub mod shutdown;
pub mod stamps;
pub mod web_server;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub const UDM: &str = env!("CARGO_BIN_EXE_udm");

/// Longer than any operation takes on a busy machine. It only ends tests that hang.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// `udm` without the user's environment, so it cannot reach the user's server.
pub fn udm(args: &[&str]) -> Command {
    let mut command = Command::new(UDM);
    let (verb, rest) = args.split_at(args.len().min(1));
    command.args(verb).args(sandbox_options(args)).args(rest);
    command.env_remove("UDM_SOCKET").env_remove("UDM_LOG").env_remove("XDG_RUNTIME_DIR");
    // No state folder: marks of other servers are not seen, and none are written.
    command.env("UDM_STATE", "/dev/null/udm");
    command.stdin(Stdio::null());
    command
}

/// True if the servers of the tests are to be restricted (`--sandbox`), as far as they can be.
pub fn tests_sandbox() -> bool {
    std::env::var_os("UDM_TEST_SANDBOX").is_some()
}

/// Returns true, and reports it, if a test cannot run with a restricted server.
pub fn needs_no_sandbox(why: &str) -> bool {
    if tests_sandbox() {
        report_skip(&format!("servers are restricted: {why}"));
    }
    tests_sandbox()
}

/// The options of a restricted server.
fn sandbox_options(args: &[&str]) -> Vec<String> {
    match args {
        ["serve", rest @ ..] if tests_sandbox() && !rest.contains(&"--sandbox") => {
            let (files, certificates) = (std::env::temp_dir(), "../udm-tls/tests/data");
            let certificates = Path::new(env!("CARGO_MANIFEST_DIR")).join(certificates);
            let allowed = [files, certificates].map(|path| format!("--sandbox-path={}", path.display()));
            [vec!["--sandbox".to_owned()], allowed.to_vec()].concat()
        }
        _ => Vec::new(),
    }
}

/// A process that is killed when this is dropped.
pub struct ChildGuard(pub Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Reports why a test or a part of it was skipped.
#[expect(clippy::print_stderr, reason = "skips are reported in the output of the tests")]
pub fn report_skip(why: &str) {
    eprintln!("SKIPPED: {why}");
}

/// True if `program` can be run; otherwise reports the skip.
pub fn has(program: &str) -> bool {
    let found =
        Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !found {
        report_skip(&format!("{program} is not installed"));
    }
    found
}

/// Polls `done` until it returns a value.
pub fn until<T>(name: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        if let Some(it) = done() {
            return it;
        }
        sleep(Duration::from_millis(10));
    }
    panic!("{name}: not within {PATIENCE:?}");
}

/// Sends a signal. After SIGSTOP, waits until all threads have stopped: until then one of them may
/// still handle a request.
pub fn signal(pid: Pid, signal: Signal) {
    kill_process(pid, signal).unwrap();
    if signal == Signal::STOP {
        let tasks = format!("/proc/{}/task", pid.as_raw_nonzero());
        let stopped = |task: &fs::DirEntry| {
            let status = fs::read_to_string(task.path().join("status"));
            status.is_ok_and(|status| status.contains("State:\tT"))
        };
        let all = || fs::read_dir(&tasks).unwrap().map(Result::unwrap).all(|task| stopped(&task));
        until("threads that stand still", || all().then_some(()));
    }
}

/// A running `udm serve`. Dropping it kills the server.
pub struct Server {
    pub child: Child,
    pub folder: TempDir,
    pub socket: PathBuf,
    pub nbd: PathBuf,
    /// The process that has taken over from `child`.
    pub successor: Option<Pid>,
}

impl Server {
    /// Serves `devices` (`NAME=TABLE`), and waits until the server answers.
    pub fn start(devices: &[&str]) -> Server {
        Server::start_with(devices, &[])
    }

    /// The same with more options. The default is one core on the first CPU, and no path checks:
    /// the test controls the states of paths.
    pub fn start_with(devices: &[&str], options: &[&str]) -> Server {
        Server::start_by(udm(&["serve"]), devices, options)
    }

    /// The same with `command`, which runs `udm serve`.
    pub fn start_by(mut command: Command, devices: &[&str], options: &[&str]) -> Server {
        let folder = tempfile::tempdir().unwrap();
        let (socket, nbd) = (folder.path().join("control.sock"), folder.path().join("nbd.sock"));
        if !options.contains(&"--cores") {
            command.args(["--cores", "0"]);
        }
        if !options.iter().any(|option| ["--check-paths", "--multipath-conf"].contains(option)) {
            command.args(["--check-paths", "off"]);
        }
        command.args(options);
        for device in devices {
            command.args(["--device", device]);
        }
        command.arg("--unix").arg(&nbd).arg("--socket").arg(&socket);
        command.env("UDM_STATE", folder.path().join("state"));
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let child = command.stderr(log).spawn().unwrap();
        let mut server = Server { child, folder, socket, nbd, successor: None };
        until("a server that answers", || {
            assert!(server.child.try_wait().unwrap().is_none(), "the server ended: {}", server.log());
            // The line comes when all sockets are open, also those of TCP and of machines.
            let is_ready = server.log().contains("control socket ");
            is_ready.then(|| {
                UnixStream::connect(&server.socket).and_then(|_| UnixStream::connect(&server.nbd)).ok()
            })?
        });
        server
    }

    /// The log so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    /// Runs a verb; returns its output.
    pub fn verb(&self, args: &[&str]) -> Output {
        udm(args).env("UDM_SOCKET", &self.socket).output().unwrap()
    }

    /// Runs a verb that must succeed; returns its standard output.
    pub fn says(&self, args: &[&str]) -> String {
        let out = self.verb(args);
        assert!(out.status.success(), "{args:?}: {}", text(&out.stderr));
        assert_eq!(text(&out.stderr), "", "{args:?}");
        text(&out.stdout)
    }

    /// Runs a verb that must fail; returns its standard error.
    pub fn refuses(&self, args: &[&str]) -> String {
        let out = self.verb(args);
        assert_eq!(out.status.code(), Some(1), "{args:?}: {}{}", text(&out.stdout), text(&out.stderr));
        assert_eq!(text(&out.stdout), "", "{args:?}");
        text(&out.stderr)
    }

    /// Runs `udm upgrade --json` with `args`, which must succeed, and waits for the end of the old
    /// process. Returns its report.
    pub fn upgrade(&mut self, args: &[&str]) -> Value {
        let report: Value =
            serde_json::from_str(&self.says(&[&["upgrade", "--json"], args].concat())).unwrap();
        let pid = report["pid"].as_i64().and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
        match self.successor.replace(pid.expect("the report has the process")) {
            None => assert!(self.child.wait().unwrap().success(), "{}", self.log()),
            Some(old) => until_gone(old),
        }
        report
    }

    /// The process that serves.
    pub fn pid(&self) -> Pid {
        self.successor.unwrap_or_else(|| Pid::from_child(&self.child))
    }

    /// Kills the process that serves, and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(pid) = self.successor.take() {
            // It may have ended.
            let _ = kill_process(pid, Signal::KILL);
            until_gone(pid);
        }
    }

    /// One HTTP exchange: status, head, body.
    pub fn http(&self, method: &str, path: &str, body: &str) -> (u16, String, String) {
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: udm\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        answer(&ask(&self.socket, request.as_bytes()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits until a process that is no child of this one has ended.
fn until_gone(pid: Pid) {
    let state = format!("/proc/{}/stat", pid.as_raw_nonzero());
    // A zombie waits for its new parent.
    let is_over = || fs::read_to_string(&state).map_or(true, |stat| stat.contains(") Z "));
    until("the end of a process", || is_over().then_some(()));
}

/// Sends as many bytes as the server accepts, and closes the sending side. Returns everything that
/// the server sends until it closes.
pub fn raw(socket: &Path, bytes: &[u8]) -> String {
    exchange(socket, bytes, true)
}

/// Sends a request that asks the server to close after its response.
pub fn ask(socket: &Path, bytes: &[u8]) -> String {
    exchange(socket, bytes, false)
}

/// With `hang_up` the client closes its sending side. The server takes this for a disconnect,
/// unless it has already answered.
fn exchange(socket: &Path, bytes: &[u8], hang_up: bool) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    // The server may close the connection early.
    let _ = stream.write_all(bytes);
    if hang_up {
        let _ = stream.shutdown(std::net::Shutdown::Write);
    }
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(e) => panic!("the server neither answers nor closes: {e}"),
    }
    text(&answer)
}

/// Splits an HTTP response: status, head, body.
pub fn answer(answer: &str) -> (u16, String, String) {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
    (status, head.to_ascii_lowercase(), body.into())
}
