//! `file:PATH?format=qcow2`, and objects with `format=qcow2`: the disk in a qcow2 image, read-only.
//!
//! * `open`: opens the image and the files that it names, and walks its tables once.
//! * `lane`: the data path of one core. `parts`: the parts of a request.
//! * `clusters`: compressed clusters, on a helper thread with a small cache. `image_bytes`: their
//!   source, and that of the tables.
//!
//! The rules:
//!
//! * **Map.** [`DiskExtentMap`] is built when the device is opened and never changes. Its memory is
//!   bounded; an image with too many pieces is refused.
//! * **Reads** of plain data go to the lane of the file ([`crate::file`]) with another sector. Data
//!   is not copied. Zeroes are filled in by the core. Only compressed clusters need the thread.
//! * **Other files** that the image names are opened only with `backing=allow`: an image could name
//!   any file that the server may read. At most [`CHAIN_MAX`] files; no loops.
//! * **Writers.** While the image is served, QEMU's programs and udm cannot open its files for
//!   writing. They are locked as QEMU locks an image that it reads, unless `exclusive=off`.
//!   If another program changes the image nevertheless, reads return the changed bytes at the old
//!   places.

mod clusters;
mod image_bytes;
mod lane;
mod open;
mod parts;
#[cfg(test)]
mod tests;

pub use image_bytes::ImageBytes;
pub(crate) use open::open_image;
pub use open::{files_of_image, open_image_in_object};

use clusters::ClusterReader;
use std::sync::Arc;
use udm_core::{
    Cx, Device, DeviceControlError, DeviceId, ExtentKind, Extents, Lane, Limits, Sector, Sectors,
    SharedDiskState,
};
use udm_wire::qcow2::{DiskExtent, DiskExtentMap};

/// Maximum number of files of an image: itself, its backing files and files with data.
const CHAIN_MAX: usize = 16;

/// The longest read in sectors (1 MiB), so that no request has many parts.
const MAX_SECTORS: Sectors = Sectors(2048);

/// The disk in a qcow2 image.
pub(crate) struct Qcow2Device {
    id: DeviceId,
    map: Arc<DiskExtentMap>,
    /// The files of the chain, by their index in the map.
    files: Arc<[ImageFile]>,
    /// Reads compressed clusters; `None` if there are none.
    clusters: Option<ClusterReader>,
    limits: Limits,
    shared_disk_state: SharedDiskState,
}

/// A file of an image.
struct ImageFile {
    device: Arc<dyn Device>,
    /// For its tables and compressed clusters. A file keeps its locks.
    bytes: Arc<dyn ImageBytes>,
    /// Cluster size as a power of two; 0 for a file without a format.
    cluster_bits: u32,
}

impl Device for Qcow2Device {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let children = self.files.iter().map(|file| file.device.open(cx));
        let children = children.collect::<Result<Vec<_>, _>>()?;
        let clusters = self.clusters.as_ref().map(|reader| reader.open(cx));
        let cluster_bits = self.files.iter().map(|file| file.cluster_bits).collect();
        Ok(Box::new(lane::Qcow2Lane::new(Arc::clone(&self.map), children, cluster_bits, clusters, cx)))
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let end = from + len;
        let mut at = from;
        while at < end && !out.is_full() {
            let range = self.map.range(at);
            let len = range.len.min(Sectors(end.0 - at.0));
            match range.extent {
                DiskExtent::Zeroes => out.push(len, ExtentKind::Hole),
                DiskExtent::Compressed { .. } => out.push(len, ExtentKind::Data),
                // A cluster may be a hole of its file.
                DiskExtent::Plain { file, sector } => {
                    self.files[usize::from(file)].device.extents(sector, len, out);
                }
            }
            at += len;
        }
    }

    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        Some(&self.shared_disk_state)
    }
}
