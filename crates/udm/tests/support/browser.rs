//! A browser: Chromium without a window, driven through ChromeDriver (W3C WebDriver).

use super::{PATIENCE, has, until};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

/// A page in a browser. Dropping it ends the browser and the driver.
pub struct Browser {
    driver: Child,
    port: u16,
    session: String,
}

/// Sends one HTTP request to a port on loopback; returns the response, whose length is in its head.
/// (Not every server closes the connection on request.)
pub fn exchange(port: u16, request: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut stream = BufReader::new(stream);
    let (mut answer, mut length) = (String::new(), None);
    loop {
        let at = answer.len();
        stream.read_line(&mut answer).unwrap();
        let line = answer[at..].trim_end().to_ascii_lowercase();
        length = length.or_else(|| line.strip_prefix("content-length:")?.trim().parse::<u64>().ok());
        if line.is_empty() {
            break;
        }
    }
    let mut body = Vec::new();
    stream.take(length.unwrap_or(u64::MAX)).read_to_end(&mut body).unwrap();
    answer + &super::text(&body)
}

impl Browser {
    /// A browser that shows `url`; `None` if no browser is installed.
    pub fn open(url: &str) -> Option<Browser> {
        if !has("chromium") || !has("chromedriver") {
            return None;
        }
        let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        let mut driver = Command::new("chromedriver");
        driver.arg(format!("--port={port}")).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let driver = driver.spawn().unwrap();
        let mut browser = Browser { driver, port, session: String::new() };
        until("a driver that listens", || TcpStream::connect(("127.0.0.1", port)).ok());
        let args = [
            "--headless",
            // Chromium needs this as root.
            "--no-sandbox",
            "--disable-gpu",
            // A container may have little shared memory.
            "--disable-dev-shm-usage",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--window-size=1500,1000",
        ];
        let expected = json!({"capabilities": {"alwaysMatch": {"goog:chromeOptions": {"args": args}}}});
        let session = browser.call("POST", "/session", &expected);
        browser.session = session["sessionId"].as_str().unwrap().to_owned();
        browser.ask("POST", "/url", &json!({ "url": url }));
        Some(browser)
    }

    fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        let body = body.to_string();
        let answer = exchange(
            self.port,
            &format!(
                "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n\
                 Content-Length: {}\r\n\r\n{body}",
                body.len()
            ),
        );
        let (status, _, body) = super::answer(&answer);
        let mut body: Value = serde_json::from_str(&body).unwrap_or_else(|e| panic!("{e}: {answer}"));
        assert_eq!(status, 200, "{method} {path}: {body}");
        body["value"].take()
    }

    fn ask(&self, method: &str, path: &str, body: &Value) -> Value {
        self.call(method, &format!("/session/{}{path}", self.session), body)
    }

    /// Runs the body of a function in the page; returns its result.
    pub fn run(&self, script: &str) -> Value {
        self.ask("POST", "/execute/sync", &json!({"script": script, "args": []}))
    }

    /// Waits until the body of a function returns true.
    pub fn until(&self, script: &str) {
        until(script, || (self.run(script) == json!(true)).then_some(()));
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if !self.session.is_empty() {
            let path = format!("/session/{}", self.session);
            // A failed test reports its own error.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                self.call("DELETE", &path, &json!({}));
            }));
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}
