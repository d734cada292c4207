//! The NVMe/TCP target, as far as the registry knows it.

use super::DeviceRegistry;
use crate::nvme_target::NvmeTarget;
use std::sync::Arc;

impl DeviceRegistry {
    /// Sets the target. Only the first call has an effect.
    pub fn set_nvme_target(&self, target: Arc<dyn NvmeTarget>) {
        let _ = self.nvme.set(target);
    }

    /// The target; `None` if the server has none.
    pub(crate) fn nvme_target(&self) -> Option<&Arc<dyn NvmeTarget>> {
        self.nvme.get()
    }
}
