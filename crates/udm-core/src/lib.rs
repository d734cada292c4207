//! The heart of udm: bio, batch, lane, device.
//!
//! A [`Bio`] is one block request. Bios move in [`Batch`]es down a stack of [`Lane`]s, one call a
//! layer, and come back as what [`Lane::poll`] returns. A lane belongs to one core and is reached
//! by `&mut` only; what cores share is the control half, a [`Device`].
//!
//! This crate does no I/O, starts no thread, reads no clock and contains no `unsafe`.
#![forbid(unsafe_code)]

mod bell;
mod bio;
pub mod bugs;
mod command;
mod commons;
pub mod control_io;
mod cx;
mod deadline;
mod device;
pub mod errno;
mod extents;
pub mod interleave;
mod lane;
pub mod latency;
mod limits;
mod pool;
mod ports;
mod queue;
mod status;
mod task;
mod units;
mod work;

pub use bell::{Bell, Epoch, Listener};
pub use bio::{Batch, Bio, BioFlags, Op, OwnerId, hand_over};
pub use command::{Ack, Cores, Failure, LaneCommand};
pub use commons::{Alone, Claim, ClaimKey, Commons, Taken};
pub use control_io::{ControlIo, Errand};
pub use cx::{CoreState, Cx};
pub use deadline::{Deadline, Overdue, Patience};
pub use device::{
    Checkpoint, Device, DeviceId, DiskLock, DiskTaken, Grown, Growth, OpenError, PowerSwitch, Stacked,
};
pub use extents::{Content, Extent, Extents, Since};
pub use lane::{Busy, Drain, Lane};
pub use limits::Limits;
pub use pool::BioPool;
pub use ports::{Port, Ports, Visit};
pub use queue::{CancelChange, Changed, DiskQueue, HwQueueReport, QueueReport, SharedTags};
pub use status::Status;
pub use task::{DeviceSlot, MakeTask, Task, TaskCx, TaskHandle};
pub use udm_buf::{
    Buf, BufPool, Foreign, Segments, SharedMap, copy_from_shared, copy_to_shared, gather, part,
};
pub use units::{CoreId, DevNo, Nanos, SECTOR_SIZE, Sector, Sectors};
pub use work::{PIECE, Part, Serve, WORK_MAX, Work, WorkLane};
