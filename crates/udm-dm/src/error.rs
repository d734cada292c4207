//! Errors of tables and messages, in the kernel's words.

use std::fmt;
use udm_core::OpenError;
use udm_core::errno::{self, EINVAL};

/// Why a table or a message was refused.
///
/// `text` is the kernel's message without the device number (`multipath: invalid number of paths`);
/// `reason` is what the kernel hides behind a general text (spec/decisions, "Tables and messages").
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetError {
    /// The errno, positive: EINVAL 22, ENOENT 2, ENXIO 6, ...
    pub errno: i32,
    /// The kernel's text, or empty where the kernel has none.
    pub text: String,
    /// The precise reason, or empty.
    pub reason: String,
    /// Which line of the table, from 0, where one is to blame.
    pub line: Option<usize>,
    /// Which argument word of that line, from 0 (the first word behind the type), where one is to
    /// blame. Equal to the number of words when the fault is that one is missing.
    pub word: Option<usize>,
}

impl TargetError {
    /// EINVAL with the kernel's text.
    pub fn new(text: impl Into<String>) -> TargetError {
        TargetError { errno: EINVAL, text: text.into(), reason: String::new(), line: None, word: None }
    }

    /// An errno alone.
    #[must_use]
    pub fn errno(errno: i32) -> TargetError {
        TargetError { errno, ..TargetError::new("") }
    }

    /// With another errno.
    #[must_use]
    pub fn with_errno(mut self, errno: i32) -> TargetError {
        self.errno = errno;
        self
    }

    /// With the precise reason behind a general text.
    #[must_use]
    pub fn because(mut self, reason: impl Into<String>) -> TargetError {
        self.reason = reason.into();
        self
    }

    /// Blames argument word `word` (from 0).
    #[must_use]
    pub fn at(mut self, word: usize) -> TargetError {
        self.word = Some(word);
        self
    }
}

/// Its text is the reason.
impl From<OpenError> for TargetError {
    fn from(OpenError { errno, text }: OpenError) -> TargetError {
        TargetError::errno(errno).because(text)
    }
}

impl fmt::Display for TargetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let errno = errno::text(self.errno);
        match (self.text.is_empty(), self.reason.is_empty()) {
            (true, true) => f.write_str(&errno),
            (true, false) => write!(f, "{}: {errno}", self.reason),
            (false, true) => write!(f, "{}: {errno}", self.text),
            (false, false) => write!(f, "{} ({}): {errno}", self.text, self.reason),
        }
    }
}

impl std::error::Error for TargetError {}
