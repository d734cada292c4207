//! Mapped devices: a name, a number, two slots for tables, and lanes that change tables without
//! losing a request.
//!
//! [`device`] is the control half, [`change`] takes it through suspend and resume, [`changes`]
//! several at once and with [`partners`], [`lane`] is the data path, [`stack`] says what may lie on
//! what; [`phase`], [`message`] and [`names`] are what their names say.
//!
//! The life of a device, as the kernel's (dm-ioctl.c `table_load`, `table_clear`, `do_suspend`,
//! `do_resume`; dm.c `dm_submit_bio`). A device has a live table or none, an inactive one or none,
//! and is active or suspended:
//!
//! | event | live | inactive | state |
//! |---|---|---|---|
//! | load | | the new one | |
//! | clear | | none | |
//! | suspend | | | suspended |
//! | resume with an inactive table | what was inactive | none | active |
//! | resume without | | | active |
//! | resume that can't work | | | active; suspended where the live table can't go on as it is |
//! | another change meanwhile | EBUSY | | |
//!
//! | a request | without a live table | with one |
//! |---|---|---|
//! | active | EIO | goes to the table |
//! | suspended | waits; NOWAIT: EAGAIN; read-ahead: EIO | the same |
//!
//! `tests/life.rs` has every transition.

mod change;
mod changes;
mod device;
mod events;
mod lane;
mod message;
mod names;
mod partners;
mod phase;
mod queue;
mod stack;

pub use change::Change;
pub use changes::{Changes, Refused};
pub use device::{DeviceInfo, MappedDevice, Wake};
pub use names::NameOf;
pub use queue::QueueBy;
pub use stack::{DEPTH_MAX, LANES_MAX, lies_on};
