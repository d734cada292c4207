//! Variants of a table with the same mapping.

use crate::blueprint::Blueprint;
use crate::plan::ExcludedDisturbances;
use crate::rng::SimRng;
use crate::tables::{LineKind, PassThrough, TableSpec};

impl Blueprint {
    /// Returns another table with the same mapping as `spec`. If `logs`, it may lose its log or
    /// start a new one.
    #[must_use]
    pub fn vary(
        &self,
        spec: &TableSpec,
        chance: &mut SimRng,
        logs: bool,
        without: ExcludedDisturbances,
    ) -> TableSpec {
        let mut lines = Vec::new();
        let mut log = self.log.filter(|_| logs);
        for (len, kind) in &spec.lines {
            match kind {
                LineKind::Linear(below, 0) | LineKind::PassThrough(_, below, 0)
                    if log.is_some() && !chance.one_in(4) =>
                {
                    let log = log.take().map_or(PassThrough::Dust(512), PassThrough::LogWrites);
                    lines.push((*len, LineKind::PassThrough(log, *below, 0)));
                }
                LineKind::Multipath { disk, .. } => lines.push((*len, self.multipath(*disk, chance))),
                LineKind::Linear(below, at) if *len >= 16 && chance.one_in(2) => {
                    let cut = 8 * chance.between(1, len / 8 - 1);
                    lines.push((cut, LineKind::Linear(*below, *at)));
                    lines.push((len - cut, LineKind::Linear(*below, at + cut)));
                }
                LineKind::Linear(below, at) if chance.one_in(3) => {
                    lines.push((*len, LineKind::Striped { chunk: *len, of: vec![(*below, *at)] }));
                }
                LineKind::Linear(below, at) | LineKind::PassThrough(_, below, at) if chance.one_in(2) => {
                    lines.push((*len, LineKind::PassThrough(self.through(chance, without), *below, *at)));
                }
                LineKind::PassThrough(_, below, at) => lines.push((*len, LineKind::Linear(*below, *at))),
                LineKind::Zero if *len >= 16 => {
                    lines.push((8, LineKind::Zero));
                    lines.push((len - 8, LineKind::Zero));
                }
                other => lines.push((*len, other.clone())),
            }
        }
        lines.truncate(64);
        if lines.iter().map(|(len, _)| len).sum::<u64>() != spec.sectors() {
            return spec.clone();
        }
        TableSpec { lines }
    }
}
