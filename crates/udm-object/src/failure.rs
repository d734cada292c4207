//! The kinds of failures of a read, and how they are told from the errors of `object_store`.

use http::StatusCode;
use object_store::client::HttpError;
use std::error::Error;
use udm_core::Status;
use udm_wire::words::quote_for_error_line;

/// A failure of one attempt to read a range; each has one line for users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadFailure {
    /// The server does not answer, or is overloaded. Another attempt may succeed.
    Unavailable(String),
    /// The server refuses, or its answer is wrong. Another attempt would fail too.
    Refused(String),
    /// The object is another one than at the load.
    Changed(String),
}

impl ReadFailure {
    /// The failure of an answer with a status that is not 206. `None` for a status that does not
    /// exist.
    #[must_use]
    pub fn of_answer(status: u16) -> Option<ReadFailure> {
        let status = StatusCode::from_u16(status).ok()?;
        Some(UnexpectedAnswer { status, location: None }.failure())
    }

    /// Status of reads that fail so. All are path errors: another mirror may have the object.
    #[must_use]
    pub fn status(&self) -> Status {
        match self {
            ReadFailure::Unavailable(_) => Status::Timeout,
            ReadFailure::Refused(_) => Status::IoErr,
            ReadFailure::Changed(_) => Status::Offline,
        }
    }

    /// The line for users.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            ReadFailure::Unavailable(text) | ReadFailure::Refused(text) | ReadFailure::Changed(text) => text,
        }
    }
}

/// An answer to the request of a range that is not 206.
#[derive(Debug, thiserror::Error)]
#[error("the server answers {status}{}", .location.as_ref().map(|to| format!(" to {to}")).unwrap_or_default())]
pub(crate) struct UnexpectedAnswer {
    pub(crate) status: StatusCode,
    /// The `Location` of a redirect, quoted.
    pub(crate) location: Option<String>,
}

impl UnexpectedAnswer {
    fn failure(&self) -> ReadFailure {
        let status = self.status;
        match status.as_u16() {
            200 => ReadFailure::Refused(
                "the server ignores ranges, which udm needs (answer 200 to a range)".into(),
            ),
            412 => ReadFailure::Changed("the object has changed since it was opened (412)".into()),
            408 | 429 | 500 | 502..=504 => ReadFailure::Unavailable(self.to_string()),
            401 | 403 => ReadFailure::Refused(format!("{self}: check the credentials and permissions")),
            404 | 410 => ReadFailure::Refused(format!("{self}: there is no such object")),
            416 => ReadFailure::Refused(format!("{self}: the object is empty, or shorter than at the load")),
            300..=399 => ReadFailure::Refused(format!("{self}: name the object by that URL")),
            _ => ReadFailure::Refused(self.to_string()),
        }
    }
}

/// Finds the failure in an error of `object_store`. Its own texts may have parts of the answer, so
/// they are quoted.
pub(crate) fn classify(error: &(dyn Error + 'static)) -> ReadFailure {
    let mut next = Some(error);
    let mut deepest = error;
    let mut is_transport = false;
    while let Some(error) = next {
        if let Some(answer) = error.downcast_ref::<UnexpectedAnswer>() {
            return answer.failure();
        }
        let inner = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        if let Some(tls) = inner.and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            let text = quote_for_error_line(&tls.to_string());
            return ReadFailure::Refused(format!("no connection with TLS: {text}"));
        }
        is_transport |= error.is::<HttpError>();
        deepest = error;
        next = error.source();
    }
    let text = quote_for_error_line(&deepest.to_string());
    match is_transport {
        true => ReadFailure::Unavailable(format!("no answer: {text}")),
        false => ReadFailure::Refused(format!("no valid answer (credentials?): {text}")),
    }
}
