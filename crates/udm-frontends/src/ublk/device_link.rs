//! The link `/dev/udm/NAME`: a name for a block device whose number may change.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// The folder of the links.
const FOLDER: &str = "/dev/udm";

/// A link to a block device. It stays until [`DeviceLink::remove`].
#[derive(Debug)]
pub(super) struct DeviceLink {
    path: PathBuf,
    target: PathBuf,
}

impl DeviceLink {
    /// Links `name` to `/dev/ublkbN`, and replaces an older link.
    ///
    /// # Errors
    /// Something else has the path, or there is no permission.
    pub(super) fn create(name: &str, number: u32) -> io::Result<DeviceLink> {
        DeviceLink::create_in(Path::new(FOLDER), name, number)
    }

    fn create_in(folder: &Path, name: &str, number: u32) -> io::Result<DeviceLink> {
        let path = folder.join(name);
        let with_path =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        if !folder.is_dir() {
            fs::create_dir(folder).map_err(with_path)?;
            fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).map_err(with_path)?;
        }
        let is_other = fs::symlink_metadata(&path).is_ok_and(|there| !there.is_symlink());
        if is_other {
            return Err(with_path(io::Error::other("it exists and is no link")));
        }
        let target = PathBuf::from(format!("/dev/ublkb{number}"));
        // A link is replaced at once: at no time is there none.
        let new = folder.join(format!(".{name}.{}", std::process::id()));
        let _ = fs::remove_file(&new);
        symlink(&target, &new).map_err(with_path)?;
        fs::rename(&new, &path).map_err(with_path)?;
        Ok(DeviceLink { path, target })
    }

    /// The path of the link.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the link, unless it leads to another device meanwhile.
    pub(super) fn remove(self) {
        if fs::read_link(&self.path).is_ok_and(|target| target == self.target) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes the links to `/dev/ublkbN`.
pub(super) fn remove_links_to(number: u32) {
    let target = PathBuf::from(format!("/dev/ublkb{number}"));
    for entry in fs::read_dir(FOLDER).into_iter().flatten().flatten() {
        if fs::read_link(entry.path()).is_ok_and(|to| to == target) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_follows_its_device() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("udm");
        let old = DeviceLink::create_in(&folder, "disk", 3).unwrap();
        let new = DeviceLink::create_in(&folder, "disk", 12).unwrap();
        assert_eq!(fs::read_link(folder.join("disk")).unwrap(), Path::new("/dev/ublkb12"));
        old.remove();
        assert!(new.path().is_symlink(), "the link of the new device stays");
        new.remove();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        fs::write(folder.join("disk"), "").unwrap();
        let error = DeviceLink::create_in(&folder, "disk", 3).unwrap_err().to_string();
        assert!(error.ends_with("disk: it exists and is no link"), "{error}");
    }
}
