//! Cores: a core is one thread with one io_uring, one inbox and its lanes.
//!
//! * [`ProcessCores`]: the inboxes of all cores of a process. The control half sends messages
//!   through it.
//! * [`Runtime`]: threads that are cores and serve [`FrontEnd`]s.
//! * [`LocalCore`]: a thread that is a core. In *library mode* it is the caller's own thread, which
//!   calls `submit`, `poll` and `park` itself.
//! * [`LocalControlIo`], [`TemporaryCoreIo`]: control I/O in library mode, on the core of the
//!   loading thread, or on a core for this run only.
//! * [`SteppedCore`]: the same core in the simulator, stepped by hand over a [`SimulatedKernel`].
//! * [`Ring`]: the core's io_uring, the only place where the data path makes a system call.
//!
//! **A turn** of a core: messages; `gather` of front ends with new input; `submit` and `poll` of
//! lanes with work; `complete` of front ends with completed bios; then the ring. One
//! `io_uring_enter` submits the operations of the turn and waits for the next event. An idle lane
//! or front end is not called, and an idle program is not scheduled at all.
//!
//! **Sleep.** A core that has nothing to do sleeps. From time to time it measures if its rounds
//! become shorter when it spins first, at most for `spin_max`. It spins only while that saves a
//! fifth (`spin`). The inbox is a lock-free queue; a message writes to the eventfd only if the core
//! sleeps (`sleep_state`, with loom tests).
//!
//! **Where bios and connections live.** A bio belongs to one core for its whole life, a connection
//! to one core at a time. A core that has ended drops the messages that still arrive for it.
//!
//! **Threads that attach and detach.** [`ProcessCores::with_task_core`] creates cores that threads
//! attach to and detach from. One more core always runs and executes the tasks. A detached core
//! delays nothing. A late sender may still discard messages of the detached core, so a thread that
//! attaches waits for that sender first.
//!
//! **Messages to front ends.** [`ProcessCores::send_message`] reaches the front ends of a core that
//! subscribe to a device or another topic ([`FrontCx::subscribe`]), in the order of sending.
//!
//! **The clock** is the kernel's monotonic one: the same on all cores, and correct after each
//! sleep. The processor's counter would be a little cheaper. But udm would have to measure and
//! watch it, and replace it on machines on which it is wrong.
//!
//! **The end** has two steps. [`Runtime::end`] makes front ends refuse new requests and makes lanes
//! fail the bios that they hold back (`Drain::End`). The cores still run, so devices can be
//! removed. [`Runtime::stop_within`] then ends the threads. A core that reaches the time limit
//! leaves its requests and their memory where they are.
//!
//! **Panics.** A core thread that panics aborts the program: its requests would never complete, and
//! no answer is better than a wrong one.
//!
//! The `unsafe` of this crate is in `ring/sys.rs`, `ring/ublk_control.rs` and
//! `ring/ublk_device.rs`.

mod blocking_drop;
mod core_lanes;
mod core_set;
mod eventfd_read;
mod front_end;
mod in_flight_report;
mod inbox;
mod local;
mod local_io;
mod reactor;
mod ring;
mod runtime;
mod sleep_state;
mod spin;
mod stepped;
mod subscriptions;
mod task_front_end;

pub use blocking_drop::drop_blocking;
pub use core_set::{FrontEndMessage, ProcessCores};
pub use front_end::{FrontCx, FrontEnd, FrontKey};
pub use in_flight_report::CoreWorkInFlightReport;
pub use local::{CoreClockFunctions, CoreOptions, LocalCore, pin_thread_to_cpus};
pub use local_io::{LocalControlIo, TemporaryCoreIo};
pub use ring::{
    Ring, RingCompletion, RingOp, RingUser, SimulatedCqe, SimulatedKernel, UblkControl, UblkDevice,
    UblkDeviceQueue,
};
pub use runtime::{Runtime, RuntimeOptions, StoppedRuntimeThreads};
pub use stepped::{CoreStateAfterStep, SteppedCore};
pub use udm_core::BioTaskLaneId;
