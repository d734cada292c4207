//! Disk content in the memory and cache of a null device with `cache_size`.
//!
//! The memory is that of the program ([`udm_backends::CachedMemory`]), with the cache that a power
//! cut empties. The simulated disk decides when requests take effect. The model checks reads and
//! the content after a power cut as for any other disk.

use udm_backends::CachedMemory;
use udm_core::{
    Bio, BioFlags, BioProgress, Buf, Op, PowerSwitch, SECTOR_SIZE, SLICE_MAX, Sector, Sectors, Segments,
};

/// Memory and cache of a null device below a simulated disk.
pub(crate) struct NullDeviceMemory(CachedMemory);

/// Returns a sector filled with `stamp`.
fn make_stamped_sector(stamp: u64) -> Segments {
    let mut data = Segments::new();
    data.push(Buf::zeroed(SECTOR_SIZE as usize));
    data.copy_from(&stamp.to_le_bytes().repeat(SECTOR_SIZE as usize / 8));
    data
}

impl NullDeviceMemory {
    /// Creates memory of `sectors` sectors, with a cache of `pages` pages.
    pub(crate) fn new(sectors: u64, pages: u64) -> NullDeviceMemory {
        let cached = CachedMemory::new(sectors * SECTOR_SIZE, pages);
        NullDeviceMemory(cached.unwrap_or_else(|error| panic!("memory for a small disk: {error}")))
    }

    fn serve(&self, mut bio: Box<Bio>) -> Box<Bio> {
        let mut part = BioProgress::first(self.0.length(&bio), SLICE_MAX);
        while !part.is_done() {
            part.left = SLICE_MAX;
            let status = self.0.serve(&mut bio, &mut part);
            assert!(status.is_ok(), "{bio:?} of a null device ends with {status:?}");
        }
        bio
    }

    pub(crate) fn write(&self, sector: u64, stamp: u64, durable: bool) {
        let mut bio = Bio::write(Sector(sector), Sectors(1), make_stamped_sector(stamp));
        bio.flags.set(BioFlags::FUA, durable);
        self.serve(bio);
    }

    pub(crate) fn read(&self, sector: u64) -> u64 {
        let bio = self.serve(Bio::read(Sector(sector), Sectors(1), make_stamped_sector(0)));
        let mut stamp = [0; 8];
        bio.data.copy_to(&mut stamp);
        u64::from_le_bytes(stamp)
    }

    pub(crate) fn flush(&self) {
        let mut bio = Bio::new();
        bio.op = Op::Flush;
        self.serve(bio);
    }

    /// Switches the power off and on.
    pub(crate) fn cycle(&self) {
        self.0.turn(false);
        self.0.turn(true);
    }
}
