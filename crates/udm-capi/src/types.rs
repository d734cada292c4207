//! What the functions of libudm are given and give: constants and structures, as C has them.

#![allow(non_camel_case_types, reason = "the names are C's")]

use std::ffi::c_void;

/// Fill the buffer from the device.
pub const UDM_READ: u32 = 0;
/// Put the buffer on the device.
pub const UDM_WRITE: u32 = 1;
/// Make all writes durable that completed before it was submitted. No range, no buffer.
pub const UDM_FLUSH: u32 = 2;
/// The range is of no more use. No buffer.
pub const UDM_DISCARD: u32 = 3;
/// The range reads as zeroes from now on. No buffer.
pub const UDM_WRITE_ZEROES: u32 = 4;

/// Of a write: complete only when it is durable.
pub const UDM_FUA: u32 = 1;
/// Of a write of zeroes: leave the blocks allocated.
pub const UDM_NOUNMAP: u32 = 2;

/// Of a suspend: hold back what is in flight, and do not wait for it.
pub const UDM_NOFLUSH: u32 = 1;

/// Any core that is free; no CPU in particular.
pub const UDM_ANY: i32 = -1;

/// Wait for as long as it takes.
pub const UDM_FOREVER: i64 = -1;

/// Requests of a core that may be in flight.
pub const UDM_IN_FLIGHT_MAX: u32 = 65536;
/// The longest request in bytes, and the most buffers that it can have.
pub const UDM_LENGTH_MAX: u64 = 1 << 30;
pub const UDM_IOV_MAX: u32 = 1024;
/// The longest name, table or message in bytes.
pub const UDM_TEXT_MAX: u32 = 1 << 20;

/// How a context is to be.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct udm_options {
    /// The size of this structure.
    pub size: u32,
    /// How many threads may be cores at a time, 1 to 1023; 0 for one a CPU.
    pub cores: u32,
}

/// Size and limits of a device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct udm_limits {
    /// Size in sectors of 512 bytes.
    pub sectors: u64,
    /// Every range is aligned to this many bytes.
    pub logical_block: u32,
    /// Smaller writes cost a read.
    pub physical_block: u32,
    /// The longest discard and the longest write of zeroes in sectors; 0 where it can't.
    pub discard_max: u64,
    pub write_zeroes_max: u64,
    /// 1 where writes fail.
    pub read_only: u32,
    /// 1 where a flush means something.
    pub write_cache: u32,
}

/// A request. What it has no use for is 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct udm_request {
    /// UDM_READ, ...
    pub op: u32,
    /// UDM_FUA, UDM_NOUNMAP.
    pub flags: u32,
    /// The first sector, and how many.
    pub sector: u64,
    pub sectors: u64,
    /// The memory to read or write, as long as the range, where iov_count is 0.
    pub buffer: *mut c_void,
    /// Else the list of its parts, as long as the range together. The list may go when it is
    /// submitted, what it leads to must stay.
    pub iov: *const libc::iovec,
    pub iov_count: u32,
    /// 0.
    pub reserved: u32,
    /// What its completion is told apart by.
    pub cookie: u64,
}

/// A request that is over.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct udm_completion {
    /// The request's.
    pub cookie: u64,
    /// 0, or the errno as a negative number.
    pub error: i32,
    /// The lane that it was submitted to.
    pub lane: i32,
}

// What programs are compiled with does not change: what is new comes as another structure.
#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<udm_request>() == 56);
const _: () = assert!(size_of::<udm_options>() == 8);
const _: () = assert!(size_of::<udm_completion>() == 16);
const _: () = assert!(size_of::<udm_limits>() == 40);
