//! The server's half of the handshake: greeting out; flags and options in, piece by piece.

use super::option::{ClientOption, MalformedOption};
use super::{
    CLIENT_FLAGS_SIZE, ClientFlags, GREETING_SIZE, HandshakeFlags, MAGIC_OPTION, MAGIC_SERVER,
    OPT_EXPORT_NAME, OPTION_HEADER_SIZE, OPTION_LEN_MAX, OPTION_SKIP_MAX, OPTIONS_MAX, ProtocolError,
    REP_ERR_TOO_BIG, be16_at, be32_at, be64_at,
};

/// Encodes the server's greeting.
#[must_use]
pub fn greeting(flags: HandshakeFlags) -> [u8; GREETING_SIZE] {
    let mut out = [0; GREETING_SIZE];
    out[..8].copy_from_slice(&MAGIC_SERVER.to_be_bytes());
    out[8..16].copy_from_slice(&MAGIC_OPTION.to_be_bytes());
    out[16..].copy_from_slice(&flags.bits().to_be_bytes());
    out
}

/// The server's greeting, as a client receives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting {
    /// Capabilities of the server; unknown flags are dropped.
    pub flags: HandshakeFlags,
}

impl Greeting {
    /// Decodes the greeting.
    ///
    /// # Errors
    /// The peer does not speak NBD, or uses the oldstyle handshake.
    pub fn decode(bytes: &[u8; GREETING_SIZE]) -> Result<Greeting, ProtocolError> {
        if be64_at(bytes, 0) != MAGIC_SERVER {
            return Err(ProtocolError::Magic { what: "greeting", found: be64_at(bytes, 0) });
        }
        if be64_at(bytes, 8) != MAGIC_OPTION {
            return Err(ProtocolError::Magic { what: "newstyle", found: be64_at(bytes, 8) });
        }
        Ok(Greeting { flags: HandshakeFlags::from_bits_truncate(be16_at(bytes, 16)) })
    }
}

/// Encodes the client's reply to the greeting.
#[must_use]
pub fn encode_client_flags(flags: ClientFlags) -> [u8; CLIENT_FLAGS_SIZE] {
    flags.bits().to_be_bytes()
}

/// A message of a client during the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientMessage {
    /// The reply to the greeting; always first, and once.
    Flags(ClientFlags),
    /// An option that needs a reply; `ABORT` and `EXPORT_NAME` have their own rules.
    Option(ClientOption),
}

/// The reason why the connection must be closed without a reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The message is not NBD.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    /// The client set unknown flags.
    #[error("unknown client flags {0:#x}")]
    UnknownFlags(u32),
    /// The option is longer than any valid one.
    #[error("option {option} of {len} bytes")]
    OptionLength {
        /// The option.
        option: u32,
        /// The announced length in bytes.
        len: u32,
    },
    /// The export name is invalid. The protocol has no error reply for `EXPORT_NAME`.
    #[error("bad export name: {0}")]
    ExportName(&'static str),
    /// More than [`OPTIONS_MAX`] options.
    #[error("more than {OPTIONS_MAX} options")]
    TooManyOptions,
}

/// Parses the client's half of the handshake, in any pieces.
///
/// Keeps at most [`OPTION_LEN_MAX`] and 16 bytes, and never more than have arrived.
#[derive(Debug, Default)]
pub struct HandshakeParser {
    stage: Stage,
    held: Vec<u8>,
    options: u32,
}

#[derive(Debug, Default)]
enum Stage {
    #[default]
    Flags,
    Header,
    Data {
        option: u32,
        len: usize,
    },
    Skip {
        option: u32,
        left: usize,
    },
}

impl HandshakeParser {
    /// The parser before the first byte of the client.
    #[must_use]
    pub fn new() -> HandshakeParser {
        HandshakeParser::default()
    }

    /// Consumes bytes from the front of `input` up to the end of the next message, and returns this
    /// message. Returns `None` if more bytes are needed; `input` is then empty. After `GO` or
    /// `EXPORT_NAME`, the rest of `input` begins with the first request.
    ///
    /// # Errors
    /// The connection must be closed; the parser cannot be used any more.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<ClientMessage>, HandshakeError> {
        loop {
            match self.stage {
                Stage::Flags => {
                    let Some(bytes) = self.gather(input, CLIENT_FLAGS_SIZE) else { return Ok(None) };
                    let bits = be32_at(&bytes, 0);
                    let flags = ClientFlags::from_bits(bits).ok_or(HandshakeError::UnknownFlags(bits))?;
                    self.stage = Stage::Header;
                    return Ok(Some(ClientMessage::Flags(flags)));
                }
                Stage::Header => {
                    let Some(bytes) = self.gather(input, OPTION_HEADER_SIZE) else { return Ok(None) };
                    self.stage = header(&bytes)?;
                    self.options += 1;
                    if self.options > OPTIONS_MAX {
                        return Err(HandshakeError::TooManyOptions);
                    }
                }
                Stage::Data { option, len } => {
                    let Some(data) = self.gather(input, len) else { return Ok(None) };
                    self.stage = Stage::Header;
                    let option = ClientOption::decode(option, &data);
                    return match option {
                        ClientOption::Bad(MalformedOption { option: OPT_EXPORT_NAME, why, .. }) => {
                            Err(HandshakeError::ExportName(why))
                        }
                        option => Ok(Some(ClientMessage::Option(option))),
                    };
                }
                Stage::Skip { option, left } => {
                    let n = left.min(input.len());
                    *input = &input[n..];
                    if n < left {
                        self.stage = Stage::Skip { option, left: left - n };
                        return Ok(None);
                    }
                    self.stage = Stage::Header;
                    let why = "the option is longer than 64 KiB";
                    return Ok(Some(ClientMessage::Option(ClientOption::Bad(MalformedOption {
                        option,
                        reply: REP_ERR_TOO_BIG,
                        why,
                    }))));
                }
            }
        }
    }

    /// The next `len` bytes, when all have arrived.
    fn gather(&mut self, input: &mut &[u8], len: usize) -> Option<Vec<u8>> {
        let n = (len - self.held.len()).min(input.len());
        self.held.extend_from_slice(&input[..n]);
        *input = &input[n..];
        (self.held.len() == len).then(|| std::mem::take(&mut self.held))
    }
}

/// The stage after an option's header.
fn header(bytes: &[u8]) -> Result<Stage, HandshakeError> {
    let (magic, option, len) = (be64_at(bytes, 0), be32_at(bytes, 8), be32_at(bytes, 12));
    if magic != MAGIC_OPTION {
        return Err(ProtocolError::Magic { what: "option", found: magic }.into());
    }
    match len {
        _ if len <= OPTION_LEN_MAX => Ok(Stage::Data { option, len: len as usize }),
        _ if len <= OPTION_SKIP_MAX && option != OPT_EXPORT_NAME => {
            Ok(Stage::Skip { option, left: len as usize })
        }
        _ => Err(HandshakeError::OptionLength { option, len }),
    }
}
