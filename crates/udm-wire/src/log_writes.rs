//! The log of the `log-writes` target, byte for byte as the kernel lays it out.
//!
//! ```text
//! sector 0   magic u64 | version u64 | entries u64 | sector size u32          the superblock
//! sector 1   sector u64 | sectors u64 | flags u64 | data length u64 | text    an entry; the text of a mark follows its header
//! sector 2.. the data of a write                                              `sectors` of them; none for a discard or a mark
//! sector n   the next entry
//! ```
//!
//! All integers are little-endian. A *sector* here is one logical block of the logged device,
//! `sector size` bytes. Positions on the device and in the log use this unit. The data length is
//! that of a mark's text, otherwise 0.
//!
//! Contract: pure, no I/O. A log is hostile input. Every number is checked against the length of
//! the log. A walk ends after at most `length / sector size` steps. Each error has the byte offset
//! of its cause.

use crate::bytes::{u32_at, u64_at};
use bitflags::bitflags;
use std::ops::Range;
use thiserror::Error;

/// The first eight bytes of a log.
pub const MAGIC: u64 = 0x006a_7366_7773_6872;
/// The only known version.
pub const VERSION: u64 = 1;
/// The text of the mark that closes a log.
pub const END_MARK: &str = "dm-log-writes-end";
/// Bytes of the superblock in its sector.
pub const SUPER_LEN: usize = 28;
/// Bytes of an entry's header; the text of a mark follows.
pub const HEADER_LEN: usize = 32;
/// The smallest sector size in bytes.
pub const SECTOR_SIZE_MIN: u32 = 512;
/// The largest sector size in bytes.
pub const SECTOR_SIZE_MAX: u32 = 65536;

bitflags! {
    /// The kind of an entry. No flag means a write that a flush made durable.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct EntryFlags: u64 {
        /// A flush; if it has sectors, a write with a flush before it.
        const FLUSH = 1;
        /// A write that was durable when it completed.
        const FUA = 2;
        /// A discard, without data in the log.
        const DISCARD = 4;
        /// A mark; its text is in the entry's sector.
        const MARK = 8;
        /// A write of file system metadata.
        const METADATA = 16;
    }
}

impl EntryFlags {
    /// The names of the set flags in the order of the bits, joined by `|`; `-` if none is set.
    #[must_use]
    pub fn names(self) -> String {
        let names: Vec<String> = self.iter_names().map(|(name, _)| name.to_ascii_lowercase()).collect();
        if names.is_empty() { "-".to_owned() } else { names.join("|") }
    }
}

/// The reason why a log was refused, and the byte to blame.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("at byte {offset}: {fault}")]
pub struct LogWritesError {
    /// The byte offset in the log.
    pub offset: u64,
    /// The error at this offset.
    pub fault: LogWritesErrorKind,
}

/// An error of a log.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LogWritesErrorKind {
    /// The log is shorter than its superblock.
    #[error("the log ends inside its superblock")]
    Short,
    /// The magic number is wrong.
    #[error("no log of writes: the magic number is {0:#x}")]
    Magic(u64),
    /// The version is unknown.
    #[error("version {0} of the log is not known")]
    Version(u64),
    /// The sector size is invalid.
    #[error("sector size {0} is not a power of two from 512 to 65536")]
    SectorSize(u32),
    /// The superblock counts more entries than fit the log.
    #[error("entry {index} of {entries} lies beyond the end of the log ({len} bytes)")]
    Beyond {
        /// Number of the entry, from 0.
        index: u64,
        /// Number of entries in the superblock.
        entries: u64,
        /// Length of the log in bytes.
        len: u64,
    },
    /// The entry has unknown flags.
    #[error("entry {index} has unknown flags {flags:#x}")]
    Flags {
        /// Number of the entry, from 0.
        index: u64,
        /// Flags of the entry.
        flags: u64,
    },
    /// The range on the device is invalid.
    #[error("entry {index} covers sectors {sector} +{sectors}, beyond any device")]
    Range {
        /// Number of the entry, from 0.
        index: u64,
        /// First sector of the entry.
        sector: u64,
        /// Length of the entry in sectors.
        sectors: u64,
    },
    /// The text of a mark does not fit in its sector.
    #[error("entry {index} is a mark of {len} bytes, more than a sector holds")]
    Mark {
        /// Number of the entry, from 0.
        index: u64,
        /// The length in the entry, in bytes.
        len: u64,
    },
}

/// The superblock of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogWritesSuperblock {
    /// Number of entries in the log.
    pub entries: u64,
    /// Bytes per sector: the logical block size of the logged device.
    pub sector_size: u32,
}

impl LogWritesSuperblock {
    /// Writes the superblock to the start of `sector` and clears the rest.
    ///
    /// # Panics
    /// If `sector` is shorter than [`SUPER_LEN`].
    pub fn encode(&self, sector: &mut [u8]) {
        sector[0..8].copy_from_slice(&MAGIC.to_le_bytes());
        sector[8..16].copy_from_slice(&VERSION.to_le_bytes());
        sector[16..24].copy_from_slice(&self.entries.to_le_bytes());
        sector[24..SUPER_LEN].copy_from_slice(&self.sector_size.to_le_bytes());
        sector[SUPER_LEN..].fill(0);
    }

    /// Reads the superblock from the start of `sector`.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn decode(sector: &[u8]) -> Result<LogWritesSuperblock, LogWritesError> {
        let wrong = |offset, fault| Err(LogWritesError { offset, fault });
        if sector.len() < SUPER_LEN {
            return wrong(0, LogWritesErrorKind::Short);
        }
        let magic = u64_at(sector, 0);
        if magic != MAGIC {
            return wrong(0, LogWritesErrorKind::Magic(magic));
        }
        let version = u64_at(sector, 8);
        if version != VERSION {
            return wrong(8, LogWritesErrorKind::Version(version));
        }
        let sector_size = u32_at(sector, 24);
        if !sector_size.is_power_of_two() || !(SECTOR_SIZE_MIN..=SECTOR_SIZE_MAX).contains(&sector_size) {
            return wrong(24, LogWritesErrorKind::SectorSize(sector_size));
        }
        Ok(LogWritesSuperblock { entries: u64_at(sector, 16), sector_size })
    }
}

/// The header of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct LogWritesEntryHeader {
    /// First sector on the device.
    pub sector: u64,
    /// Length in sectors; 0 for a bare flush and for a mark.
    pub sectors: u64,
    /// The kind of the entry.
    pub flags: EntryFlags,
    /// Bytes of a mark's text; otherwise 0.
    pub data_len: u64,
}

impl LogWritesEntryHeader {
    /// Sectors of data that follow the sector of the entry.
    #[must_use]
    pub fn data_sectors(&self) -> u64 {
        if self.flags.intersects(EntryFlags::DISCARD | EntryFlags::MARK) { 0 } else { self.sectors }
    }

    /// Writes the entry and then the text of a mark to the start of `sector`, and clears the rest.
    ///
    /// # Panics
    /// If `sector` is too short for both.
    pub fn encode(&self, text: &[u8], sector: &mut [u8]) {
        sector[0..8].copy_from_slice(&self.sector.to_le_bytes());
        sector[8..16].copy_from_slice(&self.sectors.to_le_bytes());
        sector[16..24].copy_from_slice(&self.flags.bits().to_le_bytes());
        sector[24..HEADER_LEN].copy_from_slice(&self.data_len.to_le_bytes());
        sector[HEADER_LEN..HEADER_LEN + text.len()].copy_from_slice(text);
        sector[HEADER_LEN + text.len()..].fill(0);
    }
}

/// An entry of a log, with its position and that of its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogWritesEntry {
    /// Number of the entry, from 0.
    pub index: u64,
    /// Byte offset in the log of the entry's sector.
    pub offset: u64,
    /// The header of the entry.
    pub entry: LogWritesEntryHeader,
    /// The text of a mark.
    pub mark: Option<Vec<u8>>,
    /// The bytes of the log with the data; empty if there is none.
    pub data: Range<u64>,
    /// The bytes of the device that the entry covers; empty for a bare flush and for a mark.
    pub range: Range<u64>,
}

/// A walk over a log. The caller reads one sector at [`LogWritesCursor::offset`] and passes it to
/// [`LogWritesCursor::step`].
#[derive(Clone, Debug)]
pub struct LogWritesCursor {
    head: LogWritesSuperblock,
    log_len: u64,
    index: u64,
    offset: u64,
}

impl LogWritesCursor {
    /// Starts at the first entry of a log of `log_len` bytes that begins with `first`.
    ///
    /// # Errors
    /// An invalid superblock.
    pub fn new(first: &[u8], log_len: u64) -> Result<LogWritesCursor, LogWritesError> {
        let head = LogWritesSuperblock::decode(first)?;
        Ok(LogWritesCursor { head, log_len, index: 0, offset: u64::from(head.sector_size) })
    }

    /// The superblock.
    #[must_use]
    pub fn superblock(&self) -> LogWritesSuperblock {
        self.head
    }

    /// The byte offset of the next entry; `None` after the last one. A whole sector can be read
    /// there.
    ///
    /// # Errors
    /// If the log is too short for the entry.
    pub fn offset(&self) -> Result<Option<u64>, LogWritesError> {
        if self.index == self.head.entries {
            return Ok(None);
        }
        let size = u64::from(self.head.sector_size);
        if self.offset.checked_add(size).is_none_or(|end| end > self.log_len) {
            return Err(self.beyond());
        }
        Ok(Some(self.offset))
    }

    fn beyond(&self) -> LogWritesError {
        let fault =
            LogWritesErrorKind::Beyond { index: self.index, entries: self.head.entries, len: self.log_len };
        LogWritesError { offset: self.offset, fault }
    }

    /// Decodes the sector at [`LogWritesCursor::offset`] and advances to the next entry.
    ///
    /// # Errors
    /// An invalid entry; the cursor then does not move.
    ///
    /// # Panics
    /// If `sector` is not exactly one sector.
    pub fn step(&mut self, sector: &[u8]) -> Result<LogWritesEntry, LogWritesError> {
        let size = u64::from(self.head.sector_size);
        assert_eq!(sector.len() as u64, size, "an entry is one sector");
        let (index, offset) = (self.index, self.offset);
        let wrong = |at, fault| LogWritesError { offset: offset + at, fault };
        let bits = u64_at(sector, 16);
        let flags = EntryFlags::from_bits(bits)
            .ok_or_else(|| wrong(16, LogWritesErrorKind::Flags { index, flags: bits }))?;
        let entry = LogWritesEntryHeader {
            sector: u64_at(sector, 0),
            sectors: u64_at(sector, 8),
            flags,
            data_len: u64_at(sector, 24),
        };
        let start = entry.sector.checked_mul(size);
        let end = entry.sector.checked_add(entry.sectors).and_then(|end| end.checked_mul(size));
        let (Some(start), Some(end)) = (start, end.filter(|&end| end <= i64::MAX as u64)) else {
            return Err(wrong(
                0,
                LogWritesErrorKind::Range { index, sector: entry.sector, sectors: entry.sectors },
            ));
        };
        let mark = if flags.contains(EntryFlags::MARK) {
            let room = &sector[HEADER_LEN..];
            let len = usize::try_from(entry.data_len).ok().filter(|&len| len <= room.len());
            let len =
                len.ok_or_else(|| wrong(24, LogWritesErrorKind::Mark { index, len: entry.data_len }))?;
            Some(room[..len].to_vec())
        } else {
            None
        };
        // No overflow: the range was checked, and `offset + size` is within the log.
        let data = offset + size..offset + size + entry.data_sectors() * size;
        if data.end > self.log_len {
            return Err(self.beyond());
        }
        self.index += 1;
        self.offset = data.end;
        let range = if mark.is_some() { 0..0 } else { start..end };
        Ok(LogWritesEntry { index, offset, entry, mark, data, range })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A log whose bytes were derived by hand from the kernel's structures: one write of a sector,
    /// one mark.
    fn by_hand() -> Vec<u8> {
        let mut log = vec![0; 4 * 512];
        log[..28].copy_from_slice(&[
            0x72, 0x68, 0x73, 0x77, 0x66, 0x73, 0x6a, 0, // "rhswfsj"
            1, 0, 0, 0, 0, 0, 0, 0, // version
            2, 0, 0, 0, 0, 0, 0, 0, // entries
            0, 2, 0, 0, // 512
        ]);
        log[512] = 8; // sector 8
        log[520] = 1; // one sector
        log[1024..1536].fill(0xa5);
        log[1536 + 16] = 8; // mark
        log[1536 + 24] = 4; // four bytes of text
        log[1536 + 32..1536 + 36].copy_from_slice(b"mkfs");
        log
    }

    fn walk(log: &[u8]) -> Result<Vec<LogWritesEntry>, LogWritesError> {
        let mut cursor = LogWritesCursor::new(&log[..log.len().min(512)], log.len() as u64)?;
        let size = cursor.superblock().sector_size as usize;
        let mut records = Vec::new();
        while let Some(at) = cursor.offset()? {
            records.push(cursor.step(&log[at as usize..at as usize + size])?);
        }
        Ok(records)
    }

    #[test]
    fn the_kernels_layout() {
        let records = walk(&by_hand()).unwrap();
        assert_eq!(records.len(), 2);
        assert_eq!((records[0].data.clone(), records[0].range.clone()), (1024..1536, 4096..4608));
        assert_eq!(records[1].mark.as_deref(), Some(&b"mkfs"[..]));
        assert_eq!(records[1].entry.flags.names(), "mark");

        let mut made = vec![0xff; 4 * 512];
        made[1024..1536].fill(0xa5);
        LogWritesSuperblock { entries: 2, sector_size: 512 }.encode(&mut made[..512]);
        LogWritesEntryHeader { sector: 8, sectors: 1, ..LogWritesEntryHeader::default() }
            .encode(b"", &mut made[512..1024]);
        LogWritesEntryHeader { flags: EntryFlags::MARK, data_len: 4, ..LogWritesEntryHeader::default() }
            .encode(b"mkfs", &mut made[1536..]);
        assert_eq!(made, by_hand());
    }

    #[test]
    fn refused_with_the_offset() {
        let mut log = by_hand();
        log[512 + 17] = 1;
        assert_eq!(walk(&log).unwrap_err().to_string(), "at byte 528: entry 0 has unknown flags 0x100");
        let mut log = by_hand();
        log[512 + 15] = 0x80;
        assert_eq!(
            walk(&log).unwrap_err().to_string(),
            "at byte 512: entry 0 covers sectors 8 +9223372036854775809, beyond any device"
        );
        let mut log = by_hand();
        log[16] = 3;
        assert_eq!(
            walk(&log).unwrap_err().to_string(),
            "at byte 2048: entry 2 of 3 lies beyond the end of the log (2048 bytes)"
        );
        let mut log = by_hand();
        log[1536 + 25] = 9;
        assert_eq!(
            walk(&log).unwrap_err().to_string(),
            "at byte 1560: entry 1 is a mark of 2308 bytes, more than a sector holds"
        );
        let mut log = by_hand();
        log[512 + 8] = 4;
        assert_eq!(
            walk(&log).unwrap_err().to_string(),
            "at byte 512: entry 0 of 2 lies beyond the end of the log (2048 bytes)"
        );
        let mut log = by_hand();
        log[24] = 1;
        assert_eq!(
            walk(&log).unwrap_err().to_string(),
            "at byte 24: sector size 513 is not a power of two from 512 to 65536"
        );
        log[8] = 2;
        assert_eq!(walk(&log).unwrap_err().to_string(), "at byte 8: version 2 of the log is not known");
        log[0] = 0;
        assert_eq!(
            walk(&log).unwrap_err().to_string(),
            "at byte 0: no log of writes: the magic number is 0x6a736677736800"
        );
        assert_eq!(
            walk(&log[..20]).unwrap_err().to_string(),
            "at byte 0: the log ends inside its superblock"
        );
    }

    proptest! {
        /// For any bytes, a walk ends, stays inside the log, and never panics.
        #[test]
        fn a_hostile_log_is_walked_or_refused(
            mut log in proptest::collection::vec(any::<u8>(), 0..6000),
            entries in any::<u64>(),
            small in any::<bool>(),
            believable in any::<bool>(),
        ) {
            if log.len() >= 512 && believable {
                let entries = if small { entries % 16 } else { entries };
                LogWritesSuperblock { entries, sector_size: 512 }.encode(&mut log[..512]);
                for header in log[512..].chunks_exact_mut(512) {
                    header[0..8].fill(0);
                    header[9..16].fill(0);
                    header[8] %= 3;
                    header[16] &= 31;
                    header[17..24].fill(0);
                }
            }
            crate::fuzz::fuzz_log_writes_cursor(&log);
        }

        /// An encoded entry is decoded to the same value.
        #[test]
        fn entries_round_trip(
            sector in 0..1u64 << 40,
            sectors in 0..8u64,
            flags in 0..32u64,
            text in proptest::collection::vec(any::<u8>(), 0..480),
        ) {
            let flags = EntryFlags::from_bits(flags).unwrap();
            let text = if flags.contains(EntryFlags::MARK) { text } else { Vec::new() };
            let entry = LogWritesEntryHeader { sector, sectors, flags, data_len: text.len() as u64 };
            let mut log = vec![0; 512 * 16];
            LogWritesSuperblock { entries: 1, sector_size: 512 }.encode(&mut log[..512]);
            entry.encode(&text, &mut log[512..1024]);
            let records = walk(&log).unwrap();
            prop_assert_eq!(records[0].entry, entry);
            prop_assert_eq!(records[0].mark.clone().unwrap_or_default(), text);
        }
    }
}
