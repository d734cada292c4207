//! Text in columns of a terminal, safe for any content.
//!
//! Contract: no text from a name reaches the terminal as a command, widens its column, or changes
//! the direction of the line.

use crate::output::is_unsafe_char;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// The style of a piece of text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TextStyle {
    /// Normal text.
    #[default]
    Plain,
    /// Less important text.
    Dim,
    /// A heading.
    Head,
    /// A good state.
    Good,
    /// A state that needs attention.
    Warn,
    /// An error.
    Bad,
}

/// A line of the screen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScreenLine {
    /// Pieces of text with their styles.
    pub pieces: Vec<(String, TextStyle)>,
    /// The line is selected.
    pub chosen: bool,
}

impl ScreenLine {
    /// A line of one piece.
    pub fn new(text: impl Into<String>, style: TextStyle) -> ScreenLine {
        ScreenLine { pieces: vec![(text.into(), style)], chosen: false }
    }

    /// Appends a piece.
    pub fn push(&mut self, text: impl Into<String>, style: TextStyle) {
        self.pieces.push((text.into(), style));
    }

    /// The plain text without trailing blanks.
    pub fn text(&self) -> String {
        let text: String = self.pieces.iter().map(|(text, _)| text.as_str()).collect();
        text.trim_end().to_owned()
    }

    /// The line for a terminal of `width` columns; without `colour` only bold, dim and reverse are
    /// used.
    pub fn ansi(&self, width: usize, colour: bool) -> String {
        let mut out = String::from(if self.chosen { "\x1b[7m" } else { "" });
        let mut left = width;
        for (text, style) in &self.pieces {
            let text = truncate_to_width(text, left);
            left -= text.width().min(left);
            let code = match (style, colour) {
                (TextStyle::Plain, _) | (TextStyle::Good | TextStyle::Warn, false) => "",
                (TextStyle::Dim, _) => "2",
                (TextStyle::Head, _) | (TextStyle::Bad, false) => "1",
                (TextStyle::Good, true) => "32",
                (TextStyle::Warn, true) => "33",
                (TextStyle::Bad, true) => "31",
            };
            match code {
                "" => out.push_str(&text),
                code => {
                    out.push_str(&format!("\x1b[{code}m{text}\x1b[0m"));
                    out.push_str(if self.chosen { "\x1b[7m" } else { "" });
                }
            }
        }
        if self.chosen {
            out.push_str(&" ".repeat(left));
            out.push_str("\x1b[0m");
        }
        out
    }
}

/// Replaces unsafe characters in `text` by U+FFFD.
pub fn sanitize(text: &str) -> String {
    text.chars().map(|c| if is_unsafe_char(c) { '\u{fffd}' } else { c }).collect()
}

/// The longest prefix of `text` that fits into `width` columns.
fn truncate_to_width(text: &str, width: usize) -> String {
    let mut used = 0;
    let fits = |c: &char| {
        used += c.width().unwrap_or(0);
        used <= width
    };
    text.chars().take_while(fits).collect()
}

/// The sanitized end of `text` in at most `width` columns; a mark shows that the beginning is cut.
pub fn truncate_start_to_width(text: &str, width: usize) -> String {
    let text = sanitize(text);
    if text.width() <= width {
        return text;
    }
    let backwards: String = text.chars().rev().collect();
    let end: String = truncate_to_width(&backwards, width.saturating_sub(1)).chars().rev().collect();
    format!("…{end}")
}

/// The sanitized `text`, left-aligned in `width` columns; a mark shows that the end is cut.
pub fn align_left(text: &str, width: usize) -> String {
    let text = sanitize(text);
    let mut out = if text.width() > width {
        let mut out = truncate_to_width(&text, width.saturating_sub(1));
        out.push('…');
        out
    } else {
        text
    };
    let gap = width.saturating_sub(out.width());
    out.push_str(&" ".repeat(gap));
    out
}

/// The same as [`align_left`], but right-aligned.
pub fn align_right(text: &str, width: usize) -> String {
    let out = align_left(text, width);
    let text = out.trim_end();
    format!("{}{text}", " ".repeat(width.saturating_sub(text.width())))
}

/// A number in at most five columns: `0`, `7.2`, `120`, `12.3k`, `1.2M`.
pub fn format_short_count(n: f64) -> String {
    format_with_unit_prefix(n, 1000.0, ["", "k", "M", "G", "T", "P", "E"])
}

/// Bytes in at most five columns, in powers of 1024.
pub fn format_short_bytes(n: f64) -> String {
    format_with_unit_prefix(n, 1024.0, ["", "K", "M", "G", "T", "P", "E"])
}

fn format_with_unit_prefix(n: f64, step: f64, units: [&str; 7]) -> String {
    let (mut n, mut unit) = (n.max(0.0), 0);
    // A number that would round to four digits gets the next unit.
    while n >= 999.5 && unit + 1 < units.len() {
        n /= step;
        unit += 1;
    }
    let figures = if n == 0.0 || n >= 99.95 || unit == 0 && n.fract() == 0.0 { 0 } else { 1 };
    format!("{n:.figures$}{}", units[unit])
}

/// A time: `830ns`, `1.2ms`, `34s`.
pub fn format_latency_ns(ns: u64) -> String {
    let (n, unit) = match ns {
        0..1_000 => return format!("{ns}ns"),
        1_000..999_500 => (ns as f64 / 1e3, "us"),
        999_500..999_500_000 => (ns as f64 / 1e6, "ms"),
        _ => (ns as f64 / 1e9, "s"),
    };
    let figures = if n >= 9.95 { 0 } else { 1 };
    format!("{n:.figures$}{unit}")
}

/// A duration: `12s`, `3m04s`, `5h06m`, `7d08h`.
pub fn format_uptime_ns(ns: u64) -> String {
    let seconds = ns / 1_000_000_000;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86400 => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86400, seconds / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (n, expected) in [
            (0.0, "0"),
            (7.0, "7"),
            (7.25, "7.2"),
            (99.96, "100"),
            (999.4, "999"),
            (999.6, "1.0k"),
            (12_345.0, "12.3k"),
            (999_600.0, "1.0M"),
            (1e30, "1000000000000E"),
            (-1.0, "0"),
        ] {
            assert_eq!(format_short_count(n), expected, "{n}");
        }
        assert_eq!(
            [format_short_bytes(512.0), format_short_bytes(1024.0), format_short_bytes(1536.0 * 1024.0)],
            ["512", "1.0K", "1.5M"]
        );
        for (ns, expected) in [
            (0, "0ns"),
            (999, "999ns"),
            (1_000, "1.0us"),
            (9_960, "10us"),
            (999_499, "999us"),
            (999_500, "1.0ms"),
            (999_499_999, "999ms"),
            (34_359_738_368, "34s"),
        ] {
            assert_eq!(format_latency_ns(ns), expected, "{ns}");
        }
        assert_eq!([format_uptime_ns(0), format_uptime_ns(3_723 * 1_000_000_000)], ["0s", "1h02m"]);
    }

    #[test]
    fn names_can_do_nothing_to_the_terminal() {
        for bad in ["\x1b[2Jx", "a\nb", "a\u{9b}31mb", "\u{202e}abc", "\u{200b}", "a\rb", "\u{7f}", "\t"] {
            for text in [align_left(bad, 10), align_right(bad, 10)] {
                assert!(!text.chars().any(is_unsafe_char) && text.width() == 10, "{bad:?}: {text:?}");
            }
            let line = ScreenLine::new(align_left(bad, 10), TextStyle::Bad).ansi(80, false);
            assert_eq!(line.matches('\x1b').count(), 2, "{line:?}");
        }
        // Wide characters and combining characters.
        for (text, expected) in
            [("日本語日本語", "日本語日… "), ("e\u{301}\u{301}xyz", "e\u{301}\u{301}xyz      ")]
        {
            assert_eq!((align_left(text, 10).as_str(), align_left(text, 10).width()), (expected, 10));
        }
        assert_eq!((align_left("abc", 0).width(), align_left("abc", 2)), (1, "a…".into()));
    }

    #[test]
    fn a_line_is_cut_and_coloured() {
        let mut line = ScreenLine::new("abc", TextStyle::Bad);
        line.push("def", TextStyle::Plain);
        assert_eq!(line.ansi(4, true), "\x1b[31mabc\x1b[0md");
        assert_eq!(line.ansi(2, false), "\x1b[1mab\x1b[0m");
        line.chosen = true;
        assert_eq!(line.ansi(8, false), "\x1b[7m\x1b[1mabc\x1b[0m\x1b[7mdef  \x1b[0m");
        assert_eq!(line.text(), "abcdef");
    }
}
