//! The state that a server hands over, as JSON.
//!
//! A field is never removed or given another meaning without another [`FORMAT`]. New fields have a
//! default, so a newer program reads the state of an older one.

use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;
use udm_control::verbs::handover::HandedOverDevices;
use udm_frontends::nbd::DetachedNbdClient;

/// Version of the format.
pub(super) const FORMAT: u32 = 1;

/// All that a server hands over. The descriptors come beside it: the control socket, then those of
/// `listeners`, `machines` and `clients`, in this order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ServerState {
    /// [`FORMAT`] of the sender.
    pub(super) format: u32,
    /// Process ID of the old server.
    pub(super) pid: u32,
    /// True if the server removes the file of the control socket at its end.
    pub(super) removes_control_file: bool,
    /// For each listening socket of NBD, true if the server removes its file at its end.
    pub(super) listeners: Vec<bool>,
    /// The devices of the vhost-user sockets.
    pub(super) machines: Vec<String>,
    /// The devices.
    pub(super) devices: HandedOverDevices,
    /// The NBD clients.
    pub(super) clients: Vec<ClientState>,
}

impl ServerState {
    /// Number of descriptors that belong to the state.
    pub(super) fn descriptors(&self) -> usize {
        1 + self.listeners.len() + self.machines.len() + self.clients.len()
    }
}

/// A [`DetachedNbdClient`] without its socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ClientState {
    /// Name of the export.
    export: String,
    /// True if replies are structured.
    structured: bool,
    /// Number and name of each metadata context.
    contexts: Vec<(u32, String)>,
    /// Received bytes that were not handled, two digits each.
    unread: String,
    /// Number of bytes to discard when they arrive.
    skip: u64,
}

impl ClientState {
    /// Describes a client.
    pub(super) fn of(client: &DetachedNbdClient) -> ClientState {
        ClientState {
            export: client.export.clone(),
            structured: client.structured,
            contexts: client.contexts.clone(),
            unread: client.unread.iter().map(|byte| format!("{byte:02x}")).collect(),
            skip: client.skip,
        }
    }

    /// The client with its socket; `None` if the text of its bytes is invalid.
    pub(super) fn with_socket(self, socket: OwnedFd) -> Option<DetachedNbdClient> {
        let ClientState { export, structured, contexts, unread, skip } = self;
        let unread = parse_hex(&unread)?;
        Some(DetachedNbdClient { socket, export, structured, contexts, unread, skip })
    }
}

/// The bytes of pairs of hexadecimal digits.
fn parse_hex(text: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let digit = |digit: u8| char::from(digit).to_digit(16);
    let byte = |pair: &[u8; 2]| Some((digit(pair[0])? << 4 | digit(pair[1])?) as u8);
    if rest.is_empty() { pairs.iter().map(byte).collect() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The state of a server of version 0.1.0, recorded. `tests/upgrade.rs` has it taken over.
    const RECORDED: &str = include_str!("recorded_format_1.json");

    #[test]
    fn the_state_of_an_older_release_can_be_read() {
        let state: ServerState = serde_json::from_str(RECORDED).unwrap();
        assert_eq!((state.format, state.descriptors()), (1, 5));
        let names: Vec<_> = state.devices.devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["snap", "disk", "top"]);
        assert_eq!(state.clients[1].unread, "25609513");
        let again: ServerState = serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap();
        assert_eq!(again, state);
    }

    #[test]
    fn bytes_are_pairs_of_digits() {
        assert_eq!(parse_hex("00ff2A"), Some(vec![0, 255, 42]));
        assert_eq!((parse_hex(""), parse_hex("0"), parse_hex("0g")), (Some(vec![]), None, None));
    }
}
