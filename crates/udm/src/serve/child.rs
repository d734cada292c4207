//! The command of `--run`, as the server sees it. The command runs below a [`supervisor`].

use super::sockets::ServerSockets;
use super::{SignalReceiver, descriptors, supervisor, systemd};
use anyhow::{Context, Result};
use rustix::process::{Pid, kill_process};
use std::process::ExitCode;
use udm_control::exports::DeviceExporter;

/// The supervisor of the running command. It ends the command if this process ends first.
pub(super) struct RunCommandProcess(tokio::process::Child);

impl RunCommandProcess {
    /// Starts `command` through the shell, with the exports in its environment.
    ///
    /// The caller's thread must live as long as the server: the kernel takes its end for the
    /// server's.
    pub fn start(
        command: &str,
        sockets: &ServerSockets,
        exporter: &DeviceExporter,
    ) -> Result<RunCommandProcess> {
        let shell = descriptors::shell_with_original_ulimit(command);
        let mut process = supervisor::supervised_command(sockets.private_folder(), &shell);
        for variable in systemd::VARIABLES {
            process.env_remove(variable);
        }
        process.env("UDM_SOCKET", &sockets.control);
        if let Some(unix) = &sockets.unix {
            process.env("unixsocket", unix);
        }
        let mut first = None;
        for export in exporter.list() {
            let Some(uri) = export.uris.into_iter().next() else { continue };
            process.env(export_uri_env_name(&export.name), &uri);
            first.get_or_insert(uri);
        }
        process.env("uri", first.unwrap_or_default());
        Ok(RunCommandProcess(process.spawn().context("/proc/self/exe")?))
    }

    /// Waits for the end of the command; meanwhile passes signals on to its supervisor.
    pub async fn finish(&mut self, signals: &mut SignalReceiver) -> Result<ExitCode> {
        loop {
            let signal = tokio::select! {
                status = self.0.wait() => return Ok(supervisor::shell_exit_code(status?)),
                signal = signals.next() => signal,
            };
            if let Some(pid) = self.0.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
                // It may have ended meanwhile.
                let _ = kill_process(pid, signal);
            }
        }
    }
}

/// The name of the variable with the URI of an export.
fn export_uri_env_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '_' };
    format!("uri_{}", name.chars().map(plain).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_words_of_the_shell() {
        assert_eq!(export_uri_env_name("a-b c_9ü"), "uri_a_b_c_9_");
    }
}
