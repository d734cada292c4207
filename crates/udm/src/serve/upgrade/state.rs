//! The state that a server hands over, as JSON.
//!
//! A field is never removed or given another meaning without another version of the format. New
//! fields have a default, so a newer program reads the state of an older one.

use crate::serve::vhost_user::VhostUserDisk;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use udm_control::verbs::handover::{HandedOverDevices, HandoverNeeds};
use udm_frontends::nbd::DetachedNbdClient;
use udm_frontends::unix_socket::BoundUnixSocket;
use udm_frontends::vhost_user::{DetachedVhostUserFrontEnd, VhostUserSetupMessage};
use udm_wire::nbd::NbdHeaderStyle;

/// Versions of the format that this program reads.
pub(super) const FORMATS: [u32; 6] = [1, 2, 3, 4, 5, 6];

/// The version to write: the lowest that every program that reads it serves as it should.
///
/// | version | a program that does not read it |
/// |---|---|
/// | 2 | would serve devices for some clients to all |
/// | 3 | would serve devices without their limits of requests and bytes per second |
/// | 4 | would not understand clients with extended headers |
/// | 5 | would disconnect machines with packed rings |
/// | 6 | would leave block devices without a server that were added, or whose device was renamed |
pub(super) fn format_for(needs: HandoverNeeds, front_ends: FrontEndNeeds) -> u32 {
    match (front_ends, needs) {
        (FrontEndNeeds { block_devices: true, .. }, _) => 6,
        (FrontEndNeeds { packed_rings: true, .. }, _) => 5,
        (FrontEndNeeds { extended_clients: true, .. }, _) => 4,
        (_, HandoverNeeds { throttles: true, .. }) => 3,
        (_, HandoverNeeds { allowed_clients: true, .. }) => 2,
        _ => 1,
    }
}

/// What programs must know that take front ends over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct FrontEndNeeds {
    /// An NBD client has extended headers.
    pub(super) extended_clients: bool,
    /// A machine has packed rings.
    pub(super) packed_rings: bool,
    /// A block device was added while the server ran, or its device was renamed: the options do not
    /// name it.
    pub(super) block_devices: bool,
}

/// All that a server hands over. The descriptors come beside it: the control socket, then those of
/// `listeners`, `machines` and `clients`, in this order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ServerState {
    /// Version of the format ([`format_for`]).
    pub(super) format: u32,
    /// Process ID of the old server.
    pub(super) pid: u32,
    /// True if the server removes the file of the control socket at its end.
    pub(super) removes_control_file: bool,
    /// For each listening socket of NBD, true if the server removes its file at its end.
    pub(super) listeners: Vec<bool>,
    /// The vhost-user sockets.
    pub(super) machines: Vec<MachineState>,
    /// The block devices of ublk; `None` from a server that has only those of its options.
    #[serde(default)]
    pub(super) block_devices: Option<Vec<BlockDeviceState>>,
    /// The devices.
    pub(super) devices: HandedOverDevices,
    /// The NBD clients.
    pub(super) clients: Vec<ClientState>,
}

impl ServerState {
    /// Number of descriptors that belong to the state.
    pub(super) fn descriptors(&self) -> usize {
        let machines: usize = self.machines.iter().map(MachineState::descriptors).sum();
        1 + self.listeners.len() + machines + self.clients.len()
    }
}

/// A vhost-user socket. Its descriptors: the listening socket, then the connection of the front end
/// and those of its messages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MachineState {
    /// Name of the device.
    pub(super) device: String,
    /// The messages of the connected front end, two digits a byte, with their numbers of
    /// descriptors.
    pub(super) messages: Option<Vec<(String, usize)>>,
    /// True if the socket was added while the server runs.
    #[serde(default)]
    pub(super) is_added: bool,
}

impl MachineState {
    /// Describes a disk.
    pub(super) fn of(disk: &VhostUserDisk) -> MachineState {
        let message = |message: &VhostUserSetupMessage| (to_hex(&message.bytes), message.fds.len());
        let messages = disk.front_end.as_ref().map(|one| one.messages.iter().map(message).collect());
        MachineState { device: disk.name.clone(), messages, is_added: disk.is_added }
    }

    /// Number of its descriptors.
    fn descriptors(&self) -> usize {
        let of_messages =
            |messages: &Vec<(String, usize)>| 1 + messages.iter().map(|(_, fds)| fds).sum::<usize>();
        1 + self.messages.as_ref().map_or(0, of_messages)
    }

    /// Its descriptors, in their order.
    ///
    /// # Errors
    /// There are no descriptors for copies.
    pub(super) fn clone_descriptors(disk: &VhostUserDisk) -> io::Result<Vec<OwnedFd>> {
        let front_end = disk.front_end.iter();
        let of_messages = front_end.clone().flat_map(|one| &one.messages).flat_map(|message| &message.fds);
        let connection = front_end.map(|one| &one.socket);
        let all = connection.chain(of_messages).map(OwnedFd::as_fd);
        [disk.socket.as_fd()].into_iter().chain(all).map(|fd| fd.try_clone_to_owned()).collect()
    }

    /// The disk with its descriptors; `None` if one is missing or a message is no text of bytes.
    pub(super) fn with_descriptors(self, fds: &mut impl Iterator<Item = OwnedFd>) -> Option<VhostUserDisk> {
        let socket = Arc::new(BoundUnixSocket::taken_over(fds.next()?).ok()?);
        let front_end = match self.messages {
            None => None,
            Some(messages) => {
                let connection = fds.next()?;
                let message = |(text, count): (String, usize)| {
                    let (bytes, fds) = (parse_hex(&text)?, fds.by_ref().take(count).collect());
                    Some(VhostUserSetupMessage { bytes, fds })
                };
                let messages = messages.into_iter().map(message).collect::<Option<_>>()?;
                Some(DetachedVhostUserFrontEnd { socket: connection, messages })
            }
        };
        Some(VhostUserDisk { name: self.device, socket, front_end, is_added: self.is_added })
    }
}

/// A block device of ublk. The kernel has the rest of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::serve) struct BlockDeviceState {
    /// Name of the device.
    pub(in crate::serve) device: String,
    /// The name in the mark of the block device.
    pub(in crate::serve) marked_as: String,
    /// The number that was asked for.
    pub(in crate::serve) number: Option<u32>,
    /// The number of queues that was asked for.
    pub(in crate::serve) queues: Option<u16>,
    /// True if it was added while the server runs.
    pub(in crate::serve) is_added: bool,
}

impl BlockDeviceState {
    /// True if the options of the server do not name it.
    pub(super) fn is_unknown_to_options(&self) -> bool {
        self.is_added || self.device != self.marked_as
    }
}

/// A [`DetachedNbdClient`] without its socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ClientState {
    /// Name of the export.
    export: String,
    /// True if replies are structured.
    structured: bool,
    /// True if headers are extended.
    #[serde(default)]
    extended: bool,
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
            structured: client.header_style == NbdHeaderStyle::Structured,
            extended: client.header_style.is_extended(),
            contexts: client.contexts.clone(),
            unread: to_hex(&client.unread),
            skip: client.skip,
        }
    }

    /// The client with its socket; `None` if the text of its bytes is invalid.
    pub(super) fn with_socket(self, socket: OwnedFd) -> Option<DetachedNbdClient> {
        let ClientState { export, structured, extended, contexts, unread, skip } = self;
        let header_style = match (structured, extended) {
            (_, true) => NbdHeaderStyle::Extended,
            (true, false) => NbdHeaderStyle::Structured,
            (false, false) => NbdHeaderStyle::Simple,
        };
        let unread = parse_hex(&unread)?;
        Some(DetachedNbdClient { socket, export, header_style, contexts, unread, skip })
    }
}

/// Two hexadecimal digits a byte.
fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
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
    fn a_client_keeps_its_headers() {
        let styles = [NbdHeaderStyle::Simple, NbdHeaderStyle::Structured, NbdHeaderStyle::Extended];
        for header_style in styles {
            let socket = || OwnedFd::from(std::os::unix::net::UnixStream::pair().unwrap().0);
            let (export, contexts, unread) = ("disk".to_owned(), vec![(1, "c".to_owned())], vec![7]);
            let client =
                DetachedNbdClient { socket: socket(), export, header_style, contexts, unread, skip: 9 };
            let text = serde_json::to_string(&ClientState::of(&client)).unwrap();
            let again: ClientState = serde_json::from_str(&text).unwrap();
            assert_eq!(again.with_socket(socket()).unwrap().header_style, header_style);
        }
    }

    /// A program that would harm something is not given the state.
    #[test]
    fn the_format_is_the_lowest_that_harms_nothing() {
        let format = |extended_clients, packed_rings, block_devices| {
            let front_ends = FrontEndNeeds { extended_clients, packed_rings, block_devices };
            format_for(HandoverNeeds::default(), front_ends)
        };
        assert_eq!((format(false, false, false), format(true, false, false)), (1, 4));
        assert_eq!((format(false, true, false), format(true, true, false)), (5, 5));
        assert_eq!((format(false, false, true), format(true, true, true)), (6, 6));
        let disk = |device: &str, is_added| {
            let (device, marked_as) = (device.to_owned(), "disk".to_owned());
            BlockDeviceState { device, marked_as, number: None, queues: None, is_added }
        };
        let unknown = [disk("disk", false), disk("disk", true), disk("new", false)]
            .map(|disk| disk.is_unknown_to_options());
        assert_eq!(unknown, [false, true, true]);
    }

    #[test]
    fn bytes_are_pairs_of_digits() {
        assert_eq!(parse_hex("00ff2A"), Some(vec![0, 255, 42]));
        assert_eq!(to_hex(&[0, 255, 42]), "00ff2a");
        assert_eq!((parse_hex(""), parse_hex("0"), parse_hex("0g")), (Some(vec![]), None, None));
    }
}
