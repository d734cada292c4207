//! Identity of a disk, valid for other servers too: its name, and the file or block device of that
//! name.

use serde::{Deserialize, Serialize};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::UNIX_EPOCH;
use udm_backends::DiskIdentity;
use udm_wire::uri::{self, DeviceUri, NbdUri};

/// Identity of a store or another disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StableDiskId {
    /// Its path, or `@` and the name of the mapped device.
    pub(super) name: String,
    /// The file or block device of that name.
    pub(super) disk: Option<FileId>,
}

/// Identity of a file or a block device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum FileId {
    File {
        device: u64,
        inode: u64,
        /// Time of birth in ns since 1970, because inode numbers are reused.
        #[serde(skip_serializing_if = "Option::is_none")]
        born_ns: Option<u64>,
    },
    Block {
        number: u64,
    },
}

impl StableDiskId {
    /// The store on the mapped device `name`.
    #[must_use]
    pub fn mapped(name: &str) -> StableDiskId {
        StableDiskId { name: format!("@{name}"), disk: None }
    }

    /// Hash (FNV-1a) for the file names of marks and records.
    pub(super) fn fingerprint(&self) -> u64 {
        let bytes = format!("{} {:?}", self.name, self.disk);
        bytes
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    }

    /// The store on the device of a URI; `None` if the device ends with the process. An NBD export
    /// and an NVMe namespace are identified by their address and name.
    #[must_use]
    pub(crate) fn of_uri(uri: &str, identity: DiskIdentity) -> Option<StableDiskId> {
        let mut id = StableDiskId::of_uri_cached(uri, identity)?;
        if let Some(disk) = id.disk {
            let born = fs::metadata(&id.name).ok().and_then(|found| FileId::of(&found));
            id.disk = born.filter(|born| born.is(disk)).or(id.disk);
        }
        Some(id)
    }

    /// As [`StableDiskId::of_uri`], without file system access: the time of birth is unknown.
    #[must_use]
    pub(crate) fn of_uri_cached(uri: &str, identity: DiskIdentity) -> Option<StableDiskId> {
        let file = match uri::parse_device_uri(uri).ok()? {
            DeviceUri::File(file) => file,
            DeviceUri::Nbd(nbd) => {
                let name = DeviceUri::Nbd(NbdUri::new(nbd.address, nbd.export)).to_string();
                return Some(StableDiskId { name, disk: None });
            }
            DeviceUri::Nvme(nvme) => {
                return Some(StableDiskId { name: nvme.plain().to_string(), disk: None });
            }
            _ => return None,
        };
        let disk = match identity {
            DiskIdentity::File { device, inode } => FileId::File { device, inode, born_ns: None },
            DiskIdentity::Block { number } => FileId::Block { number },
            DiskIdentity::Virtual => return None,
        };
        Some(StableDiskId { name: file.path.display().to_string(), disk: Some(disk) })
    }

    /// The store that a user names: a path, or `@` and the name of a mapped device.
    #[must_use]
    pub fn named(word: &Path) -> StableDiskId {
        let path = match word.to_str() {
            Some(name) if name.starts_with('@') => return StableDiskId { name: name.into(), disk: None },
            _ => fs::canonicalize(word).or_else(|_| std::path::absolute(word)),
        };
        let path = path.unwrap_or_else(|_| word.into());
        let disk = fs::metadata(&path).ok().and_then(|found| FileId::of(&found));
        StableDiskId { name: path.display().to_string(), disk }
    }

    /// The disk of a URI, which need not exist; `None` if it ends with the process. May block.
    #[must_use]
    pub(crate) fn of_named_uri(uri: &DeviceUri) -> Option<StableDiskId> {
        match uri {
            DeviceUri::File(file) => Some(StableDiskId::named(&file.path)),
            DeviceUri::Nbd(nbd) => {
                let nbd = NbdUri::new(nbd.address.clone(), nbd.export.clone());
                Some(StableDiskId { name: DeviceUri::Nbd(nbd).to_string(), disk: None })
            }
            DeviceUri::Mapped(name) => Some(StableDiskId::mapped(name)),
            _ => None,
        }
    }

    /// The name that a user would write.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// True if both may be the same store: the same name, or the same disk.
    pub(crate) fn is(&self, other: &StableDiskId) -> bool {
        self.name == other.name || self.disk.zip(other.disk).is_some_and(|(one, other)| one.is(other))
    }

    /// True if both are the same store: the same disk, or the same name if a disk is unknown.
    pub(crate) fn is_exactly(&self, other: &StableDiskId) -> bool {
        self.disk.zip(other.disk).map_or(self.name == other.name, |(one, other)| one.is(other))
    }

    /// True for a file, even if it does not exist.
    pub(super) fn is_file(&self) -> bool {
        matches!(self.disk, Some(FileId::File { .. }))
    }

    /// Metadata of the file at its path; `None` if there is no regular file.
    pub(super) fn file(&self) -> Option<fs::Metadata> {
        fs::metadata(&self.name).ok().filter(|found| self.is_file() && found.is_file())
    }
}

impl FileId {
    pub(super) fn of(found: &fs::Metadata) -> Option<FileId> {
        use std::os::unix::fs::FileTypeExt;
        if found.file_type().is_block_device() {
            return Some(FileId::Block { number: found.rdev() });
        }
        let born = found.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        let born_ns = born.and_then(|born| u64::try_from(born.as_nanos()).ok());
        found.is_file().then(|| FileId::File { device: found.dev(), inode: found.ino(), born_ns })
    }

    pub(super) fn is(self, other: FileId) -> bool {
        match (self, other) {
            (FileId::Block { number }, FileId::Block { number: other }) => number == other,
            (FileId::File { device, inode, born_ns }, FileId::File { device: d, inode: i, born_ns: b }) => {
                (device, inode) == (d, i) && born_ns.zip(b).is_none_or(|(one, other)| one == other)
            }
            _ => false,
        }
    }
}
