//! The server's half of the handshake: greeting out; flags and options in, piece by piece.

use super::option::{MalformedOption, NbdOption};
use super::{
    CLIENT_FLAGS_SIZE, ClientFlags, GREETING_SIZE, HandshakeFlags, MAGIC_OPTION, MAGIC_SERVER,
    NbdProtocolError, OPT_EXPORT_NAME, OPTION_HEADER_SIZE, OPTION_LEN_MAX, OPTION_SKIP_MAX, OPTIONS_MAX,
    REP_ERR_TOO_BIG, be16_at, be32_at, be64_at,
};

/// Encodes the server's greeting.
#[must_use]
pub fn encode_nbd_server_greeting(flags: HandshakeFlags) -> [u8; GREETING_SIZE] {
    let mut out = [0; GREETING_SIZE];
    out[..8].copy_from_slice(&MAGIC_SERVER.to_be_bytes());
    out[8..16].copy_from_slice(&MAGIC_OPTION.to_be_bytes());
    out[16..].copy_from_slice(&flags.bits().to_be_bytes());
    out
}

/// The server's greeting, as a client receives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NbdServerGreeting {
    /// Capabilities of the server; unknown flags are dropped.
    pub flags: HandshakeFlags,
}

impl NbdServerGreeting {
    /// Decodes the greeting.
    ///
    /// # Errors
    /// The peer does not speak NBD, or uses the oldstyle handshake.
    pub fn decode(bytes: &[u8; GREETING_SIZE]) -> Result<NbdServerGreeting, NbdProtocolError> {
        if be64_at(bytes, 0) != MAGIC_SERVER {
            return Err(NbdProtocolError::Magic { what: "greeting", found: be64_at(bytes, 0) });
        }
        if be64_at(bytes, 8) != MAGIC_OPTION {
            return Err(NbdProtocolError::Magic { what: "newstyle", found: be64_at(bytes, 8) });
        }
        Ok(NbdServerGreeting { flags: HandshakeFlags::from_bits_truncate(be16_at(bytes, 16)) })
    }
}

/// Encodes the client's reply to the greeting.
#[must_use]
pub fn encode_client_flags(flags: ClientFlags) -> [u8; CLIENT_FLAGS_SIZE] {
    flags.bits().to_be_bytes()
}

/// A message of a client during the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientHandshakeMessage {
    /// The reply to the greeting; always first, and once.
    Flags(ClientFlags),
    /// An option that needs a reply; `ABORT` and `EXPORT_NAME` have their own rules.
    Option(NbdOption),
}

/// The reason why the connection must be closed without a reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FatalHandshakeError {
    /// The message is not NBD.
    #[error(transparent)]
    Protocol(#[from] NbdProtocolError),
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
pub struct ClientHandshakeMessageParser {
    stage: HandshakeMessageParserStage,
    held: Vec<u8>,
    options: u32,
}

#[derive(Debug, Default)]
enum HandshakeMessageParserStage {
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

impl ClientHandshakeMessageParser {
    /// The parser before the first byte of the client.
    #[must_use]
    pub fn new() -> ClientHandshakeMessageParser {
        ClientHandshakeMessageParser::default()
    }

    /// Consumes bytes from the front of `input` up to the end of the next message, and returns this
    /// message. Returns `None` if more bytes are needed; `input` is then empty. After `GO` or
    /// `EXPORT_NAME`, the rest of `input` begins with the first request.
    ///
    /// # Errors
    /// The connection must be closed; the parser cannot be used any more.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<ClientHandshakeMessage>, FatalHandshakeError> {
        loop {
            match self.stage {
                HandshakeMessageParserStage::Flags => {
                    let Some(bytes) = self.gather(input, CLIENT_FLAGS_SIZE) else { return Ok(None) };
                    let bits = be32_at(&bytes, 0);
                    let flags =
                        ClientFlags::from_bits(bits).ok_or(FatalHandshakeError::UnknownFlags(bits))?;
                    self.stage = HandshakeMessageParserStage::Header;
                    return Ok(Some(ClientHandshakeMessage::Flags(flags)));
                }
                HandshakeMessageParserStage::Header => {
                    let Some(bytes) = self.gather(input, OPTION_HEADER_SIZE) else { return Ok(None) };
                    self.stage = parse_nbd_option_header(&bytes)?;
                    self.options += 1;
                    if self.options > OPTIONS_MAX {
                        return Err(FatalHandshakeError::TooManyOptions);
                    }
                }
                HandshakeMessageParserStage::Data { option, len } => {
                    let Some(data) = self.gather(input, len) else { return Ok(None) };
                    self.stage = HandshakeMessageParserStage::Header;
                    let option = NbdOption::decode(option, &data);
                    return match option {
                        NbdOption::Bad(MalformedOption { option: OPT_EXPORT_NAME, why, .. }) => {
                            Err(FatalHandshakeError::ExportName(why))
                        }
                        option => Ok(Some(ClientHandshakeMessage::Option(option))),
                    };
                }
                HandshakeMessageParserStage::Skip { option, left } => {
                    let n = left.min(input.len());
                    *input = &input[n..];
                    if n < left {
                        self.stage = HandshakeMessageParserStage::Skip { option, left: left - n };
                        return Ok(None);
                    }
                    self.stage = HandshakeMessageParserStage::Header;
                    let why = "the option is longer than 64 KiB";
                    return Ok(Some(ClientHandshakeMessage::Option(NbdOption::Bad(MalformedOption {
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
fn parse_nbd_option_header(bytes: &[u8]) -> Result<HandshakeMessageParserStage, FatalHandshakeError> {
    let (magic, option, len) = (be64_at(bytes, 0), be32_at(bytes, 8), be32_at(bytes, 12));
    if magic != MAGIC_OPTION {
        return Err(NbdProtocolError::Magic { what: "option", found: magic }.into());
    }
    match len {
        _ if len <= OPTION_LEN_MAX => Ok(HandshakeMessageParserStage::Data { option, len: len as usize }),
        _ if len <= OPTION_SKIP_MAX && option != OPT_EXPORT_NAME => {
            Ok(HandshakeMessageParserStage::Skip { option, left: len as usize })
        }
        _ => Err(FatalHandshakeError::OptionLength { option, len }),
    }
}
