//! The locks of the devices of a change.
//!
//! Contract: devices are locked in the order of their numbers, so changes with common devices wait
//! for each other without a deadlock. The partners of a table that becomes live or is removed are
//! changed and locked too. They are looked up before the locks are taken; if there are others
//! afterwards, the change starts again.

use super::cancel::{CancelToken, CancellableVerbKind};
use super::lane_guard::{self, LaneGuard};
use crate::error::VerbError;
use crate::registry::{DeviceRegistry, RegisteredDevice};
use std::sync::Arc;
use tokio::sync::OwnedMutexGuard;
use udm_core::Device;
use udm_core::errno::ENXIO;
use udm_dm::{DeviceSetTransition, MappedDevice, TargetError};

/// Maximum number of attempts of a change whose partners keep changing.
pub(super) const TRIES_MAX: usize = 100;

/// The locks of one change, and lanes that it needs.
pub(super) struct DeviceChangeLocks<'a> {
    registry: &'a DeviceRegistry,
    who: CancellableVerbKind,
    locked: Vec<(Arc<RegisteredDevice>, OwnedMutexGuard<()>)>,
    renews: bool,
    lanes: Vec<LaneGuard>,
}

impl<'a> DeviceChangeLocks<'a> {
    /// Locks `several` devices and their partners, unless cancelled.
    pub async fn take(
        registry: &'a DeviceRegistry,
        several: &[(String, Arc<RegisteredDevice>)],
        who: CancellableVerbKind,
        cancel_token: &CancelToken,
    ) -> Result<DeviceChangeLocks<'a>, VerbError> {
        let devices: Vec<_> = several.iter().map(|(_, mapped)| Arc::clone(&mapped.device)).collect();
        let partners = partners_of_changed_devices(who, &devices);
        let mut all: Vec<(&str, Arc<RegisteredDevice>)> =
            several.iter().map(|(name, mapped)| (name.as_str(), Arc::clone(mapped))).collect();
        let count = all.len();
        // A device that is not listed has been removed and stays suspended.
        let listed = partners.iter().filter_map(|device| registry.listed(device));
        all.extend(listed.map(|mapped| (several[0].0.as_str(), mapped)));
        let renews = all.len() > count;
        let mut turns = DeviceChangeLocks { registry, who, locked: Vec::new(), renews, lanes: Vec::new() };
        all.sort_by_key(|(_, mapped)| mapped.device.number());
        all.dedup_by_key(|(_, mapped)| mapped.device.number());
        for (name, mapped) in all {
            let cancel_token = turns.cancel_token(cancel_token);
            let turn = tokio::select! {
                biased;
                why = cancel_token.cancelled() => return Err(VerbError::new(name, why)),
                turn = Arc::clone(&mapped.changing).lock_owned() => turn,
            };
            turns.locked.push((mapped, turn));
        }
        for (name, mapped) in several {
            // A removal unlists its device itself, or will find that another one did.
            if who != CancellableVerbKind::Remove && !registry.is_active(mapped) {
                let error = TargetError::errno(ENXIO).because("it has been removed meanwhile");
                return Err(VerbError::new(name, error));
            }
        }
        for (mapped, _) in &turns.locked {
            turns.lanes.extend(lane_guard::open_lane_for_change(registry, &mapped.device).await);
        }
        Ok(turns)
    }

    /// The token that cancels the change. A create or removal without partners cannot be cancelled.
    pub fn cancel_token(&self, cancel_token: &CancelToken) -> CancelToken {
        match self.who {
            CancellableVerbKind::Create | CancellableVerbKind::Remove if !self.renews => {
                CancelToken::default()
            }
            _ => cancel_token.clone(),
        }
    }

    /// True if `device` is locked, or has been removed, so that nobody else can change it.
    pub fn has(&self, device: &Arc<MappedDevice>) -> bool {
        self.locked.iter().any(|(mapped, _)| mapped.device.id() == device.id())
            || self.registry.listed(device).is_none()
    }
}

fn partners_of_changed_devices(
    who: CancellableVerbKind,
    devices: &[Arc<MappedDevice>],
) -> Vec<Arc<MappedDevice>> {
    match who {
        CancellableVerbKind::Suspend => Vec::new(),
        CancellableVerbKind::Create | CancellableVerbKind::Resume => {
            DeviceSetTransition::partners_of_resume(devices)
        }
        CancellableVerbKind::Remove => DeviceSetTransition::partners_of_removal(devices),
    }
}
