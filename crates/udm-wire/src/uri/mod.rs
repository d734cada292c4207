//! Names of devices, in tables, messages and on the command line.
//!
//! | form | means |
//! |---|---|
//! | `/dev/nvme0n1`, `./disk.img`, `disk.img` | a file or block device, taken literally |
//! | `file:disk.img?direct=on&readonly=on` | the same with options, see [`FileUri`]; `%XX` is the byte XX, so `?` is `%3F` and `%` is `%25` |
//! | `file:disk.qcow2?format=qcow2` | the disk in a qcow2 image, read-only |
//! | `null:size=4G,bs=4K` | a null device; see [`NullParams`] |
//! | `mem:1G`, `pattern:1G` | memory, with the words of a queue after commas; a read-only pattern |
//! | `nbd://host:10809/export`, `nbd+unix:///export?socket=/path` | an NBD server; see [`NbdUri`] |
//! | `nbds://host/export?tls-certificates=/folder`, `nbds+unix:` | an NBD server over TLS |
//! | `nvme+tcp://host:4420/SUBNQN/NSID`, `nvme-tcp:` | a namespace of an NVMe controller; see [`NvmeUri`] |
//! | `https://host/path`, `s3://bucket/key`, `gs:`, `az:`, `http:` | a read-only object, see [`ObjectUri`] |
//! | `@name` | a mapped device |
//! | `8:16` | a device by its number |
//!
//! Any other `scheme:...` is refused. A relative path with a colon in its first component is
//! written `./a:b`. `Display` prints one canonical form, which [`parse_device_uri`] reads as the
//! same device; for a table it must be escaped with [`crate::words::escape_table_word`].

mod file;
mod nbd;
mod null;
mod null_faults;
mod nvme;
mod object;
mod percent;
mod queue;
mod reply_deadline;

pub use file::{FileUri, ImageFormat};
pub use nbd::{NbdAddress, NbdTlsParams, NbdUri, format_host_vsock_uri};
pub use null::NullParams;
pub use null_faults::{FaultAttr, NullFaults};
pub use nvme::NvmeUri;
pub use object::{HedgeSetting, ObjectScheme, ObjectUri};
pub use queue::{IoSchedulerName, QueueParams};
pub use reply_deadline::{ReplyDeadlineSetting, ServerStoppedProof, SilentServerPolicy, TimeSpan};

use crate::size::{self, SizeWithUnit};
use crate::words::quote_for_error_line;
use std::fmt;

/// The longest name of a device, in bytes: a path or export name of 4096 bytes, each
/// percent-encoded, and the rest of a URI.
pub const WORD_MAX: usize = 16 << 10;
/// The longest path, in bytes (Linux `PATH_MAX`, less its NUL).
pub const PATH_MAX: usize = 4095;
/// The longest name of a mapped device, in bytes (kernel `DM_NAME_LEN`, less its NUL).
pub const MAPPED_NAME_MAX: usize = 127;

/// A device, as its name describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceUri {
    /// A file or block device.
    File(FileUri),
    /// A null device.
    Null(NullParams),
    /// Memory of the server.
    Mem {
        /// Bytes, above 0.
        size: u64,
        /// The queue in front of the device; `None` for none.
        queue: Option<QueueParams>,
    },
    /// A read-only device; each byte is a function of its offset.
    Pattern {
        /// Bytes, above 0.
        size: u64,
    },
    /// An export of an NBD server.
    Nbd(NbdUri),
    /// A namespace of an NVMe/TCP controller.
    Nvme(NvmeUri),
    /// A read-only object of a web server or an object store.
    Object(ObjectUri),
    /// A mapped device by its name: 1..=[`MAPPED_NAME_MAX`] bytes, no `/`.
    Mapped(String),
    /// A device by its number.
    Number {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
}

/// The reason why a word is not a device name; prints as one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DeviceUriError(String);

impl DeviceUriError {
    fn new(text: impl Into<String>) -> DeviceUriError {
        DeviceUriError(text.into())
    }
}

/// Parses the name of a device.
///
/// # Errors
/// One line with the reason, and the accepted values if there are few.
pub fn parse_device_uri(word: &str) -> Result<DeviceUri, DeviceUriError> {
    if word.len() > WORD_MAX {
        return Err(DeviceUriError::new(format!("the name of a device is longer than {WORD_MAX} bytes")));
    }
    if word.contains('\0') {
        return Err(DeviceUriError::new(format!("{}: a NUL character", quote_for_error_line(word))));
    }
    if let Some(name) = word.strip_prefix('@') {
        return parse_mapped_device_name(name);
    }
    if let Some((major, minor)) = split_major_minor(word) {
        let (Ok(major), Ok(minor)) = (major.parse(), minor.parse()) else {
            return Err(DeviceUriError::new(format!(
                "{}: no such device number",
                quote_for_error_line(word)
            )));
        };
        return Ok(DeviceUri::Number { major, minor });
    }
    let Some((scheme, rest)) = split_uri_scheme(word) else {
        return FileUri::literal(word).map(DeviceUri::File);
    };
    if let Some(kind) = ObjectScheme::of(scheme) {
        return ObjectUri::parse(kind, rest).map(DeviceUri::Object);
    }
    match scheme {
        "file" => FileUri::parse(rest).map(DeviceUri::File),
        "null" => NullParams::parse(rest).map(DeviceUri::Null),
        "mem" => parse_mem_uri(rest),
        "pattern" => Ok(DeviceUri::Pattern { size: parse_device_size("pattern", rest)? }),
        "nbd" | "nbd+unix" | "nbds" | "nbds+unix" => NbdUri::parse(scheme, rest).map(DeviceUri::Nbd),
        "nvme+tcp" | "nvme-tcp" => NvmeUri::parse(rest).map(DeviceUri::Nvme),
        _ => Err(DeviceUriError::new(format!(
            "{}: unknown kind of device; expected a path, @name, file:, nbd:, nvme+tcp:, null:, \
             mem:, pattern:, https:, s3:, gs: or az:",
            quote_for_error_line(scheme)
        ))),
    }
}

/// Splits `digits:digits`.
fn split_major_minor(word: &str) -> Option<(&str, &str)> {
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    word.split_once(':').filter(|(major, minor)| digits(major) && digits(minor))
}

/// Splits at the first colon, if the text before it is a valid scheme of a URI (RFC 3986, 3.1).
fn split_uri_scheme(word: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = word.split_once(':')?;
    let ok = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b));
    ok.then_some((scheme, rest))
}

fn parse_mapped_device_name(name: &str) -> Result<DeviceUri, DeviceUriError> {
    let refuse =
        |why: &str| Err(DeviceUriError::new(format!("@{name}: {why}", name = quote_for_error_line(name))));
    match name {
        "" => refuse("no name of a device"),
        "." | ".." | "control" => refuse("device name cannot be \"control\", \".\", or \"..\""),
        _ if name.contains('/') => refuse("a device name contains no \"/\""),
        _ if name.len() > MAPPED_NAME_MAX => refuse("a device name has at most 127 bytes"),
        _ => Ok(DeviceUri::Mapped(name.to_owned())),
    }
}

/// Parses `SIZE`, and options of a queue after commas.
fn parse_mem_uri(text: &str) -> Result<DeviceUri, DeviceUriError> {
    let (size, words) = text.split_once(',').map_or((text, None), |(size, words)| (size, Some(words)));
    let size = parse_device_size("mem", size)?;
    let (mut queue, mut seen) = (None, Vec::new());
    for word in words.into_iter().flat_map(|words| words.split(',')) {
        let (name, value) = word.split_once('=').unwrap_or((word, ""));
        let refuse = |why: String| DeviceUriError::new(format!("mem: {why}"));
        if seen.contains(&name) {
            return Err(refuse(format!("{name} is given twice")));
        }
        if !QueueParams::word(&mut queue, name, value).map_err(refuse)? {
            let known = QueueParams::NAMES.join(", ");
            return Err(refuse(format!(
                "unknown parameter {}; expected one of {known}",
                quote_for_error_line(name)
            )));
        }
        seen.push(name);
    }
    Ok(DeviceUri::Mem { size, queue })
}

/// Parses a value that is on or off.
fn parse_switch(kind: &str, name: &str, value: &str) -> Result<bool, DeviceUriError> {
    match value {
        "on" | "1" | "true" | "yes" => Ok(true),
        "off" | "0" | "false" | "no" => Ok(false),
        _ => Err(DeviceUriError::new(format!(
            "{kind}: {name}={} is neither on nor off",
            quote_for_error_line(value)
        ))),
    }
}

fn parse_device_size(kind: &str, text: &str) -> Result<u64, DeviceUriError> {
    match size::parse_size_with_unit(text) {
        Ok(0) => Err(DeviceUriError::new(format!("{kind}: a device of no size"))),
        Ok(size) => Ok(size),
        Err(error) => Err(DeviceUriError::new(format!("{kind}: {error}"))),
    }
}

impl fmt::Display for DeviceUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceUri::File(file) => file.fmt(f),
            DeviceUri::Null(params) => params.fmt(f),
            DeviceUri::Mem { size, queue } => {
                write!(f, "mem:{}", SizeWithUnit(*size))?;
                QueueParams::words(queue.as_ref()).iter().try_for_each(|word| write!(f, ",{word}"))
            }
            DeviceUri::Pattern { size } => write!(f, "pattern:{}", SizeWithUnit(*size)),
            DeviceUri::Nbd(uri) => uri.fmt(f),
            DeviceUri::Nvme(uri) => uri.fmt(f),
            DeviceUri::Object(uri) => uri.fmt(f),
            DeviceUri::Mapped(name) => write!(f, "@{name}"),
            DeviceUri::Number { major, minor } => write!(f, "{major}:{minor}"),
        }
    }
}

impl std::str::FromStr for DeviceUri {
    type Err = DeviceUriError;
    fn from_str(word: &str) -> Result<DeviceUri, DeviceUriError> {
        parse_device_uri(word)
    }
}
