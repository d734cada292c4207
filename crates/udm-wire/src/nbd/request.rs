//! Requests of the transmission phase.

use super::{
    CommandFlags, MAGIC_EXTENDED_REQUEST, MAGIC_REQUEST, NbdHeaderStyle, NbdProtocolError, be16_at, be32_at,
    be64_at,
};

/// The command of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NbdCommand {
    /// Read `len` bytes at `offset`.
    Read,
    /// Write the `len` bytes that follow the header.
    Write,
    /// Complete the requests in flight and close. No reply.
    Disconnect,
    /// Make all writes durable whose replies were sent.
    Flush,
    /// The content of the range is not needed any more.
    Trim,
    /// Read the range into caches.
    Cache,
    /// Fill the range with zeroes.
    WriteZeroes,
    /// Query the block status.
    BlockStatus,
    /// A command that udm does not know: the reply is EINVAL.
    Other(u16),
}

impl NbdCommand {
    /// The command with this number.
    #[must_use]
    pub const fn from_number(number: u16) -> NbdCommand {
        match number {
            0 => NbdCommand::Read,
            1 => NbdCommand::Write,
            2 => NbdCommand::Disconnect,
            3 => NbdCommand::Flush,
            4 => NbdCommand::Trim,
            5 => NbdCommand::Cache,
            6 => NbdCommand::WriteZeroes,
            7 => NbdCommand::BlockStatus,
            other => NbdCommand::Other(other),
        }
    }

    /// The number on the wire.
    #[must_use]
    pub const fn number(self) -> u16 {
        match self {
            NbdCommand::Read => 0,
            NbdCommand::Write => 1,
            NbdCommand::Disconnect => 2,
            NbdCommand::Flush => 3,
            NbdCommand::Trim => 4,
            NbdCommand::Cache => 5,
            NbdCommand::WriteZeroes => 6,
            NbdCommand::BlockStatus => 7,
            NbdCommand::Other(other) => other,
        }
    }

    /// The flags that are valid with the command. FUA is valid with all; for a command that writes
    /// nothing, it has no effect.
    #[must_use]
    pub const fn flags(self) -> CommandFlags {
        match self {
            NbdCommand::Read => CommandFlags::FUA.union(CommandFlags::DF),
            NbdCommand::WriteZeroes => {
                CommandFlags::FUA.union(CommandFlags::NO_HOLE).union(CommandFlags::FAST_ZERO)
            }
            NbdCommand::BlockStatus => CommandFlags::FUA.union(CommandFlags::REQ_ONE),
            _ => CommandFlags::FUA,
        }
    }
}

/// The header of a request, compact or extended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NbdRequestHeader {
    /// Flags of the command. Unknown bits are kept, so that [`NbdRequestHeader::flags_fit`] finds
    /// them.
    pub flags: CommandFlags,
    /// The command.
    pub command: NbdCommand,
    /// The client's identifier of the request, returned in the reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Length in bytes; below 2^32 in a compact header.
    pub len: u64,
}

impl NbdRequestHeader {
    /// Bytes of a compact header.
    pub const SIZE: usize = 28;

    /// Bytes of an extended header.
    pub const EXTENDED_SIZE: usize = 32;

    /// Decodes a compact header. The server must check range, flags and command.
    ///
    /// # Errors
    /// A wrong magic number: the stream is out of sync and must be closed.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<NbdRequestHeader, NbdProtocolError> {
        if be32_at(bytes, 0) != MAGIC_REQUEST {
            return Err(NbdProtocolError::Magic { what: "request", found: be32_at(bytes, 0).into() });
        }
        Ok(NbdRequestHeader {
            flags: CommandFlags::from_bits_retain(be16_at(bytes, 4)),
            command: NbdCommand::from_number(be16_at(bytes, 6)),
            cookie: be64_at(bytes, 8),
            offset: be64_at(bytes, 16),
            len: be32_at(bytes, 24).into(),
        })
    }

    /// Decodes an extended header, as [`NbdRequestHeader::decode`].
    ///
    /// # Errors
    /// A wrong magic number: the stream is out of sync and must be closed.
    pub fn decode_extended(bytes: &[u8; Self::EXTENDED_SIZE]) -> Result<NbdRequestHeader, NbdProtocolError> {
        if be32_at(bytes, 0) != MAGIC_EXTENDED_REQUEST {
            let found = be32_at(bytes, 0).into();
            return Err(NbdProtocolError::Magic { what: "extended request", found });
        }
        Ok(NbdRequestHeader {
            flags: CommandFlags::from_bits_retain(be16_at(bytes, 4)),
            command: NbdCommand::from_number(be16_at(bytes, 6)),
            cookie: be64_at(bytes, 8),
            offset: be64_at(bytes, 16),
            len: be64_at(bytes, 24),
        })
    }

    /// Encodes a compact header as a client sends it; the data of a write follow. `len` is below
    /// 2^32.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::SIZE] {
        debug_assert!(self.len <= u32::MAX.into(), "a compact request of {} bytes", self.len);
        let mut out = [0; Self::SIZE];
        out[..4].copy_from_slice(&MAGIC_REQUEST.to_be_bytes());
        out[4..24].copy_from_slice(&self.encode_middle());
        out[24..].copy_from_slice(&(self.len as u32).to_be_bytes());
        out
    }

    /// Encodes an extended header as a client sends it; with [`CommandFlags::PAYLOAD_LEN`], `len`
    /// bytes follow.
    #[must_use]
    pub fn encode_extended(&self) -> [u8; Self::EXTENDED_SIZE] {
        let mut out = [0; Self::EXTENDED_SIZE];
        out[..4].copy_from_slice(&MAGIC_EXTENDED_REQUEST.to_be_bytes());
        out[4..24].copy_from_slice(&self.encode_middle());
        out[24..].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// Flags, command, cookie and offset.
    fn encode_middle(&self) -> [u8; 20] {
        let mut out = [0; 20];
        out[..2].copy_from_slice(&self.flags.bits().to_be_bytes());
        out[2..4].copy_from_slice(&self.command.number().to_be_bytes());
        out[4..12].copy_from_slice(&self.cookie.to_be_bytes());
        out[12..].copy_from_slice(&self.offset.to_be_bytes());
        out
    }

    /// Bytes of data after the header. A compact header has data if it is a write, an extended one
    /// if it says so.
    #[must_use]
    pub const fn payload_len(&self, style: NbdHeaderStyle) -> u64 {
        let has_payload = match style {
            NbdHeaderStyle::Extended => self.flags.contains(CommandFlags::PAYLOAD_LEN),
            NbdHeaderStyle::Simple | NbdHeaderStyle::Structured => matches!(self.command, NbdCommand::Write),
        };
        if has_payload { self.len } else { 0 }
    }

    /// True if the command takes all of the flags, and has those that it needs. Otherwise the reply
    /// is EINVAL.
    #[must_use]
    pub const fn flags_fit(&self, style: NbdHeaderStyle) -> bool {
        let flags = self.flags.difference(CommandFlags::PAYLOAD_LEN);
        let has_payload = self.flags.contains(CommandFlags::PAYLOAD_LEN);
        let payload_fits = match (style, self.command) {
            (NbdHeaderStyle::Extended, NbdCommand::Write) => has_payload,
            (NbdHeaderStyle::Extended, NbdCommand::BlockStatus) => true,
            _ => !has_payload,
        };
        payload_fits && self.command.flags().contains(flags)
    }
}
