//! Variants of a table with the same mapping.

use crate::blueprint::WorldBlueprint;
use crate::plan::ExcludedDisturbances;
use crate::rng::SimRng;
use crate::tables::{PassThroughTarget, TableLineTarget, TableSpec};

impl WorldBlueprint {
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
                TableLineTarget::Linear(below, 0) | TableLineTarget::PassThrough(_, below, 0)
                    if log.is_some() && !chance.one_in(4) =>
                {
                    let log = log.take().map_or(PassThroughTarget::Dust(512), PassThroughTarget::LogWrites);
                    lines.push((*len, TableLineTarget::PassThrough(log, *below, 0)));
                }
                TableLineTarget::Multipath { disk, .. } => lines.push((*len, self.multipath(*disk, chance))),
                TableLineTarget::Linear(below, at) if *len >= 16 && chance.one_in(2) => {
                    let cut = 8 * chance.between(1, len / 8 - 1);
                    lines.push((cut, TableLineTarget::Linear(*below, *at)));
                    lines.push((len - cut, TableLineTarget::Linear(*below, at + cut)));
                }
                TableLineTarget::Linear(below, at) if chance.one_in(3) => {
                    lines.push((*len, TableLineTarget::Striped { chunk: *len, of: vec![(*below, *at)] }));
                }
                TableLineTarget::Linear(below, at) | TableLineTarget::PassThrough(_, below, at)
                    if chance.one_in(2) =>
                {
                    lines.push((
                        *len,
                        TableLineTarget::PassThrough(self.through(chance, without), *below, *at),
                    ));
                }
                TableLineTarget::PassThrough(_, below, at) => {
                    lines.push((*len, TableLineTarget::Linear(*below, *at)));
                }
                TableLineTarget::Zero if *len >= 16 => {
                    lines.push((8, TableLineTarget::Zero));
                    lines.push((len - 8, TableLineTarget::Zero));
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
