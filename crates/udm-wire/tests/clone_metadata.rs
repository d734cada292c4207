//! Metadata of clones: golden bytes, properties, and input that is refused.

use proptest::collection::vec;
use proptest::prelude::*;
use udm_core::{Sector, Sectors};
use udm_wire::clone_metadata::{
    BLOCK_LEN, BitmapBlock, BitmapBlockError, CloneHeader, CloneHeaderError, CloneMetadataLayout,
    MetadataCopy, SourceFingerprint, WORDS_PER_BLOCK, newest_bitmap_block, read_header_copies,
};

const HEADER: CloneHeader = CloneHeader {
    region: Sectors(8),
    len: Sectors(0x1_0203),
    source: Some(SourceFingerprint { first: 0x1122_3344, last: 0x5566_7788 }),
};

fn encoded(header: &CloneHeader) -> Vec<u8> {
    let mut block = vec![0xee; BLOCK_LEN];
    header.encode(&mut block);
    block
}

fn bitmap(generation: u64, index: u64, words: &[u64]) -> Vec<u8> {
    let mut block = vec![0xee; BLOCK_LEN];
    BitmapBlock::encode(generation, index, words.iter().copied(), &mut block);
    block
}

/// The format never changes under one version: these bytes were written by the first udm with it.
#[test]
fn golden_header() {
    let block = encoded(&HEADER);
    let golden = [
        *b"udmclone",                         // magic
        [1, 0, 0, 0, 0x11, 0xd2, 0x57, 0x99], // version, checksum
        [8, 0, 0, 0, 0, 0, 0, 0],
        [3, 2, 1, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0x44, 0x33, 0x22, 0x11], // the source is known; its first piece
        [0x88, 0x77, 0x66, 0x55, 0, 0, 0, 0], // its last piece
    ]
    .concat();
    assert_eq!(block[..48], golden, "{:02x?}", &block[..48]);
    assert!(block[48..].iter().all(|byte| *byte == 0));
    assert_eq!(CloneHeader::decode(&block), Ok(Some(HEADER)));
}

#[test]
fn golden_bitmap() {
    let block = bitmap(7, 1, &[0b101, 0, 1 << 63]);
    let golden = [
        [b'U', b'C', b'b', b'm', 0, 0, 0, 0],
        [7, 0, 0, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0],
        [0; 8],
        [5, 0, 0, 0, 0, 0, 0, 0],
        [0; 8],
        [0, 0, 0, 0, 0, 0, 0, 0x80],
    ]
    .concat();
    let mut without_checksum = block.clone();
    without_checksum[4..8].fill(0);
    assert_eq!(without_checksum[..56], golden);
    assert_eq!(block[4..8], crc32c::crc32c(&without_checksum).to_le_bytes());
    assert_eq!(block[4..8], [0xa0, 0x01, 0x36, 0x0e]);
    let read = BitmapBlock::decode(&block, 1).unwrap().unwrap();
    assert_eq!((read.generation, read.words[0], read.words[2]), (7, 5, 1 << 63));
}

#[test]
fn positions() {
    let per_block = 64 * WORDS_PER_BLOCK as u64;
    assert_eq!(per_block, 32_512);
    for (regions, blocks) in [(1, 1), (per_block, 1), (per_block + 1, 2), (10 * per_block, 10)] {
        let layout = CloneMetadataLayout::new(regions);
        assert_eq!(layout.bitmap_blocks(), blocks);
        assert_eq!(layout.blocks(), 2 + 2 * blocks);
        assert_eq!(layout.header(MetadataCopy::First), Sector(0));
        assert_eq!(layout.header(MetadataCopy::Second), Sector(8));
        assert_eq!(layout.bitmap(MetadataCopy::First, 0), Sector(16));
        assert_eq!(layout.bitmap(MetadataCopy::Second, 0), Sector(8 * (2 + blocks)));
        let last = layout.bitmap(MetadataCopy::Second, blocks - 1);
        assert_eq!(last.0 + 8, layout.sectors());
    }
}

#[test]
fn a_header_is_chosen_from_two_copies() {
    let (good, blank) = (encoded(&HEADER), vec![0; BLOCK_LEN]);
    let mut torn = good.clone();
    torn[20] ^= 1;
    let mut other = HEADER;
    other.region = Sectors(16);
    let other = encoded(&other);
    let mut newer = good.clone();
    newer[8] = 2;
    let crc = { crc32c::crc32c(&[&newer[..12], &[0; 4], &newer[16..512]].concat()) };
    newer[12..16].copy_from_slice(&crc.to_le_bytes());
    let mut kernel = blank.clone();
    kernel[32..40].copy_from_slice(&0x8af2_7f64_u64.to_le_bytes());
    for (copies, expected) in [
        ([&blank, &blank], Ok(None)),
        ([&good, &good], Ok(Some(HEADER))),
        ([&good, &blank], Ok(Some(HEADER))),
        ([&torn, &good], Ok(Some(HEADER))),
        ([&good, &torn], Ok(Some(HEADER))),
        ([&torn, &torn], Err(CloneHeaderError::Damaged)),
        ([&blank, &torn], Err(CloneHeaderError::Damaged)),
        ([&good, &other], Err(CloneHeaderError::Differ)),
        ([&newer, &newer], Err(CloneHeaderError::Version(2))),
        ([&kernel, &blank], Err(CloneHeaderError::Kernel)),
        ([&vec![7; BLOCK_LEN], &blank], Err(CloneHeaderError::Foreign)),
    ] {
        assert_eq!(read_header_copies([copies[0], copies[1]]), expected);
    }
}

#[test]
fn the_newest_intact_copy_of_a_block_counts() {
    let decode = |bytes: &[u8]| BitmapBlock::decode(bytes, 3);
    let (old, new) = (bitmap(4, 3, &[1]), bitmap(5, 3, &[3]));
    let (blank, mut torn) = (vec![0; BLOCK_LEN], new.clone());
    torn[2048..].fill(0xff);
    let generation =
        |copies: [&[u8]; 2]| newest_bitmap_block(copies.map(decode)).map(|b| b.map(|b| b.generation));
    assert_eq!(generation([&blank, &blank]), Ok(None));
    assert_eq!(generation([&old, &new]), Ok(Some(5)));
    assert_eq!(generation([&new, &old]), Ok(Some(5)));
    assert_eq!(generation([&new, &blank]), Ok(Some(5)));
    assert_eq!(generation([&old, &torn]), Ok(Some(4)));
    assert_eq!(generation([&torn, &blank]), Ok(None), "the first commit was torn");
    assert_eq!(generation([&torn, &torn]), Err(BitmapBlockError::Checksum));
    assert_eq!(BitmapBlock::decode(&old, 2), Err(BitmapBlockError::Index(3)));
    assert_eq!(BitmapBlock::decode(&encoded(&HEADER), 0), Err(BitmapBlockError::Magic));
}

#[test]
fn regions_beyond_the_end_are_refused() {
    let block = |words: &[u64]| BitmapBlock::decode(&bitmap(1, 0, words), 0).unwrap().unwrap();
    for (regions, words, accepted) in [
        (3, &[0b111][..], true),
        (3, &[0b1111], false),
        (64, &[u64::MAX], true),
        (64, &[u64::MAX, 1], false),
        (65, &[u64::MAX, 1], true),
        (65, &[u64::MAX, 2], false),
    ] {
        assert_eq!(CloneMetadataLayout::new(regions).accepts(&block(words)), accepted, "{regions} {words:?}");
    }
}

proptest! {
    #[test]
    fn a_header_is_read_back(shift in 3..22u32, len in 1..u64::MAX, first: u32, last: u32, known: bool) {
        let source = known.then_some(SourceFingerprint { first, last });
        let header = CloneHeader { region: Sectors(1 << shift), len: Sectors(len), source };
        prop_assert_eq!(CloneHeader::decode(&encoded(&header)), Ok(Some(header)));
    }

    #[test]
    fn a_block_is_read_back(generation in 1..u64::MAX, index: u64, words in vec(any::<u64>(), 0..=WORDS_PER_BLOCK)) {
        let read = BitmapBlock::decode(&bitmap(generation, index, &words), index).unwrap().unwrap();
        prop_assert_eq!((read.generation, read.index), (generation, index));
        prop_assert_eq!(&read.words[..words.len()], &words[..]);
        prop_assert!(read.words[words.len()..].iter().all(|word| *word == 0));
    }

    /// A changed bit is always noticed.
    #[test]
    fn damage_is_noticed(bit in 0..8 * BLOCK_LEN, header_bit in 0..8 * 512usize) {
        let mut block = bitmap(9, 2, &[3, 1, 4]);
        block[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(BitmapBlock::decode(&block, 2).is_err());
        let mut block = encoded(&HEADER);
        block[header_bit / 8] ^= 1 << (header_bit % 8);
        prop_assert!(CloneHeader::decode(&block).is_err());
    }

    #[test]
    fn any_bytes(bytes in vec(any::<u8>(), 0..3 * BLOCK_LEN), seed in 0..3u8) {
        let mut bytes = bytes;
        match seed {
            1 => bytes.splice(..0, encoded(&HEADER)).for_each(drop),
            2 => bytes.splice(..0, bitmap(3, 0, &[1, 2])).for_each(drop),
            _ => {}
        }
        udm_wire::fuzz::fuzz_clone_metadata(&bytes);
    }
}
