//! Options of the handshake, decoded by a server and encoded by a client.

use super::{
    MAGIC_OPTION, OPT_ABORT, OPT_EXPORT_NAME, OPT_EXTENDED_HEADERS, OPT_GO, OPT_INFO, OPT_LIST,
    OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT, OPT_STARTTLS, OPT_STRUCTURED_REPLY, REP_ERR_INVALID,
    REP_ERR_TOO_BIG, REP_ERR_UNSUP, STRING_MAX, decode_nbd_string,
};

/// An option with its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NbdOption {
    /// Start transmission on an export. The reply is [`super::put_export_name_reply`], or the
    /// connection is closed.
    ExportName(String),
    /// End the session. The server sends an ACK if the client still reads, then closes the
    /// connection.
    Abort,
    /// List all exports: one [`super::put_rep_server`] each, then
    /// [`super::put_option_ack_reply`].
    List,
    /// Start TLS.
    StartTls,
    /// Describe an export: one [`super::put_export_info_reply`] per information, then
    /// [`super::put_option_ack_reply`]; or [`super::put_option_error_reply`].
    Info(ExportInfoRequest),
    /// As `Info`; transmission starts after the ACK.
    Go(ExportInfoRequest),
    /// Use structured replies from the start of transmission: [`super::put_option_ack_reply`].
    StructuredReply,
    /// Use extended headers from the start of transmission: [`super::put_option_ack_reply`].
    ExtendedHeaders,
    /// List the available metadata contexts that match: one [`super::put_meta_context_reply`] each,
    /// then [`super::put_option_ack_reply`].
    ListMetaContext(MetaContextRequest),
    /// Use the contexts that match; they replace an earlier selection.
    SetMetaContext(MetaContextRequest),
    /// An option that udm does not know.
    Unknown {
        /// The number of the option.
        option: u32,
        /// The data of the option, at most [`super::OPTION_LEN_MAX`] bytes.
        data: Vec<u8>,
    },
    /// An option with invalid data. It gets an error reply, and the handshake continues.
    Bad(MalformedOption),
}

/// The data of `INFO` and `GO`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExportInfoRequest {
    /// The export; empty for the default one.
    pub name: String,
    /// The requested informations (`INFO_*`), as sent, including unknown and repeated ones.
    pub infos: Vec<u16>,
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MetaContextRequest {
    /// The export; empty for the default one.
    pub name: String,
    /// The queries, as sent, including repeated ones; each at most [`STRING_MAX`] bytes.
    pub queries: Vec<String>,
}

/// An invalid option and the error reply for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MalformedOption {
    /// The option's number.
    pub option: u32,
    /// The error reply (`REP_ERR_*`).
    pub reply: u32,
    /// The reason, as text of the reply.
    pub why: &'static str,
}

impl NbdOption {
    /// Decodes the data of option `option`. Never fails: invalid data become [`NbdOption::Bad`].
    #[must_use]
    pub fn decode(option: u32, data: &[u8]) -> NbdOption {
        let bad = |why| NbdOption::Bad(MalformedOption { option, reply: REP_ERR_INVALID, why });
        let bare = |decoded| if data.is_empty() { decoded } else { bad("the option takes no data") };
        match option {
            OPT_EXPORT_NAME => match decode_nbd_string(data) {
                Ok(name) => NbdOption::ExportName(name.to_owned()),
                Err(why) => bad(why),
            },
            OPT_ABORT => NbdOption::Abort,
            OPT_LIST => bare(NbdOption::List),
            OPT_STARTTLS => bare(NbdOption::StartTls),
            OPT_STRUCTURED_REPLY => bare(NbdOption::StructuredReply),
            OPT_EXTENDED_HEADERS => bare(NbdOption::ExtendedHeaders),
            OPT_INFO | OPT_GO => match ExportInfoRequest::decode(data) {
                Ok(request) if option == OPT_GO => NbdOption::Go(request),
                Ok(request) => NbdOption::Info(request),
                Err((reply, why)) => NbdOption::Bad(MalformedOption { option, reply, why }),
            },
            OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT => match MetaContextRequest::decode(data) {
                Ok(request) if option == OPT_SET_META_CONTEXT => NbdOption::SetMetaContext(request),
                Ok(request) => NbdOption::ListMetaContext(request),
                Err((reply, why)) => NbdOption::Bad(MalformedOption { option, reply, why }),
            },
            _ => NbdOption::Unknown { option, data: data.to_vec() },
        }
    }

    /// The option's number.
    #[must_use]
    pub fn number(&self) -> u32 {
        match self {
            NbdOption::ExportName(_) => OPT_EXPORT_NAME,
            NbdOption::Abort => OPT_ABORT,
            NbdOption::List => OPT_LIST,
            NbdOption::StartTls => OPT_STARTTLS,
            NbdOption::Info(_) => OPT_INFO,
            NbdOption::Go(_) => OPT_GO,
            NbdOption::StructuredReply => OPT_STRUCTURED_REPLY,
            NbdOption::ExtendedHeaders => OPT_EXTENDED_HEADERS,
            NbdOption::ListMetaContext(_) => OPT_LIST_META_CONTEXT,
            NbdOption::SetMetaContext(_) => OPT_SET_META_CONTEXT,
            NbdOption::Unknown { option, .. } => *option,
            NbdOption::Bad(bad) => bad.option,
        }
    }

    /// The error reply and its text, for options that every udm server refuses: unknown ones and
    /// malformed ones.
    #[must_use]
    pub fn refusal(&self) -> Option<(u32, &'static str)> {
        match self {
            NbdOption::Unknown { .. } => Some((REP_ERR_UNSUP, "this server does not know the option")),
            NbdOption::Bad(bad) => Some((bad.reply, bad.why)),
            _ => None,
        }
    }

    /// Appends the option as a client sends it. A [`NbdOption::Bad`] has lost its data, so it is
    /// sent without data.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&MAGIC_OPTION.to_be_bytes());
        out.extend_from_slice(&self.number().to_be_bytes());
        let length = out.len();
        out.extend_from_slice(&[0; 4]);
        match self {
            NbdOption::ExportName(name) => out.extend_from_slice(name.as_bytes()),
            NbdOption::Info(request) | NbdOption::Go(request) => request.encode(out),
            NbdOption::ListMetaContext(request) | NbdOption::SetMetaContext(request) => {
                request.encode(out);
            }
            NbdOption::Unknown { data, .. } => out.extend_from_slice(data),
            _ => {}
        }
        let len = u32::try_from(out.len() - length - 4).unwrap_or(u32::MAX);
        out[length..length + 4].copy_from_slice(&len.to_be_bytes());
    }
}

const SHORT: (u32, &str) = (REP_ERR_INVALID, "the option is shorter than it says");

/// Splits off a string that follows its length, and returns the rest. `long` is the error text if
/// the string is too long.
fn split_length_prefixed_string<'a>(
    data: &'a [u8],
    long: &'static str,
) -> Result<(&'a str, &'a [u8]), (u32, &'static str)> {
    let (len, data) = data.split_first_chunk().ok_or(SHORT)?;
    let len = u32::from_be_bytes(*len) as usize;
    if len > STRING_MAX {
        return Err((REP_ERR_TOO_BIG, long));
    }
    let (text, rest) = data.split_at_checked(len).ok_or(SHORT)?;
    Ok((decode_nbd_string(text).map_err(|why| (REP_ERR_INVALID, why))?, rest))
}

impl MetaContextRequest {
    /// Decodes name length, name, number of queries, and queries, each with its length.
    fn decode(data: &[u8]) -> Result<MetaContextRequest, (u32, &'static str)> {
        let (name, data) = split_length_prefixed_string(data, "the export name is longer than 4096 bytes")?;
        let (count, mut data) = data.split_first_chunk().ok_or(SHORT)?;
        let mut queries = Vec::new();
        // A query takes at least 4 bytes, so a too large count ends with the data.
        for _ in 0..u32::from_be_bytes(*count) {
            let (query, rest) = split_length_prefixed_string(data, "a query is longer than 4096 bytes")?;
            queries.push(query.to_owned());
            data = rest;
        }
        if !data.is_empty() {
            return Err((REP_ERR_INVALID, "the number of queries does not fit the option's length"));
        }
        Ok(MetaContextRequest { name: name.to_owned(), queries })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let put = |text: &str, out: &mut Vec<u8>| {
            out.extend_from_slice(&(text.len() as u32).to_be_bytes());
            out.extend_from_slice(text.as_bytes());
        };
        put(&self.name, out);
        out.extend_from_slice(&(self.queries.len() as u32).to_be_bytes());
        self.queries.iter().for_each(|query| put(query, out));
    }
}

impl ExportInfoRequest {
    /// Decodes name length, name, count, and infos.
    fn decode(data: &[u8]) -> Result<ExportInfoRequest, (u32, &'static str)> {
        let invalid = |why| (REP_ERR_INVALID, why);
        let (name, data) = split_length_prefixed_string(data, "the export name is longer than 4096 bytes")?;
        let (count, data) = data.split_first_chunk().ok_or(SHORT)?;
        if data.len() != usize::from(u16::from_be_bytes(*count)) * 2 {
            return Err(invalid("the number of informations does not fit the option's length"));
        }
        let infos = data.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]])).collect();
        Ok(ExportInfoRequest { name: name.to_owned(), infos })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let count = self.infos.len().min(usize::from(u16::MAX));
        out.extend_from_slice(&(self.name.len() as u32).to_be_bytes());
        out.extend_from_slice(self.name.as_bytes());
        out.extend_from_slice(&(count as u16).to_be_bytes());
        for info in &self.infos[..count] {
            out.extend_from_slice(&info.to_be_bytes());
        }
    }
}
