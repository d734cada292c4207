//! `https://`, `http://`, `s3://`, `gs://` and `az://`: objects of web servers and object stores as
//! read-only devices.
//!
//! The parts, in the order in which a device and then a request meet them:
//!
//! * [`ObjectClient`]: the thread with a tokio runtime that does all work with servers.
//! * `store`: a client of the crate `object_store` per URI, with credentials of the environment.
//! * `aws_profile`: keys in the file of the AWS tools.
//! * `http`, `tls`: connections. `failure`: kinds of failures.
//! * `source`: one object as it was when it was opened: length and ETag; its requests.
//! * [`range_read`]: one read of a range: retries, checks of answers. [`hedge`]: second requests.
//! * `block_cache`: one task per object: joins ranges, reads ahead, keeps blocks.
//! * `object_bytes`: the object for the reader of qcow2 images.
//! * `device`, `lane`: the device. A lane sends jobs to the task and copies from its replies.
//!
//! The rules:
//!
//! * **One object.** Length and ETag are taken when the device is opened. Each range is requested
//!   with `If-Match`, and the ETag and length of each answer are compared. A change is an error for
//!   all later reads: old and new data are never mixed. A server without ETags or without ranges is
//!   refused.
//! * **Nothing is believed.** An answer with another range, a shorter or a longer body is an error.
//! * **Time.** A server that does not answer, or answers 408, 429 or 5xx, is asked again, with
//!   pauses that double, until the deadline of the URI. Then the read fails with a path error, so
//!   multipath tries another path. Other refusals fail at once.
//! * **Hedges.** A request that is slower than nearly all recent ones gets a second one: at most 5
//!   of 100 requests do.
//! * **Bounds.** Per object: [`source::FETCHES_MAX`] ranges at a time, [`block_cache`] memory. Per
//!   lane: [`lane::READS_MAX`] reads.
//! * **Credentials** come from the environment, from files and from the metadata service of the
//!   machine. They are never logged. Nothing in a URI is secret.
//! * **Log.** One line when reads of an object begin to fail, one when they succeed again.
#![forbid(unsafe_code)]

mod aws_profile;
mod block_cache;
mod client;
mod device;
mod failure;
pub mod hedge;
mod http;
mod lane;
mod object_bytes;
pub mod range_read;
mod source;
mod store;
mod tls;

pub use client::ObjectClient;
pub use failure::ReadFailure;
