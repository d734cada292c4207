//! `io-affinity`: each CPU has its path, so that a request is served by the path of the CPU that
//! issued it.
//!
//! A path's argument is the hexadecimal mask of its CPUs. A CPU is a core of udm, numbered from 0.
//! A core uses its own path while that path is usable. Otherwise it uses the first usable path of
//! another core, in the order of the cores. (The kernel first tries CPUs of the same NUMA node; for
//! udm all cores are one node.) A choice by a core without an own path counts as a *miss*. `status`
//! shows the total of misses for each path.
//!
//! Cores share only the number of misses: a core with misses adds to it once per poll.

use super::{
    BatchPathDispatch, PathArgError, PathSelectorLaneOps, SelectorLane, SelectorType, SharedPathSelector,
};
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::{Bio, CoreId, Cx, Sectors};

pub(super) const TYPE: SelectorType =
    SelectorType { name: "io-affinity", new: |_| Ok(Box::<IoAffinity>::default()) };

#[derive(Default)]
pub(in crate::multipath) struct IoAffinity {
    /// For each path: whether each core is in its mask.
    masks: Vec<Vec<bool>>,
    /// The path of each core.
    owners: Vec<Option<usize>>,
    misses: AtomicU64,
}

impl SharedPathSelector for IoAffinity {
    fn name(&self) -> &'static str {
        TYPE.name
    }

    fn add_path(&mut self, args: &[String], cores: usize) -> Result<(), PathArgError> {
        let [word] = args else { return Err(PathArgError { text: "invalid number of arguments", arg: 0 }) };
        let mask = parse_cpu_mask(word, cores).ok_or(PathArgError { text: "invalid cpumask", arg: 0 })?;
        self.owners.resize(cores, None);
        let mut is_new = false;
        for (core, owner) in self.owners.iter_mut().enumerate().filter(|(core, _)| mask[*core]) {
            if owner.is_some() {
                tracing::warn!("multipath {}: CPU mapping for {core} exists. Ignoring.", TYPE.name);
            } else {
                (*owner, is_new) = (Some(self.masks.len()), true);
            }
        }
        if !is_new {
            return Err(PathArgError { text: "No new/valid CPU mapping found", arg: 0 });
        }
        self.masks.push(mask);
        Ok(())
    }

    fn path_arg_count(&self) -> usize {
        1
    }

    fn path_args(&self, path: usize) -> String {
        format_cpu_mask(&self.masks[path])
    }

    fn path_info_count(&self) -> usize {
        1
    }

    fn path_info(&self, _path: usize) -> String {
        self.misses.load(Ordering::Relaxed).to_string()
    }

    fn lane(self: Arc<Self>, core: CoreId) -> SelectorLane {
        let own = self.owners.get(core.index()).copied().flatten();
        let mut order = Vec::new();
        for path in own.into_iter().chain(self.owners.iter().flatten().copied()) {
            if !order.contains(&path) {
                order.push(path);
            }
        }
        let usable = vec![true; self.masks.len()];
        let chosen = order.first().copied().unwrap_or(0);
        SelectorLane::IoAffinity(IoAffinityLane {
            is_miss: own.is_none(),
            order,
            usable,
            chosen,
            missed: 0,
            selector: self,
        })
    }
}

/// Parses a mask as the kernel does (`bitmap_parse`): groups of at most eight hexadecimal digits,
/// separated by commas. Returns `None` for anything else, and for a core that does not exist.
fn parse_cpu_mask(word: &str, cores: usize) -> Option<Vec<bool>> {
    let mut mask = vec![false; cores];
    for (group, digits) in word.rsplit(',').enumerate() {
        let ok = (1..=8).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
        let bits = u32::from_str_radix(digits, 16).ok().filter(|_| ok)?;
        for bit in (0..u32::BITS as usize).filter(|bit| bits >> bit & 1 == 1) {
            *mask.get_mut(group * u32::BITS as usize + bit)? = true;
        }
    }
    Some(mask)
}

/// Formats a mask as the kernel does (`%*pb`), with as many digits as all cores need.
fn format_cpu_mask(mask: &[bool]) -> String {
    let mut text = String::new();
    for (n, group) in mask.chunks(u32::BITS as usize).enumerate().rev() {
        let bits = group.iter().rev().fold(0u32, |bits, &bit| bits << 1 | u32::from(bit));
        let comma = if n > 0 { "," } else { "" };
        let _ = write!(text, "{bits:0width$x}{comma}", width = group.len().div_ceil(4));
    }
    text
}

/// The selector's state on one core.
pub(in crate::multipath) struct IoAffinityLane {
    selector: Arc<IoAffinity>,
    /// The paths in the order in which they are tried.
    order: Vec<usize>,
    usable: Vec<bool>,
    /// The first usable path of `order`.
    chosen: usize,
    /// This core has no path of its own.
    is_miss: bool,
    /// Misses not yet added to the shared count.
    missed: u64,
}

impl IoAffinityLane {
    fn changed(&mut self, path: usize, usable: bool) {
        self.usable[path] = usable;
        let first = self.order.iter().find(|&&path| self.usable[path]);
        self.chosen = first.copied().unwrap_or(0);
    }
}

impl PathSelectorLaneOps for IoAffinityLane {
    fn fail(&mut self, path: usize) {
        self.changed(path, false);
    }

    fn reinstate(&mut self, path: usize) {
        self.changed(path, true);
    }

    #[inline]
    fn choose(&mut self, _bio: &mut Bio) -> usize {
        self.missed += u64::from(self.is_miss);
        self.chosen
    }

    #[inline]
    fn choose_all(&mut self, mut bios: impl BatchPathDispatch) {
        let mut count = 0;
        let _ = bios.each(|_| {
            count += 1;
            Some(self.chosen)
        });
        self.missed += if self.is_miss { count } else { 0 };
    }

    #[inline]
    fn polled(&mut self, _path: usize, _back: &[Box<Bio>], _sectors: Sectors, _cx: &Cx<'_>) {
        if self.missed > 0 {
            self.selector.misses.fetch_add(std::mem::take(&mut self.missed), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_the_kernels() {
        let cores = |word, count| {
            let mask = parse_cpu_mask(word, count)?;
            Some(mask.iter().enumerate().filter(|(_, bit)| **bit).map(|(n, _)| n).collect::<Vec<_>>())
        };
        assert_eq!(cores("3", 4), Some(vec![0, 1]));
        assert_eq!(cores("0", 4), Some(vec![]));
        assert_eq!(cores("A", 4), Some(vec![1, 3]));
        assert_eq!(cores("00000001,00000002", 64), Some(vec![1, 32]));
        assert_eq!(cores("1,2", 64), Some(vec![1, 32]));
        for bad in ["0xf", "10", "zz", "", ",", "1,", "+1", "100000000", " 1"] {
            assert_eq!(cores(bad, 4), None, "{bad}");
        }
        for (mask, count, text) in [
            ("3", 4, "3"),
            ("3", 8, "03"),
            ("3", 6, "03"),
            ("1,2", 33, "1,00000002"),
            ("f", 64, "00000000,0000000f"),
        ] {
            assert_eq!(format_cpu_mask(&parse_cpu_mask(mask, count).unwrap()), text);
        }
    }
}
