//! SIGINT and SIGTERM for verbs without a server: `bench` and `demo`. (`serve` handles signals in
//! its own loop.)

use crate::log;
use std::io;
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

/// Calls `first` with the number of the first SIGINT or SIGTERM. The second one ends the program at
/// once, with the status of a shell: 128 plus the number.
///
/// # Errors
/// If the thread cannot be started, or the signal handlers cannot be installed.
pub fn call_on_first_stop_signal(first: impl FnOnce(i32) + Send + 'static) -> io::Result<()> {
    let runtime = Builder::new_current_thread().enable_io().build()?;
    let (mut interrupt, mut terminate) = {
        let _inside = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    let wait = move || {
        let mut next = || {
            runtime.block_on(async {
                tokio::select! {
                    _ = interrupt.recv() => SignalKind::interrupt().as_raw_value(),
                    _ = terminate.recv() => SignalKind::terminate().as_raw_value(),
                }
            })
        };
        first(next());
        exit_with_signal_status(next());
    };
    std::thread::Builder::new().name("udm-signals".into()).spawn(wait).map(drop)
}

/// Exits with the status of a program that a signal ended.
pub fn exit_with_signal_status(signal: i32) -> ! {
    log::flush_log();
    std::process::exit(128 + signal);
}
