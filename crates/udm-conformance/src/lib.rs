//! The conformance battery: the rules for all backends, targets and front ends, written once and
//! run by name against all of them.
//!
//! * A *case* ([`CASES`]) is a rule: a function over a [`Rig`], with its source and its
//!   requirements. If a subject lacks a requirement, there is no test; the list of skipped tests
//!   gives the reason.
//! * A *subject* ([`SUBJECTS`]) is one line that names a device under test.
//! * A *world* ([`Kind`]) is a way of using it: cores stepped by hand, cores with rings, an NBD
//!   server. In a stepped world a lane that waits without asking for a poll is found.
//! * The subject's limits say how a request must end ([`Facts::verdict`]), so a case asks for
//!   everything.
//!
//! Below the targets are strict disks (`disk`): they refuse requests that no layer may send,
//! complete in any order, lose their cache when power is cut, and fail or wait on demand. In every
//! case each completed bio is compared with its submitted state.
//!
//! Test support only: no other crate imports it.
#![forbid(unsafe_code)]

mod cases;
mod content;
mod disk;
mod driver;
mod facts;
mod ground;
mod request;
mod rig;
mod served;
mod subjects;
mod world;

pub use cases::{CASES, Case, Need};
pub use content::{Fresh, Model, STAMP, stamp};
pub use disk::{Disk, Medium};
pub use driver::Driver;
pub use facts::{Boundary, Facts, Verdict};
pub use ground::{Ground, run};
pub use request::{Answer, Request};
pub use rig::Rig;
pub use subjects::{Made, SUBJECTS, Subject};
pub use world::{HANG, Kind, NoCores, World};
