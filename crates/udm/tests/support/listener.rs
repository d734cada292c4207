//! A client of `/v1/events`.

use super::{PATIENCE, Server};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

/// A client that listens for events, and reads only when asked.
pub struct EventListener(pub BufReader<UnixStream>, u32);

impl EventListener {
    pub fn start(server: &Server, after: Option<u64>) -> EventListener {
        let mut stream = UnixStream::connect(&server.socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let after = after.map_or(String::new(), |id| format!("Last-Event-ID: {id}\r\n"));
        write!(stream, "GET /v1/events HTTP/1.1\r\nHost: udm\r\n{after}\r\n").unwrap();
        let mut listener = EventListener(BufReader::new(stream), 0);
        let head = listener.line();
        if head.starts_with("HTTP/1.1 200") {
            // From this line on it receives events.
            while listener.line().trim() != ": udm" {}
        }
        listener
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.0.read_line(&mut line).unwrap() > 0, "the stream has ended");
        // An idle server sends a comment every 10 s.
        self.1 = if line.starts_with(':') {
            self.1 + 1
        } else if line.trim().len() > 4 {
            0
        } else {
            self.1
        };
        assert!(self.1 < 4, "nothing comes");
        line
    }

    /// The next event; its `id` and `event` lines must match its data.
    pub fn next(&mut self) -> Value {
        let mut id = String::new();
        loop {
            let line = self.line();
            let line = line.trim_end();
            if let Some(rest) = line.strip_prefix("id:") {
                id = rest.trim().into();
            } else if let Some(data) = line.strip_prefix("data:") {
                let event: Value = serde_json::from_str(data).unwrap();
                assert_eq!(event["id"].to_string(), id);
                return event;
            }
        }
    }

    /// The next `n` events, as `device kind`.
    pub fn kinds(&mut self, n: usize) -> Vec<String> {
        let name = |event: Value| {
            format!("{} {}", event["device"].as_str().unwrap(), event["kind"].as_str().unwrap())
        };
        (0..n).map(|_| name(self.next())).collect()
    }

    /// The kinds of events up to the first one that is `last`.
    pub fn until(&mut self, last: &str) -> Vec<String> {
        let mut all = Vec::new();
        while all.last().is_none_or(|kind| kind != last) {
            all.push(self.next()["kind"].as_str().unwrap().to_owned());
        }
        all
    }
}
