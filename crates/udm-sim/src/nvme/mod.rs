//! Worlds of the NVMe/TCP target: its queues run unchanged over a simulated ring and network.
//!
//! One to three cores serve one disk, whose requests land at any time up to the quiesce time of the
//! target. A few hosts have two associations each. They write and read blocks of their own, lose an
//! association in every way (cut off at any byte, silent, shut down with writes in flight), and
//! repeat its unanswered writes through the other one, as their policy permits: after a
//! Cross-Controller Reset, a complete shutdown, or a time. Meanwhile ANA states change in storms,
//! associations reset each other, and hosts ask for what they must not have. The network may
//! deliver the last bytes of a silent host when its writes were repeated already.
//!
//! **The checker.** The disk knows which association each write comes from. After the target has
//! said that an association is fenced, no write of it may land. A write that a later one of its
//! host has replaced may not land either. A read returns what was acknowledged. A host that is
//! silent until its fence by time ends has been dropped by the target.
//!
//! A host with the policy [`RetryPolicy::AtOnce`] repeats writes without a fence, as Linux does
//! until TP8028. The world finds the write that lands late: no target can prevent it.
//!
//! * `disk`: the disk and its checks. `queue`: one connection of a host. `association`: its steps.
//! * `fence`: when a host may repeat its writes. `host`: what it writes and expects. `forbidden`:
//!   resets and connects that the target must refuse.
//! * `world`, `turn`: the run. `counts`: the counters. The network is that of the NBD worlds.

mod association;
mod counts;
mod disk;
mod fence;
mod forbidden;
mod host;
mod queue;
mod turn;
mod world;

use crate::plan::RunPlan;
use crate::run::{RunFailure, catch_panic, finish_run};
pub use counts::NvmeTargetCounts;
pub use fence::RetryPolicy;
use world::NvmeTargetWorld;

/// Runs the world of `plan`, with a safe policy drawn for each host.
///
/// # Errors
/// The failure, with its trace. The world of a failed run is leaked.
pub fn run(plan: &RunPlan) -> Result<NvmeTargetCounts, Box<RunFailure>> {
    run_with_policy(plan, None)
}

/// As [`run`], with this policy for all hosts.
///
/// # Errors
/// As [`run`].
pub fn run_with_policy(
    plan: &RunPlan,
    policy: Option<RetryPolicy>,
) -> Result<NvmeTargetCounts, Box<RunFailure>> {
    let mut world = None;
    let outcome = catch_panic(|| world.insert(NvmeTargetWorld::new(plan, policy)?).run());
    let last_events = |world: &mut NvmeTargetWorld| (world.step, world.trace.lines());
    finish_run(plan, outcome, world, |world| world.counts(), last_events)
}
