//! The protocol's numbers and udm's bounds.

use bitflags::bitflags;
use udm_core::errno;

/// The port that IANA gave to NBD.
pub const PORT: u16 = 10809;

/// First 8 bytes of a server: "NBDMAGIC".
pub const MAGIC_SERVER: u64 = 0x4e42_444d_4147_4943;
/// Next 8 bytes of a newstyle server, and the first of every option: "IHAVEOPT".
pub const MAGIC_OPTION: u64 = 0x4948_4156_454f_5054;
/// First 8 bytes of every reply to an option.
pub const MAGIC_OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// First 4 bytes of every request.
pub const MAGIC_REQUEST: u32 = 0x2560_9513;
/// First 4 bytes of a simple reply.
pub const MAGIC_SIMPLE_REPLY: u32 = 0x6744_6698;
/// First 4 bytes of each chunk of a structured reply.
pub const MAGIC_STRUCTURED_REPLY: u32 = 0x668e_33ef;

/// Bytes of the server's greeting.
pub const GREETING_SIZE: usize = 18;
/// Bytes of the client's answer to it.
pub const CLIENT_FLAGS_SIZE: usize = 4;
/// Bytes of an option's header: magic, option, length.
pub const OPTION_HEADER_SIZE: usize = 16;
/// Bytes of the header of an option's reply: magic, option, reply, length.
pub const OPTION_REPLY_HEADER_SIZE: usize = 20;
/// Zeroes behind the reply to `EXPORT_NAME`, unless both sides agreed on none.
pub const EXPORT_NAME_ZEROES: usize = 124;

/// The longest string (export name, description, error message) that the protocol allows, in bytes.
pub const STRING_MAX: usize = 4096;
/// The longest data of an option that is kept, in bytes; two strings and the widest list of infos
/// fit many times. Longer ones are skipped and refused with [`REP_ERR_TOO_BIG`].
pub const OPTION_LEN_MAX: u32 = 64 << 10;
/// The longest data of an option that is skipped, in bytes. Longer ones end the connection.
pub const OPTION_SKIP_MAX: u32 = 32 << 20;
/// The most options on one connection; each costs the server a reply. More end the connection.
pub const OPTIONS_MAX: u32 = 4096;
/// The longest data of a request or reply that every peer takes without being asked, in bytes
/// (proto.md, "Block size constraints").
pub const PAYLOAD_MAX_DEFAULT: u32 = 32 << 20;
/// The longest data of a request that udm serves, and announces, in bytes. Longer ones are refused
/// with EINVAL.
pub const PAYLOAD_MAX: u32 = 64 << 20;
/// The longest payload of a refused write that is taken off the stream, in bytes. A longer one ends
/// the connection.
pub const PAYLOAD_SKIP_MAX: u32 = 256 << 20;

bitflags! {
    /// What the server can do in the handshake, in its greeting.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct HandshakeFlags: u16 {
        /// Options are answered; always set by udm.
        const FIXED_NEWSTYLE = 1 << 0;
        /// The 124 zeroes behind `EXPORT_NAME` may be left out.
        const NO_ZEROES = 1 << 1;
    }

    /// What the client answers to the greeting.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct ClientFlags: u32 {
        /// Knows the fixed newstyle handshake.
        const FIXED_NEWSTYLE = 1 << 0;
        /// Leave the 124 zeroes out.
        const NO_ZEROES = 1 << 1;
    }

    /// What an export can do (`NBD_FLAG_*`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct ExportFlags: u16 {
        /// Always set.
        const HAS_FLAGS = 1 << 0;
        /// Writes are refused with EPERM.
        const READ_ONLY = 1 << 1;
        /// Takes `FLUSH`.
        const SEND_FLUSH = 1 << 2;
        /// Takes [`CommandFlags::FUA`].
        const SEND_FUA = 1 << 3;
        /// Better used as a rotating disk is.
        const ROTATIONAL = 1 << 4;
        /// Takes `TRIM`.
        const SEND_TRIM = 1 << 5;
        /// Takes `WRITE_ZEROES` and [`CommandFlags::NO_HOLE`].
        const SEND_WRITE_ZEROES = 1 << 6;
        /// Takes [`CommandFlags::DF`]; needs structured replies.
        const SEND_DF = 1 << 7;
        /// A flush on one connection covers the writes of all.
        const CAN_MULTI_CONN = 1 << 8;
        /// Takes `RESIZE` (an extension).
        const SEND_RESIZE = 1 << 9;
        /// Takes `CACHE`.
        const SEND_CACHE = 1 << 10;
        /// Takes [`CommandFlags::FAST_ZERO`].
        const SEND_FAST_ZERO = 1 << 11;
        /// Takes a payload with `BLOCK_STATUS` (needs extended headers).
        const BLOCK_STATUS_PAYLOAD = 1 << 12;
    }

    /// Modifiers of a request (`NBD_CMD_FLAG_*`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Hash)]
    pub struct CommandFlags: u16 {
        /// Reply only when what was written is durable.
        const FUA = 1 << 0;
        /// `WRITE_ZEROES` leaves the blocks allocated.
        const NO_HOLE = 1 << 1;
        /// `READ` is answered with one data chunk at most.
        const DF = 1 << 2;
        /// `BLOCK_STATUS` is answered with one descriptor at most.
        const REQ_ONE = 1 << 3;
        /// `WRITE_ZEROES` fails with ENOTSUP where it is no faster than a write.
        const FAST_ZERO = 1 << 4;
        /// The length is that of a payload (extended headers only).
        const PAYLOAD_LEN = 1 << 5;
    }

    /// Flags of a chunk (`NBD_REPLY_FLAG_*`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct ReplyFlags: u16 {
        /// The last chunk of its reply.
        const DONE = 1 << 0;
    }
}

/// Option: choose an export and begin transmission; no error reply is possible.
pub const OPT_EXPORT_NAME: u32 = 1;
/// Option: end of session.
pub const OPT_ABORT: u32 = 2;
/// Option: the names of all exports.
pub const OPT_LIST: u32 = 3;
/// Option: begin TLS.
pub const OPT_STARTTLS: u32 = 5;
/// Option: describe an export.
pub const OPT_INFO: u32 = 6;
/// Option: describe an export and begin transmission.
pub const OPT_GO: u32 = 7;
/// Option: use structured replies.
pub const OPT_STRUCTURED_REPLY: u32 = 8;
/// Option: the metadata contexts that there are.
pub const OPT_LIST_META_CONTEXT: u32 = 9;
/// Option: use metadata contexts.
pub const OPT_SET_META_CONTEXT: u32 = 10;
/// Option: use extended headers.
pub const OPT_EXTENDED_HEADERS: u32 = 11;

/// Reply to an option: done.
pub const REP_ACK: u32 = 1;
/// Reply to an option: an export (to `LIST`).
pub const REP_SERVER: u32 = 2;
/// Reply to an option: an information (to `INFO` and `GO`).
pub const REP_INFO: u32 = 3;
/// Reply to an option: a metadata context.
pub const REP_META_CONTEXT: u32 = 4;
/// The bit that makes a reply an error.
pub const REP_FLAG_ERROR: u32 = 1 << 31;
/// Reply to an option: not known here.
pub const REP_ERR_UNSUP: u32 = REP_FLAG_ERROR | 1;
/// Reply to an option: forbidden.
pub const REP_ERR_POLICY: u32 = REP_FLAG_ERROR | 2;
/// Reply to an option: malformed.
pub const REP_ERR_INVALID: u32 = REP_FLAG_ERROR | 3;
/// Reply to an option: not on this platform.
pub const REP_ERR_PLATFORM: u32 = REP_FLAG_ERROR | 4;
/// Reply to an option: TLS first.
pub const REP_ERR_TLS_REQD: u32 = REP_FLAG_ERROR | 5;
/// Reply to an option: no such export.
pub const REP_ERR_UNKNOWN: u32 = REP_FLAG_ERROR | 6;
/// Reply to an option: the server is being shut down.
pub const REP_ERR_SHUTDOWN: u32 = REP_FLAG_ERROR | 7;
/// Reply to an option: ask for the block sizes first.
pub const REP_ERR_BLOCK_SIZE_REQD: u32 = REP_FLAG_ERROR | 8;
/// Reply to an option: too long.
pub const REP_ERR_TOO_BIG: u32 = REP_FLAG_ERROR | 9;
/// Reply to an option: extended headers first.
pub const REP_ERR_EXT_HEADER_REQD: u32 = REP_FLAG_ERROR | 10;

/// Information: size and flags. Always sent.
pub const INFO_EXPORT: u16 = 0;
/// Information: the canonical name.
pub const INFO_NAME: u16 = 1;
/// Information: a description for people.
pub const INFO_DESCRIPTION: u16 = 2;
/// Information: smallest, preferred and largest block.
pub const INFO_BLOCK_SIZE: u16 = 3;

/// Chunk: nothing; ends a reply.
pub const CHUNK_NONE: u16 = 0;
/// Chunk: an offset and data.
pub const CHUNK_OFFSET_DATA: u16 = 1;
/// Chunk: an offset and a number of zeroes.
pub const CHUNK_OFFSET_HOLE: u16 = 2;
/// Chunk: status of blocks.
pub const CHUNK_BLOCK_STATUS: u16 = 5;
/// The bit that makes a chunk an error.
pub const CHUNK_FLAG_ERROR: u16 = 1 << 15;
/// Chunk: an error of the whole request.
pub const CHUNK_ERROR: u16 = CHUNK_FLAG_ERROR | 1;
/// Chunk: an error at an offset.
pub const CHUNK_ERROR_OFFSET: u16 = CHUNK_FLAG_ERROR | 2;

/// The metadata context that tells what of an export is allocated.
pub const CONTEXT_ALLOCATION: &str = "base:allocation";
/// The metadata contexts of what has changed: this, and the name of the map (QEMU's
/// `docs/interop/nbd.txt`).
pub const CONTEXT_DIRTY: &str = "qemu:dirty-bitmap:";
/// Of [`CONTEXT_DIRTY`]: has changed.
pub const STATE_DIRTY: u32 = 1 << 0;
/// Of [`CONTEXT_ALLOCATION`]: takes no space.
pub const STATE_HOLE: u32 = 1;
/// Of [`CONTEXT_ALLOCATION`]: reads as zeroes.
pub const STATE_ZERO: u32 = 2;

/// Error: not permitted; writing to a read-only export.
pub const EPERM: u32 = errno::EPERM as u32;
/// Error: input/output.
pub const EIO: u32 = errno::EIO as u32;
/// Error: no memory.
pub const ENOMEM: u32 = errno::ENOMEM as u32;
/// Error: invalid request.
pub const EINVAL: u32 = errno::EINVAL as u32;
/// Error: no space, or writing beyond the end.
pub const ENOSPC: u32 = errno::ENOSPC as u32;
/// Error: too long to be sent unfragmented.
pub const EOVERFLOW: u32 = errno::EOVERFLOW as u32;
/// Error: not supported.
pub const ENOTSUP: u32 = errno::EOPNOTSUPP as u32;
/// Error: the server is being shut down.
pub const ESHUTDOWN: u32 = errno::ESHUTDOWN as u32;
