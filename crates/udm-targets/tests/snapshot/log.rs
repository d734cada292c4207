//! A capture of log lines.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex, Once};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{DefaultGuard, NoSubscriber, set_default, set_global_default};
use tracing::{Event, Metadata, Subscriber};

/// The log lines of this thread, from its creation until it is dropped.
pub struct LogCapture {
    lines: Arc<Mutex<Vec<String>>>,
    _guard: DefaultGuard,
}

struct CaptureSubscriber(Arc<Mutex<Vec<String>>>);

impl LogCapture {
    pub fn new() -> LogCapture {
        // If there is only one subscriber, a thread without one disables a call site for all:
        // tracing-core then asks that thread's own default.
        static SECOND: Once = Once::new();
        SECOND.call_once(|| set_global_default(NoSubscriber::new()).expect("the first"));
        let lines: Arc<Mutex<Vec<String>>> = Arc::default();
        LogCapture { _guard: set_default(CaptureSubscriber(Arc::clone(&lines))), lines }
    }

    /// True if a line contains `text`.
    pub fn says(&self, text: &str) -> bool {
        self.lines.lock().unwrap().iter().any(|line| line.contains(text))
    }

    /// Number of lines that contain `text`.
    pub fn count(&self, text: &str) -> usize {
        self.lines.lock().unwrap().iter().filter(|line| line.contains(text)).count()
    }
}

struct MessageText(String);

impl Visit for MessageText {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            write!(self.0, "{value:?}").unwrap();
        }
    }
}

impl Subscriber for CaptureSubscriber {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = MessageText(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
