//! The control half of a udm process: the registry of devices, dmsetup's verbs on it, and the
//! control socket that offers them.
//!
//! * [`registry`]: every device by its URI, name and number; what tables and messages look devices
//!   up in.
//! * [`verbs`]: create, load, suspend, resume, ...: the kernel's semantics and errors.
//! * [`CoresIo`]: what targets read and write when a table is loaded, done by the cores.
//! * [`http`]: the verbs over HTTP and JSON on a Unix socket; [`client`]: the other end of it.
//! * [`blocked`]: what a thread does while a verb that it runs waits.
//! * `stats`: how much is done, in numbers; `metrics`: the same for Prometheus.
//! * [`state_folder`]: what outlives a server.
//! * [`config`]: devices that a file wants, and what has to be done when it changes.
//! * [`exports`]: which devices NBD clients find.
//!
//! The cores never wait for anything here. What they are told, they are told by message.
#![forbid(unsafe_code)]

pub mod blocked;
pub mod client;
pub mod config;
pub mod error;
pub mod exports;
pub mod http;
mod io;
mod metrics;
pub mod registry;
pub mod state_folder;
mod stats;
pub mod verbs;

pub use io::CoresIo;
pub use registry::Registry;
pub use state_folder::StateFolder;
