//! NBD URIs (`doc/uri.md` of the nbd project): `nbd://HOST[:PORT]/EXPORT` and
//! `nbd+unix:///EXPORT?socket=PATH`.
//!
//! No TLS, so no `nbds:`, no user and no `tls-*` parameters; no sockets in the abstract name space.

use super::{UriError, percent};
use crate::nbd::{PORT, STRING_MAX};
use crate::words::shown;
use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;

/// The longest path of a Unix socket, in bytes (`sun_path`, less its NUL).
const SOCKET_PATH_MAX: usize = 107;
/// The longest host name, in bytes (RFC 1035).
const HOST_MAX: usize = 253;

/// An export of an NBD server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdUri {
    /// Where the server is.
    pub address: NbdAddress,
    /// The export's name, decoded: UTF-8, no NUL, at most 4096 bytes; empty for the server's
    /// default.
    pub export: String,
}

/// Where an NBD server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NbdAddress {
    /// A TCP port.
    Tcp {
        /// A name or an address; an IPv6 address stands without its brackets.
        host: String,
        /// 1..=65535; 10809 where none was given.
        port: u16,
    },
    /// A Unix socket by its path.
    Unix(PathBuf),
}

impl NbdUri {
    /// Reads what stands behind `nbd:` or `nbd+unix:`.
    pub(super) fn parse(scheme: &str, rest: &str) -> Result<NbdUri, UriError> {
        let refuse = |why: String| UriError::new(format!("{scheme}: {why}"));
        let rest = rest.strip_prefix("//").ok_or_else(|| refuse("\"//\" must follow".into()))?;
        if rest.contains('#') {
            return Err(refuse("an NBD URI has no fragment; write %23 for #".into()));
        }
        let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let export = percent::decode(export).map_err(|why| refuse(why.into()))?;
        if export.len() > STRING_MAX || export.contains('\0') {
            return Err(refuse(format!("an export's name has at most {STRING_MAX} bytes and no NUL")));
        }
        let socket = socket_of(query).map_err(refuse)?;
        let address = match (scheme, socket) {
            ("nbd", None) => {
                let (host, port) = host_and_port(authority).map_err(refuse)?;
                NbdAddress::Tcp { host, port }
            }
            ("nbd", Some(_)) => return Err(refuse("a socket belongs to nbd+unix".into())),
            (_, None) => return Err(refuse("?socket=PATH must follow".into())),
            (_, Some(_)) if !authority.is_empty() => {
                return Err(refuse(format!(
                    "{} is no part of a Unix socket; nbd+unix:///EXPORT?socket=PATH",
                    shown(authority)
                )));
            }
            (_, Some(socket)) => NbdAddress::Unix(socket),
        };
        Ok(NbdUri { address, export })
    }
}

/// The `socket` parameter, the only one that there is.
fn socket_of(query: Option<&str>) -> Result<Option<PathBuf>, String> {
    let mut socket = None;
    for pair in query.into_iter().flat_map(|query| query.split('&')) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        match name {
            "socket" if socket.is_some() => return Err("socket is given twice".into()),
            "socket" => socket = Some(socket_path(value)?),
            _ if name.starts_with("tls-") => return Err("udm does not do TLS".into()),
            _ => return Err(format!("unknown parameter {}; there is socket", shown(name))),
        }
    }
    Ok(socket)
}

fn socket_path(value: &str) -> Result<PathBuf, String> {
    let path = percent::decode(value)?;
    match path.as_str() {
        "" => Err("socket has no path".into()),
        _ if path.contains('\0') => Err("udm uses no sockets in the abstract name space".into()),
        _ if path.len() > SOCKET_PATH_MAX => {
            Err(format!("the socket's path {} is longer than {SOCKET_PATH_MAX} bytes", shown(&path)))
        }
        _ => Ok(PathBuf::from(path)),
    }
}

/// `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`; no host is `localhost`.
fn host_and_port(authority: &str) -> Result<(String, u16), String> {
    if authority.contains('@') {
        return Err("a user is of no use without TLS".into());
    }
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or("a [ without its ]")?;
            let address: Ipv6Addr =
                host.parse().map_err(|_| format!("{} is no IPv6 address", shown(host)))?;
            let port = match port.strip_prefix(':') {
                Some(port) => port,
                None if port.is_empty() => "",
                None => return Err(format!("{} behind a host", shown(port))),
            };
            (address.to_string(), port)
        }
        None => {
            let (host, port) = authority.split_once(':').unwrap_or((authority, ""));
            let ok = host.len() <= HOST_MAX
                && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
            if !ok {
                return Err(format!("{} is no host name", shown(host)));
            }
            (if host.is_empty() { "localhost" } else { host }.to_owned(), port)
        }
    };
    let port = match port {
        "" => PORT,
        _ if port.bytes().all(|b| b.is_ascii_digit()) => match port.parse() {
            Ok(port) if port > 0 => port,
            _ => return Err(format!("port {} is not in 1..65535", shown(port))),
        },
        _ => return Err(format!("{} is no port", shown(port))),
    };
    Ok((host, port))
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = percent::encode(&self.export);
        match &self.address {
            NbdAddress::Tcp { host, port } => {
                let (open, close) = if host.contains(':') { ("[", "]") } else { ("", "") };
                write!(f, "nbd://{open}{host}{close}")?;
                if *port != PORT {
                    write!(f, ":{port}")?;
                }
                write!(f, "/{export}")
            }
            NbdAddress::Unix(socket) => {
                write!(f, "nbd+unix:///{export}?socket={}", percent::encode(&socket.to_string_lossy()))
            }
        }
    }
}
