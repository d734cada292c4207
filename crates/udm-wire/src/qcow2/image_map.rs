//! Walks the two levels of tables of an image once, and returns its extents.
//!
//! A first table (L1) refers to second tables (L2) of one cluster each, and these to clusters of
//! data. Each second table belongs to one entry of the first, so the walk reads each of them once,
//! and ends.

use super::{EXTENTS_MAX, Qcow2Error, Qcow2Header, ReadImageBytes, TABLE_BYTES_MAX, be64};
use udm_core::{SECTOR_SIZE, Sector, Sectors};

/// Bits of table entries.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;

/// The data of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentSource {
    /// The image has nothing: the backing file has the data. Without one, zeroes.
    Backing,
    /// Zeroes.
    Zeroes,
    /// The file with the data has it as it is, from this sector on.
    Plain(Sector),
    /// One compressed cluster.
    Compressed(CompressedCluster),
}

/// The place of a compressed cluster: the descriptor of its table entry, 62 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompressedCluster(pub(super) u64);

impl CompressedCluster {
    /// Byte offset in the image, and the maximum length of the compressed data in bytes, which may
    /// exceed the end of the image.
    #[must_use]
    pub fn range(self, cluster_bits: u32) -> (u64, usize) {
        let offset_bits = 62 - (cluster_bits - 8);
        let offset = self.0 & ((1 << offset_bits) - 1);
        let sectors = self.0 >> offset_bits;
        (offset, ((sectors + 1) * SECTOR_SIZE - offset % SECTOR_SIZE) as usize)
    }
}

/// A run of sectors of one image with one source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageExtent {
    /// First sector of the disk.
    pub start: Sector,
    /// Length, above 0.
    pub len: Sectors,
    /// The data.
    pub source: ExtentSource,
}

/// Returns the extents of the disk in an image, in order and without gaps. `len` is the length of
/// the image in bytes. `data_len` is that of the file with its data, which is another one if the
/// header says so.
///
/// # Errors
/// * The image is damaged: a table or a cluster is not aligned, or is beyond the end of its file.
/// * The image has more extents or larger tables than allowed.
/// * `read` failed.
pub fn read_image_extents(
    header: &Qcow2Header,
    len: u64,
    data_len: u64,
    read: &mut ReadImageBytes<'_>,
) -> Result<Vec<ImageExtent>, Qcow2Error> {
    let mut walk = TableWalk { header, len, data_len, extents: Vec::new() };
    let cluster = header.cluster_size();
    let mut l1 = vec![0; (header.l1_entries * 8) as usize];
    read(header.l1_offset, &mut l1)?;
    let l1: Vec<u64> = l1.chunks_exact(8).map(|entry| be64(entry, 0)).collect();
    walk.check_second_tables(&l1)?;
    let mut table = vec![0; cluster as usize];
    let per_table = cluster / 8 * cluster;
    for (i, entry) in l1.iter().enumerate() {
        let start = i as u64 * per_table;
        if entry & OFFSET == 0 {
            walk.push(start, per_table, ExtentSource::Backing)?;
            continue;
        }
        read(entry & OFFSET, &mut table)?;
        for (j, entry) in table.chunks_exact(8).enumerate() {
            let at = start + j as u64 * cluster;
            if at >= header.size {
                break;
            }
            walk.push_cluster(at, be64(entry, 0))?;
        }
    }
    Ok(walk.extents)
}

struct TableWalk<'a> {
    header: &'a Qcow2Header,
    len: u64,
    data_len: u64,
    extents: Vec<ImageExtent>,
}

impl TableWalk<'_> {
    /// Checks that the second tables are in the image, aligned, and used once each.
    fn check_second_tables(&self, l1: &[u64]) -> Result<(), Qcow2Error> {
        let cluster = self.header.cluster_size();
        let mut tables = Vec::new();
        for entry in l1 {
            let offset = entry & OFFSET;
            if entry & !(OFFSET | COPIED) != 0 {
                return Err(Qcow2Error::damaged(format!("entry {entry:#x} in its first table")));
            }
            if offset == 0 {
                continue;
            }
            if !offset.is_multiple_of(cluster) {
                return Err(Qcow2Error::damaged(format!("a table at byte {offset}, which is not aligned")));
            }
            if offset + cluster > self.len {
                return Err(Qcow2Error::damaged(format!(
                    "a table at byte {offset} is beyond its end at byte {}",
                    self.len
                )));
            }
            tables.push(offset);
        }
        if tables.len() as u64 * cluster > TABLE_BYTES_MAX {
            return Err(Qcow2Error::unsupported(&format!(
                "{} bytes of tables, more than {TABLE_BYTES_MAX}",
                tables.len() as u64 * cluster
            )));
        }
        tables.sort_unstable();
        if let Some(twice) = tables.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Qcow2Error::damaged(format!("the table at byte {} is used twice", twice[0])));
        }
        Ok(())
    }

    /// Adds the cluster at byte `at` of the disk.
    fn push_cluster(&mut self, at: u64, entry: u64) -> Result<(), Qcow2Error> {
        let cluster = self.header.cluster_size();
        if entry & COMPRESSED != 0 {
            return self.push_compressed(at, entry);
        }
        let is_zero = entry & ZERO != 0;
        if entry & !(OFFSET | COPIED | ZERO) != 0 || is_zero && self.header.version < 3 {
            return Err(Qcow2Error::damaged(format!("entry {entry:#x} for byte {at} of the disk")));
        }
        let offset = entry & OFFSET;
        if is_zero {
            return self.push(at, cluster, ExtentSource::Zeroes);
        }
        // Offset 0 is a cluster only in an external file, and then the entry is marked.
        let has_data = offset != 0 || self.header.external_data && entry & COPIED != 0;
        if !has_data {
            return self.push(at, cluster, ExtentSource::Backing);
        }
        if !offset.is_multiple_of(cluster) {
            return Err(Qcow2Error::damaged(format!("data at byte {offset}, which is not aligned")));
        }
        // QEMU leaves the end of the last cluster out of the file; it reads as zeroes. An image
        // that ends elsewhere was cut.
        let there = self.data_len.saturating_sub(offset).min(cluster);
        let needed = cluster.min(self.header.size - at);
        if there < needed && (there == 0 || !there.is_multiple_of(SECTOR_SIZE)) {
            return Err(Qcow2Error::damaged(format!(
                "the data at byte {offset} is beyond the end of its file at byte {}",
                self.data_len
            )));
        }
        self.push(at, there, ExtentSource::Plain(Sector(offset / SECTOR_SIZE)))?;
        match there < needed {
            true => self.push(at + there, cluster - there, ExtentSource::Zeroes),
            false => Ok(()),
        }
    }

    fn push_compressed(&mut self, at: u64, entry: u64) -> Result<(), Qcow2Error> {
        let place = CompressedCluster(entry & !(COPIED | COMPRESSED));
        let (offset, _) = place.range(self.header.cluster_bits);
        if entry & COPIED != 0 || self.header.external_data {
            return Err(Qcow2Error::damaged(format!("entry {entry:#x} for byte {at} of the disk")));
        }
        if offset >= self.data_len {
            return Err(Qcow2Error::damaged(format!(
                "the compressed data at byte {offset} is beyond its end at byte {}",
                self.data_len
            )));
        }
        self.push(at, self.header.cluster_size(), ExtentSource::Compressed(place))
    }

    /// Adds `bytes` of the disk from byte `at` on, up to the end of the disk. An extent that
    /// continues the last one is joined with it.
    fn push(&mut self, at: u64, bytes: u64, source: ExtentSource) -> Result<(), Qcow2Error> {
        let end = (at + bytes).min(self.header.size / SECTOR_SIZE * SECTOR_SIZE);
        if end <= at {
            return Ok(());
        }
        let (start, len) = (Sector(at / SECTOR_SIZE), Sectors((end - at) / SECTOR_SIZE));
        if let Some(last) = self.extents.last_mut() {
            let joins = match (last.source, source) {
                (ExtentSource::Plain(before), ExtentSource::Plain(now)) => before + last.len == now,
                (ExtentSource::Compressed(_), _) => false,
                (before, now) => before == now,
            };
            if joins {
                last.len += len;
                return Ok(());
            }
        }
        if self.extents.len() == EXTENTS_MAX {
            return Err(too_many_extents());
        }
        self.extents.push(ImageExtent { start, len, source });
        Ok(())
    }
}

/// The error for a map with too many extents.
pub(super) fn too_many_extents() -> Qcow2Error {
    Qcow2Error::unsupported(&format!("its map has more than {EXTENTS_MAX} pieces"))
}
