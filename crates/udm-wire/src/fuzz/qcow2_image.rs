//! Properties of the reader of qcow2 images.

use super::assert_one_line_error;
use crate::qcow2;
use udm_core::{Sector, Sectors};

/// qcow2 images: [`qcow2::Qcow2Header`], [`qcow2::read_image_extents`],
/// [`qcow2::DiskExtentMap`]. All reads are within the image, and the extents cover the disk.
pub fn fuzz_qcow2_image(data: &[u8]) {
    let mut read = |offset: u64, buf: &mut [u8]| {
        let at = usize::try_from(offset).expect("within the image");
        buf.copy_from_slice(&data[at..at + buf.len()]);
        Ok(())
    };
    let len = data.len() as u64;
    let header = match qcow2::Qcow2Header::read(len, &mut read) {
        Err(error) => return assert_one_line_error(&error),
        Ok(header) => header,
    };
    let extents = match qcow2::read_image_extents(&header, len, len, &mut read) {
        Err(error) => return assert_one_line_error(&error),
        Ok(extents) => extents,
    };
    let size = Sectors(header.size / 512);
    let mut at = Sector(0);
    for extent in &extents {
        assert!(extent.start == at && extent.len.0 > 0, "a gap, or an empty extent");
        at += extent.len;
        match extent.source {
            qcow2::ExtentSource::Plain(sector) => assert!((sector + extent.len).0 * 512 <= len),
            qcow2::ExtentSource::Compressed(place) => {
                let (offset, input) = place.range(header.cluster_bits);
                assert!(offset < len && input as u64 <= 2 * header.cluster_size());
                assert!(extent.len.0 * 512 <= header.cluster_size());
            }
            qcow2::ExtentSource::Zeroes | qcow2::ExtentSource::Backing => {}
        }
    }
    assert_eq!(at.0, size.0, "the extents do not cover the disk");
    let backing = qcow2::DiskExtentMap::raw(Sectors(size.0 / 2), 1);
    let map = qcow2::DiskExtentMap::over(&extents, size, 0, Some(&backing)).expect("fewer than the bound");
    let (mut at, mut ranges) = (Sector(0), 0);
    while at.0 < size.0 {
        let range = map.range(at);
        assert!(range.start == at && range.len.0 > 0);
        at += range.len;
        ranges += 1;
    }
    assert_eq!((at.0, ranges), (size.0, map.extent_count()));
}
