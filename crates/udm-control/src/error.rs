//! Why a verb was refused.

use std::fmt;
use udm_targets::TargetError;

/// Why a verb was refused: who it was about, what the kernel says of it, and where in a table the fault is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerbError {
    /// The device, as the caller named it.
    pub device: String,
    /// What went wrong, in the kernel's words.
    pub error: Box<TargetError>,
    /// The place in the table's text.
    pub place: Option<Place>,
    /// The device itself is not there, as opposed to something that it needs.
    pub missing: bool,
}

/// A place in the text of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The line, from 1.
    pub line: usize,
    /// The first character to blame, from 1.
    pub column: usize,
    /// How many characters to blame, at least 1.
    pub width: usize,
}

impl VerbError {
    /// `error`, about `device`.
    pub fn new(device: impl Into<String>, error: TargetError) -> VerbError {
        VerbError { device: device.into(), error: Box::new(error), place: None, missing: false }
    }

    /// ENXIO, as the kernel answers for a name that it does not know.
    pub fn missing(device: impl Into<String>) -> VerbError {
        let error = TargetError::errno(6).because("no device of that name");
        VerbError { missing: true, ..VerbError::new(device, error) }
    }

    /// With the place in the table's text.
    #[must_use]
    pub fn at(self, place: Option<Place>) -> VerbError {
        VerbError { place, ..self }
    }
}

/// One line, whatever was quoted from the request.
impl fmt::Display for VerbError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&one_line(&format!("{}: {}", self.device, self.error)))
    }
}

/// `text` with its control characters escaped.
pub(crate) fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { line.extend(c.escape_debug()) } else { line.push(c) }
    }
    line
}

impl std::error::Error for VerbError {}
