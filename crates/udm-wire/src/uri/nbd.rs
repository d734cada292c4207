//! NBD URIs (`doc/uri.md` of the nbd project): `nbd://HOST[:PORT]/EXPORT` and
//! `nbd+unix:///EXPORT?socket=PATH`; with TLS `nbds://` and `nbds+unix://`.
//!
//! The parameters `deadline` and `fence` ([`super::reply_deadline`]) are udm's own; no server sees
//! them. Of TLS there are `tls-certificates` and `tls-hostname`, as libnbd has them. Not supported:
//! a user and shared keys, and sockets in the abstract name space.

use super::reply_deadline::{ReplyDeadlineSetting, SilentServerPolicy};
use super::{DeviceUriError, QueueParams, percent};
use crate::nbd::{PORT, STRING_MAX};
use crate::words::quote_for_error_line;
use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;
use udm_core::Nanos;

/// The longest path of a Unix socket, in bytes (`sun_path`, less its NUL).
const SOCKET_PATH_MAX: usize = 107;
/// The longest host name, in bytes (RFC 1035).
const HOST_MAX: usize = 253;
/// Default deadline over TCP. The kernel would abort a silent connection after a quarter of an
/// hour. This timeout is disabled, because it proves nothing about unanswered writes.
const TCP_DEADLINE: Nanos = Nanos(60_000_000_000);

/// An export of an NBD server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdUri {
    /// The address of the server.
    pub address: NbdAddress,
    /// Name of the export, decoded: UTF-8, no NUL, at most 4096 bytes; empty for the server's
    /// default.
    pub export: String,
    /// What to do if the server stops answering.
    pub silence: SilentServerPolicy,
    /// A flush covers all connections, even if the server does not announce this.
    pub multi_conn: bool,
    /// The queue in front of the export; `None` for none.
    pub queue: Option<QueueParams>,
    /// How to use TLS; `None` for a connection without it.
    pub tls: Option<NbdTlsParams>,
}

/// How to use TLS to a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdTlsParams {
    /// The folder with `ca-cert.pem`, and perhaps `client-cert.pem` and `client-key.pem`.
    pub certificates: PathBuf,
    /// The name in the server's certificate, if it is not that of the address.
    pub hostname: Option<String>,
}

/// The address of an NBD server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NbdAddress {
    /// A TCP port.
    Tcp {
        /// A name or an address; an IPv6 address has no brackets.
        host: String,
        /// 1..=65535; default 10809.
        port: u16,
    },
    /// A Unix socket by its path.
    Unix(PathBuf),
}

impl NbdUri {
    /// An export with default options.
    #[must_use]
    pub fn new(address: NbdAddress, export: impl Into<String>) -> NbdUri {
        NbdUri {
            address,
            export: export.into(),
            silence: SilentServerPolicy::default(),
            multi_conn: false,
            queue: None,
            tls: None,
        }
    }

    /// How long the server may be silent while a request waits; `None` for no limit.
    #[must_use]
    pub fn deadline(&self) -> Option<Nanos> {
        match (self.silence.deadline, &self.address) {
            (ReplyDeadlineSetting::After(time), _) => Some(time),
            (ReplyDeadlineSetting::Default, NbdAddress::Tcp { .. }) => Some(TCP_DEADLINE),
            (ReplyDeadlineSetting::Default, NbdAddress::Unix(_)) | (ReplyDeadlineSetting::Never, _) => None,
        }
    }

    /// The same export without a queue, as its connections use it.
    #[must_use]
    pub fn unqueued(&self) -> NbdUri {
        NbdUri { queue: None, ..self.clone() }
    }

    /// The same export without parameters of udm, as any NBD client accepts it.
    #[must_use]
    pub fn plain(&self) -> NbdUri {
        NbdUri { tls: self.tls.clone(), ..NbdUri::new(self.address.clone(), self.export.clone()) }
    }

    /// The name that the server's certificate must have; `localhost` for a Unix socket without
    /// `tls-hostname`.
    #[must_use]
    pub fn tls_hostname(&self) -> &str {
        let hostname = self.tls.as_ref().and_then(|tls| tls.hostname.as_deref());
        hostname.unwrap_or(match &self.address {
            NbdAddress::Tcp { host, .. } => host,
            NbdAddress::Unix(_) => "localhost",
        })
    }

    /// Parses the text after `nbd:`, `nbds:`, `nbd+unix:` or `nbds+unix:`.
    pub(super) fn parse(scheme: &str, rest: &str) -> Result<NbdUri, DeviceUriError> {
        let refuse = |why: String| DeviceUriError::new(format!("{scheme}: {why}"));
        let rest = rest.strip_prefix("//").ok_or_else(|| refuse("\"//\" must follow".into()))?;
        if rest.contains('#') {
            return Err(refuse("an NBD URI has no fragment; write %23 for #".into()));
        }
        let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let export = percent::percent_decode_uri(export).map_err(|why| refuse(why.into()))?;
        if export.len() > STRING_MAX || export.contains('\0') {
            return Err(refuse(format!("an export's name has at most {STRING_MAX} bytes and no NUL")));
        }
        let NbdUriQuery { socket, silence, multi_conn, queue, certificates, hostname } =
            NbdUriQuery::parse(query).map_err(refuse)?;
        let tls = match (scheme.starts_with("nbds"), certificates, hostname) {
            (true, Some(certificates), hostname) => Some(NbdTlsParams { certificates, hostname }),
            (true, None, _) => {
                return Err(refuse("TLS needs tls-certificates=FOLDER with ca-cert.pem".into()));
            }
            (false, None, None) => None,
            (false, ..) => return Err(refuse("a parameter tls-... needs nbds: or nbds+unix:".into())),
        };
        let address = match (scheme, socket) {
            ("nbd" | "nbds", None) => {
                let (host, port) = host_and_port(authority, PORT).map_err(refuse)?;
                NbdAddress::Tcp { host, port }
            }
            ("nbd" | "nbds", Some(_)) => {
                return Err(refuse("a socket belongs to nbd+unix or nbds+unix".into()));
            }
            (_, None) => return Err(refuse("?socket=PATH must follow".into())),
            (_, Some(_)) if !authority.is_empty() => {
                return Err(refuse(format!(
                    "{} is not part of a Unix socket's URI; expected {scheme}:///EXPORT?socket=PATH",
                    quote_for_error_line(authority)
                )));
            }
            (_, Some(socket)) => NbdAddress::Unix(socket),
        };
        Ok(NbdUri { address, export, silence, multi_conn, queue, tls })
    }
}

/// The parameters after the `?`.
#[derive(Default)]
struct NbdUriQuery {
    socket: Option<PathBuf>,
    silence: SilentServerPolicy,
    multi_conn: bool,
    queue: Option<QueueParams>,
    certificates: Option<PathBuf>,
    hostname: Option<String>,
}

impl NbdUriQuery {
    fn parse(query: Option<&str>) -> Result<NbdUriQuery, String> {
        let mut parsed = NbdUriQuery::default();
        let mut seen = Vec::new();
        for pair in query.into_iter().flat_map(|query| query.split('&')) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if seen.contains(&name) {
                return Err(format!("{name} is given twice"));
            }
            match name {
                "socket" => parsed.socket = Some(parse_uri_socket_path(value)?),
                "multi-conn" => match value {
                    "on" => parsed.multi_conn = true,
                    _ => {
                        return Err(format!(
                            "multi-conn is on, or left out, not {}",
                            quote_for_error_line(value)
                        ));
                    }
                },
                _ if parsed.silence.word(name, value)? => {}
                _ if QueueParams::word(&mut parsed.queue, name, value)? => {}
                "tls-certificates" => parsed.certificates = Some(parse_certificates_folder(value)?),
                "tls-hostname" => parsed.hostname = Some(parse_host_name(value)?),
                _ if name.starts_with("tls-") => {
                    let name = quote_for_error_line(name);
                    return Err(format!(
                        "unknown parameter {name}; of TLS there are tls-certificates and tls-hostname"
                    ));
                }
                _ => {
                    let name = quote_for_error_line(name);
                    let queue = QueueParams::NAMES.join(", ");
                    return Err(format!(
                        "unknown parameter {name}; there are socket, deadline, fence, multi-conn, tls-certificates, \
                         tls-hostname, {queue}"
                    ));
                }
            }
            seen.push(name);
        }
        Ok(parsed)
    }
}

/// Parses a host name or an IP address.
fn parse_host_name(value: &str) -> Result<String, String> {
    if is_host_name(value) && !value.is_empty() || value.parse::<Ipv6Addr>().is_ok() {
        return Ok(value.to_owned());
    }
    Err(format!("{} is not a host name", quote_for_error_line(value)))
}

/// True if all bytes may be in a host name or an IPv4 address.
pub(super) fn is_host_name(host: &str) -> bool {
    host.len() <= HOST_MAX && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
}

fn parse_certificates_folder(value: &str) -> Result<PathBuf, String> {
    let path = percent::percent_decode_uri(value)?;
    match path.as_str() {
        "" => Err("tls-certificates has no folder".into()),
        _ if path.contains('\0') => Err("tls-certificates has a NUL".into()),
        _ => Ok(PathBuf::from(path)),
    }
}

fn parse_uri_socket_path(value: &str) -> Result<PathBuf, String> {
    let path = percent::percent_decode_uri(value)?;
    match path.as_str() {
        "" => Err("socket has no path".into()),
        _ if path.contains('\0') => Err("udm uses no sockets in the abstract name space".into()),
        _ if path.len() > SOCKET_PATH_MAX => Err(format!(
            "the socket's path {} is longer than {SOCKET_PATH_MAX} bytes",
            quote_for_error_line(&path)
        )),
        _ => Ok(PathBuf::from(path)),
    }
}

/// Parses `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`; an empty host is `localhost`, and no port
/// is `default`.
pub(super) fn host_and_port(authority: &str, default: u16) -> Result<(String, u16), String> {
    if authority.contains('@') {
        return Err("udm sends no user: a server knows its client by the certificate".into());
    }
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or("a [ without its ]")?;
            let address: Ipv6Addr =
                host.parse().map_err(|_| format!("{} is not an IPv6 address", quote_for_error_line(host)))?;
            let port = match port.strip_prefix(':') {
                Some(port) => port,
                None if port.is_empty() => "",
                None => return Err(format!("{} after a host", quote_for_error_line(port))),
            };
            (address.to_string(), port)
        }
        None => {
            let (host, port) = authority.split_once(':').unwrap_or((authority, ""));
            if !is_host_name(host) {
                return Err(format!("{} is not a host name", quote_for_error_line(host)));
            }
            (if host.is_empty() { "localhost" } else { host }.to_owned(), port)
        }
    };
    let port = match port {
        "" => default,
        _ if port.bytes().all(|b| b.is_ascii_digit()) => match port.parse() {
            Ok(port) if port > 0 => port,
            _ => return Err(format!("port {} is not in 1..65535", quote_for_error_line(port))),
        },
        _ => return Err(format!("{} is not a port", quote_for_error_line(port))),
    };
    Ok((host, port))
}

/// The URI of an export on a vsock port of the host, as libnbd reads it in a virtual machine. CID 2
/// is the host. udm has no paths over vsock, so it is no [`NbdUri`].
#[must_use]
pub fn format_host_vsock_uri(port: u32, export: &str) -> String {
    format!("nbd+vsock://2:{port}/{}", percent::percent_encode_word(export))
}

impl NbdTlsParams {
    /// The parameters as they stand in a URI.
    fn words(&self) -> impl Iterator<Item = String> {
        let certificates = percent::percent_encode_word(&self.certificates.to_string_lossy());
        let hostname = self.hostname.iter().map(|name| format!("tls-hostname={name}"));
        std::iter::once(format!("tls-certificates={certificates}")).chain(hostname)
    }
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = percent::percent_encode_word(&self.export);
        let mut separator = '?';
        let tls = if self.tls.is_some() { "s" } else { "" };
        match &self.address {
            NbdAddress::Tcp { host, port } => {
                let (open, close) = if host.contains(':') { ("[", "]") } else { ("", "") };
                write!(f, "nbd{tls}://{open}{host}{close}")?;
                if *port != PORT {
                    write!(f, ":{port}")?;
                }
                write!(f, "/{export}")?;
            }
            NbdAddress::Unix(socket) => {
                write!(
                    f,
                    "nbd{tls}+unix:///{export}?socket={}",
                    percent::percent_encode_word(&socket.to_string_lossy())
                )?;
                separator = '&';
            }
        }
        let multi_conn = self.multi_conn.then(|| "multi-conn=on".to_owned());
        let tls = self.tls.iter().flat_map(NbdTlsParams::words);
        for word in
            tls.chain(self.silence.words()).chain(multi_conn).chain(QueueParams::words(self.queue.as_ref()))
        {
            write!(f, "{separator}{word}")?;
            separator = '&';
        }
        Ok(())
    }
}
