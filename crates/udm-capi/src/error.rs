//! Error of a call: an errno, and a text that is kept per thread.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use udm_control::error::VerbError;

/// A positive errno and a text.
#[derive(Debug)]
pub(crate) struct ErrnoWithText {
    pub errno: i32,
    pub text: String,
}

impl ErrnoWithText {
    pub(crate) fn new(errno: i32, text: impl Into<String>) -> ErrnoWithText {
        ErrnoWithText { errno, text: text.into() }
    }

    /// The error of a verb with `table`: includes the faulty line with carets below the fault.
    pub(crate) fn with_table(error: &VerbError, table: &str) -> ErrnoWithText {
        ErrnoWithText::new(error.error.errno.abs(), error.with_table(table))
    }
}

impl From<VerbError> for ErrnoWithText {
    fn from(error: VerbError) -> ErrnoWithText {
        ErrnoWithText::new(error.error.errno.abs(), error.to_string())
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Text of this thread's last error; valid until its next failing call.
pub(crate) fn last_error() -> *const c_char {
    LAST.try_with(|text| text.borrow().as_ptr()).unwrap_or(c"the thread is ending".as_ptr())
}

/// Runs `work` and returns its value, or a negative errno. A panic becomes EIO.
pub(crate) fn catch_errors(work: impl FnOnce() -> Result<i32, ErrnoWithText>) -> i32 {
    let done = catch_unwind(AssertUnwindSafe(work));
    let error = match done {
        Ok(Ok(value)) => return value,
        Ok(Err(error)) => error,
        Err(panic) => ErrnoWithText::new(libc::EIO, format!("a bug in udm: {}", panic_text(&*panic))),
    };
    set_last_error(&error);
    -error.errno
}

/// Sets the text for [`last_error`]; also used by a call that succeeds partly.
pub(crate) fn set_last_error(error: &ErrnoWithText) {
    let text: Vec<u8> = error.text.bytes().filter(|&byte| byte != 0).collect();
    // A thread that is ending may have dropped the variable already.
    let _ = LAST.try_with(|text_of_last| *text_of_last.borrow_mut() = CString::new(text).unwrap_or_default());
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_errno() {
        assert_eq!(catch_errors(|| panic!("what\0ever")), -libc::EIO);
        assert_eq!(LAST.with_borrow(|text| text.to_str().unwrap().to_owned()), "a bug in udm: whatever");
        assert_eq!(catch_errors(|| Ok(7)), 7);
    }
}
