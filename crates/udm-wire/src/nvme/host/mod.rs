//! The host's side: commands, queues, and the decisions of a host, without I/O and without a clock.
//!
//! * `command`: commands as a host sends them.
//! * `queue`: the PDUs of a controller, checked against the commands in flight.
//! * `io_queue`: the setup of an I/O queue.
//! * `admin`: the admin queue, from the connection to its events, with resets of other controllers.
//! * `connect`: the Connect command. `authentication`: DH-HMAC-CHAP after it.
//! * `options`: names, wishes and secrets of the host. `error`: why a controller cannot be used.
//! * `facts`: what a controller and a namespace say about themselves, and what a host insists on.
//! * `disposition`: what a host does with a status.
//! * `fence`: when an unanswered write can no longer take effect.

mod admin;
mod authentication;
mod command;
mod connect;
mod disposition;
mod error;
mod facts;
mod fence;
mod io_queue;
mod options;
mod queue;

pub use admin::{AdminEvent, AssociationFacts, HostAdmin, ResetOutcome};
pub use command::{HostCommand, HostData, encode_dataset_range};
pub use disposition::{Disposition, RETRIES_MAX, RetryDelays, decide, is_ana_status};
pub use error::HostError;
pub use facts::{ControllerFacts, NamespaceFacts, NamespaceId, ana_priority, find_ana_state, is_usable};
pub use fence::WriteFence;
pub use io_queue::IoQueueSetup;
pub use options::{HostOptions, HostSecrets};
pub use queue::{HostDigests, HostEvent, HostProtocolError, HostQueue, append_data_digest};
