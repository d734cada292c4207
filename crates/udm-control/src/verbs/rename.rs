//! Renaming devices, and giving them a uuid.

use crate::error::VerbError;
use crate::registry::{NewName, Registry};
use udm_core::errno::EIO;
use udm_dm::TargetError;

/// Gives the device `word` another name, or a uuid if it has none. Whatever uses it goes on, and
/// so does what is asked of it, whatever state it is in. Raises an event when it has a live table.
/// May block for the state folder, where marks of stores go with a name.
///
/// # Errors
/// EINVAL for a name or uuid that no device can have, and where there is a uuid already; EBUSY for
/// one that is taken, its own included, and while the device is being created or removed; ENXIO
/// when there is no such device; EIO where a mark can't be moved: nothing has changed then.
pub fn rename(registry: &Registry, word: &str, to: NewName<'_>) -> Result<(), VerbError> {
    let mapped = registry.may_rename(word, to)?;
    let change = || registry.rename(&mapped, word, to);
    match (registry.state_folder(), to) {
        (Some(folder), NewName::Name(new)) => {
            let failed = |error: std::io::Error| {
                let why = format!("what is kept against it can't be moved: {error}");
                VerbError::new(word, TargetError::errno(error.raw_os_error().unwrap_or(EIO)).because(why))
            };
            folder.renaming(&mapped.device, new, failed, change)
        }
        _ => change(),
    }
}
