//! The data of requests.

use crate::load::FioLoadOptions;
use crate::stats::{DirectionStats, direction_index_of_op};
use crate::verify::{self, BlockHeader};
use udm_buf::BufPool;
use udm_core::{Batch, Bio, Buf, Op};

/// Size of the smallest slab of a pool in bytes.
const SLAB_MIN: usize = 4096;

/// Creates a bio. If all requests have one length and carry data, it has incompressible data.
pub fn new_bio_with_job_payload(load: &FioLoadOptions, i: u64) -> Box<Bio> {
    let mut bio = Bio::new();
    if let Some(bs) = load.fixed().filter(|_| requests_carry_data(load)) {
        bio.data = random_payload(bs as usize, load, i).into();
    }
    bio
}

fn requests_carry_data(load: &FioLoadOptions) -> bool {
    !load.bare && load.rw.op() != Some(Op::Discard)
}

fn random_payload(len: usize, load: &FioLoadOptions, i: u64) -> Buf {
    let mut data = Buf::zeroed(len);
    verify::fill_block_with_header_and_crc(&mut data, BlockHeader { offset: i, tag: load.seed(), index: i });
    data
}

/// The data of requests with different lengths. Each request gets its buffer when it is sent.
pub struct PayloadPool {
    pool: Option<BufPool>,
}

impl PayloadPool {
    /// Allocates memory for all requests of a job, for any lengths. `None` if all have one length.
    pub fn new(load: &FioLoadOptions) -> Option<PayloadPool> {
        if load.fixed().is_some() {
            return None;
        }
        if !requests_carry_data(load) {
            return Some(PayloadPool { pool: None });
        }
        let mut pool = BufPool::new(usize::MAX);
        let (depth, longest) = (u64::from(load.iodepth), (load.longest() as usize).next_power_of_two());
        let mut slab = SLAB_MIN;
        while slab <= longest.max(SLAB_MIN) {
            (0..depth).for_each(|i| pool.put(random_payload(slab, load, i)));
            slab *= 2;
        }
        Some(PayloadPool { pool: Some(pool) })
    }

    /// Gives the requests of a batch their data.
    pub fn load(&mut self, batch: &mut Batch) {
        let Some(pool) = &mut self.pool else { return };
        for bio in batch.iter_mut().filter(|bio| bio.op != Op::Flush) {
            bio.data = pool.get(bio.sectors.bytes() as usize).into();
        }
    }

    /// Counts the bytes of completed requests, with or without an error.
    pub fn count(done: &Batch, directions: &mut [DirectionStats]) {
        for bio in done.iter().filter(|bio| bio.op != Op::Flush) {
            directions[direction_index_of_op(bio.op)].bytes += bio.sectors.bytes();
        }
    }

    /// Takes the data back from a completed request.
    pub fn unload(&mut self, bio: &mut Bio) {
        if let Some(pool) = &mut self.pool
            && let Some(data) = bio.data.pop()
        {
            pool.put(data);
        }
    }
}
