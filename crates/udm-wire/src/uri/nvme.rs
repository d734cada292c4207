//! `nvme+tcp://HOST[:PORT]/SUBNQN/NSID`: a namespace of an NVMe/TCP controller.
//!
//! The parameters are named as those of `nvme connect`, without its dashes. Digests have one
//! parameter for both, as in `digest=header,data`.

use super::nbd::host_and_port;
use super::reply_deadline::{ReplyDeadlineSetting, TimeSpan};
use super::{DeviceUriError, QueueParams, percent};
use crate::nvme::check_nqn;
use crate::nvme::host::HostDigests;
use crate::words::quote_for_error_line;
use std::fmt;
use std::path::PathBuf;
use udm_core::Nanos;

/// The port of NVMe/TCP.
const PORT: u16 = 4420;
/// Default of `kato`, as `nvme connect` has it.
const KATO: Nanos = Nanos(5_000_000_000);
/// Bounds of `kato`.
const KATO_MIN: Nanos = Nanos(500_000_000);
const KATO_MAX: Nanos = Nanos(120_000_000_000);
/// Default of `deadline`, as over TCP to an NBD server.
const DEADLINE: Nanos = Nanos(60_000_000_000);
/// The most I/O queues.
const QUEUES_MAX: u16 = 1024;

/// A namespace of an NVMe/TCP controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmeUri {
    /// A name or an address; an IPv6 address has no brackets.
    pub host: String,
    /// 1..=65535; default 4420.
    pub port: u16,
    /// Name of the subsystem.
    pub subsystem: String,
    /// Number of the namespace, 1..=0xfffffffe.
    pub nsid: u32,
    /// Name of this host; `None` for that of the machine.
    pub host_nqn: Option<String>,
    /// Identifier of this host; `None` for that of the machine.
    pub host_id: Option<[u8; 16]>,
    /// Digests to use.
    pub digests: HostDigests,
    /// Keep-alive timeout: 500 ms to 2 minutes.
    pub kato: Nanos,
    /// Number of I/O queues to ask for, 1..=1024; `None` for two per core and two more.
    pub queues: Option<u16>,
    /// How long the controller may leave a request unanswered.
    pub deadline: ReplyDeadlineSetting,
    /// The time that a controller without CQT needs to end its commands; `None` for none.
    pub fence_delay: Option<Nanos>,
    /// A file with the secret by which this host authenticates itself; `None` for none.
    pub secret_file: Option<PathBuf>,
    /// A file with the secret that the controller must know; `None` if it need not prove itself.
    pub controller_secret_file: Option<PathBuf>,
    /// The queue in front of the namespace; `None` for none.
    pub queue: Option<QueueParams>,
}

impl NvmeUri {
    /// A namespace with default options.
    #[must_use]
    pub fn new(host: impl Into<String>, port: u16, subsystem: impl Into<String>, nsid: u32) -> NvmeUri {
        NvmeUri {
            host: host.into(),
            port,
            subsystem: subsystem.into(),
            nsid,
            host_nqn: None,
            host_id: None,
            digests: HostDigests::default(),
            kato: KATO,
            queues: None,
            deadline: ReplyDeadlineSetting::Default,
            fence_delay: None,
            secret_file: None,
            controller_secret_file: None,
            queue: None,
        }
    }

    /// How long a request may wait while the controller sends nothing; `None` for no limit.
    #[must_use]
    pub fn deadline(&self) -> Option<Nanos> {
        match self.deadline {
            ReplyDeadlineSetting::After(time) => Some(time),
            ReplyDeadlineSetting::Default => Some(DEADLINE),
            ReplyDeadlineSetting::Never => None,
        }
    }

    /// The same namespace without a queue, as its connections use it.
    #[must_use]
    pub fn unqueued(&self) -> NvmeUri {
        NvmeUri { queue: None, ..self.clone() }
    }

    /// The same namespace without parameters.
    #[must_use]
    pub fn plain(&self) -> NvmeUri {
        NvmeUri::new(self.host.clone(), self.port, self.subsystem.clone(), self.nsid)
    }

    /// Parses the text after `nvme+tcp:` or `nvme-tcp:`.
    pub(super) fn parse(rest: &str) -> Result<NvmeUri, DeviceUriError> {
        NvmeUri::parse_parts(rest).map_err(|why| DeviceUriError::new(format!("nvme+tcp: {why}")))
    }

    fn parse_parts(rest: &str) -> Result<NvmeUri, String> {
        const FORM: &str = "expected nvme+tcp://HOST[:PORT]/SUBNQN/NSID";
        let rest = rest.strip_prefix("//").ok_or(FORM)?;
        let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
        let (authority, path) = rest.split_once('/').ok_or(FORM)?;
        let (subsystem, nsid) = path.rsplit_once('/').ok_or(FORM)?;
        let (host, port) = host_and_port(authority, PORT)?;
        let subsystem = percent::percent_decode_uri(subsystem)?;
        check_nqn(&subsystem).map_err(|why| format!("{}: {why}", quote_for_error_line(&subsystem)))?;
        let nsid = parse_number(nsid).filter(|nsid| (1..u32::MAX).contains(nsid));
        let nsid = nsid.ok_or("the number of a namespace is 1 to 4294967294")?;
        let mut uri = NvmeUri::new(host, port, subsystem, nsid);
        let mut seen = Vec::new();
        for pair in query.into_iter().flat_map(|query| query.split('&')) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if seen.contains(&name) {
                return Err(format!("{name} is given twice"));
            }
            uri.set_parameter(name, value)?;
            seen.push(name);
        }
        if uri.controller_secret_file.is_some() && uri.secret_file.is_none() {
            return Err("dhchap-ctrl-secret needs dhchap-secret".into());
        }
        Ok(uri)
    }

    fn set_parameter(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "hostnqn" => {
                let host = percent::percent_decode_uri(value)?;
                check_nqn(&host).map_err(|why| format!("hostnqn: {}: {why}", quote_for_error_line(&host)))?;
                self.host_nqn = Some(host);
            }
            "hostid" => self.host_id = Some(parse_uuid(value).ok_or("hostid is not a UUID")?),
            "digest" => self.digests = parse_digests(value)?,
            "kato" => {
                self.kato = TimeSpan::parse("kato", value)?.0;
                if !(KATO_MIN..=KATO_MAX).contains(&self.kato) {
                    return Err("kato is from 500ms to 2m".into());
                }
            }
            "queues" => {
                let queues = parse_number(value).filter(|queues| (1..=QUEUES_MAX.into()).contains(queues));
                self.queues = Some(queues.ok_or("queues is 1 to 1024")? as u16);
            }
            "deadline" => self.deadline = ReplyDeadlineSetting::parse(value)?,
            "fence-delay" => self.fence_delay = Some(TimeSpan::parse("fence-delay", value)?.0),
            "dhchap-secret" => self.secret_file = Some(parse_secret_file(name, value)?),
            "dhchap-ctrl-secret" => self.controller_secret_file = Some(parse_secret_file(name, value)?),
            _ if QueueParams::word(&mut self.queue, name, value)? => {}
            _ => {
                let (name, queue) = (quote_for_error_line(name), QueueParams::NAMES.join(", "));
                return Err(format!(
                    "unknown parameter {name}; there are hostnqn, hostid, digest, kato, queues, deadline, \
                     fence-delay, dhchap-secret, dhchap-ctrl-secret, {queue}"
                ));
            }
        }
        Ok(())
    }

    fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        words
            .extend(self.host_nqn.iter().map(|nqn| format!("hostnqn={}", percent::percent_encode_word(nqn))));
        words.extend(self.host_id.iter().map(|id| format!("hostid={}", format_uuid(id))));
        let digest = match (self.digests.header, self.digests.data) {
            (true, true) => Some("digest=header,data"),
            (true, false) => Some("digest=header"),
            (false, true) => Some("digest=data"),
            (false, false) => None,
        };
        words.extend(digest.map(String::from));
        if self.kato != KATO {
            words.push(format!("kato={}", TimeSpan(self.kato)));
        }
        words.extend(self.queues.map(|queues| format!("queues={queues}")));
        words.extend(self.deadline.word());
        words.extend(self.fence_delay.map(|delay| format!("fence-delay={}", TimeSpan(delay))));
        for (name, file) in
            [("dhchap-secret", &self.secret_file), ("dhchap-ctrl-secret", &self.controller_secret_file)]
        {
            let path = file.as_ref().map(|file| percent::percent_encode_word(&file.to_string_lossy()));
            words.extend(path.map(|path| format!("{name}={path}")));
        }
        words.extend(QueueParams::words(self.queue.as_ref()));
        words
    }
}

/// Parses a decimal number without a sign or leading zeroes.
fn parse_number(text: &str) -> Option<u32> {
    let is_number = text.bytes().all(|b| b.is_ascii_digit()) && !text.starts_with('0');
    is_number.then(|| text.parse().ok()).flatten()
}

/// Parses the path of a file with a secret. A secret itself would be shown with the table.
fn parse_secret_file(name: &str, value: &str) -> Result<PathBuf, String> {
    let path = percent::percent_decode_uri(value)?;
    match path.as_str() {
        "" => Err(format!("{name} has no file")),
        _ if path.contains('\0') => Err(format!("{name} has a NUL")),
        _ if path.starts_with("DHHC-1:") => {
            Err(format!("{name} is a file with the secret: tables are shown to everybody, so they have none"))
        }
        // The server and its clients may be in different folders.
        _ if !path.starts_with('/') => Err(format!("{name} is a path that begins with /")),
        _ => Ok(PathBuf::from(path)),
    }
}

fn parse_digests(value: &str) -> Result<HostDigests, String> {
    let mut digests = HostDigests::default();
    for name in value.split(',') {
        match name {
            "header" => digests.header = true,
            "data" => digests.data = true,
            _ => return Err(format!("digest={} is not header, data or both", quote_for_error_line(value))),
        }
    }
    Ok(digests)
}

/// Parses 32 hexadecimal digits with dashes.
fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let groups: Vec<&str> = text.split('-').collect();
    let has_form = groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12]);
    let hex = groups.concat();
    if !has_form || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    Some(u128::from_str_radix(&hex, 16).ok()?.to_be_bytes())
}

/// A UUID with its dashes.
fn format_uuid(id: &[u8; 16]) -> String {
    let hex = format!("{:032x}", u128::from_be_bytes(*id));
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

impl fmt::Display for NvmeUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (open, close) = if self.host.contains(':') { ("[", "]") } else { ("", "") };
        write!(f, "nvme+tcp://{open}{}{close}", self.host)?;
        if self.port != PORT {
            write!(f, ":{}", self.port)?;
        }
        write!(f, "/{}/{}", percent::percent_encode_word(&self.subsystem), self.nsid)?;
        for (at, word) in self.words().iter().enumerate() {
            write!(f, "{}{word}", if at == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}
