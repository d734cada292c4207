//! The thread that writes to standard error, so that nobody else has to, and the queue before it.

use super::limit::RateLimit;
use super::lines::{colour, level, now};
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

/// Lines that may wait to be written.
const QUEUE_MAX: usize = 1024;

/// How often lines that were left out are reported.
const REPORT_EVERY: Duration = Duration::from_secs(5);

/// How long to wait for room in a full queue before another look.
const AGAIN: Duration = Duration::from_millis(10);

/// A line of the log.
pub(super) struct LogLine {
    /// Which site of [`RateLimit`] it is from.
    pub site: usize,
    pub time: String,
    pub level: Level,
    pub text: String,
}

enum QueueItem {
    LogLine(LogLine),
    Text(String),
    /// Something was left out that is to be reported.
    Wake,
    /// Answer when all before it is written.
    Flush(SyncSender<()>),
    /// What comes behind it is written there.
    WriteTo(File),
}

/// The queue's near end, and what both ends know.
#[derive(Clone)]
pub(super) struct LogWriter {
    queue: SyncSender<QueueItem>,
    shared: Arc<WriterState>,
}

struct WriterState {
    /// Lines that found no room in the queue, or could not be written, and of which nothing has
    /// been said yet.
    lost: AtomicU64,
    limit: Arc<RateLimit>,
}

impl LogWriter {
    /// Starts the thread.
    pub fn start() -> LogWriter {
        let (queue, items) = sync_channel(QUEUE_MAX);
        let shared = Arc::new(WriterState { lost: AtomicU64::new(0), limit: Arc::new(RateLimit::new()) });
        let out = io::stderr().as_fd().try_clone_to_owned().map(File::from);
        // Without the thread or the descriptor lines are lost, and the program goes on.
        if let Ok(out) = out {
            let thread =
                WriterThread { out, shared: Arc::clone(&shared), last: HashMap::new(), colour: colour() };
            let _ = std::thread::Builder::new().name("udm-log".into()).spawn(move || thread.run(&items));
        }
        LogWriter { queue, shared }
    }

    pub fn limit(&self) -> Arc<RateLimit> {
        Arc::clone(&self.shared.limit)
    }

    pub fn log(&self, line: LogLine) {
        self.put(QueueItem::LogLine(line));
    }

    pub fn say(&self, text: String) {
        self.put(QueueItem::Text(text));
    }

    fn put(&self, item: QueueItem) {
        if self.queue.try_send(item).is_err() {
            self.shared.lost.fetch_add(1, Relaxed);
        }
    }

    /// Has the thread look for what was left out. A thread that is busy will look anyway.
    pub fn wake(&self) {
        let _ = self.queue.try_send(QueueItem::Wake);
    }

    /// Waits until all before is written, but not longer than `max`.
    pub fn flush(&self, max: Duration) {
        let begin = Instant::now();
        let (done, is_done) = sync_channel(1);
        if self.put_within(QueueItem::Flush(done), begin, max) {
            let _ = is_done.recv_timeout(max.saturating_sub(begin.elapsed()));
        }
    }

    /// Writes what comes from now on to `file`; waits for what came before, but not longer than
    /// `max`.
    pub fn write_to(&self, file: File, max: Duration) {
        if self.put_within(QueueItem::WriteTo(file), Instant::now(), max) {
            self.flush(max);
        }
    }

    /// Waits for a place in the queue, until `max` behind `begin`. False when there was none.
    fn put_within(&self, mut item: QueueItem, begin: Instant, max: Duration) -> bool {
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

struct WriterThread {
    out: File,
    shared: Arc<WriterState>,
    /// The last line of each site, for "N more like it".
    last: HashMap<usize, (Level, String)>,
    colour: bool,
}

impl WriterThread {
    fn run(mut self, items: &Receiver<QueueItem>) {
        let mut reported = Instant::now();
        loop {
            let item = if self.shared.limit.has_left_out() {
                items.recv_timeout(REPORT_EVERY.saturating_sub(reported.elapsed()))
            } else {
                items.recv().map_err(|_| RecvTimeoutError::Disconnected)
            };
            match item {
                Ok(QueueItem::LogLine(line)) => self.line(line),
                Ok(QueueItem::Text(text)) => self.text(&text),
                Ok(QueueItem::Wake) => reported = Instant::now(),
                Ok(QueueItem::Flush(done)) => {
                    self.report();
                    // Whoever asked may have given up.
                    let _ = done.try_send(());
                }
                Ok(QueueItem::WriteTo(file)) => self.out = file,
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
        let text = format!("{} {} {}\n", line.time, level(line.level, self.colour), line.text);
        self.text(&text);
        self.last.insert(line.site, (line.level, line.text));
    }

    /// Says what was left out.
    fn report(&mut self) {
        let mut lines = Vec::new();
        self.shared.limit.report(|site, n| {
            let (level, text) = self.last.get(&site).map_or((Level::WARN, "?"), |(l, t)| (*l, t));
            lines.push((level, format!("{n} more like it: {text}")));
        });
        for (at, text) in lines {
            self.text(&format!("{} {} {text}\n", now(), level(at, self.colour)));
        }
    }

    fn text(&mut self, text: &str) {
        let lost = self.shared.lost.load(Relaxed);
        if lost > 0 {
            let warn = level(Level::WARN, self.colour);
            let line = format!("{} {warn} {lost} lines lost: standard error could not take them\n", now());
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
                // Others that share the terminal may have made it non-blocking.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    poll(&mut [PollFd::new(&self.out, PollFlags::OUT)], None)?;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}
