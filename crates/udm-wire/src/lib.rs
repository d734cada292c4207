//! Bytes and words to structs and back: table lines, sizes, device names, the NBD protocol.
//!
//! Contract: everything here is a pure function of its input. No I/O, no clock, no threads, no
//! `unsafe`. All input is taken for hostile: each parser has a bound on what it reads and keeps,
//! refuses in one clear line, and never panics.
//!
//! What it does not do: it gives words no meaning that only their target knows (`udm-targets`), and
//! opens nothing (`udm-backends`).

#![forbid(unsafe_code)]

mod bytes;
pub mod cow;
pub mod cpus;
pub mod log_writes;
pub mod multipath_conf;
pub mod nbd;
pub mod size;
pub mod table;
pub mod udm_conf;
pub mod uri;
pub mod words;

#[doc(hidden)]
pub mod fuzz;
