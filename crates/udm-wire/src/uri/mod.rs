//! Names of devices: what a device field of a table, a message or the command line may say.
//!
//! | form | means |
//! |---|---|
//! | `/dev/nvme0n1`, `./disk.img`, `disk.img` | a file or block device, taken literally |
//! | `file:disk.img?direct=on&readonly=on` | the same with options; `%XX` is the byte XX, so `?` is `%3F` and `%` is `%25` |
//! | `null:size=4G,bs=4K` | a null device; see [`NullParams`] |
//! | `mem:1G`, `pattern:1G` | memory; a read-only pattern |
//! | `nbd://host:10809/export`, `nbd+unix:///export?socket=/path` | an NBD server; see [`NbdUri`] |
//! | `@name` | a mapped device |
//! | `8:16` | a device by its number |
//!
//! What looks like `scheme:...` but is none of these is refused; a relative path with a colon in its first component is written `./a:b`. `Display`
//! gives each back in one canonical form, which [`parse`] reads as the same device; a table wants it behind [`crate::words::escape`].

mod nbd;
mod null;
mod percent;

pub use nbd::{NbdAddress, NbdUri};
pub use null::NullParams;

use crate::size::{self, Size};
use crate::words::shown;
use std::fmt;
use std::path::PathBuf;

/// The longest name of a device, in bytes: a path or export name of 4096, each byte percent-encoded, and the rest.
pub const WORD_MAX: usize = 16 << 10;
/// The longest path, in bytes (Linux `PATH_MAX`, less its NUL).
pub const PATH_MAX: usize = 4095;
/// The longest name of a mapped device, in bytes (kernel `DM_NAME_LEN`, less its NUL).
pub const MAPPED_NAME_MAX: usize = 127;

/// A device, as named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceUri {
    /// A file or block device.
    File {
        /// Not empty, at most [`PATH_MAX`] bytes, UTF-8, no NUL. Relative ones count from where the program runs.
        path: PathBuf,
        /// Past the page cache (`O_DIRECT`).
        direct: bool,
        /// Opened for reading only.
        readonly: bool,
    },
    /// A null device.
    Null(NullParams),
    /// Memory.
    Mem {
        /// Bytes, above 0.
        size: u64,
    },
    /// Read-only; every byte is a function of its offset.
    Pattern {
        /// Bytes, above 0.
        size: u64,
    },
    /// An export of an NBD server.
    Nbd(NbdUri),
    /// A mapped device by its name: 1..=[`MAPPED_NAME_MAX`] bytes, no `/`.
    Mapped(String),
    /// A device by its number.
    Number {
        /// Which kind of device.
        major: u32,
        /// Which of them.
        minor: u32,
    },
}

/// Why a word names no device; prints as one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UriError(String);

impl UriError {
    fn new(text: impl Into<String>) -> UriError {
        UriError(text.into())
    }
}

/// Reads the name of a device.
///
/// # Errors
/// One line that says what is wrong and, where there is a choice, what would be right.
pub fn parse(word: &str) -> Result<DeviceUri, UriError> {
    if word.len() > WORD_MAX {
        return Err(UriError::new(format!("the name of a device is longer than {WORD_MAX} bytes")));
    }
    if word.contains('\0') {
        return Err(UriError::new(format!("{}: a NUL character", shown(word))));
    }
    if let Some(name) = word.strip_prefix('@') {
        return mapped(name);
    }
    if let Some((major, minor)) = numbers(word) {
        let (Ok(major), Ok(minor)) = (major.parse(), minor.parse()) else {
            return Err(UriError::new(format!("{}: no such device number", shown(word))));
        };
        return Ok(DeviceUri::Number { major, minor });
    }
    let Some((scheme, rest)) = scheme(word) else { return literal(word) };
    match scheme {
        "file" => file(rest),
        "null" => NullParams::parse(rest).map(DeviceUri::Null),
        "mem" => Ok(DeviceUri::Mem { size: size_of_device("mem", rest)? }),
        "pattern" => Ok(DeviceUri::Pattern { size: size_of_device("pattern", rest)? }),
        "nbd" | "nbd+unix" => NbdUri::parse(scheme, rest).map(DeviceUri::Nbd),
        "nbds" | "nbds+unix" => Err(UriError::new(format!("{scheme}: udm does not do TLS"))),
        _ => Err(UriError::new(format!(
            "{}: no such kind of device; a path, @name, or one of file: null: mem: pattern: nbd:// nbd+unix://",
            shown(scheme)
        ))),
    }
}

/// `digits:digits`.
fn numbers(word: &str) -> Option<(&str, &str)> {
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    word.split_once(':').filter(|(major, minor)| digits(major) && digits(minor))
}

/// What stands before the first colon, where that can be a URI's scheme (RFC 3986, 3.1).
fn scheme(word: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = word.split_once(':')?;
    let ok = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b));
    ok.then_some((scheme, rest))
}

fn mapped(name: &str) -> Result<DeviceUri, UriError> {
    let refuse = |why: &str| Err(UriError::new(format!("@{name}: {why}", name = shown(name))));
    match name {
        "" => refuse("no name of a device"),
        "." | ".." | "control" => refuse("device name cannot be \"control\", \".\", or \"..\""),
        _ if name.contains('/') => refuse("a device name contains no \"/\""),
        _ if name.len() > MAPPED_NAME_MAX => refuse("a device name has at most 127 bytes"),
        _ => Ok(DeviceUri::Mapped(name.to_owned())),
    }
}

fn literal(path: &str) -> Result<DeviceUri, UriError> {
    Ok(DeviceUri::File { path: checked_path(path)?, direct: false, readonly: false })
}

fn file(rest: &str) -> Result<DeviceUri, UriError> {
    let (path, query) = rest.split_once('?').map_or((rest, None), |(path, query)| (path, Some(query)));
    let path = checked_path(&percent::decode(path).map_err(|why| UriError::new(format!("file: {why}")))?)?;
    let (mut direct, mut readonly) = (None, None);
    for pair in query.into_iter().flat_map(|query| query.split('&')) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let option = match name {
            "direct" => &mut direct,
            "readonly" => &mut readonly,
            _ => {
                let name = shown(name);
                return Err(UriError::new(format!("file: unknown option {name}; one of direct, readonly")));
            }
        };
        let value = switch("file", name, value)?;
        if option.replace(value).is_some() {
            return Err(UriError::new(format!("file: {name} is given twice")));
        }
    }
    Ok(DeviceUri::File { path, direct: direct.unwrap_or(false), readonly: readonly.unwrap_or(false) })
}

fn checked_path(path: &str) -> Result<PathBuf, UriError> {
    match path {
        "" => Err(UriError::new("no path of a device")),
        _ if path.len() > PATH_MAX => {
            Err(UriError::new(format!("{}: a path has at most {PATH_MAX} bytes", shown(path))))
        }
        _ if path.contains('\0') => Err(UriError::new(format!("{}: a NUL character", shown(path)))),
        _ => Ok(PathBuf::from(path)),
    }
}

/// A value that is yes or no.
fn switch(kind: &str, name: &str, value: &str) -> Result<bool, UriError> {
    match value {
        "on" | "1" | "true" | "yes" => Ok(true),
        "off" | "0" | "false" | "no" => Ok(false),
        _ => Err(UriError::new(format!("{kind}: {name}={} is neither on nor off", shown(value)))),
    }
}

fn size_of_device(kind: &str, text: &str) -> Result<u64, UriError> {
    match size::parse(text) {
        Ok(0) => Err(UriError::new(format!("{kind}: a device of no size"))),
        Ok(size) => Ok(size),
        Err(error) => Err(UriError::new(format!("{kind}: {error}"))),
    }
}

impl fmt::Display for DeviceUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceUri::File { path, direct, readonly } => {
                let path = path.to_string_lossy();
                let literal =
                    (path.starts_with('/') || path.starts_with('.')) && !path.contains(char::is_control);
                if literal && !direct && !readonly {
                    return f.write_str(&path);
                }
                write!(f, "file:{}", percent::encode(&path))?;
                match (direct, readonly) {
                    (false, false) => Ok(()),
                    (true, false) => f.write_str("?direct=on"),
                    (false, true) => f.write_str("?readonly=on"),
                    (true, true) => f.write_str("?direct=on&readonly=on"),
                }
            }
            DeviceUri::Null(params) => params.fmt(f),
            DeviceUri::Mem { size } => write!(f, "mem:{}", Size(*size)),
            DeviceUri::Pattern { size } => write!(f, "pattern:{}", Size(*size)),
            DeviceUri::Nbd(uri) => uri.fmt(f),
            DeviceUri::Mapped(name) => write!(f, "@{name}"),
            DeviceUri::Number { major, minor } => write!(f, "{major}:{minor}"),
        }
    }
}

impl std::str::FromStr for DeviceUri {
    type Err = UriError;
    fn from_str(word: &str) -> Result<DeviceUri, UriError> {
        parse(word)
    }
}
