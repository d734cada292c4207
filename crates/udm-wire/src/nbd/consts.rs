//! Numbers of the protocol, and bounds of udm.

use bitflags::bitflags;
use udm_core::errno;

/// The port that IANA assigned to NBD.
pub const PORT: u16 = 10809;

/// First 8 bytes of a server: "NBDMAGIC".
pub const MAGIC_SERVER: u64 = 0x4e42_444d_4147_4943;
/// Next 8 bytes of a newstyle server, and the first 8 of every option: "IHAVEOPT".
pub const MAGIC_OPTION: u64 = 0x4948_4156_454f_5054;
/// First 8 bytes of every reply to an option.
pub const MAGIC_OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// First 4 bytes of a compact request.
pub const MAGIC_REQUEST: u32 = 0x2560_9513;
/// First 4 bytes of an extended request.
pub const MAGIC_EXTENDED_REQUEST: u32 = 0x21e4_1c71;
/// First 4 bytes of a simple reply.
pub const MAGIC_SIMPLE_REPLY: u32 = 0x6744_6698;
/// First 4 bytes of each chunk of a structured reply.
pub const MAGIC_STRUCTURED_REPLY: u32 = 0x668e_33ef;
/// First 4 bytes of each chunk of an extended reply.
pub const MAGIC_EXTENDED_REPLY: u32 = 0x6e8a_278c;

/// Bytes of the server's greeting.
pub const GREETING_SIZE: usize = 18;
/// Bytes of the client's reply to the greeting.
pub const CLIENT_FLAGS_SIZE: usize = 4;
/// Bytes of an option's header: magic, option, length.
pub const OPTION_HEADER_SIZE: usize = 16;
/// Bytes of the header of an option reply: magic, option, reply, length.
pub const OPTION_REPLY_HEADER_SIZE: usize = 20;
/// Zeroes after the reply to `EXPORT_NAME`, unless both sides agreed to omit them.
pub const EXPORT_NAME_ZEROES: usize = 124;

/// The longest string (export name, description, error message) that the protocol allows, in bytes.
pub const STRING_MAX: usize = 4096;
/// The longest option data that is kept, in bytes. Two strings and a list of all infos fit many
/// times. Longer data are skipped, and the option is refused with [`REP_ERR_TOO_BIG`].
pub const OPTION_LEN_MAX: u32 = 64 << 10;
/// The longest option data that are skipped, in bytes. Longer data end the connection.
pub const OPTION_SKIP_MAX: u32 = 32 << 20;
/// Maximum number of options on one connection, because each costs the server a reply. More end the
/// connection.
pub const OPTIONS_MAX: u32 = 4096;
/// The longest data of a request or reply that every peer accepts by default, in bytes (proto.md,
/// "Block size constraints").
pub const PAYLOAD_MAX_DEFAULT: u32 = 32 << 20;
/// The longest data of a request that udm accepts and announces, in bytes. Longer requests are
/// refused with EINVAL.
pub const PAYLOAD_MAX: u32 = 64 << 20;
/// The longest payload of a refused write that is skipped, in bytes. A longer one ends the
/// connection.
pub const PAYLOAD_SKIP_MAX: u32 = 256 << 20;

bitflags! {
    /// Capabilities of the server for the handshake, in its greeting.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct HandshakeFlags: u16 {
        /// Every option gets a reply; always set by udm.
        const FIXED_NEWSTYLE = 1 << 0;
        /// The 124 zeroes after `EXPORT_NAME` may be omitted.
        const NO_ZEROES = 1 << 1;
    }

    /// The client's reply to the greeting.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct ClientFlags: u32 {
        /// The client knows the fixed newstyle handshake.
        const FIXED_NEWSTYLE = 1 << 0;
        /// The client wants no 124 zeroes.
        const NO_ZEROES = 1 << 1;
    }

    /// Capabilities of an export (`NBD_FLAG_*`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct ExportFlags: u16 {
        /// Always set.
        const HAS_FLAGS = 1 << 0;
        /// Writes are refused with EPERM.
        const READ_ONLY = 1 << 1;
        /// Supports `FLUSH`.
        const SEND_FLUSH = 1 << 2;
        /// Supports [`CommandFlags::FUA`].
        const SEND_FUA = 1 << 3;
        /// Should be used like a rotating disk.
        const ROTATIONAL = 1 << 4;
        /// Supports `TRIM`.
        const SEND_TRIM = 1 << 5;
        /// Supports `WRITE_ZEROES` and [`CommandFlags::NO_HOLE`].
        const SEND_WRITE_ZEROES = 1 << 6;
        /// Supports [`CommandFlags::DF`]; needs structured replies.
        const SEND_DF = 1 << 7;
        /// A flush on one connection covers the writes of all connections.
        const CAN_MULTI_CONN = 1 << 8;
        /// Supports `RESIZE` (an extension).
        const SEND_RESIZE = 1 << 9;
        /// Supports `CACHE`.
        const SEND_CACHE = 1 << 10;
        /// Supports [`CommandFlags::FAST_ZERO`].
        const SEND_FAST_ZERO = 1 << 11;
        /// Supports a payload with `BLOCK_STATUS` (needs extended headers).
        const BLOCK_STATUS_PAYLOAD = 1 << 12;
    }

    /// Flags of a request (`NBD_CMD_FLAG_*`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Hash)]
    pub struct CommandFlags: u16 {
        /// Reply only when the written data are durable.
        const FUA = 1 << 0;
        /// `WRITE_ZEROES` leaves the blocks allocated.
        const NO_HOLE = 1 << 1;
        /// The reply to `READ` has at most one data chunk.
        const DF = 1 << 2;
        /// The reply to `BLOCK_STATUS` has at most one descriptor.
        const REQ_ONE = 1 << 3;
        /// `WRITE_ZEROES` fails with ENOTSUP if it is no faster than a write.
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

/// Option: choose an export and start transmission; no error reply is possible.
pub const OPT_EXPORT_NAME: u32 = 1;
/// Option: end the session.
pub const OPT_ABORT: u32 = 2;
/// Option: list the names of all exports.
pub const OPT_LIST: u32 = 3;
/// Option: start TLS.
pub const OPT_STARTTLS: u32 = 5;
/// Option: describe an export.
pub const OPT_INFO: u32 = 6;
/// Option: describe an export and start transmission.
pub const OPT_GO: u32 = 7;
/// Option: use structured replies.
pub const OPT_STRUCTURED_REPLY: u32 = 8;
/// Option: list the available metadata contexts.
pub const OPT_LIST_META_CONTEXT: u32 = 9;
/// Option: use metadata contexts.
pub const OPT_SET_META_CONTEXT: u32 = 10;
/// Option: use extended headers.
pub const OPT_EXTENDED_HEADERS: u32 = 11;

/// Reply to an option: done.
pub const REP_ACK: u32 = 1;
/// Reply to an option: an export (to `LIST`).
pub const REP_SERVER: u32 = 2;
/// Reply to an option: one information (to `INFO` and `GO`).
pub const REP_INFO: u32 = 3;
/// Reply to an option: a metadata context.
pub const REP_META_CONTEXT: u32 = 4;
/// The bit that marks a reply as an error.
pub const REP_FLAG_ERROR: u32 = 1 << 31;
/// Reply to an option: unknown option.
pub const REP_ERR_UNSUP: u32 = REP_FLAG_ERROR | 1;
/// Reply to an option: forbidden by policy.
pub const REP_ERR_POLICY: u32 = REP_FLAG_ERROR | 2;
/// Reply to an option: malformed.
pub const REP_ERR_INVALID: u32 = REP_FLAG_ERROR | 3;
/// Reply to an option: not supported on this platform.
pub const REP_ERR_PLATFORM: u32 = REP_FLAG_ERROR | 4;
/// Reply to an option: TLS is required first.
pub const REP_ERR_TLS_REQD: u32 = REP_FLAG_ERROR | 5;
/// Reply to an option: no such export.
pub const REP_ERR_UNKNOWN: u32 = REP_FLAG_ERROR | 6;
/// Reply to an option: the server is shutting down.
pub const REP_ERR_SHUTDOWN: u32 = REP_FLAG_ERROR | 7;
/// Reply to an option: the client must request block sizes first.
pub const REP_ERR_BLOCK_SIZE_REQD: u32 = REP_FLAG_ERROR | 8;
/// Reply to an option: too long.
pub const REP_ERR_TOO_BIG: u32 = REP_FLAG_ERROR | 9;
/// Reply to an option: extended headers are required first.
pub const REP_ERR_EXT_HEADER_REQD: u32 = REP_FLAG_ERROR | 10;

/// Information: size and flags. Always sent.
pub const INFO_EXPORT: u16 = 0;
/// Information: the canonical name.
pub const INFO_NAME: u16 = 1;
/// Information: a description for people.
pub const INFO_DESCRIPTION: u16 = 2;
/// Information: minimum, preferred and maximum block size.
pub const INFO_BLOCK_SIZE: u16 = 3;

/// Chunk: no content; ends a reply.
pub const CHUNK_NONE: u16 = 0;
/// Chunk: an offset and data.
pub const CHUNK_OFFSET_DATA: u16 = 1;
/// Chunk: an offset and a number of zeroes.
pub const CHUNK_OFFSET_HOLE: u16 = 2;
/// Chunk: block status.
pub const CHUNK_BLOCK_STATUS: u16 = 5;
/// Chunk: block status with lengths and flags of 64 bits (extended headers only).
pub const CHUNK_BLOCK_STATUS_EXT: u16 = 6;
/// The bit that marks a chunk as an error.
pub const CHUNK_FLAG_ERROR: u16 = 1 << 15;
/// Chunk: an error of the whole request.
pub const CHUNK_ERROR: u16 = CHUNK_FLAG_ERROR | 1;
/// Chunk: an error at an offset.
pub const CHUNK_ERROR_OFFSET: u16 = CHUNK_FLAG_ERROR | 2;

/// The metadata context that shows which parts of an export are allocated.
pub const CONTEXT_ALLOCATION: &str = "base:allocation";
/// Prefix of the metadata contexts of changed blocks; the name of the bitmap follows (QEMU's
/// `docs/interop/nbd.txt`).
pub const CONTEXT_DIRTY: &str = "qemu:dirty-bitmap:";
/// Flag of [`CONTEXT_DIRTY`]: changed.
pub const STATE_DIRTY: u32 = 1 << 0;
/// Flag of [`CONTEXT_ALLOCATION`]: occupies no space.
pub const STATE_HOLE: u32 = 1;
/// Flag of [`CONTEXT_ALLOCATION`]: reads as zeroes.
pub const STATE_ZERO: u32 = 2;

/// Error: not permitted; a write to a read-only export.
pub const EPERM: u32 = errno::EPERM as u32;
/// Error: input/output error.
pub const EIO: u32 = errno::EIO as u32;
/// Error: no memory.
pub const ENOMEM: u32 = errno::ENOMEM as u32;
/// Error: invalid request.
pub const EINVAL: u32 = errno::EINVAL as u32;
/// Error: no space, or a write beyond the end.
pub const ENOSPC: u32 = errno::ENOSPC as u32;
/// Error: too long for an unfragmented reply.
pub const EOVERFLOW: u32 = errno::EOVERFLOW as u32;
/// Error: not supported.
pub const ENOTSUP: u32 = errno::EOPNOTSUPP as u32;
/// Error: the server is shutting down.
pub const ESHUTDOWN: u32 = errno::ESHUTDOWN as u32;
