//! Front ends: they turn requests from outside into bios.
//!
//! * [`nbd`]: a server for NBD clients, over Unix sockets and TCP.
//! * [`nvme`]: a target for NVMe/TCP hosts.
//! * [`vhost_user`]: disks of virtual machines, over Unix sockets and shared memory.
//! * [`ublk`]: block devices of this machine, over the kernel's ublk driver.
//!
//! A front end knows devices and bios. It knows no target and no backend.
#![forbid(unsafe_code)]

pub mod nbd;
pub mod nvme;
pub mod ublk;
pub mod unix_socket;
pub mod vhost_user;
