//! Replies to options, encoded by a server and decoded by a client.

use super::{
    EXPORT_NAME_ZEROES, ExportFlags, INFO_BLOCK_SIZE, INFO_DESCRIPTION, INFO_EXPORT, INFO_NAME,
    MAGIC_OPTION_REPLY, NbdProtocolError, OPTION_LEN_MAX, OPTION_REPLY_HEADER_SIZE, REP_ACK, REP_FLAG_ERROR,
    REP_INFO, REP_META_CONTEXT, REP_SERVER, be16_at, be32_at, be64_at, clip_nbd_string, decode_nbd_string,
};

/// One information about an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExportInfoItem {
    /// Size in bytes and flags. Always part of the reply.
    Export {
        /// Size in bytes.
        size: u64,
        /// Capabilities of the export.
        flags: ExportFlags,
    },
    /// The canonical name of the export.
    Name(String),
    /// A description for people.
    Description(String),
    /// The block sizes of the export.
    BlockSize(BlockSizes),
    /// An information that udm does not know.
    Other(u16),
}

/// Accepted lengths and alignments of an export, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Every offset and length is a multiple of `minimum`. A power of two, 1..=65536.
    pub minimum: u32,
    /// Smaller requests are slower. A power of two, at least `minimum`, 512..=32 MiB.
    pub preferred: u32,
    /// The longest payload. `u32::MAX`, or a multiple of `minimum`.
    pub maximum: u32,
}

/// Appends any reply to an option.
pub fn put_option_reply(out: &mut Vec<u8>, option: u32, reply: u32, data: &[&[u8]]) {
    let len: usize = data.iter().map(|piece| piece.len()).sum();
    debug_assert!(len <= OPTION_LEN_MAX as usize, "a reply of {len} bytes");
    out.extend_from_slice(&MAGIC_OPTION_REPLY.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&reply.to_be_bytes());
    out.extend_from_slice(&(len as u32).to_be_bytes());
    data.iter().for_each(|piece| out.extend_from_slice(piece));
}

/// Appends the reply that ends a successful option.
pub fn put_option_ack_reply(out: &mut Vec<u8>, option: u32) {
    put_option_reply(out, option, REP_ACK, &[]);
}

/// Appends an error (`REP_ERR_*`) with a text for people, which is cut at [`super::STRING_MAX`]
/// bytes.
pub fn put_option_error_reply(out: &mut Vec<u8>, option: u32, error: u32, text: &str) {
    put_option_reply(out, option, error | REP_FLAG_ERROR, &[clip_nbd_string(text).as_bytes()]);
}

/// Appends one export of the reply to `LIST`. The description may be empty. Both are cut at
/// [`super::STRING_MAX`] bytes.
pub fn put_rep_server(out: &mut Vec<u8>, name: &str, description: &str) {
    let name = clip_nbd_string(name);
    let len = (name.len() as u32).to_be_bytes();
    put_option_reply(
        out,
        super::OPT_LIST,
        REP_SERVER,
        &[&len, name.as_bytes(), clip_nbd_string(description).as_bytes()],
    );
}

/// Appends one information of the reply to `option` (`OPT_INFO` or `OPT_GO`).
pub fn put_export_info_reply(out: &mut Vec<u8>, option: u32, info: &ExportInfoItem) {
    let mut put = |kind: u16, data: &[&[u8]]| {
        let kind = kind.to_be_bytes();
        let mut pieces = vec![&kind[..]];
        pieces.extend_from_slice(data);
        put_option_reply(out, option, REP_INFO, &pieces);
    };
    match info {
        ExportInfoItem::Export { size, flags } => {
            put(INFO_EXPORT, &[&size.to_be_bytes(), &flags.bits().to_be_bytes()]);
        }
        ExportInfoItem::Name(name) => put(INFO_NAME, &[clip_nbd_string(name).as_bytes()]),
        ExportInfoItem::Description(text) => put(INFO_DESCRIPTION, &[clip_nbd_string(text).as_bytes()]),
        ExportInfoItem::BlockSize(b) => {
            put(
                INFO_BLOCK_SIZE,
                &[&b.minimum.to_be_bytes(), &b.preferred.to_be_bytes(), &b.maximum.to_be_bytes()],
            );
        }
        ExportInfoItem::Other(kind) => put(*kind, &[]),
    }
}

/// Appends one metadata context of the reply to `option` (`OPT_LIST_META_CONTEXT`, where `id` has
/// no meaning, or `OPT_SET_META_CONTEXT`).
pub fn put_meta_context_reply(out: &mut Vec<u8>, option: u32, id: u32, name: &str) {
    put_option_reply(out, option, REP_META_CONTEXT, &[&id.to_be_bytes(), clip_nbd_string(name).as_bytes()]);
}

/// Appends the reply to a successful `EXPORT_NAME`; transmission starts after it. `no_zeroes` is
/// true if both sides agreed to omit the zeroes.
pub fn put_export_name_reply(out: &mut Vec<u8>, reply: ExportNameReply, no_zeroes: bool) {
    out.extend_from_slice(&reply.size.to_be_bytes());
    out.extend_from_slice(&reply.flags.bits().to_be_bytes());
    if !no_zeroes {
        out.extend_from_slice(&[0; EXPORT_NAME_ZEROES]);
    }
}

/// The reply to `EXPORT_NAME`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExportNameReply {
    /// Size in bytes.
    pub size: u64,
    /// Capabilities of the export.
    pub flags: ExportFlags,
}

impl ExportNameReply {
    /// Bytes of the reply, without the zeroes after it.
    pub const SIZE: usize = 10;

    /// Decodes the reply. Unknown flags are dropped.
    #[must_use]
    pub fn decode(bytes: &[u8; Self::SIZE]) -> ExportNameReply {
        ExportNameReply { size: be64_at(bytes, 0), flags: ExportFlags::from_bits_truncate(be16_at(bytes, 8)) }
    }
}

/// The header of an option reply, as a client receives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// The option that the reply is for.
    pub option: u32,
    /// The kind of reply (`REP_*`).
    pub reply: u32,
    /// Bytes of data after the header, at most [`OPTION_LEN_MAX`].
    pub len: u32,
}

impl OptionReplyHeader {
    /// Decodes the header.
    ///
    /// # Errors
    /// A wrong magic, or data longer than [`OPTION_LEN_MAX`].
    pub fn decode(bytes: &[u8; OPTION_REPLY_HEADER_SIZE]) -> Result<OptionReplyHeader, NbdProtocolError> {
        let magic = be64_at(bytes, 0);
        if magic != MAGIC_OPTION_REPLY {
            return Err(NbdProtocolError::Magic { what: "option reply", found: magic });
        }
        let header = OptionReplyHeader {
            option: be32_at(bytes, 8),
            reply: be32_at(bytes, 12),
            len: be32_at(bytes, 16),
        };
        if header.len > OPTION_LEN_MAX {
            return Err(NbdProtocolError::Malformed { what: "option reply", why: "longer than 64 KiB" });
        }
        Ok(header)
    }
}

/// An option reply, as a client receives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OptionReply {
    /// The option succeeded.
    Ack,
    /// One export, in the reply to `LIST`.
    Server {
        /// Name of the export.
        name: String,
        /// Description for people; may be empty.
        description: String,
    },
    /// One information, in the reply to `INFO` and `GO`.
    Info(ExportInfoItem),
    /// One metadata context, in the reply to `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
    MetaContext {
        /// Id of the context in replies to `BLOCK_STATUS`.
        id: u32,
        /// Name of the context.
        name: String,
    },
    /// The option was refused.
    Error {
        /// The reason (`REP_ERR_*`).
        error: u32,
        /// Text for people; may be empty.
        text: String,
    },
    /// A reply that udm does not know.
    Other(u32),
}

impl OptionReply {
    /// Decodes the data after a header of kind `reply`.
    ///
    /// # Errors
    /// Data that does not fit the kind.
    pub fn decode(reply: u32, data: &[u8]) -> Result<OptionReply, NbdProtocolError> {
        let bad = |why| NbdProtocolError::Malformed { what: "option reply", why };
        let text = |bytes| decode_nbd_string(bytes).map(str::to_owned).map_err(bad);
        match reply {
            REP_ACK if data.is_empty() => Ok(OptionReply::Ack),
            REP_ACK => Err(bad("an ACK with data")),
            REP_SERVER => {
                let (len, data) = data.split_first_chunk().ok_or(bad("too short"))?;
                let (name, description) = data
                    .split_at_checked(u32::from_be_bytes(*len) as usize)
                    .ok_or(bad("a name longer than the reply"))?;
                Ok(OptionReply::Server { name: text(name)?, description: text(description)? })
            }
            REP_INFO => {
                let (kind, data) = data.split_first_chunk().ok_or(bad("too short"))?;
                Ok(OptionReply::Info(ExportInfoItem::decode(u16::from_be_bytes(*kind), data)?))
            }
            REP_META_CONTEXT => {
                let (id, name) = data.split_first_chunk().ok_or(bad("too short"))?;
                Ok(OptionReply::MetaContext { id: u32::from_be_bytes(*id), name: text(name)? })
            }
            error if error & REP_FLAG_ERROR != 0 => Ok(OptionReply::Error { error, text: text(data)? }),
            other => Ok(OptionReply::Other(other)),
        }
    }
}

impl ExportInfoItem {
    fn decode(kind: u16, data: &[u8]) -> Result<ExportInfoItem, NbdProtocolError> {
        let bad = |why| NbdProtocolError::Malformed { what: "information", why };
        match kind {
            INFO_EXPORT => {
                let bytes = data.try_into().map_err(|_| bad("the export's is not 12 bytes"))?;
                let ExportNameReply { size, flags } = ExportNameReply::decode(bytes);
                Ok(ExportInfoItem::Export { size, flags })
            }
            INFO_NAME => Ok(ExportInfoItem::Name(decode_nbd_string(data).map_err(bad)?.to_owned())),
            INFO_DESCRIPTION => {
                Ok(ExportInfoItem::Description(decode_nbd_string(data).map_err(bad)?.to_owned()))
            }
            INFO_BLOCK_SIZE => {
                let bytes: &[u8; 12] =
                    data.try_into().map_err(|_| bad("the block sizes' is not 14 bytes"))?;
                let sizes = BlockSizes {
                    minimum: be32_at(bytes, 0),
                    preferred: be32_at(bytes, 4),
                    maximum: be32_at(bytes, 8),
                };
                if sizes.is_valid() {
                    Ok(ExportInfoItem::BlockSize(sizes))
                } else {
                    Err(bad("impossible block sizes"))
                }
            }
            other => Ok(ExportInfoItem::Other(other)),
        }
    }
}

impl BlockSizes {
    /// True if the sizes obey the protocol's rules (see the fields).
    #[must_use]
    pub const fn is_valid(&self) -> bool {
        self.minimum.is_power_of_two()
            && self.minimum <= 65536
            && self.preferred.is_power_of_two()
            && self.preferred >= self.minimum
            && self.preferred >= 512
            && self.preferred <= 32 << 20
            && (self.maximum == u32::MAX
                || (self.maximum >= self.preferred && self.maximum.is_multiple_of(self.minimum)))
    }
}
