//! dmsetup's verbs, against a running `udm serve`.
//!
//! Contract: standard output is dmsetup's, byte for byte, or JSON with `--json`. A failure is an
//! error that `main` prints.

pub mod change;
pub mod clone;
pub mod events;
pub mod generate;
pub mod info;
mod manual;
pub mod moves;
pub mod nvme;
pub mod power;
pub mod queue;
pub mod reconfigure;
pub mod show;
pub mod throttle;
pub mod tree;
pub mod ublk;
pub mod upgrade;
pub mod vhost_user;
pub mod wait;

pub use change::{read_bounded_table, read_table};
pub use info::write_device_info;
pub use reconfigure::format_reconfigure_changes;
pub use show::format_table_or_status_lines;
pub use tree::{DeviceTree, TreeGlyphs, TreePrintOptions, deps_line};
