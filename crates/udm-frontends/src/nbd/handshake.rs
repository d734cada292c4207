//! The handshake, from the greeting to the choice of an export: a state machine without I/O.
//!
//! Contract: one call of [`ServerHandshake::step`] answers at most one message of the client, or a
//! part of a list of exports. So the caller limits the output that waits. If the client violates
//! the protocol, the connection ends. An option that is valid but not supported gets an error
//! reply.

use super::allowed_clients::NbdClientIdentity;
use super::contexts::{MetaContext, match_contexts};
use super::export_geometry::ExportGeometry;
use super::exports::{Export, ExportRef, Exports};
use super::tls::NbdServerTls;
use std::sync::Arc;
use udm_core::{DeviceControlError, DeviceId};
use udm_tls::TlsSession;
use udm_wire::nbd::{
    ClientFlags, ClientHandshakeMessage, ClientHandshakeMessageParser, ExportFlags, ExportInfoItem,
    ExportInfoRequest, ExportNameReply, GREETING_SIZE, HandshakeFlags, INFO_DESCRIPTION, INFO_NAME,
    MetaContextRequest, NbdHeaderStyle, NbdOption, OPT_ABORT, OPT_EXTENDED_HEADERS, OPT_GO, OPT_INFO,
    OPT_LIST, OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT, OPT_STARTTLS, OPT_STRUCTURED_REPLY,
    REP_ERR_EXT_HEADER_REQD, REP_ERR_INVALID, REP_ERR_PLATFORM, REP_ERR_POLICY, REP_ERR_TLS_REQD,
    REP_ERR_TOO_BIG, REP_ERR_UNKNOWN, encode_nbd_server_greeting, put_export_info_reply,
    put_export_name_reply, put_meta_context_reply, put_option_ack_reply, put_option_error_reply,
    put_rep_server,
};

/// The server's side of a handshake.
#[derive(Default)]
pub(super) struct ServerHandshake {
    parser: ClientHandshakeMessageParser,
    no_zeroes: bool,
    header_style: NbdHeaderStyle,
    /// The chosen metadata contexts, with the export for which they are valid.
    contexts: Option<(Arc<str>, DeviceId, Arc<[MetaContext]>)>,
    /// Position at which the requested list of exports continues.
    listing: Option<u64>,
    tls: HandshakeTls,
    client: NbdClientIdentity,
}

/// TLS in a handshake.
#[derive(Default)]
enum HandshakeTls {
    /// The server does not do TLS.
    #[default]
    Off,
    /// The client may begin TLS, or must.
    Before(NbdServerTls),
    /// All messages are encrypted.
    Active,
}

/// Exports listed per step: with the longest names and descriptions, 64 KiB and their headers.
const LISTED_A_STEP: usize = 8;

/// Result of a step.
pub(super) enum HandshakeStepOutcome {
    /// The input is used up.
    More,
    /// A message was answered, or a part of it. The input may have more messages.
    Answered,
    /// TLS begins after the output.
    StartTls(Box<TlsSession>),
    /// The transmission phase begins after the output.
    Begin(NegotiatedSession),
    /// The connection is closed after the output is sent.
    Close,
}

/// The negotiated options.
pub(super) struct NegotiatedSession {
    pub(super) client: NbdClientIdentity,
    pub(super) export: ExportRef,
    pub(super) geometry: ExportGeometry,
    pub(super) header_style: NbdHeaderStyle,
    /// Contexts of `BLOCK_STATUS`. If empty, the command is refused.
    pub(super) contexts: Arc<[MetaContext]>,
}

/// Opens the device of the chosen export before the client gets a positive answer.
pub(super) type OpenDeviceFn<'a> = &'a mut dyn FnMut(&Export) -> Result<(), DeviceControlError>;

impl ServerHandshake {
    /// A handshake with `client`, which may use TLS, if `tls` says so.
    pub(super) fn new(tls: Option<NbdServerTls>, client: NbdClientIdentity) -> ServerHandshake {
        let tls = tls.map_or(HandshakeTls::Off, HandshakeTls::Before);
        ServerHandshake { tls, client, ..ServerHandshake::default() }
    }

    /// Sets the names in the client's verified certificate, if they are not set yet.
    pub(super) fn set_client_names(&mut self, names: impl FnOnce() -> Vec<String>) {
        self.client.set_names(names);
    }

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
        if let HandshakeTls::Before(NbdServerTls { is_required: true, .. }) = self.tls
            && !matches!(option, NbdOption::StartTls | NbdOption::Abort)
        {
            if matches!(option, NbdOption::ExportName(_)) {
                tracing::warn!(
                    "nbd: the client {} is disconnected: it asked for an export without TLS",
                    self.client
                );
                return HandshakeStepOutcome::Close;
            }
            put_option_error_reply(out, option.number(), REP_ERR_TLS_REQD, "this server requires TLS");
            return HandshakeStepOutcome::Answered;
        }
        if let Some((error, text)) = option.refusal() {
            put_option_error_reply(out, option.number(), error, text);
            return HandshakeStepOutcome::Answered;
        }
        match option {
            NbdOption::ExportName(name) => return self.export_name(name, out, exports, open),
            NbdOption::Go(request) => return self.go(request, out, exports, open),
            NbdOption::Info(request) => {
                let export = exports.get(&request.name).filter(|export| self.admits(export));
                if let Some(export) = reject_unknown_export(OPT_INFO, &request.name, out, export) {
                    self.describe(OPT_INFO, request, &export, export.geometry(), out);
                    put_option_ack_reply(out, OPT_INFO);
                }
            }
            NbdOption::List => self.list(0, out, exports),
            NbdOption::StructuredReply if self.header_style.is_extended() => {
                let text = "extended headers are in use, and replace structured replies";
                put_option_error_reply(out, OPT_STRUCTURED_REPLY, REP_ERR_EXT_HEADER_REQD, text);
            }
            NbdOption::StructuredReply => {
                self.header_style = NbdHeaderStyle::Structured;
                put_option_ack_reply(out, OPT_STRUCTURED_REPLY);
            }
            NbdOption::ExtendedHeaders => {
                self.header_style = NbdHeaderStyle::Extended;
                put_option_ack_reply(out, OPT_EXTENDED_HEADERS);
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
            NbdOption::StartTls => return self.start_tls(out),
            NbdOption::Unknown { .. } | NbdOption::Bad(_) => {
                unreachable!("refused above")
            }
        }
        HandshakeStepOutcome::Answered
    }

    /// Agrees to TLS. What was negotiated before is forgotten, because it could be forged
    /// (proto.md, "TLS support").
    fn start_tls(&mut self, out: &mut Vec<u8>) -> HandshakeStepOutcome {
        let (error, text) = match &self.tls {
            HandshakeTls::Off => (REP_ERR_POLICY, "this server does not do TLS".to_owned()),
            HandshakeTls::Active => (REP_ERR_INVALID, "TLS has begun already".to_owned()),
            HandshakeTls::Before(tls) => match tls.config.session() {
                Ok(session) => {
                    put_option_ack_reply(out, OPT_STARTTLS);
                    (self.header_style, self.contexts) = (NbdHeaderStyle::Simple, None);
                    self.tls = HandshakeTls::Active;
                    return HandshakeStepOutcome::StartTls(Box::new(session));
                }
                Err(why) => (REP_ERR_PLATFORM, why),
            },
        };
        put_option_error_reply(out, OPT_STARTTLS, error, &text);
        HandshakeStepOutcome::Answered
    }

    /// Lists some exports from position `from` on, and ends the answer after the last one.
    fn list(&mut self, from: u64, out: &mut Vec<u8>, exports: &Exports) {
        let (some, next) = exports.page(from, LISTED_A_STEP);
        let some = some.iter().filter(|export| export.admits(&self.client));
        some.for_each(|export| put_rep_server(out, &export.name(), &export.description()));
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
        if !self.header_style.has_chunks() {
            return put_option_error_reply(
                out,
                option,
                REP_ERR_INVALID,
                "metadata contexts need structured replies",
            );
        }
        let export = exports.get(&request.name).filter(|export| self.admits(export));
        let Some(export) = reject_unknown_export(option, &request.name, out, export) else {
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

    /// Handles `EXPORT_NAME`, whose only error reply is the end of the connection. A client with
    /// extended headers must not use it.
    fn export_name(
        &mut self,
        name: &str,
        out: &mut Vec<u8>,
        exports: &Exports,
        open: OpenDeviceFn<'_>,
    ) -> HandshakeStepOutcome {
        if self.header_style.is_extended() {
            tracing::info!("nbd: a client with extended headers is disconnected: it must choose with GO");
            return HandshakeStepOutcome::Close;
        }
        let Some(export) = exports.acquire(name).filter(|export| self.admits(export)) else {
            tracing::info!("nbd: a client asked for the unknown export {name:?}");
            return HandshakeStepOutcome::Close;
        };
        if let Err(e) = open(&export) {
            tracing::warn!("nbd: export {:?}: {e}", export.name());
            return HandshakeStepOutcome::Close;
        }
        let geometry = export.geometry();
        let reply = ExportNameReply { size: geometry.size, flags: self.flags(&export, geometry) };
        put_export_name_reply(out, reply, self.no_zeroes);
        self.begin(export, geometry)
    }

    fn go(
        &mut self,
        request: &ExportInfoRequest,
        out: &mut Vec<u8>,
        exports: &Exports,
        open: OpenDeviceFn<'_>,
    ) -> HandshakeStepOutcome {
        let export = exports.acquire(&request.name).filter(|export| self.admits(export));
        let Some(export) = reject_unknown_export(OPT_GO, &request.name, out, export) else {
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

    /// True if this client may choose the export. For others it does not exist.
    fn admits(&self, export: &Export) -> bool {
        let is_admitted = export.admits(&self.client);
        if !is_admitted {
            let (name, client) = (export.name(), &self.client);
            tracing::warn!("nbd: export {name:?}: the client {client} is not allowed to use it");
        }
        is_admitted
    }

    fn begin(&mut self, export: ExportRef, geometry: ExportGeometry) -> HandshakeStepOutcome {
        let (header_style, contexts) = (self.header_style, self.chosen_contexts(&export));
        let client = std::mem::take(&mut self.client);
        HandshakeStepOutcome::Begin(NegotiatedSession { client, export, geometry, header_style, contexts })
    }

    /// The chosen metadata contexts of `export`.
    fn chosen_contexts(&self, export: &Export) -> Arc<[MetaContext]> {
        // Another device may have the name by now.
        let is = (export.name(), export.device().id());
        let chosen = self.contexts.as_ref().filter(|(name, device, _)| (name, device) == (&is.0, &is.1));
        chosen.map_or_else(Arc::default, |(.., contexts)| Arc::clone(contexts))
    }

    fn flags(&self, export: &Export, geometry: ExportGeometry) -> ExportFlags {
        let mut flags = geometry.flags;
        flags.set(ExportFlags::SEND_DF, self.header_style.has_chunks());
        // A payload of `BLOCK_STATUS` names some of the chosen contexts.
        let has_payload = self.header_style.is_extended() && !self.chosen_contexts(export).is_empty();
        flags.set(ExportFlags::BLOCK_STATUS_PAYLOAD, has_payload);
        flags
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
            &ExportInfoItem::Export { size: geometry.size, flags: self.flags(export, geometry) },
        );
        put_export_info_reply(out, option, &ExportInfoItem::BlockSize(geometry.blocks));
        if request.infos.contains(&INFO_NAME) {
            put_export_info_reply(out, option, &ExportInfoItem::Name(export.name().to_string()));
        }
        let description = export.description();
        if request.infos.contains(&INFO_DESCRIPTION) && !description.is_empty() {
            put_export_info_reply(out, option, &ExportInfoItem::Description(description.to_string()));
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
