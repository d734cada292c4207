//! Properties of the metadata of clones.

use super::assert_one_line_error;
use crate::clone_metadata;

/// Metadata of clones: a header or block that is read back encodes to the same bytes.
pub fn fuzz_clone_metadata(data: &[u8]) {
    const LEN: usize = clone_metadata::BLOCK_LEN;
    let blocks: Vec<&[u8]> = data.chunks_exact(LEN).collect();
    if let [one, other, ..] = blocks[..]
        && let Err(error) = clone_metadata::read_header_copies([one, other])
    {
        assert_one_line_error(&error);
    }
    for (index, block) in blocks.into_iter().enumerate() {
        let mut again = vec![0; LEN];
        match clone_metadata::CloneHeader::decode(block) {
            Err(error) => assert_one_line_error(&error),
            Ok(None) => {}
            Ok(Some(header)) => {
                header.encode(&mut again);
                assert_eq!(clone_metadata::CloneHeader::decode(&again), Ok(Some(header)));
            }
        }
        match clone_metadata::BitmapBlock::decode(block, index as u64) {
            Err(error) => assert_one_line_error(&error),
            Ok(None) => assert!(block.iter().all(|byte| *byte == 0)),
            Ok(Some(read)) => {
                let words = read.words.iter().copied();
                clone_metadata::BitmapBlock::encode(read.generation, read.index, words, &mut again);
                let again = clone_metadata::BitmapBlock::decode(&again, index as u64);
                assert_eq!(again, Ok(Some(read)));
            }
        }
    }
}
