//! A signal ends a measurement early: the jobs stop where they are, and what they have measured is reported. The status is fio's then, 128.

use crate::{interrupt, log};
use std::process::ExitCode;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

/// What `fio` ends with after a signal.
const STATUS: u8 = 128;

/// The signal that came; 0 for none. A process has one set of signals.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

/// Has signals stop the jobs from here on.
pub fn on_signals() -> std::io::Result<()> {
    interrupt::on_signal(|signal| {
        log::say(format!("\nudm: terminating on signal {signal}; a second one ends at once\n"));
        SIGNAL.store(signal, Relaxed);
    })
}

/// Whether the jobs are to stop. They ask twice a second.
pub fn is_asked() -> bool {
    SIGNAL.load(Relaxed) != 0
}

/// How a measurement that worked ends.
pub fn status() -> ExitCode {
    if is_asked() { ExitCode::from(STATUS) } else { ExitCode::SUCCESS }
}
