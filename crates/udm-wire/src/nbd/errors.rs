//! Errno values and the few error numbers that NBD allows.

use super::consts::{EINVAL, EIO, ENOMEM, ENOSPC, ENOTSUP, EOVERFLOW, EPERM, ESHUTDOWN};

/// The NBD error for an errno of Linux (positive); 0 for 0. What NBD has no number for is EIO: the device failed, the request was well-formed.
#[must_use]
pub const fn error_from_errno(errno: i32) -> u32 {
    match errno {
        0 => 0,
        1 | 13 | 30 => EPERM, // EPERM, EACCES, EROFS
        12 => ENOMEM,
        22 => EINVAL,
        27 | 28 | 122 => ENOSPC, // EFBIG, ENOSPC, EDQUOT
        75 => EOVERFLOW,
        95 => ENOTSUP,
        108 => ESHUTDOWN,
        _ => EIO,
    }
}

/// The errno of Linux for an NBD error; 0 for 0. Unknown ones are EINVAL, as the protocol asks of clients.
#[must_use]
pub const fn errno_from_error(error: u32) -> i32 {
    match error {
        0 | EPERM | EIO | ENOMEM | EINVAL | ENOSPC | EOVERFLOW | ENOTSUP | ESHUTDOWN => error as i32,
        _ => EINVAL as i32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_nbd_error_comes_back() {
        for error in [0, EPERM, EIO, ENOMEM, EINVAL, ENOSPC, EOVERFLOW, ENOTSUP, ESHUTDOWN] {
            assert_eq!(error_from_errno(errno_from_error(error)), error);
        }
        assert_eq!(error_from_errno(110), EIO, "a timeout of the device");
        assert_eq!(errno_from_error(4711), 22);
    }
}
