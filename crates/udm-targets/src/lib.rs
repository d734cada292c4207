//! The targets: each type of line that a table can have.
//!
//! A target is a struct that implements [`udm_dm::Target`], a constructor, and a lane. [`TARGETS`]
//! is the list of all types. `linear` and `striped` have no lane: the table does their arithmetic.
//!
//! There is no I/O, no thread, no clock and no `unsafe` here. A target sees the devices below as
//! [`udm_core::Device`] and time through [`udm_core::Cx`]. So the simulator runs this crate
//! unchanged.
#![forbid(unsafe_code)]

pub mod clone;
pub mod error_target;
pub mod fault;
pub mod linear;
pub mod multipath;
pub mod snapshot;
pub mod striped;
pub mod zero;

use udm_dm::TargetType;

/// All target types, sorted by name. There is no automatic registration: a new type has a line
/// here, and CONTRIBUTING.md lists its other places. A type that the kernel does not have begins
/// with version 1.0.0.
pub const TARGETS: &[TargetType] = &[
    TargetType { name: "clone", version: [1, 0, 0], new: crate::clone::target::create_clone_target },
    TargetType { name: "delay", version: [1, 4, 0], new: crate::fault::delay::create_delay_target },
    TargetType { name: "dust", version: [1, 0, 0], new: crate::fault::dust::create_dust_target },
    TargetType { name: "error", version: [1, 7, 0], new: crate::error_target::create_error_target },
    TargetType { name: "flakey", version: [1, 5, 0], new: crate::fault::flakey::create_flakey_target },
    TargetType { name: "linear", version: [1, 4, 0], new: crate::linear::create_linear_target },
    TargetType {
        name: "log-writes",
        version: [1, 1, 0],
        new: crate::fault::log_writes::create_log_writes_target,
    },
    TargetType {
        name: "mirror",
        version: [1, 14, 0],
        new: crate::clone::mirror::target::create_mirror_target,
    },
    TargetType { name: "multipath", version: [1, 14, 0], new: crate::multipath::create_multipath_target },
    TargetType {
        name: "snapshot",
        version: [1, 16, 0],
        new: crate::snapshot::target::create_snapshot_target,
    },
    TargetType {
        name: "snapshot-merge",
        version: [1, 5, 0],
        new: crate::snapshot::merge::create_snapshot_merge_target,
    },
    TargetType {
        name: "snapshot-origin",
        version: [1, 9, 0],
        new: crate::snapshot::origin::create_snapshot_origin_target,
    },
    TargetType { name: "striped", version: [1, 6, 0], new: crate::striped::create_striped_target },
    TargetType { name: "zero", version: [1, 2, 0], new: crate::zero::create_zero_target },
];
