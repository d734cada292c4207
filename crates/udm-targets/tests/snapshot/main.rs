//! Snapshots and their origins, on cores stepped by hand.

mod copies;
mod random;
mod rig;
