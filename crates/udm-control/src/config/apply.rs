//! Applies a configuration file to the devices.

use super::retry::is_absence;
use super::{
    AbsentDevices, ConfigPlan, DesiredDevice, DesiredState, HandedOverConfigDevice, LastAppliedConfig,
    PlanStep, ServerConfigFile, plan_config_changes,
};
use crate::api;
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, RegisteredDevice};
use crate::verbs::{self, CancelToken, CreatedDevice, DeviceSpec, RemoveOptions};
use std::collections::{HashSet, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use udm_core::Device as _;
use udm_core::errno::{EBUSY, EINTR, EINVAL};
use udm_dm::{Table, TargetError};

/// A device that the file created or took over.
pub(super) struct ConfigOwnedDevice {
    wanted: DesiredDevice,
    mapped: Weak<RegisteredDevice>,
    /// The table that it got from the file.
    table: Weak<Table>,
}

impl ConfigOwnedDevice {
    fn new(
        wanted: &DesiredDevice,
        mapped: &Arc<RegisteredDevice>,
        table: Option<&Arc<Table>>,
    ) -> ConfigOwnedDevice {
        let table = table.map(Arc::downgrade).unwrap_or_default();
        ConfigOwnedDevice { wanted: wanted.clone(), mapped: Arc::downgrade(mapped), table }
    }

    /// The device for another process; `None` if it was removed.
    pub(super) fn to_hand_over(&self) -> Option<HandedOverConfigDevice> {
        let mapped = self.mapped.upgrade()?;
        let live = mapped.device.live().as_ref().map(Arc::downgrade).unwrap_or_default();
        let DesiredDevice { table, uuid, read_only, allow, description, throttle, .. } = self.wanted.clone();
        let is_changed = !live.ptr_eq(&self.table) || mapped.device.name() != self.wanted.name;
        let (name, allow) = (mapped.device.name(), allow.map(|names| names.to_vec()));
        Some(HandedOverConfigDevice {
            name,
            table,
            uuid,
            read_only,
            allow,
            description,
            throttle,
            is_changed,
        })
    }

    /// The device that another process has handed over; `None` if it does not exist.
    pub(super) fn taken_over(
        registry: &DeviceRegistry,
        wanted: &DesiredDevice,
        is_changed: bool,
    ) -> Option<ConfigOwnedDevice> {
        let mapped = find_device_by_name(registry, &wanted.name)?;
        let table = mapped.device.live().filter(|_| !is_changed);
        Some(ConfigOwnedDevice::new(wanted, &mapped, table.as_ref()))
    }

    /// Text about changes by verbs, if any. An origin whose snapshots were created by name does not
    /// count as changed.
    fn drift(&self) -> Option<String> {
        let (mapped, name) = (self.mapped.upgrade()?, &self.wanted.name);
        if mapped.snapshot_info().was_linear && mapped.device.name() == *name {
            return None;
        }
        let called = mapped.device.name();
        if called != *name {
            return Some(format!("{name}: it has been renamed to {called}, and is left so"));
        }
        let live = mapped.device.live().as_ref().map(Arc::downgrade).unwrap_or_default();
        (!live.ptr_eq(&self.table)).then(|| format!("{name}: a verb has changed its table, which is left so"))
    }
}

/// The configuration of `registry`.
fn require_config_file(registry: &DeviceRegistry) -> Result<&ServerConfigFile, VerbError> {
    let none = || "the server was started without a file: udm serve FILE reads one";
    registry.config().ok_or_else(|| VerbError::new("reconfigure", TargetError::errno(EINVAL).because(none())))
}

/// Creates the devices of `desired`, read from the file before; failures are in the answer. May
/// block when tables open devices.
///
/// # Errors
/// EINVAL if the registry has no file, and if the devices use each other in a cycle.
pub async fn create_declared_devices(
    registry: &Arc<DeviceRegistry>,
    desired: &DesiredState,
) -> Result<api::ReconfigureReport, VerbError> {
    let config = require_config_file(registry)?;
    let mut applied = config.applied.lock().await;
    apply_desired_state(registry, &mut applied, desired, false, None, &CancelToken::default()).await
}

/// Reads the file of `registry` and applies it; with `dry_run` only reports the changes. May block
/// on the file and when tables open devices. Waits for requests in flight if a table changes, until
/// cancelled.
///
/// # Errors
/// EINVAL if the registry has no file, and for a faulty file; nothing has changed then.
pub async fn apply_config_file(
    registry: &Arc<DeviceRegistry>,
    dry_run: bool,
    cancel_token: &CancelToken,
) -> Result<api::ReconfigureReport, VerbError> {
    let config = require_config_file(registry)?;
    let mut applied = config.applied.lock().await;
    let desired = (config.read)().map_err(|why| {
        let line = why.lines().next().unwrap_or_default();
        VerbError::new("reconfigure", TargetError::errno(EINVAL).because(line))
    })?;
    apply_desired_state(registry, &mut applied, &desired, dry_run, None, cancel_token).await
}

/// Applies `desired`; with `only`, creates those of these devices that do not exist.
pub(super) async fn apply_desired_state(
    registry: &Arc<DeviceRegistry>,
    applied: &mut LastAppliedConfig,
    desired: &DesiredState,
    dry_run: bool,
    only: Option<&HashSet<String>>,
    cancel_token: &CancelToken,
) -> Result<api::ReconfigureReport, VerbError> {
    // A later device may bring the snapshot that an earlier one waits for, so no snapshot is given
    // up before all devices were tried.
    registry.is_starting.store(true, Ordering::Relaxed);
    let done =
        plan_and_run_config_changes(registry, &mut applied.devices, desired, dry_run, only, cancel_token)
            .await;
    registry.is_starting.store(false, Ordering::Relaxed);
    let AppliedChanges { report, is_blocked, absent } = done?;
    if !dry_run {
        applied.blocked = is_blocked.then(|| desired.clone());
        let absent = AbsentDevices { desired: Some(desired.clone()), names: absent };
        applied.absent = Some(absent).filter(|absent| !absent.names.is_empty());
        if applied.blocked.is_some() || applied.absent.is_some() {
            registry.config().inspect(|config| config.is_waiting.notify_one());
        }
    }
    Ok(report)
}

/// What was changed, and what waits.
struct AppliedChanges {
    report: api::ReconfigureReport,
    /// True if some device waits for a snapshot.
    is_blocked: bool,
    /// The devices that could not be created because something that they name is not there.
    absent: HashSet<String>,
}

/// Applies `desired`, as [`apply_desired_state`].
async fn plan_and_run_config_changes(
    registry: &Arc<DeviceRegistry>,
    applied: &mut Vec<ConfigOwnedDevice>,
    desired: &DesiredState,
    dry_run: bool,
    only: Option<&HashSet<String>>,
    cancel_token: &CancelToken,
) -> Result<AppliedChanges, VerbError> {
    applied.retain(|one| one.mapped.upgrade().is_some_and(|mapped| registry.is_active(&mapped)));
    track_config_device_renames(applied, desired);
    let was: Vec<&DesiredDevice> = applied.iter().map(|one| &one.wanted).collect();
    let ConfigPlan { mut steps, mut refused, unchanged } = plan_config_changes(&was, &desired.devices)
        .map_err(|why| VerbError::new("reconfigure", TargetError::errno(EINVAL).because(why)))?;
    if let Some(only) = only {
        refused.clear();
        steps.retain(|step| match step {
            PlanStep::Create(place) => {
                let name = &desired.devices[*place].name;
                only.contains(name) && find_device_by_name(registry, name).is_none()
            }
            _ => false,
        });
    }
    let mut done = api::ReconfigureReport {
        unchanged: unchanged.len() as u64,
        notes: desired.notes.clone(),
        ..api::ReconfigureReport::default()
    };
    done.notes.extend(unchanged.iter().filter_map(|(place, _)| applied[*place].drift()));
    for (place, key, why) in refused {
        let name = desired.devices[place].name.clone();
        done.changes.push(api::DeviceConfigChange { name, change: key.into(), error: Some(why.into()) });
    }
    let (mut gone, mut absent, mut blocked) = (HashSet::new(), HashSet::new(), false);
    let mut steps = VecDeque::from(steps);
    // Number of steps that were postponed for a snapshot since the last other step.
    let mut waited = 0;
    while let Some(step) = steps.pop_front() {
        if waited > steps.len() {
            registry.is_starting.store(false, Ordering::Relaxed);
        }
        let (name, change) = match step {
            PlanStep::Remove(place) => (applied[place].wanted.name.clone(), "remove"),
            PlanStep::Reload(_, place) => (desired.devices[place].name.clone(), "reload"),
            PlanStep::Allow(_, place) => (desired.devices[place].name.clone(), "allow"),
            PlanStep::Describe(_, place) => (desired.devices[place].name.clone(), "description"),
            PlanStep::Throttle(_, place) => (desired.devices[place].name.clone(), "throttle"),
            PlanStep::Create(place)
                if find_device_by_name(registry, &desired.devices[place].name).is_some() =>
            {
                (desired.devices[place].name.clone(), "take-over")
            }
            PlanStep::Create(place) => (desired.devices[place].name.clone(), "create"),
        };
        let took = match check_not_cancelled(registry, &name, cancel_token) {
            _ if dry_run => Ok(()),
            Ok(()) => apply_config_plan_step(registry, applied, desired, &step, &cancel_token.child()).await,
            refused => refused,
        };
        let is_blocked = took.as_ref().is_err_and(|error| error.blocked);
        if is_blocked && waited <= steps.len() {
            steps.push_back(step);
            waited += 1;
            continue;
        }
        blocked |= is_blocked;
        waited = if is_blocked { waited } else { 0 };
        match (&step, &took) {
            (PlanStep::Remove(place), Ok(())) if !dry_run => drop(gone.insert(*place)),
            (PlanStep::Create(_), Err(error)) if is_absence(error) => drop(absent.insert(name.clone())),
            _ => {}
        }
        // The name has a field of its own.
        let error = took.err().map(|e| {
            let text = e.to_string();
            text.strip_prefix(&format!("{name}: ")).map_or(text.clone(), String::from)
        });
        done.changes.push(api::DeviceConfigChange { name, change: change.into(), error });
    }
    let mut place = 0..;
    applied.retain(|_| !gone.contains(&place.next().unwrap_or_default()));
    Ok(AppliedChanges { report: done, is_blocked: blocked, absent })
}

/// Follows renames: if a verb renamed a device to a name in the file, the device keeps its entry
/// under that name. Another entry with that name is dropped if its device was renamed too.
fn track_config_device_renames(applied: &mut Vec<ConfigOwnedDevice>, desired: &DesiredState) {
    let wanted: HashSet<&str> = desired.devices.iter().map(|wanted| wanted.name.as_str()).collect();
    let mut has_own = HashSet::new();
    for one in applied.iter_mut() {
        let called = one.mapped.upgrade().map(|mapped| mapped.device.name());
        if let Some(called) = called.filter(|called| wanted.contains(called.as_str())) {
            has_own.insert(called.clone());
            one.wanted.name = called;
        }
    }
    let is_called = |one: &ConfigOwnedDevice| {
        one.mapped.upgrade().is_some_and(|mapped| mapped.device.name() == one.wanted.name)
    };
    applied.retain(|one| !has_own.contains(&one.wanted.name) || is_called(one));
}

/// The device with this name; a UUID does not match.
fn find_device_by_name(registry: &DeviceRegistry, name: &str) -> Option<Arc<RegisteredDevice>> {
    registry.find(name).ok().filter(|mapped| mapped.device.name() == name)
}

fn check_not_cancelled(
    registry: &DeviceRegistry,
    name: &str,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    if let Some(why) = cancel_token.reason() {
        return Err(VerbError::new(name, why.clone()));
    }
    match registry.config() {
        Some(config) if config.ends.load(Ordering::Relaxed) => {
            Err(VerbError::new(name, TargetError::errno(EINTR).because("the server is shutting down")))
        }
        _ => Ok(()),
    }
}

/// The clients that two values of `allow` name; `None` stands for all clients.
fn clients_on_both_lists(
    one: Option<&Arc<[String]>>,
    other: Option<&Arc<[String]>>,
) -> Option<Arc<[String]>> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.iter().filter(|name| other.contains(name)).cloned().collect()),
        (one, other) => one.or(other).cloned(),
    }
}

/// Sets the clients that may use a device. Connected ones that it does not allow are disconnected,
/// and NVMe hosts lose a device that is not for all clients any more.
fn set_allowed_clients(registry: &DeviceRegistry, mapped: &RegisteredDevice, allow: Option<Arc<[String]>>) {
    mapped.allowed_clients.set(allow);
    if let Some(exporter) = registry.exporter() {
        exporter.device_changed(mapped.device.id());
        exporter.allowed_clients_changed(&mapped.allowed_clients);
    }
}

/// Runs one step, completely or not at all. A removal keeps the entry in `applied`.
async fn apply_config_plan_step(
    registry: &Arc<DeviceRegistry>,
    applied: &mut Vec<ConfigOwnedDevice>,
    desired: &DesiredState,
    step: &PlanStep,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    match *step {
        PlanStep::Remove(place) => {
            // The current name, because a verb may have renamed the device.
            let Some(name) = applied[place].mapped.upgrade().map(|mapped| mapped.device.name()) else {
                return Ok(());
            };
            verbs::remove_device_cancellable(registry, &name, RemoveOptions::default(), cancel_token).await
        }
        PlanStep::Reload(was, is) => {
            let wanted = &desired.devices[is];
            let mapped = applied[was].mapped.upgrade().ok_or_else(|| VerbError::missing(&wanted.name))?;
            let done = reload_declared_device(registry, &mapped, wanted, &desired.folder, cancel_token).await;
            if done.is_ok() {
                set_allowed_clients(registry, &mapped, wanted.allow.clone());
                applied[was] = ConfigOwnedDevice::new(wanted, &mapped, done.as_ref().ok());
            }
            done.map(drop)
        }
        PlanStep::Allow(was, is) => {
            let wanted = &desired.devices[is];
            let had = &applied[was].wanted;
            // A new table may fail, and the old one is not for the clients of the new one. So a
            // reload sets the new list, and until then those clients stay that are on both.
            let is_same = had.has_same_table(wanted) && had.uuid == wanted.uuid;
            let allow = match is_same && had.read_only == wanted.read_only {
                true => wanted.allow.clone(),
                false => clients_on_both_lists(had.allow.as_ref(), wanted.allow.as_ref()),
            };
            let mapped = applied[was].mapped.upgrade().ok_or_else(|| VerbError::missing(&wanted.name))?;
            set_allowed_clients(registry, &mapped, allow.clone());
            applied[was].wanted.allow = allow;
            Ok(())
        }
        PlanStep::Describe(was, is) => {
            let wanted = &desired.devices[is];
            let mapped = applied[was].mapped.upgrade().ok_or_else(|| VerbError::missing(&wanted.name))?;
            mapped.description.set(&wanted.description);
            applied[was].wanted.description.clone_from(&wanted.description);
            Ok(())
        }
        PlanStep::Throttle(was, is) => {
            let wanted = &desired.devices[is];
            let mapped = applied[was].mapped.upgrade().ok_or_else(|| VerbError::missing(&wanted.name))?;
            verbs::apply_throttle_settings(registry, &mapped, wanted.throttle.as_ref())?;
            applied[was].wanted.throttle.clone_from(&wanted.throttle);
            Ok(())
        }
        PlanStep::Create(is) => {
            let wanted = &desired.devices[is];
            let name = &wanted.name;
            let one = match find_device_by_name(registry, name) {
                Some(mapped) => {
                    if applied.iter().any(|one| one.mapped.ptr_eq(&Arc::downgrade(&mapped))) {
                        // Renamed since the file was read.
                        return Err(busy_verb_error(name, "another device of the file has that name by now"));
                    }
                    if mapped.device.uuid() != wanted.uuid {
                        let why = "a verb has made a device of that name with another uuid";
                        return Err(busy_verb_error(name, why));
                    }
                    if wanted.read_only {
                        return Err(busy_verb_error(
                            name,
                            "a verb has made a device of that name, for writing",
                        ));
                    }
                    set_allowed_clients(registry, &mapped, wanted.allow.clone());
                    mapped.description.set(&wanted.description);
                    verbs::apply_throttle_settings(registry, &mapped, wanted.throttle.as_ref())?;
                    let table =
                        reload_declared_device(registry, &mapped, wanted, &desired.folder, cancel_token)
                            .await?;
                    ConfigOwnedDevice::new(wanted, &mapped, Some(&table))
                }
                None => {
                    let (uuid, read_only) = (wanted.uuid.as_deref(), wanted.read_only);
                    let allow = wanted.allow.as_ref();
                    let throttle = wanted.throttle.as_ref();
                    let description = &*wanted.description;
                    let spec = DeviceSpec { name, uuid, description, ..DeviceSpec::default() };
                    let called = DeviceSpec { read_only, allow, throttle, ..spec };
                    let table = |_: &Arc<RegisteredDevice>| Ok(Some(wanted.table.clone()));
                    let CreatedDevice { mapped, table, .. } =
                        verbs::create_device(registry, called, table, &desired.folder, cancel_token).await?;
                    ConfigOwnedDevice::new(wanted, &mapped, table.as_ref())
                }
            };
            applied.push(one);
            Ok(())
        }
    }
}

fn busy_verb_error(name: &str, why: &str) -> VerbError {
    VerbError::new(name, TargetError::errno(EBUSY).because(why))
}

/// Loads another table into a device of the file.
async fn reload_declared_device(
    registry: &Arc<DeviceRegistry>,
    mapped: &Arc<RegisteredDevice>,
    wanted: &DesiredDevice,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<Arc<Table>, VerbError> {
    let name = &wanted.name;
    if mapped.snapshot_info().was_linear {
        // An origin with a matching linear table before is what the file declares.
        return verbs::snapshot::origin_table_if_linear_matches(
            registry,
            mapped,
            name,
            wanted.lines(),
            folder,
        )
        .ok_or_else(|| busy_verb_error(name, "it has snapshots that were made by name: remove them first"));
    }
    verbs::reload_live_table(registry, mapped, name, &wanted.table, folder, cancel_token).await
}
