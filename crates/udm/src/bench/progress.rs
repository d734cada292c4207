//! The progress line on the terminal. If standard error is no terminal, nothing is drawn or
//! counted.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use udm_bench::units::{format_with_binary_prefix, format_with_decimal_prefix};
use udm_bench::{FioLoadOptions, JobProgressCounters};

/// Time between two updates of the line.
const TICK: Duration = Duration::from_millis(500);

/// Runs `measure`, draws its progress on a terminal, and returns the result.
pub fn run_with_bench_progress<T>(
    loads: &[&FioLoadOptions],
    measure: impl FnOnce(Option<&JobProgressCounters>) -> T,
) -> T {
    if !std::io::stderr().is_terminal() {
        return measure(None);
    }
    let progress = JobProgressCounters::new(loads.iter().map(|load| usize::from(load.numjobs)).sum());
    let (running, over) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let progress = &progress;
        scope.spawn(move || draw_bench_progress(loads, progress, &over));
        let measured = measure(Some(progress));
        drop(running);
        measured
    })
}

/// Runs `measure`, which counts its finished steps in the argument. Draws on a terminal how many of
/// `steps` are finished and the estimated time left. Returns the result of `measure`.
pub fn run_with_step_progress<T>(steps: usize, measure: impl FnOnce(&AtomicUsize) -> T) -> T {
    let done = AtomicUsize::new(0);
    if !std::io::stderr().is_terminal() {
        return measure(&done);
    }
    let (running, over) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let done = &done;
        scope.spawn(move || {
            let bar = ProgressBar::new(steps as u64);
            let template = "{bar:30} {pos}/{len}, {eta} left; Ctrl-C prints the results so far";
            let style = ProgressStyle::with_template(template);
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            while let Err(mpsc::RecvTimeoutError::Timeout) = over.recv_timeout(TICK) {
                bar.set_position(done.load(Relaxed) as u64);
            }
            bar.finish_and_clear();
        });
        let measured = measure(done);
        drop(running);
        measured
    })
}

/// Draws until the sender of `over` is dropped.
fn draw_bench_progress(loads: &[&FioLoadOptions], progress: &JobProgressCounters, over: &mpsc::Receiver<()>) {
    // With several loads the total time is not known: they may run in parallel or end early.
    let total = match loads {
        [load] => load.runtime.map(|t| (t + load.ramp_time).as_secs()),
        _ => None,
    };
    let bs = Some(loads[0].block_bytes()).filter(|bs| loads.iter().all(|load| load.block_bytes() == *bs));
    let bar = ProgressBar::new(total.unwrap_or(0));
    let template = if total.is_some() { "{bar:30} {pos}/{len}s {msg}" } else { "{spinner} {pos}s {msg}" };
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    let begin = Instant::now();
    let (mut last, mut at) = (0, begin);
    while let Err(mpsc::RecvTimeoutError::Timeout) = over.recv_timeout(TICK) {
        let done = progress.done();
        let now = Instant::now();
        let iops = (done - last) as f64 / (now - at).as_secs_f64();
        (last, at) = (done, now);
        bar.set_position(begin.elapsed().as_secs());
        let bytes = bs.map_or_else(String::new, |bs| {
            format!(", {}B/s", format_with_binary_prefix(iops * bs as f64, 4))
        });
        bar.set_message(format!("[{} IOPS{bytes}]", format_with_decimal_prefix(iops, 4)));
    }
    bar.finish_and_clear();
}
