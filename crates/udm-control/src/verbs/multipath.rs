//! Creates a multipath device from a list of paths.

use super::CancelToken;
use super::change::{DeviceSpec, create_device_with_table_fn};
use crate::api;
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, RegisteredDevice, TableResolver};
use std::sync::Arc;
use udm_core::errno::EINVAL;
use udm_dm::{DeviceNameResolver, ResolvedDevice, TargetError};
use udm_targets::multipath::PathMaintenanceSettings;
use udm_wire::multipath_conf::grouping::{self, GroupingPolicy};
use udm_wire::multipath_conf::{MultipathSettings, PathPrioritizer};

/// How the groups of a new multipath device are made, in the words of multipath.conf. Defaults come
/// from the server's multipath.conf.
#[derive(Clone, Debug, Default)]
pub struct PathGroupingOptions {
    /// `path_grouping_policy`.
    pub policy: Option<String>,
    /// `prio`. If the server checks paths, it stays in effect for the device.
    pub prio: Option<String>,
    /// `prio_args`.
    pub prio_args: Option<String>,
}

/// Creates a multipath device over `paths`, given as words of a table, with a cancel token. Returns
/// the device as it was when it was complete. May block when it opens paths.
///
/// # Errors
/// EINVAL for bad options in `how`, for a path that is given twice and for paths of different
/// sizes; otherwise as [`super::create_device_cancellable`].
pub async fn create_multipath_cancellable(
    registry: &Arc<DeviceRegistry>,
    name: &str,
    uuid: Option<&str>,
    paths: &[String],
    how: &PathGroupingOptions,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<api::DeviceDescription, VerbError> {
    let table = |mapped: &Arc<RegisteredDevice>| {
        let table = multipath_table_from_paths(registry, mapped, paths, how, folder, cancel_token);
        table.map(Some).map_err(|e| VerbError::new(name, e))
    };
    create_device_with_table_fn(
        registry,
        DeviceSpec { name, uuid, ..DeviceSpec::default() },
        table,
        folder,
        cancel_token,
    )
    .await
}

fn invalid_argument_error(why: impl Into<String>) -> TargetError {
    TargetError::errno(EINVAL).because(why.into())
}

/// Makes the table, and sets the path maintenance of the device.
fn multipath_table_from_paths(
    registry: &DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    paths: &[String],
    how: &PathGroupingOptions,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<String, TargetError> {
    let path_maintenance = PathMaintenanceSettings::of(&mapped.device);
    let mut settings =
        path_maintenance.paths.as_deref().cloned().unwrap_or_else(|| MultipathSettings::every(5));
    if let Some(policy) = &how.policy {
        let named = GroupingPolicy::named(policy);
        settings.grouping.policy =
            named.ok_or_else(|| invalid_argument_error(format!("{policy}: no grouping policy")))?;
    }
    match (&how.prio, &how.prio_args) {
        (Some(prio), args) => {
            settings.prio = PathPrioritizer::named(prio, args.as_deref()).map_err(invalid_argument_error)?;
        }
        (None, Some(_)) => return Err(invalid_argument_error("prio_args go with a prio")),
        (None, None) => {}
    }
    let sectors = check_paths_have_same_size(registry, mapped, paths, folder, cancel_token)?;
    let table = grouping::build_multipath_table(&settings, sectors, paths).map_err(invalid_argument_error)?;
    if how.prio.is_some() && path_maintenance.paths.is_none() {
        let name = mapped.device.name();
        tracing::warn!(
            "{name}: its prio says how its groups are made, and nothing later: paths are not checked"
        );
    } else if how.prio.is_some() {
        PathMaintenanceSettings { paths: Some(Arc::new(settings)), ..path_maintenance }.set(&mapped.device);
    }
    Ok(table)
}

/// The size of all paths in sectors; an error if they differ.
fn check_paths_have_same_size(
    registry: &DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    paths: &[String],
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<u64, TargetError> {
    let mut opening = TableResolver::new(registry, folder).of(mapped);
    let mut seen: Vec<(&String, ResolvedDevice)> = Vec::new();
    for path in paths {
        // There may be thousands of paths, and each may block.
        if let Some(why) = cancel_token.reason() {
            return Err(why.clone());
        }
        let found = opening.get(path).map_err(|e| {
            let reason = if e.reason.is_empty() { path.clone() } else { e.reason };
            TargetError::errno(e.errno).because(reason)
        })?;
        let same = |(_, one): &&(&String, ResolvedDevice)| one.number == found.number;
        if let Some((first, _)) = seen.iter().find(same) {
            return Err(invalid_argument_error(format!("{first} and {path} are the same path")));
        }
        seen.push((path, found));
    }
    let (first, size) = match seen.first() {
        Some((first, device)) => (first, device.device.limits().size),
        None => return Err(invalid_argument_error("no path is given")),
    };
    for (path, device) in &seen {
        let other = device.device.limits().size;
        if other != size {
            let (size, other) = (size.bytes(), other.bytes());
            let why = format!("{first} has {size} bytes and {path} {other}: they are not paths to one disk");
            return Err(invalid_argument_error(why));
        }
    }
    Ok(size.0)
}
