//! libudm: library mode for programs in other languages.
//!
//! * `abi`: the functions that C calls; `types`: their arguments and results. A test generates
//!   `include/udm.h` from the two.
//! * `raw`: reads memory behind C pointers, and lends it to requests.
//! * `context`: devices, verbs and the background core; the control half.
//! * `core_handle`: a thread that is a core, with its lanes; the data path.
//! * `error`: the reason for the last failed call.
//!
//! A *context* is a registry, its verbs and a set of cores
//! ([`CoreSet::with_task_core`](udm_runtime::ProcessCores::with_task_core)). A *core handle* is the
//! calling thread as a core. Verbs run on the calling thread. If that is a core, the verb runs on
//! another thread while the core runs turns.
//!
//! Contract: arguments are not trusted as far as they can be checked. Handles are numbers that are
//! looked up, so a stale, invented or foreign one is refused. Strings and lists are bounded. No
//! panic leaves a function. A call takes its core handle out of the list and puts it back. After a
//! panic the core handle is leaked, because the kernel may still use its memory. The library cannot
//! check if a pointer is valid; the header says what it must point to.
//!
//! The cost compared to Rust's library mode: the look-up of the core handle, and two turns of the
//! core instead of one.
//!
//! The shared library is linked from the archive (`link/`), because rustc does not support symbol
//! versions. The `unsafe` of this crate is in `abi.rs` and `raw.rs`.

#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "what C calls, and what it passes")]
mod abi;
mod context;
mod core_handle;
mod error;
#[allow(unsafe_code, reason = "what pointers of C lead to")]
mod raw;
mod types;
