//! Requests that several commands send to the server, and the texts of its errors.

use udm_control::api;
use udm_control::api::verbs::{self, ApiVerbEndpoint};
use udm_control::client::{ControlClient, ControlClientError};
use udm_control::error::TextPosition;

/// Converts an error of the client. If a table is at fault, the text shows its line.
pub fn explain_client_error(error: ControlClientError, table: Option<&str>) -> anyhow::Error {
    let ControlClientError::Refused(refused) = &error else { return error.into() };
    let number = |n: Option<u64>| usize::try_from(n?).ok();
    let position = number(refused.line).zip(number(refused.column)).map(|(line, column)| TextPosition {
        line,
        column,
        width: number(refused.width).unwrap_or(1),
    });
    match table.zip(position).and_then(|(table, position)| position.mark(table)) {
        Some(mark) => anyhow::anyhow!("{error}\n{mark}"),
        None => error.into(),
    }
}

/// Calls a verb that has no body, and explains its error.
///
/// # Errors
/// One line: the server does not answer, or refuses.
pub fn call_verb_without_body<Q, R: serde::de::DeserializeOwned>(
    client: &ControlClient,
    verb: ApiVerbEndpoint<Q, (), R>,
) -> anyhow::Result<R> {
    client.call(verb, &()).map_err(|e| explain_client_error(e, None))
}

/// All devices, in the order of their numbers.
///
/// # Errors
/// The server does not answer.
pub fn all_devices(client: &ControlClient) -> Result<Vec<api::DeviceDescription>, ControlClientError> {
    Ok(client.call(verbs::LIST_DEVICES, &())?.devices)
}

/// The live tables of all devices.
///
/// # Errors
/// The server does not answer.
pub fn all_tables(client: &ControlClient) -> Result<Vec<api::TableDescription>, ControlClientError> {
    Ok(client.call(verbs::LIST_TABLES, &())?.tables)
}

/// The current folder, for relative paths in tables. `None` if it is not known or not UTF-8; the
/// server then refuses relative paths.
pub fn current_dir() -> Option<String> {
    std::env::current_dir().ok()?.into_os_string().into_string().ok()
}
