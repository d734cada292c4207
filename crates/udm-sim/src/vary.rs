//! Tables that mean the same in other words.

use crate::blueprint::Blueprint;
use crate::chance::Chance;
use crate::plan::Without;
use crate::tables::{Kind, TableSpec, Through};

impl Blueprint {
    /// Another table of the same meaning as `spec`. One of a device that `logs` may lose its log,
    /// or begin another.
    #[must_use]
    pub fn vary(&self, spec: &TableSpec, chance: &mut Chance, logs: bool, without: Without) -> TableSpec {
        let mut lines = Vec::new();
        let mut log = self.log.filter(|_| logs);
        for (len, kind) in &spec.lines {
            match kind {
                Kind::Linear(below, 0) | Kind::Through(_, below, 0) if log.is_some() && !chance.one_in(4) => {
                    let log = log.take().map_or(Through::Dust(512), Through::LogWrites);
                    lines.push((*len, Kind::Through(log, *below, 0)));
                }
                Kind::Multipath { disk, .. } => lines.push((*len, self.multipath(*disk, chance))),
                Kind::Linear(below, at) if *len >= 16 && chance.one_in(2) => {
                    let cut = 8 * chance.between(1, len / 8 - 1);
                    lines.push((cut, Kind::Linear(*below, *at)));
                    lines.push((len - cut, Kind::Linear(*below, at + cut)));
                }
                Kind::Linear(below, at) if chance.one_in(3) => {
                    lines.push((*len, Kind::Striped { chunk: *len, of: vec![(*below, *at)] }));
                }
                Kind::Linear(below, at) | Kind::Through(_, below, at) if chance.one_in(2) => {
                    lines.push((*len, Kind::Through(self.through(chance, without), *below, *at)));
                }
                Kind::Through(_, below, at) => lines.push((*len, Kind::Linear(*below, *at))),
                Kind::Zero if *len >= 16 => {
                    lines.push((8, Kind::Zero));
                    lines.push((len - 8, Kind::Zero));
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
