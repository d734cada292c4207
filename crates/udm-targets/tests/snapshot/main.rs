//! Snapshots and their origins, on cores stepped by the test.
//!
//! Tests are named after their cases: `g..` grammar, `f..` format, `c..` copies, `e..` space and
//! errors, `m..` merge, `h..` handover, `k..` and `t..` the rest of the device mapper.

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
