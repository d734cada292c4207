//! dmsetup's verbs, against a running `udm serve`.
//!
//! Contract: standard output is dmsetup's, byte for byte, or JSON with `--json`. A failure is an
//! error that `main` prints.

pub mod change;
pub mod events;
pub mod generate;
pub mod info;
mod manual;
pub mod power;
pub mod queue;
pub mod reconfigure;
pub mod show;
pub mod tree;
pub mod wait;

pub use change::{read_bounded, read_table};
pub use info::describe;
pub use reconfigure::result_lines;
pub use show::table_lines;
pub use tree::{DeviceTree, TreeGlyphs, TreeStyle, deps_line};
