//! The vhost-user-blk back end: disks of virtual machines.
//!
//! [`VhostUserServer`] listens on a Unix socket for a front end: QEMU, cloud-hypervisor, crosvm,
//! libkrun. It serves one machine at a time. The front end shares the memory of the machine; the
//! rings of the virtio block device are in it. Source: VIRTIO 1.2, and QEMU's
//! `docs/interop/vhost-user.rst`.
//!
//! Supported: several queues, indirect descriptors, event indices, FLUSH, DISCARD, WRITE ZEROES,
//! GET_ID, a write cache that the guest may switch off, limits and topology, a new size while the
//! machine runs, read-only disks, memory that is added and removed, reconnection by either side,
//! packed rings, and the record of requests in flight. Not supported: the log of written pages
//! (live migration), rings without a kick descriptor.
//!
//! The parts, in the order in which a request meets them:
//!
//! * `listener`, `session`, `vring_setup`, `channel`, `queue_wait`: the socket, on a thread of its
//!   own. Memory is mapped and rings are set up here; nothing of it is on the cores. `stepped`: a
//!   session of the simulator.
//! * `queue`: one ring, a front end on one core. Queue `i` is on core `i` modulo the cores.
//! * `ring_start`: the parts of a ring are looked up, and a queue is made for its kind.
//! * `virt_ring`: what a queue needs of a ring. `ring`, `notifications`: split rings.
//!   `packed_ring`, `event_suppression`: packed rings. `chain`: descriptors, read once and checked.
//! * `slot`: the request: its data becomes segments of guest memory, which the backend reads and
//!   writes directly. Nothing is copied but headers and ranges.
//! * `memory`: the regions. A file that is cut while it is in use ends the queue and not the
//!   process (`udm_buf::SharedMemoryMap`).
//! * `handover`: a front end moves to another process.
//! * `inflight_memory`, `inflight_record`, `packed_record`: what a new server needs to continue
//!   after this one was killed.
//!
//! **Lives.** A session that ends completes its requests before another one begins. A server that
//! is killed leaves the record; the next one submits again what was in flight, in its order, and
//! completes what was published. A machine that has no record of requests in flight may lose or
//! repeat requests when the server is killed, as with other back ends.
//!
//! **Bounds.** 64 queues of 1,024 entries, 32 regions, 1,024 buffers per request, 16 ranges per
//! DISCARD. Data is in the guest's memory, so a request takes about 200 bytes of the server's.

mod chain;
mod channel;
mod event_suppression;
mod geometry;
mod handover;
mod inflight_memory;
mod inflight_record;
mod listener;
mod memory;
mod notifications;
mod packed_record;
mod packed_ring;
mod queue;
mod queue_wait;
mod ring;
mod ring_start;
mod session;
mod slot;
mod stepped;
mod virt_ring;
mod vring_setup;

pub mod fuzz;

pub use handover::{DetachedVhostUserFrontEnd, VhostUserSetupMessage};
pub use listener::{VhostUserConnection, VhostUserRefreshHandle, VhostUserServer};
pub use stepped::SteppedVhostUserSession;
