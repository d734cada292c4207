//! The interface of the kernel's ublk driver (`include/uapi/linux/ublk_cmd.h`), without I/O.
//!
//! A ublk server answers the requests of a block device `/dev/ublkbN`. It creates the device with
//! control commands to `/dev/ublk-control` ([`UblkControlCommand`]), and takes and answers requests
//! with I/O commands to `/dev/ublkcN` ([`UblkIoCommand`]). Both are io_uring commands: 32 and 16
//! bytes. Integers have the byte order of the machine.
//!
//! Addresses of memory are not set here: the owner of the memory puts them into the encoded
//! command. Layouts are those of Linux 6.5 to 7.1; `tests` compares them with the C structures.

mod control;
mod io;
mod params;

pub use control::{
    CONTROL_SIZE, DEVICE_INFO_SIZE, UblkControlCommand, UblkControlHeader, UblkDeviceInfo, UblkDeviceState,
    UblkOwner,
};
pub use io::{
    DESCRIPTOR_WORDS, IO_SIZE, RESULT_ABORT, UblkIoCommand, UblkIoDescriptor, UblkIoFlags, UblkIoOp,
};
pub use params::{PARAMS_SIZE, UblkParams};

use bitflags::bitflags;

/// The highest number of a device.
pub const NUMBER_MAX: u32 = (1 << 20) - 1;
/// The largest number of queues.
pub const QUEUES_MAX: u16 = 4096;
/// The largest number of requests per queue.
pub const DEPTH_MAX: u16 = 4096;
/// The largest logical block in bytes: a page of memory.
pub const BLOCK_MAX: u32 = 4096;

bitflags! {
    /// Features of the driver, and flags of a device (`UBLK_F_*`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct UblkFeatures: u64 {
        /// The device outlives its server, and another server can take it over.
        const USER_RECOVERY = 1 << 3;
        /// Requests that a server left unanswered are given to the next one.
        const USER_RECOVERY_REISSUE = 1 << 4;
        /// The device belongs to a user without privileges.
        const UNPRIVILEGED_DEV = 1 << 5;
        /// Commands have the numbers of ioctls.
        const CMD_IOCTL_ENCODE = 1 << 6;
        /// The size can change while the device is in use (Linux 6.16).
        const UPDATE_SIZE = 1 << 10;
        /// A stop can fail if the device is open (Linux 7.0).
        const SAFE_STOP_DEV = 1 << 17;
    }
}

/// Direction bits of an ioctl: the kernel writes to the caller.
const READ: u32 = 2;
/// Direction bits of an ioctl: both directions.
const READ_WRITE: u32 = 3;

/// The number of an ioctl of type `u` with an argument of `size` bytes.
const fn ioctl_number(direction: u32, number: u32, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | (b'u' as u32) << 8 | number
}

/// Reads the integer at byte `at`. The caller has checked the length.
macro_rules! read_int {
    ($int:ty, $bytes:expr, $at:expr) => {{
        let mut raw = [0; size_of::<$int>()];
        raw.copy_from_slice(&$bytes[$at..$at + size_of::<$int>()]);
        <$int>::from_ne_bytes(raw)
    }};
}
use read_int;

/// Writes integers at their byte offsets.
macro_rules! write_ints {
    ($bytes:expr, $($at:expr => $value:expr),+ $(,)?) => {
        $({
            let raw = $value.to_ne_bytes();
            $bytes[$at..$at + raw.len()].copy_from_slice(&raw);
        })+
    };
}
use write_ints;
