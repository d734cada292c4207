//! Sectors filled with one repeated number, the stamp.

use std::ops::Range;
use udm_core::Segments;

/// Bytes in a sector.
const SECTOR: usize = udm_core::SECTOR_SIZE as usize;

/// Returns the number that fills `sector`, or `None` if the content differs.
#[must_use]
pub fn read_sector_stamp(sector: &[u8]) -> Option<u64> {
    let (first, rest) = sector.split_first_chunk::<8>()?;
    // Each word is the next one. A single comparison: a loop over words is most of the time of a
    // world without optimization.
    (*rest == sector[..rest.len()]).then(|| u64::from_le_bytes(*first))
}

/// Maximum number of bytes that may differ from the stamp: one changed by a write, and one by a
/// read.
const BLEMISHES_MAX: usize = 2;

/// Returns the number that fills `sector` except for up to two bytes, or `None` if more bytes
/// differ.
#[must_use]
pub fn read_damaged_sector_stamp(sector: &[u8]) -> Option<u64> {
    let word = |i: usize| u64::from_le_bytes(sector[8 * i..8 * i + 8].try_into().unwrap_or_default());
    let votes = |stamp: u64| (0..5).filter(|i| word(*i) == stamp).count();
    let stamp = (0..5).map(word).max_by_key(|w| votes(*w))?;
    let odd = sector.iter().zip(stamp.to_le_bytes().iter().cycle()).filter(|(a, b)| a != b).count();
    (odd <= BLEMISHES_MAX).then_some(stamp)
}

/// Fills `sector` with `stamp`.
pub fn fill_sector_with_stamp(sector: &mut [u8], stamp: u64) {
    sector.as_chunks_mut().0.fill(stamp.to_le_bytes());
}

/// Calls `each` with the index and stamp of every sector of `data`. A sector may span several
/// buffers.
pub fn for_each_sector_stamp(data: &Segments, mut each: impl FnMut(u64, Option<u64>)) {
    for_each_sector(data, |i, bytes| each(i, read_sector_stamp(bytes)));
}

/// Calls `each` with the index and bytes of every sector of `data`.
pub fn for_each_sector(data: &Segments, mut each: impl FnMut(u64, &[u8])) {
    let mut part = [0; SECTOR];
    let (mut have, mut index) = (0, 0);
    data.consume(0, usize::MAX, |_, piece| {
        let mut rest = piece;
        if have > 0 {
            let n = rest.len().min(SECTOR - have);
            part[have..have + n].copy_from_slice(&rest[..n]);
            (have, rest) = (have + n, &rest[n..]);
            if have < SECTOR {
                return;
            }
            each(index, &part);
            index += 1;
        }
        let whole = rest.chunks_exact(SECTOR);
        let tail = whole.remainder();
        for sector in whole {
            each(index, sector);
            index += 1;
        }
        part[..tail.len()].copy_from_slice(tail);
        have = tail.len();
    });
}

/// Copies `bytes` into sector `index` of `data`.
pub fn copy_bytes_to_sector(data: &mut Segments, index: u64, bytes: &[u8]) {
    data.copy_from_at(index as usize * SECTOR, bytes);
}

/// Fills each sector of `data` in the range `which` with the stamp that `each` returns.
pub fn fill_sectors_with_stamps(data: &mut Segments, which: Range<u64>, mut each: impl FnMut(u64) -> u64) {
    let (mut at, mut index, mut stamp) = (0, which.start, 0u64);
    let from = usize::try_from(which.start).unwrap_or(usize::MAX).saturating_mul(SECTOR);
    let len = usize::try_from(which.end - which.start).unwrap_or(usize::MAX).saturating_mul(SECTOR);
    data.produce(from, len, |_, piece| {
        let mut rest = piece;
        while !rest.is_empty() {
            if at == 0 {
                stamp = each(index);
            }
            let n = rest.len().min(SECTOR - at);
            let (now, later) = rest.split_at_mut(n);
            if n == SECTOR {
                fill_sector_with_stamp(now, stamp);
            } else {
                for (i, b) in now.iter_mut().enumerate() {
                    *b = stamp.to_le_bytes()[(at + i) % 8];
                }
            }
            at = (at + n) % SECTOR;
            index += u64::from(at == 0);
            rest = later;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_core::Buf;

    #[test]
    fn a_blemish_hides_no_stamp() {
        let mut data = Segments::new();
        for len in [100, 924] {
            data.push(Buf::zeroed(len));
        }
        let mut bytes = 0x0102_0304_0506_0708_u64.to_le_bytes().repeat(64);
        (bytes[0], bytes[511]) = (9, 9);
        copy_bytes_to_sector(&mut data, 1, &bytes);
        let mut seen = Vec::new();
        for_each_sector(&data, |_, got| seen.push((read_sector_stamp(got), read_damaged_sector_stamp(got))));
        assert_eq!(seen, [(Some(0), Some(0)), (None, Some(0x0102_0304_0506_0708))]);
        bytes[77] = 1;
        assert_eq!(read_damaged_sector_stamp(&bytes), None);
    }

    #[test]
    fn sectors_across_odd_pieces() {
        let mut data = Segments::new();
        for len in [100, 700, 512, 224 + 512] {
            data.push(Buf::zeroed(len));
        }
        fill_sectors_with_stamps(&mut data, 0..4, |i| 1000 + i);
        let mut seen = Vec::new();
        for_each_sector_stamp(&data, |i, s| seen.push((i, s)));
        assert_eq!(seen, [(0, Some(1000)), (1, Some(1001)), (2, Some(1002)), (3, Some(1003))]);
        data.iter_mut().next().unwrap()[99] ^= 1;
        for_each_sector_stamp(&data, |i, s| assert_eq!(s.is_none(), i == 0));
    }
}
