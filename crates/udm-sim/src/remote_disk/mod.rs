//! Parts that the worlds of udm as a client share: the NBD client and the NVMe initiator.
//!
//! Cores send requests to devices whose data is on the disks of simulated servers.
//!
//! * `front_end`: the source of requests on each core. `shared`: what it shares with the world.
//! * `model`: permitted results of requests, and the data that reads may return.
//! * `machine`: the cores, the network and the devices. `run`: a run with rests, and its end.
//! * `disk`: a disk of servers, with a volatile cache.

pub(crate) mod disk;
pub(crate) mod front_end;
pub(crate) mod machine;
pub(crate) mod model;
pub(crate) mod run;
pub(crate) mod shared;
