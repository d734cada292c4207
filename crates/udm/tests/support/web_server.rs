//! A web server with one object, that answers ranges, and lies if a test wants it.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::Duration;

/// A wrong behaviour of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// The body ends early, and its length says so.
    ShortBody,
    /// The connection is closed inside the body.
    CutBody,
    /// More bytes than the range has.
    LongBody,
    /// The bytes of another range, and `Content-Range` says so.
    WrongRange,
    /// The whole object, with 200.
    WholeObject,
    /// Another ETag, though `If-Match` has the first one.
    OtherEtag,
    /// Another length of the object.
    OtherLength,
    /// This status.
    Status(u16),
    /// No answer, on an open connection.
    Stall,
    /// Half of the body, then nothing.
    StallInBody,
    /// No ETag.
    NoEtag,
    /// A weak ETag.
    WeakEtag,
    /// A redirect with a signature.
    Redirect,
    /// The connection is closed without an answer.
    Close,
}

/// A request that arrived.
#[derive(Clone, Debug)]
pub struct SeenRequest {
    pub path: String,
    pub range: (u64, u64),
    pub if_match: Option<String>,
    pub authorization: Option<String>,
}

struct Shared {
    object: Mutex<Vec<u8>>,
    etag: Mutex<String>,
    lie: Mutex<Option<Lie>>,
    requests: Mutex<Vec<SeenRequest>>,
    delay: Mutex<Duration>,
    now: AtomicUsize,
    most: AtomicUsize,
    is_gone: AtomicBool,
    /// The next request gets no answer while this is set and `holds` is.
    holds_next: AtomicBool,
    holds: AtomicBool,
}

pub struct WebServer {
    port: u16,
    shared: Arc<Shared>,
}

impl WebServer {
    pub fn start(object: Vec<u8>) -> WebServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            object: Mutex::new(object),
            etag: Mutex::new("\"one\"".into()),
            lie: Mutex::default(),
            requests: Mutex::default(),
            delay: Mutex::default(),
            now: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            is_gone: AtomicBool::new(false),
            holds_next: AtomicBool::new(false),
            holds: AtomicBool::new(false),
        });
        let state = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, state) = (stream.unwrap(), Arc::clone(&state));
                std::thread::spawn(move || {
                    // The client may close at any moment.
                    let _ = state.serve(&stream);
                });
            }
        });
        WebServer { port, shared }
    }

    pub fn uri(&self, options: &str) -> String {
        format!("http://127.0.0.1:{}/images/disk%20one.img{options}", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn lie(&self, lie: Option<Lie>) {
        *self.shared.lie.lock().unwrap() = lie;
    }

    /// The server is gone: connections are closed at once, also those that exist.
    pub fn set_gone(&self, is_gone: bool) {
        self.shared.is_gone.store(is_gone, SeqCst);
    }

    pub fn set_object(&self, object: Vec<u8>, etag: &str) {
        *self.shared.object.lock().unwrap() = object;
        *self.shared.etag.lock().unwrap() = etag.into();
    }

    /// Each request takes this long.
    pub fn set_delay(&self, delay: Duration) {
        *self.shared.delay.lock().unwrap() = delay;
    }

    /// The next request gets no answer until [`WebServer::release`].
    pub fn hold_next(&self) {
        self.shared.holds.store(true, SeqCst);
        self.shared.holds_next.store(true, SeqCst);
    }

    pub fn release(&self) {
        self.shared.holds.store(false, SeqCst);
    }

    /// Removes and returns the requests so far.
    pub fn take_requests(&self) -> Vec<SeenRequest> {
        std::mem::take(&mut self.shared.requests.lock().unwrap())
    }

    /// The largest number of requests at a time.
    pub fn most_at_once(&self) -> usize {
        self.shared.most.load(SeqCst)
    }
}

impl Shared {
    fn serve(&self, stream: &TcpStream) -> std::io::Result<()> {
        let mut input = BufReader::new(stream);
        loop {
            let mut lines = Vec::new();
            loop {
                let mut line = String::new();
                if input.read_line(&mut line)? == 0 {
                    return Ok(());
                }
                match line.trim_end() {
                    "" => break,
                    line => lines.push(line.to_owned()),
                }
            }
            let at_once = self.now.fetch_add(1, SeqCst) + 1;
            self.most.fetch_max(at_once, SeqCst);
            let delay = *self.delay.lock().unwrap();
            sleep(delay);
            let goes_on = self.answer(&lines, stream);
            self.now.fetch_sub(1, SeqCst);
            if !goes_on? {
                return Ok(());
            }
        }
    }

    fn answer(&self, lines: &[String], mut stream: &TcpStream) -> std::io::Result<bool> {
        if self.is_gone.load(SeqCst) {
            return Ok(false);
        }
        let header = |name: &str| {
            let found = lines.iter().find_map(|line| {
                line.split_once(':').filter(|(header, _)| header.eq_ignore_ascii_case(name))
            });
            found.map(|(_, value)| value.trim().to_owned())
        };
        let path = lines[0].split(' ').nth(1).unwrap_or_default().to_owned();
        let range = header("range").and_then(|range| {
            let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
            Some((first.parse::<u64>().ok()?, last.parse::<u64>().ok()? + 1))
        });
        let Some((first, end)) = range else {
            stream.write_all(b"HTTP/1.1 400 No\r\nContent-Length: 0\r\n\r\n")?;
            return Ok(true);
        };
        let if_match = header("if-match");
        let object = self.object.lock().unwrap().clone();
        let etag = self.etag.lock().unwrap().clone();
        let lie = *self.lie.lock().unwrap();
        self.requests.lock().unwrap().push(SeenRequest {
            path,
            range: (first, end),
            if_match: if_match.clone(),
            authorization: header("authorization"),
        });
        if self.holds_next.swap(false, SeqCst) {
            while self.holds.load(SeqCst) {
                sleep(Duration::from_millis(5));
            }
        }
        let status = |code: u16, more: &str, mut stream: &TcpStream| {
            let head = format!("HTTP/1.1 {code} No\r\nContent-Length: 6\r\n{more}\r\nsorry\n");
            stream.write_all(head.as_bytes()).map(|()| true)
        };
        let honest_match = lie != Some(Lie::OtherEtag);
        if honest_match && if_match.is_some_and(|wanted| wanted != etag) {
            return status(412, "", stream);
        }
        let len = object.len() as u64;
        if first >= len {
            return status(416, &format!("Content-Range: bytes */{len}\r\n"), stream);
        }
        let end = end.min(len);
        let (mut from, mut to, mut total, mut sent_etag) = (first, end, len, etag);
        match lie {
            Some(Lie::Status(code)) => return status(code, "", stream),
            Some(Lie::Redirect) => {
                return status(302, "Location: http://elsewhere/x?signature=secret\r\n", stream);
            }
            Some(Lie::Close) => return Ok(false),
            Some(Lie::Stall) => {
                sleep(Duration::from_secs(30));
                return Ok(false);
            }
            Some(Lie::WrongRange) => (from, to) = (first / 2, first / 2 + (end - first)),
            Some(Lie::OtherEtag) => sent_etag = "\"two\"".into(),
            Some(Lie::OtherLength) => total += 512,
            _ => {}
        }
        let mut body = object[from as usize..to as usize].to_vec();
        let mut code = "206 Partial Content";
        match lie {
            Some(Lie::ShortBody) => body.truncate(body.len() / 2),
            Some(Lie::LongBody) => body.extend([9; 512]),
            Some(Lie::WholeObject) => (code, body) = ("200 OK", object.clone()),
            _ => {}
        }
        let etag = match lie {
            Some(Lie::NoEtag) => String::new(),
            Some(Lie::WeakEtag) => format!("ETag: W/{sent_etag}\r\n"),
            _ => format!("ETag: {sent_etag}\r\n"),
        };
        let head = format!(
            "HTTP/1.1 {code}\r\nContent-Length: {}\r\nContent-Range: bytes {from}-{}/{total}\r\n{etag}\
             Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n",
            body.len(),
            to - 1
        );
        stream.write_all(head.as_bytes())?;
        let is_cut = matches!(lie, Some(Lie::CutBody | Lie::StallInBody));
        let sent = if is_cut { body.len() / 2 } else { body.len() };
        stream.write_all(&body[..sent])?;
        if lie == Some(Lie::StallInBody) {
            sleep(Duration::from_secs(30));
        }
        Ok(!is_cut)
    }
}
