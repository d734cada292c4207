//! `udm top`, for scripts and in a real terminal.

mod support;

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use support::nbd::Client;
use support::{Server, UDM, text, until};

/// Runs `look` while a client writes to `device`.
fn under_load<T>(server: &Server, device: &str, look: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = Client::connect(&server.nbd, device);
            while !stop.load(Ordering::Relaxed) {
                assert_eq!(client.write(0), 0);
            }
        });
        let looked = look();
        stop.store(true, Ordering::Relaxed);
        looked
    })
}

const MULTIPATH: &str = "mp=0 2048 multipath 0 0 1 1 round-robin 0 2 1 mem:1M 1 mem:1M 1";

#[test]
fn for_scripts() {
    let server = Server::start(&[MULTIPATH, "idle=0 8 zero"]);
    server.says(&["message", "mp", "0", "fail_path", "mem:1M"]);
    let one = server.says(&["top", "--once", "--interval", "0.1"]);
    assert!(one.lines().any(|line| line.starts_with("- mp ") && line.contains("0/2")), "{one}");
    server.says(&["message", "mp", "0", "reinstate_path", "mem:1M"]);
    let json = under_load(&server, "mp", || {
        until("a look at a client that writes", || {
            let json = server.says(&["top", "--once", "--json", "--interval", "0.3"]);
            let rates: Value = serde_json::from_str(&json).unwrap();
            (rates["devices"][0]["flow"]["writes"].as_f64().unwrap() > 0.0).then_some(rates)
        })
    });
    let (mp, idle) = (&json["devices"][0], &json["devices"][1]);
    let number = |value: &Value| value.as_f64().unwrap();
    let flow = &mp["flow"];
    // The counters of one sample are not of the same instant: a request may be counted before its
    // bytes.
    let each = number(&flow["bytes"]) / number(&flow["writes"]);
    assert!((each - 512.0).abs() < 5.0, "{flow}");
    assert_eq!((number(&flow["reads"]), number(&flow["requests"])), (0.0, number(&flow["writes"])));
    let latency = &mp["latency"];
    assert!(number(&latency["p50_ns"]) <= number(&latency["p99_ns"]) && number(&latency["p50_ns"]) > 0.0);
    let paths: f64 = (0..2).map(|nth| number(&mp["paths"][nth]["flow"]["writes"])).sum();
    assert!(paths > 0.0 && mp["paths"][0]["state"] == "active", "{mp}");
    assert_eq!((number(&idle["flow"]["requests"]), &idle["latency"]), (0.0, &Value::Null));
    let output = server.refuses(&["top"]);
    assert!(output.contains("not a terminal"), "{output}");
    let out = server.verb(&["top", "--interval", "0.01"]);
    assert_eq!(out.status.code(), Some(2));
    let none = support::udm(&["top", "--once", "--socket", "/nonexistent/udm.sock"]).output().unwrap();
    let output = text(&none.stderr);
    assert!(
        !none.status.success() && output.lines().count() == 1 && output.contains("can't reach udm serve"),
        "{output}"
    );
}

/// A tmux terminal with a shell.
struct Tmux {
    socket: String,
}

impl Tmux {
    fn start(folder: &Path, width: u32, height: u32) -> Tmux {
        let tmux = Tmux { socket: folder.join("tmux.sock").display().to_string() };
        let (width, height) = (width.to_string(), height.to_string());
        tmux.run(&["new-session", "-d", "-s", "t", "-x", &width, "-y", &height, "env PS1='$ ' sh"]);
        tmux
    }

    fn run(&self, args: &[&str]) -> String {
        let mut command = Command::new("tmux");
        command
            .args(["-f", "/dev/null", "-S", &self.socket])
            .args(args)
            .env_remove("TMUX")
            .env("LC_ALL", "C.UTF-8");
        let out = command.stdin(Stdio::null()).output().unwrap();
        assert!(out.status.success(), "{args:?}: {}", text(&out.stderr));
        text(&out.stdout)
    }

    fn keys(&self, keys: &[&str]) {
        self.run(&[&["send-keys", "-t", "t"], keys].concat());
    }

    fn types(&self, line: &str) {
        self.run(&["send-keys", "-t", "t", "-l", line]);
        self.keys(&["Enter"]);
    }

    /// Waits until the screen matches `is`, and returns it.
    fn shows(&self, name: &str, is: impl Fn(&str) -> bool) -> String {
        let mut last = String::new();
        for _ in 0..600 {
            last = self.run(&["capture-pane", "-p", "-t", "t"]);
            if is(&last) {
                return last;
            }
            thread::sleep(Duration::from_millis(50));
        }
        panic!("{name}: never; the screen is\n{last}");
    }

    /// Checks that the terminal is restored: cursor, line editing and echo.
    fn is_well(&self) {
        support::until("the screen of before", || {
            let flags = self.run(&["display-message", "-p", "-t", "t", "#{cursor_flag} #{alternate_on}"]);
            (flags.trim() == "1 0").then_some(())
        });
        self.shows("a prompt", |screen| screen.trim_end().ends_with('$'));
        self.types("clear; stty -a | tr -s ' ;' '\\n' | grep -e icanon -e '^-*echo$' -e opost | xargs");
        self.shows("the modes of before", |screen| {
            let modes = screen.lines().find(|line| line.contains("icanon") && !line.contains("stty"));
            modes.is_some_and(|modes| {
                !modes.contains('-') && modes.contains("echo") && modes.contains("opost")
            })
        });
        self.types("clear");
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        let _ = Command::new("tmux").args(["-S", &self.socket, "kill-server"]).stderr(Stdio::null()).status();
    }
}

fn tmux() -> bool {
    let found = Command::new("tmux").arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !found {
        support::report_skip("tmux is not installed");
    }
    found
}

#[test]
fn in_a_terminal() {
    if !tmux() {
        return;
    }
    let mut server = Server::start(&[MULTIPATH, "b\u{202e}ad=0 8 zero", "d=0 2048 linear mem:1M 0"]);
    let tmux = Tmux::start(server.folder.path(), 80, 24);
    let top = format!("NO_COLOR=1 {UDM} top --interval 0.1 --socket {}", server.socket.display());
    tmux.types(&top);
    let screen =
        tmux.shows("three devices", |screen| screen.contains("3 devices") && screen.contains("req/s "));
    let rows: Vec<&str> = screen.lines().skip(3).take(3).collect();
    assert!(
        rows[0].starts_with("+ mp ") && rows[1].starts_with("  b\u{fffd}ad ") && rows[2].starts_with("  d "),
        "{screen}"
    );
    under_load(&server, "d", || {
        tmux.shows("what a client does", |screen| {
            screen
                .lines()
                .any(|line| line.starts_with("  d ") && !line.contains("  0       0 ") && line.contains("us"))
        });
        tmux.keys(&["r"]);
        tmux.shows("the busiest first", |screen| {
            screen.lines().nth(3).is_some_and(|line| line.starts_with("  d "))
        });
    });
    tmux.keys(&["o", "Home", "Right"]);
    let is_unfolded = |screen: &str| screen.contains("253:") && screen.contains("- mp");
    tmux.shows("the paths", is_unfolded);
    tmux.keys(&["Enter"]);
    tmux.shows("one alone", |screen| screen.contains("CHECKER") && !screen.contains("  d "));
    tmux.keys(&["Escape"]);
    tmux.shows("all again", is_unfolded);
    // One device is removed, another is created.
    server.says(&["remove", "d"]);
    server.says(&["create", "new", "--notable"]);
    tmux.shows("another device", |screen| screen.contains("new") && screen.contains("no table"));
    tmux.run(&["resize-window", "-t", "t", "-x", "60", "-y", "10"]);
    tmux.shows("a small screen", |screen| screen.lines().count() <= 10 && screen.contains("q quit"));
    tmux.run(&["resize-window", "-t", "t", "-x", "80", "-y", "24"]);
    // The server ends, which is shown; then another server is found.
    let _ = server.child.kill();
    let _ = server.child.wait();
    tmux.shows("that the server is gone", |screen| {
        screen.contains("trying again") && screen.contains("- mp")
    });
    tmux.keys(&["q"]);
    tmux.is_well();

    // Ends by a signal, Ctrl-C and Ctrl-Z.
    let server = Server::start(&["x=0 8 zero"]);
    let top = format!("{UDM} top --socket {}", server.socket.display());
    for end in ["TERM", "HUP", "C-c", "C-z"] {
        tmux.types(&top);
        tmux.shows("it again", |screen| screen.contains("1 device ") && screen.contains("q quit"));
        match end {
            "C-c" | "C-z" => tmux.keys(&[end]),
            signal => kill(signal, &server),
        }
        tmux.is_well();
    }
    tmux.types("fg");
    tmux.shows("it goes on", |screen| screen.contains("1 device ") && screen.contains("q quit"));
    tmux.keys(&["q"]);
    tmux.is_well();
}

/// Sends a signal to the `udm top` of this server.
fn kill(signal: &str, server: &Server) {
    let socket = server.socket.display().to_string();
    let is_it = |pid: &str| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        words.len() > 2
            && words[0] == UDM.as_bytes()
            && words[1] == b"top"
            && words.contains(&socket.as_bytes())
    };
    let names = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
    let pid = names.filter_map(|name| name.into_string().ok()).find(|name| is_it(name)).unwrap();
    assert!(Command::new("kill").args(["-s", signal, &pid]).status().unwrap().success());
}

/// A thousand devices fit on one screen.
#[test]
fn a_thousand_devices() {
    let server = Server::start(&[]);
    for n in 0..1000 {
        let body = format!(r#"{{"name":"device-{n:04}","table":"0 8 zero"}}"#);
        assert_eq!(server.http("POST", "/v1/devices", &body).0, 200);
    }
    let out = server.says(&["top", "--once", "--interval", "0.1"]);
    assert_eq!(out.lines().count(), 1002);
    if !tmux() {
        return;
    }
    let tmux = Tmux::start(server.folder.path(), 80, 24);
    tmux.types(&format!("{UDM} top --interval 0.1 --socket {}", server.socket.display()));
    tmux.shows("the first", |screen| screen.contains("1000 devices") && screen.contains("device-0019"));
    tmux.keys(&["End"]);
    tmux.shows("the last", |screen| screen.contains("device-0999"));
    tmux.keys(&["q"]);
    tmux.is_well();
}
