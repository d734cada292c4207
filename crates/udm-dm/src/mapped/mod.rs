//! Mapped devices: a name, a number, two slots for tables, and lanes that change tables without losing a request.
//!
//! [`device`] is the control half, [`change`] takes it through suspend and resume, [`changes`] several at once, [`lane`] is the data path, [`stack`] says what may lie on what;
//! [`message`] and [`names`] are what their names say.

mod change;
mod changes;
mod device;
mod lane;
mod message;
mod names;
mod stack;

pub use change::Change;
pub use changes::{Changes, Refused};
pub use device::{DeviceInfo, MappedDevice, Wake};
pub use stack::{DEPTH_MAX, LANES_MAX};
