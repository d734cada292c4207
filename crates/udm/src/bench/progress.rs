//! The line on the terminal that shows that something happens. Nothing is drawn, and nothing counted, when standard error is no terminal.

use super::options::BenchArgs;
use super::units::{binary, decimal};
use crossbeam_utils::CachePadded;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How often the line is drawn.
const TICK: Duration = Duration::from_millis(500);

/// What the jobs have done so far: a counter each, on a cache line of its own, written once a turn.
pub struct Progress(Vec<CachePadded<AtomicU64>>);

impl Progress {
    /// One for the jobs of `args`, when somebody is looking.
    pub fn new(args: &BenchArgs) -> Option<Progress> {
        let jobs = (0..args.numjobs).map(|_| CachePadded::default()).collect();
        std::io::stderr().is_terminal().then_some(Progress(jobs))
    }

    /// The counter of a job.
    pub fn counter(&self, job: usize) -> &AtomicU64 {
        &self.0[job]
    }

    /// Draws until the other end of `over` is dropped.
    pub fn draw(&self, args: &BenchArgs, over: &mpsc::Receiver<()>) {
        let total = args.runtime.map(|t| (t + args.ramp_time).as_secs());
        let bar = ProgressBar::new(total.unwrap_or(0));
        let template = if total.is_some() { "{bar:30} {pos}/{len}s {msg}" } else { "{spinner} {pos}s {msg}" };
        bar.set_style(
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        let begin = Instant::now();
        let (mut last, mut at) = (0, begin);
        while let Err(mpsc::RecvTimeoutError::Timeout) = over.recv_timeout(TICK) {
            let done: u64 = self.0.iter().map(|n| n.load(Relaxed)).sum();
            let now = Instant::now();
            let iops = (done - last) as f64 / (now - at).as_secs_f64();
            (last, at) = (done, now);
            bar.set_position(begin.elapsed().as_secs());
            bar.set_message(format!("[{} IOPS, {}B/s]", decimal(iops, 4), binary(iops * args.bs as f64, 4)));
        }
        bar.finish_and_clear();
    }
}
