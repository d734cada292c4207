//! The vocabulary of the data path: bio, batch, lane, device, task, message.
//!
//! A [`Bio`] is one block request. It is move-only, so it is in exactly one place. In debug builds
//! a bio that is dropped in flight panics. Bios move in [`Batch`]es down a stack of [`Lane`]s, one
//! call per layer, and come back through [`Lane::poll`]. A lane belongs to one core and is reached
//! by `&mut` only. The part that cores share is the control half, a [`Device`].
//!
//! This crate does no I/O, starts no thread, reads no clock and contains no `unsafe`.
//!
//! Rules that all layers rely on:
//!
//! * **A layer undoes on the way up its change on the way down.** `linear` adds its offset in
//!   `submit` and subtracts it in `poll`. A bio needs no stack of frames, and a failed bio can be
//!   sent to another path as it is.
//! * **Full is not failed.** A lane without room queues the bio. Pools are bounded: a connection
//!   that gets no bio stops reading from its client.
//! * **An owner knows its bios.** [`BioOwnerId`] names the lane or front end that made a bio. A
//!   splitter tells its fragments from other bios by it.
//! * **A lane may have own work.** [`OwnWork::Required`] work, such as a log record, delays a
//!   suspend, a close and the end of the program. [`OwnWork::Background`] work gets turns and
//!   delays nothing.
//! * **CPU work has a budget.** [`CpuBudgetedQueue`] counts the bytes that lanes copy or clear. A
//!   turn has [`TURN_BUDGET`] bytes for all lanes of the core; the rest continues in the next turn.
//!   Short requests go before pieces of long ones, so no request delays others by many turns.
//! * **Time is read on demand.** [`Cx::now`] reads the clock once per turn, and only if a lane
//!   asks: on some machines a reading costs more than a whole layer. [`Cx::wake_now`] needs no
//!   reading.
//! * **Timers are a minimum.** A lane that waits passes its time to [`Cx::wake_at`] in each poll,
//!   and the core sleeps until the earliest. Lanes keep their own queues, mostly in order, so a
//!   timer wheel would only be a second copy.
//!
//! How a core is woken:
//!
//! ```text
//!   a lane waits for other cores      a task (path check, merge)      the control half
//!             │ WaitQueue                       │ Task                      │ LaneCommand
//!             ▼                                 ▼                           ▼
//!   Cores         wake one core                 start                       broadcast to all cores
//!             │ message in the inbox of a core; the core is woken if it sleeps
//!             ▼
//!   LaneInboxes   mark the wake targets (lane stacks, front ends) that opened a lane inbox for it
//! ```
//!
//! * [`WaitQueue`] is an eventcount. A lane reads the epoch, checks its condition, queues its bios
//!   and registers; the lane that changes the condition advances the epoch and wakes registered
//!   cores. No timer polls the condition, and no bio changes its core.
//! * [`LaneInbox`] is the inbox of a lane. It remembers the [`PolledUnitId`] for which it was
//!   opened, so a message wakes only the stacks that it concerns. This stays cheap on a core with
//!   thousands of lanes.
//! * [`BioTask`] works on one core without a client. Dropping its [`BioTaskHandle`] stops it. A
//!   background task has lanes of its own, so a request of it that hangs delays nobody else.
//! * [`AckOnLastDrop`] is a token in a message. Dropping the last clone runs its callback.
//!
//! [`errno`] is the one table of errors: name, status of a request, NBD error. [`SharedDiskState`]
//! holds the state that all names of one disk share. [`ReplyDeadline`] and
//! [`PauseAwareReplyDeadline`] decide when a silent path or server is given up. [`interleave`]
//! marks the points at which the simulator may run another core.
#![forbid(unsafe_code)]

mod bio;
mod command;
pub mod control_io;
mod cpu_budget;
mod cx;
mod deadline;
mod device;
mod disk_state;
pub mod errno;
mod extents;
pub mod interleave;
mod lane;
mod lane_inbox;
pub mod latency;
mod limits;
mod pool;
mod queue;
mod reply_inbox;
mod status;
mod task;
mod units;
mod wait_queue;

pub use bio::{Batch, Bio, BioFlags, BioOwnerId, Op, move_batch};
pub use command::{AckOnLastDrop, CoreCommandSender, FirstLaneError, LaneCommand};
pub use control_io::{ControlIo, ControlIoBatch};
pub use cpu_budget::{BioProgress, CpuBioHandler, CpuBudgetedLane, CpuBudgetedQueue, SLICE_MAX, TURN_BUDGET};
pub use cx::{CoreLaneState, Cx};
pub use deadline::{PauseAwareReplyDeadline, ReplyDeadline, UnansweredRequestState};
pub use device::{
    ChangeTrackingCheckpoint, Device, DeviceControlError, DeviceId, DiskInUseByOtherProgram,
    GrowResultCallback, GrowthPolicy, InterProcessDiskLock, PowerSwitch, StackedDevice,
};
pub use disk_state::{ClaimSharingPolicy, ConflictingDiskUser, DiskClaim, SharedClaimKey, SharedDiskState};
pub use extents::{Extent, ExtentKind, Extents, RangeChangeStatus};
pub use lane::{DrainMode, Lane, OwnWork};
pub use lane_inbox::{LaneInbox, LaneInboxes, PolledUnitId};
pub use limits::Limits;
pub use pool::BioPool;
pub use queue::{
    DiskQueue, DiskSharedTagUsage, HwQueueReport, QueueChangeCallback, QueueChangeCancelFn, QueueReport,
};
pub use reply_inbox::{ReplyInbox, ReplySender};
pub use status::Status;
pub use task::{BioTask, BioTaskCx, BioTaskFactory, BioTaskHandle, BioTaskLaneId};
pub use udm_buf::{
    Buf, BufPool, Segments, SharedMemoryMap, SharedRange, append_all_if_none_flagged, copy_from_shared,
    copy_to_shared, partition_into_two_vecs,
};
pub use units::{CoreId, DevNo, Nanos, SECTOR_SIZE, Sector, Sectors};
pub use wait_queue::{WaitQueue, WaitQueueSubscription, WakeEpoch};
