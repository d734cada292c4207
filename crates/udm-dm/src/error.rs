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
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let errno = errno::describe_errno(self.errno);
        match (self.text.is_empty(), self.reason.is_empty()) {
            (true, true) => f.write_str(&errno),
            (true, false) => write!(f, "{}: {errno}", self.reason),
            (false, true) => write!(f, "{}: {errno}", self.text),
            (false, false) => write!(f, "{} ({}): {errno}", self.text, self.reason),
        }
    }
}

impl std::error::Error for TargetError {}
