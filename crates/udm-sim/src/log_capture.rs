//! Captures the log lines of udm on the thread of a world.

use std::cell::RefCell;
use std::fmt::Write;
use std::sync::Once;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{DefaultGuard, NoSubscriber, set_default, set_global_default};
use tracing::{Event, Level, Metadata, Subscriber};

thread_local! {
    static LINES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Subscriber that stores the lines of this thread from one part of udm, without those for
/// debugging.
struct LogCapture(&'static str);

struct LogMessageVisitor(String);

impl Visit for LogMessageVisitor {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            let _ = write!(self.0, "{value:?}");
        }
    }
}

impl Subscriber for LogCapture {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::INFO && metadata.target().starts_with(self.0)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = LogMessageVisitor(String::new());
        event.record(&mut text);
        LINES.with_borrow_mut(|lines| lines.push(text.0));
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Captures the log lines of `part`, a crate or a module, on this thread until the guard is
/// dropped.
pub(crate) fn capture_log(part: &'static str) -> DefaultGuard {
    // With only one subscriber, tracing-core asks the default of the current thread whether a log
    // statement is enabled. A thread without a subscriber would disable the statement for all
    // threads.
    static SECOND: Once = Once::new();
    SECOND.call_once(|| drop(set_global_default(NoSubscriber::new())));
    take_captured_log_lines();
    set_default(LogCapture(part))
}

/// Removes and returns the captured lines.
pub(crate) fn take_captured_log_lines() -> Vec<String> {
    LINES.take()
}
