//! What becomes of a path whose server falls silent: `deadline=TIME` and `fence=HOW` in the URI of
//! an NBD export.

use super::{PATH_MAX, percent};
use crate::words::shown;
use std::fmt;
use std::path::PathBuf;
use udm_core::Nanos;

/// How long a request may take, and when a write that was not answered may be sent elsewhere.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SilencePolicy {
    /// For how long nothing may come though a request waits.
    pub deadline: DeadlineSetting,
    /// What proves that the server can't deliver a write any more.
    pub fence: Fence,
}

/// For how long nothing may come of a path that has a request before it counts as silent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeadlineSetting {
    /// Not said: a minute over TCP, for ever over a Unix socket, whose other end is this system's.
    #[default]
    Default,
    /// `none`: for ever.
    Never,
    /// A time: 1 ms to 24 h.
    For(Nanos),
}

/// What proves that a server can't deliver any more what it was sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Fence {
    /// `closed`: it has closed the connection.
    #[default]
    Closed,
    /// `wait:TIME`: so much time has passed since the connection was given up, 1 ms to 24 h. It is
    /// known to have stopped by itself by then.
    Wait(Nanos),
    /// `exec:PATH`: this command, an absolute path, has ended with status 0.
    Exec(PathBuf),
}

impl SilencePolicy {
    /// One of the words behind the `?`; false for any other.
    ///
    /// # Errors
    /// What is wrong with the value.
    pub(super) fn word(&mut self, name: &str, value: &str) -> Result<bool, String> {
        match name {
            "deadline" if value == "none" => self.deadline = DeadlineSetting::Never,
            "deadline" => self.deadline = DeadlineSetting::For(TimeSpan::parse("deadline", value)?.0),
            "fence" => self.fence = Fence::parse(value)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The words that are not as they are without being said.
    pub(super) fn words(&self) -> impl Iterator<Item = String> {
        let deadline = match self.deadline {
            DeadlineSetting::Default => None,
            DeadlineSetting::Never => Some("deadline=none".into()),
            DeadlineSetting::For(time) => Some(format!("deadline={}", TimeSpan(time))),
        };
        let fence = (self.fence != Fence::Closed).then(|| format!("fence={}", self.fence));
        deadline.into_iter().chain(fence)
    }
}

impl Fence {
    fn parse(value: &str) -> Result<Fence, String> {
        match value.split_once(':') {
            None if value == "closed" => Ok(Fence::Closed),
            Some(("wait", time)) => Ok(Fence::Wait(TimeSpan::parse("fence=wait", time)?.0)),
            Some(("exec", path)) => {
                let path = percent::decode(path)?;
                match path.starts_with('/') && path.len() <= PATH_MAX && !path.contains('\0') {
                    true => Ok(Fence::Exec(PathBuf::from(path))),
                    false => Err(format!("fence=exec: {} is no absolute path of a command", shown(&path))),
                }
            }
            _ => Err(format!("fence={} is none of closed, wait:TIME, exec:PATH", shown(value))),
        }
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fence::Closed => f.write_str("closed"),
            Fence::Wait(time) => write!(f, "wait:{}", TimeSpan(*time)),
            Fence::Exec(path) => write!(f, "exec:{}", percent::encode(&path.to_string_lossy())),
        }
    }
}

/// A span of time as it is written: a whole number and `ms`, `s`, `m` or `h`. Prints in the largest
/// unit that leaves no remainder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeSpan(pub Nanos);

/// Units of a span in milliseconds.
const UNITS: [(&str, u64); 4] = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];

/// The longest span, in milliseconds.
const SPAN_MAX: u64 = 24 * 3_600_000;

impl TimeSpan {
    /// Reads the value of `name`.
    fn parse(name: &str, text: &str) -> Result<TimeSpan, String> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let unit = UNITS.iter().find(|(name, _)| *name == unit);
        let ms = number.parse().ok().zip(unit).and_then(|(n, (_, unit)): (u64, _)| n.checked_mul(*unit));
        match ms {
            Some(ms @ 1..=SPAN_MAX) => Ok(TimeSpan(Nanos::from_millis(ms))),
            _ => Err(format!(
                "{name}: {} is no time from 1ms to 24h (a number, then ms, s, m or h)",
                shown(text)
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
