//! The vhost-user protocol, the side of a back end: messages on a Unix socket, without I/O.
//!
//! Source: QEMU's `docs/interop/vhost-user.rst`. Integers have the byte order of the machine, since
//! both sides run on it. A message has a header of 12 bytes and a payload; descriptors of files
//! come with the first byte. This module says how many descriptors a message may carry, and never
//! sees them.
//!
//! A back end reads a [`VhostUserMessageHeader`] of [`HEADER_SIZE`] bytes and then its payload, and
//! decodes both with [`VhostUserRequest::decode`]. It answers with [`encode_reply`].

mod inflight;
mod inflight_packed;
mod message;
mod request;
mod setup;

pub use inflight::{
    INFLIGHT_VERSION, InflightEntry, InflightLayout, InflightRecovery, recover_inflight_requests,
};
pub use inflight_packed::{
    PackedInflightEntry, PackedInflightHeader, PackedInflightLayout, PackedInflightRecovery,
    recover_packed_inflight_requests,
};
pub use message::{
    CONFIG_PAYLOAD_MAX, HEADER_SIZE, PAYLOAD_MAX, VhostUserError, VhostUserMessageHeader, encode_message,
    encode_reply,
};
pub use request::{
    ConfigSpaceRange, GuestMemoryRegion, GuestMemoryTable, InflightArea, VhostUserRequest, VringAddresses,
    VringFd, VringState,
};
pub use setup::encode_setup_request;

use bitflags::bitflags;

bitflags! {
    /// Protocol features.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct VhostUserProtocolFeatures: u64 {
        /// More than one queue.
        const MQ = 1 << 0;
        /// The front end may ask for a reply to any message.
        const REPLY_ACK = 1 << 3;
        /// The back end has a channel for requests of its own.
        const BACKEND_REQ = 1 << 5;
        /// The configuration space is the back end's.
        const CONFIG = 1 << 9;
        /// Requests in flight are recorded in memory that survives the back end.
        const INFLIGHT_SHMFD = 1 << 12;
        /// RESET_DEVICE.
        const RESET_DEVICE = 1 << 13;
        /// Regions of memory can be added and removed.
        const CONFIGURE_MEM_SLOTS = 1 << 15;
        /// SET_STATUS and GET_STATUS.
        const STATUS = 1 << 16;
    }
}

/// The largest number of memory regions that a table or a device may have.
pub const REGIONS_MAX: usize = 32;
/// The largest number of regions in one SET_MEM_TABLE.
pub const TABLE_REGIONS_MAX: usize = 8;
/// Request of the back end: the configuration space has changed.
pub const BACKEND_CONFIG_CHANGE: u32 = 2;
