//! The command of `--run`.

use super::Signals;
use super::places::Places;
use anyhow::{Context, Result};
use rustix::process::{Pid, kill_process};
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;
use tokio::process::Command;
use udm_control::exports::Exporter;

/// How long the command may take to end after it was sent a signal.
const END_MAX: Duration = Duration::from_secs(5);

/// The running command. Dropping it kills it.
pub(super) struct Child(tokio::process::Child);

impl Child {
    /// Starts `command` through the shell, with the exports in its environment.
    pub fn start(command: &str, places: &Places, exporter: &Exporter) -> Result<Child> {
        let mut shell = Command::new("/bin/sh");
        shell.arg("-c").arg(command).kill_on_drop(true).env("UDM_SOCKET", &places.control);
        if let Some(unix) = &places.unix {
            shell.env("unixsocket", unix);
        }
        let mut first = None;
        for export in exporter.list() {
            let Some(uri) = export.uris.into_iter().next() else { continue };
            shell.env(variable(&export.name), &uri);
            first.get_or_insert(uri);
        }
        shell.env("uri", first.unwrap_or_default());
        Ok(Child(shell.spawn().context("/bin/sh")?))
    }

    /// Waits for its end, and passes signals on to it meanwhile.
    pub async fn finish(&mut self, signals: &mut Signals) -> Result<ExitCode> {
        loop {
            let signal = tokio::select! {
                status = self.0.wait() => return Ok(exit_code(status?)),
                signal = signals.next() => signal,
            };
            if let Some(pid) = self.0.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)) {
                // It may have ended this very moment; then the wait says so.
                let _ = kill_process(pid, signal);
            }
            if let Ok(status) = tokio::time::timeout(END_MAX, self.0.wait()).await {
                return Ok(exit_code(status?));
            }
            self.0.start_kill()?;
        }
    }
}

/// The variable that holds the URI of an export.
fn variable(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '_' };
    format!("uri_{}", name.chars().map(plain).collect::<String>())
}

/// As the shell says it: the status, or 128 and the signal.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|n| 128 + n)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_words_of_the_shell() {
        assert_eq!(variable("a-b c_9ü"), "uri_a_b_c_9_");
    }

    #[test]
    fn exit_codes() {
        let code = |raw| format!("{:?}", exit_code(ExitStatus::from_raw(raw)));
        assert_eq!(code(0x0300), format!("{:?}", ExitCode::from(3)));
        assert_eq!(code(9), format!("{:?}", ExitCode::from(137)));
    }
}
