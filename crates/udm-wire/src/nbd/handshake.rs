//! The handshake as a server sees it: greeting out, flags and options in, piece by piece.

use super::option::{ClientOption, MalformedOption};
use super::{
    CLIENT_FLAGS_SIZE, ClientFlags, GREETING_SIZE, HandshakeFlags, MAGIC_OPTION, MAGIC_SERVER,
    OPT_EXPORT_NAME, OPTION_HEADER_SIZE, OPTION_LEN_MAX, OPTION_SKIP_MAX, OPTIONS_MAX, ProtocolError,
    REP_ERR_TOO_BIG, be16_at, be32_at, be64_at,
};

/// The server's first bytes.
#[must_use]
pub fn greeting(flags: HandshakeFlags) -> [u8; GREETING_SIZE] {
    let mut out = [0; GREETING_SIZE];
    out[..8].copy_from_slice(&MAGIC_SERVER.to_be_bytes());
    out[8..16].copy_from_slice(&MAGIC_OPTION.to_be_bytes());
    out[16..].copy_from_slice(&flags.bits().to_be_bytes());
    out
}

/// The server's first bytes, as a client sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting {
    /// What the server can do; flags that udm doesn't know are dropped.
    pub flags: HandshakeFlags,
}

impl Greeting {
    /// Reads the greeting.
    ///
    /// # Errors
    /// Not NBD, or the oldstyle handshake.
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

/// The client's answer to the greeting.
#[must_use]
pub fn encode_client_flags(flags: ClientFlags) -> [u8; CLIENT_FLAGS_SIZE] {
    flags.bits().to_be_bytes()
}

/// What a client sent in the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientMessage {
    /// Its answer to the greeting; always first, and once.
    Flags(ClientFlags),
    /// An option that must be answered (but for `ABORT`'s and `EXPORT_NAME`'s own rules).
    Option(ClientOption),
}

/// Why the connection must be closed without a reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// Not the protocol.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    /// Flags that the server did not offer.
    #[error("unknown client flags {0:#x}")]
    UnknownFlags(u32),
    /// An option longer than anyone has reason to send.
    #[error("option {option} of {len} bytes")]
    OptionLength {
        /// The option.
        option: u32,
        /// Its announced length in bytes.
        len: u32,
    },
    /// `EXPORT_NAME` has no way to be refused but this.
    #[error("bad export name: {0}")]
    ExportName(&'static str),
    /// More than [`OPTIONS_MAX`] options.
    #[error("more than {OPTIONS_MAX} options")]
    TooManyOptions,
}

/// Takes the client's half of the handshake apart, in whatever pieces it arrives.
///
/// Keeps [`OPTION_LEN_MAX`] and 16 bytes at the most, and never more than what has arrived.
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
    /// Before the first byte of the client.
    #[must_use]
    pub fn new() -> HandshakeParser {
        HandshakeParser::default()
    }

    /// Takes bytes off the front of `input`, up to the end of the next message, and returns that;
    /// `None` when it needs more than there is (then `input` is empty). What is left in `input`
    /// belongs to what comes next: behind `GO` or `EXPORT_NAME` that is the first request.
    ///
    /// # Errors
    /// The connection must be closed; the parser is of no more use.
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

    /// `len` bytes, once they have all arrived.
    fn gather(&mut self, input: &mut &[u8], len: usize) -> Option<Vec<u8>> {
        let n = (len - self.held.len()).min(input.len());
        self.held.extend_from_slice(&input[..n]);
        *input = &input[n..];
        (self.held.len() == len).then(|| std::mem::take(&mut self.held))
    }
}

/// What follows an option's header.
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
