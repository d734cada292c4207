//! Folders that only their owner may enter.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use tempfile::TempDir;

/// Mode of a private folder: access only for its owner.
const MODE: u32 = 0o700;

/// Creates a temporary folder that only this user can enter, whatever the umask. It holds sockets
/// that others must not replace.
///
/// # Errors
/// If the folder cannot be created, or another folder is found in its place.
pub fn private_temp_dir(prefix: &str) -> io::Result<TempDir> {
    let permissions = Permissions::from_mode(MODE);
    let folder = tempfile::Builder::new().prefix(prefix).permissions(permissions.clone()).tempdir()?;
    // The umask may have removed bits that the owner needs.
    fs::set_permissions(folder.path(), permissions)?;
    let found = fs::symlink_metadata(folder.path())?;
    let ours = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
    if !ours || found.mode() & 0o777 != MODE {
        let text = format!("{}: expected a folder of this user with mode 0700", folder.path().display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    Ok(folder)
}
