//! Records that only this user, or root, can have made.

use serde::de::DeserializeOwned;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The record in a file of at most `max` bytes that only this user, or root, can have made.
/// `id` returns its identifier, which is the name of the file.
///
/// # Errors
/// The file cannot be read, belongs to another user, or has another name.
pub(super) fn read_own_record<T: DeserializeOwned>(
    path: &Path,
    max: u64,
    id: impl FnOnce(&T) -> &str,
) -> io::Result<T> {
    let mut bytes = Vec::new();
    let file = File::open(path)?;
    let owner = file.metadata()?.uid();
    if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("it belongs to another user"));
    }
    file.take(max).read_to_end(&mut bytes)?;
    let record = serde_json::from_slice(&bytes)?;
    match path.file_stem().is_some_and(|stem| stem == id(&record)) {
        true => Ok(record),
        false => Err(io::Error::other("its name is not that of its record")),
    }
}
