//! The origins of snapshots.

use super::{snapshot_report, verb_error_with_errno};
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, RegisteredDevice, TableResolver};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use udm_core::errno::{EBUSY, EINVAL};
use udm_core::{DevNo, Device, Sector, Sectors};
use udm_dm::{DeviceNameResolver, ResolvedDevice, Table};
use udm_wire::table::TableLine;

/// Target type of an origin.
const ORIGIN: &str = "snapshot-origin";

/// A device whose table is an origin, or can become one.
pub(super) struct OriginDevice {
    pub mapped: Arc<RegisteredDevice>,
    /// The disk below the device.
    pub disk: ResolvedDevice,
    pub len: Sectors,
    /// True if the table must be replaced by that of an origin.
    pub is_linear: bool,
    /// True for a clone, which is its own disk, and read-only for clients while it has snapshots.
    pub is_clone: bool,
}

impl OriginDevice {
    /// Checks that the device `mapped`, called `name`, is or can become an origin.
    ///
    /// # Errors
    /// If it has another kind of table.
    pub fn of(name: &str, mapped: Arc<RegisteredDevice>) -> Result<OriginDevice, VerbError> {
        let cannot =
            |why: String| verb_error_with_errno(name, EINVAL, format!("no origin of a snapshot: {why}"));
        let table = mapped.device.live().ok_or_else(|| cannot("it has no table".into()))?;
        let [entry] = table.targets() else {
            return Err(cannot(format!("its table has {} lines", table.targets().len())));
        };
        let kind = entry.target.type_name();
        let is_linear = kind == "linear";
        let disk = match entry.target.data_path().into_linear().filter(|_| is_linear) {
            Some((disk, Sector(0))) => Some(disk),
            Some((_, Sector(from))) => {
                return Err(cannot(format!("its table begins at sector {from} of its disk")));
            }
            None if kind == ORIGIN => entry.target.devices().pop().map(|used| used.device),
            None if entry.target.as_clone().is_some() => Some(ResolvedDevice {
                number: mapped.device.number(),
                name: mapped.device.name(),
                device: Arc::clone(&mapped.device) as Arc<dyn Device>,
                hold: None,
            }),
            None => None,
        };
        let (len, is_clone) = (entry.len, entry.target.as_clone().is_some());
        let disk = disk.ok_or_else(|| {
            let remedy = format!("create a device \"0 {} {ORIGIN} @{name}\", and a snapshot of that", len.0);
            cannot(match kind {
                "snapshot" => format!("it is a snapshot: {remedy}"),
                _ => format!("its table is {kind}, and not linear: {remedy}"),
            })
        })?;
        Ok(OriginDevice { mapped, disk, len, is_linear, is_clone })
    }

    /// Checks that no other verb is changing the table.
    ///
    /// # Errors
    /// EBUSY if the device is suspended or its inactive slot has a table.
    pub fn is_ours_to_change(&self, name: &str) -> Result<(), VerbError> {
        match (self.mapped.device.is_suspended(), self.mapped.device.inactive().is_some()) {
            (true, _) => Err(verb_error_with_errno(name, EBUSY, "it is suspended: resume it first")),
            (_, true) => Err(verb_error_with_errno(
                name,
                EBUSY,
                "its inactive slot has a table: resume or clear it first",
            )),
            _ => Ok(()),
        }
    }

    /// The table of the device as an origin.
    pub fn with_snapshots(&self) -> String {
        format!("0 {} {ORIGIN} {}", self.len.0, self.disk.number)
    }

    /// The table of the device without snapshots.
    pub fn linear(&self) -> String {
        format!("0 {} linear {} 0", self.len.0, self.disk.number)
    }
}

/// The live table of `mapped`, an origin that was linear before it had snapshots, if its linear
/// table matches `lines`: one line over all of the same disk, or the disk itself. May block when it
/// opens the disk.
pub(crate) fn origin_table_if_linear_matches(
    registry: &DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
    lines: &[TableLine],
    folder: &BaseDir,
) -> Option<Arc<Table>> {
    let [line] = lines else { return None };
    let [disk, from] = &line.args[..] else { return None };
    let live = mapped.device.live()?;
    let origin = OriginDevice::of(name, Arc::clone(mapped)).ok()?;
    let is_linear =
        line.kind == "linear" && line.start == 0 && [0, origin.len.0].contains(&line.len) && from == "0";
    let found = TableResolver::new(registry, folder).get(disk).ok().filter(|_| is_linear)?;
    (found.number == origin.disk.number).then_some(live)
}

/// The devices that are origins over `disk`, with their names.
pub(super) fn origins_over(registry: &DeviceRegistry, disk: DevNo) -> Vec<(String, OriginDevice)> {
    let all = registry.all().into_iter().map(|mapped| (mapped.device.name(), mapped));
    let origins =
        all.filter_map(|(name, mapped)| Some((name.clone(), OriginDevice::of(&name, mapped).ok()?)));
    origins
        .filter(|(_, origin)| !origin.is_linear && !origin.is_clone && origin.disk.number == disk)
        .collect()
}

/// Makes `mapped`, a snapshot that was created by name, a device for the clients of its origin.
pub(crate) fn follow_allowed_clients_of_origin(registry: &DeviceRegistry, mapped: &RegisteredDevice) {
    let report = mapped.device.live().and_then(|table| snapshot_report(&table));
    let origin = report.and_then(|report| origins_over(registry, report.origin.number).into_iter().next());
    if let Some((_, origin)) = origin.filter(|(_, origin)| !std::ptr::eq(&*origin.mapped, mapped)) {
        mapped.allowed_clients.follow(&origin.mapped.allowed_clients);
    }
}

/// True if `mapped` has a snapshot of `disk`, live or inactive.
fn is_snapshot_of(mapped: &RegisteredDevice, disk: DevNo) -> bool {
    let tables = [mapped.device.live(), mapped.device.inactive()];
    let mut found = tables.iter().flatten().filter_map(|table| snapshot_report(table));
    found.any(|found| found.origin.number == disk)
}

/// True if a live or inactive table has a snapshot of `disk`.
pub(super) fn has_snapshots(registry: &DeviceRegistry, disk: DevNo) -> bool {
    registry.all().iter().any(|mapped| is_snapshot_of(mapped, disk))
}

/// Checks that `mapped`, called `name`, may be removed. While the device is away, its disk can be
/// opened again as a linear device, which copies nothing. So a device that `udm snapshot create`
/// has made an origin stays until it has no snapshots. An origin of a table is removed as in the
/// kernel.
///
/// # Errors
/// EBUSY if it has snapshots.
pub(crate) fn check_has_no_snapshots_by_name(
    registry: &DeviceRegistry,
    name: &str,
    mapped: &Arc<RegisteredDevice>,
) -> Result<(), VerbError> {
    if !mapped.snapshot_info().was_linear {
        return Ok(());
    }
    let Ok(origin) = OriginDevice::of(name, Arc::clone(mapped)) else { return Ok(()) };
    let all = registry.all();
    let snapshots = all.iter().filter(|mapped| is_snapshot_of(mapped, origin.disk.number));
    let names: Vec<String> = snapshots.map(|mapped| mapped.device.name()).collect();
    if names.is_empty() {
        return Ok(());
    }
    let why = format!("it has snapshots ({}): remove them first, or use --force", names.join(", "));
    Err(verb_error_with_errno(name, EBUSY, why))
}

/// Finds writes that bypass snapshots: one line for each device that can write an origin's disk
/// without copying. Such tables are legal, but after a restart mostly a mistake.
#[must_use]
pub fn find_devices_bypassing_origin(registry: &DeviceRegistry) -> Vec<String> {
    let all = registry.all();
    let mut origins: HashMap<DevNo, (String, usize)> = HashMap::new();
    for snapshot in &all {
        if let Some(found) = snapshot.device.live().and_then(|table| snapshot_report(&table)) {
            origins.entry(found.origin.number).or_insert_with(|| (snapshot.device.name(), 0)).1 += 1;
        }
    }
    let mut lines = Vec::new();
    for device in all.iter().filter(|mapped| !mapped.device.limits().read_only) {
        let Some(table) = device.device.live() else { continue };
        let copies = |kind: &str| [ORIGIN, "snapshot", "snapshot-merge"].contains(&kind);
        let past = table.targets().iter().filter(|entry| !copies(entry.target.type_name()));
        let disks = past.flat_map(|entry| entry.target.devices()).map(|used| used.device.number);
        let spoilt = disks.filter_map(|disk| origins.get(&disk).map(|found| (disk, found)));
        for (disk, (snapshot, count)) in spoilt.collect::<BTreeMap<_, _>>() {
            let others = match count - 1 {
                0 => String::new(),
                others => format!(" and {others} more"),
            };
            lines.push(format!(
                "{}: its writes are not copied for snapshot {snapshot}{others}: load \"{ORIGIN} {}\"",
                device.device.name(),
                registry.uri_of(disk)
            ));
        }
    }
    lines
}
