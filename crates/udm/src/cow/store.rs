//! A store, read from a file.

use anyhow::{Context, Result};
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use udm_core::Sectors;
use udm_wire::cow::{
    ExceptionStoreHeader, ExceptionStoreLayout, ExceptionStoreScanResult, ExceptionStoreScanner, HEADER_LEN,
    SnapshotException, SparseChunkBitmap,
};

/// An open store.
pub(super) struct StoreFile {
    file: File,
    path: PathBuf,
    /// Size of the file or device, in bytes.
    pub(super) size: u64,
    /// The header; `None` if the store is blank.
    pub(super) header: Option<ExceptionStoreHeader>,
}

impl StoreFile {
    pub(super) fn open(path: &Path) -> Result<StoreFile> {
        let context = || path.display().to_string();
        let mut file = File::open(path).with_context(context)?;
        // Finds the size by seeking to the end: a block device has no length in its metadata.
        let size = file.seek(SeekFrom::End(0)).with_context(context)?;
        let mut first = vec![0; size.min(HEADER_LEN as u64) as usize];
        file.read_exact_at(&mut first, 0).with_context(context)?;
        let header = ExceptionStoreHeader::decode(&first).with_context(context)?;
        Ok(StoreFile { file, path: path.to_owned(), size, header })
    }

    /// Reads the records of a store with this header, and calls `each` for each exception.
    pub(super) fn read(
        &self,
        header: ExceptionStoreHeader,
        origin_size: Option<u64>,
        each: impl FnMut(SnapshotException) -> Result<()>,
    ) -> Result<ExceptionStoreScanResult> {
        let read = |at, bytes: &mut [u8]| self.file.read_exact_at(bytes, at);
        for_each_cow_exception(read, header, self.size, origin_size, each)
            .with_context(|| self.path.display().to_string())
    }
}

/// Reads the records of a store of `size` bytes with this header, through `read`, and calls `each`
/// for each exception.
pub(super) fn for_each_cow_exception(
    read: impl Fn(u64, &mut [u8]) -> io::Result<()>,
    header: ExceptionStoreHeader,
    size: u64,
    origin_size: Option<u64>,
    mut each: impl FnMut(SnapshotException) -> Result<()>,
) -> Result<ExceptionStoreScanResult> {
    let layout = ExceptionStoreLayout::new(header.chunk);
    let origin = origin_size.map(|size| size.div_ceil(header.chunk.bytes()));
    let mut walk = ExceptionStoreScanner::new(layout, layout.chunks(Sectors::from_bytes(size)), origin);
    let (mut area, mut known, mut result) = (Vec::new(), SparseChunkBitmap::default(), Ok(()));
    while let Some(at) = walk.next()? {
        area.resize((at.end - at.start) as usize, 0);
        read(at.start, &mut area).with_context(|| format!("cannot read at byte {}", at.start))?;
        walk.take(&area, |exception| {
            if result.is_ok() {
                result = each(exception);
            }
            known.insert(exception.old)
        })?;
        std::mem::replace(&mut result, Ok(()))?;
    }
    Ok(walk.end())
}
