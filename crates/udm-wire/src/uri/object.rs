//! Objects of web servers and object stores: `https://HOST[:PORT]/PATH`, `http://`,
//! `s3://BUCKET/KEY`, `gs://BUCKET/KEY` and `az://CONTAINER/KEY`.
//!
//! Parameters after a `?` are udm's own; none reaches the server. Credentials are never part of a
//! URI, because tables are shown in status lines and logs. So a user, a password, and a signed URL
//! are refused.

use super::nbd::is_host_name;
use super::reply_deadline::{ReplyDeadlineSetting, SilentServerPolicy, TimeSpan};
use super::{DeviceUriError, QueueParams, ServerStoppedProof, parse_switch, percent};
use crate::words::quote_for_error_line;
use std::fmt;
use std::net::IpAddr;
use udm_core::Nanos;

/// The longest path or key, in bytes.
const KEY_MAX: usize = 4096;
/// The longest name of a bucket or a container, in bytes.
const BUCKET_MAX: usize = 222;
/// Default deadline: as for an NBD server over TCP.
const DEADLINE: Nanos = Nanos(60_000_000_000);

/// The names of the parameters, without those of a queue.
const NAMES: &str = "deadline, etag, hedge, insecure, format";
/// The longest ETag, in bytes without its quotes.
const ETAG_MAX: usize = 256;

/// The kind of an object store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ObjectScheme {
    /// A web server, over TLS.
    Https,
    /// A web server, without encryption.
    Http,
    /// Amazon S3, and servers with its protocol.
    S3,
    /// Google Cloud Storage.
    Gs,
    /// Azure Blob Storage.
    Az,
}

impl ObjectScheme {
    /// All kinds by their schemes.
    pub const ALL: [(&'static str, ObjectScheme); 5] = [
        ("https", ObjectScheme::Https),
        ("http", ObjectScheme::Http),
        ("s3", ObjectScheme::S3),
        ("gs", ObjectScheme::Gs),
        ("az", ObjectScheme::Az),
    ];

    /// The kind of a scheme; `None` if there is none.
    pub(super) fn of(scheme: &str) -> Option<ObjectScheme> {
        ObjectScheme::ALL.iter().find(|(name, _)| *name == scheme).map(|(_, kind)| *kind)
    }

    fn is_web(self) -> bool {
        matches!(self, ObjectScheme::Https | ObjectScheme::Http)
    }
}

impl fmt::Display for ObjectScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = ObjectScheme::ALL.iter().find(|(_, kind)| kind == self).map(|(name, _)| name);
        f.write_str(name.expect("the list is whole"))
    }
}

/// When a slow request of a range gets a second one, whose answer is used if it is the first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum HedgeSetting {
    /// `auto`: when it is slower than nearly all recent ones.
    #[default]
    Auto,
    /// `off`: never.
    Off,
    /// After a time: 1 ms to 24 h.
    After(Nanos),
}

impl HedgeSetting {
    fn parse(value: &str) -> Result<HedgeSetting, String> {
        match value {
            "auto" => Ok(HedgeSetting::Auto),
            "off" => Ok(HedgeSetting::Off),
            _ => Ok(HedgeSetting::After(TimeSpan::parse("hedge", value)?.0)),
        }
    }

    /// The parameter, if it is not the default.
    fn word(self) -> Option<String> {
        match self {
            HedgeSetting::Auto => None,
            HedgeSetting::Off => Some("hedge=off".into()),
            HedgeSetting::After(time) => Some(format!("hedge={}", TimeSpan(time))),
        }
    }
}

/// A read-only object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectUri {
    /// The kind of the store.
    pub scheme: ObjectScheme,
    /// `HOST` or `HOST:PORT` of a web server, else the bucket or container.
    pub authority: String,
    /// Path or key, decoded: UTF-8, no leading `/`, no control characters, 1..=4096 bytes.
    pub key: String,
    /// How long a request may take with all its retries.
    pub deadline: ReplyDeadlineSetting,
    /// The strong ETag of the version to be read, without its quotes; `None` for the version that
    /// is found.
    pub etag: Option<String>,
    /// When a slow request gets a second one.
    pub hedge: HedgeSetting,
    /// Plain HTTP to other hosts than this one is allowed.
    pub insecure: bool,
    /// The object is a qcow2 image. It may not need other files.
    pub is_qcow2: bool,
    /// The queue in front of the object; `None` for none.
    pub queue: Option<QueueParams>,
}

impl ObjectUri {
    /// How long a request may take with all its retries; `None` for no limit.
    #[must_use]
    pub fn deadline(&self) -> Option<Nanos> {
        match self.deadline {
            ReplyDeadlineSetting::After(time) => Some(time),
            ReplyDeadlineSetting::Default => Some(DEADLINE),
            ReplyDeadlineSetting::Never => None,
        }
    }

    /// Parses the text after `SCHEME:`.
    pub(super) fn parse(scheme: ObjectScheme, rest: &str) -> Result<ObjectUri, DeviceUriError> {
        let refuse = |why: String| DeviceUriError::new(format!("{scheme}: {why}"));
        let rest = rest.strip_prefix("//").ok_or_else(|| refuse("\"//\" must follow".into()))?;
        if rest.contains('#') {
            return Err(refuse("a fragment; write %23 for #".into()));
        }
        let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
        let (authority, key) = rest.split_once('/').unwrap_or((rest, ""));
        let authority = parse_authority(scheme, authority).map_err(refuse)?;
        let key = percent::percent_decode_uri(key).map_err(|why| refuse(why.into()))?;
        if key.is_empty() || key.len() > KEY_MAX || key.contains(char::is_control) {
            return Err(refuse(format!(
                "the name of an object has 1 to {KEY_MAX} bytes, no control characters"
            )));
        }
        if key.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(refuse("the name of an object has no empty part and no part \".\" or \"..\"".into()));
        }
        let mut uri = ObjectUri {
            scheme,
            authority,
            key,
            deadline: Default::default(),
            etag: None,
            hedge: HedgeSetting::default(),
            insecure: false,
            is_qcow2: false,
            queue: None,
        };
        uri.parse_query(query).map_err(refuse)?;
        if scheme == ObjectScheme::Http && !uri.insecure && !is_loopback(&uri.authority) {
            return Err(refuse(
                "data without encryption can be changed on its way: use https:, or insecure=on if the network is \
                 trusted"
                    .into(),
            ));
        }
        Ok(uri)
    }

    fn parse_query(&mut self, query: Option<&str>) -> Result<(), String> {
        let mut seen = Vec::new();
        let mut silence = SilentServerPolicy::default();
        for pair in query.into_iter().flat_map(|query| query.split('&')) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if seen.contains(&name) {
                return Err(format!("{name} is given twice"));
            }
            match name {
                "insecure" if self.scheme != ObjectScheme::Http => {
                    return Err("insecure=on is for http: only".into());
                }
                "insecure" => {
                    self.insecure = parse_switch("http", name, value).map_err(|e| e.to_string())?;
                }
                "deadline" => {
                    silence.word(name, value)?;
                }
                "etag" => self.etag = Some(parse_etag(value)?),
                "hedge" => self.hedge = HedgeSetting::parse(value)?,
                "format" => match value {
                    "raw" => {}
                    "qcow2" => self.is_qcow2 = true,
                    _ => {
                        return Err(format!(
                            "format={} is neither raw nor qcow2",
                            quote_for_error_line(value)
                        ));
                    }
                },
                _ if QueueParams::word(&mut self.queue, name, value)? => {}
                _ => {
                    return Err(format!(
                        "unknown parameter {}; there are {NAMES} and those of a queue (a signed URL is refused, \
                         because tables are shown in status lines)",
                        quote_for_error_line(name)
                    ));
                }
            }
            seen.push(name);
        }
        debug_assert_eq!(silence.fence, ServerStoppedProof::Closed, "only deadline is passed on");
        self.deadline = silence.deadline;
        Ok(())
    }
}

/// The opaque part of a strong ETag (RFC 9110, 8.8.3), with its quotes or without.
fn parse_etag(value: &str) -> Result<String, String> {
    let decoded = percent::percent_decode_uri(value)?;
    let refuse = |why: &str| Err(format!("etag: {} {why}", quote_for_error_line(&decoded)));
    if decoded.starts_with("W/") {
        return refuse("is a weak ETag, which does not tell versions apart");
    }
    let bare = decoded.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(&decoded);
    match (1..=ETAG_MAX).contains(&bare.len()) && bare.bytes().all(|b| b.is_ascii_graphic() && b != b'"') {
        true => Ok(bare.to_owned()),
        false => refuse("is not an ETag: 1 to 256 printable characters without space or quote"),
    }
}

/// True if `authority` is this host.
fn is_loopback(authority: &str) -> bool {
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    };
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Checks the host and port of a web server, or the name of a bucket.
fn parse_authority(scheme: ObjectScheme, authority: &str) -> Result<String, String> {
    if authority.contains('@') {
        return Err("a URI has no user and no password: tables are shown in status lines".into());
    }
    if !scheme.is_web() {
        let known = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
        return match !authority.is_empty() && authority.len() <= BUCKET_MAX && authority.bytes().all(known) {
            true => Ok(authority.to_owned()),
            false => Err(format!("{} is not a bucket or container", quote_for_error_line(authority))),
        };
    }
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or("a [ without its ]")?;
            let address: std::net::Ipv6Addr =
                host.parse().map_err(|_| format!("{} is not an IPv6 address", quote_for_error_line(host)))?;
            (format!("[{address}]"), port)
        }
        None => {
            let at = authority.find(':').unwrap_or(authority.len());
            let (host, port) = authority.split_at(at);
            if host.is_empty() || !is_host_name(host) {
                return Err(format!("{} is not a host name", quote_for_error_line(host)));
            }
            (host.to_ascii_lowercase(), port)
        }
    };
    let port = match port.strip_prefix(':') {
        None if port.is_empty() => return Ok(host),
        None => return Err(format!("{} after a host", quote_for_error_line(port))),
        Some(port) => port,
    };
    let digits = port.bytes().all(|b| b.is_ascii_digit());
    match port.parse::<u16>() {
        Ok(number) if number > 0 && digits => {
            let default = if scheme == ObjectScheme::Https { 443 } else { 80 };
            Ok(if number == default { host } else { format!("{host}:{number}") })
        }
        _ => Err(format!("port {} is not in 1..65535", quote_for_error_line(port))),
    }
}

impl fmt::Display for ObjectUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}/{}", self.scheme, self.authority, percent::percent_encode_word(&self.key))?;
        let silence = SilentServerPolicy { deadline: self.deadline, ..SilentServerPolicy::default() };
        let etag = self.etag.as_ref().map(|etag| format!("etag={}", percent::percent_encode_word(etag)));
        let insecure = self.insecure.then(|| "insecure=on".to_owned());
        let format = self.is_qcow2.then(|| "format=qcow2".to_owned());
        let words = silence.words().chain(etag).chain(self.hedge.word()).chain(insecure).chain(format);
        let words = words.chain(QueueParams::words(self.queue.as_ref()));
        for (i, word) in words.enumerate() {
            write!(f, "{}{word}", if i == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}
