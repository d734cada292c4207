//! Reads the records of a store, one area at a time.

use super::error::{ExceptionStoreError, ExceptionStoreErrorKind, exception_store_error_at};
use super::{ExceptionStoreLayout, RECORD_LEN, SnapshotException, SparseChunkBitmap};
use std::ops::Range;

/// A walk over the areas of a store. The caller reads each area that
/// [`ExceptionStoreScanner::next`] returns, and passes it to [`ExceptionStoreScanner::take`].
/// Memory use is little more than one bit per record.
#[derive(Debug)]
pub struct ExceptionStoreScanner {
    layout: ExceptionStoreLayout,
    /// Whole chunks in the store.
    chunks: u64,
    /// Chunks of the origin, if known.
    origin: Option<u64>,
    /// Number of areas that were read.
    area: u64,
    records: u64,
    ended: bool,
    /// Data chunks of the store that are in use.
    taken: SparseChunkBitmap,
    leftover: Option<u64>,
}

/// The result of a walk, without the exceptions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExceptionStoreScanResult {
    /// Number of exceptions.
    pub exceptions: u64,
    /// The area with the end of the records, from 0.
    pub area: u64,
    /// Number of records in that area.
    pub committed: u64,
    /// The next free data chunk, after all chunks in use.
    pub next_free: u64,
    /// Unused chunks before `next_free`, which a crash left; in order. A range may contain an area.
    pub holes: Vec<Range<u64>>,
    /// The byte offset of the first non-zero record after the end. Such records have no meaning.
    pub leftover: Option<u64>,
}

impl ExceptionStoreScanner {
    /// Starts a walk over a store of `chunks` whole chunks. `origin` is the number of chunks of the
    /// origin, if known.
    #[must_use]
    pub fn new(layout: ExceptionStoreLayout, chunks: u64, origin: Option<u64>) -> ExceptionStoreScanner {
        ExceptionStoreScanner {
            layout,
            chunks,
            origin,
            area: 0,
            records: 0,
            ended: false,
            taken: SparseChunkBitmap::default(),
            leftover: None,
        }
    }

    /// The bytes of the store to read and pass to `take` next; `None` if the records have ended.
    ///
    /// # Errors
    /// If the store ends before its records do.
    pub fn next(&self) -> Result<Option<Range<u64>>, ExceptionStoreError> {
        if self.ended {
            return Ok(None);
        }
        let chunk = self.layout.area(self.area);
        let bytes = self.layout.chunk().bytes();
        if chunk >= self.chunks {
            return Err(exception_store_error_at(
                chunk * bytes,
                ExceptionStoreErrorKind::Truncated { area: self.area, chunks: self.chunks },
            ));
        }
        Ok(Some(chunk * bytes..(chunk + 1) * bytes))
    }

    /// Reads the area that [`ExceptionStoreScanner::next`] returned, and passes each exception to
    /// `sink`. `sink` returns false if it already has that chunk of the origin.
    ///
    /// # Errors
    /// The first invalid record. The walk cannot be continued then.
    ///
    /// # Panics
    /// If `area` is not exactly one chunk.
    pub fn take(
        &mut self,
        area: &[u8],
        mut sink: impl FnMut(SnapshotException) -> bool,
    ) -> Result<(), ExceptionStoreError> {
        assert_eq!(area.len() as u64, self.layout.chunk().bytes(), "an area is a chunk");
        let start = self.layout.area(self.area) * self.layout.chunk().bytes();
        let records = area.len() / RECORD_LEN;
        let mut index = 0;
        while index < records {
            let Some(exception) = SnapshotException::decode(area, index) else { break };
            let at = start + (index * RECORD_LEN) as u64;
            self.check(exception).map_err(|what| exception_store_error_at(at, what))?;
            if !sink(exception) {
                let SnapshotException { old, new } = exception;
                return Err(exception_store_error_at(
                    at,
                    ExceptionStoreErrorKind::OldTwice { record: self.records, old, new },
                ));
            }
            self.records += 1;
            index += 1;
        }
        if index == records {
            self.area += 1;
            return Ok(());
        }
        self.ended = true;
        let (at, behind) = (index * RECORD_LEN, &area[index * RECORD_LEN..]);
        let behind = behind.iter().position(|&byte| byte != 0);
        self.leftover = behind.map(|byte| start + (at + byte / RECORD_LEN * RECORD_LEN) as u64);
        Ok(())
    }

    /// Checks an exception and marks its data chunk as used.
    fn check(&mut self, exception: SnapshotException) -> Result<(), ExceptionStoreErrorKind> {
        let (record, SnapshotException { old, new }) = (self.records, exception);
        if new >= self.chunks {
            return Err(ExceptionStoreErrorKind::Beyond { record, old, new, chunks: self.chunks });
        }
        if self.layout.is_metadata(new) {
            return Err(ExceptionStoreErrorKind::Metadata { record, old, new });
        }
        if let Some(chunks) = self.origin.filter(|&chunks| old >= chunks) {
            return Err(ExceptionStoreErrorKind::OldBeyond { record, old, chunks });
        }
        if !self.taken.insert(new) {
            return Err(ExceptionStoreErrorKind::NewTwice { record, old, new });
        }
        Ok(())
    }

    /// The result, after [`ExceptionStoreScanner::next`] has returned `None`.
    #[must_use]
    pub fn end(self) -> ExceptionStoreScanResult {
        let mut holes: Vec<Range<u64>> = Vec::new();
        let mut expected = self.layout.data_from(2);
        for chunk in self.taken.iter() {
            if chunk != expected {
                holes.push(expected..chunk);
            }
            expected = self.layout.data_from(chunk + 1);
        }
        ExceptionStoreScanResult {
            exceptions: self.records,
            area: self.area,
            committed: self.records % self.layout.records(),
            next_free: expected,
            holes,
            leftover: self.leftover,
        }
    }
}
