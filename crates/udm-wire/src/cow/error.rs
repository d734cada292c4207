//! Errors of snapshot stores.

use super::ChunkSizeError;
use thiserror::Error;

/// The reason why a store was refused, and the byte to blame.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("at byte {offset}: {fault}")]
pub struct ExceptionStoreError {
    /// The byte offset in the store.
    pub offset: u64,
    /// The error at this offset.
    pub fault: ExceptionStoreErrorKind,
}

/// An error of a store. The texts of the first four begin with the kernel's words.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ExceptionStoreErrorKind {
    /// The store is shorter than its header.
    #[error("the store ends inside its header")]
    Short,
    /// The magic number is wrong.
    #[error("Invalid or corrupt snapshot: the magic number is {0:#010x}")]
    Magic(u32),
    /// The version is unknown.
    #[error("unable to handle snapshot disk version {0}")]
    Version(u32),
    /// The chunk size is invalid.
    #[error("invalid on-disk chunk size {0}: {1}")]
    ChunkSize(u32, ChunkSizeError),
    /// The store ends before its records do.
    #[error("area {area} of records is beyond the end of the store ({chunks} chunks)")]
    Truncated {
        /// Number of the area, from 0.
        area: u64,
        /// Whole chunks in the store.
        chunks: u64,
    },
    /// The data would be beyond the end of the store.
    #[error(
        "record {record} keeps chunk {old} in chunk {new}, beyond the end of the store ({chunks} chunks)"
    )]
    Beyond {
        /// Number of the record, from 0, over all areas.
        record: u64,
        /// The chunk of the origin.
        old: u64,
        /// The chunk of the store.
        new: u64,
        /// Whole chunks in the store.
        chunks: u64,
    },
    /// The data would overwrite records or the header.
    #[error("record {record} keeps chunk {old} in chunk {new}, which holds metadata")]
    Metadata {
        /// Number of the record, from 0, over all areas.
        record: u64,
        /// The chunk of the origin.
        old: u64,
        /// The chunk of the store.
        new: u64,
    },
    /// Two chunks of the origin are in one chunk of the store.
    #[error("record {record} keeps chunk {old} in chunk {new}, where another one is kept")]
    NewTwice {
        /// Number of the record, from 0, over all areas.
        record: u64,
        /// The chunk of the origin.
        old: u64,
        /// The chunk of the store.
        new: u64,
    },
    /// One chunk of the origin is in two chunks of the store.
    #[error("record {record} keeps chunk {old} in chunk {new}, and an earlier one keeps it elsewhere")]
    OldTwice {
        /// Number of the record, from 0, over all areas.
        record: u64,
        /// The chunk of the origin.
        old: u64,
        /// The chunk of the store.
        new: u64,
    },
    /// The chunk is beyond the end of the origin.
    #[error("record {record} keeps chunk {old}, beyond the end of the origin ({chunks} chunks)")]
    OldBeyond {
        /// Number of the record, from 0, over all areas.
        record: u64,
        /// The chunk of the origin.
        old: u64,
        /// Chunks of the origin.
        chunks: u64,
    },
}

/// `fault` at byte `offset`.
pub(super) fn exception_store_error_at(offset: u64, fault: ExceptionStoreErrorKind) -> ExceptionStoreError {
    ExceptionStoreError { offset, fault }
}
