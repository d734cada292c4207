//! The check that a warm connection allocates nothing.

use stats_alloc::{Region, StatsAlloc};
use std::alloc::System;

/// Allocations of a warm round. The scheduler decides which requests arrive together, so a vector
/// may sometimes still grow.
const GROWTH_MAX: usize = 20;

/// Rounds until the connection must be warm: on a busy machine, larger groups of requests arrive
/// together now and then.
const ROUNDS_MAX: usize = 16;

/// Repeats `round` until it allocates nothing.
pub fn assert_becomes_warm(alloc: &StatsAlloc<System>, mut round: impl FnMut()) {
    let mut seen = Vec::new();
    while seen.last().is_none_or(|last| *last > GROWTH_MAX) {
        assert!(seen.len() < ROUNDS_MAX, "allocations of each round: {seen:?}");
        let region = Region::new(alloc);
        round();
        let change = region.change();
        seen.push(change.allocations + change.reallocations);
    }
}
