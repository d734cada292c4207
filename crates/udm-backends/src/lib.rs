//! The devices at the bottom of a stack: null, memory, a pattern, files and block devices.
//!
//! [`open`] makes a device of its URI; one list names all kinds. Each is a [`Device`] whose lanes hold to the rules of
//! [`udm_core::Lane`]. The layer above asserts its boundary (alignment, length, flags); a range beyond the end is refused here once more, since
//! it would grow a file.
//!
//! A backend knows no target, and no other backend.
#![forbid(unsafe_code)]

mod file;
mod mem;
mod null;
mod pattern;
#[cfg(test)]
mod testing;

use std::sync::Arc;
use udm_core::{Bio, Device, OpenError, Sectors, Status};
use udm_wire::uri::DeviceUri;

/// Opens the device that `uri` names.
///
/// # Errors
/// What the system says, in one line that names the device; EINVAL for parameters out of range; EOPNOTSUPP for kinds that this crate does not
/// have: an NBD client is not part of it, and mapped devices and numbers are known to the registry of devices alone.
pub fn open(uri: &DeviceUri) -> Result<Arc<dyn Device>, OpenError> {
    Ok(match uri {
        DeviceUri::File { path, direct, readonly } => {
            Arc::new(file::File::open(path.as_ref(), *direct, *readonly)?)
        }
        DeviceUri::Null(params) => Arc::new(null::Null::new(params)?),
        DeviceUri::Mem { size } => Arc::new(mem::Mem::new(*size)?),
        DeviceUri::Pattern { size } => Arc::new(pattern::Pattern::new(*size)?),
        DeviceUri::Nbd(_) => return Err(unsupported(uri, "this build of udm has no NBD client")),
        DeviceUri::Mapped(_) | DeviceUri::Number { .. } => {
            return Err(unsupported(uri, "a mapped device is no backend"));
        }
    })
}

fn unsupported(uri: &DeviceUri, why: &str) -> OpenError {
    OpenError::new(95, format!("{uri}: {why}"))
}

/// The status of a bio that can't be served on a device of `size`: its range ends beyond it, or its data is not as long as the range. (A
/// load generator leaves the data out for devices that move none.)
fn refusal(bio: &Bio, size: Sectors) -> Option<Status> {
    if bio.sector.0.checked_add(bio.sectors.0).is_none_or(|end| end > size.0) {
        return Some(Status::IoErr);
    }
    (bio.op.has_data() && bio.data.len() as u64 != bio.sectors.bytes()).then_some(Status::Inval)
}
