//! Standard output.

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{BufWriter, Error, ErrorKind, StdoutLock, Write};
use std::time::Duration;
use tokio::sync::oneshot;

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

/// So many of them: `1 client`, `2 clients`.
pub fn count_noun(count: u64, one: &str) -> String {
    format!("{count} {one}{}", if count == 1 { "" } else { "s" })
}

/// Prints as JSON.
///
/// # Errors
/// As [`say`].
pub fn say_json(value: &impl serde::Serialize) -> Result<()> {
    say(&format!("{}\n", serde_json::to_string_pretty(value)?))
}

/// Waits for so long; true, and at once, when the reader of a pipe has gone. It would never be told
/// so while nothing is printed.
pub fn reader_closed(within: Option<Duration>) -> bool {
    let out = std::io::stdout();
    let mut fds = [PollFd::new(&out, PollFlags::empty())];
    let within = within.and_then(|within| Timespec::try_from(within).ok());
    poll(&mut fds, within.as_ref()).is_ok() && fds[0].revents().contains(PollFlags::ERR)
}

/// Comes to an end when the reader of a pipe has gone. A thread waits for it, for as long as the
/// program lives.
pub async fn reader_closed_async() {
    let (tell, told) = oneshot::channel();
    std::thread::spawn(move || {
        while !reader_closed(None) {}
        // Nobody may listen any more.
        let _ = tell.send(());
    });
    // It is told before the other end goes.
    let _ = told.await;
}
