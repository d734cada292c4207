//! Tables: one line per target, `START LEN TYPE ARGS...`, as dmsetup reads them.
//!
//! Blank lines and lines that begin with `#` are skipped. After the type, a `#` anywhere begins a
//! comment. Numbers are decimal. A number that exceeds 64 bits becomes the largest one, so that the
//! later check of sizes refuses it.
//!
//! Differences from dmsetup:
//!
//! * `\#` is a literal `#`.
//! * Numbers have no sign, and white space must follow them (dmsetup wraps `-1` and reads `0
//!   8linear`).
//! * A backslash quotes as in the kernel (dmsetup doubles it for the kernel, so it stands for
//!   itself).
//!
//! This module only parses. `udm-dm` checks order, gaps, overlap and known types.
//!
//! Bounds: [`TEXT_MAX`] bytes, [`LINES_MAX`] targets, [`TYPE_MAX`] bytes of type name,
//! [`WORDS_MAX`] words of arguments over all lines.

use crate::words::{
    WordSpan, WordSplitter, draw_carets_under_span, escape_table_word, is_c_space, quote_for_error_line,
};
use std::fmt;

/// The longest table text, in bytes.
pub const TEXT_MAX: usize = 64 << 20;
/// Maximum number of targets of a table (kernel `DM_MAX_TARGETS`).
pub const LINES_MAX: usize = 1_048_576;
/// The longest type name, in bytes (kernel `DM_MAX_TYPE_NAME`, less its NUL).
pub const TYPE_MAX: usize = 15;
/// Maximum number of argument words of a table, over all lines. It bounds the memory of a table
/// with short words.
pub const WORDS_MAX: usize = 4 << 20;

/// One target of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableLine {
    /// First sector of the mapped device that the target maps.
    pub start: u64,
    /// Number of sectors.
    pub len: u64,
    /// The type of target.
    pub kind: String,
    /// The words after the type, without escaping backslashes.
    pub args: Vec<String>,
    /// The number of the line in its text, from 1; skipped lines count.
    pub number: usize,
    /// The line as written, without its newline.
    pub text: String,
    /// Positions of START, LEN, TYPE and each argument in `text`.
    pub spans: Vec<WordSpan>,
}

impl TableLine {
    /// Creates a line from its parts. `kind` and the arguments must not be empty.
    pub fn new<W: Into<String>>(
        start: u64,
        len: u64,
        kind: &str,
        args: impl IntoIterator<Item = W>,
    ) -> TableLine {
        let args: Vec<String> = args.into_iter().map(Into::into).collect();
        let mut text = String::new();
        let mut spans = Vec::with_capacity(3 + args.len());
        let mut put = |word: &str| {
            if !text.is_empty() {
                text.push(' ');
            }
            let from = text.len();
            text.push_str(word);
            spans.push(WordSpan { start: from, end: text.len() });
        };
        put(&start.to_string());
        put(&len.to_string());
        put(kind);
        args.iter().for_each(|arg| put(&escape_table_word(arg)));
        TableLine { start, len, kind: kind.to_owned(), args, number: 1, text, spans }
    }

    /// The position of argument `arg` (from 0) in [`TableLine::text`]. If there is no such
    /// argument, a position after the last word.
    #[must_use]
    pub fn arg_span(&self, arg: usize) -> WordSpan {
        let end = self.spans.last().map_or(0, |last| last.end);
        self.spans.get(arg.saturating_add(3)).copied().unwrap_or(WordSpan { start: end + 1, end: end + 1 })
    }

    /// Two lines for an error: this line, and carets under argument `arg` (from 0), or after the
    /// last word if it is missing.
    #[must_use]
    pub fn caret(&self, arg: usize) -> String {
        draw_carets_under_span(&self.text, self.arg_span(arg))
    }
}

/// Prints the line with single spaces and without a comment.
impl fmt::Display for TableLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.start, self.len, self.kind)?;
        self.args.iter().try_for_each(|arg| write!(f, " {}", escape_table_word(arg)))
    }
}

/// The kind of a table error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableSyntaxErrorKind {
    /// A line that is not `START LEN TYPE ARGS...`.
    Format,
    /// A type name longer than [`TYPE_MAX`].
    LongType,
    /// The table exceeds a bound of this module.
    TooLarge,
}

/// The error of a text that is not a table: dmsetup's words and the precise reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableSyntaxError {
    /// The kind of error.
    pub fault: TableSyntaxErrorKind,
    /// Line number, from 1; 0 if no line is to blame.
    pub number: usize,
    /// The reason, in one line.
    pub reason: String,
    /// The line, as written.
    pub text: String,
    /// Position of the word to blame. If a word is missing, an empty range at its place.
    pub span: WordSpan,
}

impl TableSyntaxError {
    fn too_large(reason: String) -> TableSyntaxError {
        TableSyntaxError {
            fault: TableSyntaxErrorKind::TooLarge,
            number: 0,
            reason,
            text: String::new(),
            span: WordSpan::default(),
        }
    }

    /// dmsetup's own line for the error, where `source` is `on stdin` or the name of the file:
    /// `Invalid format on line 3 of table on stdin.`
    #[must_use]
    pub fn in_table(&self, source: &str) -> String {
        match self.fault {
            TableSyntaxErrorKind::Format => {
                format!("Invalid format on line {} of table {source}.", self.number)
            }
            TableSyntaxErrorKind::LongType | TableSyntaxErrorKind::TooLarge => self.reason.clone(),
        }
    }

    /// Two lines: the line with the error, and carets under the word.
    #[must_use]
    pub fn caret(&self) -> String {
        draw_carets_under_span(&self.text, self.span)
    }
}

impl fmt::Display for TableSyntaxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault {
            TableSyntaxErrorKind::Format => {
                write!(f, "Invalid format on line {} of table: {}", self.number, self.reason)
            }
            TableSyntaxErrorKind::LongType | TableSyntaxErrorKind::TooLarge => f.write_str(&self.reason),
        }
    }
}

impl std::error::Error for TableSyntaxError {}

/// True if `text` is meant as a table, not as the name of a device. A table has several lines, is
/// empty, or begins with a number or `#`.
#[must_use]
pub fn is_table_not_device_name(text: &str) -> bool {
    let first = text.split_whitespace().next().unwrap_or_default();
    text.trim().contains('\n')
        || first.is_empty()
        || first.starts_with('#')
        || first.bytes().all(|b| b.is_ascii_digit())
}

/// Parses a table. A text without targets gives an empty list; the caller decides what this means.
///
/// # Errors
/// The first invalid line, or a bound of this module that the text exceeds.
pub fn parse_table(text: &str) -> Result<Vec<TableLine>, TableSyntaxError> {
    if text.len() > TEXT_MAX {
        return Err(TableSyntaxError::too_large(format!("a table of more than {} MiB", TEXT_MAX >> 20)));
    }
    let mut lines = Vec::new();
    let mut words_left = WORDS_MAX;
    for (i, text) in text.split('\n').enumerate() {
        let Some(line) = parse_table_line(i + 1, text, &mut words_left)? else { continue };
        if lines.len() == LINES_MAX {
            return Err(TableSyntaxError::too_large(format!("a table of more than {LINES_MAX} targets")));
        }
        lines.push(line);
    }
    Ok(lines)
}

/// Parses one line; `None` if it has no target.
fn parse_table_line(
    number: usize,
    text: &str,
    words_left: &mut usize,
) -> Result<Option<TableLine>, TableSyntaxError> {
    let blame =
        |fault, span, reason| Err(TableSyntaxError { fault, number, reason, text: text.to_owned(), span });
    let refuse = |span, reason| blame(TableSyntaxErrorKind::Format, span, reason);
    if let Some(at) = text.find('\0') {
        return refuse(WordSpan { start: at, end: at + 1 }, "a NUL character".into());
    }
    let mut at = 0;
    let mut head = || {
        let span = find_word_ignoring_backslashes(text, at);
        at = span.end;
        (span, &text[span.start..span.end])
    };
    let (start_span, start) = head();
    if start.is_empty() || start.starts_with('#') {
        return Ok(None);
    }
    let (len_span, len) = head();
    let (kind_span, kind) = head();
    let mut numbers = [0; 2];
    for (number, (span, word, what)) in
        numbers.iter_mut().zip([(start_span, start, "START"), (len_span, len, "LEN")])
    {
        *number = match parse_saturating_decimal(word) {
            Some(n) => n,
            None if word.is_empty() => {
                return refuse(span, format!("no {what}; a line is START LEN TYPE ARGS..."));
            }
            None => {
                return refuse(
                    span,
                    format!("{what} {} is not a number of sectors", quote_for_error_line(word)),
                );
            }
        };
    }
    if kind.is_empty() {
        return refuse(kind_span, "no TYPE; a line is START LEN TYPE ARGS...".into());
    }
    if kind.len() > TYPE_MAX {
        let name = quote_for_error_line(kind);
        return blame(
            TableSyntaxErrorKind::LongType,
            kind_span,
            format!("Target type name {} is too long.", name.trim_matches('"')),
        );
    }
    let mut args = Vec::new();
    let mut spans = vec![start_span, len_span, kind_span];
    for word in WordSplitter::new(text, at, Some('#')) {
        if *words_left == 0 {
            return Err(TableSyntaxError::too_large(format!("a table of more than {WORDS_MAX} words")));
        }
        *words_left -= 1;
        args.push(word.text);
        spans.push(word.span);
    }
    let [start, len] = numbers;
    Ok(Some(TableLine { start, len, kind: kind.to_owned(), args, number, text: text.to_owned(), spans }))
}

/// The next word from byte `at` on; empty at the end. A backslash has no special meaning here.
fn find_word_ignoring_backslashes(text: &str, at: usize) -> WordSpan {
    let rest = &text[at..];
    let start = at + rest.find(|c| !is_c_space(c)).unwrap_or(rest.len());
    let rest = &text[start..];
    WordSpan { start, end: start + rest.find(is_c_space).unwrap_or(rest.len()) }
}

/// Parses an unsigned decimal without a sign. A too large number becomes the largest, as in C's
/// `scanf`.
fn parse_saturating_decimal(word: &str) -> Option<u64> {
    let digits = !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| word.parse().unwrap_or(u64::MAX))
}
