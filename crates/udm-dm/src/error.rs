//! Errors of tables and messages, in the kernel's words.

use std::fmt;
use udm_core::DeviceControlError;
use udm_core::errno::{self, EINVAL};

/// The reason why a table or a message was refused.
///
/// `text` is the kernel's message without the device number (`multipath: invalid number of paths`).
/// `reason` is the detail that the kernel's general text leaves out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetError {
    /// The errno, positive: EINVAL 22, ENOENT 2, ENXIO 6, ...
    pub errno: i32,
    /// The kernel's text; empty if the kernel has none.
    pub text: String,
    /// The precise reason, or empty.
    pub reason: String,
    /// The table line with the error, from 0, if one line is to blame.
    pub line: Option<usize>,
    /// The argument word with the error, if one word is to blame. Word 0 is the first word after
    /// the target type. If a word is missing, this is the number of words.
    pub word: Option<usize>,
}

impl TargetError {
    /// EINVAL with the kernel's text.
    pub fn new(text: impl Into<String>) -> TargetError {
        TargetError { errno: EINVAL, text: text.into(), reason: String::new(), line: None, word: None }
    }

    /// An error with an errno only.
    #[must_use]
    pub fn errno(errno: i32) -> TargetError {
        TargetError { errno, ..TargetError::new("") }
    }

    /// Replaces the errno.
    #[must_use]
    pub fn with_errno(mut self, errno: i32) -> TargetError {
        self.errno = errno;
        self
    }

    /// Sets the precise reason.
    #[must_use]
    pub fn because(mut self, reason: impl Into<String>) -> TargetError {
        self.reason = reason.into();
        self
    }

    /// Sets the argument word with the error (from 0).
    #[must_use]
    pub fn at(mut self, word: usize) -> TargetError {
        self.word = Some(word);
        self
    }
}

/// The text of the open error becomes the reason.
impl From<DeviceControlError> for TargetError {
    fn from(DeviceControlError { errno, text }: DeviceControlError) -> TargetError {
        TargetError::errno(errno).because(text)
    }
}

impl fmt::Display for TargetError {
    /// The text of the errno comes last, unless the reason ends with it. A reason without a text of
    /// the kernel is a sentence of udm: with EINVAL it needs no errno.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let errno = errno::describe_errno(self.errno);
        let is_explained = self.text.is_empty() && !self.reason.is_empty() && self.errno == EINVAL;
        match (self.text.is_empty(), self.reason.is_empty()) {
            (true, true) => return f.write_str(&errno),
            (true, false) => f.write_str(&self.reason)?,
            (false, true) => f.write_str(&self.text)?,
            (false, false) => write!(f, "{} ({})", self.text, self.reason)?,
        }
        if is_explained || self.reason.ends_with(&*errno) { Ok(()) } else { write!(f, ": {errno}") }
    }
}

impl std::error::Error for TargetError {}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_core::errno::{ECONNREFUSED, ENXIO};

    #[test]
    fn an_errno_is_shown_once_and_not_after_an_explanation() {
        let refused = "nbd://h: connect: Connection refused";
        for (error, shown) in [
            (TargetError::errno(ENXIO), "No such device or address"),
            (
                TargetError::new("linear: Invalid device sector"),
                "linear: Invalid device sector: Invalid argument",
            ),
            (TargetError::errno(ENXIO).because("no such name"), "no such name: No such device or address"),
            (TargetError::errno(EINVAL).because("it is not a snapshot"), "it is not a snapshot"),
            (TargetError::new("t").because("why"), "t (why): Invalid argument"),
            (TargetError::errno(ECONNREFUSED).because(refused), refused),
            (
                TargetError::new("t").with_errno(ECONNREFUSED).because(refused),
                "t (nbd://h: connect: Connection refused)",
            ),
        ] {
            assert_eq!(error.to_string(), shown);
        }
    }
}
