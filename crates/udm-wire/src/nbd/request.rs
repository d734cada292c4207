//! Requests of the transmission phase.

use super::{CommandFlags, MAGIC_REQUEST, ProtocolError, be16_at, be32_at, be64_at};

/// The command of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Command {
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

impl Command {
    /// The command with this number.
    #[must_use]
    pub const fn from_number(number: u16) -> Command {
        match number {
            0 => Command::Read,
            1 => Command::Write,
            2 => Command::Disconnect,
            3 => Command::Flush,
            4 => Command::Trim,
            5 => Command::Cache,
            6 => Command::WriteZeroes,
            7 => Command::BlockStatus,
            other => Command::Other(other),
        }
    }

    /// The number on the wire.
    #[must_use]
    pub const fn number(self) -> u16 {
        match self {
            Command::Read => 0,
            Command::Write => 1,
            Command::Disconnect => 2,
            Command::Flush => 3,
            Command::Trim => 4,
            Command::Cache => 5,
            Command::WriteZeroes => 6,
            Command::BlockStatus => 7,
            Command::Other(other) => other,
        }
    }

    /// The flags that are valid with the command. FUA is valid with all; for a command that writes
    /// nothing, it has no effect.
    #[must_use]
    pub const fn flags(self) -> CommandFlags {
        match self {
            Command::Read => CommandFlags::FUA.union(CommandFlags::DF),
            Command::WriteZeroes => {
                CommandFlags::FUA.union(CommandFlags::NO_HOLE).union(CommandFlags::FAST_ZERO)
            }
            Command::BlockStatus => CommandFlags::FUA.union(CommandFlags::REQ_ONE),
            _ => CommandFlags::FUA,
        }
    }
}

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Flags of the command. Unknown bits are kept, so that [`Request::flags_fit`] finds them.
    pub flags: CommandFlags,
    /// The command.
    pub command: Command,
    /// The client's identifier of the request, returned in the reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

impl Request {
    /// Bytes of the header.
    pub const SIZE: usize = 28;

    /// Decodes a header. The server must check range, flags and command.
    ///
    /// # Errors
    /// A wrong magic number: the stream is out of sync and must be closed.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<Request, ProtocolError> {
        if be32_at(bytes, 0) != MAGIC_REQUEST {
            return Err(ProtocolError::Magic { what: "request", found: be32_at(bytes, 0).into() });
        }
        Ok(Request {
            flags: CommandFlags::from_bits_retain(be16_at(bytes, 4)),
            command: Command::from_number(be16_at(bytes, 6)),
            cookie: be64_at(bytes, 8),
            offset: be64_at(bytes, 16),
            len: be32_at(bytes, 24),
        })
    }

    /// Encodes the header as a client sends it; the data of a write follow.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut out = [0; Self::SIZE];
        out[..4].copy_from_slice(&MAGIC_REQUEST.to_be_bytes());
        out[4..6].copy_from_slice(&self.flags.bits().to_be_bytes());
        out[6..8].copy_from_slice(&self.command.number().to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out[16..24].copy_from_slice(&self.offset.to_be_bytes());
        out[24..].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// Bytes of data after the header; 0 unless it is a write.
    #[must_use]
    pub const fn payload_len(&self) -> u32 {
        match self.command {
            Command::Write => self.len,
            _ => 0,
        }
    }

    /// True if the command takes all of the flags. Otherwise the reply is EINVAL.
    #[must_use]
    pub const fn flags_fit(&self) -> bool {
        self.command.flags().contains(self.flags)
    }
}
