//! Regular expressions of libdevmapper: `.`, `[...]`, `^`, `$`, `( )`, `|`, `*`, `+`, `?` and `\`,
//! over bytes, not anchored.
//!
//! Contract: an expression that both libdevmapper and udm accept matches the same values. In
//! libdevmapper the begin and the end of a value are characters, which `.` and `[^...]` match as
//! well: `.foo` matches `foo`.

use regex_automata::nfa::thompson::{Config, pikevm::PikeVM};
use regex_automata::util::syntax;
use std::fmt::Write as _;

/// The bytes that represent the begin and the end of a value.
const ENDS: [u8; 2] = [2, 3];
/// Maximum depth of nested groups, and maximum length of an expression in bytes.
const DEPTH_MAX: usize = 100;
const LEN_MAX: usize = 10_000;

/// A regular expression.
#[derive(Debug)]
pub struct Regex(PikeVM);

impl Regex {
    /// Parses an expression; returns `None` if it is invalid.
    pub fn new(text: &str) -> Option<Regex> {
        let pattern = to_rust_regex(text.as_bytes())?;
        let mut builder = PikeVM::builder();
        builder.syntax(syntax::Config::new().unicode(false).utf8(false));
        builder.thompson(Config::new().utf8(false));
        builder.build(&pattern).ok().map(Regex)
    }

    pub fn is_match(&self, value: &str) -> bool {
        let value = [&ENDS[..1], value.as_bytes(), &ENDS[1..]].concat();
        self.0.is_match(&mut self.0.create_cache(), &value)
    }
}

/// Translates an expression to the syntax of `regex-syntax`.
fn to_rust_regex(text: &[u8]) -> Option<String> {
    let mut out = String::new();
    let mut bytes = text.iter().copied().peekable();
    // `is_term`: the text so far ends with a term that can be repeated.
    let (mut is_term, mut depth) = (false, 0);
    if text.len() > LEN_MAX {
        return None;
    }
    while let Some(byte) = bytes.next() {
        match byte {
            b'(' => {
                depth += 1;
                is_term = false;
                out.push_str("(?:");
                if depth > DEPTH_MAX {
                    return None;
                }
                continue;
            }
            b'|' | b')' | b'*' | b'+' | b'?' if !is_term => return None,
            b'|' => {
                is_term = false;
                out.push('|');
                continue;
            }
            b')' if depth == 0 => return None,
            b')' => {
                depth -= 1;
                out.push(')');
            }
            b'*' | b'+' | b'?' => {
                // Adjacent operators act as one: `a+?` repeats `a+`.
                let mut all = byte;
                while let Some(next) = bytes.next_if(|next| b"*+?".contains(next)) {
                    all = if next == all { all } else { b'*' };
                }
                out.push(char::from(all));
            }
            b'.' => out.push_str(r"[^\n\r\x00]"),
            b'[' => parse_regex_char_class(&mut bytes, &mut out)?,
            b'^' => push_hex_escaped_byte(ENDS[0], &mut out),
            b'$' => push_hex_escaped_byte(ENDS[1], &mut out),
            b'\\' => push_hex_escaped_byte(unescape_regex_byte(bytes.next()?), &mut out),
            byte => push_hex_escaped_byte(byte, &mut out),
        }
        is_term = true;
    }
    (is_term && depth == 0).then_some(out)
}

fn unescape_regex_byte(byte: u8) -> u8 {
    match byte {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        byte => byte,
    }
}

fn push_hex_escaped_byte(byte: u8, out: &mut String) {
    // Writing to a String can't fail.
    let _ = write!(out, r"\x{byte:02x}");
}

/// Parses a class after `[`, up to and including `]`. A range may be in reverse order, and `]` may
/// be its end.
fn parse_regex_char_class(bytes: &mut impl Iterator<Item = u8>, out: &mut String) -> Option<()> {
    let mut members = Vec::new();
    let mut byte = bytes.next()?;
    let is_not = byte == b'^';
    if is_not {
        byte = bytes.next()?;
    }
    let mut last = None;
    while byte != b']' {
        let found = match (byte, last) {
            (b'\\', _) => unescape_regex_byte(bytes.next()?),
            (b'-', Some(last)) => {
                let end = bytes.next()?;
                members.extend(end.min(last)..=end.max(last));
                end.max(last)
            }
            (byte, _) => byte,
        };
        members.push(found);
        last = Some(found);
        byte = bytes.next()?;
    }
    if is_not {
        members.push(0);
    }
    out.push_str(match (is_not, members.is_empty()) {
        (true, _) => "[^",
        (false, false) => "[",
        // The empty class: it matches nothing.
        (false, true) => r"[^\x00-\xff",
    });
    members.iter().for_each(|byte| push_hex_escaped_byte(*byte, out));
    out.push(']');
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Results of dmsetup 1.02.185 for `splitname VALUE -S vg_name=~"TEXT"`.
    #[test]
    fn what_matches() {
        for (text, value, expected) in [
            ("^f", "foo", true),
            ("^b", "foo", false),
            ("o$", "foo", true),
            ("f$", "foo", false),
            ("^$", "foo", false),
            (".foo", "foo", true),
            ("..foo", "foo", false),
            ("[^x]foo", "foo", true),
            ("foo.", "foo", true),
            ("^.oo", "foo", true),
            ("o{2}", "foo", false),
            (r"\d", "food", true),
            ("a|o", "foo", true),
            ("(f|x)(o|x)+$", "foo", true),
            ("a+?foo", "foo", true),
            ("^a??f", "foo", true),
            ("[a-g]oo", "foo", true),
            ("[g-a]oo", "foo", true),
            (r"[\]f]o", "foo", true),
            ("[]f", "foo", false),
            ("ü?o", "foo", false),
            ("f(o)(o)", "foo", true),
            ("FOO", "foo", false),
        ] {
            let regex = Regex::new(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(regex.is_match(value), expected, "{text}");
        }
        for text in ["", "*", "a(b", "(", "()", "[fg", "a|", "|a", "a||b", r"a\", "a)b", "[a-]", "[a-"] {
            assert!(Regex::new(text).is_none(), "{text}");
        }
        for long in ["(".repeat(100_000), "a?".repeat(100_000)] {
            assert!(Regex::new(&long).is_none());
        }
    }
}
