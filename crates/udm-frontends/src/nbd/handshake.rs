//! The handshake, from the greeting to the choice of an export: a state machine without I/O.
//!
//! Contract: one call of [`Handshake::step`] answers at most one message of the client, or a part
//! of a list of exports. So the caller limits the output that waits. If the client violates the
//! protocol, the connection ends. An option that is valid but not supported gets an error reply.

use super::contexts::{MetaContext, match_contexts};
use super::exports::{Export, ExportGeometry, ExportRef, Exports};
use std::sync::Arc;
use udm_core::{DeviceId, OpenError};
use udm_wire::nbd::{
    ClientFlags, ClientMessage, ClientOption, ExportFlags, ExportNameReply, GREETING_SIZE, HandshakeFlags,
    HandshakeParser, INFO_DESCRIPTION, INFO_NAME, Info, InfoRequest, MetaRequest, OPT_ABORT, OPT_GO,
    OPT_INFO, OPT_LIST, OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT, OPT_STRUCTURED_REPLY, REP_ERR_INVALID,
    REP_ERR_PLATFORM, REP_ERR_TOO_BIG, REP_ERR_UNKNOWN, greeting, put_ack, put_error, put_export_name_reply,
    put_info, put_meta_context, put_server,
};

/// The server's side of a handshake.
#[derive(Default)]
pub(super) struct Handshake {
    parser: HandshakeParser,
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
pub(super) enum HandshakeStep {
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
pub(super) type OpenDeviceFn<'a> = &'a mut dyn FnMut(&Export) -> Result<(), OpenError>;

impl Handshake {
    /// The first bytes that the server sends.
    pub(super) fn greeting() -> [u8; GREETING_SIZE] {
        greeting(HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES)
    }

    /// Takes the next message from `input` and appends the answer to `out`.
    pub(super) fn step(
        &mut self,
        input: &mut &[u8],
        out: &mut Vec<u8>,
        exports: &Exports,
        open: OpenDeviceFn<'_>,
    ) -> HandshakeStep {
        if let Some(from) = self.listing {
            self.list(from, out, exports);
            return HandshakeStep::Answered;
        }
        match self.parser.next(input) {
            Ok(None) => HandshakeStep::More,
            Ok(Some(ClientMessage::Flags(flags))) => {
                self.no_zeroes = flags.contains(ClientFlags::NO_ZEROES);
                HandshakeStep::Answered
            }
            Ok(Some(ClientMessage::Option(option))) => self.answer(&option, out, exports, open),
            Err(e) => {
                tracing::debug!("nbd handshake: {e}");
                HandshakeStep::Close
            }
        }
    }

    fn answer(
        &mut self,
        option: &ClientOption,
        out: &mut Vec<u8>,
        exports: &Exports,
        open: OpenDeviceFn<'_>,
    ) -> HandshakeStep {
        if let Some((error, text)) = option.refusal() {
            put_error(out, option.number(), error, text);
            return HandshakeStep::Answered;
        }
        match option {
            ClientOption::ExportName(name) => return self.export_name(name, out, exports, open),
            ClientOption::Go(request) => return self.go(request, out, exports, open),
            ClientOption::Info(request) => {
                if let Some(export) =
                    export_or_error(OPT_INFO, &request.name, out, exports.get(&request.name))
                {
                    self.describe(OPT_INFO, request, &export, export.geometry(), out);
                    put_ack(out, OPT_INFO);
                }
            }
            ClientOption::List => self.list(0, out, exports),
            ClientOption::StructuredReply => {
                self.structured = true;
                put_ack(out, OPT_STRUCTURED_REPLY);
            }
            ClientOption::ListMetaContext(request) => {
                self.contexts_of(request, OPT_LIST_META_CONTEXT, out, exports);
            }
            ClientOption::SetMetaContext(request) => {
                self.contexts_of(request, OPT_SET_META_CONTEXT, out, exports);
            }
            ClientOption::Abort => {
                put_ack(out, OPT_ABORT);
                return HandshakeStep::Close;
            }
            ClientOption::StartTls | ClientOption::Unknown { .. } | ClientOption::Bad(_) => {
                unreachable!("refused above")
            }
        }
        HandshakeStep::Answered
    }

    /// Lists some exports from position `from` on, and ends the answer after the last one.
    fn list(&mut self, from: u64, out: &mut Vec<u8>, exports: &Exports) {
        let (some, next) = exports.page(from, LISTED_A_STEP);
        some.iter().for_each(|export| put_server(out, &export.name(), export.description()));
        self.listing = next;
        if next.is_none() {
            put_ack(out, OPT_LIST);
        }
    }

    /// Lists the matching metadata contexts, or chooses them. Each choice replaces the previous
    /// one.
    fn contexts_of(&mut self, request: &MetaRequest, option: u32, out: &mut Vec<u8>, exports: &Exports) {
        let list = option == OPT_LIST_META_CONTEXT;
        if !list {
            self.contexts = None;
        }
        if !self.structured {
            return put_error(out, option, REP_ERR_INVALID, "metadata contexts need structured replies");
        }
        let Some(export) = export_or_error(option, &request.name, out, exports.get(&request.name)) else {
            return;
        };
        let contexts = match match_contexts(&**export.device(), &request.queries, list) {
            Ok(contexts) => contexts,
            Err(why) => return put_error(out, option, REP_ERR_TOO_BIG, why),
        };
        for context in &contexts {
            put_meta_context(out, option, if list { 0 } else { context.id }, &context.name());
        }
        put_ack(out, option);
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
    ) -> HandshakeStep {
        let Some(export) = exports.acquire(name) else {
            tracing::info!("nbd: a client asked for the unknown export {name:?}");
            return HandshakeStep::Close;
        };
        if let Err(e) = open(&export) {
            tracing::warn!("nbd: export {:?}: {e}", export.name());
            return HandshakeStep::Close;
        }
        let geometry = export.geometry();
        let reply = ExportNameReply { size: geometry.size, flags: self.flags(geometry) };
        put_export_name_reply(out, reply, self.no_zeroes);
        self.begin(export, geometry)
    }

    fn go(
        &self,
        request: &InfoRequest,
        out: &mut Vec<u8>,
        exports: &Exports,
        open: OpenDeviceFn<'_>,
    ) -> HandshakeStep {
        let Some(export) = export_or_error(OPT_GO, &request.name, out, exports.acquire(&request.name)) else {
            return HandshakeStep::Answered;
        };
        if let Err(e) = open(&export) {
            tracing::warn!("nbd: export {:?}: {e}", export.name());
            put_error(out, OPT_GO, REP_ERR_PLATFORM, &e.text);
            return HandshakeStep::Answered;
        }
        let geometry = export.geometry();
        self.describe(OPT_GO, request, &export, geometry, out);
        put_ack(out, OPT_GO);
        self.begin(export, geometry)
    }

    fn begin(&self, export: ExportRef, geometry: ExportGeometry) -> HandshakeStep {
        // Another device may have the name by now.
        let is = (export.name(), export.device().id());
        let chosen = self.contexts.as_ref().filter(|(name, device, _)| (name, device) == (&is.0, &is.1));
        let contexts = chosen.map_or_else(Arc::default, |(.., contexts)| Arc::clone(contexts));
        HandshakeStep::Begin(NegotiatedSession { export, geometry, structured: self.structured, contexts })
    }

    fn flags(&self, geometry: ExportGeometry) -> ExportFlags {
        let df = if self.structured { ExportFlags::SEND_DF } else { ExportFlags::empty() };
        geometry.flags | df
    }

    /// Appends size and block sizes, and name and description if they were requested.
    fn describe(
        &self,
        option: u32,
        request: &InfoRequest,
        export: &Export,
        geometry: ExportGeometry,
        out: &mut Vec<u8>,
    ) {
        put_info(out, option, &Info::Export { size: geometry.size, flags: self.flags(geometry) });
        put_info(out, option, &Info::BlockSize(geometry.blocks));
        if request.infos.contains(&INFO_NAME) {
            put_info(out, option, &Info::Name(export.name().to_string()));
        }
        if request.infos.contains(&INFO_DESCRIPTION) && !export.description().is_empty() {
            put_info(out, option, &Info::Description(export.description().to_owned()));
        }
    }
}

/// Returns `export`. If it is `None`, appends an error to `out`.
fn export_or_error<T>(option: u32, name: &str, out: &mut Vec<u8>, export: Option<T>) -> Option<T> {
    if export.is_none() {
        put_error(out, option, REP_ERR_UNKNOWN, &format!("there is no export {name:?}"));
    }
    export
}

#[cfg(test)]
#[path = "handshake_life.rs"]
mod life;
#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
