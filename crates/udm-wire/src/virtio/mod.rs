//! Virtio: the rings and the block device, as layouts and numbers. No I/O and no memory access.
//!
//! Source: VIRTIO 1.2, sections 2.7 (split virtqueues), 2.8 (packed virtqueues), 5.2 (block device)
//! and 6 (reserved feature bits). All integers are little-endian.

pub mod blk;
pub mod packed;
pub mod ring;

use bitflags::bitflags;

bitflags! {
    /// Feature bits of all devices that udm knows (VIRTIO 1.2, section 6), and those of vhost-user.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct VirtioFeatures: u64 {
        /// The device never accepts more than this many bytes a segment.
        const BLK_SIZE_MAX = 1 << 1;
        /// The configuration has the maximum number of segments of a request.
        const BLK_SEG_MAX = 1 << 2;
        /// The device is read-only.
        const BLK_RO = 1 << 5;
        /// The configuration has the block size.
        const BLK_BLK_SIZE = 1 << 6;
        /// The device supports FLUSH.
        const BLK_FLUSH = 1 << 9;
        /// The configuration has the topology.
        const BLK_TOPOLOGY = 1 << 10;
        /// The driver can switch the cache between write-back and write-through.
        const BLK_CONFIG_WCE = 1 << 11;
        /// The device has more than one queue.
        const BLK_MQ = 1 << 12;
        /// The device supports DISCARD.
        const BLK_DISCARD = 1 << 13;
        /// The device supports WRITE ZEROES.
        const BLK_WRITE_ZEROES = 1 << 14;
        /// vhost-user: the back end logs the pages that it writes (live migration).
        const VHOST_LOG_ALL = 1 << 26;
        /// Descriptors may be in a table of their own.
        const INDIRECT_DESC = 1 << 28;
        /// `used_event` and `avail_event` replace the flags of the rings.
        const EVENT_IDX = 1 << 29;
        /// vhost-user: the protocol features can be read and set.
        const VHOST_PROTOCOL_FEATURES = 1 << 30;
        /// The driver follows VIRTIO 1.
        const VERSION_1 = 1 << 32;
        /// Packed rings.
        const RING_PACKED = 1 << 34;
        /// The device uses buffers in the order in which they were available.
        const IN_ORDER = 1 << 35;
    }
}
