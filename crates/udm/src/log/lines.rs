//! Events as lines: `2026-11-21T18:33:57.123456Z  WARN multipath: mp: path 253:1 (same.img) failed:
//! I/O`.
//!
//! One event is one line, whatever text a client has caused in it: control characters are escaped,
//! and the length is limited.

use super::limit::{LogRateDecision, LogRateLimiter};
use super::writer::{LogLine, LogQueueSender};
use std::fmt::{self, Write};
use std::io::IsTerminal;
use std::sync::Arc;
use std::time::Instant;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::format::Writer as TimeWriter;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::{Context, Layer};

/// Maximum length of a line's text, in bytes.
const TEXT_MAX: usize = 2048;

/// The `tracing` layer that formats events as lines and gives them to the writer.
pub(super) struct TracingLogLayer {
    writer: LogQueueSender,
    limit: Arc<LogRateLimiter>,
    begin: Instant,
}

impl TracingLogLayer {
    pub fn new(writer: &LogQueueSender) -> TracingLogLayer {
        TracingLogLayer { writer: writer.clone(), limit: writer.limit(), begin: Instant::now() }
    }
}

impl<S: Subscriber> Layer<S> for TracingLogLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let site: &'static Metadata<'static> = event.metadata();
        let now_ms = self.begin.elapsed().as_millis() as u64;
        match self.limit.line(std::ptr::from_ref(site) as usize, now_ms) {
            LogRateDecision::Write(index) => {
                let mut text = TracingEventText::default();
                event.record(&mut text);
                self.writer.log(LogLine {
                    site: index,
                    time: log_timestamp_now(),
                    level: *site.level(),
                    text: text.cut(),
                });
            }
            LogRateDecision::LeaveOut(true) => self.writer.wake(),
            LogRateDecision::LeaveOut(false) => {}
        }
    }
}

/// The current time in the format of the log: UTC, RFC 3339.
pub(super) fn log_timestamp_now() -> String {
    let mut text = String::new();
    // Writing to a String can't fail.
    let _ = SystemTime.format_time(&mut TimeWriter::new(&mut text));
    text
}

/// True if standard error is a terminal and `$NO_COLOR` is not set.
pub fn stderr_uses_colour() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

/// A level, padded to five columns.
pub(super) fn format_log_level(level: Level, colour: bool) -> String {
    let number = match level {
        Level::ERROR => 31,
        Level::WARN => 33,
        Level::INFO => 32,
        Level::DEBUG => 34,
        Level::TRACE => 35,
    };
    if colour { format!("\x1b[{number}m{level:>5}\x1b[0m") } else { format!("{level:>5}") }
}

/// The message of an event, followed by its other fields as `name=value`.
#[derive(Default)]
struct TracingEventText(String);

impl Visit for TracingEventText {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            let rest = std::mem::take(&mut self.0);
            // Writing to a String can't fail.
            let _ = write!(self, "{value:?}");
            self.0.push_str(&rest);
        } else {
            let _ = write!(self, " {}={value:?}", field.name());
        }
    }
}

impl Write for TracingEventText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            if c.is_control() {
                self.0.extend(c.escape_debug());
            } else {
                self.0.push(c);
            }
        }
        Ok(())
    }
}

impl TracingEventText {
    /// The text, truncated to the maximum length.
    fn cut(mut self) -> String {
        if self.0.len() > TEXT_MAX {
            let end = (0..=TEXT_MAX).rfind(|&i| self.0.is_char_boundary(i)).unwrap_or(0);
            self.0.truncate(end);
            self.0.push('…');
        }
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_event_is_one_line() {
        let mut text = TracingEventText::default();
        text.write_str("nbd: export a\nb\x1b[2J: gone").unwrap();
        assert_eq!(text.cut(), "nbd: export a\\nb\\u{1b}[2J: gone");
    }

    #[test]
    fn a_line_has_an_end() {
        let mut text = TracingEventText::default();
        write!(text, "x{}", "ü".repeat(TEXT_MAX)).unwrap();
        let cut = text.cut();
        assert_eq!(cut.len(), TEXT_MAX - 1 + '…'.len_utf8(), "no half of a letter");
        assert!(cut.ends_with("ü…"));
    }
}
