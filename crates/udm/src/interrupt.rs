//! Ctrl-C and SIGTERM, for verbs that work by themselves: `bench` and `demo`. (`serve` has a loop
//! of its own for them.)

use crate::log;
use std::io;
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

/// Calls `first` with the number of the first signal that would end the program. The second one
/// ends it at once, as the shell says it: 128 and the number.
///
/// # Errors
/// When there is no thread to wait for signals, or they can't be had.
pub fn on_first_signal(first: impl FnOnce(i32) + Send + 'static) -> io::Result<()> {
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
        exit_by_signal(next());
    };
    std::thread::Builder::new().name("udm-signals".into()).spawn(wait).map(drop)
}

/// Ends the program as a signal would.
pub fn exit_by_signal(signal: i32) -> ! {
    log::flush();
    std::process::exit(128 + signal);
}
