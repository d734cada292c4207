//! Finds the data and holes of a regular file, from its file system (`SEEK_DATA`, `SEEK_HOLE`).
//!
//! The calls block. These count as data: a sector that is partly data, the part after the end of a
//! truncated file, data that is only in the page cache, and every range that the file system cannot
//! report. A block device reports no holes.

use rustix::fd::BorrowedFd;
use rustix::fs::{self, SeekFrom};
use rustix::io::Errno;
use udm_core::{ExtentKind, Extents, SECTOR_SIZE, Sector, Sectors};

/// Appends the extents of `len` sectors of the file from `from` on.
pub(super) fn append_file_extents(fd: BorrowedFd<'_>, from: Sector, len: Sectors, out: &mut Extents) {
    let end = from + len;
    let size = fs::fstat(fd).map_or(0, |stat| stat.st_size.max(0) as u64 / SECTOR_SIZE);
    let mut at = from;
    while at < end && !out.is_full() {
        // ENXIO: no data from here to the end of the file, so this is a hole. After the end, the
        // contents are unknown.
        let data = match fs::seek(fd, SeekFrom::Data(at.0 * SECTOR_SIZE)) {
            Ok(byte) => Sector(byte / SECTOR_SIZE),
            Err(Errno::NXIO) => Sector(size.max(at.0)),
            Err(_) => at,
        };
        let data = data.max(at).min(end);
        out.push(data - at, ExtentKind::Hole);
        if data == end {
            return;
        }
        let hole = match fs::seek(fd, SeekFrom::Hole(data.0 * SECTOR_SIZE)) {
            Ok(byte) => Sector(byte.div_ceil(SECTOR_SIZE)),
            Err(_) => end,
        };
        let hole = if hole <= data { end } else { hole.min(end) };
        out.push(hole - data, ExtentKind::Data);
        at = hole;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsFd;
    use std::os::unix::fs::FileExt;

    fn of(file: &std::fs::File, from: u64, len: u64) -> Vec<(u64, ExtentKind)> {
        let mut out = Extents::new(100);
        append_file_extents(file.as_fd(), Sector(from), Sectors(len), &mut out);
        out.list().iter().map(|e| (e.len.0, e.content)).collect()
    }

    #[test]
    fn holes_and_data() {
        use ExtentKind::{Data, Hole};
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 << 20).unwrap();
        assert_eq!(of(&file, 3, 5), [(5, Hole)]);
        file.write_all_at(&[1; 64 << 10], 1 << 20).unwrap();
        assert_eq!(of(&file, 0, 8192), [(2048, Hole), (128, Data), (6016, Hole)]);
        assert_eq!(of(&file, 2049, 10), [(10, Data)], "not synced, and known");
        assert_eq!(of(&file, 2175, 2), [(1, Data), (1, Hole)]);
        // The file was truncated: the missing part does not count as zeroes.
        file.set_len((1 << 20) + 65536).unwrap();
        assert_eq!(of(&file, 2048, 1000), [(1000, Data)]);
        assert_eq!(of(&file, 5000, 1000), [(1000, Data)]);
    }
}
