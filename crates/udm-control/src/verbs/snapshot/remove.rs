//! Removing snapshots.

use super::{again, find, origin, refuse};
use crate::error::VerbError;
use crate::registry::{Folder, Registry};
use crate::verbs::call_off::CallOff;
use crate::verbs::change::resume_these;
use crate::verbs::remove::remove_it;
use crate::verbs::{tables, wait};
use std::sync::Arc;
use udm_core::DevNo;
use udm_core::errno::EBUSY;

/// Removes the snapshot `name`, and the store that was made for it unless `keep_store`. When it was
/// the last of its origin, and that was linear before, it is linear again. May block.
///
/// # Errors
/// When it is no snapshot, is in use or is being merged; what it was called off with.
pub fn remove(
    registry: &Arc<Registry>,
    name: &str,
    keep_store: bool,
    off: &CallOff,
) -> Result<(), VerbError> {
    let (mapped, disk) = find(registry, name).map(|(mapped, _, report)| (mapped, report.origin.number))?;
    let _alone = registry.alone_with_snapshots(name, [disk])?;
    if again(registry, name, &mapped)?.1.state.is_merge() {
        return Err(refuse(name, EBUSY, "it is being merged"));
    }
    wait(remove_it(registry, name, Arc::clone(&mapped), |_| true, off))?;
    let made = mapped.note().store.take().filter(|_| !keep_store);
    drop(mapped);
    if let Some(path) = made {
        // Who has removed it himself has done it.
        let _ = std::fs::remove_file(path);
    }
    settle(registry, disk);
    Ok(())
}

/// Has the origins over `disk` be linear again that were, when they have no snapshots any more. One
/// that can't be now stays an origin: without snapshots that is the same, but for discards.
pub(super) fn settle(registry: &Arc<Registry>, disk: DevNo) {
    if origin::has_snapshots(registry, disk) {
        return;
    }
    for (name, origin) in origin::over(registry, disk) {
        if !origin.mapped.note().was_linear || origin.is_ours_to_change(&name).is_err() {
            continue;
        }
        let off = CallOff::default();
        let table = origin.linear();
        let loaded = tables::load_into(registry, &origin.mapped, &name, &table, &Folder::none(), &off);
        let one = [(name, Arc::clone(&origin.mapped))];
        let done = loaded.and_then(|()| wait(resume_these(registry, &one, &off)));
        match done {
            Ok(()) => origin.mapped.note().was_linear = false,
            Err(error) => tracing::warn!("{error}: it stays an origin without snapshots"),
        }
    }
}
