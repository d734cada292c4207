//! A request and its answer, in terms that a lane and a network protocol share.

use udm_core::{BioFlags, Op, SECTOR_SIZE};

/// A request.
#[derive(Clone, Debug)]
pub struct Request {
    /// What to do.
    pub op: Op,
    /// Modifiers; a front end that has no word for one leaves it out.
    pub flags: BioFlags,
    /// First sector.
    pub sector: u64,
    /// Length in sectors.
    pub sectors: u64,
    /// What a write puts there: its stamp's generation. 0 for all others.
    pub generation: u64,
    /// Lengths in bytes of the pieces of memory that the data comes in; what is left over is the
    /// last piece. Empty: one aligned piece.
    pub cuts: Vec<usize>,
}

impl Request {
    /// A request without flags, its memory in one piece.
    #[must_use]
    pub fn new(op: Op, sector: u64, sectors: u64) -> Request {
        Request { op, flags: BioFlags::empty(), sector, sectors, generation: 0, cuts: Vec::new() }
    }

    /// A read.
    #[must_use]
    pub fn read(sector: u64, sectors: u64) -> Request {
        Request::new(Op::Read, sector, sectors)
    }

    /// A write of stamps of `generation`.
    #[must_use]
    pub fn write(sector: u64, sectors: u64, generation: u64) -> Request {
        Request { generation, ..Request::new(Op::Write, sector, sectors) }
    }

    /// A flush.
    #[must_use]
    pub fn flush() -> Request {
        Request::new(Op::Flush, 0, 0)
    }

    /// The same with `flags`.
    #[must_use]
    pub fn with(mut self, flags: BioFlags) -> Request {
        self.flags |= flags;
        self
    }

    /// The same with its memory in pieces.
    #[must_use]
    pub fn in_pieces(mut self, cuts: &[usize]) -> Request {
        self.cuts = cuts.to_vec();
        self
    }

    /// Bytes of data that it carries.
    #[must_use]
    pub fn data_len(&self) -> usize {
        if self.op.has_data() { (self.sectors * SECTOR_SIZE) as usize } else { 0 }
    }
}

/// How a request ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// The errno; 0 for success.
    pub errno: i32,
    /// What a read brought; empty after an error.
    pub data: Vec<u8>,
}
