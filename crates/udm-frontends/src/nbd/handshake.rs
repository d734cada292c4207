//! The handshake, from the greeting to the choice of an export: a state machine without I/O.
//!
//! Contract: one call of [`ServerHandshake::step`] answers at most one message of the client, or a
//! part of a list of exports. So the caller limits the output that waits. If the client violates
//! the protocol, the connection ends. An option that is valid but not supported gets an error
//! reply.

use super::contexts::{MetaContext, match_contexts};
use super::export_geometry::ExportGeometry;
use super::exports::{Export, ExportRef, Exports};
use std::sync::Arc;
use udm_core::{DeviceControlError, DeviceId};
use udm_wire::nbd::{
    ClientFlags, ClientHandshakeMessage, ClientHandshakeMessageParser, ExportFlags, ExportInfoItem,
    ExportInfoRequest, ExportNameReply, GREETING_SIZE, HandshakeFlags, INFO_DESCRIPTION, INFO_NAME,
    MetaContextRequest, NbdOption, OPT_ABORT, OPT_GO, OPT_INFO, OPT_LIST, OPT_LIST_META_CONTEXT,
    OPT_SET_META_CONTEXT, OPT_STRUCTURED_REPLY, REP_ERR_INVALID, REP_ERR_PLATFORM, REP_ERR_TOO_BIG,
    REP_ERR_UNKNOWN, encode_nbd_server_greeting, put_export_info_reply, put_export_name_reply,
    put_meta_context_reply, put_option_ack_reply, put_option_error_reply, put_rep_server,
};

/// The server's side of a handshake.
#[derive(Default)]
pub(super) struct ServerHandshake {
    parser: ClientHandshakeMessageParser,
    no_zeroes: bool,
    structured: bool,
    /// The chosen metadata contexts, with the export for which they are valid.
    contexts: Option<(Arc<str>, DeviceId, Arc<[MetaContext]>)>,
    /// Position at which the requested list of exports continues.
    listing: Option<u64>,
}

/// Exports listed per step.
const LISTED_A_STEP: usize = 16;

/// Result of a step.
pub(super) enum HandshakeStepOutcome {
    /// The input is used up.
    More,
    /// A message was answered, or a part of it. The input may have more messages.
    Answered,
    /// The transmission phase begins after the output.
    Begin(NegotiatedSession),
    /// The connection is closed after the output is sent.
    Close,
}

/// The negotiated options.
pub(super) struct NegotiatedSession {
    pub(super) export: ExportRef,
    pub(super) geometry: ExportGeometry,
    /// Reads are answered with structured replies.
    pub(super) structured: bool,
    /// Contexts of `BLOCK_STATUS`. If empty, the command is refused.
    pub(super) contexts: Arc<[MetaContext]>,
}

/// Opens the device of the chosen export before the client gets a positive answer.
pub(super) type OpenDeviceFn<'a> = &'a mut dyn FnMut(&Export) -> Result<(), DeviceControlError>;

impl ServerHandshake {
    /// The first bytes that the server sends.
    pub(super) fn greeting() -> [u8; GREETING_SIZE] {
        encode_nbd_server_greeting(HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES)
    }

    /// Takes the next message from `input` and appends the answer to `out`.
    pub(super) fn step(
        &mut self,
        input: &mut &[u8],
        out: &mut Vec<u8>,
        exports: &Exports,
        open: OpenDeviceFn<'_>,
    ) -> HandshakeStepOutcome {
        if let Some(from) = self.listing {
            self.list(from, out, exports);
            return HandshakeStepOutcome::Answered;
        }
        match self.parser.next(input) {
            Ok(None) => HandshakeStepOutcome::More,
            Ok(Some(ClientHandshakeMessage::Flags(flags))) => {
                self.no_zeroes = flags.contains(ClientFlags::NO_ZEROES);
                HandshakeStepOutcome::Answered
            }
            Ok(Some(ClientHandshakeMessage::Option(option))) => self.answer(&option, out, exports, open),
            Err(e) => {
                tracing::debug!("nbd handshake: {e}");
                HandshakeStepOutcome::Close
            }
        }
    }

    fn answer(
        &mut self,
        option: &NbdOption,
        out: &mut Vec<u8>,
        exports: &Exports,
        open: OpenDeviceFn<'_>,
    ) -> HandshakeStepOutcome {
        if let Some((error, text)) = option.refusal() {
            put_option_error_reply(out, option.number(), error, text);
            return HandshakeStepOutcome::Answered;
        }
        match option {
            NbdOption::ExportName(name) => return self.export_name(name, out, exports, open),
            NbdOption::Go(request) => return self.go(request, out, exports, open),
            NbdOption::Info(request) => {
                if let Some(export) =
                    reject_unknown_export(OPT_INFO, &request.name, out, exports.get(&request.name))
                {
                    self.describe(OPT_INFO, request, &export, export.geometry(), out);
                    put_option_ack_reply(out, OPT_INFO);
                }
            }
            NbdOption::List => self.list(0, out, exports),
            NbdOption::StructuredReply => {
                self.structured = true;
                put_option_ack_reply(out, OPT_STRUCTURED_REPLY);
            }
            NbdOption::ListMetaContext(request) => {
                self.contexts_of(request, OPT_LIST_META_CONTEXT, out, exports);
            }
            NbdOption::SetMetaContext(request) => {
                self.contexts_of(request, OPT_SET_META_CONTEXT, out, exports);
            }
            NbdOption::Abort => {
                put_option_ack_reply(out, OPT_ABORT);
                return HandshakeStepOutcome::Close;
            }
            NbdOption::StartTls | NbdOption::Unknown { .. } | NbdOption::Bad(_) => {
                unreachable!("refused above")
            }
        }
        HandshakeStepOutcome::Answered
    }

    /// Lists some exports from position `from` on, and ends the answer after the last one.
    fn list(&mut self, from: u64, out: &mut Vec<u8>, exports: &Exports) {
        let (some, next) = exports.page(from, LISTED_A_STEP);
        some.iter().for_each(|export| put_rep_server(out, &export.name(), export.description()));
        self.listing = next;
        if next.is_none() {
            put_option_ack_reply(out, OPT_LIST);
        }
    }

    /// Lists the matching metadata contexts, or chooses them. Each choice replaces the previous
    /// one.
    fn contexts_of(
        &mut self,
        request: &MetaContextRequest,
        option: u32,
        out: &mut Vec<u8>,
        exports: &Exports,
    ) {
        let list = option == OPT_LIST_META_CONTEXT;
        if !list {
            self.contexts = None;
        }
        if !self.structured {
            return put_option_error_reply(
                out,
                option,
                REP_ERR_INVALID,
                "metadata contexts need structured replies",
            );
        }
        let Some(export) = reject_unknown_export(option, &request.name, out, exports.get(&request.name))
        else {
            return;
        };
        let contexts = match match_contexts(&**export.device(), &request.queries, list) {
            Ok(contexts) => contexts,
            Err(why) => return put_option_error_reply(out, option, REP_ERR_TOO_BIG, why),
        };
        for context in &contexts {
            put_meta_context_reply(out, option, if list { 0 } else { context.id }, &context.name());
        }
        put_option_ack_reply(out, option);
        if !list {
            self.contexts = Some((export.name(), export.device().id(), contexts.into()));
        }
    }

    /// Handles `EXPORT_NAME`, whose only error reply is the end of the connection.
    fn export_name(
        &self,
        name: &str,
        out: &mut Vec<u8>,
        exports: &Exports,
        open: OpenDeviceFn<'_>,
    ) -> HandshakeStepOutcome {
        let Some(export) = exports.acquire(name) else {
            tracing::info!("nbd: a client asked for the unknown export {name:?}");
            return HandshakeStepOutcome::Close;
        };
        if let Err(e) = open(&export) {
            tracing::warn!("nbd: export {:?}: {e}", export.name());
            return HandshakeStepOutcome::Close;
        }
        let geometry = export.geometry();
        let reply = ExportNameReply { size: geometry.size, flags: self.flags(geometry) };
        put_export_name_reply(out, reply, self.no_zeroes);
        self.begin(export, geometry)
    }

    fn go(
        &self,
        request: &ExportInfoRequest,
        out: &mut Vec<u8>,
        exports: &Exports,
        open: OpenDeviceFn<'_>,
    ) -> HandshakeStepOutcome {
        let Some(export) = reject_unknown_export(OPT_GO, &request.name, out, exports.acquire(&request.name))
        else {
            return HandshakeStepOutcome::Answered;
        };
        if let Err(e) = open(&export) {
            tracing::warn!("nbd: export {:?}: {e}", export.name());
            put_option_error_reply(out, OPT_GO, REP_ERR_PLATFORM, &e.text);
            return HandshakeStepOutcome::Answered;
        }
        let geometry = export.geometry();
        self.describe(OPT_GO, request, &export, geometry, out);
        put_option_ack_reply(out, OPT_GO);
        self.begin(export, geometry)
    }

    fn begin(&self, export: ExportRef, geometry: ExportGeometry) -> HandshakeStepOutcome {
        // Another device may have the name by now.
        let is = (export.name(), export.device().id());
        let chosen = self.contexts.as_ref().filter(|(name, device, _)| (name, device) == (&is.0, &is.1));
        let contexts = chosen.map_or_else(Arc::default, |(.., contexts)| Arc::clone(contexts));
        HandshakeStepOutcome::Begin(NegotiatedSession {
            export,
            geometry,
            structured: self.structured,
            contexts,
        })
    }

    fn flags(&self, geometry: ExportGeometry) -> ExportFlags {
        let df = if self.structured { ExportFlags::SEND_DF } else { ExportFlags::empty() };
        geometry.flags | df
    }

    /// Appends size and block sizes, and name and description if they were requested.
    fn describe(
        &self,
        option: u32,
        request: &ExportInfoRequest,
        export: &Export,
        geometry: ExportGeometry,
        out: &mut Vec<u8>,
    ) {
        put_export_info_reply(
            out,
            option,
            &ExportInfoItem::Export { size: geometry.size, flags: self.flags(geometry) },
        );
        put_export_info_reply(out, option, &ExportInfoItem::BlockSize(geometry.blocks));
        if request.infos.contains(&INFO_NAME) {
            put_export_info_reply(out, option, &ExportInfoItem::Name(export.name().to_string()));
        }
        if request.infos.contains(&INFO_DESCRIPTION) && !export.description().is_empty() {
            put_export_info_reply(out, option, &ExportInfoItem::Description(export.description().to_owned()));
        }
    }
}

/// Returns `export`. If it is `None`, appends an error to `out`.
fn reject_unknown_export<T>(option: u32, name: &str, out: &mut Vec<u8>, export: Option<T>) -> Option<T> {
    if export.is_none() {
        put_option_error_reply(out, option, REP_ERR_UNKNOWN, &format!("there is no export {name:?}"));
    }
    export
}

#[cfg(test)]
#[path = "handshake_life.rs"]
mod life;
#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
