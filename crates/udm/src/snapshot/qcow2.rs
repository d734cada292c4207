//! Writes a qcow2 image, version 3, in one pass (`docs/interop/qcow2.rst` of QEMU).
//!
//! ```text
//! header | L1 table | data clusters, in the order of their arrival | L2 tables | refcounts
//! ```
//!
//! Each cluster of the file is used once, so the refcounts are written at the end, and the header
//! last: a file without its end is no image. A cluster that was never written reads as zeroes, or
//! as the backing file.

use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use udm_wire::qcow2::{EXT_BACKING_FORMAT, MAGIC, NAME_MAX};

/// Bytes of a cluster: QEMU's default.
pub(super) const CLUSTER: u64 = 1 << CLUSTER_BITS;
const CLUSTER_BITS: u32 = 16;

/// Entries of an L2 table, of 8 bytes.
const L2_ENTRIES: u64 = CLUSTER / 8;

/// Refcounts of 16 bits in a cluster.
const REFCOUNTS: u64 = CLUSTER / 2;
const REFCOUNT_ORDER: u32 = 4;

const VERSION: u32 = 3;
const HEADER_LEN: u32 = 104;

/// The cluster has one user, so it may be written in place.
const COPIED: u64 = 1 << 63;

/// The cluster reads as zeroes, whatever the backing file has.
const ZERO: u64 = 1;

/// The image below another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BackingFile {
    /// Its name as the image has it: absolute, or relative to the folder of the image.
    pub name: String,
    /// `raw` or `qcow2`.
    pub format: &'static str,
}

/// An image that is being written.
pub(super) struct Qcow2Writer {
    file: File,
    size: u64,
    backing: Option<BackingFile>,
    /// L2 tables, by their place in the L1 table: 8 bytes of memory per cluster of data.
    tables: BTreeMap<u64, Box<[u64]>>,
    /// The next free cluster of the file.
    next: u64,
}

impl Qcow2Writer {
    /// An image of `size` bytes in the empty `file`.
    ///
    /// # Errors
    /// The name of the backing file is too long.
    pub fn new(file: File, size: u64, backing: Option<BackingFile>) -> Result<Qcow2Writer> {
        let name = backing.as_ref().map_or("", |backing| &backing.name);
        ensure!(name.len() as u64 <= NAME_MAX, "{name}: a backing file's name has at most {NAME_MAX} bytes");
        let next = 1 + l1_clusters(size);
        Ok(Qcow2Writer { file, size, backing, tables: BTreeMap::new(), next })
    }

    /// Writes `data`, which begins at a cluster and ends at one or at the end of the image.
    /// Clusters of zeroes take no space.
    ///
    /// # Errors
    /// The system's.
    pub fn write(&mut self, at: u64, data: &[u8]) -> Result<()> {
        let first = at / CLUSTER;
        let clusters: Vec<&[u8]> = data.chunks(CLUSTER as usize).collect();
        let is_zero = |cluster: &[u8]| cluster.iter().all(|&byte| byte == 0);
        let mut start = 0;
        while start < clusters.len() {
            if is_zero(clusters[start]) {
                if self.backing.is_some() {
                    *self.entry(first + start as u64) = ZERO;
                }
                start += 1;
                continue;
            }
            let count = clusters[start..].iter().take_while(|cluster| !is_zero(cluster)).count();
            let place = self.allocate(count as u64);
            let from = start * CLUSTER as usize;
            let to = data.len().min(from + count * CLUSTER as usize);
            self.file.write_all_at(&data[from..to], place * CLUSTER)?;
            for n in 0..count as u64 {
                *self.entry(first + start as u64 + n) = ((place + n) * CLUSTER) | COPIED;
            }
            start += count;
        }
        Ok(())
    }

    fn allocate(&mut self, clusters: u64) -> u64 {
        let first = self.next;
        self.next += clusters;
        first
    }

    /// The L2 entry of a cluster of the image.
    fn entry(&mut self, cluster: u64) -> &mut u64 {
        let table = self.tables.entry(cluster / L2_ENTRIES);
        let table = table.or_insert_with(|| vec![0; L2_ENTRIES as usize].into());
        &mut table[(cluster % L2_ENTRIES) as usize]
    }

    /// Writes the tables and the header. The image is durable afterwards.
    ///
    /// # Errors
    /// The system's.
    pub fn finish(mut self) -> Result<File> {
        let l1_len = self.size.div_ceil(CLUSTER * L2_ENTRIES);
        let mut l1 = vec![0; l1_len as usize];
        for (place, table) in std::mem::take(&mut self.tables) {
            let cluster = self.allocate(1);
            self.write_numbers(cluster, &table)?;
            l1[place as usize] = (cluster * CLUSTER) | COPIED;
        }
        self.write_numbers(1, &l1)?;
        let (table, table_clusters) = self.write_refcounts()?;
        self.file.set_len(self.next * CLUSTER)?;
        self.file.sync_all()?;
        let header = self.header(l1_len, table, table_clusters)?;
        self.file.write_all_at(&header, 0)?;
        self.file.sync_all()?;
        Ok(self.file)
    }

    /// Writes 1 for each used cluster, those of the refcounts among them. Returns the first cluster
    /// and the length of the refcount table.
    fn write_refcounts(&mut self) -> Result<(u64, u64)> {
        let (mut blocks, mut table_clusters) = (0, 0);
        loop {
            let used = self.next + blocks + table_clusters;
            let needed = (used.div_ceil(REFCOUNTS), used.div_ceil(REFCOUNTS).div_ceil(L2_ENTRIES));
            if needed == (blocks, table_clusters) {
                break;
            }
            (blocks, table_clusters) = needed;
        }
        let table = self.allocate(table_clusters);
        let first = self.allocate(blocks);
        let places: Vec<u64> = (0..blocks).map(|n| (first + n) * CLUSTER).collect();
        self.write_numbers(table, &places)?;
        for n in 0..blocks {
            let used = self.next.saturating_sub(n * REFCOUNTS).min(REFCOUNTS);
            let counts = [0, 1].repeat(used as usize);
            self.file.write_all_at(&counts, (first + n) * CLUSTER)?;
        }
        Ok((table, table_clusters))
    }

    fn write_numbers(&self, cluster: u64, numbers: &[u64]) -> Result<()> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_be_bytes()).collect();
        Ok(self.file.write_all_at(&bytes, cluster * CLUSTER)?)
    }

    fn header(&self, l1_len: u64, table: u64, table_clusters: u64) -> Result<Vec<u8>> {
        let backing = self.backing.as_ref();
        let mut extensions = Vec::new();
        if let Some(BackingFile { format, .. }) = backing {
            extensions.extend(EXT_BACKING_FORMAT.to_be_bytes());
            extensions.extend((format.len() as u32).to_be_bytes());
            extensions.extend(format.as_bytes());
            extensions.resize(extensions.len().next_multiple_of(8), 0);
        }
        // The end of the extensions.
        extensions.extend([0; 8]);
        let name = backing.map_or("", |backing| &backing.name);
        let name_at = if name.is_empty() { 0 } else { u64::from(HEADER_LEN) + extensions.len() as u64 };
        let l1_len = u32::try_from(l1_len).context("the image is too long for qcow2")?;
        let mut out = Vec::new();
        out.extend(MAGIC);
        out.extend(VERSION.to_be_bytes());
        out.extend(name_at.to_be_bytes());
        out.extend([name.len() as u32, CLUSTER_BITS].map(u32::to_be_bytes).concat());
        out.extend(self.size.to_be_bytes());
        // Not encrypted.
        out.extend([0, l1_len].map(u32::to_be_bytes).concat());
        out.extend([CLUSTER, table * CLUSTER].map(u64::to_be_bytes).concat());
        // No snapshots of qcow2's own.
        out.extend([table_clusters as u32, 0].map(u32::to_be_bytes).concat());
        // Their place, and the features: incompatible, compatible, those that may be cleared.
        out.extend([0; 8 * 4]);
        out.extend([REFCOUNT_ORDER, HEADER_LEN].map(u32::to_be_bytes).concat());
        out.extend(extensions);
        out.extend(name.as_bytes());
        Ok(out)
    }
}

/// Clusters of the L1 table of an image of `size` bytes.
fn l1_clusters(size: u64) -> u64 {
    size.div_ceil(CLUSTER * L2_ENTRIES).div_ceil(L2_ENTRIES)
}

/// The virtual size of the qcow2 image that begins with `bytes`; `None` if they are no header of
/// one.
pub(super) fn image_size(bytes: &[u8]) -> Option<u64> {
    let is_image = bytes.starts_with(MAGIC);
    is_image.then(|| Some(u64::from_be_bytes(bytes.get(24..32)?.try_into().ok()?))).flatten()
}
