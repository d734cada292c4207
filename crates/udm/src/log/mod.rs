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

pub use lines::stderr_uses_colour;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fs::File;
use std::sync::OnceLock;
use std::time::Duration;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use writer::LogQueueSender;

/// How long the program waits at its end for its last lines.
const FLUSH_MAX: Duration = Duration::from_secs(1);

/// Variables with the log filter, in the syntax of `tracing_subscriber::EnvFilter`. The first that
/// is set is used.
const VARIABLES: [&str; 2] = ["UDM_LOG", "RUST_LOG"];

static WRITER: OnceLock<LogQueueSender> = OnceLock::new();

/// Starts the log, at `level` if no variable is set, and sends the texts of panics to it.
pub fn init_logging(level: &str) {
    let writer = WRITER.get_or_init(LogQueueSender::start);
    let (filter, wrong) = log_filter_from_env(level);
    tracing_subscriber::registry().with(filter).with(lines::TracingLogLayer::new(writer)).init();
    if let Some(wrong) = wrong {
        tracing::warn!("{wrong}");
    }
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let trace = Backtrace::capture();
        let trace =
            if trace.status() == BacktraceStatus::Captured { format!("{trace}\n") } else { String::new() };
        queue_stderr_text(&format!("udm: thread '{}' {panic}\n{trace}", thread.name().unwrap_or("?")));
        // The program may abort next.
        flush_log();
    }));
}

/// The log filter, and the error in the variable that should have set it.
fn log_filter_from_env(level: &str) -> (EnvFilter, Option<String>) {
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

/// Writes a text for the user to standard error, unchanged. Does not block.
pub fn queue_stderr_text(text: &str) {
    if let Some(writer) = WRITER.get() {
        writer.say(text.to_owned());
    }
}

/// Sends all later texts and lines to `file`. Waits at most 1 s for the earlier ones.
pub fn redirect_log_to_file(file: File) {
    if let Some(writer) = WRITER.get() {
        writer.write_to(file, FLUSH_MAX);
    }
}

/// Waits until all texts and lines are written, at most 1 s.
pub fn flush_log() {
    if let Some(writer) = WRITER.get() {
        writer.flush(FLUSH_MAX);
    }
}
