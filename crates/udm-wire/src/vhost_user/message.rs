//! Headers and replies.

/// Bytes of a header.
pub const HEADER_SIZE: usize = 12;
/// The longest payload that a message may have: a table of regions, or a configuration space.
pub const PAYLOAD_MAX: usize = 512;
/// The longest configuration space (`VHOST_USER_MAX_CONFIG_SIZE`).
pub const CONFIG_PAYLOAD_MAX: usize = 256;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// The peer sent an invalid message. The connection cannot be used any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VhostUserError {
    /// Another version of the protocol.
    #[error("vhost-user message {request} has version {version}: expected 1")]
    Version {
        /// Number of the request.
        request: u32,
        /// The version.
        version: u32,
    },
    /// A payload that no message has.
    #[error("vhost-user message {request} has {size} bytes: at most {PAYLOAD_MAX} are possible")]
    TooLong {
        /// Number of the request.
        request: u32,
        /// Length of the payload.
        size: u32,
    },
    /// A payload of the wrong length.
    #[error("vhost-user {name} has {size} bytes: expected {expected}")]
    Size {
        /// Name of the request.
        name: &'static str,
        /// Length of the payload.
        size: usize,
        /// The right length.
        expected: usize,
    },
    /// The wrong number of file descriptors.
    #[error("vhost-user {name} has {fds} file descriptors: expected {expected}")]
    Descriptors {
        /// Name of the request.
        name: &'static str,
        /// Number of descriptors.
        fds: usize,
        /// The right number.
        expected: usize,
    },
    /// A value out of its range.
    #[error("vhost-user {name}: {why}")]
    Value {
        /// Name of the request.
        name: &'static str,
        /// The rule that it breaks.
        why: &'static str,
    },
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VhostUserMessageHeader {
    /// Number of the request.
    pub request: u32,
    /// The sender waits for a reply even if the request has none.
    pub needs_reply: bool,
    /// This is a reply.
    pub is_reply: bool,
    /// Length of the payload in bytes, at most [`PAYLOAD_MAX`].
    pub size: usize,
}

impl VhostUserMessageHeader {
    /// Decodes a header.
    ///
    /// # Errors
    /// The version is not 1, or the payload is too long.
    pub fn decode(bytes: &[u8; HEADER_SIZE]) -> Result<VhostUserMessageHeader, VhostUserError> {
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let (request, flags, size) = (word(0), word(4), word(8));
        if flags & VERSION_MASK != VERSION {
            return Err(VhostUserError::Version { request, version: flags & VERSION_MASK });
        }
        if size as usize > PAYLOAD_MAX {
            return Err(VhostUserError::TooLong { request, size });
        }
        Ok(VhostUserMessageHeader {
            request,
            needs_reply: flags & FLAG_NEED_REPLY != 0,
            is_reply: flags & FLAG_REPLY != 0,
            size: size as usize,
        })
    }
}

/// Encodes a reply to `request`.
#[must_use]
pub fn encode_reply(request: u32, payload: &[u8]) -> Vec<u8> {
    encode_vhost_user_message(request, VERSION | FLAG_REPLY, payload)
}

/// Encodes a message that is no reply; with `needs_reply`, the peer must answer it.
#[must_use]
pub fn encode_message(request: u32, needs_reply: bool, payload: &[u8]) -> Vec<u8> {
    encode_vhost_user_message(request, if needs_reply { VERSION | FLAG_NEED_REPLY } else { VERSION }, payload)
}

fn encode_vhost_user_message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    debug_assert!(payload.len() <= PAYLOAD_MAX);
    let mut out = Vec::with_capacity(HEADER_SIZE + payload.len());
    out.extend(request.to_ne_bytes());
    out.extend(flags.to_ne_bytes());
    out.extend((payload.len() as u32).to_ne_bytes());
    out.extend(payload);
    out
}
