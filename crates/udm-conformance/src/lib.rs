//! The conformance battery: the rules that every backend, target and front end keeps, written once
//! and run by name against all of them.
//!
//! * [`CASES`] lists the rules: each a function over a [`Rig`] that says which rule it checks and
//!   where that comes from. What a case needs of its subject is part of the list; where it does not
//!   apply there is no test, and the test says which and why when it is asked.
//! * [`SUBJECTS`] lists what is tested, a line each; [`Kind`] the worlds in which it is: cores
//!   stepped by hand, cores with rings, an NBD server.
//! * What a request must end with is said by the subject's own limits ([`Facts::verdict`]), so a
//!   case asks for everything and skips nothing.
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
