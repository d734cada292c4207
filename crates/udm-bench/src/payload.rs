//! The data of requests.

use crate::load::FioLoadOptions;
use crate::verify::{self, BlockHeader};
use udm_core::{Bio, Buf, Op};

/// Creates a bio, with incompressible data if its requests carry data.
pub fn new_bio_with_job_payload(load: &FioLoadOptions, i: u64) -> Box<Bio> {
    let mut bio = Bio::new();
    if !load.bare && load.rw.op() != Some(Op::Discard) {
        let mut data = Buf::zeroed(load.block_bytes() as usize);
        verify::fill_block_with_header_and_crc(
            &mut data,
            BlockHeader { offset: i, tag: load.seed(), index: i },
        );
        bio.data = data.into();
    }
    bio
}
