//! Mapped devices: a name, a number, two slots for tables, and lanes that change tables without losing a request.
//!
//! [`device`] is the control half, [`change`] takes it through suspend and resume, [`lane`] is the data path, [`message`] and [`names`] are
//! what their names say.

mod change;
mod device;
mod lane;
mod message;
mod names;

pub use change::Change;
pub use device::{DEPTH_MAX, DeviceInfo, MappedDevice, Wake};
