//! A command between its arrival and its answer, and its stages.

use udm_core::{Bio, BioFlags, Nanos, Op, Segments, Status};
use udm_wire::nvme::{DATASET_RANGE_SIZE, DatasetRange, DatasetRequest, NvmeCommand};

/// A command between its arrival and its answer.
pub(super) struct PendingCommand {
    /// The host's identifier.
    pub(super) id: u16,
    pub(super) nsid: u32,
    pub(super) command: NvmeCommand,
    pub(super) op: Op,
    pub(super) flags: BioFlags,
    pub(super) stage: CommandStage,
    /// Block size at the arrival, as a power of two. The device may have another one by now.
    pub(super) block_log2: u8,
    /// Range in bytes. For a discard, the current one.
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) piece: u32,
    pub(super) flushes: bool,
    /// Bytes of data that the host sends, and those that have arrived.
    pub(super) from_host: u32,
    pub(super) received: u32,
    /// Bytes that the command counts as.
    pub(super) charge: usize,
    /// Time at which the command had arrived completely.
    pub(super) since: Nanos,
    /// Data of completed pieces of a read.
    pub(super) front: Segments,
    /// Data of later pieces; the data of the host.
    pub(super) rest: Segments,
    /// A part of the data of the host had a wrong digest.
    pub(super) is_damaged: bool,
    /// The answer is queued, but a bio is still in flight.
    pub(super) is_answered: bool,
}

/// Stage of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CommandStage {
    /// It waits for memory.
    Parked,
    /// It waits for data of the host.
    Transfer,
    /// `done` bytes have completed. One bio for the next piece is in flight.
    Range { done: u64 },
    /// The device does not support write-zeroes; zeroes are written as data after `done` bytes.
    Zeroes { done: u64 },
    /// `done` bytes of range `index` of a discard have completed.
    Dataset { index: usize, done: u64 },
    /// A flush makes everything durable.
    Flush,
}

impl PendingCommand {
    /// True while data of the host is expected.
    pub(super) fn is_transferring(&self) -> bool {
        self.stage == CommandStage::Transfer
    }

    pub(super) fn is_at_device(&self) -> bool {
        !matches!(self.stage, CommandStage::Parked | CommandStage::Transfer)
    }

    /// Range `index` of a discard, in bytes; `None` after the last one.
    ///
    /// # Errors
    /// The range is not within the `size` of the namespace in bytes.
    pub(super) fn dataset_range(&self, index: usize, size: u64) -> Result<Option<(u64, u64)>, Status> {
        let ranges = DatasetRequest::decode(&self.command).ranges;
        let mut bytes = [0; DATASET_RANGE_SIZE];
        let copied = self.rest.copy_to_at(index * DATASET_RANGE_SIZE, &mut bytes);
        if index >= ranges || copied < DATASET_RANGE_SIZE {
            return Ok(None);
        }
        let range = DatasetRange::decode(&bytes);
        let end = range.start.checked_add(range.blocks.into());
        if end.is_none_or(|end| end > size >> self.block_log2) {
            return Err(Status::Inval);
        }
        Ok(Some((range.start << self.block_log2, u64::from(range.blocks) << self.block_log2)))
    }

    /// Returns the stage after the one that `bio` completed; `None` if the answer is due.
    pub(super) fn after(&self, bio: &Bio) -> Option<CommandStage> {
        let done = match self.stage {
            CommandStage::Range { done } if bio.status == Status::NotSupp && bio.op == Op::WriteZeroes => {
                return Some(CommandStage::Zeroes { done });
            }
            // A discard is a hint. The table of the device may have changed, so that the device
            // does not support it any more.
            CommandStage::Dataset { .. } if bio.status == Status::NotSupp => return Some(self.stage),
            _ if !bio.status.is_ok() => return None,
            CommandStage::Dataset { .. } => return Some(self.stage),
            CommandStage::Flush if self.op == Op::Read => return Some(CommandStage::Range { done: 0 }),
            CommandStage::Flush | CommandStage::Parked | CommandStage::Transfer => return None,
            CommandStage::Range { done } | CommandStage::Zeroes { done } => done + bio.sectors.bytes(),
        };
        let is_zeroing = matches!(self.stage, CommandStage::Zeroes { .. });
        match done < self.len {
            true if is_zeroing => Some(CommandStage::Zeroes { done }),
            true => Some(CommandStage::Range { done }),
            false => (self.flushes && self.op != Op::Read).then_some(CommandStage::Flush),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ranges of a discard are blocks of the size at its arrival, also if the device has
    /// another one by now.
    #[test]
    fn ranges_have_the_block_size_of_their_arrival() {
        let mut bytes = [0; 64];
        bytes[44] = 1 << 2;
        let mut range = [0; DATASET_RANGE_SIZE];
        (range[4], range[8]) = (2, 8);
        let mut rest = Segments::from(udm_core::Buf::zeroed(range.len()));
        rest.copy_from(&range);
        let pending = PendingCommand {
            id: 0,
            nsid: 1,
            command: NvmeCommand::from_bytes(bytes),
            op: Op::Discard,
            flags: BioFlags::empty(),
            stage: CommandStage::Dataset { index: 0, done: 0 },
            block_log2: 9,
            start: 0,
            len: 0,
            piece: u32::MAX,
            flushes: false,
            from_host: 16,
            received: 16,
            charge: 16,
            since: Nanos(0),
            front: Segments::new(),
            rest,
            is_damaged: false,
            is_answered: false,
        };
        assert_eq!(pending.dataset_range(0, 10 * 512), Ok(Some((8 * 512, 2 * 512))));
        assert_eq!(pending.dataset_range(0, 10 * 512 - 1), Err(Status::Inval), "the device is smaller now");
        assert_eq!(pending.dataset_range(1, 10 * 512), Ok(None));
    }
}
