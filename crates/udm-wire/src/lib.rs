//! Parsers and printers: table lines, sizes, limits of rates, URIs, the protocols NBD, NVMe/TCP,
//! vhost-user, ublk and virtio, snapshot stores, metadata of clones, boot profiles, qcow2 images,
//! configuration files.
//!
//! Contract: everything here is a pure function of its input. There is no I/O, no clock, no thread
//! and no `unsafe`. All input counts as hostile. Each parser bounds the memory that it uses,
//! refuses in one clear line, and never panics.
//!
//! Words that only one target understands are parsed in `udm-targets`. `udm-backends` opens
//! devices.

#![forbid(unsafe_code)]

pub mod boot_profile;
mod bytes;
pub mod clone_metadata;
pub mod clone_table;
pub mod cow;
pub mod cpus;
pub mod log_writes;
pub mod mirror_log;
pub mod multipath_conf;
pub mod nbd;
pub mod nvme;
pub mod qcow2;
pub mod size;
pub mod table;
pub mod throttle;
pub mod ublk;
pub mod udm_conf;
pub mod uri;
pub mod vhost_user;
pub mod virtio;
pub mod words;

#[doc(hidden)]
pub mod fuzz;
