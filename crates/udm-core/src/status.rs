//! How a request ended: one byte, with an errno for each.

use std::fmt;

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $errno:literal, $text:literal, $path:literal;)*) => {
        /// How a request ended. The kernel's block status codes (`BLK_STS_*`), with the errno that a user sees.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
        #[repr(u8)]
        pub enum Status { #[default] $($(#[$doc])* $name,)* }

        impl Status {
            /// Every status, in order of its code.
            pub const ALL: &'static [Status] = &[$(Status::$name),*];

            /// The errno that the user of the device sees; 0 for [`Status::Ok`].
            #[must_use]
            pub const fn errno(self) -> i32 {
                match self { $(Status::$name => $errno,)* }
            }

            /// The kernel's name for it, lower case.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self { $(Status::$name => $text,)* }
            }

            /// True when the error blames the path and not the request, so that another path may do better
            /// (multipath, kernel `blk_path_error`). False for [`Status::Ok`].
            #[must_use]
            pub const fn is_path_error(self) -> bool {
                match self { $(Status::$name => $path,)* }
            }
        }
    };
}

statuses! {
    /// Done.
    Ok = 0, "ok", false;
    /// The operation is not supported (EOPNOTSUPP).
    NotSupp = 95, "operation not supported", false;
    /// The request took too long (ETIMEDOUT).
    Timeout = 110, "timeout", true;
    /// No space left, as a full file system under a file (ENOSPC).
    NoSpace = 28, "no space", false;
    /// The transport is broken (ENOLINK).
    Transport = 67, "recoverable transport", true;
    /// The target refused, for good (EREMOTEIO).
    Target = 121, "critical target", false;
    /// A reservation is in the way (EBADE).
    ResvConflict = 52, "reservation conflict", false;
    /// The block can't be read or written, on any path (ENODATA).
    Medium = 61, "critical medium", false;
    /// An integrity check failed (EILSEQ).
    Protection = 84, "protection", false;
    /// No memory (ENOMEM).
    Resource = 12, "kernel resource", true;
    /// The device is out of resources (EBUSY).
    DevResource = 16, "device resource", true;
    /// It would have to wait, and was told not to (EAGAIN).
    Again = 11, "nonblocking retry", true;
    /// The device is gone (ENODEV).
    Offline = 19, "device offline", true;
    /// Any other error (EIO).
    IoErr = 5, "I/O", true;
    /// The request makes no sense (EINVAL). A bad argument fails no path (spec/decisions).
    Inval = 22, "invalid", false;
    /// Writing to a read-only device (EPERM).
    ReadOnly = 1, "read-only", false;
}

impl Status {
    /// The status for an errno (positive). Unknown ones are [`Status::IoErr`].
    #[must_use]
    pub fn from_errno(errno: i32) -> Status {
        match errno {
            2 | 6 | 108 => Status::Offline,      // ENOENT, ENXIO, ESHUTDOWN
            32 | 104 | 107 => Status::Transport, // EPIPE, ECONNRESET, ENOTCONN
            27 => Status::Inval,                 // EFBIG
            122 => Status::NoSpace,              // EDQUOT
            30 | 13 => Status::ReadOnly,         // EROFS, EACCES
            e => Status::ALL.iter().copied().find(|s| s.errno() == e).unwrap_or(Status::IoErr),
        }
    }

    /// True for [`Status::Ok`].
    #[must_use]
    pub const fn is_ok(self) -> bool {
        matches!(self, Status::Ok)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errno_round_trip() {
        for &s in Status::ALL.iter().skip(1) {
            assert_eq!(Status::from_errno(s.errno()), s);
        }
        assert_eq!(Status::from_errno(9999), Status::IoErr);
    }

    /// spec/multipath.md C.4: these are returned as they are and fail no path.
    #[test]
    fn target_errors_blame_no_path() {
        for errno in [95, 28, 121, 52, 61, 84, 22, 0] {
            let s = if errno == 0 { Status::Ok } else { Status::from_errno(errno) };
            assert!(!s.is_path_error(), "{s}");
        }
        for errno in [5, 110, 67, 12, 16, 11, 19] {
            assert!(Status::from_errno(errno).is_path_error());
        }
    }
}
