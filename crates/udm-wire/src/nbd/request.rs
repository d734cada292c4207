//! Requests of the transmission phase.

use super::{CommandFlags, MAGIC_REQUEST, ProtocolError, be16_at, be32_at, be64_at};

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Command {
    /// Read `len` bytes at `offset`.
    Read,
    /// Write the `len` bytes behind the header.
    Write,
    /// Finish what is in flight and close. No reply.
    Disconnect,
    /// Make all answered writes durable.
    Flush,
    /// The range is of no more use.
    Trim,
    /// Read the range into caches.
    Cache,
    /// The range becomes zeroes.
    WriteZeroes,
    /// Status of blocks.
    BlockStatus,
    /// A command that udm doesn't know: answered with EINVAL.
    Other(u16),
}

impl Command {
    /// For the number on the wire.
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

    /// The flags that make sense with the command. FUA does with all: where nothing is written it
    /// means nothing.
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
    /// Modifiers. Unknown bits are kept, for [`Request::flags_fit`] to find.
    pub flags: CommandFlags,
    /// What to do.
    pub command: Command,
    /// The client's name for it, returned in the reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

impl Request {
    /// Bytes of the header.
    pub const SIZE: usize = 28;

    /// Reads a header. Range, flags and command are the server's to check.
    ///
    /// # Errors
    /// A wrong magic: the stream is out of step and must be closed.
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

    /// The header as a client sends it; a write's data follow.
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

    /// Bytes of data behind the header: those of a write.
    #[must_use]
    pub const fn payload_len(&self) -> u32 {
        match self.command {
            Command::Write => self.len,
            _ => 0,
        }
    }

    /// True when each flag is one that the command takes. Otherwise the answer is EINVAL.
    #[must_use]
    pub const fn flags_fit(&self) -> bool {
        self.command.flags().contains(self.flags)
    }
}
