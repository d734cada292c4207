//! What can be wrong with a store.

use super::ChunkSizeError;
use thiserror::Error;

/// Why a store was refused, and at which byte of it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("at byte {offset}: {fault}")]
pub struct StoreError {
    /// The byte offset in the store.
    pub offset: u64,
    /// What is wrong there.
    pub fault: StoreFault,
}

/// What is wrong with a store. The first four have the kernel's words in front.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum StoreFault {
    /// It ends before its header does.
    #[error("the store ends inside its header")]
    Short,
    /// It does not begin as a store does.
    #[error("Invalid or corrupt snapshot: the magic number is {0:#010x}")]
    Magic(u32),
    /// A version that nobody knows.
    #[error("unable to handle snapshot disk version {0}")]
    Version(u32),
    /// The size of a chunk can't be.
    #[error("invalid on-disk chunk size {0}: {1}")]
    ChunkSize(u32, ChunkSizeError),
    /// The store ends before its records do.
    #[error("area {area} of records lies behind the end of the store ({chunks} chunks)")]
    Truncated {
        /// Which area, from 0.
        area: u64,
        /// Whole chunks that the store has.
        chunks: u64,
    },
    /// The data would lie behind the end.
    #[error(
        "record {record} keeps chunk {old} in chunk {new}, behind the end of the store ({chunks} chunks)"
    )]
    Beyond {
        /// Which record, from 0, over all areas.
        record: u64,
        /// The chunk of the origin.
        old: u64,
        /// The chunk of the store.
        new: u64,
        /// Whole chunks that the store has.
        chunks: u64,
    },
    /// The data would lie where records or the header are.
    #[error("record {record} keeps chunk {old} in chunk {new}, which holds metadata")]
    Metadata {
        /// Which record.
        record: u64,
        /// The chunk of the origin.
        old: u64,
        /// The chunk of the store.
        new: u64,
    },
    /// Two chunks of the origin in one of the store.
    #[error("record {record} keeps chunk {old} in chunk {new}, where another one is kept")]
    NewTwice {
        /// Which record.
        record: u64,
        /// The chunk of the origin.
        old: u64,
        /// The chunk of the store.
        new: u64,
    },
    /// One chunk of the origin in two of the store.
    #[error("record {record} keeps chunk {old} in chunk {new}, and an earlier one keeps it elsewhere")]
    OldTwice {
        /// Which record.
        record: u64,
        /// The chunk of the origin.
        old: u64,
        /// The chunk of the store.
        new: u64,
    },
    /// The origin has no such chunk.
    #[error("record {record} keeps chunk {old}, behind the end of the origin ({chunks} chunks)")]
    OldBeyond {
        /// Which record.
        record: u64,
        /// The chunk of the origin.
        old: u64,
        /// Chunks of the origin.
        chunks: u64,
    },
}

/// `fault` at byte `offset`.
pub(super) fn fault(offset: u64, fault: StoreFault) -> StoreError {
    StoreError { offset, fault }
}
