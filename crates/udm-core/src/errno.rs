//! The table of Linux errnos: name, status of a request, NBD error.
//!
//! An errno that is not in the table becomes an I/O error, both for the user of a device and for an
//! NBD client: the device failed, and the request was well-formed.

use crate::Status;

macro_rules! errnos {
    ($($(#[$doc:meta])* $name:ident = $errno:literal, $status:ident, $nbd:ident;)*) => {
        $($(#[$doc])* pub const $name: i32 = $errno;)*

        /// The status of a request that failed with `errno` (positive).
        #[must_use]
        pub const fn status(errno: i32) -> Status {
            match errno { $($name => Status::$status,)* _ => Status::IoErr }
        }

        /// The NBD error for `errno` (positive); 0 for 0. NBD uses the Linux numbers of eight
        /// errors (NBD protocol, "Error values").
        #[must_use]
        pub const fn to_nbd(errno: i32) -> u32 {
            (match errno { 0 => 0, $($name => $nbd,)* _ => EIO }) as u32
        }

        #[cfg(test)]
        const ALL: &[i32] = &[$($name),*];
    };
}

// Name, number, request status, NBD error.
errnos! {
    /// Not permitted.
    EPERM = 1, ReadOnly, EPERM;
    /// No such name.
    ENOENT = 2, Offline, EIO;
    /// Cancelled, or interrupted by a signal.
    EINTR = 4, IoErr, EIO;
    /// The device failed.
    EIO = 5, IoErr, EIO;
    /// No such device.
    ENXIO = 6, Offline, EIO;
    /// Too long.
    E2BIG = 7, IoErr, EIO;
    /// The operation would have to wait.
    EAGAIN = 11, Again, EIO;
    /// No memory.
    ENOMEM = 12, Resource, ENOMEM;
    /// Permission denied.
    EACCES = 13, ReadOnly, EPERM;
    /// In use.
    EBUSY = 16, DevResource, EIO;
    /// Already exists.
    EEXIST = 17, IoErr, EIO;
    /// The device is gone.
    ENODEV = 19, Offline, EIO;
    /// Invalid argument.
    EINVAL = 22, Inval, EINVAL;
    /// Too many files are open in the system.
    ENFILE = 23, IoErr, EIO;
    /// Too many files are open in the process.
    EMFILE = 24, IoErr, EIO;
    /// The file would be too large.
    EFBIG = 27, Inval, ENOSPC;
    /// No space left.
    ENOSPC = 28, NoSpace, ENOSPC;
    /// The file system is read-only.
    EROFS = 30, ReadOnly, EPERM;
    /// Too many links.
    EMLINK = 31, IoErr, EIO;
    /// The other end has closed the connection.
    EPIPE = 32, Transport, EIO;
    /// Too many levels.
    ELOOP = 40, IoErr, EIO;
    /// A reservation conflicts.
    EBADE = 52, ResvConflict, EIO;
    /// The block cannot be read or written on any path.
    ENODATA = 61, Medium, EIO;
    /// The transport is broken.
    ENOLINK = 67, Transport, EIO;
    /// The other end does not speak the protocol.
    EPROTO = 71, Transport, EIO;
    /// The number is out of range.
    EOVERFLOW = 75, IoErr, EOVERFLOW;
    /// An integrity check failed.
    EILSEQ = 84, Protection, EIO;
    /// Not supported.
    EOPNOTSUPP = 95, NotSupp, EOPNOTSUPP;
    /// The network is down.
    ENETDOWN = 100, Transport, EIO;
    /// The network is unreachable.
    ENETUNREACH = 101, Transport, EIO;
    /// The other end has reset the connection.
    ECONNRESET = 104, Transport, EIO;
    /// No buffers.
    ENOBUFS = 105, IoErr, EIO;
    /// There is no connection.
    ENOTCONN = 107, Transport, EIO;
    /// The other end is shutting down.
    ESHUTDOWN = 108, Offline, ESHUTDOWN;
    /// The operation timed out.
    ETIMEDOUT = 110, Timeout, EIO;
    /// The connection was refused.
    ECONNREFUSED = 111, Transport, EIO;
    /// The host is down.
    EHOSTDOWN = 112, Transport, EIO;
    /// The host is unreachable.
    EHOSTUNREACH = 113, Transport, EIO;
    /// The target refused permanently.
    EREMOTEIO = 121, Target, EIO;
    /// The quota is used up.
    EDQUOT = 122, NoSpace, ENOSPC;
    /// Cancelled.
    ECANCELED = 125, IoErr, EIO;
}

/// True for errors of a socket operation that do not affect the connection: the operation is
/// retried (send(2), recv(2)).
#[must_use]
pub const fn is_transient_socket_errno(errno: i32) -> bool {
    matches!(errno, EINTR | EAGAIN | ENOMEM | ENOBUFS)
}

/// True for transient errors that an immediate retry does not cure: the system is short of memory.
#[must_use]
pub const fn is_memory_shortage(errno: i32) -> bool {
    matches!(errno, ENOMEM | ENOBUFS)
}

/// True for errors of a connect that a server may cause by being down: nothing listens, its socket
/// is gone, or nothing answers.
#[must_use]
pub const fn is_server_down(errno: i32) -> bool {
    matches!(
        errno,
        ENOENT
            | EPIPE
            | ENETDOWN
            | ENETUNREACH
            | ECONNRESET
            | ETIMEDOUT
            | ECONNREFUSED
            | EHOSTDOWN
            | EHOSTUNREACH
    )
}

/// The errno for an NBD error; 0 for 0. Unknown errors become EINVAL, as the protocol demands of
/// clients.
#[must_use]
pub const fn errno_from_nbd_error(error: u32) -> i32 {
    let errno = error as i32;
    match errno {
        0 | EPERM | EIO | ENOMEM | EINVAL | ENOSPC | EOVERFLOW | EOPNOTSUPP | ESHUTDOWN => errno,
        _ => EINVAL,
    }
}

/// The system's text for `errno`, such as `No such device`.
#[must_use]
pub fn describe_errno(errno: i32) -> String {
    let mut text = std::io::Error::from_raw_os_error(errno).to_string();
    // Rust appends the number.
    if let Some(at) = text.find(" (os error ") {
        text.truncate(at);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table agrees with the errno of each status.
    #[test]
    fn every_status_comes_back() {
        for &s in Status::ALL.iter().skip(1) {
            // The errno of `Requeue` is that of a broken transport.
            let expected = if s == Status::Requeue { Status::Transport } else { s };
            assert_eq!(status(s.errno()), expected);
            assert!(ALL.contains(&s.errno()), "{s}");
        }
        assert_eq!(status(9999), Status::IoErr);
    }

    #[test]
    fn every_nbd_error_comes_back() {
        for error in [0, 1, 5, 12, 22, 28, 75, 95, 108] {
            assert_eq!(to_nbd(errno_from_nbd_error(error)), error);
        }
        assert!(
            ALL.iter().all(|&errno| to_nbd(errno_from_nbd_error(to_nbd(errno))) == to_nbd(errno)),
            "nothing else is sent"
        );
        assert_eq!(to_nbd(ETIMEDOUT), 5, "a timeout of the device");
        assert_eq!(to_nbd(9999), 5);
        assert_eq!(errno_from_nbd_error(4711), EINVAL);
    }

    /// Target errors (kernel `blk_path_error`) are returned as they are and fail no path.
    #[test]
    fn target_errors_blame_no_path() {
        for errno in [EOPNOTSUPP, ENOSPC, EREMOTEIO, EBADE, ENODATA, EILSEQ, EINVAL] {
            assert!(!status(errno).is_path_error(), "{errno}");
        }
        for errno in [EIO, ETIMEDOUT, ENOLINK, ENOMEM, EBUSY, EAGAIN, ENODEV] {
            assert!(status(errno).is_path_error(), "{errno}");
        }
    }

    #[test]
    fn texts_are_the_systems() {
        assert_eq!(describe_errno(ENODEV), "No such device");
    }
}
