//! The log, and everything else on standard error.
//!
//! **A line that cannot be written stops nothing.** The caller puts its line into a bounded queue
//! and continues; a thread of the log writes it ([`writer`]). Lines that find the queue full, or
//! standard error full, closed or stuck, are counted, and the count is logged as soon as possible.
//!
//! **A line does not repeat for ever.** Each place in the code that logs has a budget ([`limit`]).
//! Lines beyond it are counted and logged as "N more like it". So no client can fill a disk.
//!
//! Other code must not touch standard error while the server runs: a pipe without a reader would
//! block it. A style test checks this; the panic hook writes through the log too. Cores log rare
//! events only, such as a failed path.

mod limit;
mod lines;
mod writer;

pub use lines::colour;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::fs::File;
use std::sync::OnceLock;
use std::time::Duration;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use writer::LogWriter;

/// How long the program waits at its end for its last lines.
const FLUSH_MAX: Duration = Duration::from_secs(1);

/// Variables with the log filter, in the syntax of `tracing_subscriber::EnvFilter`. The first that
/// is set is used.
const VARIABLES: [&str; 2] = ["UDM_LOG", "RUST_LOG"];

static WRITER: OnceLock<LogWriter> = OnceLock::new();

/// Starts the log, at `level` if no variable is set, and sends the texts of panics to it.
pub fn start(level: &str) {
    let writer = WRITER.get_or_init(LogWriter::start);
    let (filter, wrong) = filter(level);
    tracing_subscriber::registry().with(filter).with(lines::LineLayer::new(writer)).init();
    if let Some(wrong) = wrong {
        tracing::warn!("{wrong}");
    }
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let trace = Backtrace::capture();
        let trace =
            if trace.status() == BacktraceStatus::Captured { format!("{trace}\n") } else { String::new() };
        say(format!("udm: thread '{}' {panic}\n{trace}", thread.name().unwrap_or("?")));
        // The program may abort next.
        flush();
    }));
}

/// The log filter, and the error in the variable that should have set it.
fn filter(level: &str) -> (EnvFilter, Option<String>) {
    let set = |variable| Some((variable, std::env::var(variable).ok().filter(|v| !v.trim().is_empty())?));
    let Some((variable, value)) = VARIABLES.into_iter().find_map(set) else {
        return (EnvFilter::new(level), None);
    };
    match EnvFilter::builder().parse(&value) {
        Ok(filter) => (filter, None),
        Err(error) => {
            (EnvFilter::new(level), Some(format!("{variable}={value}: {error}: logging at {level}")))
        }
    }
}

/// Writes a text for the user to standard error unchanged. Does not block.
pub fn say(text: String) {
    if let Some(writer) = WRITER.get() {
        writer.say(text);
    }
}

/// Sends all later texts and lines to `file`. Waits at most 1 s for the earlier ones.
pub fn write_to(file: File) {
    if let Some(writer) = WRITER.get() {
        writer.write_to(file, FLUSH_MAX);
    }
}

/// Waits until all texts and lines are written, at most 1 s.
pub fn flush() {
    if let Some(writer) = WRITER.get() {
        writer.flush(FLUSH_MAX);
    }
}
