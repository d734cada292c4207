//! The throughput of each path during a measurement. A separate thread samples the counters that
//! the paths already have.

use crate::mapped::{MappedDevices, PathTotals};
use crate::timeline::BytesMovedTimeline;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use udm_core::Nanos;

/// A thread that takes samples until it is stopped.
pub struct PathSampler {
    stop: mpsc::Sender<()>,
    thread: JoinHandle<Vec<PathTotals>>,
}

impl PathSampler {
    /// Starts sampling the paths of `mapped`.
    ///
    /// # Errors
    /// If the thread cannot be created.
    pub fn start(mapped: Arc<MappedDevices>) -> std::io::Result<PathSampler> {
        let (stop, stopped) = mpsc::channel();
        let thread =
            thread::Builder::new().name("udm-paths".into()).spawn(move || sample_paths(&mapped, &stopped))?;
        Ok(PathSampler { stop, thread })
    }

    /// Ends sampling and returns the paths with their rates.
    #[must_use]
    pub fn end(self) -> Vec<PathTotals> {
        drop(self.stop);
        self.thread.join().unwrap_or_default()
    }
}

fn sample_paths(mapped: &MappedDevices, stopped: &mpsc::Receiver<()>) -> Vec<PathTotals> {
    let begun = Instant::now();
    let now = || Nanos(begun.elapsed().as_nanos() as u64);
    let mut paths = mapped.paths();
    let mut timelines: Vec<_> = paths.iter().map(|_| BytesMovedTimeline::new()).collect();
    // All timelines are read at the same times.
    while let Some(first) = timelines.first() {
        let wait = Duration::from_nanos(first.due().since(now()).0);
        if stopped.recv_timeout(wait) != Err(mpsc::RecvTimeoutError::Timeout) {
            break;
        }
        let at = now();
        for (timeline, path) in timelines.iter_mut().zip(mapped.paths()) {
            timeline.read(at, [path.moved, 0, 0]);
        }
    }
    let at = now();
    for ((path, mut timeline), last) in paths.iter_mut().zip(timelines).zip(mapped.paths()) {
        timeline.end(at, [last.moved, 0, 0]);
        *path = PathTotals { rates: timeline.rates(0).collect(), ..last };
    }
    paths
}
