//! libudm: library mode for programs that are not Rust.
//!
//! * `abi`: the functions, as C calls them; `types`: what they are given and give.
//!   `include/udm.h` is made of the two.
//! * `raw`: reads what a pointer leads to.
//! * `context`: devices, and the core that is there for them; the control half.
//! * `seat`: a thread that is a core, with its lanes; the data path.
//! * `error`: why the last call failed.
//!
//! Contract: what is passed in is hostile as far as it can be. Handles are numbers and are looked
//! up, so one that is stale, of another thread, or made up is refused. Strings and lists are
//! bounded. No panic leaves a function. What nobody can check is whether a pointer leads where it
//! should; the header says what each must lead to.
//!
//! The `unsafe` of this crate is in `abi.rs` and `raw.rs`.

#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "what C calls, and what it passes")]
mod abi;
mod context;
mod error;
#[allow(unsafe_code, reason = "what pointers of C lead to")]
mod raw;
mod seat;
mod types;
