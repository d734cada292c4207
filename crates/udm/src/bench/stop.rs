//! Early end of a measurement by a signal: the jobs stop, and the results so far are reported. The
//! exit status is then 128, as with fio.

use crate::{interrupt, log};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The exit status of `fio` after a signal.
const STATUS: u8 = 128;

/// True once a signal has arrived. It is static because signals belong to the process.
static STOP: AtomicBool = AtomicBool::new(false);

/// Installs the signal handler; returns the flag that it sets and the jobs check.
pub fn install_stop_handler() -> std::io::Result<&'static AtomicBool> {
    interrupt::call_on_first_stop_signal(|signal| {
        log::queue_stderr_text(&format!(
            "\nudm: terminating on signal {signal}; a second one ends at once\n"
        ));
        STOP.store(true, Relaxed);
    })?;
    Ok(&STOP)
}

/// The exit status of a measurement without errors.
pub fn measurement_exit_code(stopped: &AtomicBool) -> ExitCode {
    if stopped.load(Relaxed) { ExitCode::from(STATUS) } else { ExitCode::SUCCESS }
}
