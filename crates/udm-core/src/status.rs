//! Result of a request: one byte, with an errno each.

use crate::errno::{
    EAGAIN, EBADE, EBUSY, EILSEQ, EINVAL, EIO, ENODATA, ENODEV, ENOLINK, ENOMEM, ENOSPC, EOPNOTSUPP, EPERM,
    EREMOTEIO, ETIMEDOUT,
};
use std::fmt;

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $errno:expr, $text:literal, $path:literal;)*) => {
        /// Result of a request: the kernel's block status codes (`BLK_STS_*`), with the errno that
        /// a user sees.
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

            /// The kernel's name of the status, in lower case.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self { $(Status::$name => $text,)* }
            }

            /// True if the error blames the path and not the request, so another path may succeed
            /// (multipath, kernel `blk_path_error`). False for [`Status::Ok`].
            #[must_use]
            pub const fn is_path_error(self) -> bool {
                match self { $(Status::$name => $path,)* }
            }
        }
    };
}

statuses! {
    /// Success.
    Ok = 0, "ok", false;
    /// The operation is not supported.
    NotSupp = EOPNOTSUPP, "operation not supported", false;
    /// The request took too long.
    Timeout = ETIMEDOUT, "timeout", true;
    /// No space left, such as in a file system that is full.
    NoSpace = ENOSPC, "no space", false;
    /// The transport is broken.
    Transport = ENOLINK, "recoverable transport", true;
    /// The target refused permanently.
    Target = EREMOTEIO, "critical target", false;
    /// A reservation conflicts.
    ResvConflict = EBADE, "reservation conflict", false;
    /// The block cannot be read or written on any path.
    Medium = ENODATA, "critical medium", false;
    /// An integrity check failed.
    Protection = EILSEQ, "protection", false;
    /// The connection was closed long before: the request must be retried, and the state of its
    /// path does not change (kernel `BLK_STS_DM_REQUEUE`).
    Requeue = ENOLINK, "requeue", true;
    /// No memory.
    Resource = ENOMEM, "kernel resource", true;
    /// The device is out of resources.
    DevResource = EBUSY, "device resource", true;
    /// The request would have to wait, but has [`crate::BioFlags::NOWAIT`].
    Again = EAGAIN, "nonblocking retry", true;
    /// The device is gone.
    Offline = ENODEV, "device offline", true;
    /// Any other error.
    IoErr = EIO, "I/O", true;
    /// The request is invalid. An invalid argument fails no path.
    Inval = EINVAL, "invalid", false;
    /// A write to a read-only device.
    ReadOnly = EPERM, "read-only", false;
}

impl Status {
    /// True if the error means that the path does not work: all path errors but
    /// [`Status::Requeue`].
    #[must_use]
    pub const fn fails_path(self) -> bool {
        self.is_path_error() && !matches!(self, Status::Requeue)
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
