//! A web server for the battery: one object with the content of `pattern:`, in ranges.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;

const ETAG: &str = "\"pattern\"";

/// A server on this machine. It ends when this is dropped, and each connection with its client.
pub(crate) struct ObjectTestServer {
    address: SocketAddr,
    is_over: Arc<AtomicBool>,
}

impl ObjectTestServer {
    /// Starts a server with an object of `size` bytes.
    pub(crate) fn start(size: u64) -> ObjectTestServer {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("a bound socket");
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_over);
        thread::spawn(move || {
            for stream in listener.incoming().flatten().take_while(|_| !ends.load(SeqCst)) {
                // A client that closes its connection ends the thread.
                thread::spawn(move || serve_connection(&stream, size));
            }
        });
        ObjectTestServer { address, is_over }
    }

    /// The URI of the object.
    pub(crate) fn uri(&self) -> String {
        format!("http://{}/pattern", self.address)
    }
}

impl Drop for ObjectTestServer {
    fn drop(&mut self) {
        self.is_over.store(true, SeqCst);
        // Wakes the thread. If it has ended, nobody has to be woken.
        let _ = TcpStream::connect(self.address);
    }
}

/// Answers the requests of a connection.
fn serve_connection(stream: &TcpStream, size: u64) -> std::io::Result<()> {
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
