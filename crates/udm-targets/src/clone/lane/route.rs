//! Where the bios of a batch go: a whole batch to one device, or each bio by itself.

use super::{CloneLane, DURABLE};
use crate::clone::engine::{DESTINATION, SOURCE};
use crate::clone::state::MetadataMode;
use udm_core::{Batch, Bio, Cx, Op};

/// True for a read or write that is done when one device has completed it.
#[inline(always)]
fn is_plain(bio: &Bio) -> bool {
    bio.op.has_data() && !bio.flags.intersects(DURABLE)
}

impl CloneLane {
    /// The device to which a whole batch goes, if all of it goes to one without a record.
    #[inline(always)]
    pub(super) fn device_of_all(&self, batch: &[Box<Bio>]) -> Option<usize> {
        if self.state.mode() == MetadataMode::Fail {
            return None;
        }
        let map = &self.state.map;
        if map.is_complete() {
            return batch.iter().all(|bio| is_plain(bio)).then_some(DESTINATION);
        }
        // The first bio decides, so each bit is looked at once.
        let is_hydrated = |bio: &Bio| map.is_hydrated(map.region_of(bio.sector.0));
        let (first, rest) = batch.split_first()?;
        if !is_plain(first) {
            return None;
        }
        if is_hydrated(first) {
            return rest.iter().all(|bio| is_plain(bio) && is_hydrated(bio)).then_some(DESTINATION);
        }
        let is_read = |bio: &Bio| bio.op == Op::Read && is_plain(bio);
        let reads_source = is_read(first) && rest.iter().all(|bio| is_read(bio) && !is_hydrated(bio));
        reads_source.then_some(SOURCE)
    }

    /// Records the regions that a batch reads from the source.
    pub(super) fn record_source_reads(&self, batch: &[Box<Bio>]) {
        for bio in batch {
            self.state.first_reads.record(self.state.map.region_of(bio.sector.0));
        }
    }

    /// Records the regions that reads need from the source.
    fn record_reads(&self, batch: &[Box<Bio>]) {
        let map = &self.state.map;
        for bio in batch.iter().filter(|bio| bio.op == Op::Read) {
            let region = map.region_of(bio.sector.0);
            if !map.is_hydrated(region) {
                self.state.first_reads.record(region);
            }
        }
    }

    /// Sends a batch whose bios go to several devices, or need more than a device.
    #[inline(never)]
    pub(super) fn submit_each(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.record_reads(batch);
        let (map, is_failed) = (&self.state.map, self.state.mode() == MetadataMode::Fail);
        let mut bios = self.children.deal(batch);
        // Kept free of calls, as `each` asks for.
        while let Some(bio) = bios.each(|bio| {
            if !is_plain(bio) || is_failed {
                return None;
            }
            match map.is_hydrated(map.region_of(bio.sector.0)) {
                true => Some(DESTINATION),
                false => (bio.op == Op::Read).then_some(SOURCE),
            }
        }) {
            self.special.push(bio);
        }
        drop(bios);
        let mut special = std::mem::take(&mut self.special);
        special.drain(..).for_each(|bio| self.take(bio));
        self.special = special;
        self.finish_turn(cx);
    }
}
