//! Commands of fabrics: `Connect` and the properties of a controller (*Base* 6).

use super::auth::AuthenticationCommand;
use super::nqn::decode_nqn;
use super::{NqnError, NvmeCommand, NvmeStatus};
use crate::bytes::{u16_at, u32_at};

/// Bytes of the data of a Connect command.
pub const CONNECT_DATA_SIZE: usize = 1024;

/// The bit of the result of a Connect command that says that the host must authenticate itself on
/// this queue (AUTHREQ.ATR, *Base* 6.3).
pub const CONNECT_AUTHENTICATION_REQUIRED: u64 = 1 << 17;

/// The bit of the result of a Connect command that says that the authentication must lead to a
/// secure channel, which is TLS (AUTHREQ.ASCR, *Base* 6.3).
pub const CONNECT_SECURE_CHANNEL_REQUIRED: u64 = 1 << 18;

/// Offsets of properties (*Base* 3.1.3).
pub mod property {
    /// Capabilities of the controller, 8 bytes.
    pub const CAPABILITIES: u32 = 0x00;
    /// Version of the specification, 4 bytes.
    pub const VERSION: u32 = 0x08;
    /// Configuration of the controller, 4 bytes; the only one that a host may set.
    pub const CONFIGURATION: u32 = 0x14;
    /// Status of the controller, 4 bytes.
    pub const STATUS: u32 = 0x1c;
}

/// A command of fabrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FabricsCommand {
    /// Sets a property.
    PropertySet(PropertySet),
    /// Reads a property.
    PropertyGet(PropertyGet),
    /// Connects a queue.
    Connect(ConnectCommand),
    /// Sends a message of an authentication.
    AuthenticationSend(AuthenticationCommand),
    /// Receives a message of an authentication.
    AuthenticationReceive(AuthenticationCommand),
    /// A type that udm does not know.
    Other(u8),
}

impl FabricsCommand {
    /// The command in a capsule whose opcode is [`super::OPCODE_FABRICS`].
    #[must_use]
    pub fn decode(command: &NvmeCommand) -> FabricsCommand {
        let bytes = command.bytes();
        let is_long = bytes[40] & 0b111 == 1;
        match bytes[4] {
            0x00 => FabricsCommand::PropertySet(PropertySet {
                offset: command.dword(11),
                is_long,
                value: command.dwords(12),
            }),
            0x01 => FabricsCommand::Connect(ConnectCommand {
                format: u16_at(bytes, 40),
                queue: u16_at(bytes, 42),
                queue_size: u16_at(bytes, 44),
                no_flow_control: bytes[46] & 1 << 2 != 0,
                keep_alive_ms: u32_at(bytes, 48),
            }),
            0x04 => FabricsCommand::PropertyGet(PropertyGet { offset: command.dword(11), is_long }),
            0x05 => FabricsCommand::AuthenticationSend(AuthenticationCommand::decode(command)),
            0x06 => FabricsCommand::AuthenticationReceive(AuthenticationCommand::decode(command)),
            other => FabricsCommand::Other(other),
        }
    }
}

/// Sets a property (*Base* 6.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PropertySet {
    /// Offset of the property.
    pub offset: u32,
    /// The property has 8 bytes, not 4.
    pub is_long: bool,
    /// The new value.
    pub value: u64,
}

/// Reads a property (*Base* 6.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PropertyGet {
    /// Offset of the property.
    pub offset: u32,
    /// The property has 8 bytes, not 4.
    pub is_long: bool,
}

/// The fields of a Connect command (*Base* 6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectCommand {
    /// Format of the data; 0.
    pub format: u16,
    /// Number of the queue; 0 for the admin queue.
    pub queue: u16,
    /// Entries of the queue, minus 1.
    pub queue_size: u16,
    /// The host does not want flow control of the submission queue.
    pub no_flow_control: bool,
    /// Keep-alive timeout in milliseconds; 0 for none.
    pub keep_alive_ms: u32,
}

impl ConnectCommand {
    /// The command, as a host sends it.
    #[must_use]
    pub fn encode(&self, id: u16) -> NvmeCommand {
        let mut bytes = [0; super::SQE_SIZE];
        bytes[0] = super::OPCODE_FABRICS;
        bytes[1] = 0x40;
        bytes[2..4].copy_from_slice(&id.to_le_bytes());
        bytes[4] = 1;
        bytes[32..36].copy_from_slice(&(CONNECT_DATA_SIZE as u32).to_le_bytes());
        bytes[39] = 0x01;
        bytes[40..42].copy_from_slice(&self.format.to_le_bytes());
        bytes[42..44].copy_from_slice(&self.queue.to_le_bytes());
        bytes[44..46].copy_from_slice(&self.queue_size.to_le_bytes());
        bytes[46] = u8::from(self.no_flow_control) << 2;
        bytes[48..52].copy_from_slice(&self.keep_alive_ms.to_le_bytes());
        NvmeCommand::from_bytes(bytes)
    }
}

/// Error: a parameter of a Connect command is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct ConnectError {
    /// Status of the completion.
    pub status: NvmeStatus,
    /// The parameter is in the data, not in the command.
    pub in_data: bool,
    /// Offset of the parameter.
    pub at: u16,
    /// Description for users.
    pub what: &'static str,
}

impl ConnectError {
    /// A wrong parameter of the command, at this byte.
    #[must_use]
    pub const fn command(at: u16, what: &'static str) -> ConnectError {
        ConnectError { status: NvmeStatus::CONNECT_INVALID_PARAMETERS.permanent(), in_data: false, at, what }
    }

    /// A wrong parameter of the data, at this byte.
    #[must_use]
    pub const fn data(at: u16, what: &'static str) -> ConnectError {
        ConnectError { status: NvmeStatus::CONNECT_INVALID_PARAMETERS.permanent(), in_data: true, at, what }
    }

    /// The result of the completion (*Base* 6.3, figure "Connect Response").
    #[must_use]
    pub const fn result(&self) -> u64 {
        self.at as u64 | (self.in_data as u64) << 16
    }
}

/// The data of a Connect command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectData {
    /// Identifier of the host.
    pub host_id: [u8; 16],
    /// The controller; 0xffff for any, which an admin queue needs.
    pub controller: u16,
    /// Name of the subsystem.
    pub subsystem: String,
    /// Name of the host.
    pub host: String,
}

impl ConnectData {
    /// Offset of the controller in the data.
    pub const CONTROLLER_AT: u16 = 16;
    /// Offset of the subsystem's name.
    pub const SUBSYSTEM_AT: u16 = 256;
    /// Offset of the host's name.
    pub const HOST_AT: u16 = 512;

    /// The data in `bytes`.
    ///
    /// # Errors
    /// A name is not valid.
    pub fn decode(bytes: &[u8; CONNECT_DATA_SIZE]) -> Result<ConnectData, ConnectError> {
        let name = |at: u16, what| {
            let field = &bytes[usize::from(at)..usize::from(at) + 256];
            decode_nqn(field).map_err(|_: NqnError| ConnectError::data(at, what))
        };
        let mut host_id = [0; 16];
        host_id.copy_from_slice(&bytes[..16]);
        Ok(ConnectData {
            host_id,
            controller: u16_at(bytes, 16),
            subsystem: name(ConnectData::SUBSYSTEM_AT, "invalid name of a subsystem")?,
            host: name(ConnectData::HOST_AT, "invalid name of a host")?,
        })
    }

    /// The bytes, as a host sends them. Names that are too long are cut.
    #[must_use]
    pub fn encode(&self) -> [u8; CONNECT_DATA_SIZE] {
        let mut bytes = [0; CONNECT_DATA_SIZE];
        bytes[..16].copy_from_slice(&self.host_id);
        bytes[16..18].copy_from_slice(&self.controller.to_le_bytes());
        for (at, name) in [(256, &self.subsystem), (512, &self.host)] {
            let len = name.len().min(255);
            bytes[at..at + len].copy_from_slice(&name.as_bytes()[..len]);
        }
        bytes
    }
}

/// The property `CAP` (*Base* 3.1.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerCapabilities {
    /// Maximum entries of a queue, minus 1.
    pub queue_entries: u16,
    /// Maximum time in steps of 500 ms for the controller to become ready.
    pub timeout: u8,
}

impl ControllerCapabilities {
    /// The value: contiguous queues, the NVM command set, pages of 4 KiB.
    #[must_use]
    pub const fn encode(&self) -> u64 {
        self.queue_entries as u64 | 1 << 16 | (self.timeout as u64) << 24 | 1 << 37
    }
}

/// The property `CC` (*Base* 3.1.3.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ControllerConfiguration(pub u32);

impl ControllerConfiguration {
    /// The controller processes commands.
    #[must_use]
    pub const fn is_enabled(self) -> bool {
        self.0 & 1 != 0
    }

    /// A shutdown is asked for.
    #[must_use]
    pub const fn is_shutdown(self) -> bool {
        self.0 >> 14 & 3 != 0
    }

    /// True if the command set, page size, arbitration and entry sizes are those that udm supports.
    /// A host may leave the entry sizes 0 until it enables the controller.
    #[must_use]
    pub const fn is_supported(self) -> bool {
        let entries = self.0 >> 16 & 0xff;
        self.0 >> 4 & 0x3ff == 0 && (entries == 0x46 || !self.is_enabled())
    }
}

/// The property `CSTS` (*Base* 3.1.3.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ControllerStatus {
    /// The controller processes commands.
    pub is_ready: bool,
    /// The controller has failed: the host must reset it.
    pub is_failed: bool,
    /// The shutdown that the host has asked for.
    pub shutdown: ShutdownStatus,
}

/// The field `CSTS.SHST`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum ShutdownStatus {
    /// No shutdown was asked for.
    #[default]
    None = 0,
    /// Requests of the controller may still be at a device.
    Occurring = 1,
    /// The shutdown is complete: no request of the controller is at a device.
    Complete = 2,
}

impl ControllerStatus {
    /// The value.
    #[must_use]
    pub const fn encode(self) -> u32 {
        self.is_ready as u32 | (self.is_failed as u32) << 1 | (self.shutdown as u32) << 2
    }

    /// The status of this value.
    #[must_use]
    pub const fn decode(value: u32) -> ControllerStatus {
        ControllerStatus {
            is_ready: value & 1 != 0,
            is_failed: value & 2 != 0,
            shutdown: match value >> 2 & 3 {
                0 => ShutdownStatus::None,
                2 => ShutdownStatus::Complete,
                // 3 is reserved.
                _ => ShutdownStatus::Occurring,
            },
        }
    }
}
