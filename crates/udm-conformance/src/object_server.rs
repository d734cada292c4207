//! A web server for the battery: one object with the content of `pattern:`, in ranges.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

const ETAG: &str = "\"pattern\"";

/// Starts a server on this machine, with an object of `size` bytes. Returns the URI of the object.
/// The server ends with the process.
pub(crate) fn start_object_server(size: u64) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("a bound socket").port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A client that closes its connection ends the thread.
            thread::spawn(move || serve(&stream, size));
        }
    });
    format!("http://127.0.0.1:{port}/pattern")
}

/// Answers the requests of a connection.
fn serve(stream: &TcpStream, size: u64) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let mut range = None;
    while let Some(line) = lines.next().transpose()? {
        if let Some(bytes) = line.to_ascii_lowercase().strip_prefix("range: bytes=") {
            range = bytes.split_once('-').and_then(|(first, last)| {
                Some((first.parse::<u64>().ok()?, last.parse::<u64>().ok()?.min(size - 1)))
            });
        }
        if !line.is_empty() {
            continue;
        }
        let (first, last) = range.take().expect("udm asks for ranges only");
        let words = first / 8..last / 8 + 1;
        let data: Vec<u8> = words.flat_map(|word| (word * 8).to_be_bytes()).collect();
        let from = (first % 8) as usize;
        let body = &data[from..from + (last - first + 1) as usize];
        let head = format!(
            "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes {first}-{last}/{size}\r\n\
             ETag: {ETAG}\r\n\r\n",
            body.len()
        );
        (&mut &*stream).write_all(&[head.as_bytes(), body].concat())?;
    }
    Ok(())
}
