//! Cross-Controller Reset: a host asks one controller of a subsystem to reset another one, which it
//! does not reach, so that no request of the other one can land later.
//!
//! TP8028, which is part of the base specification since 2.3: the command is 5.4.3 (opcode 0x38,
//! figure 522), the log page 5.2.12.3.1 (0x1e, figures 304 and 305), the fields of Identify are in
//! figure 328 (CIU 135, CIRN 136 to 143, CCRL 1807, and CQT of TP4129 386 to 387), the statuses in
//! figure 103, the event in figure 154 (notice 0xf4). The values of CCRS, and of CCRF (bit 0
//! *validated*, bit 1 *controller level reset initiated*, bits 2 and 3 *retry*), are those of the
//! base specification 2.4 as libnvme has them (nvme-cli commit be8f20d2c). Bit 0 of the result
//! (*immediate reset successful*) is that of the patches for Linux by Mohamed Khalfella (versions 3
//! to 6).

use super::identify::put;
use super::{IDENTIFY_SIZE, NvmeCommand, SQE_SIZE};
use crate::bytes::{u16_at, u64_at};

/// The opcode of the command, on admin queues.
pub const OPCODE_CROSS_CONTROLLER_RESET: u8 = 0x38;

/// Entries of the log page at most.
pub const CROSS_CONTROLLER_RESET_LOG_MAX: usize = 511;

const HEADER: usize = 8;
const ENTRY: usize = 8;

/// A controller between two resets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ControllerInstance {
    /// Number of the controller (CNTLID).
    pub id: u16,
    /// The uniquifier (CIU), which grows at each reset; never 0.
    pub uniquifier: u8,
    /// A random number (CIRN), another one after each reset.
    pub random: u64,
}

/// What a host must know of a controller to fence its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FenceCapabilities {
    /// The instance; `None` if the controller cannot be the object of a reset.
    pub instance: Option<ControllerInstance>,
    /// Resets of other controllers at a time (CCRL); 0 if the command is not supported.
    pub resets_max: u8,
    /// The longest time in milliseconds that the controller needs to end its requests after it has
    /// lost the host (CQT); 0 if it does not say.
    pub quiesce_time_ms: u16,
}

impl FenceCapabilities {
    /// The capabilities in an Identify Controller structure.
    #[must_use]
    pub fn decode(bytes: &[u8; IDENTIFY_SIZE]) -> FenceCapabilities {
        let instance =
            ControllerInstance { id: u16_at(bytes, 78), uniquifier: bytes[135], random: u64_at(bytes, 136) };
        FenceCapabilities {
            instance: (instance.uniquifier != 0).then_some(instance),
            resets_max: bytes[1807],
            quiesce_time_ms: u16_at(bytes, 386),
        }
    }

    /// Writes the fields except the number of the controller.
    pub(super) fn encode(&self, bytes: &mut [u8; IDENTIFY_SIZE]) {
        if let Some(instance) = self.instance {
            bytes[135] = instance.uniquifier;
            put(bytes, 136, &instance.random.to_le_bytes());
        }
        bytes[1807] = self.resets_max;
        put(bytes, 386, &self.quiesce_time_ms.to_le_bytes());
    }
}

/// A Cross-Controller Reset command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossControllerReset {
    /// The controller to reset.
    pub impacted: ControllerInstance,
}

impl CrossControllerReset {
    /// The bit of the result that says that the reset is done. Without it, the reset is in
    /// progress, and an event tells its end.
    pub const DONE: u64 = 1;

    /// The arguments of `command`.
    #[must_use]
    pub fn decode(command: &NvmeCommand) -> CrossControllerReset {
        let dword = command.dword(10);
        let (id, uniquifier) = (dword as u16, (dword >> 16) as u8);
        CrossControllerReset { impacted: ControllerInstance { id, uniquifier, random: command.dwords(12) } }
    }

    /// The command with this identifier.
    #[must_use]
    pub fn encode(&self, id: u16) -> NvmeCommand {
        let mut bytes = [0; SQE_SIZE];
        (bytes[0], bytes[1]) = (OPCODE_CROSS_CONTROLLER_RESET, 0x40);
        put(&mut bytes, 2, &id.to_le_bytes());
        put(&mut bytes, 40, &self.impacted.id.to_le_bytes());
        bytes[42] = self.impacted.uniquifier;
        put(&mut bytes, 48, &self.impacted.random.to_le_bytes());
        NvmeCommand::from_bytes(bytes)
    }
}

/// Status of a reset (CCRS).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CrossControllerResetStatus {
    /// Requests of the controller may still land.
    InProgress = 0,
    /// No request of the controller will land.
    Succeeded = 1,
    /// Requests of the controller may still land, and the reset has ended.
    Failed = 2,
}

/// An entry of the log page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossControllerResetEntry {
    /// Number of the controller that is reset (ICID).
    pub impacted: u16,
    /// Its uniquifier (CIU).
    pub uniquifier: u8,
    /// Number of the controller that got the command (ACID).
    pub source: u16,
    /// Status of the reset.
    pub status: CrossControllerResetStatus,
}

/// CCRF: the command was checked, and the reset has begun.
const VALIDATED_AND_INITIATED: u8 = 0b11;

/// The log page with the first [`CROSS_CONTROLLER_RESET_LOG_MAX`] of `entries`.
#[must_use]
pub fn encode_cross_controller_reset_log(entries: &[CrossControllerResetEntry]) -> Vec<u8> {
    let entries = &entries[..entries.len().min(CROSS_CONTROLLER_RESET_LOG_MAX)];
    let mut bytes = vec![0; HEADER + entries.len() * ENTRY];
    put(&mut bytes, 0, &(entries.len() as u16).to_le_bytes());
    for (entry, out) in entries.iter().zip(bytes[HEADER..].chunks_exact_mut(ENTRY)) {
        put(out, 0, &entry.impacted.to_le_bytes());
        out[2] = entry.uniquifier;
        put(out, 4, &entry.source.to_le_bytes());
        (out[6], out[7]) = (entry.status as u8, VALIDATED_AND_INITIATED);
    }
    bytes
}

/// The entries of a log page of which a host has read `bytes`. A status that is not known counts as
/// failed: the host must not rely on it.
#[must_use]
pub fn decode_cross_controller_reset_log(bytes: &[u8]) -> Vec<CrossControllerResetEntry> {
    if bytes.len() < HEADER {
        return Vec::new();
    }
    let count = usize::from(u16_at(bytes, 0)).min(CROSS_CONTROLLER_RESET_LOG_MAX);
    let entry = |bytes: &[u8]| CrossControllerResetEntry {
        impacted: u16_at(bytes, 0),
        uniquifier: bytes[2],
        source: u16_at(bytes, 4),
        status: match bytes[6] {
            0 => CrossControllerResetStatus::InProgress,
            1 => CrossControllerResetStatus::Succeeded,
            _ => CrossControllerResetStatus::Failed,
        },
    };
    bytes[HEADER..].chunks_exact(ENTRY).take(count).map(entry).collect()
}
