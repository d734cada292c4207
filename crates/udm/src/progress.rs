//! Progress of work on the server: a bar on a terminal, otherwise lines.

use crate::output::print_to_stdout;
use anyhow::Result;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use udm_bench::units::format_with_binary_prefix;

/// A line is printed each time this many more percent are done.
const LINE_EVERY: u64 = 10;

/// Progress in bytes.
pub struct ByteProgress {
    /// Begins each line, as in "merged 10%".
    label: String,
    total: u64,
    display: ProgressDisplay,
}

enum ProgressDisplay {
    Bar(ProgressBar),
    /// The percent of the last line.
    Lines(u64),
    None,
}

/// Several bars below each other.
pub struct ProgressBars(MultiProgress);

impl ProgressBars {
    /// Bars on standard error.
    pub fn new() -> ProgressBars {
        ProgressBars(MultiProgress::with_draw_target(ProgressDrawTarget::stderr()))
    }
}

impl ByteProgress {
    /// Progress of `total` bytes. On a terminal it is one of `bars`, which begins with `label`.
    pub fn new(bars: &ProgressBars, label: &str, total: u64) -> ByteProgress {
        let display = match std::io::stderr().is_terminal() {
            true => ProgressDisplay::Bar(bars.0.add(bytes_bar_of(total, "{prefix} {bar:30} {percent}% "))),
            false => ProgressDisplay::Lines(0),
        };
        if let ProgressDisplay::Bar(bar) = &display {
            bar.set_prefix(label.to_owned());
        }
        ByteProgress { label: label.to_owned(), total, display }
    }

    /// As [`ByteProgress::new`], for a command whose output is JSON: nothing is printed without a
    /// terminal.
    pub fn quiet(bars: &ProgressBars, label: &str, total: u64) -> ByteProgress {
        let mut progress = ByteProgress::new(bars, label, total);
        if let ProgressDisplay::Lines(_) = progress.display {
            progress.display = ProgressDisplay::None;
        }
        progress
    }

    /// Shows that `done` bytes are done; `note` follows the numbers.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub fn show(&mut self, done: u64, note: &str) -> Result<()> {
        match &mut self.display {
            ProgressDisplay::Bar(bar) => {
                bar.set_position(done);
                bar.set_message(note.to_owned());
                if done >= self.total {
                    bar.finish_and_clear();
                }
                Ok(())
            }
            ProgressDisplay::Lines(last) => {
                let percent = (done * 100).checked_div(self.total).unwrap_or(100);
                if percent < *last + LINE_EVERY {
                    return Ok(());
                }
                *last = percent;
                let bytes = |bytes: u64| format_with_binary_prefix(bytes as f64, 4);
                let (label, done, total) = (&self.label, bytes(done), bytes(self.total));
                print_to_stdout(&format!("{label} {percent}%, {done}B of {total}B{note}\n"))
            }
            ProgressDisplay::None => Ok(()),
        }
    }
}

fn bytes_bar_of(total: u64, begin: &str) -> ProgressBar {
    let template = format!("{begin}{{bytes}} of {{total_bytes}}, {{bytes_per_sec}} ({{eta}}){{msg}}");
    let style = ProgressStyle::with_template(&template);
    ProgressBar::new(total).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// A bar on a terminal, and nothing elsewhere.
pub fn bytes_bar(total: u64) -> ProgressBar {
    match std::io::stderr().is_terminal() {
        true => bytes_bar_of(total, "{bar:30} {percent}% "),
        false => ProgressBar::hidden(),
    }
}
