//! qcow2 images: the map of a disk, and damaged images.

use proptest::prelude::*;
use udm_core::{Sector, Sectors};
use udm_wire::qcow2::{DiskExtent, DiskExtentMap, ExtentSource, Qcow2Error, Qcow2Header, read_image_extents};

const CLUSTER: usize = 512;

/// An image of version 3 with clusters of 512 bytes: header, first table, second tables, data. The
/// entries are those of the second tables; 0 for the others.
fn image(size: u64, entries: &[(usize, u64)], data_clusters: usize) -> Vec<u8> {
    let per_table = CLUSTER / 8;
    let tables = size.div_ceil((per_table * CLUSTER) as u64) as usize;
    let l1_clusters = (tables * 8).div_ceil(CLUSTER);
    let mut bytes = vec![0; (1 + l1_clusters + tables + data_clusters) * CLUSTER];
    bytes[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    bytes[20..24].copy_from_slice(&9_u32.to_be_bytes());
    bytes[24..32].copy_from_slice(&size.to_be_bytes());
    bytes[36..40].copy_from_slice(&(tables as u32).to_be_bytes());
    bytes[40..48].copy_from_slice(&(CLUSTER as u64).to_be_bytes());
    bytes[96..100].copy_from_slice(&4_u32.to_be_bytes());
    bytes[100..104].copy_from_slice(&104_u32.to_be_bytes());
    for table in 0..tables {
        let at = (1 + l1_clusters + table) * CLUSTER;
        let entry = at as u64 | 1 << 63;
        bytes[CLUSTER + table * 8..CLUSTER + table * 8 + 8].copy_from_slice(&entry.to_be_bytes());
    }
    for &(index, entry) in entries {
        let at = (1 + l1_clusters) * CLUSTER + index * 8;
        bytes[at..at + 8].copy_from_slice(&entry.to_be_bytes());
    }
    bytes
}

fn load(bytes: &[u8]) -> Result<(Qcow2Header, Vec<(u64, ExtentSource)>), Qcow2Error> {
    let mut read = |offset: u64, buf: &mut [u8]| {
        buf.copy_from_slice(&bytes[offset as usize..][..buf.len()]);
        Ok(())
    };
    let len = bytes.len() as u64;
    let header = Qcow2Header::read(len, &mut read)?;
    let extents = read_image_extents(&header, len, len, &mut read)?;
    Ok((header, extents.iter().map(|extent| (extent.len.0, extent.source)).collect()))
}

const DATA: u64 = 1 << 63;

#[test]
fn clusters_become_extents_and_neighbours_are_joined() {
    use ExtentSource::{Backing, Plain, Zeroes};
    // Header, table, second table, then data from byte 1536 on.
    let entries = [(0, DATA | 1536), (1, DATA | 2048), (2, 1), (3, 1 | 2560), (4, DATA | 1536)];
    let (_, extents) = load(&image(10 * 512, &entries, 3)).unwrap();
    assert_eq!(extents, [(2, Plain(Sector(3))), (2, Zeroes), (1, Plain(Sector(3))), (5, Backing)]);
}

#[test]
fn tables_that_contradict_themselves_are_refused() {
    for (index, entry, why) in [
        (0, DATA | 4096, "the data at byte 4096 is beyond the end of its file at byte 3072"),
        (0, 1 << 56 | 1536, "entry 0x100000000000600 for byte 0"),
        (0, 1 << 62 | 4096, "the compressed data at byte 4096 is beyond its end at byte 3072"),
        (0, 1 << 63 | 1 << 62 | 1536, "entry 0xc000000000000600 for byte 0"),
    ] {
        let error = load(&image(10 * 512, &[(index, entry)], 3)).unwrap_err().to_string();
        assert!(error.starts_with("a damaged image: ") && error.contains(why), "{error}");
    }
    let mut twice = image(64 * 512 * 2, &[], 0);
    let first: [u8; 8] = twice[512..520].try_into().unwrap();
    twice[520..528].copy_from_slice(&first);
    assert!(load(&twice).unwrap_err().to_string().contains("the table at byte 1024 is used twice"));
    let mut version_2 = image(512, &[(0, 1)], 0);
    version_2[7] = 2;
    assert!(load(&version_2).unwrap_err().to_string().contains("entry 0x1 for byte 0"));
}

#[test]
fn a_table_is_bounded_by_the_disk_and_the_image() {
    let mut bytes = image(512, &[], 0);
    bytes[24..32].copy_from_slice(&u64::MAX.to_be_bytes());
    assert!(load(&bytes).unwrap_err().to_string().contains("too large for clusters of 512 bytes"));
    bytes[24..32].copy_from_slice(&(1_u64 << 30).to_be_bytes());
    assert!(load(&bytes).unwrap_err().to_string().contains("its first table is shorter than the disk"));
    bytes[36..40].copy_from_slice(&u32::MAX.to_be_bytes());
    assert!(load(&bytes).unwrap_err().to_string().contains("its first table is at byte 512"));
}

#[test]
fn a_map_looks_through_to_the_backing_file() {
    let (_, _) = load(&image(10 * 512, &[], 0)).unwrap();
    let bytes = image(10 * 512, &[(1, DATA | 1536), (7, 1)], 3);
    let mut read = |offset: u64, buf: &mut [u8]| {
        buf.copy_from_slice(&bytes[offset as usize..][..buf.len()]);
        Ok(())
    };
    let len = bytes.len() as u64;
    let header = Qcow2Header::read(len, &mut read).unwrap();
    let extents = read_image_extents(&header, len, len, &mut read).unwrap();
    let below = DiskExtentMap::raw(Sectors(6), 9);
    let map = DiskExtentMap::over(&extents, Sectors(10), 4, Some(&below)).unwrap();
    let found: Vec<_> = (0..10).map(|at| map.range(Sector(at)).extent).collect();
    let below = |at| DiskExtent::Plain { file: 9, sector: Sector(at) };
    let own = DiskExtent::Plain { file: 4, sector: Sector(3) };
    let zeroes = DiskExtent::Zeroes;
    let want = [below(0), own, below(2), below(3), below(4), below(5), zeroes, zeroes, zeroes, zeroes];
    assert_eq!(found, want);
    assert_eq!((map.extent_count(), map.range(Sector(2)).len), (4, Sectors(4)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// A damaged image is read or refused.
    #[test]
    fn a_damaged_image_is_read_or_refused(
        sectors in 1_u64..300,
        entries in prop::collection::vec((0_usize..300, 0_u64..64, prop::sample::select(vec![0, 1, DATA, 1 << 62])), 0..40),
        damage in prop::collection::vec((0_usize..2000, any::<u8>()), 0..4),
        len in 0_usize..20_000,
    ) {
        let tables = sectors.div_ceil(64) as usize * 64;
        let entries: Vec<_> = entries
            .into_iter()
            .filter(|(index, ..)| *index < tables)
            .map(|(index, cluster, flags)| (index, (cluster * 512) | flags))
            .collect();
        let mut bytes = image(sectors * 512, &entries, 20);
        for (at, byte) in damage {
            bytes.get_mut(at).into_iter().for_each(|old| *old = byte);
        }
        udm_wire::fuzz::fuzz_qcow2_image(&bytes);
        bytes.truncate(len);
        udm_wire::fuzz::fuzz_qcow2_image(&bytes);
    }
}
