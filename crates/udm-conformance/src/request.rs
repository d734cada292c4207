//! A request and its answer, in a form for both a lane and a network protocol.

use udm_core::{BioFlags, Op, SECTOR_SIZE};

/// A request.
#[derive(Clone, Debug)]
pub struct TestRequest {
    /// The operation.
    pub op: Op,
    /// Modifiers. A front end leaves out flags that its protocol cannot express.
    pub flags: BioFlags,
    /// First sector.
    pub sector: u64,
    /// Length in sectors.
    pub sectors: u64,
    /// The generation of the stamps of a write; 0 for all other operations.
    pub generation: u64,
    /// Lengths in bytes of the pieces of memory. The last piece gets the rest. Empty: one aligned
    /// piece.
    pub cuts: Vec<usize>,
}

impl TestRequest {
    /// A request without flags, with its memory in one piece.
    #[must_use]
    pub fn new(op: Op, sector: u64, sectors: u64) -> TestRequest {
        TestRequest { op, flags: BioFlags::empty(), sector, sectors, generation: 0, cuts: Vec::new() }
    }

    /// A read.
    #[must_use]
    pub fn read(sector: u64, sectors: u64) -> TestRequest {
        TestRequest::new(Op::Read, sector, sectors)
    }

    /// A write of stamps of `generation`.
    #[must_use]
    pub fn write(sector: u64, sectors: u64, generation: u64) -> TestRequest {
        TestRequest { generation, ..TestRequest::new(Op::Write, sector, sectors) }
    }

    /// A flush.
    #[must_use]
    pub fn flush() -> TestRequest {
        TestRequest::new(Op::Flush, 0, 0)
    }

    /// The request with additional `flags`.
    #[must_use]
    pub fn with(mut self, flags: BioFlags) -> TestRequest {
        self.flags |= flags;
        self
    }

    /// The request with its memory in pieces.
    #[must_use]
    pub fn in_pieces(mut self, cuts: &[usize]) -> TestRequest {
        self.cuts = cuts.to_vec();
        self
    }

    /// Bytes of data of the request.
    #[must_use]
    pub fn data_len(&self) -> usize {
        if self.op.has_data() { (self.sectors * SECTOR_SIZE) as usize } else { 0 }
    }
}

/// The result of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TestRequestResult {
    /// The errno; 0 for success.
    pub errno: i32,
    /// The data of a read; empty after an error.
    pub data: Vec<u8>,
}
