//! Which clients may use a device.

use std::sync::{Arc, Mutex, PoisonError};

/// The clients that may choose the exports of a device, by names in their certificates. Read when a
/// client asks for an export, and never on the data path.
#[derive(Debug, Default)]
pub struct AllowedClients(Mutex<Option<Arc<[String]>>>);

impl AllowedClients {
    /// The names; `None` for all clients.
    #[must_use]
    pub fn get(&self) -> Option<Arc<[String]>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the names. Clients that have chosen an export stay.
    pub fn set(&self, names: Option<Arc<[String]>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = names;
    }

    /// True for a client with these names.
    pub(super) fn admits(&self, client: &[String]) -> bool {
        self.get().is_none_or(|names| names.iter().any(|name| client.contains(name)))
    }
}
