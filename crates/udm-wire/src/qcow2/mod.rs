//! qcow2 images (QEMU, `docs/interop/qcow2.rst`): header, and the map of the disk in an image.
//!
//! * [`Qcow2Header`]: the fields that a reader needs. Features that change the meaning of the data
//!   and are not supported are refused.
//! * [`read_image_extents`]: the tables of one image, as a list of extents.
//! * [`DiskExtentMap`]: the extents of a disk over all files of a backing chain.
//!
//! Images are hostile input. A caller passes a function that reads bytes of the image. All memory
//! and all steps are bounded: see [`EXTENTS_MAX`] and [`TABLE_BYTES_MAX`]. Only what a reader needs
//! is checked: reference counts, snapshots in the image and bitmaps are ignored.

mod disk_map;
mod header;
mod image_map;

pub use disk_map::{DiskExtent, DiskExtentMap, DiskRange};
pub use header::{BackingFile, CLUSTER_BITS_MAX, EXT_BACKING_FORMAT, MAGIC, NAME_MAX, Qcow2Header};
pub use image_map::{CompressedCluster, ExtentSource, ImageExtent, read_image_extents};

use crate::words::quote_for_error_line;

/// Maximum number of extents in the map of a disk: 128 MiB of memory.
pub const EXTENTS_MAX: usize = 8 << 20;

/// Maximum size in bytes of all tables of an image together: they map 32 TiB with the default
/// cluster size.
pub const TABLE_BYTES_MAX: u64 = 4 << 30;

/// The reason why an image is refused, in one line without the name of the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Qcow2Error(String);

impl Qcow2Error {
    /// An image with a feature that is not supported. `convert` makes an image without it.
    fn unsupported(what: &str) -> Qcow2Error {
        Qcow2Error(format!("{what}: make a copy with \"qemu-img convert -O qcow2 IMAGE NEW\""))
    }

    /// An image that contradicts itself.
    fn damaged(what: impl std::fmt::Display) -> Qcow2Error {
        Qcow2Error(format!("a damaged image: {what} (\"qemu-img check IMAGE\" shows more)"))
    }

    /// The image could not be read at byte `offset`.
    #[must_use]
    pub fn unreadable(offset: u64, why: &str) -> Qcow2Error {
        Qcow2Error(format!("can't be read at byte {offset}: {}", quote_for_error_line(why)))
    }

    /// Any other reason.
    #[must_use]
    pub fn refused(text: impl Into<String>) -> Qcow2Error {
        Qcow2Error(text.into())
    }
}

/// Reads bytes of an image: offset and the buffer to fill. The range is within the image.
pub type ReadImageBytes<'a> = dyn FnMut(u64, &mut [u8]) -> Result<(), Qcow2Error> + 'a;

/// The big-endian integer of 32 bits at byte `at`.
fn be32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_be_bytes(word)
}

/// The big-endian integer of 64 bits at byte `at`.
fn be64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_be_bytes(word)
}
