//! Cores: one thread, one io_uring, one inbox, its lanes.
//!
//! * [`Cluster`]: the inboxes of all cores of a process. What the control half sends commands
//!   through.
//! * [`LocalCore`]: a thread that is a core. In library mode the caller's own; it drives `submit`
//!   and `poll` itself.
//! * [`LocalIo`], [`PrivateIo`]: control-side I/O where the thread that loads a table is a core, or
//!   there is none.
//! * [`Runtime`]: threads that are cores and serve [`FrontEnd`]s: gather, submit, poll, complete,
//!   sleep if idle.
//! * [`SteppedCore`]: the same core in a world that is made up, stepped by hand over a
//!   [`MadeKernel`].
//! * [`Ring`]: the core's io_uring, the one place where the data path makes a system call. It owns
//!   the memory and the file of each operation until that is done, so nothing dangles whatever its
//!   client does.
//!
//! The `unsafe` of this crate is in `ring/sys.rs`.

mod cluster;
mod devices;
mod front_end;
mod inbox;
mod local;
mod local_io;
mod off_core;
mod parking;
mod reactor;
mod ring;
mod runtime;
mod spin;
mod stepped;
mod subscriptions;
mod tasked;

pub use cluster::{Cluster, Letter, UnderWay};
pub use front_end::{FrontCx, FrontEnd, FrontKey};
pub use local::{CoreOptions, LocalCore, Time, pin};
pub use local_io::{LocalIo, PrivateIo};
pub use off_core::drop_off_core;
pub use ring::{Done, Finished, MadeKernel, Ring, RingOp, RingUser};
pub use runtime::{Runtime, RuntimeOptions, Stopping};
pub use stepped::{Rest, SteppedCore};
pub use udm_core::DeviceSlot;
