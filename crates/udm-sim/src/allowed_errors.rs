//! The reasons for which a request may fail.

use crate::environment::Env;
use crate::model::{RequestRefusalRules, TrackedRequest, Violation, describe_tracked_request};
use crate::table_map::ERROR;
use udm_core::{BioFlags, Op, Status};

/// Checks that the model has a reason for request `r` to fail with `status`.
///
/// # Errors
/// If there is no reason.
pub(crate) fn check_error_is_allowed(r: &TrackedRequest, status: Status, env: &Env) -> Result<(), Violation> {
    let maps = || r.map.iter().chain(&r.more);
    let bare = maps().any(|m| m.bare);
    let disks = || maps().flat_map(|m| &m.disks).map(|d| &env.disks[*d]);
    let since = |t: Option<u64>| t.is_some_and(|t| t >= r.start);
    let error = maps().any(|m| (0..r.len).any(|i| m.cell(r.sector + i) == ERROR));
    let trims = matches!(r.op, Op::Discard | Op::WriteZeroes);
    let reason = r.flags.contains(BioFlags::RAHEAD)
        || (status == Status::IoErr && disks().any(|d| since(d.flaky)))
        || (status == Status::Again && r.flags.contains(BioFlags::NOWAIT))
        || (error && (status == Status::IoErr || (trims && status == Status::NotSupp)))
        || (status == Status::NotSupp
            && trims
            && (bare || disks().any(|d| d.max_range[1].0 == 0 || d.max_range[2].0 == 0)))
        || (status == Status::ReadOnly && r.op.is_write() && disks().any(|d| d.was_read_only))
        || (status == Status::Inval
            && disks().any(|d| r.breaks(RequestRefusalRules { block: d.block, read_only: false })))
        || disks().any(|d| since(d.blamed[status as usize]))
        || (status == Status::IoErr && disks().any(|d| since(d.no_path)));
    if reason {
        Ok(())
    } else {
        Err(format!("{} failed without a reason: {status}", describe_tracked_request(r)))
    }
}
