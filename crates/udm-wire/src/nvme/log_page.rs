//! Log pages (*Base* 5.16.1).

use super::identify::put;
use super::{AnaState, NvmeCommand};

/// The longest log page that udm creates, in bytes: a changed-namespace list, or an ANA log of 1024
/// namespaces in a few groups.
pub const LOG_PAGE_MAX: usize = 64 << 10;

/// A log page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogPage {
    /// Errors of commands.
    Error,
    /// Health of the controller.
    Health,
    /// Firmware slots.
    Firmware,
    /// Namespaces that have changed since the page was last read.
    ChangedNamespaces,
    /// States of ANA groups.
    Ana,
    /// Resets of other controllers.
    CrossControllerReset,
    /// Subsystems and their addresses.
    Discovery,
    /// A page that udm does not have.
    Other(u8),
}

/// The arguments of a Get Log Page command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogPageRequest {
    /// The page.
    pub page: LogPage,
    /// The page's specific field.
    pub specific: u8,
    /// Reading the page does not make the controller report its event again.
    pub retains_event: bool,
    /// Length in bytes, a multiple of 4. At most 16 GiB: the controller sends no more than the page
    /// and the data pointer have.
    pub len: u64,
    /// Offset in the page, in bytes.
    pub offset: u64,
}

impl LogPageRequest {
    /// The arguments of `command`.
    #[must_use]
    pub fn decode(command: &NvmeCommand) -> LogPageRequest {
        let dword = command.dword(10);
        let page = match dword as u8 {
            0x01 => LogPage::Error,
            0x02 => LogPage::Health,
            0x03 => LogPage::Firmware,
            0x04 => LogPage::ChangedNamespaces,
            0x0c => LogPage::Ana,
            0x1e => LogPage::CrossControllerReset,
            0x70 => LogPage::Discovery,
            other => LogPage::Other(other),
        };
        let dwords = u64::from(dword >> 16) | u64::from(command.dword(11) & 0xffff) << 16;
        LogPageRequest {
            page,
            specific: (dword >> 8 & 0x7f) as u8,
            retains_event: dword & 1 << 15 != 0,
            len: (dwords + 1) * 4,
            offset: command.dwords(12),
        }
    }
}

/// The health page: nothing is wrong.
#[must_use]
pub fn encode_health_log() -> Vec<u8> {
    const ROOM_TEMPERATURE_KELVIN: u16 = 298;
    let mut bytes = vec![0; 512];
    put(&mut bytes, 1, &ROOM_TEMPERATURE_KELVIN.to_le_bytes());
    // All spare is available.
    (bytes[3], bytes[4]) = (100, 1);
    bytes
}

/// The firmware page: one slot, with this revision of at most 8 bytes.
///
/// # Panics
/// If the revision is too long.
#[must_use]
pub fn encode_firmware_log(revision: &str) -> Vec<u8> {
    let mut bytes = vec![0; 512];
    bytes[0] = 1;
    bytes[8..16].fill(b' ');
    put(&mut bytes, 8, revision.as_bytes());
    bytes
}

/// The page of changed namespaces. If there are more than 1024, it only says that there are many.
#[must_use]
pub fn encode_changed_namespaces(namespaces: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    if namespaces.len() > 1024 {
        put(&mut bytes, 0, &u32::MAX.to_le_bytes());
        return bytes;
    }
    for (entry, nsid) in bytes.chunks_exact_mut(4).zip(namespaces) {
        entry.copy_from_slice(&nsid.to_le_bytes());
    }
    bytes
}

/// An ANA group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnaGroup {
    /// Number of the group, at least 1.
    pub id: u32,
    /// Number of changes of the group.
    pub changes: u64,
    /// State on this controller.
    pub state: AnaState,
    /// The namespaces of the group, in ascending order.
    pub namespaces: Vec<u32>,
}

/// The ANA page; with `groups_only`, without the namespaces. `changes` is the number of changes of
/// all groups.
#[must_use]
pub fn encode_ana_log(changes: u64, groups: &[AnaGroup], groups_only: bool) -> Vec<u8> {
    let mut bytes = vec![0; 16];
    put(&mut bytes, 0, &changes.to_le_bytes());
    put(&mut bytes, 8, &(groups.len() as u16).to_le_bytes());
    for group in groups {
        let namespaces = if groups_only { &[] } else { &group.namespaces[..] };
        let at = bytes.len();
        bytes.resize(at + 32 + namespaces.len() * 4, 0);
        put(&mut bytes, at, &group.id.to_le_bytes());
        put(&mut bytes, at + 4, &(namespaces.len() as u32).to_le_bytes());
        put(&mut bytes, at + 8, &group.changes.to_le_bytes());
        bytes[at + 16] = group.state as u8;
        for (number, nsid) in namespaces.iter().enumerate() {
            put(&mut bytes, at + 32 + number * 4, &nsid.to_le_bytes());
        }
    }
    bytes
}

/// A subsystem at an address, on TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryEntry {
    /// The discovery subsystem itself.
    pub is_discovery: bool,
    /// Number of the port.
    pub port_id: u16,
    /// Address and TCP port.
    pub address: std::net::SocketAddr,
    /// Name of the subsystem, at most 223 bytes.
    pub subsystem: String,
    /// Limit of entries in the admin queue.
    pub admin_queue_max: u16,
}

/// The discovery page. `generation` changes with its content.
#[must_use]
pub fn encode_discovery_log(generation: u64, entries: &[DiscoveryEntry]) -> Vec<u8> {
    const ENTRY: usize = 1024;
    let mut bytes = vec![0; ENTRY * (entries.len() + 1)];
    put(&mut bytes, 0, &generation.to_le_bytes());
    put(&mut bytes, 8, &(entries.len() as u64).to_le_bytes());
    for (entry, out) in entries.iter().zip(bytes[ENTRY..].chunks_exact_mut(ENTRY)) {
        // TRTYPE TCP, ADRFAM, SUBTYPE, TREQ: a secure channel is not required.
        let family = if entry.address.is_ipv4() { 1 } else { 2 };
        let kind = if entry.is_discovery { 3 } else { 2 };
        put(out, 0, &[3, family, kind, 2]);
        put(out, 4, &entry.port_id.to_le_bytes());
        // Controllers are created for each association.
        put(out, 6, &u16::MAX.to_le_bytes());
        put(out, 8, &entry.admin_queue_max.to_le_bytes());
        // TRSVCID and TRADDR are ASCII, padded with spaces; Linux accepts nulls too.
        out[32..64].fill(b' ');
        put(out, 32, entry.address.port().to_string().as_bytes());
        put(out, 256, entry.subsystem.as_bytes());
        out[512..768].fill(b' ');
        put(out, 512, entry.address.ip().to_string().as_bytes());
    }
    bytes
}
