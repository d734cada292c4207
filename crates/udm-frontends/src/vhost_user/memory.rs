//! The memory of a virtual machine: regions of files that the front end shares.
//!
//! A region is mapped when it is set. Its mapping lives as long as a request or ring uses it, also
//! after the region was removed.

use rustix::fs::fstat;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use udm_buf::{SharedMemoryMap, copy_from_shared, copy_to_shared};
use udm_wire::vhost_user::{GuestMemoryRegion, REGIONS_MAX};

/// A mapped region.
#[derive(Clone, Debug)]
pub(super) struct MappedGuestRegion {
    region: GuestMemoryRegion,
    file: Arc<OwnedFd>,
    /// Device and inode of the file.
    file_id: (u64, u64),
    map: Arc<SharedMemoryMap>,
}

/// All regions of a machine. Immutable: a change makes a new one.
#[derive(Clone, Debug, Default)]
pub(super) struct GuestMemory {
    regions: Vec<MappedGuestRegion>,
}

/// A part of a buffer in one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GuestBufferPart {
    /// Index of the region.
    pub(super) region: usize,
    /// Byte offset in its mapping.
    pub(super) at: usize,
    /// Length in bytes, above 0.
    pub(super) len: usize,
}

impl GuestMemory {
    /// Returns the memory with these regions and no others. A region that is in `self` already
    /// keeps its mapping.
    ///
    /// # Errors
    /// A region cannot be mapped, or two regions overlap.
    pub(super) fn replaced(
        &self,
        table: &[GuestMemoryRegion],
        files: Vec<OwnedFd>,
    ) -> io::Result<GuestMemory> {
        let mut new = GuestMemory::default();
        for (region, file) in table.iter().zip(files) {
            new.add(*region, file, self)?;
        }
        Ok(new)
    }

    /// Returns the memory with one more region.
    ///
    /// # Errors
    /// As for [`GuestMemory::replaced`], and there are too many regions.
    pub(super) fn with(&self, region: GuestMemoryRegion, file: OwnedFd) -> io::Result<GuestMemory> {
        let mut new = self.clone();
        new.add(region, file, self)?;
        Ok(new)
    }

    /// Returns the memory without the region at the addresses of `region`; `None` if there is none.
    pub(super) fn without(&self, region: &GuestMemoryRegion) -> Option<GuestMemory> {
        let key = |r: &GuestMemoryRegion| (r.guest_address, r.user_address, r.size);
        let mut new = self.clone();
        new.regions.retain(|other| key(&other.region) != key(region));
        (new.regions.len() < self.regions.len()).then_some(new)
    }

    fn add(&mut self, region: GuestMemoryRegion, file: OwnedFd, old: &GuestMemory) -> io::Result<()> {
        let refuse = |why: &str| {
            let text = format!("guest memory of {} bytes at {:#x}: {why}", region.size, region.guest_address);
            Err(io::Error::new(io::ErrorKind::InvalidInput, text))
        };
        if self.regions.len() >= REGIONS_MAX {
            return refuse("there are 32 regions already");
        }
        let end = |start: u64| start.checked_add(region.size);
        let (Some(guest_end), Some(user_end)) = (end(region.guest_address), end(region.user_address)) else {
            return refuse("it ends after the last address");
        };
        let overlaps = self.regions.iter().any(|other| {
            let (a, b) = (other.region.guest_address, other.region.user_address);
            (a < guest_end && region.guest_address < a + other.region.size)
                || (b < user_end && region.user_address < b + other.region.size)
        });
        if overlaps {
            return refuse("it overlaps another region");
        }
        let stat = fstat(&file)?;
        let file_id = (stat.st_dev, stat.st_ino);
        let known = old.regions.iter().find(|other| other.region == region && other.file_id == file_id);
        let map = match known {
            Some(known) => Arc::clone(&known.map),
            None => {
                let Ok(len) = usize::try_from(region.size) else { return refuse("it is too long") };
                Arc::new(SharedMemoryMap::of_guest_memory(&file, region.file_offset, len)?)
            }
        };
        self.regions.push(MappedGuestRegion { region, file: Arc::new(file), file_id, map });
        Ok(())
    }

    /// The regions with their files.
    pub(super) fn files(&self) -> impl Iterator<Item = (GuestMemoryRegion, &OwnedFd)> {
        self.regions.iter().map(|region| (region.region, &*region.file))
    }

    /// The mapping of a region.
    pub(super) fn map(&self, region: usize) -> &Arc<SharedMemoryMap> {
        &self.regions[region].map
    }

    /// Number of regions.
    pub(super) fn len(&self) -> usize {
        self.regions.len()
    }

    /// True if a file was cut and a lost page was accessed.
    pub(super) fn is_lost(&self) -> bool {
        self.regions.iter().any(|region| region.map.is_lost())
    }

    /// Returns the first part of the `len` bytes (above 0) at guest address `address`; `None` if no
    /// region has the address. The rest of the bytes, if any, is in other regions.
    pub(super) fn first_part(&self, address: u64, len: usize) -> Option<GuestBufferPart> {
        self.regions.iter().enumerate().find_map(|(index, region)| {
            let at = address.checked_sub(region.region.guest_address)?;
            let left = region.region.size.checked_sub(at).filter(|left| *left > 0)?;
            let len = usize::try_from(left).unwrap_or(usize::MAX).min(len);
            Some(GuestBufferPart { region: index, at: at as usize, len })
        })
    }

    /// Calls `each` for the parts of the `len` bytes at guest address `address`, in order. Returns
    /// false if some bytes are in no region.
    pub(super) fn parts(&self, mut address: u64, len: usize, mut each: impl FnMut(GuestBufferPart)) -> bool {
        let mut left = len;
        while left > 0 {
            let Some(part) = self.first_part(address, left) else { return false };
            each(part);
            left -= part.len;
            match address.checked_add(part.len as u64) {
                Some(next) => address = next,
                None => return left == 0,
            }
        }
        true
    }

    /// Reads `out.len()` bytes at guest address `address`; false if some are in no region.
    pub(super) fn read(&self, address: u64, out: &mut [u8]) -> bool {
        let mut done = 0;
        self.parts(address, out.len(), |part| {
            copy_from_shared(self.map(part.region).words(), part.at, &mut out[done..done + part.len]);
            done += part.len;
        })
    }

    /// Reads the 16 bytes at guest address `address`, such as a descriptor or a header. Two loads,
    /// if they are aligned and in one region.
    pub(super) fn read_16(&self, address: u64) -> Option<[u8; 16]> {
        let mut out = [0; 16];
        match self.first_part(address, 16) {
            Some(part) if part.len == 16 && part.at.is_multiple_of(8) => {
                let words = &self.map(part.region).words()[part.at / 8..][..2];
                out[..8].copy_from_slice(&words[0].load(Ordering::Relaxed).to_ne_bytes());
                out[8..].copy_from_slice(&words[1].load(Ordering::Relaxed).to_ne_bytes());
                Some(out)
            }
            _ => self.read(address, &mut out).then_some(out),
        }
    }

    /// Writes a byte at guest address `address`; false if it is in no region.
    pub(super) fn write_byte(&self, address: u64, byte: u8) -> bool {
        let Some(part) = self.first_part(address, 1) else { return false };
        self.map(part.region).u8_at(part.at).store(byte, Ordering::Relaxed);
        true
    }

    /// Writes `bytes` at guest address `address`; false if some are in no region.
    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> bool {
        let mut done = 0;
        self.parts(address, bytes.len(), |part| {
            copy_to_shared(self.map(part.region).words(), part.at, &bytes[done..done + part.len]);
            done += part.len;
        })
    }

    /// The mapping and offset of `len` bytes at `address` of the front end's process, if they are
    /// in one region and aligned to `align`.
    pub(super) fn find_user(
        &self,
        address: u64,
        len: usize,
        align: u64,
    ) -> Option<(Arc<SharedMemoryMap>, usize)> {
        self.regions.iter().find_map(|region| {
            let at = address.checked_sub(region.region.user_address)?;
            let end = at.checked_add(len as u64)?;
            let is_inside = end <= region.region.size && at.is_multiple_of(align);
            is_inside.then(|| (Arc::clone(&region.map), at as usize))
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    pub(in crate::vhost_user) fn memfd(len: u64) -> OwnedFd {
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, len).unwrap();
        fd
    }

    fn region(guest_address: u64, size: u64, user_address: u64) -> GuestMemoryRegion {
        GuestMemoryRegion { guest_address, size, user_address, file_offset: 0 }
    }

    #[test]
    fn buffers_may_cross_adjacent_regions() {
        let table = [region(0, 8192, 1 << 40), region(8192, 4096, 1 << 41)];
        let memory = GuestMemory::default().replaced(&table, vec![memfd(8192), memfd(4096)]).unwrap();
        let bytes: Vec<u8> = (0..100).collect();
        assert!(memory.write(8142, &bytes));
        let mut seen = [0; 100];
        assert!(memory.read(8142, &mut seen));
        assert_eq!(seen[..], bytes[..]);
        let mut parts = Vec::new();
        assert!(memory.parts(8142, 100, |part| parts.push(part)));
        assert_eq!(
            parts,
            [GuestBufferPart { region: 0, at: 8142, len: 50 }, GuestBufferPart { region: 1, at: 0, len: 50 }]
        );
        assert!(
            !memory.read(12_200, &mut seen) && !memory.read(u64::MAX, &mut seen) && memory.read(0, &mut [])
        );
        for address in [8142, 8144, 8184, 8192] {
            let at = (address - 8142) as usize;
            assert_eq!(memory.read_16(address), Some(bytes[at..at + 16].try_into().unwrap()), "{address}");
        }
        assert!(memory.read_16(12_280).is_none() && !memory.write_byte(12_288, 1));
        assert!(memory.write_byte(8142, 77) && memory.read_16(8142).unwrap()[0] == 77);
        assert!(memory.find_user((1 << 41) + 16, 4080, 16).is_some());
        assert!(memory.find_user((1 << 41) + 16, 4081, 16).is_none(), "beyond the end");
        assert!(memory.find_user((1 << 41) + 8, 8, 16).is_none(), "not aligned");
    }

    /// A region of rings alone may have their exact length.
    #[test]
    fn a_region_may_end_within_a_page() {
        let memory = GuestMemory::default().with(region(0, 5000, 1 << 40), memfd(5000)).unwrap();
        assert!(memory.write(4990, &[7; 10]) && !memory.write(4991, &[7; 10]));
        assert!(memory.write_byte(4999, 7) && !memory.write_byte(5000, 7));
        assert!(memory.find_user((1 << 40) + 4992, 8, 16).is_some());
        assert!(memory.find_user((1 << 40) + 4992, 9, 16).is_none());
    }

    #[test]
    fn regions_change_and_keep_their_mappings() {
        let file = memfd(8192);
        let same = || file.try_clone().unwrap();
        let first = GuestMemory::default().with(region(0, 8192, 1 << 40), same()).unwrap();
        let again = first.replaced(&[region(0, 8192, 1 << 40)], vec![same()]).unwrap();
        assert!(Arc::ptr_eq(first.map(0), again.map(0)));
        let both = again.with(region(8192, 4096, 1 << 41), memfd(4096)).unwrap();
        assert_eq!(both.len(), 2);
        assert_eq!(both.without(&region(0, 8192, 1 << 40)).unwrap().len(), 1);
        assert!(both.without(&region(0, 4096, 1 << 40)).is_none());
        let refused = |region, file| both.with(region, file).unwrap_err().to_string();
        assert!(refused(region(4096, 4096, 1 << 42), memfd(4096)).contains("overlaps"));
        assert!(refused(region(1 << 20, 4096, 1 << 41), memfd(4096)).contains("overlaps"));
        assert!(refused(region(u64::MAX - 5, 4096, 1 << 42), memfd(4096)).contains("last address"));
        assert!(refused(region(1 << 20, 8192, 1 << 42), memfd(4096)).contains("of a file of 4096 bytes"));
        let mut full = GuestMemory::default();
        for i in 0..REGIONS_MAX as u64 {
            full = full.with(region(i << 20, 4096, (1 << 40) + (i << 20)), memfd(4096)).unwrap();
        }
        assert!(
            full.with(region(1 << 40, 4096, 1 << 50), memfd(4096)).unwrap_err().to_string().contains("32")
        );
    }
}
