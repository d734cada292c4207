//! The client's half of the handshake: from the greeting to the start of transmission.

use super::super::{
    CLIENT_FLAGS_SIZE, ClientFlags, EXPORT_NAME_ZEROES, ExportFlags, ExportInfoItem, ExportInfoRequest,
    ExportNameReply, GREETING_SIZE, HandshakeFlags, INFO_BLOCK_SIZE, MetaContextRequest, NbdOption,
    NbdServerGreeting, OPT_EXPORT_NAME, OPT_GO, OPT_SET_META_CONTEXT, OPT_STARTTLS, OPT_STRUCTURED_REPLY,
    OPTION_REPLY_HEADER_SIZE, OptionReply, OptionReplyHeader, REP_ERR_UNSUP, encode_client_flags,
};
use super::{NbdClientProtocolError, NegotiatedExportInfo};

/// Maximum number of replies to one option.
const REPLIES_MAX: u32 = 64;

/// The options that a client requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HandshakeOptions {
    /// Name of the export; empty for the server's default.
    pub export: String,
    /// Use structured replies if the server offers them. Contexts need them.
    pub structured: bool,
    /// Metadata contexts to use, if the server has them.
    pub contexts: Vec<String>,
    /// Switch to TLS before any other option ([`ClientHandshake::awaits_tls`]). A server that does
    /// not do TLS is refused.
    pub tls: bool,
}

/// A handshake in progress: server bytes in, client bytes out.
#[derive(Debug)]
pub struct ClientHandshake {
    options: HandshakeOptions,
    stage: ClientHandshakeStage,
    /// Bytes of the next message that have arrived.
    held: Vec<u8>,
    /// Bytes to send.
    out: Vec<u8>,
    no_zeroes: bool,
    structured: bool,
    contexts: Vec<(u32, String)>,
    export: Option<(u64, ExportFlags)>,
    blocks: Option<super::BlockSizes>,
    /// Number of replies to the current option.
    replies: u32,
}

/// The next message from the server.
#[derive(Clone, Copy, Debug)]
enum ClientHandshakeStage {
    Greeting,
    /// The header of a reply to this option.
    Reply(u32),
    /// The data after this header.
    Data(OptionReplyHeader),
    /// The reply to `EXPORT_NAME`.
    ExportName,
    /// Nothing, until TLS has begun.
    Tls,
}

impl ClientHandshake {
    /// A handshake before the first byte of the server.
    #[must_use]
    pub fn new(options: HandshakeOptions) -> ClientHandshake {
        ClientHandshake {
            options,
            stage: ClientHandshakeStage::Greeting,
            held: Vec::new(),
            out: Vec::new(),
            no_zeroes: false,
            structured: false,
            contexts: Vec::new(),
            export: None,
            blocks: None,
            replies: 0,
        }
    }

    /// Takes the bytes to send now; often none.
    pub fn take_out(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }

    /// Consumes bytes from the front of `input`. When the handshake is done, returns the export;
    /// the rest of `input` belongs to transmission. Until then, returns `None` with `input` empty.
    ///
    /// # Errors
    /// The connection must be closed.
    pub fn take(
        &mut self,
        input: &mut &[u8],
    ) -> Result<Option<NegotiatedExportInfo>, NbdClientProtocolError> {
        loop {
            let len = match self.stage {
                ClientHandshakeStage::Tls if input.is_empty() => return Ok(None),
                ClientHandshakeStage::Tls => {
                    // Somebody between may have added them.
                    let why = "bytes that are not encrypted";
                    return Err(NbdClientProtocolError::Handshake { asked: OPT_STARTTLS, why });
                }
                ClientHandshakeStage::Greeting => GREETING_SIZE,
                ClientHandshakeStage::Reply(_) => OPTION_REPLY_HEADER_SIZE,
                ClientHandshakeStage::Data(header) => header.len as usize,
                ClientHandshakeStage::ExportName if self.no_zeroes => ExportNameReply::SIZE,
                ClientHandshakeStage::ExportName => ExportNameReply::SIZE + EXPORT_NAME_ZEROES,
            };
            let now = (len - self.held.len()).min(input.len());
            self.held.extend_from_slice(&input[..now]);
            *input = &input[now..];
            if self.held.len() < len {
                return Ok(None);
            }
            let held = std::mem::take(&mut self.held);
            if self.message(&held)? {
                let Some((size, flags)) = self.export else {
                    return Err(NbdClientProtocolError::Handshake {
                        asked: OPT_GO,
                        why: "nothing of its export",
                    });
                };
                return Ok(Some(NegotiatedExportInfo {
                    size,
                    flags,
                    blocks: self.blocks.unwrap_or(NegotiatedExportInfo::BLOCKS_ASSUMED),
                    structured: self.structured,
                    contexts: std::mem::take(&mut self.contexts),
                }));
            }
        }
    }

    /// True once the server has agreed to TLS: nothing more is sent or received without it. The
    /// caller begins a session and calls [`ClientHandshake::tls_begun`].
    #[must_use]
    pub fn awaits_tls(&self) -> bool {
        matches!(self.stage, ClientHandshakeStage::Tls)
    }

    /// Goes on in a TLS session: all bytes from now on are its plaintext.
    pub fn tls_begun(&mut self) {
        debug_assert!(self.awaits_tls());
        self.first_option();
    }

    /// Handles a complete message. Returns true if transmission starts after it.
    fn message(&mut self, bytes: &[u8]) -> Result<bool, NbdClientProtocolError> {
        match self.stage {
            ClientHandshakeStage::Greeting => self.greeting(bytes)?,
            ClientHandshakeStage::Reply(asked) => {
                let header = OptionReplyHeader::decode(bytes.try_into().unwrap_or(&[0; _]))?;
                if header.option != asked {
                    return Err(NbdClientProtocolError::Handshake { asked, why: "a reply to another" });
                }
                self.replies += 1;
                if self.replies > REPLIES_MAX {
                    return Err(NbdClientProtocolError::Handshake { asked, why: "more than 64 replies" });
                }
                self.stage = ClientHandshakeStage::Data(header);
            }
            ClientHandshakeStage::Data(header) => {
                let reply = OptionReply::decode(header.reply, bytes)?;
                return self.reply(header.option, reply);
            }
            // It has no messages.
            ClientHandshakeStage::Tls => {}
            ClientHandshakeStage::ExportName => {
                let reply = bytes.first_chunk().unwrap_or(&[0; _]);
                let ExportNameReply { size, flags } = ExportNameReply::decode(reply);
                self.export = Some((size, flags));
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn greeting(&mut self, bytes: &[u8]) -> Result<(), NbdClientProtocolError> {
        let offered = NbdServerGreeting::decode(bytes.try_into().unwrap_or(&[0; _]))?.flags;
        if !offered.contains(HandshakeFlags::FIXED_NEWSTYLE) {
            return Err(NbdClientProtocolError::Oldstyle);
        }
        self.no_zeroes = offered.contains(HandshakeFlags::NO_ZEROES);
        let mut flags = ClientFlags::FIXED_NEWSTYLE;
        flags.set(ClientFlags::NO_ZEROES, self.no_zeroes);
        const { assert!(CLIENT_FLAGS_SIZE == 4) };
        self.out.extend_from_slice(&encode_client_flags(flags));
        match self.options.tls {
            true => self.ask(&NbdOption::StartTls),
            false => self.first_option(),
        }
        Ok(())
    }

    fn first_option(&mut self) {
        match self.options.structured {
            true => self.ask(&NbdOption::StructuredReply),
            false => self.go(),
        }
    }

    fn ask(&mut self, option: &NbdOption) {
        option.encode(&mut self.out);
        self.replies = 0;
        self.stage = ClientHandshakeStage::Reply(option.number());
    }

    fn go(&mut self) {
        let name = self.options.export.clone();
        self.ask(&NbdOption::Go(ExportInfoRequest { name, infos: vec![INFO_BLOCK_SIZE] }));
    }

    /// Handles a reply to `option`. Returns true if transmission starts after it.
    fn reply(&mut self, option: u32, reply: OptionReply) -> Result<bool, NbdClientProtocolError> {
        self.stage = ClientHandshakeStage::Reply(option);
        match (option, reply) {
            (OPT_STARTTLS, OptionReply::Ack) => self.stage = ClientHandshakeStage::Tls,
            (OPT_STRUCTURED_REPLY, OptionReply::Ack) => {
                self.structured = true;
                if self.options.contexts.is_empty() {
                    self.go();
                } else {
                    let (name, queries) = (self.options.export.clone(), self.options.contexts.clone());
                    self.ask(&NbdOption::SetMetaContext(MetaContextRequest { name, queries }));
                }
            }
            // The server refuses, so the client continues without it.
            (OPT_STRUCTURED_REPLY | OPT_SET_META_CONTEXT, OptionReply::Error { .. }) => {
                self.contexts.clear();
                self.go();
            }
            (OPT_SET_META_CONTEXT, OptionReply::Ack) => self.go(),
            (OPT_SET_META_CONTEXT, OptionReply::MetaContext { id, name }) => {
                if self.options.contexts.contains(&name)
                    && self.contexts.iter().all(|(other, _)| *other != id)
                {
                    self.contexts.push((id, name));
                }
            }
            (OPT_GO, OptionReply::Ack) => return Ok(true),
            (OPT_GO, OptionReply::Info(ExportInfoItem::Export { size, flags })) => {
                self.export = Some((size, flags));
            }
            (OPT_GO, OptionReply::Info(ExportInfoItem::BlockSize(sizes))) => self.blocks = Some(sizes),
            (OPT_GO, OptionReply::Info(_)) => {}
            // An old server without `GO`.
            (OPT_GO, OptionReply::Error { error: REP_ERR_UNSUP, .. }) => {
                let option = NbdOption::ExportName(self.options.export.clone());
                debug_assert_eq!(option.number(), OPT_EXPORT_NAME);
                option.encode(&mut self.out);
                self.stage = ClientHandshakeStage::ExportName;
            }
            (option, OptionReply::Error { error, text }) => {
                return Err(NbdClientProtocolError::Refused { option, error, text });
            }
            (asked, _) => {
                return Err(NbdClientProtocolError::Handshake { asked, why: "another kind of reply" });
            }
        }
        Ok(false)
    }
}
