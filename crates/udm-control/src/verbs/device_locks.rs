//! Whose turn it is to change a device.
//!
//! Contract: devices are locked in the order of their numbers, so changes that have some in common
//! wait for each other, and never in a circle. The partners of what comes or goes are changed too
//! and are locked with the rest; which they are is asked before, and a change that finds others
//! when the locks are had begins again.

use super::cancel::{CancelToken, VerbKind};
use super::lane_guard::{self, LaneGuard};
use crate::error::VerbError;
use crate::registry::{Mapped, Registry};
use std::sync::Arc;
use tokio::sync::OwnedMutexGuard;
use udm_core::Device;
use udm_core::errno::ENXIO;
use udm_dm::{DeviceSetTransition, MappedDevice, TargetError};

/// How often a change begins again because partners came between.
pub(super) const TRIES_MAX: usize = 100;

/// The turns of one change.
pub(super) struct DeviceLocks<'a> {
    registry: &'a Registry,
    who: VerbKind,
    locked: Vec<(Arc<Mapped>, OwnedMutexGuard<()>)>,
    renews: bool,
    lanes: Vec<LaneGuard>,
}

impl<'a> DeviceLocks<'a> {
    /// Waits for the turns of `several` and their partners, until called off.
    pub async fn take(
        registry: &'a Registry,
        several: &[(String, Arc<Mapped>)],
        who: VerbKind,
        cancel_token: &CancelToken,
    ) -> Result<DeviceLocks<'a>, VerbError> {
        let devices: Vec<_> = several.iter().map(|(_, mapped)| Arc::clone(&mapped.device)).collect();
        let dependents_of = dependents_of(who, &devices);
        let mut all: Vec<(&str, Arc<Mapped>)> =
            several.iter().map(|(name, mapped)| (name.as_str(), Arc::clone(mapped))).collect();
        let count = all.len();
        // What is not listed has been removed, and stands still for good.
        let listed = dependents_of.iter().filter_map(|device| registry.listed(device));
        all.extend(listed.map(|mapped| (several[0].0.as_str(), mapped)));
        let renews = all.len() > count;
        let mut turns = DeviceLocks { registry, who, locked: Vec::new(), renews, lanes: Vec::new() };
        all.sort_by_key(|(_, mapped)| mapped.device.number());
        all.dedup_by_key(|(_, mapped)| mapped.device.number());
        for (name, mapped) in all {
            let cancel_token = turns.cancel_token(cancel_token);
            let turn = tokio::select! {
                biased;
                why = cancel_token.called() => return Err(VerbError::new(name, why)),
                turn = Arc::clone(&mapped.changing).lock_owned() => turn,
            };
            turns.locked.push((mapped, turn));
        }
        for (name, mapped) in several {
            // Who removes it has taken it away himself, or is about to find out.
            if who != VerbKind::Remove && !registry.is_active(mapped) {
                let error = TargetError::errno(ENXIO).because("it has been removed meanwhile");
                return Err(VerbError::new(name, error));
            }
        }
        for (mapped, _) in &turns.locked {
            turns.lanes.extend(lane_guard::lane_for_change(registry, &mapped.device).await);
        }
        Ok(turns)
    }

    /// What calls it off: `cancel_token`, but for a create or a removal that waits for nobody else.
    pub fn cancel_token(&self, cancel_token: &CancelToken) -> CancelToken {
        match self.who {
            VerbKind::Create | VerbKind::Remove if !self.renews => CancelToken::default(),
            _ => cancel_token.clone(),
        }
    }

    /// True when `device` is locked, or has been removed and nobody else can change it.
    pub fn has(&self, device: &Arc<MappedDevice>) -> bool {
        self.locked.iter().any(|(mapped, _)| mapped.device.id() == device.id())
            || self.registry.listed(device).is_none()
    }
}

fn dependents_of(who: VerbKind, devices: &[Arc<MappedDevice>]) -> Vec<Arc<MappedDevice>> {
    match who {
        VerbKind::Suspend => Vec::new(),
        VerbKind::Create | VerbKind::Resume => DeviceSetTransition::dependents_of_resume(devices),
        VerbKind::Remove => DeviceSetTransition::dependents_of_removal(devices),
    }
}
