//! Errors of verbs.

use rustix::process::{Resource, getrlimit};
use std::fmt;
use udm_core::errno::{EMFILE, ENXIO};
use udm_dm::TargetError;
use udm_wire::words::{WordSpan, draw_carets_under_span};

/// Error of a verb: the device, the kernel's error, and the position of the fault in a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerbError {
    /// The device, as the caller named it.
    pub device: String,
    /// The error, in the kernel's words.
    pub error: Box<TargetError>,
    /// The position in the table's text.
    pub position: Option<TextPosition>,
    /// True if the device itself does not exist, rather than something that it needs.
    pub missing: bool,
    /// True if the device waits until a snapshot of its disk is attached; the verb can be retried
    /// after that.
    pub blocked: bool,
}

/// A position in the text of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextPosition {
    /// The line, from 1.
    pub line: usize,
    /// First character of the fault, from 1.
    pub column: usize,
    /// Number of characters of the fault, at least 1.
    pub width: usize,
}

impl TextPosition {
    /// The line of `table` with the position, and carets below it. `None` if the table has no such
    /// line.
    #[must_use]
    pub fn mark(self, table: &str) -> Option<String> {
        let line = table.split('\n').nth(self.line.checked_sub(1)?)?;
        let line = line.strip_suffix('\r').unwrap_or(line);
        // The position counts characters, the span counts bytes.
        let byte = |column: usize| line.char_indices().nth(column).map_or(line.len(), |(i, _)| i);
        let from = self.column.saturating_sub(1);
        Some(draw_carets_under_span(
            line,
            WordSpan { start: byte(from), end: byte(from.saturating_add(self.width)) },
        ))
    }
}

impl VerbError {
    /// `error` of the verb for `device`.
    pub fn new(device: impl Into<String>, mut error: TargetError) -> VerbError {
        if error.errno.abs() == EMFILE {
            let colon = if error.reason.is_empty() { "" } else { ": " };
            error.reason += &format!("{colon}{}", open_files_hint());
        }
        VerbError {
            device: device.into(),
            error: Box::new(error),
            position: None,
            missing: false,
            blocked: false,
        }
    }

    /// ENXIO for an unknown name, as in the kernel.
    pub fn missing(device: impl Into<String>) -> VerbError {
        let device = device.into();
        let is_pattern = device.contains(['*', '?', '[']);
        let hint = if is_pattern { "; a name is not a pattern" } else { "" };
        let error = TargetError::errno(ENXIO).because(format!("no device of that name{hint}"));
        VerbError { missing: true, ..VerbError::new(device, error) }
    }

    /// Sets the position in the table's text.
    #[must_use]
    pub fn at(self, position: Option<TextPosition>) -> VerbError {
        VerbError { position, ..self }
    }

    /// The error text; with a position, also the line of `table` and carets below the fault.
    #[must_use]
    pub fn with_table(&self, table: &str) -> String {
        match self.position.and_then(|position| position.mark(table)) {
            Some(mark) => format!("{self}\n{mark}"),
            None => self.to_string(),
        }
    }
}

/// Prints one line: control characters quoted from the request are escaped.
impl fmt::Display for VerbError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&escape_control_chars(&format!("{}: {}", self.device, self.error)))
    }
}

/// Hint about the limit of open files. The server has raised its soft limit to the hard limit
/// already.
fn open_files_hint() -> String {
    let limit = getrlimit(Resource::Nofile).current.map_or("any number of".into(), |n| n.to_string());
    format!(
        "the server may have {limit} files open; raise the hard limit before it starts, with `ulimit -Hn` or \
         LimitNOFILE= in its unit"
    )
}

/// `text` with its control characters escaped.
pub(crate) fn escape_control_chars(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { line.extend(c.escape_debug()) } else { line.push(c) }
    }
    line
}

impl std::error::Error for VerbError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(line: usize, column: usize, width: usize) -> TextPosition {
        TextPosition { line, column, width }
    }

    #[test]
    fn under_the_word() {
        let table = "# a comment\r\n0 8 lineär x y\n";
        assert_eq!(at(2, 12, 1).mark(table).unwrap(), "0 8 lineär x y\n           ^");
        assert_eq!(at(2, 5, 6).mark(table).unwrap(), "0 8 lineär x y\n    ^^^^^^");
        assert_eq!(at(2, 99, 1).mark(table).unwrap(), "0 8 lineär x y\n              ^", "behind the end");
    }

    #[test]
    fn nonsense_places_are_harmless() {
        assert_eq!(at(0, 1, 1).mark("0 8 error"), None);
        assert_eq!(at(2, 1, 1).mark("0 8 error"), None);
        assert!(at(1, usize::MAX, usize::MAX).mark("0 8 error").is_some());
        assert!(at(1, 0, 0).mark("0 8 error").is_some());
    }
}
