//! The list of all target types. Adding one touches its own file, its document, its test and one line here.
//!
//! Nothing registers itself: what is not in [`TARGETS`] does not exist.

use crate::error::TargetError;
use crate::target::{Target, TargetArgs};
use std::sync::Arc;

/// Makes a target from its table line. Errors are the kernel's texts, with or without the type in front (`linear: `): the table
/// puts it there where it is missing.
pub type Constructor = fn(&mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError>;

/// One kind of target.
pub struct TargetType {
    /// The word that tables use.
    pub name: &'static str,
    /// The version of the kernel's target (6.12) whose table and status texts these are, for `dmsetup targets`.
    pub version: [u32; 3],
    /// Its constructor.
    pub new: Constructor,
}

/// Every target type, in the order of their names.
pub const TARGETS: &[TargetType] = &[
    TargetType { name: "delay", version: [1, 4, 0], new: crate::fault::delay::new },
    TargetType { name: "dust", version: [1, 0, 0], new: crate::fault::dust::new },
    TargetType { name: "error", version: [1, 7, 0], new: crate::error_target::new },
    TargetType { name: "flakey", version: [1, 5, 0], new: crate::fault::flakey::new },
    TargetType { name: "linear", version: [1, 4, 0], new: crate::linear::new },
    TargetType { name: "log-writes", version: [1, 1, 0], new: crate::fault::log_writes::new },
    TargetType { name: "multipath", version: [1, 14, 0], new: crate::multipath::new },
    TargetType { name: "striped", version: [1, 6, 0], new: crate::striped::new },
    TargetType { name: "zero", version: [1, 2, 0], new: crate::zero::new },
];

/// The type called `name`.
#[must_use]
pub fn find(name: &str) -> Option<&'static TargetType> {
    TARGETS.iter().find(|t| t.name == name)
}
