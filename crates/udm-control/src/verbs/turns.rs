//! Whose turn it is to change a device.
//!
//! Contract: devices are locked in the order of their numbers, so changes that have some in common
//! wait for each other, and never in a circle. The partners of what comes or goes are changed too
//! and are locked with the rest; which they are is asked before, and a change that finds others
//! when the locks are had begins again.

use super::call_off::{CallOff, Waiting};
use super::hold::{self, Held};
use crate::error::VerbError;
use crate::registry::{Mapped, Registry};
use std::sync::Arc;
use tokio::sync::OwnedMutexGuard;
use udm_core::Device;
use udm_core::errno::ENXIO;
use udm_dm::{Changes, MappedDevice, TargetError};

/// How often a change begins again because partners came between.
pub(super) const TRIES_MAX: usize = 100;

/// The turns of one change.
pub(super) struct Turns<'a> {
    registry: &'a Registry,
    who: Waiting,
    locked: Vec<(Arc<Mapped>, OwnedMutexGuard<()>)>,
    renews: bool,
    lanes: Vec<Held>,
}

impl<'a> Turns<'a> {
    /// Waits for the turns of `several` and their partners, until called off.
    pub async fn take(
        registry: &'a Registry,
        several: &[(String, Arc<Mapped>)],
        who: Waiting,
        off: &CallOff,
    ) -> Result<Turns<'a>, VerbError> {
        let devices: Vec<_> = several.iter().map(|(_, mapped)| Arc::clone(&mapped.device)).collect();
        let renewed = renewed(who, &devices);
        let mut all: Vec<(&str, Arc<Mapped>)> =
            several.iter().map(|(name, mapped)| (name.as_str(), Arc::clone(mapped))).collect();
        let count = all.len();
        // What is not listed has been removed, and stands still for good.
        let listed = renewed.iter().filter_map(|device| registry.listed(device));
        all.extend(listed.map(|mapped| (several[0].0.as_str(), mapped)));
        let renews = all.len() > count;
        let mut turns = Turns { registry, who, locked: Vec::new(), renews, lanes: Vec::new() };
        all.sort_by_key(|(_, mapped)| mapped.device.number());
        all.dedup_by_key(|(_, mapped)| mapped.device.number());
        for (name, mapped) in all {
            let off = turns.off(off);
            let turn = tokio::select! {
                biased;
                why = off.called() => return Err(VerbError::new(name, why)),
                turn = Arc::clone(&mapped.changing).lock_owned() => turn,
            };
            turns.locked.push((mapped, turn));
        }
        for (name, mapped) in several {
            // Who removes it has taken it away himself, or is about to find out.
            if who != Waiting::Remove && !registry.is_there(mapped) {
                let error = TargetError::errno(ENXIO).because("it has been removed meanwhile");
                return Err(VerbError::new(name, error));
            }
        }
        for (mapped, _) in &turns.locked {
            turns.lanes.extend(hold::lane_for_change(registry, &mapped.device).await);
        }
        Ok(turns)
    }

    /// What calls it off: `off`, but for a create or a removal that waits for nobody else.
    pub fn off(&self, off: &CallOff) -> CallOff {
        match self.who {
            Waiting::Create | Waiting::Remove if !self.renews => CallOff::default(),
            _ => off.clone(),
        }
    }

    /// True when `device` is locked, or has been removed and nobody else can change it.
    pub fn has(&self, device: &Arc<MappedDevice>) -> bool {
        self.locked.iter().any(|(mapped, _)| mapped.device.id() == device.id())
            || self.registry.listed(device).is_none()
    }
}

fn renewed(who: Waiting, devices: &[Arc<MappedDevice>]) -> Vec<Arc<MappedDevice>> {
    match who {
        Waiting::Suspend => Vec::new(),
        Waiting::Create | Waiting::Resume => Changes::renewed_by_resume(devices),
        Waiting::Remove => Changes::renewed_by_leaving(devices),
    }
}
