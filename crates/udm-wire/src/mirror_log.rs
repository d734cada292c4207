//! The log of a mirror on a device: which regions are the same in both devices for sure.
//!
//! ```text
//!  sector 0     the kernel's header: magic, version, number of regions
//!  sector 1     udm's header: size, region size and devices of the mirror, with a checksum
//!  sector 2 ..  the kernel's bitmap: a bit per region, 1 if the region is clean
//!  next 4 KiB   the bitmap again, in sectors with a checksum
//! ```
//!
//! A region is clean if both bitmaps say so. So a sector that is damaged, or that only one of two
//! writes has reached, costs a copy and no data. The kernel keeps udm's sectors, and does not
//! change them; a log that the kernel made has only its own parts.
//!
//! Source of the kernel's part: its behaviour (drivers/md/dm-log.c: magic `MiRr`, version 2, bits
//! at sector 2, little-endian).

use std::fmt;
use udm_core::{SECTOR_SIZE, Sector, Sectors};

/// The first number of a log.
const MAGIC: u32 = 0x4d69_5272;

/// The version that is written; version 1 is the same on little-endian machines.
const VERSION: u32 = 2;

/// The begin of udm's header.
const OWN_MAGIC: &[u8; 8] = b"udm-mlog";
const OWN_VERSION: u32 = 1;

/// Bytes of a device name that a log keeps; its length and checksum are of the whole name.
const NAME_MAX: usize = 220;

/// Bytes of a sector.
const SECTOR: usize = SECTOR_SIZE as usize;

/// Bytes of the unit in which logs are written.
pub const UNIT_LEN: usize = 4096;

/// Sectors of a unit.
pub const UNIT: Sectors = Sectors(UNIT_LEN as u64 / SECTOR_SIZE);

/// The first sector of the kernel's bitmap.
const BITS_START: u64 = 2;

/// Regions per sector of the kernel's bitmap.
const BITS: u64 = SECTOR_SIZE * 8;

/// Regions per sector with a checksum, and their words.
const CHECKED_WORDS: u64 = 62;
const CHECKED_BITS: u64 = CHECKED_WORDS * 64;

/// Bytes of the two headers.
pub const HEADERS_LEN: usize = 2 * SECTOR;

/// Where the parts of a log are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MirrorLogLayout {
    regions: u64,
}

impl MirrorLogLayout {
    /// The layout of a log of `regions` regions.
    #[must_use]
    pub const fn new(regions: u64) -> MirrorLogLayout {
        MirrorLogLayout { regions }
    }

    /// Bytes that the kernel needs.
    #[must_use]
    pub const fn kernel_bytes(self) -> u64 {
        BITS_START * SECTOR_SIZE + self.regions.next_multiple_of(32) / 8
    }

    const fn checked_start(self) -> u64 {
        (BITS_START + self.regions.div_ceil(BITS)).next_multiple_of(UNIT.0)
    }

    /// Number of sectors with checksums.
    const fn checked_sectors(self) -> u64 {
        self.regions.div_ceil(CHECKED_BITS)
    }

    /// The size of a log: whole units.
    #[must_use]
    pub const fn sectors(self) -> Sectors {
        Sectors((self.checked_start() + self.checked_sectors()).next_multiple_of(UNIT.0))
    }

    /// Number of units.
    #[must_use]
    pub const fn units(self) -> u64 {
        self.sectors().0 / UNIT.0
    }

    /// The units with the two bits of a region.
    #[must_use]
    pub const fn units_of(self, region: u64) -> [u64; 2] {
        let checked = self.checked_start() + region / CHECKED_BITS;
        [(BITS_START + region / BITS) / UNIT.0, checked / UNIT.0]
    }

    /// Encodes a unit. `word` returns 64 bits of the map, by their number; it is called for words
    /// of existing regions only.
    pub fn encode_unit(
        self,
        unit: u64,
        headers: &[u8; HEADERS_LEN],
        word: &dyn Fn(u64) -> u64,
        out: &mut [u8; UNIT_LEN],
    ) {
        out.fill(0);
        for (index, out) in out.chunks_exact_mut(SECTOR).enumerate() {
            let sector = unit * UNIT.0 + index as u64;
            match sector {
                0 => out.copy_from_slice(&headers[..SECTOR]),
                1 => out.copy_from_slice(&headers[SECTOR..]),
                _ if sector < self.checked_start() => self.encode_words(sector - BITS_START, BITS, word, out),
                _ if sector < self.checked_start() + self.checked_sectors() => {
                    let at = sector - self.checked_start();
                    self.encode_words(at, CHECKED_BITS, word, &mut out[16..]);
                    out[4..12].copy_from_slice(&at.to_le_bytes());
                    let checksum = crc32c::crc32c(&out[4..]);
                    out[..4].copy_from_slice(&checksum.to_le_bytes());
                }
                _ => {}
            }
        }
    }

    /// Encodes the words of a sector with `bits` bits.
    fn encode_words(self, at: u64, bits: u64, word: &dyn Fn(u64) -> u64, out: &mut [u8]) {
        let words = self.regions.div_ceil(64);
        let first = at * bits / 64;
        for (index, out) in out.chunks_exact_mut(8).enumerate() {
            let index = first + index as u64;
            if index < words && index < first + bits / 64 {
                out.copy_from_slice(&word(index).to_le_bytes());
            }
        }
    }

    /// Reads the map of a whole log: calls `found` with each word of clean bits, in order. Returns
    /// the number of sectors whose checksum is wrong; their regions are not clean. With `has_own`
    /// false, the log has the kernel's bitmap only.
    pub fn decode(self, log: &[u8], has_own: bool, mut found: impl FnMut(u64)) -> u64 {
        let sector = |at: u64| log.get(at as usize * SECTOR..(at as usize + 1) * SECTOR).unwrap_or_default();
        let word = |bytes: &[u8], at: u64| {
            let at = at as usize * 8;
            bytes.get(at..at + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
        };
        let (mut bad, mut checked) = (0, &[][..]);
        for index in 0..self.regions.div_ceil(64) {
            let mut bits = word(sector(BITS_START + index / (BITS / 64)), index % (BITS / 64));
            if has_own {
                let at = index / CHECKED_WORDS;
                if index % CHECKED_WORDS == 0 {
                    checked = sector(self.checked_start() + at);
                    let is_intact = checked.len() == SECTOR
                        && u32_at(checked, 0) == crc32c::crc32c(&checked[4..])
                        && u64_at(checked, 4) == at;
                    if !is_intact {
                        // A sector of zeroes was never written.
                        bad += u64::from(checked.iter().any(|byte| *byte != 0));
                        checked = &[];
                    }
                }
                bits &= word(checked.get(16..).unwrap_or_default(), index % CHECKED_WORDS);
            }
            let left = self.regions - index * 64;
            found(if left < 64 { bits & ((1 << left) - 1) } else { bits });
        }
        bad
    }
}

/// A device of a mirror, as its log names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorLogLeg {
    /// The begin of the name.
    name: String,
    /// Length and checksum of the whole name.
    len: u16,
    checksum: u32,
    start: Sector,
}

impl MirrorLogLeg {
    /// A device from `start` on.
    #[must_use]
    pub fn new(name: &str, start: Sector) -> MirrorLogLeg {
        let most = NAME_MAX.min(name.len());
        let kept = (0..=most).rev().find(|at| name.is_char_boundary(*at)).unwrap_or_default();
        let len = u16::try_from(name.len()).unwrap_or(u16::MAX);
        MirrorLogLeg { name: name[..kept].to_owned(), len, checksum: crc32c::crc32c(name.as_bytes()), start }
    }
}

impl fmt::Display for MirrorLogLeg {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let more = if self.name.len() < usize::from(self.len) { "..." } else { "" };
        // A name that a file brings must not end the line.
        let name: String = self.name.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        write!(out, "{name}{more} from sector {}", self.start)
    }
}

/// The mirror of a log that udm made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorLogOwner {
    /// The size of the mirror.
    pub len: Sectors,
    /// The size of a region.
    pub region: Sectors,
    /// The source and the destination.
    pub legs: [MirrorLogLeg; 2],
}

/// The headers of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorLogHeader {
    /// Number of regions.
    pub regions: u64,
    /// The mirror; `None` for a log that the kernel made.
    pub owner: Option<MirrorLogOwner>,
}

/// Why a device has no log that can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirrorLogError {
    /// It has other data.
    OtherData,
    /// Its version is not known.
    Version(u32),
    /// udm's header has a wrong checksum.
    Damaged,
}

impl fmt::Display for MirrorLogError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MirrorLogError::OtherData => out.write_str("it has other data"),
            MirrorLogError::Version(version) => {
                write!(out, "incompatible disk log version {version}: expected {VERSION}")
            }
            MirrorLogError::Damaged => out.write_str("its header is damaged"),
        }
    }
}

impl std::error::Error for MirrorLogError {}

impl MirrorLogHeader {
    /// Encodes both sectors.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADERS_LEN] {
        let mut bytes = [0; HEADERS_LEN];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.regions.to_le_bytes());
        let Some(owner) = &self.owner else { return bytes };
        let own = &mut bytes[SECTOR..];
        own[..8].copy_from_slice(OWN_MAGIC);
        own[8..12].copy_from_slice(&OWN_VERSION.to_le_bytes());
        own[16..24].copy_from_slice(&owner.region.0.to_le_bytes());
        own[24..32].copy_from_slice(&owner.len.0.to_le_bytes());
        for (at, leg) in owner.legs.iter().enumerate() {
            own[32 + 8 * at..][..8].copy_from_slice(&leg.start.0.to_le_bytes());
            own[48 + 4 * at..][..4].copy_from_slice(&leg.checksum.to_le_bytes());
            own[56 + 2 * at..][..2].copy_from_slice(&leg.len.to_le_bytes());
            own[64 + NAME_MAX * at..][..leg.name.len()].copy_from_slice(leg.name.as_bytes());
        }
        let checksum = crc32c::crc32c(own);
        own[12..16].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Decodes both sectors; `None` if they are zeroes.
    ///
    /// # Errors
    /// There is no log that can be used.
    pub fn decode(bytes: &[u8; HEADERS_LEN]) -> Result<Option<MirrorLogHeader>, MirrorLogError> {
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        if u32_at(bytes, 0) != MAGIC {
            return Err(MirrorLogError::OtherData);
        }
        match u32_at(bytes, 4) {
            1 | VERSION => {}
            other => return Err(MirrorLogError::Version(other)),
        }
        let owner = decode_owner(&bytes[SECTOR..])?;
        Ok(Some(MirrorLogHeader { regions: u64_at(bytes, 8), owner }))
    }
}

fn decode_owner(own: &[u8]) -> Result<Option<MirrorLogOwner>, MirrorLogError> {
    if own.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    let mut unsigned = own.to_vec();
    unsigned[12..16].fill(0);
    if own[..8] != *OWN_MAGIC || u32_at(own, 12) != crc32c::crc32c(&unsigned) {
        return Err(MirrorLogError::Damaged);
    }
    if u32_at(own, 8) != OWN_VERSION {
        return Err(MirrorLogError::Version(u32_at(own, 8)));
    }
    let leg = |at: usize| {
        let len = u16::from_le_bytes([own[56 + 2 * at], own[57 + 2 * at]]);
        let kept = &own[64 + NAME_MAX * at..][..usize::from(len).min(NAME_MAX)];
        // Cut inside of a character, or damaged and signed: the checksum of the name decides.
        let kept = kept.split(|byte| *byte == 0).next().unwrap_or_default();
        let name = String::from_utf8(kept.to_vec()).map_err(|_| MirrorLogError::Damaged)?;
        let (checksum, start) = (u32_at(own, 48 + 4 * at), Sector(u64_at(own, 32 + 8 * at)));
        Ok(MirrorLogLeg { name, len, checksum, start })
    };
    let (region, len) = (Sectors(u64_at(own, 16)), Sectors(u64_at(own, 24)));
    Ok(Some(MirrorLogOwner { len, region, legs: [leg(0)?, leg(1)?] }))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().copied().map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().copied().map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(name: &str) -> MirrorLogHeader {
        let legs = [MirrorLogLeg::new(name, Sector(3)), MirrorLogLeg::new("/b", Sector(0))];
        let owner = MirrorLogOwner { len: Sectors(100), region: Sectors(8), legs };
        MirrorLogHeader { regions: 13, owner: Some(owner) }
    }

    #[test]
    fn headers_are_read_back_and_name_their_devices() {
        let long = format!("nbd://{}ä", "x".repeat(213));
        for name in ["/a", "", long.as_str(), &format!("{long}{long}")] {
            let header = header(name);
            assert_eq!(MirrorLogHeader::decode(&header.encode()), Ok(Some(header.clone())), "{name}");
            assert_ne!(header.owner.unwrap().legs[0], MirrorLogLeg::new(&format!("{name}y"), Sector(3)));
        }
        assert_eq!(MirrorLogHeader::decode(&[0; HEADERS_LEN]), Ok(None));
        let kernel = MirrorLogHeader { regions: 5, owner: None };
        assert_eq!(kernel.encode()[..4], *b"rRiM");
        assert_eq!(MirrorLogHeader::decode(&kernel.encode()), Ok(Some(kernel)));
    }

    #[test]
    fn bad_headers_are_refused() {
        let change = |at: usize, to: u8| {
            let mut bytes = header("/a").encode();
            assert_ne!(bytes[at], to);
            bytes[at] = to;
            MirrorLogHeader::decode(&bytes).unwrap_err().to_string()
        };
        assert_eq!(change(0, 1), "it has other data");
        assert_eq!(change(4, 3), "incompatible disk log version 3: expected 2");
        for at in [SECTOR, SECTOR + 8, SECTOR + 16, SECTOR + 64, SECTOR + 511] {
            assert_eq!(change(at, 0xee), "its header is damaged");
        }
        let mut one = MirrorLogHeader { regions: 5, owner: None }.encode();
        one[4] = 1;
        assert!(MirrorLogHeader::decode(&one).is_ok(), "version 1 has the same bits");
    }

    #[test]
    fn a_region_is_clean_only_if_both_bitmaps_say_so() {
        let layout = MirrorLogLayout::new(9000);
        assert_eq!((layout.sectors(), layout.kernel_bytes()), (Sectors(16), 1024 + 1128));
        let clean = |region: u64| region.is_multiple_of(3) || region > 8900;
        let word = |index: u64| (0..64).map(|bit| u64::from(clean(index * 64 + bit)) << bit).sum();
        let headers = header("/a").encode();
        let mut log = vec![0; layout.sectors().bytes() as usize];
        for (unit, out) in log.as_chunks_mut().0.iter_mut().enumerate() {
            layout.encode_unit(unit as u64, &headers, &word, out);
        }
        let read = |log: &[u8], has_own| {
            let mut clean = Vec::new();
            let bad =
                layout.decode(log, has_own, |word| clean.extend((0..64).map(|bit| word >> bit & 1 == 1)));
            assert!(clean[9000..].iter().all(|clean| !clean), "there are no such regions");
            (bad, clean)
        };
        let (bad, found) = read(&log, true);
        assert!(bad == 0 && (0..9000).all(|region| found[region as usize] == clean(region)));
        assert_eq!(read(&log, false).1, found, "the kernel reads the same");
        assert_eq!(layout.units_of(8999), [0, 1]);
        // A bit that only one of the bitmaps has.
        log[1024] ^= 2;
        assert!(!read(&log, true).1[1] && read(&log, false).1[1]);
        log[1024] ^= 3;
        assert!(!read(&log, true).1[0]);
        log[1024] ^= 1;
        // Damage in the second sector with checksums.
        log[8 * SECTOR + SECTOR + 100] ^= 1;
        let (bad, found) = read(&log, true);
        assert!(
            bad == 1
                && (0..9000).all(|region| {
                    found[region as usize] == (clean(region) && !(3968..7936).contains(&region))
                })
        );
    }

    proptest::proptest! {
        #[test]
        fn any_bytes(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..3 * UNIT_LEN), is_log: bool) {
            let mut bytes = bytes;
            if is_log {
                bytes.splice(..0, header("/a").encode());
            }
            crate::fuzz::fuzz_mirror_log(&bytes);
        }
    }
}
