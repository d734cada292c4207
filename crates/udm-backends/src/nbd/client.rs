//! A blocking client, for the control side, which reads properties of exports, and for programs
//! that need only one request at a time.

use super::tls::load_tls_client_config;
use crate::stream::{RECORD_MAX, ServerAddress, connect_socket_with_timeout, set_socket_timeouts};
use rustix::fd::OwnedFd;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::ToSocketAddrs;
use std::time::{Duration, Instant};
use udm_core::errno::{ECONNREFUSED, EIO, EPROTO, ETIMEDOUT, errno_from_nbd_error};
use udm_core::{DeviceControlError, Nanos};
use udm_tls::TlsSession;
use udm_wire::nbd::client::{
    ClientHandshake, HandshakeOptions, NbdClientProtocolError, NbdRequestParams, NegotiatedExportInfo,
    ReplyEvent, ReplyParser,
};
use udm_wire::nbd::{CommandFlags, NbdCommand};
use udm_wire::uri::{NbdAddress, NbdUri, TimeSpan};

/// Upper limit of the wait for a part of an answer, and for the handshake unless its deadline is
/// shorter.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes per receive.
const RECEIVE: usize = 64 << 10;

/// Error of a connection or of a request.
#[derive(Debug, thiserror::Error)]
pub enum NbdClientError {
    /// The server cannot be reached.
    #[error("{0}")]
    Io(io::Error),
    /// The server did not answer in time.
    #[error("no answer within {}", TimeSpan(Nanos(.0.as_nanos() as u64)))]
    Silent(Duration),
    /// The certificates cannot be used, or the server's is refused.
    #[error("{0}")]
    Tls(String),
    /// The server violated the protocol or refused the export.
    #[error(transparent)]
    NbdClient(#[from] NbdClientProtocolError),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The server answered a request with an error.
    #[error("{command:?} at byte {offset}: {}", udm_core::errno::describe_errno(*errno))]
    Failed {
        /// The command of the request.
        command: NbdCommand,
        /// Offset in bytes.
        offset: u64,
        /// The errno of the answer.
        errno: i32,
    },
}

impl From<io::Error> for NbdClientError {
    fn from(error: io::Error) -> NbdClientError {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => NbdClientError::Silent(TIMEOUT),
            _ => NbdClientError::Io(error),
        }
    }
}

impl NbdClientError {
    fn errno(&self) -> i32 {
        match self {
            NbdClientError::Silent(_) => ETIMEDOUT,
            NbdClientError::Io(error) => error.raw_os_error().unwrap_or(EIO),
            NbdClientError::NbdClient(_) | NbdClientError::Tls(_) => EPROTO,
            NbdClientError::Closed => ECONNREFUSED,
            NbdClientError::Failed { errno, .. } => *errno,
        }
    }

    /// Returns this error as the result of opening `uri`.
    pub(super) fn opening(&self, uri: &NbdUri) -> DeviceControlError {
        DeviceControlError::new(self.errno(), format!("{uri}: {self}"))
    }
}

/// A blocking connection to one export.
pub struct BlockingNbdClient {
    stream: BlockingStream,
    replies: ReplyParser,
    export: NegotiatedExportInfo,
    bytes: Box<[u8]>,
}

impl BlockingNbdClient {
    /// Connects and selects the export of `uri`. With `contexts`, structured replies and those of
    /// the metadata contexts that the server has are negotiated. The handshake may take as long as
    /// the deadline of `uri`, but at most ten seconds. Later, a wait of more than ten seconds
    /// fails.
    ///
    /// # Errors
    /// The server cannot be reached, does not answer in time, or refuses.
    pub fn connect(uri: &NbdUri, contexts: &[&str]) -> Result<BlockingNbdClient, NbdClientError> {
        let mut last = NbdClientError::Closed;
        for address in resolve_server_addresses(uri)? {
            match BlockingNbdClient::connect_to(&address, uri, contexts) {
                Ok(client) => return Ok(client),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    pub(super) fn connect_to(
        address: &ServerAddress,
        uri: &NbdUri,
        contexts: &[&str],
    ) -> Result<BlockingNbdClient, NbdClientError> {
        let timeout = uri.deadline().map_or(TIMEOUT, |time| Duration::from_nanos(time.0).min(TIMEOUT));
        BlockingNbdClient::shake(address, uri, contexts, timeout).map_err(|error| match error {
            NbdClientError::Silent(_) => NbdClientError::Silent(timeout),
            error => error,
        })
    }

    /// Connects and performs the handshake, within `timeout`.
    fn shake(
        address: &ServerAddress,
        uri: &NbdUri,
        contexts: &[&str],
        timeout: Duration,
    ) -> Result<BlockingNbdClient, NbdClientError> {
        let until = Instant::now() + timeout;
        let left = || match until.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(NbdClientError::Silent(timeout)),
            left => Ok(left),
        };
        let certificates = load_tls_client_config(uri)?;
        let mut stream = BlockingStream { socket: connect_socket_with_timeout(address, timeout)?, tls: None };
        let contexts: Vec<String> = contexts.iter().map(|&context| context.to_owned()).collect();
        let export = uri.export.clone();
        let (structured, tls) = (!contexts.is_empty(), certificates.is_some());
        let mut shake = ClientHandshake::new(HandshakeOptions { export, structured, contexts, tls });
        let mut bytes = vec![0; RECEIVE].into_boxed_slice();
        loop {
            set_socket_timeouts(&stream.socket, left()?)?;
            let n = stream.receive(&mut bytes, until)?;
            // After the handshake, a server sends nothing until it gets a request.
            if let Some(export) = shake.take(&mut &bytes[..n])? {
                set_socket_timeouts(&stream.socket, TIMEOUT)?;
                return Ok(BlockingNbdClient { stream, replies: ReplyParser::new(&export), export, bytes });
            }
            if let Some(certificates) = certificates.as_ref().filter(|_| shake.awaits_tls()) {
                stream.tls = Some(certificates.session().map_err(NbdClientError::Tls)?);
                shake.tls_begun();
            }
            stream.send(&shake.take_out())?;
        }
    }

    /// Properties of the export.
    #[must_use]
    pub fn export(&self) -> &NegotiatedExportInfo {
        &self.export
    }

    /// Returns the socket, for a caller that uses it directly, and the properties of the export.
    /// `None` if the connection uses TLS.
    #[must_use]
    pub fn into_socket(self) -> Option<(OwnedFd, NegotiatedExportInfo)> {
        let socket = self.stream.tls.is_none().then(|| self.stream.socket.try_clone());
        socket.and_then(Result::ok).map(|socket| (socket.into(), self.export))
    }

    /// Sends one request with `data` after it. Calls `each` for every event of the reply except the
    /// last.
    ///
    /// # Errors
    /// After any error but [`NbdClientError::Failed`], the connection cannot be used any more.
    pub fn ask(
        &mut self,
        command: NbdCommand,
        offset: u64,
        len: u32,
        data: &[u8],
        mut each: impl FnMut(ReplyEvent<'_>),
    ) -> Result<(), NbdClientError> {
        let flags = CommandFlags::empty();
        self.stream.send(&self.replies.ask(0, NbdRequestParams { command, flags, offset, len }))?;
        self.stream.send(data)?;
        loop {
            let n = self.stream.receive(&mut self.bytes, Instant::now() + TIMEOUT)?;
            let mut input = &self.bytes[..n];
            while let Some(event) = self.replies.take(&mut input)? {
                match event {
                    ReplyEvent::Completed { error: 0, .. } => return Ok(()),
                    ReplyEvent::Completed { error, .. } => {
                        return Err(NbdClientError::Failed {
                            command,
                            offset,
                            errno: errno_from_nbd_error(error),
                        });
                    }
                    event => each(event),
                }
            }
        }
    }

    /// Reads `len` bytes at `offset`.
    ///
    /// # Errors
    /// As [`BlockingNbdClient::ask`].
    pub fn read(&mut self, offset: u64, len: u32) -> Result<Vec<u8>, NbdClientError> {
        let mut data = vec![0; len as usize];
        self.ask(NbdCommand::Read, offset, len, &[], |event| {
            // The buffer is already zeroed.
            if let ReplyEvent::Data { at, bytes, .. } = event {
                data[at as usize..][..bytes.len()].copy_from_slice(bytes);
            }
        })?;
        Ok(data)
    }

    /// Writes `data`, which is shorter than 4 GiB, at `offset`.
    ///
    /// # Errors
    /// As [`BlockingNbdClient::ask`].
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), NbdClientError> {
        self.ask(NbdCommand::Write, offset, data.len() as u32, data, |_| {})
    }

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// As [`BlockingNbdClient::ask`].
    pub fn flush(&mut self) -> Result<(), NbdClientError> {
        self.ask(NbdCommand::Flush, 0, 0, &[], |_| {})
    }
}

/// Returns the addresses of the server. May block to resolve a name.
pub(super) fn resolve_server_addresses(uri: &NbdUri) -> io::Result<Vec<ServerAddress>> {
    match &uri.address {
        NbdAddress::Unix(path) => Ok(vec![ServerAddress::Unix(path.clone())]),
        NbdAddress::Tcp { host, port } => {
            Ok((host.as_str(), *port).to_socket_addrs()?.map(ServerAddress::Tcp).collect())
        }
    }
}

/// A connected socket, with TLS if it is used.
struct BlockingStream {
    socket: File,
    tls: Option<TlsSession>,
}

impl Drop for BlockingStream {
    /// Ends TLS, so that the server does not take the end of the stream for an attack.
    fn drop(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.close();
            let _ = self.flush_tls();
        }
    }
}

impl BlockingStream {
    fn send(&mut self, bytes: &[u8]) -> Result<(), NbdClientError> {
        if let Some(tls) = &mut self.tls {
            tls.write(bytes);
            return self.flush_tls();
        }
        Ok(self.socket.write_all(bytes)?)
    }

    /// Sends what TLS has to send. Before the end of its handshake that is not what was written.
    fn flush_tls(&mut self) -> Result<(), NbdClientError> {
        let mut out = Vec::new();
        if let Some(tls) = &mut self.tls {
            tls.take_output(&mut out);
        }
        Ok(self.socket.write_all(&out)?)
    }

    /// Receives at least one byte. With TLS, that takes until `until` at most, however slowly the
    /// bytes of a record come.
    fn receive(&mut self, bytes: &mut [u8], until: Instant) -> Result<usize, NbdClientError> {
        let Some(tls) = &mut self.tls else { return receive_socket_bytes(&mut self.socket, bytes) };
        if tls.has_plaintext() {
            return Ok(tls.read(bytes));
        }
        let mut received = vec![0; RECORD_MAX];
        loop {
            if Instant::now() >= until {
                return Err(NbdClientError::Silent(TIMEOUT));
            }
            let n = receive_socket_bytes(&mut self.socket, &mut received)?;
            let Some(tls) = &mut self.tls else { return Err(NbdClientError::Closed) };
            let (mut input, mut at) = (&received[..n], 0);
            while !input.is_empty() {
                if let Err(error) = tls.receive(&mut input) {
                    // The server is told why.
                    let _ = self.flush_tls();
                    return Err(NbdClientError::Tls(error.to_string()));
                }
                // There is room for all: one receive brings no more than two records.
                at += tls.read(&mut bytes[at..]);
            }
            if at > 0 {
                return Ok(at);
            }
            self.flush_tls()?;
        }
    }
}

fn receive_socket_bytes(stream: &mut File, bytes: &mut [u8]) -> Result<usize, NbdClientError> {
    loop {
        match stream.read(bytes) {
            Ok(0) => return Err(NbdClientError::Closed),
            Ok(n) => return Ok(n),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}
