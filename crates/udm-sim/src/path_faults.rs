//! Status and completion time of requests in a path.

use crate::environment::{Env, PathMode};
use udm_core::{Bio, Nanos, Op, Status};

/// Draws the status and completion time of a request. The time is [`Nanos::NEVER`] on a path that
/// hangs.
pub(crate) fn draw_result(env: &mut Env, index: usize, bio: &Bio) -> (Status, Nanos) {
    let state = &env.paths[index];
    let (mode, silent_timeout, latency, prompt) =
        (state.mode, state.silent_timeout, state.latency, state.prompt);
    let drag = state.drag;
    if env.dead {
        return (Status::Ok, env.now + Nanos(1 + env.chance.below(20_000)));
    }
    if mode == PathMode::Hung {
        return (Status::Timeout, Nanos::NEVER);
    }
    // The request completes within the submit.
    let at_once = prompt && drag == Nanos(0) && env.chance.one_in(2);
    let soon = |env: &mut Env| match at_once {
        true => env.now,
        false => env.now + Nanos(1 + env.chance.below(20_000)),
    };
    if let Some(status) = find_disk_limit_refusal(env, index, bio) {
        return (status, soon(env));
    }
    if env.calm {
        return (Status::Ok, soon(env) + drag);
    }
    let usual = |env: &mut Env, times: u64| match at_once {
        true => env.now,
        false => Nanos(env.now.0 + 1 + env.chance.span(latency) * times),
    };
    let refused = |env: &mut Env| {
        let status = env.chance.pick(&[Status::Offline, Status::Transport, Status::IoErr, Status::Resource]);
        (status, soon(env))
    };
    match mode {
        PathMode::Down => refused(env),
        PathMode::Flapping if env.chance.one_in(2) => refused(env),
        PathMode::Slow(times) => (draw_disk_error(env, index, bio), usual(env, times)),
        PathMode::Silent => (Status::Timeout, env.now + Nanos(silent_timeout)),
        PathMode::Up | PathMode::Flapping | PathMode::Hung => {
            (draw_disk_error(env, index, bio), usual(env, 1))
        }
    }
}

/// Returns the error if the disk refuses the request because of a changed limit: it is read-only,
/// or has no discard or write-zeroes.
pub(crate) fn find_disk_limit_refusal(env: &Env, index: usize, bio: &Bio) -> Option<Status> {
    let disk = &env.disks[env.paths[index].disk];
    match bio.op {
        _ if bio.op.is_write() && disk.read_only => Some(Status::ReadOnly),
        Op::Discard if disk.max[1] == 0 => Some(Status::NotSupp),
        Op::WriteZeroes if disk.max[2] == 0 => Some(Status::NotSupp),
        _ => None,
    }
}

/// Draws an error of the disk itself, which is rare.
fn draw_disk_error(env: &mut Env, index: usize, bio: &Bio) -> Status {
    let one_in = env.disks[env.paths[index].disk].error_one_in;
    if !env.chance.one_in(one_in) {
        return Status::Ok;
    }
    match bio.op {
        Op::Read | Op::Flush => env.chance.pick(&[
            Status::Medium,
            Status::IoErr,
            Status::Timeout,
            Status::Target,
            Status::Protection,
        ]),
        _ => env.chance.pick(&[
            Status::Medium,
            Status::NoSpace,
            Status::IoErr,
            Status::Timeout,
            Status::DevResource,
        ]),
    }
}
