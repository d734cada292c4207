//! The handshake of a simulated client: a random list of options, sent one by one or all at once.

use super::client::{ClientContext, NegotiatedExport};
use crate::model::Violation;
use crate::rng::SimRng;
use std::collections::VecDeque;
use udm_wire::nbd::{
    CONTEXT_ALLOCATION, ClientFlags, EXPORT_NAME_ZEROES, ExportFlags, ExportInfoItem, ExportInfoRequest,
    ExportNameReply, GREETING_SIZE, MetaContextRequest, NbdHeaderStyle, NbdOption, NbdServerGreeting,
    OPTION_REPLY_HEADER_SIZE, OptionReply, OptionReplyHeader, REP_ERR_EXT_HEADER_REQD, encode_client_flags,
};

/// Result of a step of the handshake.
pub(super) enum HandshakeStepResult {
    /// More bytes are needed.
    Waits,
    /// The handshake is complete, so requests may be sent.
    Begins(NegotiatedExport),
    /// The client ends the connection.
    Over,
}

/// State of a client's handshake.
pub(super) struct ClientHandshake {
    /// Options to send.
    script: VecDeque<NbdOption>,
    /// Options sent and not answered.
    waiting: VecDeque<NbdOption>,
    greeted: bool,
    no_zeroes: bool,
    /// True if all options are sent at once.
    hasty: bool,
    export: usize,
    style: NbdHeaderStyle,
    context: Option<u32>,
    /// Size and flags of the export in the present reply.
    export_info: Option<(u64, ExportFlags)>,
    /// True if the client stops before it has sent all options.
    pub(super) falls_silent: bool,
}

/// Name of export `nth`.
pub(super) fn export_name(nth: usize) -> String {
    format!("e{nth}")
}

impl ClientHandshake {
    /// Draws the handshake for export `export`. If `plain`, it has only the necessary options.
    pub(super) fn draw(c: &mut SimRng, export: usize, plain: bool) -> ClientHandshake {
        let name = export_name(export);
        let info = |name: &str, c: &mut SimRng| ExportInfoRequest {
            name: name.into(),
            infos: if c.one_in(2) { vec![3, 1] } else { Vec::new() },
        };
        let meta = |query: &str| MetaContextRequest { name: name.clone(), queries: vec![query.into()] };
        let mut script = VecDeque::new();
        if !plain && c.one_in(4) {
            script.push_back(NbdOption::List);
        }
        if !plain && c.one_in(6) {
            script.push_back(NbdOption::Info(info(&name, c)));
        }
        if !plain && c.one_in(8) {
            script.push_back(NbdOption::Unknown { option: 77, data: vec![1; c.below(300) as usize] });
        }
        if !plain && c.one_in(8) {
            script.push_back(NbdOption::Go(info("nobody has this", c)));
        }
        let (is_structured, is_extended) = (c.below(3) > 0, c.one_in(3));
        if is_structured {
            script.push_back(NbdOption::StructuredReply);
        }
        if is_extended {
            script.push_back(NbdOption::ExtendedHeaders);
            if !plain && c.one_in(8) {
                // The server refuses it.
                script.push_back(NbdOption::StructuredReply);
            }
        }
        if (is_structured || is_extended) && c.one_in(2) {
            script.push_back(NbdOption::SetMetaContext(meta(CONTEXT_ALLOCATION)));
        }
        if !plain && c.one_in(10) {
            script.push_back(NbdOption::ListMetaContext(meta("base:")));
        }
        script.push_back(match c.below(12) {
            0 if !plain => NbdOption::Abort,
            1..4 if !is_extended => NbdOption::ExportName(name),
            _ => NbdOption::Go(info(&name, c)),
        });
        ClientHandshake {
            script,
            waiting: VecDeque::new(),
            greeted: false,
            no_zeroes: c.one_in(2),
            hasty: c.one_in(3),
            export,
            style: NbdHeaderStyle::Simple,
            context: None,
            export_info: None,
            falls_silent: !plain && c.one_in(40),
        }
    }

    /// Handles complete replies, and sends the next options.
    pub(super) fn step(
        &mut self,
        input: &mut Vec<u8>,
        out: &mut Vec<u8>,
        around: &mut ClientContext<'_>,
    ) -> Result<HandshakeStepResult, Violation> {
        if !self.greeted {
            let Some(greeting) = input.first_chunk::<GREETING_SIZE>() else {
                return Ok(HandshakeStepResult::Waits);
            };
            NbdServerGreeting::decode(greeting).map_err(|e| e.to_string())?;
            input.drain(..GREETING_SIZE);
            self.greeted = true;
            let no_zeroes = if self.no_zeroes { ClientFlags::NO_ZEROES } else { ClientFlags::empty() };
            out.extend_from_slice(&encode_client_flags(ClientFlags::FIXED_NEWSTYLE | no_zeroes));
        }
        while !self.falls_silent
            && (self.hasty || self.waiting.is_empty())
            && let Some(option) = self.script.pop_front()
        {
            option.encode(out);
            self.waiting.push_back(option);
        }
        let Some(option) = self.waiting.front().cloned() else { return Ok(HandshakeStepResult::Waits) };
        match option {
            NbdOption::ExportName(_) => Ok(self.named(input, around)),
            option => self.replied(&option, input, around),
        }
    }

    /// Handles the reply to `EXPORT_NAME`, if it is complete.
    fn named(&mut self, input: &mut Vec<u8>, around: &ClientContext<'_>) -> HandshakeStepResult {
        let zeroes = if self.no_zeroes { 0 } else { EXPORT_NAME_ZEROES };
        if input.len() < ExportNameReply::SIZE + zeroes {
            return HandshakeStepResult::Waits;
        }
        let bytes = input.first_chunk().expect("so many bytes are there");
        let ExportNameReply { size, flags } = ExportNameReply::decode(bytes);
        input.drain(..ExportNameReply::SIZE + zeroes);
        self.export_info = Some((size, flags));
        HandshakeStepResult::Begins(self.agreed(around))
    }

    fn agreed(&self, around: &ClientContext<'_>) -> NegotiatedExport {
        let (device, _) = around.exports[self.export];
        let flags = self.export_info.map_or(ExportFlags::empty(), |(_, flags)| flags);
        NegotiatedExport { device, flags, style: self.style, context: self.context }
    }

    /// Handles one reply to `option`, if it is complete.
    fn replied(
        &mut self,
        option: &NbdOption,
        input: &mut Vec<u8>,
        around: &mut ClientContext<'_>,
    ) -> Result<HandshakeStepResult, Violation> {
        let Some(head) = input.first_chunk::<OPTION_REPLY_HEADER_SIZE>() else {
            return Ok(HandshakeStepResult::Waits);
        };
        let head = OptionReplyHeader::decode(head).map_err(|e| e.to_string())?;
        if head.option != option.number() {
            return Err(format!("an answer to option {}, where {} waits", head.option, option.number()));
        }
        let end = OPTION_REPLY_HEADER_SIZE + head.len as usize;
        let Some(data) = input.get(OPTION_REPLY_HEADER_SIZE..end) else {
            return Ok(HandshakeStepResult::Waits);
        };
        let reply = OptionReply::decode(head.reply, data).map_err(|e| e.to_string())?;
        input.drain(..end);
        match (option, reply) {
            (_, OptionReply::Info(ExportInfoItem::Export { size, flags })) => {
                self.export_info = Some((size, flags));
                self.check(around)?;
            }
            (NbdOption::SetMetaContext(_), OptionReply::MetaContext { id, name }) => {
                if name != CONTEXT_ALLOCATION {
                    return Err(format!("a context {name:?}, which was not asked for"));
                }
                self.context = Some(id);
            }
            (_, OptionReply::Info(_) | OptionReply::Server { .. } | OptionReply::MetaContext { .. }) => {}
            (_, OptionReply::Ack) => {
                self.waiting.pop_front();
                match option {
                    NbdOption::StructuredReply if !self.style.is_extended() => {
                        self.style = NbdHeaderStyle::Structured;
                    }
                    NbdOption::StructuredReply => {
                        return Err("structured replies were agreed on after extended headers".into());
                    }
                    NbdOption::ExtendedHeaders => self.style = NbdHeaderStyle::Extended,
                    NbdOption::Abort => return Ok(HandshakeStepResult::Over),
                    NbdOption::Go(_) => {
                        self.check(around)?;
                        return Ok(HandshakeStepResult::Begins(self.agreed(around)));
                    }
                    _ => {}
                }
            }
            (option, OptionReply::Error { error, text }) => {
                self.waiting.pop_front();
                let its_own = format!("{option:?}").contains(&export_name(self.export));
                match option {
                    NbdOption::Unknown { .. } => {}
                    NbdOption::StructuredReply
                        if self.style.is_extended() && error == REP_ERR_EXT_HEADER_REQD => {}
                    NbdOption::Go(request) if request.name != export_name(self.export) => {}
                    NbdOption::ListMetaContext(_) | NbdOption::SetMetaContext(_)
                        if !self.style.has_chunks() => {}
                    // The server had no free slot, or the lane could not be opened.
                    NbdOption::Go(_) if around.net.links.iter().any(|link| link.faulty) => {
                        return Ok(HandshakeStepResult::Over);
                    }
                    _ => {
                        return Err(format!(
                            "{} of its own export ({its_own}) was refused with {error:#x}: {text}",
                            option.number()
                        ));
                    }
                }
            }
            (option, other) => return Err(format!("{other:?} in answer to option {}", option.number())),
        }
        Ok(HandshakeStepResult::Waits)
    }

    /// Checks the reported size and flags of the export.
    fn check(&self, around: &ClientContext<'_>) -> Result<(), Violation> {
        let (device, read_only) = around.exports[self.export];
        let disk = &around.model.disks[device];
        let Some((size, flags)) = self.export_info else { return Err("an export without a size".into()) };
        if size != disk.size || flags.contains(ExportFlags::READ_ONLY) != read_only {
            return Err(format!(
                "an export of {size} bytes with {flags:?}, expected {} bytes, read-only: {read_only}",
                disk.size
            ));
        }
        if flags.contains(ExportFlags::SEND_TRIM) != disk.discards {
            return Err(format!("an export with {flags:?}, expected support of discards: {}", disk.discards));
        }
        let has_payload = self.style.is_extended() && self.context.is_some();
        let expected = [
            (ExportFlags::SEND_DF, self.style.has_chunks()),
            (ExportFlags::BLOCK_STATUS_PAYLOAD, has_payload),
        ];
        match expected.iter().find(|(flag, is_set)| flags.contains(*flag) != *is_set) {
            Some((flag, is_set)) => Err(format!("an export with {flags:?}, expected {flag:?}: {is_set}")),
            None => Ok(()),
        }
    }
}
