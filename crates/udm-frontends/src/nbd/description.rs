//! The descriptions of exports.

use std::sync::{Arc, Mutex, PoisonError};

/// The text about a device that its exports show to people; empty for none. Read when a client asks
/// for it, and never on the data path.
#[derive(Debug, Default)]
pub struct ExportDescription(Mutex<Arc<str>>);

impl ExportDescription {
    /// The text.
    #[must_use]
    pub fn get(&self) -> Arc<str> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sets the text. Clients see as much of it as the protocol can transmit.
    pub fn set(&self, text: &str) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = text.into();
    }
}
