//! A qcow2 image for the battery, made without QEMU.
//!
//! Clusters of 4096 bytes take turns: plain, and compressed in a block of deflate that stores its
//! bytes as they are (RFC 1951, 3.2.4). So each request of some length meets both.

/// Bytes in a cluster, as a power of two.
const CLUSTER_BITS: u32 = 12;
const CLUSTER: u64 = 1 << CLUSTER_BITS;

/// Bytes that a table of the second level maps.
const PER_TABLE: u64 = CLUSTER / 8 * CLUSTER;

/// Returns an image of a disk of `size` bytes, with the content of `pattern:`.
pub(crate) fn make_pattern_image(size: u64) -> Vec<u8> {
    let (clusters, tables) = (size.div_ceil(CLUSTER), size.div_ceil(PER_TABLE));
    let mut image = vec![0; ((2 + tables) * CLUSTER) as usize];
    let put = |image: &mut Vec<u8>, at: u64, bytes: &[u8]| {
        image[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    };
    put(&mut image, 0, b"QFI\xfb\0\0\0\x03");
    put(&mut image, 20, &CLUSTER_BITS.to_be_bytes());
    put(&mut image, 24, &size.to_be_bytes());
    put(&mut image, 36, &(tables as u32).to_be_bytes());
    put(&mut image, 40, &CLUSTER.to_be_bytes());
    put(&mut image, 96, &4_u32.to_be_bytes());
    put(&mut image, 100, &104_u32.to_be_bytes());
    for table in 0..tables {
        put(&mut image, CLUSTER + table * 8, &(((2 + table) * CLUSTER) | (1 << 63)).to_be_bytes());
    }
    for cluster in 0..clusters {
        let words = cluster * CLUSTER / 8..(cluster + 1) * CLUSTER / 8;
        let data: Vec<u8> = words.flat_map(|word| (word * 8).to_be_bytes()).collect();
        let at = image.len() as u64;
        let entry = if cluster % 2 == 0 {
            image.extend(data);
            at | 1 << 63
        } else {
            let len = CLUSTER as u16;
            image.push(1);
            image.extend(len.to_le_bytes());
            image.extend((!len).to_le_bytes());
            image.extend(data);
            let sectors = (image.len() as u64 - 1) / 512 - at / 512;
            image.resize(image.len().next_multiple_of(CLUSTER as usize), 0);
            1 << 62 | sectors << (62 - (CLUSTER_BITS - 8)) | at
        };
        put(&mut image, 2 * CLUSTER + cluster * 8, &entry.to_be_bytes());
    }
    image
}
