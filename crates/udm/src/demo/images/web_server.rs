//! A web server with one object, which answers each request after a fixed time. The content is
//! computed from the place, so it takes no space.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// Bytes of the object.
pub(super) const IMAGE_BYTES: u64 = 1 << 30;

/// The time of a request, besides its data.
pub(super) const DELAY: Duration = Duration::from_millis(20);

/// Bytes that are made and sent at a time.
const PIECE: u64 = 256 << 10;

/// The longest line of a request; longer ones end the connection.
const LINE_MAX: usize = 8 << 10;

/// The web server. Its threads end with the process.
pub(super) struct DelayedWebServer {
    port: u16,
    requests: Arc<AtomicU64>,
}

impl DelayedWebServer {
    pub fn start() -> io::Result<DelayedWebServer> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let requests = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&requests);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let counter = Arc::clone(&counter);
                // A client may close its connection at any moment.
                thread::spawn(move || drop(serve_connection(&stream, &counter)));
            }
        });
        Ok(DelayedWebServer { port, requests })
    }

    /// The URL of the object; each name is an object with the same content.
    pub fn url(&self, name: &str) -> String {
        format!("http://127.0.0.1:{}/{name}", self.port)
    }

    /// The number of requests so far.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Downloads the whole object in one request to `file`.
    pub fn download(&self, file: &mut impl Write) -> io::Result<()> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.write_all(b"GET /image HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut input = BufReader::with_capacity(PIECE as usize, stream);
        let mut line = String::new();
        while line != "\r\n" {
            line.clear();
            input.read_line(&mut line)?;
        }
        let copied = io::copy(&mut input, file)?;
        if copied == IMAGE_BYTES { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

/// The content of `len` bytes from `at` on, both multiples of 512.
pub(super) fn image_content(at: u64, len: u64) -> Vec<u8> {
    let mut content = vec![0; len as usize];
    for (word, bytes) in (at / 8..).zip(content.chunks_exact_mut(8)) {
        bytes.copy_from_slice(&word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    }
    content
}

fn serve_connection(stream: &TcpStream, requests: &AtomicU64) -> io::Result<()> {
    let (mut input, mut output) = (BufReader::new(stream), stream);
    stream.set_nodelay(true)?;
    loop {
        let (mut method, mut range, mut closes) = (String::new(), None, false);
        loop {
            let mut line = String::new();
            if input.read_line(&mut line)? == 0 || line.len() > LINE_MAX {
                return Ok(());
            }
            let line = line.trim_end().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if method.is_empty() {
                method = line.split(' ').next().unwrap_or_default().to_owned();
            } else if let Some(text) = line.strip_prefix("range: bytes=") {
                range = parse_range(text);
            } else if line == "connection: close" {
                closes = true;
            }
        }
        requests.fetch_add(1, Ordering::Relaxed);
        thread::sleep(DELAY);
        let (first, end) = range.unwrap_or((0, IMAGE_BYTES));
        let status = match range {
            Some(_) => {
                format!("206 Partial Content\r\nContent-Range: bytes {first}-{}/{IMAGE_BYTES}", end - 1)
            }
            None => "200 OK".to_owned(),
        };
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nAccept-Ranges: bytes\r\nETag: \"image\"\r\n\
             Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n",
            end - first
        );
        output.write_all(head.as_bytes())?;
        if method != "head" {
            send_content(output, first, end)?;
        }
        if closes {
            return Ok(());
        }
    }
}

fn send_content(mut output: &TcpStream, first: u64, end: u64) -> io::Result<()> {
    let mut at = first;
    while at < end {
        let begin = at - at % 512;
        let len = PIECE.min((end - begin).next_multiple_of(512));
        let piece = image_content(begin, len);
        let until = (end - begin).min(len);
        output.write_all(&piece[(at - begin) as usize..until as usize])?;
        at = begin + until;
    }
    Ok(())
}

/// The first byte of a range and its end.
fn parse_range(text: &str) -> Option<(u64, u64)> {
    let (first, last) = text.split_once('-')?;
    let (first, last) = (first.parse::<u64>().ok()?, last.parse::<u64>().unwrap_or(IMAGE_BYTES - 1));
    (first <= last && first < IMAGE_BYTES).then_some((first, last.min(IMAGE_BYTES - 1) + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_their_content() {
        assert_eq!(parse_range("0-511"), Some((0, 512)));
        assert_eq!(parse_range("5-"), Some((5, IMAGE_BYTES)));
        assert_eq!(parse_range(&format!("5-{}", u64::MAX)), Some((5, IMAGE_BYTES)));
        assert!(parse_range("7-5").is_none() && parse_range("x").is_none());
        assert_eq!(image_content(512, 1024)[512..], image_content(1024, 512));
    }
}
