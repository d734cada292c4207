//! Tables: one line a target, `START LEN TYPE ARGS...`, as dmsetup reads them.
//!
//! Blank lines and lines that begin with `#` are skipped; behind the type a `#` begins a comment
//! wherever it stands. Numbers are decimal; one that is too large for 64 bits counts as the
//! largest, for the table's own check of sizes to refuse. Where udm differs from dmsetup: `\#` is a
//! literal `#`, numbers have no sign, and white space must stand behind them (dmsetup wraps `-1`
//! and reads `0 8linear`), and a backslash quotes as in the kernel (dmsetup doubles it on the way
//! there, so that it stands for itself). Order, gaps, overlap and known types are that check's too
//! (`udm-dm`): this module only reads.
//!
//! Bounds: [`TEXT_MAX`] bytes, [`LINES_MAX`] targets, [`TYPE_MAX`] bytes of type name,
//! [`WORDS_MAX`] words of arguments over all lines.

use crate::words::{Span, Words, caret, escape, is_space, shown};
use std::fmt;

/// The longest table text, in bytes.
pub const TEXT_MAX: usize = 64 << 20;
/// The most targets of a table (kernel `DM_MAX_TARGETS`).
pub const LINES_MAX: usize = 1_048_576;
/// The longest type name, in bytes (kernel `DM_MAX_TYPE_NAME`, less its NUL).
pub const TYPE_MAX: usize = 15;
/// The most argument words of a table, over all lines: it bounds what a table of short words costs
/// in memory.
pub const WORDS_MAX: usize = 4 << 20;

/// One target of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableLine {
    /// First sector of the mapped device that the target maps.
    pub start: u64,
    /// How many sectors.
    pub len: u64,
    /// The type of target.
    pub kind: String,
    /// The words behind the type, backslashes taken off.
    pub args: Vec<String>,
    /// The number of the line in its text, from 1; skipped lines count.
    pub number: usize,
    /// The line as written, without its newline.
    pub text: String,
    /// Where START, LEN, TYPE and each of the arguments stand in `text`.
    pub spans: Vec<Span>,
}

impl TableLine {
    /// A line that was not read but made. `kind` and the arguments are not empty.
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
            spans.push(Span { start: from, end: text.len() });
        };
        put(&start.to_string());
        put(&len.to_string());
        put(kind);
        args.iter().for_each(|arg| put(&escape(arg)));
        TableLine { start, len, kind: kind.to_owned(), args, number: 1, text, spans }
    }

    /// Where argument `arg` (from 0) stands in [`TableLine::text`]; the end of the last word when there
    /// are not so many.
    #[must_use]
    pub fn arg_span(&self, arg: usize) -> Span {
        let end = self.spans.last().map_or(0, |last| last.end);
        self.spans.get(arg.saturating_add(3)).copied().unwrap_or(Span { start: end + 1, end: end + 1 })
    }

    /// Two lines for an error: this line, and carets under argument `arg` (from 0), or behind the
    /// last when it is missing.
    #[must_use]
    pub fn caret(&self, arg: usize) -> String {
        caret(&self.text, self.arg_span(arg))
    }
}

/// The line as one would write it: single blanks, no comment.
impl fmt::Display for TableLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.start, self.len, self.kind)?;
        self.args.iter().try_for_each(|arg| write!(f, " {}", escape(arg)))
    }
}

/// What is wrong with a text that is no table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableFault {
    /// A line that is not `START LEN TYPE ARGS...`.
    Format,
    /// A type name longer than [`TYPE_MAX`].
    LongType,
    /// The table as a whole is beyond a bound of this module.
    TooLarge,
}

/// Why a text is no table: dmsetup's words and the precise reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableSyntaxError {
    /// Of which kind it is.
    pub fault: TableFault,
    /// The number of the line, from 1; 0 when no line is to blame.
    pub number: usize,
    /// What is wrong, in one line.
    pub reason: String,
    /// The line, as written.
    pub text: String,
    /// The word to blame; empty, at its place, when one is missing.
    pub span: Span,
}

impl TableSyntaxError {
    fn too_large(reason: String) -> TableSyntaxError {
        TableSyntaxError {
            fault: TableFault::TooLarge,
            number: 0,
            reason,
            text: String::new(),
            span: Span::default(),
        }
    }

    /// dmsetup's own line for it, where `source` is `on stdin` or the name of the file:
    /// `Invalid format on line 3 of table on stdin.`
    #[must_use]
    pub fn in_table(&self, source: &str) -> String {
        match self.fault {
            TableFault::Format => format!("Invalid format on line {} of table {source}.", self.number),
            TableFault::LongType | TableFault::TooLarge => self.reason.clone(),
        }
    }

    /// Two lines: the line at fault, and carets under the word.
    #[must_use]
    pub fn caret(&self) -> String {
        caret(&self.text, self.span)
    }
}

impl fmt::Display for TableSyntaxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault {
            TableFault::Format => {
                write!(f, "Invalid format on line {} of table: {}", self.number, self.reason)
            }
            TableFault::LongType | TableFault::TooLarge => f.write_str(&self.reason),
        }
    }
}

impl std::error::Error for TableSyntaxError {}

/// True if `text` is meant as a table, and not as a device that is to be served as it is. A table
/// begins with a number, or with what makes a line none; a device does not, and has one line.
#[must_use]
pub fn is_table(text: &str) -> bool {
    let first = text.split_whitespace().next().unwrap_or_default();
    text.trim().contains('\n')
        || first.is_empty()
        || first.starts_with('#')
        || first.bytes().all(|b| b.is_ascii_digit())
}

/// Reads a table. A text without targets is an empty list: what that means is the caller's to say.
///
/// # Errors
/// The first line that is none, or a bound of this module that the text is beyond.
pub fn parse(text: &str) -> Result<Vec<TableLine>, TableSyntaxError> {
    if text.len() > TEXT_MAX {
        return Err(TableSyntaxError::too_large(format!("a table of more than {} MiB", TEXT_MAX >> 20)));
    }
    let mut lines = Vec::new();
    let mut words_left = WORDS_MAX;
    for (i, text) in text.split('\n').enumerate() {
        let Some(line) = parse_line(i + 1, text, &mut words_left)? else { continue };
        if lines.len() == LINES_MAX {
            return Err(TableSyntaxError::too_large(format!("a table of more than {LINES_MAX} targets")));
        }
        lines.push(line);
    }
    Ok(lines)
}

/// Reads one line; `None` when there is no target on it.
fn parse_line(
    number: usize,
    text: &str,
    words_left: &mut usize,
) -> Result<Option<TableLine>, TableSyntaxError> {
    let blame =
        |fault, span, reason| Err(TableSyntaxError { fault, number, reason, text: text.to_owned(), span });
    let refuse = |span, reason| blame(TableFault::Format, span, reason);
    if let Some(at) = text.find('\0') {
        return refuse(Span { start: at, end: at + 1 }, "a NUL character".into());
    }
    let mut at = 0;
    let mut head = || {
        let span = raw_word(text, at);
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
        *number = match decimal(word) {
            Some(n) => n,
            None if word.is_empty() => {
                return refuse(span, format!("no {what}; a line is START LEN TYPE ARGS..."));
            }
            None => return refuse(span, format!("{what} {} is not a number of sectors", shown(word))),
        };
    }
    if kind.is_empty() {
        return refuse(kind_span, "no TYPE; a line is START LEN TYPE ARGS...".into());
    }
    if kind.len() > TYPE_MAX {
        let name = shown(kind);
        return blame(
            TableFault::LongType,
            kind_span,
            format!("Target type name {} is too long.", name.trim_matches('"')),
        );
    }
    let mut args = Vec::new();
    let mut spans = vec![start_span, len_span, kind_span];
    for word in Words::new(text, at, Some('#')) {
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

/// The next word from byte `at` on, in which a backslash is a character like any other; empty at
/// the end.
fn raw_word(text: &str, at: usize) -> Span {
    let rest = &text[at..];
    let start = at + rest.find(|c| !is_space(c)).unwrap_or(rest.len());
    let rest = &text[start..];
    Span { start, end: start + rest.find(is_space).unwrap_or(rest.len()) }
}

/// An unsigned decimal without a sign; too large ones become the largest, as C's `scanf` makes
/// them.
fn decimal(word: &str) -> Option<u64> {
    let digits = !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| word.parse().unwrap_or(u64::MAX))
}
