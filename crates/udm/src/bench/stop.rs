//! A signal ends a measurement early: the jobs stop where they are, and what they have measured is
//! reported. The status is fio's then, 128.

use crate::{interrupt, log};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What `fio` ends with after a signal.
const STATUS: u8 = 128;

/// Whether one has come. A process has one set of signals.
static STOP: AtomicBool = AtomicBool::new(false);

/// Has signals stop the jobs from here on: what they set is what the jobs ask.
pub fn install_stop_handler() -> std::io::Result<&'static AtomicBool> {
    interrupt::on_first_signal(|signal| {
        log::say(format!("\nudm: terminating on signal {signal}; a second one ends at once\n"));
        STOP.store(true, Relaxed);
    })?;
    Ok(&STOP)
}

/// How a measurement that worked ends.
pub fn status(stopped: &AtomicBool) -> ExitCode {
    if stopped.load(Relaxed) { ExitCode::from(STATUS) } else { ExitCode::SUCCESS }
}
