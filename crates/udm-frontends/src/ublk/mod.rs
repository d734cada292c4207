//! Disks of this machine: the server side of the kernel's ublk driver.
//!
//! [`UblkServer`] makes a block device `/dev/ublkbN` from an export. The kernel gives each request
//! to the server by an io_uring command and copies the data. Source: the kernel's
//! `Documentation/block/ublk.rst` and `include/uapi/linux/ublk_cmd.h`; Linux 6.5 or later.
//!
//! Supported: several queues, read, write, flush, FUA, discard, write zeroes, limits and geometry,
//! read-only disks, a new size while the disk is in use (Linux 6.16), take-over by the next server,
//! and disks of users without privileges. Not supported: zero copy, zones, partial completion.
//!
//! The parts, in the order of a disk's life:
//!
//! * `server`: the thread of a disk. All that may block is on it, nothing of it on the cores.
//! * `driver`: control commands, each with a time limit and an error that says what to do.
//! * `existing`: devices of an earlier server, to take over or to remove.
//! * `session`: creates, starts and resizes the device. `removal`: ends it.
//! * `queue`, `tag`: a queue of the device, a front end on one core. Queue `i` is on core `i`
//!   modulo the cores, and only that core fetches its requests. A tag has one buffer.
//! * `openers`: whether somebody uses the block device.
//! * `io_flusher`: what the kernel must know of the threads that serve a disk.
//! * `device_link`: the link `/dev/udm/NAME`.
//!
//! **Lives.** A device outlives its server: requests wait for the next server, and the kernel gives
//! it those that were not answered. A mark in the device says which servers (by their state folder)
//! and which name it belongs to; the mark stays when the export is renamed. At its orderly end, a
//! server removes a device that nobody uses, and leaves another one for the next server. The kernel
//! removes the device of a user without privileges when its server ends.
//!
//! **Waiting for itself.** The server never reads, writes or flushes its own block device. If a
//! thread of it waited there, the process could not end, and no other server could serve the disk.
//!
//! **Bounds.** One queue per core, 128 tags per queue, 512 KiB per tag: 64 MiB per queue, of which
//! only the used part takes memory. A device that is taken over keeps its own numbers.

mod device_link;
mod driver;
mod existing;
mod geometry;
mod io_flusher;
mod openers;
mod queue;
mod removal;
mod server;
mod session;
mod tag;

pub use existing::{find_names_in_use, remove_unwanted_devices};
pub use io_flusher::set_io_flusher;
pub use removal::UblkRemovalError;
pub use server::{UblkDiskOptions, UblkServer};
