//! The thread that writes to standard error, so that no other thread blocks on it, and its queue.

use super::limit::LogRateLimiter;
use super::lines::{format_log_level, log_timestamp_now, stderr_uses_colour};
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};
use tracing::Level;

/// Capacity of the queue, in lines and texts.
const QUEUE_MAX: usize = 1024;

/// Interval between reports of dropped lines.
const REPORT_EVERY: Duration = Duration::from_secs(5);

/// Pause between two attempts to put an item into a full queue.
const AGAIN: Duration = Duration::from_millis(10);

/// A line of the log.
pub(super) struct LogLine {
    /// Index of its site in [`LogRateLimiter`].
    pub site: usize,
    pub time: String,
    pub level: Level,
    pub text: String,
}

enum LogQueueItem {
    LogLine(LogLine),
    Text(String),
    /// There are dropped lines to report.
    Wake,
    /// Reply when all earlier items are written.
    Flush(SyncSender<()>),
    /// Write all later items to this file.
    WriteTo(File),
}

/// The sending end of the queue, and the state that both ends share.
#[derive(Clone)]
pub(super) struct LogQueueSender {
    queue: SyncSender<LogQueueItem>,
    shared: Arc<LogQueueState>,
}

struct LogQueueState {
    /// Lines that did not fit into the queue or could not be written, and are not reported yet.
    lost: AtomicU64,
    limit: Arc<LogRateLimiter>,
}

impl LogQueueSender {
    /// Starts the thread.
    pub fn start() -> LogQueueSender {
        let (queue, items) = sync_channel(QUEUE_MAX);
        let shared =
            Arc::new(LogQueueState { lost: AtomicU64::new(0), limit: Arc::new(LogRateLimiter::new()) });
        let out = io::stderr().as_fd().try_clone_to_owned().map(File::from);
        // Without the thread or the descriptor, lines are lost and the program continues.
        if let Ok(out) = out {
            let thread = LogWriterThread {
                out,
                shared: Arc::clone(&shared),
                last: HashMap::new(),
                colour: stderr_uses_colour(),
            };
            let _ = std::thread::Builder::new().name("udm-log".into()).spawn(move || thread.run(&items));
        }
        LogQueueSender { queue, shared }
    }

    pub fn limit(&self) -> Arc<LogRateLimiter> {
        Arc::clone(&self.shared.limit)
    }

    pub fn log(&self, line: LogLine) {
        self.put(LogQueueItem::LogLine(line));
    }

    pub fn say(&self, text: String) {
        self.put(LogQueueItem::Text(text));
    }

    fn put(&self, item: LogQueueItem) {
        if self.queue.try_send(item).is_err() {
            self.shared.lost.fetch_add(1, Relaxed);
        }
    }

    /// Makes the thread check for dropped lines. If the queue is full, the thread is busy and
    /// checks anyway.
    pub fn wake(&self) {
        let _ = self.queue.try_send(LogQueueItem::Wake);
    }

    /// Waits until all earlier items are written, at most `max`.
    pub fn flush(&self, max: Duration) {
        let begin = Instant::now();
        let (done, is_done) = sync_channel(1);
        if self.put_within(LogQueueItem::Flush(done), begin, max) {
            let _ = is_done.recv_timeout(max.saturating_sub(begin.elapsed()));
        }
    }

    /// Writes all later items to `file`. Waits for the earlier ones, at most `max`.
    pub fn write_to(&self, file: File, max: Duration) {
        if self.put_within(LogQueueItem::WriteTo(file), Instant::now(), max) {
            self.flush(max);
        }
    }

    /// Puts an item into the queue; retries until `max` after `begin`. Returns false if there was
    /// no room.
    fn put_within(&self, mut item: LogQueueItem, begin: Instant, max: Duration) -> bool {
        while let Err(refused) = self.queue.try_send(item) {
            let TrySendError::Full(back) = refused else { return false };
            if begin.elapsed() >= max {
                return false;
            }
            item = back;
            std::thread::sleep(AGAIN);
        }
        true
    }
}

struct LogWriterThread {
    out: File,
    shared: Arc<LogQueueState>,
    /// The last line of each site, for "N more like it".
    last: HashMap<usize, (Level, String)>,
    colour: bool,
}

impl LogWriterThread {
    fn run(mut self, items: &Receiver<LogQueueItem>) {
        let mut reported = Instant::now();
        loop {
            let item = if self.shared.limit.has_left_out() {
                items.recv_timeout(REPORT_EVERY.saturating_sub(reported.elapsed()))
            } else {
                items.recv().map_err(|_| RecvTimeoutError::Disconnected)
            };
            match item {
                Ok(LogQueueItem::LogLine(line)) => self.line(line),
                Ok(LogQueueItem::Text(text)) => self.text(&text),
                Ok(LogQueueItem::Wake) => reported = Instant::now(),
                Ok(LogQueueItem::Flush(done)) => {
                    self.report();
                    // The sender of the request may have given up.
                    let _ = done.try_send(());
                }
                Ok(LogQueueItem::WriteTo(file)) => self.out = file,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if self.shared.limit.has_left_out() && reported.elapsed() >= REPORT_EVERY {
                self.report();
                reported = Instant::now();
            }
        }
    }

    fn line(&mut self, line: LogLine) {
        let text = format!("{} {} {}\n", line.time, format_log_level(line.level, self.colour), line.text);
        self.text(&text);
        self.last.insert(line.site, (line.level, line.text));
    }

    /// Reports dropped lines.
    fn report(&mut self) {
        let mut lines = Vec::new();
        self.shared.limit.report(|site, n| {
            let (level, text) = self.last.get(&site).map_or((Level::WARN, "?"), |(l, t)| (*l, t));
            lines.push((level, format!("{n} more like it: {text}")));
        });
        for (at, text) in lines {
            self.text(&format!("{} {} {text}\n", log_timestamp_now(), format_log_level(at, self.colour)));
        }
    }

    fn text(&mut self, text: &str) {
        let lost = self.shared.lost.load(Relaxed);
        if lost > 0 {
            let warn = format_log_level(Level::WARN, self.colour);
            let line = format!(
                "{} {warn} {lost} lines lost: standard error could not take them\n",
                log_timestamp_now()
            );
            if self.write(line.as_bytes()).is_ok() {
                self.shared.lost.fetch_sub(lost, Relaxed);
            }
        }
        if self.write(text.as_bytes()).is_err() {
            self.shared.lost.fetch_add(1, Relaxed);
        }
    }

    fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.out.write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // Another program on the same terminal may have made it non-blocking.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    poll(&mut [PollFd::new(&self.out, PollFlags::OUT)], None)?;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}
