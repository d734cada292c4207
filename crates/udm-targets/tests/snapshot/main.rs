//! Snapshots and their origins, on cores stepped by hand.
//!
//! Tests are named after the cases that they stand for: `g..` grammar, `f..` format, `c..` copies,
//! `e..` space and errors, `m..` merge, `h..` handover, `k..` and `t..` the rest of the device
//! mapper.

mod copies;
mod core;
mod format;
mod grammar;
mod growth;
mod handover;
mod journal;
mod kernel;
mod log;
mod merge;
mod owners;
mod random;
mod reader;
mod reader_tests;
mod rig;
mod settings;
mod space;
