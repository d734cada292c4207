//! Output of the demos: sections, aligned columns and some colour.

use anyhow::Result;
use std::io::IsTerminal;

/// Prints the demo's output; with `--json` it prints nothing.
pub(super) struct DemoPrinter {
    silent: bool,
    colour: bool,
}

impl DemoPrinter {
    /// Prints to standard output; in colour only on a terminal and without `$NO_COLOR`.
    pub fn new(silent: bool) -> DemoPrinter {
        let colour =
            std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
        DemoPrinter { silent, colour }
    }

    fn styled(&self, style: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{style}m{text}\x1b[0m") } else { text.into() }
    }

    fn put(&self, text: &str) -> Result<()> {
        if self.silent { Ok(()) } else { crate::output::print_to_stdout(text) }
    }

    /// Prints a heading.
    pub fn section(&self, text: &str) -> Result<()> {
        self.put(&format!("\n{}\n", self.styled("1", text)))
    }

    /// Prints a fact: its name and its value.
    pub fn fact(&self, label: &str, value: &str) -> Result<()> {
        self.put(&format!("  {}  {value}\n", self.styled("2", &format!("{label:<12}"))))
    }

    /// Prints the head of a table: the first column left-aligned, the others right-aligned.
    pub fn head(&self, columns: &[&str]) -> Result<()> {
        let columns: Vec<String> = columns.iter().map(|&c| c.into()).collect();
        self.put(&format!("{}\n", self.styled("2", &format_aligned_row(&columns))))
    }

    /// Prints a row of a table.
    pub fn row(&self, columns: &[String]) -> Result<()> {
        self.put(&format!("{}\n", format_aligned_row(columns)))
    }

    /// Prints a result with a mark for good or bad.
    pub fn verdict(&self, good: bool, text: &str) -> Result<()> {
        let (style, mark) = if good { ("32", "✓") } else { ("1;31", "✗") };
        self.put(&format!("  {} {text}\n", self.styled(style, mark)))
    }
}

fn format_aligned_row(columns: &[String]) -> String {
    let (first, rest) = columns.split_first().expect("a table has columns");
    let rest: String = rest.iter().map(|c| format!("{c:>16}")).collect();
    format!("  {first:<34}{rest}")
}

/// Formats a number with separated thousands.
pub(super) fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        let all: Vec<_> = [0, 999, 1000, 1234567].map(thousands).into();
        assert_eq!(all, ["0", "999", "1,000", "1,234,567"]);
    }
}
