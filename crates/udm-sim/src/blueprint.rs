//! Random choice of the disks, paths and devices of a world. The result is always valid.

use crate::plan::{DisturbanceClass, ExcludedDisturbances};
use crate::rng::SimRng;
use crate::tables::{
    FlakeyFault, PassThroughTarget, PathSelector, TableLineDevice, TableLineTarget, TableSpec,
};
use udm_targets::multipath::selector::SELECTORS;
use udm_wire::uri::{IoSchedulerName, QueueParams};

/// A disk to create.
#[derive(Clone, Debug)]
pub struct DiskPlan {
    /// Size in sectors.
    pub sectors: u64,
    /// Sectors that the disk shows at first.
    pub shown: u64,
    /// Sectors per block.
    pub block: u64,
    /// True if the disk is read-only at first.
    pub read_only: bool,
    /// True if the disk has a volatile cache.
    pub volatile: bool,
    /// True if the disk honours FUA.
    pub fua: bool,
    /// Longest read or write, discard, and write-zeroes, in sectors.
    pub max: [u64; 3],
    /// True for a log disk: it accepts any content.
    pub log: bool,
}

/// A device to create. Its table may only name devices earlier in the list.
#[derive(Clone, Debug)]
pub struct DevicePlan {
    /// The first table of the device.
    pub table: TableSpec,
    /// True if no device lies above, so a new table may map other data.
    pub top: bool,
}

/// All components of a world.
#[derive(Clone, Debug, Default)]
pub struct WorldBlueprint {
    /// Number of cores.
    pub cores: usize,
    /// The disks.
    pub disks: Vec<DiskPlan>,
    /// The disk of each path.
    pub paths: Vec<usize>,
    /// The queues in front of paths that no multipath target uses.
    pub queues: Vec<(usize, QueueParams)>,
    /// The queues of request-based mapped devices, by device.
    pub own_queues: Vec<(usize, QueueParams)>,
    /// Paths that multipath targets use through a mapped device: path and device.
    pub via: Vec<(usize, usize)>,
    /// The devices.
    pub devices: Vec<DevicePlan>,
    /// The path to a disk for logs.
    pub log: Option<usize>,
    /// The device that may have a log.
    pub logger: Option<usize>,
    /// True if a device lies over the logging device. Then the log also has requests of that
    /// device, and its content is not checked.
    pub over_log: bool,
    /// Building blocks of the tables of top devices, with their sizes in sectors.
    pub blocks: Vec<(TableLineDevice, u64)>,
    /// Longest delay of a delay target, in ms.
    pub delay_max: u64,
}

impl WorldBlueprint {
    /// Draws a world of `cores` cores, with delays of at most `delay_max` ms in delay targets.
    #[must_use]
    pub fn draw(
        chance: &mut SimRng,
        cores: usize,
        without: ExcludedDisturbances,
        delay_max: u64,
    ) -> WorldBlueprint {
        let mut b = WorldBlueprint { cores, delay_max, ..WorldBlueprint::default() };
        let limits = !without.has(DisturbanceClass::Limits);
        for disk in 0..chance.between(1, 3) as usize {
            let volatile = !chance.one_in(5);
            let sectors = chance.pick(&[256, 512, 1000, 2048]);
            let shown = if limits && chance.one_in(3) { sectors - 8 * chance.below(16) } else { sectors };
            b.disks.push(DiskPlan {
                sectors,
                shown,
                block: if limits && chance.one_in(4) { 8 } else { 1 },
                read_only: limits && chance.one_in(10),
                volatile,
                fua: !volatile || !chance.one_in(3),
                max: [
                    chance.pick(&[8, 64, 1024]),
                    chance.pick(&[0, 16, 256, u64::from(u32::MAX)]),
                    chance.pick(&[0, 16, 256, u64::from(u32::MAX)]),
                ],
                log: false,
            });
            let sectors = shown;
            if chance.one_in(3) {
                b.paths.push(disk);
                b.blocks.push((TableLineDevice::Path(b.paths.len() - 1), sectors));
                if !without.has(DisturbanceClass::Queues) && chance.one_in(2) {
                    b.queues.push((b.paths.len() - 1, draw_queue_params(chance)));
                }
            } else {
                for _ in 0..chance.between(1, 4) {
                    b.paths.push(disk);
                }
                let len = if chance.one_in(4) { sectors - 8 } else { sectors };
                if !without.has(DisturbanceClass::Stacks) && chance.one_in(4) {
                    for p in b.paths.len() - b.paths.iter().filter(|d| **d == disk).count()..b.paths.len() {
                        b.via.push((p, b.devices.len()));
                        b.add(
                            TableSpec {
                                lines: vec![(sectors, TableLineTarget::Linear(TableLineDevice::Path(p), 0))],
                            },
                            true,
                        );
                    }
                }
                let kind = b.multipath(disk, chance);
                b.add(TableSpec { lines: vec![(len, kind)] }, true);
                b.blocks.push((TableLineDevice::Device(b.devices.len() - 1), len));
            }
        }
        if chance.one_in(2) {
            let max = [chance.pick(&[64, 1024]), 0, 0];
            let volatile = !chance.one_in(4);
            let sectors = chance.pick(&[64, 1 << 14, 1 << 17, 1 << 17]);
            // Log entries are made of whole blocks, and the model of the log counts in sectors.
            b.disks.iter_mut().for_each(|d| d.block = 1);
            b.disks.push(DiskPlan {
                sectors,
                shown: sectors,
                block: 1,
                read_only: false,
                volatile,
                fua: !volatile || !chance.one_in(3),
                max,
                log: true,
            });
            b.log = Some(b.paths.len());
            b.paths.push(b.disks.len() - 1);
        }
        if chance.one_in(3) {
            // A device in the middle of the stack.
            let table = b.compose(chance, false, without.and(DisturbanceClass::Lossy));
            let len = table.sectors();
            b.add(table, true);
            b.blocks.push((TableLineDevice::Device(b.devices.len() - 1), len));
        }
        let tops = chance.between(1, 2);
        for top in 1..=tops {
            let logs = top == tops && b.log.is_some();
            if logs {
                b.logger = Some(b.devices.len());
            }
            let table = b.compose(chance, logs, without);
            b.add(table, true);
        }
        b
    }

    /// Returns a world for measurements: one multipath device over `paths` paths that never fail.
    #[must_use]
    pub fn bench(paths: usize, cores: usize) -> WorldBlueprint {
        let disk = DiskPlan {
            sectors: 2048,
            shown: 2048,
            block: 1,
            read_only: false,
            volatile: true,
            fua: true,
            max: [1024; 3],
            log: false,
        };
        let groups = vec![(PathSelector::QueueLength, (0..paths).collect())];
        let kind = TableLineTarget::Multipath { disk: 0, queue: true, groups, via: Vec::new() };
        let table = TableSpec { lines: vec![(2048, kind)] };
        WorldBlueprint {
            cores,
            disks: vec![disk],
            paths: vec![0; paths],
            devices: vec![DevicePlan { table, top: true }],
            blocks: vec![(TableLineDevice::Device(0), 2048)],
            ..WorldBlueprint::default()
        }
    }

    /// In one of three worlds, gives queues to multipath devices. If `wide`, no read waits for a
    /// tag or is merged.
    pub(crate) fn draw_own_queues(&mut self, chance: &mut SimRng, wide: bool) {
        let devices = if chance.one_in(3) { &self.devices[..] } else { &[] };
        let multipath = |device: &DevicePlan| device.table.multipath().is_some();
        let own = devices.iter().enumerate().filter(|(_, device)| multipath(device));
        self.own_queues = own.map(|(i, _)| (i, draw_queue_params(chance))).collect();
        if wide {
            let to_wide = |params: &mut QueueParams| {
                (params.queue_depth, params.nr_requests, params.nomerges) = (1024, 0, 2);
            };
            self.own_queues.iter_mut().for_each(|(_, params)| to_wide(params));
        }
    }

    /// In one of three worlds, puts a device over the logging device, unless the latter loses data.
    pub(crate) fn draw_over_log(&mut self, chance: &mut SimRng) {
        let lossy = |kind: &TableLineTarget| matches!(kind, TableLineTarget::PassThrough(PassThroughTarget::Flakey(_, _, flaw), ..) if flaw.is_lossy());
        let keeps = |&logger: &usize| !self.devices[logger].table.lines.iter().any(|(_, kind)| lossy(kind));
        let Some(logger) = self.logger.filter(keeps).filter(|_| chance.one_in(3)) else { return };
        let len = self.devices[logger].table.sectors();
        self.add(
            TableSpec { lines: vec![(len, TableLineTarget::Linear(TableLineDevice::Device(logger), 0))] },
            true,
        );
        self.over_log = true;
    }

    fn add(&mut self, table: TableSpec, top: bool) {
        for d in table.devices() {
            self.devices[d].top = false;
        }
        self.devices.push(DevicePlan { table, top });
    }

    /// True if no device lies or may lie on device `i`.
    #[must_use]
    pub fn is_free(&self, i: usize) -> bool {
        self.devices[i].top && !self.blocks.iter().any(|(b, _)| *b == TableLineDevice::Device(i))
    }

    /// Draws groups and selectors over all paths to `disk`.
    #[must_use]
    pub fn multipath(&self, disk: usize, chance: &mut SimRng) -> TableLineTarget {
        let mut paths: Vec<usize> = (0..self.paths.len()).filter(|p| self.paths[*p] == disk).collect();
        // Shuffles the paths, so that their order varies between tables.
        for i in (1..paths.len()).rev() {
            paths.swap(i, chance.below(i as u64 + 1) as usize);
        }
        let mut groups = Vec::new();
        while !paths.is_empty() {
            let take = chance.between(1, paths.len() as u64) as usize;
            let members: Vec<usize> = paths.drain(..take).collect();
            let mut selector = chance.pick(&PathSelector::ALL);
            let known = SELECTORS.iter().any(|t| t.name == selector.name());
            if !known || (selector == PathSelector::Affinity && members.len() > self.cores) {
                selector = PathSelector::QueueLength;
            }
            groups.push((selector, members));
        }
        let via = self.via.iter().copied().filter(|(p, _)| self.paths[*p] == disk).collect();
        TableLineTarget::Multipath { disk, queue: !chance.one_in(4), groups, via }
    }

    /// Draws a table over the building blocks, with lines of every kind. If `logs`, it usually has
    /// one log, never two.
    #[must_use]
    pub fn compose(&self, chance: &mut SimRng, logs: bool, without: ExcludedDisturbances) -> TableSpec {
        let mut lines = Vec::new();
        if let (true, Some(log)) = (logs && !chance.one_in(4), self.log) {
            let (below, size) = self.block(chance);
            lines.push((size, TableLineTarget::PassThrough(PassThroughTarget::LogWrites(log), below, 0)));
        }
        for _ in 0..chance.pick(&[1, 1, 2, 3, 5]) {
            lines.push(match chance.below(10) {
                0 => (8 * chance.between(1, 8), TableLineTarget::Zero),
                1 => (8 * chance.between(1, 4), TableLineTarget::Error),
                2..=4 => self.striped(chance),
                _ => {
                    let (below, size) = self.block(chance);
                    let at = 8 * chance.below(size / 16);
                    let len = (8 * chance.between(1, (size - at) / 8)).min(size - at);
                    let kind = match chance.one_in(4) {
                        true => TableLineTarget::PassThrough(self.through(chance, without), below, at),
                        false => TableLineTarget::Linear(below, at),
                    };
                    (len, kind)
                }
            });
        }
        if lines.iter().all(|(_, k)| matches!(k, TableLineTarget::Error | TableLineTarget::Zero)) {
            let (below, size) = self.block(chance);
            lines.push((size, TableLineTarget::Linear(below, 0)));
        }
        TableSpec { lines }
    }

    fn block(&self, chance: &mut SimRng) -> (TableLineDevice, u64) {
        self.blocks[chance.below(self.blocks.len() as u64) as usize]
    }

    /// Draws a pass-through target other than a log. Targets that lose or change data are drawn
    /// only if `without` allows them.
    pub(crate) fn through(&self, chance: &mut SimRng, without: ExcludedDisturbances) -> PassThroughTarget {
        match chance.below(3) {
            0 => PassThroughTarget::Delay(chance.pick(&[0, 1, 20, 300]).min(self.delay_max)),
            1 => {
                let mut flaw =
                    chance.pick(&[FlakeyFault::All, FlakeyFault::ErrorReads, FlakeyFault::ErrorWrites]);
                if !without.has(DisturbanceClass::Lossy) && chance.one_in(2) {
                    let writes = chance.one_in(2);
                    let nth = chance.pick(&[1, 2, 512, 1000, 4096]);
                    flaw = match chance.below(3) {
                        0 => FlakeyFault::DropWrites,
                        1 => FlakeyFault::CorruptByte(nth, writes, chance.pick(&[0, 1, 255])),
                        _ => FlakeyFault::RandomCorrupt(writes, chance.pick(&[1, 2, 10])),
                    };
                }
                PassThroughTarget::Flakey(chance.between(0, 5), chance.between(1, 3), flaw)
            }
            _ => PassThroughTarget::Dust(chance.pick(&[512, 4096])),
        }
    }

    fn striped(&self, chance: &mut SimRng) -> (u64, TableLineTarget) {
        let chunk = chance.pick(&[8, 16, 24, 32]);
        let stripes = chance.between(1, 4);
        let rows = chance.between(1, 6);
        let blocks: Vec<(TableLineDevice, u64)> = (0..stripes).map(|_| self.block(chance)).collect();
        let rows = blocks.iter().fold(rows, |rows, (_, size)| rows.min(size / chunk));
        if rows == 0 {
            let (below, size) = blocks[0];
            return (size, TableLineTarget::Linear(below, 0));
        }
        let mut place = |size: u64| 8 * chance.below((size - rows * chunk) / 8 + 1);
        let of = blocks.into_iter().map(|(below, size)| (below, place(size))).collect();
        (stripes * rows * chunk, TableLineTarget::Striped { chunk, of })
    }
}

/// Draws queue settings, mostly with few tags.
fn draw_queue_params(chance: &mut SimRng) -> QueueParams {
    QueueParams {
        scheduler: chance.pick(&IoSchedulerName::ALL).1,
        nr_hw_queues: chance.pick(&[0, 1, 2]),
        queue_depth: chance.pick(&[1, 2, 4, 64]),
        nr_requests: chance.pick(&[0, 4]),
        nomerges: chance.pick(&[0, 0, 1, 2]),
        max_segments: chance.pick(&[2, 128]),
        writes_starved: chance.pick(&[0, 2]),
        fifo_batch: chance.pick(&[1, 16]),
        ..QueueParams::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::RngStream;

    #[test]
    fn tables_stay_inside_their_blocks() {
        for seed in 0..300 {
            let mut chance = SimRng::new(seed, RngStream::Build);
            let b = WorldBlueprint::draw(
                &mut chance,
                1 + seed as usize % 4,
                ExcludedDisturbances::default(),
                300,
            );
            let size = |below: TableLineDevice| match below {
                TableLineDevice::Path(p) => b.disks[b.paths[p]].sectors,
                TableLineDevice::Device(d) => b.devices[d].table.sectors(),
            };
            for d in &b.devices {
                let spec = b.vary(&d.table, &mut chance, seed % 2 == 0, ExcludedDisturbances::default());
                assert_eq!(spec.sectors(), d.table.sectors());
                for (len, kind) in spec.lines.iter().chain(&d.table.lines) {
                    match kind {
                        TableLineTarget::Linear(below, at) | TableLineTarget::PassThrough(_, below, at) => {
                            assert!(at + len <= size(*below));
                        }
                        TableLineTarget::Striped { of, .. } => {
                            for (below, at) in of {
                                assert!(at + len / of.len() as u64 <= size(*below));
                            }
                        }
                        TableLineTarget::Multipath { disk, .. } => assert!(*len <= b.disks[*disk].sectors),
                        TableLineTarget::Zero | TableLineTarget::Error => {}
                    }
                }
            }
        }
    }
}
