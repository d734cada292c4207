//! A blocking connection that reads what a controller and a namespace are, for the control side.

use crate::stream::{ServerAddress, connect_socket_with_timeout, set_socket_timeouts};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::ToSocketAddrs;
use std::thread;
use std::time::{Duration, Instant};
use udm_core::errno::{EACCES, ECONNREFUSED, EIO, EPROTO, ETIMEDOUT};
use udm_core::{DeviceControlError, Nanos};
use udm_wire::nvme::host::{AdminEvent, AssociationFacts, HostAdmin, HostError, HostOptions};
use udm_wire::uri::{NvmeUri, TimeSpan};

/// Upper limit of the whole exchange, unless the deadline is shorter.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Wait before a controller that was not ready is asked again.
pub(super) const READY_POLL: Nanos = Nanos::from_millis(10);

/// Error of the exchange.
#[derive(Debug, thiserror::Error)]
pub(super) enum NvmeClientError {
    /// The controller cannot be reached.
    #[error("{0}")]
    Io(io::Error),
    /// The controller did not answer in time.
    #[error("no answer within {}", TimeSpan(Nanos(.0.as_nanos() as u64)))]
    Silent(Duration),
    /// The controller refuses, violates the protocol, or cannot be used.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A secret cannot be used.
    #[error("{0}")]
    Secret(String),
    /// The controller closed the connection.
    #[error("the controller closed the connection")]
    Closed,
}

impl From<io::Error> for NvmeClientError {
    fn from(error: io::Error) -> NvmeClientError {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => NvmeClientError::Silent(TIMEOUT),
            _ => NvmeClientError::Io(error),
        }
    }
}

impl NvmeClientError {
    /// Returns this error as the result of opening `uri`.
    pub(super) fn opening(&self, uri: &NvmeUri) -> DeviceControlError {
        let errno = match self {
            NvmeClientError::Silent(_) => ETIMEDOUT,
            NvmeClientError::Io(error) => error.raw_os_error().unwrap_or(EIO),
            NvmeClientError::Host(_) => EPROTO,
            NvmeClientError::Secret(_) => EACCES,
            NvmeClientError::Closed => ECONNREFUSED,
        };
        DeviceControlError::new(errno, format!("{uri}: {self}"))
    }
}

/// Returns the addresses of the controller. May block to resolve a name.
pub(super) fn resolve_addresses(uri: &NvmeUri) -> Result<Vec<ServerAddress>, NvmeClientError> {
    Ok((uri.host.as_str(), uri.port).to_socket_addrs()?.map(ServerAddress::Tcp).collect())
}

/// Connects to one of `addresses`, and reads what the controller and the namespace are. Returns the
/// index of the address that answered too. Blocks for `deadline` at most, or for ten seconds, for
/// each address and each try.
pub(super) fn read_association_facts(
    addresses: &[ServerAddress],
    options: &HostOptions,
    deadline: Option<Nanos>,
) -> Result<(usize, AssociationFacts), NvmeClientError> {
    let timeout = deadline.map_or(TIMEOUT, |time| Duration::from_nanos(time.0).min(TIMEOUT));
    let names_more_groups = || options.secrets.as_ref().is_some_and(|secrets| secrets.names_more_groups());
    let mut last = NvmeClientError::Closed;
    for (at, address) in addresses.iter().enumerate() {
        let before = names_more_groups();
        let mut result = exchange_admin_commands(address, options, timeout);
        if result.is_err() && names_more_groups() != before {
            result = exchange_admin_commands(address, options, timeout);
        }
        match result {
            Ok(facts) => return Ok((at, facts)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn exchange_admin_commands(
    address: &ServerAddress,
    options: &HostOptions,
    timeout: Duration,
) -> Result<AssociationFacts, NvmeClientError> {
    let until = Instant::now() + timeout;
    let mut socket = connect_socket_with_timeout(address, timeout)?;
    let mut admin = HostAdmin::new(options.clone());
    let mut bytes = vec![0; 16 << 10];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(NvmeClientError::Silent(timeout));
        }
        set_socket_timeouts(&socket, left)?;
        socket.write_all(&admin.take_out())?;
        let n = receive(&mut socket, &mut bytes)?;
        let mut input = &bytes[..n];
        while let Some(event) = admin.take(&mut input)? {
            match event {
                AdminEvent::Ready(facts) => return Ok(*facts),
                AdminEvent::NotReady => {
                    thread::sleep(Duration::from_nanos(READY_POLL.0));
                    admin.ask_status();
                }
                AdminEvent::Namespace(_)
                | AdminEvent::Ana(_)
                | AdminEvent::Alive
                | AdminEvent::ResetEnded(..) => {}
            }
        }
    }
}

fn receive(socket: &mut File, bytes: &mut [u8]) -> Result<usize, NvmeClientError> {
    loop {
        match socket.read(bytes) {
            Ok(0) => return Err(NvmeClientError::Closed),
            Ok(n) => return Ok(n),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}
