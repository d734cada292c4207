//! Folders that only their owner may enter.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use tempfile::TempDir;

/// What only this user may do anything with.
const MODE: u32 = 0o700;

/// Makes a temporary folder that only this user can enter, whatever the umask: in it are sockets
/// that others must not replace.
///
/// # Errors
/// When it can't be made, or is not what was made.
pub fn folder(prefix: &str) -> io::Result<TempDir> {
    let permissions = Permissions::from_mode(MODE);
    let folder = tempfile::Builder::new().prefix(prefix).permissions(permissions.clone()).tempdir()?;
    // The umask takes bits away; it must not lock us out.
    fs::set_permissions(folder.path(), permissions)?;
    let found = fs::symlink_metadata(folder.path())?;
    let ours = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
    if !ours || found.mode() & 0o777 != MODE {
        let text = format!("{}: not a folder of mode 0700 of this user's", folder.path().display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    Ok(folder)
}
