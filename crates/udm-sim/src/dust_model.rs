//! Model of bad blocks: the requests that a dust target must fail after the messages it received.

use crate::environment::lock_environment;
use crate::model::Violation;
use crate::tables::{PassThroughTarget, TableLineTarget, TableSpec};
use crate::world::MappedDeviceStackWorld;
use std::collections::BTreeMap;

/// A dust line of a live table.
#[derive(Clone, Debug)]
pub struct DustLine {
    /// First sector on the device, and number of sectors.
    start: u64,
    len: u64,
    /// Start of the line on the device below, whose blocks are counted.
    at: u64,
    /// Sectors per block.
    block: u64,
    enabled: bool,
    /// True if no device lies above, so the model knows every write.
    exact: bool,
    /// Bad blocks, with the step since which no write can have removed the block from the set.
    /// `None` if a write may have done so.
    bad: BTreeMap<u64, Option<u64>>,
}

impl DustLine {
    /// Returns the dust lines of `spec`, all in bypass mode. `exact` is true if no device lies
    /// above.
    #[must_use]
    pub fn of(spec: &TableSpec, exact: bool) -> Vec<DustLine> {
        let mut start = 0;
        let mut all = Vec::new();
        for (len, kind) in &spec.lines {
            if let TableLineTarget::PassThrough(PassThroughTarget::Dust(bytes), _, at) = kind {
                let block = bytes / udm_core::SECTOR_SIZE;
                let (enabled, bad) = (false, BTreeMap::new());
                all.push(DustLine { start, len: *len, at: *at, block, enabled, exact, bad });
            }
            start += len;
        }
        all
    }

    /// True if the line may fail requests.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.enabled && !self.bad.is_empty()
    }

    fn blocks(&self, sector: u64, len: u64) -> std::ops::Range<u64> {
        let first = sector.max(self.start) - self.start + self.at;
        let end = (sector + len).min(self.start + self.len).saturating_sub(self.start) + self.at;
        match first < end {
            true => first / self.block..(end - 1) / self.block + 1,
            false => 0..0,
        }
    }

    /// Records the start of a write, which may remove bad blocks.
    pub fn write(&mut self, sector: u64, len: u64) {
        let blocks = self.blocks(sector, len);
        if !blocks.is_empty() {
            self.bad.range_mut(blocks).for_each(|(_, since)| *since = None);
        }
    }

    /// True if a read that began in step `start` must fail, because it touches a block that was bad
    /// all the time.
    #[must_use]
    pub fn forbids(&self, sector: u64, len: u64, start: u64) -> bool {
        let blocks = self.blocks(sector, len);
        self.enabled
            && !blocks.is_empty()
            && self.bad.range(blocks).any(|(_, since)| since.is_some_and(|since| since < start))
    }
}

impl MappedDeviceStackWorld {
    /// Sends a message to one of the dust lines of device `i`.
    ///
    /// # Errors
    /// If the reply does not match the model.
    pub(crate) fn dust(&mut self, i: usize) -> Result<(), Violation> {
        let line = self.machine.control.below(self.devices[i].dust.len() as u64) as usize;
        let DustLine { start, len, at, block, .. } = self.devices[i].dust[line];
        // Mostly in the region that requests prefer.
        let sector = match self.machine.control.one_in(4) {
            true => self.machine.control.below(len),
            false => {
                (self.devices[i].hot % (start + len)).saturating_sub(start) + self.machine.control.below(64)
            }
        };
        let nr = (at + sector.min(len - 1)) / block;
        // If a write may have removed a block from the set, both replies are valid.
        let entry = self.devices[i].dust[line].bad.get(&nr);
        let (known, unsure) = (entry.is_some(), entry.is_some_and(Option::is_none));
        let now = lock_environment(&self.machine.env).ending();
        let (words, mut fine) = match self.machine.control.below(10) {
            0..4 => (format!("addbadblock {nr}"), !known),
            4 => (format!("addbadblock {nr} {}", self.machine.control.below(3)), !known),
            5 => (format!("removebadblock {nr}"), known),
            6..8 => ("enable".into(), true),
            8 => ("disable".into(), true),
            _ => ("clearbadblocks".into(), true),
        };
        lock_environment(&self.machine.env).say(format!("d{i} message to sector {start}: {words}"));
        let answer = self.send(i, start, &words);
        if unsure && words.contains("addbadblock") {
            fine = answer.is_ok();
        }
        if unsure && words.contains("removebadblock") && answer.is_err() {
            fine = false;
        }
        if answer.is_ok() != fine {
            let reply = answer.map_or_else(|e| e.to_string(), |(reply, _)| reply);
            return Err(format!("d{i} answers {words} with {reply:?}"));
        }
        self.machine.totals.dust += 1;
        // A write in flight may arrive when the block is bad.
        let now = Some(now).filter(|_| !self.machine.model.is_writing(i));
        let dust = &mut self.devices[i].dust[line];
        let verb = words.split(' ').next().unwrap_or_default();
        match verb {
            // A block with a count of writes that still fail is bad for reads all the same.
            "addbadblock" if fine => drop(dust.bad.insert(nr, now.filter(|_| dust.exact))),
            "removebadblock" if known => drop(dust.bad.remove(&nr)),
            "clearbadblocks" => dust.bad.clear(),
            "disable" => dust.enabled = false,
            "enable" if !dust.enabled => {
                dust.enabled = true;
                dust.bad.values_mut().for_each(|since| *since = since.and(now));
            }
            _ => {}
        }
        self.update_suspended_users();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::TableLineDevice;

    #[test]
    fn a_block_is_bad_until_a_write_may_have_made_it_good() {
        let kind = TableLineTarget::PassThrough(PassThroughTarget::Dust(4096), TableLineDevice::Path(0), 16);
        let spec = TableSpec { lines: vec![(8, TableLineTarget::Zero), (32, kind)] };
        let mut dust = DustLine::of(&spec, true).remove(0);
        dust.enabled = true;
        // Block 3 of the disk is its sectors 24 to 31, which are sectors 16 to 23 of the device.
        dust.bad.insert(3, Some(5));
        assert!(dust.forbids(16, 1, 6) && dust.forbids(0, 40, 6) && dust.forbids(23, 9, 6));
        assert!(!dust.forbids(24, 4, 6) && !dust.forbids(8, 8, 6) && !dust.forbids(0, 8, 6));
        assert!(!dust.forbids(16, 1, 4), "the read began before the block was bad");
        dust.write(0, 8);
        assert!(dust.forbids(16, 1, 6));
        dust.write(20, 1);
        assert!(!dust.forbids(16, 1, 6));
    }
}
