//! An object as a device.

use crate::block_cache::{BLOCK, JobSender};
use crate::lane::ObjectLane;
use crate::source::ObjectSource;
use std::sync::Arc;
use udm_core::{
    Cx, Device, DeviceControlError, DeviceId, Lane, Limits, SECTOR_SIZE, Sectors, SharedDiskState,
};

/// The longest read in sectors (1 MiB).
const MAX_SECTORS: Sectors = Sectors(2048);

/// A read-only device over an object.
pub(crate) struct ObjectDevice {
    id: DeviceId,
    size: Sectors,
    jobs: JobSender,
    source: Arc<ObjectSource>,
    shared_disk_state: SharedDiskState,
}

impl ObjectDevice {
    /// A device of `len` bytes, a multiple of a sector, whose reads go to `jobs`.
    pub(crate) fn new(len: u64, jobs: JobSender, source: Arc<ObjectSource>) -> ObjectDevice {
        let size = Sectors(len / SECTOR_SIZE);
        ObjectDevice {
            id: DeviceId::new(),
            size,
            jobs,
            source,
            shared_disk_state: SharedDiskState::default(),
        }
    }
}

impl Device for ObjectDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(ObjectLane::new(self.size, self.jobs.clone(), cx)))
    }

    fn limits(&self) -> Limits {
        Limits {
            io_opt: BLOCK as u32,
            max_sectors: MAX_SECTORS,
            max_discard: Sectors::ZERO,
            max_write_zeroes: Sectors::ZERO,
            read_only: true,
            ..Limits::new(self.size)
        }
    }

    fn is_pinned_version(&self) -> bool {
        self.source.is_known()
    }

    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        Some(&self.shared_disk_state)
    }
}
