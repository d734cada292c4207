//! `udm web`: access control, forwarded requests, and the page in a browser.

mod support;

use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use support::browser::{Browser, exchange};
use support::servers::{Nbdkit, fio};
use support::{Server, answer, has, udm};

/// A running `udm web`. Dropping it kills it.
struct WebServer {
    child: Child,
    port: u16,
    token: String,
}

impl WebServer {
    fn start(server: &Server, options: &[&str]) -> WebServer {
        let mut command = udm(&["web"]);
        command.args(options).env("UDM_SOCKET", &server.socket).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (address, token) = line.trim_end().split_once("/#token=").unwrap();
        let port = address.strip_prefix("http://127.0.0.1:").unwrap().parse().unwrap();
        WebServer { child, port, token: token.to_owned() }
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}/#token={}", self.port, self.token)
    }

    /// Sends one request with these header lines.
    fn ask(&self, method: &str, target: &str, head: &[&str], body: &str) -> (u16, String, String) {
        let head: String = head.iter().map(|line| format!("{line}\r\n")).collect();
        let length = body.len();
        answer(&exchange(
            self.port,
            &format!(
                "{method} {target} HTTP/1.1\r\nConnection: close\r\nContent-Length: {length}\r\n{head}\r\n{body}"
            ),
        ))
    }

    /// The header line with the token.
    fn known(&self) -> String {
        format!("Authorization: Bearer {}", self.token)
    }

    /// Sends one request like the page.
    fn page(&self, method: &str, target: &str, body: &str) -> (u16, String, String) {
        let host = format!("127.0.0.1:{}", self.port);
        let head = [&format!("Host: {host}"), &self.known(), "Content-Type: application/json"];
        self.ask(method, target, &head, body)
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn who_may_come_in() {
    let server = Server::start(&["d=0 8 zero"]);
    let web = WebServer::start(&server, &[]);
    let host = "Host: localhost";

    let (status, _, output) = web.ask("GET", "/v1/devices", &[host], "");
    assert_eq!(
        (status, output.as_str()),
        (403, "udm web: open the address that udm web printed: it has the token\n")
    );
    let known = web.known();
    // A browser would send a cookie to every port of the host.
    let cookie = format!("Cookie: udm_web={}", web.token);
    assert_eq!(web.ask("GET", "/v1/devices", &[host, &cookie], "").0, 403);
    assert_eq!(web.ask("GET", "/v1/devices", &[host, &known], "").0, 200);
    let (status, head, page) = web.ask("GET", "/", &[host], "");
    assert_eq!(status, 200);
    assert!(!head.contains("set-cookie"), "{head}");
    assert!(head.contains("content-security-policy: default-src 'none'"), "{head}");
    assert!(page.contains("data-write=\"false\""), "{page}");
    // A foreign host name that resolves to this address.
    assert_eq!(web.ask("GET", "/", &["Host: udm.example", &known], "").0, 403);

    let (status, head, output) = web.page("GET", "/v1/devices", "");
    assert_eq!((status, output), (200, server.http("GET", "/v1/devices", "").2));
    assert!(head.contains("content-type: application/json\r\n"), "{head}");
    assert_eq!(web.page("GET", "/v1/devices/none", "").0, 404);
    let (status, _, output) = web.page("GET", "/etc/passwd", "");
    assert_eq!((status, output.as_str()), (404, "udm web: no such page\n"));
    let (status, _, output) = web.page("POST", "/v1/devices/d/suspend", "{}");
    assert_eq!((status, output.as_str()), (403, "udm web: udm web was started without --write\n"));
    assert!(server.says(&["info", "d"]).contains("ACTIVE"));
}

#[test]
fn with_write_the_page_may_change_and_no_other() {
    let server = Server::start(&["d=0 8 zero"]);
    let web = WebServer::start(&server, &["--write"]);
    assert!(web.page("GET", "/", "").2.contains("data-write=\"true\""));
    let host = format!("Host: 127.0.0.1:{}", web.port);
    let (status, ..) =
        web.ask("POST", "/v1/devices/d/suspend", &[&host, "Content-Type: application/json"], "{}");
    assert_eq!(status, 403);
    assert!(server.says(&["info", "d"]).contains("ACTIVE"));
    assert_eq!(web.page("POST", "/v1/devices/d/suspend", "{}").0, 204);
    assert!(server.says(&["info", "d"]).contains("SUSPENDED"));
    // Errors of the server are forwarded unchanged.
    let (status, _, output) = web.page("POST", "/v1/devices/d/suspend", "{\"unknown\":1}");
    assert!((400..500).contains(&status) && output.contains("unknown"), "{status}: {output}");
}

/// More idle connections than slots do not block new ones; nor does another `udm web` affect this
/// one.
#[test]
fn who_says_nothing_makes_room() {
    let server = Server::start(&["d=0 8 zero"]);
    let (web, other) = (WebServer::start(&server, &[]), WebServer::start(&server, &[]));
    let silent: Vec<_> = (0..200).map(|_| TcpStream::connect(("127.0.0.1", web.port)).unwrap()).collect();
    let begin = Instant::now();
    for web in [&web, &other, &web] {
        assert_eq!(web.page("GET", "/v1/devices", "").0, 200);
    }
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    drop(silent);
}

#[test]
fn it_ends_and_says_when_the_server_is_gone() {
    let mut server = Server::start(&["d=0 8 zero"]);
    let mut web = WebServer::start(&server, &[]);
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let (status, _, output) = web.page("GET", "/v1/devices", "");
    assert_eq!(status, 502);
    assert!(output.contains("can't reach udm serve"), "{output}");
    kill_process(Pid::from_child(&web.child), Signal::TERM).unwrap();
    assert_eq!(web.child.wait().unwrap().code(), Some(0));

    let out = udm(&["web"]).env("UDM_SOCKET", &server.socket).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(support::text(&out.stderr).contains("can't reach udm serve"));
    let out = udm(&["web", "--listen", "0.0.0.0:0"]).env("UDM_SOCKET", &server.socket).output().unwrap();
    let output = support::text(&out.stderr);
    assert!(output.contains("listens on loopback only: reach it through ssh -L"), "{output}");
}

/// JavaScript for the text of a column in the row of a device or path.
fn cell(name: &str, column: usize) -> String {
    format!(
        "[...document.querySelectorAll('#rows tr')].find(row => row.dataset.name === {name:?})?.cells[{column}].textContent"
    )
}

/// The column of the state.
const STATE: usize = 1;

#[test]
fn a_path_fails_and_returns_on_the_page() {
    if !has("nbdkit") || !has("fio") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    std::fs::File::create(&disk).unwrap().set_len(8 << 20).unwrap();
    let kits = ["a", "b"].map(|name| folder.path().join(name));
    let mut kits = kits.map(|socket| Nbdkit::start(socket, &["file", disk.to_str().unwrap()]));
    let [a, b] = [kits[0].uri(), kits[1].uri()];
    let table = format!("mp=0 16384 multipath 1 queue_if_no_path 0 1 1 round-robin 0 2 1 {a} 1 {b} 1");
    // A name that would create an image and run a script if names were parsed as HTML.
    let odd = "<img src=x onerror=window.odd=1>";
    let server = Server::start_with(&[&table], &["--check-paths", "1"]);
    server.says(&["create", odd, "--table", "0 16384 linear @mp 0"]);
    let web = WebServer::start(&server, &["--write"]);
    let Some(browser) = Browser::open(&web.url()) else { return };
    assert_eq!(browser.run("return location.hash + location.search"), "", "the token stays in no address");
    assert_eq!(browser.run("return document.cookie"), "");

    let load = fio(&server, "mp", "--rw=randrw --size=8M --time_based --runtime=600").spawn().unwrap();
    let load = FioGuard(load);
    browser.until("return document.getElementById('live').textContent === 'live'");
    browser.until(&format!("return {} === 'active'", cell(&a, STATE)));
    browser.until(&format!("return {} === 'active'", cell(odd, STATE)));
    // Rates of the load, and of each path.
    browser.until(&format!("return /^[0-9.]+ k?$/.test({})", cell(&b, 4)));

    kits[0].kill();
    browser.until(&format!("return {} === 'failed'", cell(&a, STATE)));
    browser.until(&format!("return {} === 'degraded'", cell("mp", STATE)));
    browser.until(
        "return [...document.querySelectorAll('#log .bad b')].some(device => device.textContent === 'mp')",
    );
    kits[0].again();
    browser.until(&format!("return {} === 'active'", cell(&a, STATE)));
    browser.until(&format!("return {} === 'active'", cell("mp", STATE)));

    // A verb through a button, and the command that prints a number.
    browser.run(&format!(
        "window.confirm = said => (window.asked = said, true); \
         [...document.querySelectorAll('.name')].find(name => name.textContent === {odd:?}).click()"
    ));
    browser.until(&format!("return document.getElementById('chosen').textContent === {odd:?}"));
    browser.run(
        "[...document.querySelectorAll('#actions button')].find(b => b.textContent === 'suspend').click()",
    );
    browser.until(&format!("return {} === 'suspended'", cell(odd, STATE)));
    assert_eq!(browser.run("return window.asked"), format!("udm suspend '{odd}'"));
    browser.run("document.querySelector('#table').dispatchEvent(new Event('pointerover', {bubbles: true}))");
    let verb = browser.run("return document.getElementById('verb').textContent");
    assert_eq!(verb, format!("$ udm table '{odd}'"));
    assert_eq!(browser.run("return window.odd === undefined"), true);
    drop(load);

    // The page keeps working without the server.
    server_gone(server, &browser);
}

/// fio, ended on drop.
struct FioGuard(Child);

impl Drop for FioGuard {
    fn drop(&mut self) {
        // `timeout` passes the signal on to fio.
        let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        let _ = self.0.wait();
    }
}

fn server_gone(server: Server, browser: &Browser) {
    drop(server);
    browser.until("return document.getElementById('live').textContent.includes(\"can't reach udm serve\")");
}
