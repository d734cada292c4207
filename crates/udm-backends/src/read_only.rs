//! What the lanes of images share: the bios that they refuse, and copies within a turn's budget.

use std::collections::VecDeque;
use udm_core::{Bio, Cx, Op, Sectors, Status};

/// Status of a bio that a read-only device of `size` completes at once: flushes, writes and invalid
/// reads. `None` for a read that needs data.
#[must_use]
pub fn immediate_status_of_read_only(bio: &Bio, size: Sectors) -> Option<Status> {
    match bio.op {
        Op::Flush => Some(Status::Ok),
        Op::Write | Op::Discard | Op::WriteZeroes => Some(Status::ReadOnly),
        Op::Read => {
            crate::invalid_bio_status(bio, size).or_else(|| bio.data.is_empty().then_some(Status::Inval))
        }
    }
}

/// Advances the copies in `queue` in turns, within the budget of the core's turn, and at least one
/// of them. `advance` copies a piece, and returns the number of its bytes and, unless it was the
/// last piece, the copy.
pub fn advance_copies<T>(
    queue: &mut VecDeque<T>,
    cx: &mut Cx<'_>,
    mut advance: impl FnMut(T) -> (u64, Option<T>),
) {
    let mut left = cx.cpu_budget();
    let mut is_first = true;
    while is_first || left > 0 {
        let Some(copy) = queue.pop_front() else { break };
        is_first = false;
        let (bytes, rest) = advance(copy);
        left = left.saturating_sub(bytes);
        queue.extend(rest);
    }
    cx.set_cpu_budget(left);
    if !queue.is_empty() {
        cx.wake_now();
    }
}
