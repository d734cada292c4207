//! The children of a table. Linear targets share one child per device. A striped target has one
//! child per stripe. Each other target has one child.

use super::TableEntry;
use crate::target::TargetDataPath;
use std::collections::BTreeMap;
use udm_core::{Cx, DeviceControlError, DeviceId, Lane};

/// The children of a table. The layout is fixed when the lanes are opened, even if targets change
/// later.
pub(super) struct TargetChildMap {
    /// For each target its data path and its child; the first child if it has several.
    pub lines: Vec<(TargetDataPath, usize)>,
    /// For each child its first target, and the stripe of this target.
    pub first: Vec<(usize, usize)>,
}

/// Number of children that a target needs if it shares none.
fn count_target_children(data_path: &TargetDataPath) -> usize {
    if let TargetDataPath::Striped(striped) = data_path { striped.stripes.len() } else { 1 }
}

impl TargetChildMap {
    /// Creates the layout. Linear targets that overlap on their device get a child each, because
    /// the sector of a bio there does not identify the target.
    pub fn new(entries: &[TableEntry]) -> TargetChildMap {
        let forms: Vec<TargetDataPath> = entries.iter().map(|entry| entry.target.data_path()).collect();
        let mut runs: BTreeMap<DeviceId, Vec<(u64, u64)>> = BTreeMap::new();
        for (form, entry) in forms.iter().zip(entries) {
            if let TargetDataPath::Linear(device, at) = form {
                let run = (at.0, at.0.saturating_add(entry.len.0));
                runs.entry(device.device.id()).or_default().push(run);
            }
        }
        for runs in runs.values_mut() {
            runs.sort_unstable();
        }
        let shared = |form: &TargetDataPath| match form {
            TargetDataPath::Linear(device, _) => Some(device.device.id())
                .filter(|device| runs[device].windows(2).all(|two| two[0].1 <= two[1].0)),
            _ => None,
        };
        let (mut known, mut children) =
            (BTreeMap::new(), TargetChildMap { lines: Vec::new(), first: Vec::new() });
        for (i, form) in forms.into_iter().enumerate() {
            let next = children.first.len();
            let child = shared(&form).map_or(next, |device| *known.entry(device).or_insert(next));
            if child == next {
                children.first.extend((0..count_target_children(&form)).map(|stripe| (i, stripe)));
            }
            children.lines.push((form, child));
        }
        children
    }

    /// Opens the lane of each child.
    ///
    /// # Errors
    /// If a device below cannot be opened on this core.
    pub fn open(
        &self,
        entries: &[TableEntry],
        cx: &mut Cx<'_>,
    ) -> Result<Vec<Box<dyn Lane>>, DeviceControlError> {
        let mut lanes = Vec::with_capacity(self.first.len());
        for &(target, stripe) in &self.first {
            lanes.push(match &self.lines[target].0 {
                TargetDataPath::Linear(device, _) => device.device.open(cx)?,
                TargetDataPath::Striped(striped) => striped.stripes[stripe].0.device.open(cx)?,
                TargetDataPath::OwnLane => entries[target].target.open(cx)?,
            });
        }
        Ok(lanes)
    }

    /// The offset that is added to a sector on its way to target `i`, modulo 2^64. The target is
    /// not striped.
    pub fn shift(&self, entries: &[TableEntry], i: usize) -> u64 {
        let offset = if let TargetDataPath::Linear(_, offset) = &self.lines[i].0 { offset.0 } else { 0 };
        offset.wrapping_sub(entries[i].start.0)
    }
}
