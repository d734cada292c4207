//! Questions to a server from the control side, which may wait: what an export is, and what of it
//! is allocated.

use super::server::{Address, Server};
use rustix::fd::OwnedFd;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use udm_core::errno::{ECONNREFUSED, EIO, EPROTO, ETIMEDOUT};
use udm_core::{Content, Extents, OpenError, Sector, Sectors};
use udm_wire::nbd::client::{Asked, ClientError, Event, Export, Replies, Shake, Wish};
use udm_wire::nbd::{CONTEXT_ALLOCATION, Command, CommandFlags, STATE_ZERO};
use udm_wire::uri::{NbdAddress, NbdUri};

/// How long a server may take over a part of an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The longest range that one question is about, in bytes.
const RANGE_MAX: u64 = 1 << 30;

/// Why a server could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// It can't be reached, or does not answer in time.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It says something else than it should.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// It has closed the connection.
    #[error("the server closed the connection")]
    Closed,
}

impl AskError {
    fn errno(&self) -> i32 {
        match self {
            AskError::Io(error) if error.kind() == io::ErrorKind::WouldBlock => ETIMEDOUT,
            AskError::Io(error) => error.raw_os_error().unwrap_or(EIO),
            AskError::Client(_) => EPROTO,
            AskError::Closed => ECONNREFUSED,
        }
    }
}

/// Connects and chooses the export of `uri`. With `contexts`, structured replies and the context of
/// what is allocated are agreed on where the server has them. The socket blocks; a wait of over ten
/// seconds fails.
///
/// # Errors
/// Who does not answer, or what it answers.
pub fn connect(uri: &NbdUri, contexts: bool) -> Result<(OwnedFd, Export), AskError> {
    let mut last = AskError::Closed;
    for address in addresses(uri)? {
        match connect_to(&address, uri, contexts) {
            Ok((stream, export)) => return Ok((stream.into(), export)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Asks for all that has to be known of an export.
pub(super) fn survey(uri: &NbdUri) -> Result<Server, OpenError> {
    let ask = || {
        let addresses = addresses(uri)?;
        // Where it answers is tried first from then on.
        let mut last = AskError::Closed;
        for (n, address) in addresses.iter().enumerate() {
            match connect_to(address, uri, false) {
                Ok((_, export)) => {
                    let mut addresses = addresses.clone();
                    addresses.rotate_left(n);
                    return Ok(Server::new(uri.clone(), addresses, export));
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    };
    let server = ask().map_err(|error: AskError| OpenError::new(error.errno(), format!("{uri}: {error}")))?;
    if server.size() == Sectors::ZERO {
        return Err(OpenError::new(EIO, format!("{uri}: an export of less than a block")));
    }
    Ok(server)
}

/// Where the server may be. May wait for a name to be resolved.
fn addresses(uri: &NbdUri) -> io::Result<Vec<Address>> {
    match &uri.address {
        NbdAddress::Unix(path) => Ok(vec![Address::Unix(path.clone())]),
        NbdAddress::Tcp { host, port } => {
            Ok((host.as_str(), *port).to_socket_addrs()?.map(Address::Tcp).collect())
        }
    }
}

fn connect_to(address: &Address, uri: &NbdUri, contexts: bool) -> Result<(File, Export), AskError> {
    let fd: OwnedFd = match address {
        Address::Unix(path) => {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            stream.into()
        }
        Address::Tcp(address) => {
            let stream = TcpStream::connect_timeout(address, PATIENCE)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            stream.into()
        }
    };
    let mut stream = File::from(fd);
    let contexts: Vec<_> = contexts.then(|| CONTEXT_ALLOCATION.to_owned()).into_iter().collect();
    let export = uri.export.clone();
    let mut shake = Shake::new(Wish { export, structured: !contexts.is_empty(), contexts });
    loop {
        // A byte at a time where it matters is not needed: the server says nothing behind the end
        // of the handshake until it is asked.
        let mut bytes = [0; 4096];
        let n = stream.read(&mut bytes)?;
        if n == 0 {
            return Err(AskError::Closed);
        }
        if let Some(export) = shake.take(&mut &bytes[..n])? {
            return Ok((stream, export));
        }
        stream.write_all(&shake.take_out())?;
    }
}

/// Asks what is allocated, over a connection that is kept for the next question.
pub(super) struct Asker {
    server: Arc<Server>,
    open: Mutex<Option<Open>>,
}

struct Open {
    stream: File,
    replies: Replies,
    /// What a status calls the context; `None` for a server without.
    context: Option<u32>,
}

impl Asker {
    pub(super) fn new(server: &Arc<Server>) -> Asker {
        Asker { server: Arc::clone(server), open: Mutex::default() }
    }

    /// As [`udm_core::Device::extents`].
    pub(super) fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) -> Result<(), AskError> {
        let mut kept = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let mut open = match kept.take() {
            Some(open) => open,
            None => {
                let (fd, export) = connect(&self.server.uri, true)?;
                let context = export.contexts.first().map(|(id, _)| *id);
                Open { stream: fd.into(), replies: Replies::new(&export), context }
            }
        };
        let (mut at, end) = (from.bytes(), (from + len).bytes());
        while at < end && !out.is_full() {
            at += open.ask(at, end - at, out)?;
        }
        // One that failed is not kept.
        *kept = Some(open);
        Ok(())
    }
}

impl Open {
    /// Asks about a range from `at` on, and says of how many bytes the answer is.
    fn ask(&mut self, at: u64, left: u64, out: &mut Extents) -> Result<u64, AskError> {
        let Some(context) = self.context else {
            out.push(Sectors::from_bytes(left), Content::Data);
            return Ok(left);
        };
        let len = left.min(RANGE_MAX);
        let (command, flags) = (Command::BlockStatus, CommandFlags::empty());
        let asked = Asked { command, flags, offset: at, len: len as u32 };
        self.stream.write_all(&self.replies.ask(0, asked))?;
        let mut told = 0;
        // Of what is not whole sectors both sides are data.
        let (mut bytes, mut pending) = (vec![0; 64 << 10], (0u64, Content::Hole));
        loop {
            let n = self.stream.read(&mut bytes)?;
            if n == 0 {
                return Err(AskError::Closed);
            }
            let mut input = &bytes[..n];
            while let Some(event) = self.replies.take(&mut input)? {
                match event {
                    Event::Status { context: id, descriptors, .. } if id == context => {
                        for (n, state) in descriptors {
                            let n = u64::from(n).min(len - told);
                            told += n;
                            let content =
                                if state & STATE_ZERO != 0 { Content::Hole } else { Content::Data };
                            pending = collect(pending, n, content, out);
                        }
                    }
                    Event::Done { error: 0, .. } if told > 0 => {
                        let whole = told - pending.0;
                        if whole > 0 {
                            return Ok(whole);
                        }
                        out.push(Sectors(1), Content::Data);
                        return Ok(512.min(left));
                    }
                    Event::Done { .. } => {
                        out.push(Sectors::from_bytes(len), Content::Data);
                        return Ok(len);
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Appends `n` bytes of `content` as whole sectors, with what was left over before. What is left
/// over now is returned.
fn collect(
    (before, was): (u64, Content),
    n: u64,
    content: Content,
    out: &mut Extents,
) -> (u64, Content) {
    if before == 0 {
        out.push(Sectors::from_bytes(n), content);
        return (n % 512, content);
    }
    let both = if was == content { content } else { Content::Data };
    let fills = 512 - before;
    if n < fills {
        return (before + n, both);
    }
    out.push(Sectors(1), both);
    let rest = n - fills;
    out.push(Sectors::from_bytes(rest), content);
    (rest % 512, content)
}
