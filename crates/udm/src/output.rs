//! Standard output.

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{BufWriter, Error, ErrorKind, StdoutLock, Write};
use std::time::Duration;
use tokio::sync::oneshot;
use udm_bench::units::format_with_binary_prefix;

/// Calls `print` with standard output. A reader that has closed the pipe is not an error.
///
/// # Errors
/// Errors of `print`, and errors when writing to standard output.
pub fn with_stdout_ignoring_epipe(
    print: impl FnOnce(&mut BufWriter<StdoutLock<'_>>) -> Result<()>,
) -> Result<()> {
    let mut out = BufWriter::new(std::io::stdout().lock());
    let printed = print(&mut out).and_then(|()| out.flush().context("standard output"));
    match printed {
        Err(e) if e.downcast_ref::<Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) => Ok(()),
        other => other,
    }
}

/// True for control characters, invisible characters, and those that change the direction of text.
pub fn is_unsafe_char(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
}

/// Replaces unsafe characters in `text`, except line feeds and tabs, by U+FFFD. What a server says
/// is printed on a terminal, and the server may have been taken over.
pub fn sanitize_lines(text: &str) -> String {
    let is_kept = |c: char| matches!(c, '\n' | '\t') || !is_unsafe_char(c);
    text.chars().map(|c| if is_kept(c) { c } else { '\u{fffd}' }).collect()
}

/// Prints a text to standard output, as [`sanitize_lines`] has it.
///
/// # Errors
/// Errors when writing to standard output.
pub fn print_to_stdout(text: &str) -> Result<()> {
    with_stdout_ignoring_epipe(|out| {
        out.write_all(sanitize_lines(text).as_bytes()).context("standard output")
    })
}

/// A count with its noun: `1 client`, `2 clients`.
pub fn count_noun(count: u64, one: &str) -> String {
    format!("{count} {one}{}", if count == 1 { "" } else { "s" })
}

/// Formats bytes with a binary unit and at most four digits.
pub fn format_bytes(bytes: u64) -> String {
    format_with_binary_prefix(bytes as f64, 4)
}

/// Formats rows as lines whose columns stand below each other. The columns in `numbers` are aligned
/// to the right.
pub fn align_rows<const N: usize>(rows: &[[String; N]], numbers: &[usize]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let cell = |(column, text): (usize, &String)| match numbers.contains(&column) {
        true => format!("{text:>0$}", widths[column]),
        false => format!("{text:<0$}", widths[column]),
    };
    let line = |row: &[String; N]| row.iter().enumerate().map(cell).collect::<Vec<_>>().join("  ");
    rows.iter().map(|row| line(row).trim_end().to_owned()).collect()
}

/// Prints a value as JSON. Control characters are escaped.
///
/// # Errors
/// As [`print_to_stdout`].
pub fn print_json_to_stdout(value: &impl serde::Serialize) -> Result<()> {
    // serde_json leaves those above U+007E as they are. They stand in strings only.
    let mut text = String::new();
    for c in serde_json::to_string_pretty(value)?.chars() {
        if is_unsafe_char(c) && c != '\n' {
            c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| text.push_str(&format!("\\u{unit:04x}")));
        } else {
            text.push(c);
        }
    }
    text.push('\n');
    print_to_stdout(&text)
}

/// Waits until the reader of standard output has closed the pipe, and returns true, or returns
/// false after `within`. A program that prints nothing would not notice otherwise.
pub fn wait_stdout_pipe_closed(within: Option<Duration>) -> bool {
    let out = std::io::stdout();
    let mut fds = [PollFd::new(&out, PollFlags::empty())];
    let within = within.and_then(|within| Timespec::try_from(within).ok());
    poll(&mut fds, within.as_ref()).is_ok() && fds[0].revents().contains(PollFlags::ERR)
}

/// Completes when the reader of standard output has closed the pipe. A thread waits for it until
/// the program ends.
pub async fn wait_stdout_pipe_closed_async() {
    let (sender, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        while !wait_stdout_pipe_closed(None) {}
        // The receiver may have been dropped.
        let _ = sender.send(());
    });
    // The sender always sends before it is dropped.
    let _ = receiver.await;
}
