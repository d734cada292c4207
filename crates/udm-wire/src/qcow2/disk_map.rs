//! The map of a disk: its extents over all files of a backing chain, compact and searchable.

use super::image_map::{CompressedCluster, ExtentSource, ImageExtent, too_many_extents};
use super::{EXTENTS_MAX, Qcow2Error};
use udm_core::{Sector, Sectors};

/// The data of a range of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskExtent {
    /// Zeroes.
    Zeroes,
    /// File number `file` has the data as it is, from sector `sector` on.
    Plain {
        /// Index of the file.
        file: u8,
        /// First sector in the file.
        sector: Sector,
    },
    /// A part of one compressed cluster of file number `file`.
    Compressed {
        /// Index of the file.
        file: u8,
        /// The place of the cluster.
        cluster: CompressedCluster,
    },
}

/// A range of a disk within one extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskRange {
    /// First sector.
    pub start: Sector,
    /// Sectors to the end of the extent, above 0.
    pub len: Sectors,
    /// The data, from `start` on.
    pub extent: DiskExtent,
}

/// The extents of a disk in order, 16 bytes each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskExtentMap {
    size: Sectors,
    extents: Vec<PackedExtent>,
}

/// The first sector in the lower 56 bits and the file above; the source in the lower 62 bits and
/// its kind above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PackedExtent {
    start_and_file: u64,
    source: u64,
}

const START_BITS: u32 = 56;
const START: u64 = (1 << START_BITS) - 1;
const SOURCE_BITS: u32 = 62;
const SOURCE: u64 = (1 << SOURCE_BITS) - 1;
const ZEROES: u64 = 0;
const PLAIN: u64 = 1;
const COMPRESSED: u64 = 2;

impl PackedExtent {
    fn new(start: Sector, extent: DiskExtent) -> PackedExtent {
        let (file, kind, source) = match extent {
            DiskExtent::Zeroes => (0, ZEROES, 0),
            DiskExtent::Plain { file, sector } => (file, PLAIN, sector.0),
            DiskExtent::Compressed { file, cluster } => (file, COMPRESSED, cluster.0),
        };
        let start_and_file = start.0 | u64::from(file) << START_BITS;
        PackedExtent { start_and_file, source: source | kind << SOURCE_BITS }
    }

    fn start(self) -> u64 {
        self.start_and_file & START
    }

    fn extent(self) -> DiskExtent {
        let file = (self.start_and_file >> START_BITS) as u8;
        let source = self.source & SOURCE;
        match self.source >> SOURCE_BITS {
            PLAIN => DiskExtent::Plain { file, sector: Sector(source) },
            COMPRESSED => DiskExtent::Compressed { file, cluster: CompressedCluster(source) },
            _ => DiskExtent::Zeroes,
        }
    }
}

impl DiskExtentMap {
    /// The map of a raw file of `size`, as file number `file`.
    #[must_use]
    pub fn raw(size: Sectors, file: u8) -> DiskExtentMap {
        let whole = PackedExtent::new(Sector(0), DiskExtent::Plain { file, sector: Sector(0) });
        let extents = if size == Sectors::ZERO { Vec::new() } else { vec![whole] };
        DiskExtentMap { size, extents }
    }

    /// The map of a disk of `size` with the extents of an image whose data is in file number
    /// `file`, over the map of its backing file.
    ///
    /// # Errors
    /// The map has more than [`EXTENTS_MAX`] extents.
    pub fn over(
        image: &[ImageExtent],
        size: Sectors,
        file: u8,
        backing: Option<&DiskExtentMap>,
    ) -> Result<DiskExtentMap, Qcow2Error> {
        let mut map = DiskExtentMap { size, extents: Vec::new() };
        for own in image {
            match own.source {
                ExtentSource::Zeroes => map.push(own.start, DiskExtent::Zeroes)?,
                ExtentSource::Plain(sector) => map.push(own.start, DiskExtent::Plain { file, sector })?,
                ExtentSource::Compressed(cluster) => {
                    map.push(own.start, DiskExtent::Compressed { file, cluster })?;
                }
                ExtentSource::Backing => map.push_backing(own, backing)?,
            }
        }
        Ok(map)
    }

    /// Adds the extents of the backing file in the range of `own`; zeroes beyond its end.
    fn push_backing(&mut self, own: &ImageExtent, backing: Option<&DiskExtentMap>) -> Result<(), Qcow2Error> {
        let (mut at, end) = (own.start, own.start + own.len);
        let backing_end = backing.map_or(Sector(0), |backing| Sector(backing.size.0)).min(end);
        while let Some(backing) = backing
            && at < backing_end
        {
            let range = backing.range(at);
            self.push(at, range.extent)?;
            at += range.len;
        }
        if backing_end < end {
            self.push(backing_end.max(own.start), DiskExtent::Zeroes)?;
        }
        Ok(())
    }

    /// Adds an extent that ends at the start of the next one. Compressed clusters are never joined.
    fn push(&mut self, start: Sector, extent: DiskExtent) -> Result<(), Qcow2Error> {
        if let Some(last) = self.extents.last() {
            let len = start.0 - last.start();
            let joins = match (last.extent(), extent) {
                (DiskExtent::Zeroes, DiskExtent::Zeroes) => true,
                (DiskExtent::Plain { file, sector }, DiskExtent::Plain { file: next_file, sector: next }) => {
                    file == next_file && sector.0 + len == next.0
                }
                _ => false,
            };
            if joins {
                return Ok(());
            }
        }
        if self.extents.len() == EXTENTS_MAX {
            return Err(too_many_extents());
        }
        self.extents.push(PackedExtent::new(start, extent));
        Ok(())
    }

    /// Size of the disk.
    #[must_use]
    pub fn size(&self) -> Sectors {
        self.size
    }

    /// Number of extents.
    #[must_use]
    pub fn extent_count(&self) -> usize {
        self.extents.len()
    }

    /// True if an extent is compressed.
    #[must_use]
    pub fn has_compressed(&self) -> bool {
        self.extents.iter().any(|extent| extent.source >> SOURCE_BITS == COMPRESSED)
    }

    /// The range from sector `at`, which is within the disk, to the end of its extent.
    ///
    /// # Panics
    /// If `at` is beyond the end of the disk.
    #[must_use]
    pub fn range(&self, at: Sector) -> DiskRange {
        assert!(at.0 < self.size.0, "beyond the end of the disk");
        let next = self.extents.partition_point(|extent| extent.start() <= at.0);
        let found = self.extents[next - 1];
        let end = self.extents.get(next).map_or(self.size.0, |next| next.start());
        let extent = match found.extent() {
            DiskExtent::Plain { file, sector } => {
                DiskExtent::Plain { file, sector: sector + Sectors(at.0 - found.start()) }
            }
            other => other,
        };
        DiskRange { start: at, len: Sectors(end - at.0), extent }
    }
}
