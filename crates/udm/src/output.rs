//! Standard output.

use anyhow::{Context, Result};
use std::io::{BufWriter, Error, ErrorKind, StdoutLock, Write};

/// Has `print` write to standard output. A reader that went away is no error of ours.
///
/// # Errors
/// Those of `print`; what the system says of standard output.
pub fn to_stdout(print: impl FnOnce(&mut BufWriter<StdoutLock<'_>>) -> Result<()>) -> Result<()> {
    let mut out = BufWriter::new(std::io::stdout().lock());
    let printed = print(&mut out).and_then(|()| out.flush().context("standard output"));
    match printed {
        Err(e) if e.downcast_ref::<Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) => Ok(()),
        other => other,
    }
}

/// Prints to standard output.
///
/// # Errors
/// What the system says of standard output.
pub fn say(text: &str) -> Result<()> {
    to_stdout(|out| out.write_all(text.as_bytes()).context("standard output"))
}

/// Prints as JSON.
///
/// # Errors
/// As [`say`].
pub fn say_json(value: &impl serde::Serialize) -> Result<()> {
    say(&format!("{}\n", serde_json::to_string_pretty(value)?))
}
