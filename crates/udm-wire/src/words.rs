//! Words of table lines and messages, split as the kernel does, with their positions.
//!
//! White space separates words (ASCII: space, tab, newline, vertical tab, form feed, carriage
//! return). A backslash makes the next character literal; at the end of the text, it stands for
//! itself. [`escape_table_word`] is the inverse for one word.

use std::borrow::Cow;

/// The position of a word: bytes `start..end` of the text that was split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WordSpan {
    /// First byte.
    pub start: usize,
    /// The byte after the last one.
    pub end: usize,
}

/// A word without its escaping backslashes, and its position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpannedWord {
    /// The text of the word.
    pub text: String,
    /// The position of the word, including backslashes.
    pub span: WordSpan,
}

/// White space as in C's `isspace`.
pub(crate) fn is_c_space(c: char) -> bool {
    matches!(c, ' ' | '\t'..='\r')
}

/// Splits a message into words.
#[must_use]
pub fn split_message_words(text: &str) -> Vec<String> {
    WordSplitter::new(text, 0, None).map(|word| word.text).collect()
}

/// The words of a text, one by one.
pub(crate) struct WordSplitter<'a> {
    text: &'a str,
    at: usize,
    comment: Option<char>,
}

impl<'a> WordSplitter<'a> {
    /// The words of `text` from byte `at` on. An unescaped `comment` character ends them.
    pub(crate) fn new(text: &'a str, at: usize, comment: Option<char>) -> WordSplitter<'a> {
        WordSplitter { text, at, comment }
    }
}

impl Iterator for WordSplitter<'_> {
    type Item = SpannedWord;

    fn next(&mut self) -> Option<SpannedWord> {
        let rest = self.text.get(self.at..)?;
        let start = self.at + rest.find(|c| !is_c_space(c)).unwrap_or(rest.len());
        let mut chars = self.text[start..].char_indices();
        let mut word = SpannedWord { text: String::new(), span: WordSpan { start, end: self.text.len() } };
        while let Some((i, c)) = chars.next() {
            if is_c_space(c) || Some(c) == self.comment {
                word.span.end = start + i;
                break;
            }
            match c {
                '\\' => word.text.push(chars.next().map_or(c, |(_, literal)| literal)),
                _ => word.text.push(c),
            }
        }
        self.at = word.span.end;
        // Nothing is left but white space or a comment.
        (word.span.end > start).then_some(word)
    }
}

/// The word as it must be written in a table or message: with a backslash before white space,
/// backslash and `#`.
#[must_use]
pub fn escape_table_word(word: &str) -> Cow<'_, str> {
    let special = |c: char| is_c_space(c) || c == '\\' || c == '#';
    if !word.contains(special) {
        return Cow::Borrowed(word);
    }
    let mut out = String::with_capacity(word.len() + 4);
    for c in word.chars() {
        if special(c) {
            out.push('\\');
        }
        out.push(c);
    }
    Cow::Owned(out)
}

/// Maximum number of columns in the first line of [`draw_carets_under_span`]; a longer line is cut.
const CARET_WIDTH: usize = 120;

/// Returns two lines: `line`, and carets under its `span`. There is at least one caret, so a span
/// at the end shows the place of a missing word.
///
/// A long line is cut around the span. Tabs are kept, so that the carets are in the right columns.
/// Other control characters are shown as `?`, because the text may be hostile and goes to a
/// terminal. A span outside the line, or inside a character, is moved to a valid position.
#[must_use]
pub fn draw_carets_under_span(line: &str, span: WordSpan) -> String {
    let line = line.trim_end_matches('\r');
    let column = |byte: usize| line.char_indices().take_while(|(i, _)| *i < byte).count();
    let clean = |c: char| if c != '\t' && c.is_control() { '?' } else { c };
    let chars: Vec<char> = line.chars().map(clean).collect();
    let start = column(span.start);
    let end = column(span.end.max(span.start)).max(start + 1);

    let from = if chars.len() <= CARET_WIDTH { 0 } else { start.saturating_sub(CARET_WIDTH / 2) };
    let to = chars.len().min(from + CARET_WIDTH);
    let (head, tail) = (if from > 0 { "..." } else { "" }, if to < chars.len() { "..." } else { "" });
    let shown: String = chars[from..to].iter().collect();
    let pad: String = head
        .chars()
        .map(|_| ' ')
        .chain(chars[from..start].iter().map(|c| if *c == '\t' { '\t' } else { ' ' }))
        .collect();
    let marks = "^".repeat(end.min(to.max(start + 1)) - start);
    format!("{head}{shown}{tail}\n{pad}{marks}")
}

/// `text` for a one-line error: quoted, control characters escaped, cut at 64 characters.
#[must_use]
pub fn quote_for_error_line(text: &str) -> String {
    match text.char_indices().nth(64) {
        None => format!("\"{}\"", text.escape_debug()),
        Some((cut, _)) => format!("\"{}...\"", text[..cut].escape_debug()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_split_as_the_kernel_does() {
        assert_eq!(split_message_words(" a  b\tc\u{b}d\r\n"), ["a", "b", "c", "d"]);
        assert_eq!(split_message_words(r"a\ b \\ c\d \# #"), ["a b", r"\", "cd", "#", "#"]);
        assert_eq!(split_message_words(r"end\"), [r"end\"]);
        assert_eq!(split_message_words(" \n"), [""; 0]);
    }

    #[test]
    fn spans_cover_the_backslashes() {
        let text = r"  a\ b  c#d";
        let spans: Vec<_> =
            WordSplitter::new(text, 0, Some('#')).map(|w| &text[w.span.start..w.span.end]).collect();
        assert_eq!(spans, [r"a\ b", "c"]);
    }

    #[test]
    fn carets_stand_under_the_word() {
        let text = "0 8\tlinear bogus 0";
        let span = WordSplitter::new(text, 0, None).nth(3).unwrap().span;
        assert_eq!(draw_carets_under_span(text, span), "0 8\tlinear bogus 0\n   \t       ^^^^^");
        assert_eq!(
            draw_carets_under_span("0 8", WordSpan { start: 3, end: 3 }),
            "0 8\n   ^",
            "what is missing"
        );
        assert_eq!(draw_carets_under_span("0 8", WordSpan { start: 30, end: 2 }), "0 8\n   ^");
        assert_eq!(draw_carets_under_span("a\u{1b}b", WordSpan { start: 2, end: 3 }), "a?b\n  ^");
    }

    #[test]
    fn a_long_line_is_cut_around_the_caret() {
        let text = format!("{} bogus {}", "x ".repeat(500_000), "y ".repeat(500_000));
        let at = text.find("bogus").unwrap();
        let out = draw_carets_under_span(&text, WordSpan { start: at, end: at + 5 });
        let (line, marks) = out.split_once('\n').unwrap();
        assert!(line.len() <= CARET_WIDTH + 6, "{}", line.len());
        assert_eq!(line.find("bogus"), marks.find('^'));
        assert_eq!(marks.trim_start(), "^^^^^");
    }
}
