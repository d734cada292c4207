//! The Connect command of a host, and what the controller answers.

use super::command::HostCommand;
use super::error::HostError;
use super::options::HostOptions;
use crate::nvme::{
    CONNECT_AUTHENTICATION_REQUIRED, CONNECT_SECURE_CHANNEL_REQUIRED, ConnectCommand, ConnectData,
};

/// The Connect command of queue `queue`.
#[must_use]
pub(super) fn connect_command(queue: u16, entries: u16, keep_alive_ms: u32) -> HostCommand {
    HostCommand::connect(ConnectCommand {
        format: 0,
        queue,
        queue_size: entries - 1,
        // Without flow control of the submission queue a controller may omit completions of reads.
        no_flow_control: true,
        keep_alive_ms: if queue == 0 { keep_alive_ms } else { 0 },
    })
}

/// The data of a Connect command to `controller`.
#[must_use]
pub(super) fn connect_data(options: &HostOptions, controller: u16) -> ConnectData {
    ConnectData {
        host_id: options.host_id,
        controller,
        subsystem: options.subsystem.clone(),
        host: options.host.clone(),
    }
}

/// Returns true if the queue needs an authentication, by the `result` of its Connect command.
///
/// # Errors
/// The host has no secret, the controller wants TLS, or the host wants a proof and the controller
/// gives none. A controller without authentication must not pass for one that has proved itself.
pub(super) fn needs_authentication(options: &HostOptions, result: u64) -> Result<bool, HostError> {
    let unusable = |why: &str| Err(HostError::Unusable(why.into()));
    if result & CONNECT_SECURE_CHANNEL_REQUIRED != 0 {
        return unusable("the controller asks for TLS (a secure channel), which udm does not support");
    }
    let is_asked_for = result & CONNECT_AUTHENTICATION_REQUIRED != 0;
    match &options.secrets {
        None if is_asked_for => unusable(
            "the controller asks for authentication: give dhchap-secret=FILE, as of nvme gen-dhchap-key",
        ),
        Some(secrets) if secrets.controller.is_some() && !is_asked_for => unusable(
            "the controller has no authentication, so it cannot prove that it knows dhchap-ctrl-secret",
        ),
        _ => Ok(is_asked_for),
    }
}
