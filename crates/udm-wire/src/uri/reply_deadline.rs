//! The options `deadline=TIME` and `fence=HOW` in the URI of an NBD export: what to do if the
//! server stops answering. A namespace of an NVMe controller has `deadline` too.

use super::{PATH_MAX, percent};
use crate::words::quote_for_error_line;
use std::fmt;
use std::path::PathBuf;
use udm_core::Nanos;

/// How long the server may be silent, and when an unanswered write may be sent to another path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SilentServerPolicy {
    /// How long the server may be silent while a request waits.
    pub deadline: ReplyDeadlineSetting,
    /// The proof that the server cannot carry out an unanswered write any more.
    pub fence: ServerStoppedProof,
}

/// The time after which a server with a waiting request counts as silent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReplyDeadlineSetting {
    /// Not set: a minute over TCP. No limit over a Unix socket, whose server runs on this system.
    #[default]
    Default,
    /// `none`: no limit.
    Never,
    /// A time: 1 ms to 24 h.
    After(Nanos),
}

/// The proof that a server cannot carry out an unanswered request any more.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ServerStoppedProof {
    /// `closed`: the server has closed the connection.
    #[default]
    Closed,
    /// `wait:TIME`: this time, 1 ms to 24 h, has passed since the connection was abandoned. The
    /// server is known to stop by itself within this time.
    Wait(Nanos),
    /// `exec:PATH`: this command, an absolute path, has exited with status 0.
    Exec(PathBuf),
}

impl ReplyDeadlineSetting {
    /// Parses the value of `deadline`.
    pub(super) fn parse(value: &str) -> Result<ReplyDeadlineSetting, String> {
        match value {
            "none" => Ok(ReplyDeadlineSetting::Never),
            _ => Ok(ReplyDeadlineSetting::After(TimeSpan::parse("deadline", value)?.0)),
        }
    }

    /// The parameter, if it is not the default.
    pub(super) fn word(self) -> Option<String> {
        match self {
            ReplyDeadlineSetting::Default => None,
            ReplyDeadlineSetting::Never => Some("deadline=none".into()),
            ReplyDeadlineSetting::After(time) => Some(format!("deadline={}", TimeSpan(time))),
        }
    }
}

impl SilentServerPolicy {
    /// Sets one parameter after the `?`. Returns false if `name` is not one of these.
    ///
    /// # Errors
    /// An invalid value.
    pub(super) fn word(&mut self, name: &str, value: &str) -> Result<bool, String> {
        match name {
            "deadline" => self.deadline = ReplyDeadlineSetting::parse(value)?,
            "fence" => self.fence = ServerStoppedProof::parse(value)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The parameters that differ from the defaults.
    pub(super) fn words(&self) -> impl Iterator<Item = String> {
        let fence = (self.fence != ServerStoppedProof::Closed).then(|| format!("fence={}", self.fence));
        self.deadline.word().into_iter().chain(fence)
    }
}

impl ServerStoppedProof {
    fn parse(value: &str) -> Result<ServerStoppedProof, String> {
        match value.split_once(':') {
            None if value == "closed" => Ok(ServerStoppedProof::Closed),
            Some(("wait", time)) => Ok(ServerStoppedProof::Wait(TimeSpan::parse("fence=wait", time)?.0)),
            Some(("exec", path)) => {
                let path = percent::percent_decode_uri(path)?;
                match path.starts_with('/') && path.len() <= PATH_MAX && !path.contains('\0') {
                    true => Ok(ServerStoppedProof::Exec(PathBuf::from(path))),
                    false => Err(format!(
                        "fence=exec: {} is not the absolute path of a command",
                        quote_for_error_line(&path)
                    )),
                }
            }
            _ => Err(format!("fence={} is not closed, wait:TIME or exec:PATH", quote_for_error_line(value))),
        }
    }
}

impl fmt::Display for ServerStoppedProof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServerStoppedProof::Closed => f.write_str("closed"),
            ServerStoppedProof::Wait(time) => write!(f, "wait:{}", TimeSpan(*time)),
            ServerStoppedProof::Exec(path) => {
                write!(f, "exec:{}", percent::percent_encode_word(&path.to_string_lossy()))
            }
        }
    }
}

/// A time as text: a whole number and `ms`, `s`, `m` or `h`. Prints in the largest unit without
/// remainder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeSpan(pub Nanos);

/// Units of a time, in milliseconds.
const UNITS: [(&str, u64); 4] = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];

/// The longest time, in milliseconds.
const SPAN_MAX: u64 = 24 * 3_600_000;

impl TimeSpan {
    /// Parses the value of `name`.
    pub(super) fn parse(name: &str, text: &str) -> Result<TimeSpan, String> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let unit = UNITS.iter().find(|(name, _)| *name == unit);
        let ms = number.parse().ok().zip(unit).and_then(|(n, (_, unit)): (u64, _)| n.checked_mul(*unit));
        match ms {
            Some(ms @ 1..=SPAN_MAX) => Ok(TimeSpan(Nanos::from_millis(ms))),
            _ => Err(format!(
                "{name}: {} is not a time from 1ms to 24h (a number, then ms, s, m or h)",
                quote_for_error_line(text)
            )),
        }
    }
}

impl fmt::Display for TimeSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0.0 / 1_000_000;
        let (name, unit) = UNITS.iter().rfind(|(_, unit)| ms.is_multiple_of(*unit)).unwrap_or(&UNITS[0]);
        write!(f, "{}{name}", ms / unit)
    }
}
