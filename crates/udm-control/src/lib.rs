//! The control half of a udm process: the registry of devices, dmsetup's verbs, and the control
//! socket.
//!
//! * [`registry`]: all devices by URI, name and number.
//! * [`verbs`]: create, load, suspend, resume and others, with the kernel's semantics and errors.
//! * [`TableLoadControlIo`]: reads and writes of targets when a table is loaded, executed by cores.
//! * [`api`]: requests and replies as plain structs, and the list of verbs.
//! * [`http`]: the verbs over HTTP and JSON on a Unix socket; [`client`]: the client side.
//! * [`wait_hook`]: a hook for a thread whose verb waits.
//! * `stats`: counters; `metrics`: the same for Prometheus.
//! * [`state_folder`]: facts that survive a server.
//! * [`config`]: devices declared in a file.
//! * [`exports`]: the devices that NBD clients find.
//!
//! **Threads.** One thread serves the control socket. Cores never wait for it; they get messages.
//! Calls that may wait for storage (opening, closing, resolving a path) run on other threads, a
//! bounded number per kind. They hold no lock but that of the name that is opened.
//!
//! **I/O of a load** ([`TableLoadControlIo`]). A target's constructor reads and writes a store
//! before any lane of the new table is open. Each run of bios is a background task on a core, with
//! a lane of its own and at most 1 MiB in flight. The loading thread waits for its answer, for at
//! most 30 s, and until its client disconnects or the server ends. Requests in flight then stay
//! with the task, and no more are sent. No other run on that disk begins before they complete,
//! because a late write must not undo a newer one. A disk has at most four runs, so a disk that
//! hangs blocks few loads.
//!
//! **Cancelling.** A suspend or resume waits for requests in flight, which may take for ever. So
//! may a create or removal with partners, and a load that reads a store. A verb is cancelled if its
//! client disconnects, its `--timeout` passes, a `resume` comes, or the server ends. After that the
//! device is active with its live table, or was not created, or not removed, or nothing is loaded.
//! Tables that are no longer used are closed on a thread of their own.
#![forbid(unsafe_code)]

pub mod api;
pub mod client;
pub mod config;
pub mod error;
pub mod exports;
pub mod http;
mod io;
mod metrics;
pub mod nvme_target;
pub mod registry;
pub mod state_folder;
mod stats;
pub mod throttle_settings;
pub mod ublk_disks;
pub mod verbs;
pub mod vhost_user_sockets;
pub mod wait_hook;

pub use io::TableLoadControlIo;
pub use registry::DeviceRegistry;
pub use state_folder::StateFolder;
