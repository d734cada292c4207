//! Constants and structures of libudm's functions, in C's form.

#![allow(non_camel_case_types, reason = "the names are C's")]

use std::ffi::c_void;

/// Read from the device into the buffer.
pub const UDM_READ: u32 = 0;
/// Write the buffer to the device.
pub const UDM_WRITE: u32 = 1;
/// Make all writes durable that completed before it was submitted. No range, no buffer.
pub const UDM_FLUSH: u32 = 2;
/// The content of the range is no longer needed. No buffer.
pub const UDM_DISCARD: u32 = 3;
/// The range reads as zeroes from now on. No buffer.
pub const UDM_WRITE_ZEROES: u32 = 4;

/// Flag of a write: complete only when it is durable.
pub const UDM_FUA: u32 = 1;
/// Flag of a write of zeroes: leave the blocks allocated.
pub const UDM_NOUNMAP: u32 = 2;

/// Flag of a suspend: hold back requests in flight instead of waiting for them.
pub const UDM_NOFLUSH: u32 = 1;

/// Any free core; no particular CPU.
pub const UDM_ANY: i32 = -1;

/// No time limit.
pub const UDM_FOREVER: i64 = -1;

/// Maximum number of requests in flight per core.
pub const UDM_IN_FLIGHT_MAX: u32 = 65536;
/// Maximum length of a request in bytes, and maximum number of its buffers.
pub const UDM_LENGTH_MAX: u64 = 1 << 30;
pub const UDM_IOV_MAX: u32 = 1024;
/// Maximum length of a name, table or message in bytes.
pub const UDM_TEXT_MAX: u32 = 1 << 20;

/// Options of a context.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct udm_options {
    /// The size of this structure in bytes.
    pub size: u32,
    /// Maximum number of threads that are cores at a time, 1 to 1023; 0 for one per CPU.
    pub cores: u32,
}

/// Size and limits of a device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct udm_limits {
    /// Size in sectors of 512 bytes.
    pub sectors: u64,
    /// Every range must be aligned to this many bytes.
    pub logical_block: u32,
    /// Writes smaller than this many bytes cost a read.
    pub physical_block: u32,
    /// Maximum length of a discard and of a write of zeroes in sectors; 0 if not supported.
    pub discard_max: u64,
    pub write_zeroes_max: u64,
    /// 1 if writes fail.
    pub read_only: u32,
    /// 1 if writes need a flush to be durable.
    pub write_cache: u32,
}

/// A request. Fields that its operation does not use must be 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct udm_request {
    /// UDM_READ, ...
    pub op: u32,
    /// UDM_FUA, UDM_NOUNMAP.
    pub flags: u32,
    /// The first sector, and the number of sectors.
    pub sector: u64,
    pub sectors: u64,
    /// The memory to read or write, of the length of the range. Used if iov_count is 0.
    pub buffer: *mut c_void,
    /// Otherwise a list of buffers, together as long as the range. The list may be freed after the
    /// submit, the buffers only after the completion.
    pub iov: *const libc::iovec,
    pub iov_count: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Returned in the completion.
    pub cookie: u64,
}

/// A completed request.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct udm_completion {
    /// The cookie of the request.
    pub cookie: u64,
    /// 0, or a negative errno.
    pub error: i32,
    /// The lane that it was submitted to.
    pub lane: i32,
}

// The binary interface is fixed: additions use new structures.
#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<udm_request>() == 56);
const _: () = assert!(size_of::<udm_options>() == 8);
const _: () = assert!(size_of::<udm_completion>() == 16);
const _: () = assert!(size_of::<udm_limits>() == 40);
