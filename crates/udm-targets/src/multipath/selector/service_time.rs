//! `service-time`: the path that would complete first, by bytes in flight and relative throughput.
//!
//! A path with throughput 0 is used only if every usable path has throughput 0. A flush has no
//! bytes and adds no load.

use super::load::{LoadBasedSelector, LoadBasedSelectorLane, PathLoad, PathLoadComparison, SharedPathLoads};
use super::{PathArgError, SelectorLane, SelectorType, SharedPathSelector};
use crate::multipath::parse::parse_u32;
use std::cmp::Ordering;
use std::sync::Arc;
use udm_core::{Bio, CoreId, Sectors};

pub(super) const TYPE: SelectorType =
    SelectorType { name: "service-time", new: |_| Ok(Box::<ServiceTime>::default()) };

/// The maximum relative throughput.
const THROUGHPUT_MAX: u32 = 100;

#[derive(Default)]
pub(in crate::multipath) struct ServiceTime {
    /// Repeat count and relative throughput of each path.
    args: Vec<(u32, u32)>,
    /// Bytes in flight.
    loads: SharedPathLoads,
}

impl SharedPathSelector for ServiceTime {
    fn name(&self) -> &'static str {
        TYPE.name
    }

    fn add_path(&mut self, args: &[String], _cores: usize) -> Result<(), PathArgError> {
        if args.len() > 2 {
            return Err(PathArgError { text: "incorrect number of arguments", arg: 2 });
        }
        let repeat = args.first().map_or(Ok(1), |word| super::parse_repeat_count(TYPE.name, word))?;
        let throughput = match args.get(1) {
            None => 1,
            Some(word) => parse_u32(word)
                .filter(|&t| t <= THROUGHPUT_MAX)
                .ok_or(PathArgError { text: "invalid relative_throughput value", arg: 1 })?,
        };
        self.args.push((repeat, throughput));
        self.loads.add_path();
        Ok(())
    }

    fn path_arg_count(&self) -> usize {
        2
    }

    fn path_args(&self, path: usize) -> String {
        let (repeat, throughput) = self.args[path];
        format!("{repeat} {throughput}")
    }

    fn path_info_count(&self) -> usize {
        2
    }

    fn path_info(&self, path: usize) -> String {
        format!("{} {}", self.loads.get(path), self.args[path].1)
    }

    fn lane(self: Arc<Self>, _core: CoreId) -> SelectorLane {
        SelectorLane::ServiceTime(LoadBasedSelectorLane::new(self))
    }
}

impl LoadBasedSelector for ServiceTime {
    type LoadRule = ServiceTime;

    fn loads(&self) -> &SharedPathLoads {
        &self.loads
    }

    fn throughput(&self, path: usize) -> u32 {
        self.args[path].1
    }
}

impl PathLoadComparison for ServiceTime {
    fn weight(bio: &Bio) -> u64 {
        bio.sectors.bytes()
    }

    fn total(_bios: usize, sectors: Sectors) -> u64 {
        sectors.bytes()
    }

    fn better(a: &PathLoad, b: &PathLoad, n: u64) -> bool {
        if a.throughput == b.throughput {
            return a.load_then_age() < b.load_then_age();
        }
        compare_service_time(a, b, n).then(a.used.cmp(&b.used)) == Ordering::Less
    }
}

/// `Less` if `a` serves `n` more bytes sooner than `b`. The kernel drops low bits of sums near the
/// top of its word; here the products are 128 bits wide and exact.
fn compare_service_time(a: &PathLoad, b: &PathLoad, n: u64) -> Ordering {
    if a.throughput == b.throughput {
        return a.load().cmp(&b.load());
    }
    let faster = b.throughput.cmp(&a.throughput);
    if a.load() == b.load() || a.throughput == 0 || b.throughput == 0 {
        return faster;
    }
    let cost = |load: u64, other: u32| (u128::from(load) + u128::from(n)) * u128::from(other);
    cost(a.load(), b.throughput).cmp(&cost(b.load(), a.throughput)).then(faster)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Columns: bytes in flight and throughput of two paths, size of the bio, and the comparison of
    /// the first with the second.
    #[test]
    fn comparisons_are_the_kernels() {
        let rows = [
            ((0, 1), (4096, 4), 4096, Ordering::Greater),
            ((0, 1), (12288, 4), 4096, Ordering::Greater),
            ((0, 1), (16384, 4), 4096, Ordering::Less),
            ((0, 1), (69632, 4), 4096, Ordering::Less),
            ((1 << 20, 0), (1 << 30, 1), 4096, Ordering::Greater),
            ((1 << 20, 0), (1 << 30, 0), 4096, Ordering::Less),
            ((4096, 2), (4096, 7), 512, Ordering::Greater),
            ((4096, 3), (4096, 3), 512, Ordering::Equal),
            ((0, 1), (0, 4), 0, Ordering::Greater),
            ((u64::MAX / 2, 99), (u64::MAX / 2 - 1, 100), 1 << 40, Ordering::Greater),
        ];
        for ((load_a, t_a), (load_b, t_b), n, want) in rows {
            let (a, b) = (PathLoad::of(load_a, t_a, 1), PathLoad::of(load_b, t_b, 2));
            assert_eq!(compare_service_time(&a, &b, n), want, "({load_a},{t_a}) v ({load_b},{t_b}) for {n}");
            assert_eq!(compare_service_time(&b, &a, n), want.reverse());
            assert_eq!(
                ServiceTime::better(&a, &b, n),
                want != Ordering::Greater,
                "a tie goes to the one used earlier"
            );
        }
    }
}
