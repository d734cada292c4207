//! Hands all devices over to another process, and takes them over there.
//!
//! Contract: [`check_handover`] changes nothing and says what cannot be handed over. Then
//! [`remove_devices_for_handover`] removes the devices as a shutdown does: snapshots stay attached
//! until [`StateFolder::hand_over_all`](crate::StateFolder::hand_over_all). The other process, or
//! this one if that fails, creates them again ([`create_handed_over_devices`]) with the same names,
//! UUIDs, numbers and tables. Failed paths stay failed, and a path or group that an administrator
//! chose stays chosen.
//!
//! Not handed over: what a path selector has measured, the time of `flakey`, and settings of queues
//! that a verb changed.

use super::change::{create_device, drop_on_thread, resume_devices};
use super::handover_counters::{counters_to_hand_over, take_over_counters};
pub use super::handover_state::{
    HandedOverDevice, HandedOverDevices, HandedOverDisk, HandedOverDiskIdentity, HandedOverNbdExport,
    HandedOverTable,
};
use super::remove::remove_described_device;
use super::{CancelToken, DeviceSpec, clone, snapshot, tables, throttle_settings};
use crate::config::{self, DesiredDevice};
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, RegisteredDevice, RequestQueueParams};
use futures_util::stream::{self, StreamExt};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use udm_backends::{DiskIdentity, KnownObject};
use udm_core::DevNo;
use udm_core::errno::{EBUSY, EOPNOTSUPP};
use udm_dm::{DeviceSetTransition, MultipathTarget, Table, TargetError};
use udm_wire::uri::{self, DeviceUri};
use udm_wire::words::escape_table_word;

/// Number of devices that are created or removed at the same time.
const AT_ONCE: usize = 16;

/// Checks that all devices can be handed over. Changes nothing.
///
/// # Errors
/// EBUSY for a device that is busy or suspended, EOPNOTSUPP for state that would be lost: what it
/// is and what to do.
pub fn check_handover(registry: &DeviceRegistry) -> Result<(), VerbError> {
    let all = registry.all();
    let refuse = |name: &str, errno, why: String| {
        Err(VerbError::new("upgrade", TargetError::new(format!("{name}: {why}")).with_errno(errno)))
    };
    if let Some(busy) =
        registry.all_with_pending().iter().find(|one| !all.iter().any(|m| Arc::ptr_eq(m, one)))
    {
        return refuse(&busy.device.name(), EBUSY, "it is being created or removed: try again".into());
    }
    for mapped in &all {
        let name = mapped.device.name();
        if mapped.device.is_suspended() || mapped.device.is_changing() {
            return refuse(&name, EBUSY, "it is suspended: resume it first".into());
        }
        if mapped.is_deferred.load(Ordering::Relaxed) {
            let why = "it is removed when its last client has gone: wait, or cancel the removal";
            return refuse(&name, EBUSY, why.into());
        }
        for table in [mapped.device.live(), mapped.device.inactive()].iter().flatten() {
            let targets = table.targets().iter().filter(|entry| entry.target.as_clone().is_none());
            let state = targets.filter_map(|entry| entry.target.state_outside_table()).next();
            if let Some(state) = state {
                return refuse(&name, EOPNOTSUPP, format!("it has {state}; this would be lost"));
            }
            let memory =
                table.devices().map(|used| registry.uri_of(used.number)).find(|uri| is_in_memory(uri));
            if let Some(uri) = memory {
                return refuse(&name, EOPNOTSUPP, format!("the content of {uri} is memory of this server"));
            }
            for used in table.devices() {
                if let Err(why) = registry.check_disk_can_be_reopened(used.number) {
                    return refuse(&name, EOPNOTSUPP, why);
                }
            }
        }
    }
    config::config_to_hand_over(registry).map(drop)
}

/// True for a device whose content ends with the process.
fn is_in_memory(uri: &str) -> bool {
    match uri::parse_device_uri(uri) {
        Ok(DeviceUri::Mem { .. }) => true,
        Ok(DeviceUri::Null(null)) => null.memory_backed || null.cache_size > 0,
        _ => false,
    }
}

/// Removes all devices, users before what they use, and returns them. No client uses a device any
/// more, and [`DeviceRegistry::begin_shutdown`] was called. After an error, the devices that were
/// removed until then are in `removed`.
///
/// # Errors
/// A device cannot be removed, or can no longer be handed over.
pub async fn remove_devices_for_handover(
    registry: &Arc<DeviceRegistry>,
    cancel_token: &CancelToken,
    removed: &mut HandedOverDevices,
) -> Result<(), VerbError> {
    check_handover(registry)?;
    (removed.config, removed.absent) = config::config_to_hand_over(registry)?;
    removed.exports = registry.exports().into_iter().map(|export| export.name).collect();
    let disk = |(uri, identity): (String, DiskIdentity)| HandedOverDisk { uri, identity: identity.into() };
    removed.disks = registry.opened_disks().into_iter().map(disk).collect();
    removed.nbd_exports = registry.opener().nbd_exports_in_use().into_iter().map(Into::into).collect();
    let namespaces = registry.opener().nvme_namespaces_in_use();
    removed.nvme_namespaces = namespaces.into_iter().map(Into::into).collect();
    let mut left: VecDeque<Arc<RegisteredDevice>> = registry.all().into();
    // Each round removes at least one device, because no two use each other.
    let mut postponed = 0;
    while let Some(mapped) = left.pop_front() {
        let stands_alone = |mapped: &Arc<RegisteredDevice>| {
            mapped.use_count() == 0
                && DeviceSetTransition::partners_of_removal(std::slice::from_ref(&mapped.device)).is_empty()
        };
        if mapped.use_count() > 0 && postponed <= left.len() {
            left.push_back(mapped);
            postponed += 1;
            continue;
        }
        postponed = 0;
        let mut group = vec![mapped];
        if stands_alone(&group[0]) {
            let (more, others) = left.drain(..).partition::<Vec<_>, _>(stands_alone);
            group.extend(more);
            left = others.into();
        }
        remove_group(registry, group, cancel_token, removed).await?;
    }
    sort_for_creation(&mut removed.devices);
    Ok(())
}

/// Removes devices, some at the same time. A device that was removed is in `removed` also if this
/// is dropped before it ends.
async fn remove_group(
    registry: &Arc<DeviceRegistry>,
    group: Vec<Arc<RegisteredDevice>>,
    cancel_token: &CancelToken,
    removed: &mut HandedOverDevices,
) -> Result<(), VerbError> {
    let removals = group.into_iter().map(|mapped| async {
        let (name, mut found) = (mapped.device.name(), None);
        let begun = |mapped: &RegisteredDevice| found = Some(device_to_hand_over(registry, mapped));
        let left = remove_described_device(registry, &name, mapped, |_| true, begun, cancel_token).await?;
        Ok((found, left))
    });
    let mut removals = stream::iter(removals).buffer_unordered(AT_ONCE);
    let (mut unused, mut failed) = (Vec::new(), Ok(()));
    while let Some(done) = removals.next().await {
        match done {
            Ok((found, left)) => {
                removed.devices.extend(found);
                unused.push(left);
            }
            Err(error) if failed.is_ok() => failed = Err(error),
            Err(_) => {}
        }
    }
    drop_on_thread(registry, unused, &CancelToken::default()).await;
    failed
}

/// Sorts devices so that each comes after those that it uses, and origins after their snapshots.
fn sort_for_creation(devices: &mut [HandedOverDevice]) {
    // A table in the inactive slot is loaded after all devices exist.
    let wanted: Vec<DesiredDevice> = devices
        .iter()
        .filter_map(|device| {
            let text = device.live.as_ref().map(|table| table.text.clone())?;
            DesiredDevice::new(&device.name, text, None, false).ok()
        })
        .collect();
    let order = config::creation_order(&wanted);
    let places: HashMap<&str, usize> =
        (1..).zip(order).map(|(place, index)| (wanted[index].name.as_str(), place)).collect();
    devices.sort_by_key(|device| places.get(device.name.as_str()).copied().unwrap_or(0));
}

/// What programs must know that take devices over, because they would serve them to too many
/// clients or too fast otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HandoverNeeds {
    /// A device may be used by some NBD clients only.
    pub allowed_clients: bool,
    /// A device has limits of requests or bytes per second.
    pub throttles: bool,
}

impl HandoverNeeds {
    /// The needs of the devices of a server.
    #[must_use]
    pub fn of_registry(registry: &DeviceRegistry) -> HandoverNeeds {
        let all = registry.all();
        HandoverNeeds {
            allowed_clients: all.iter().any(|mapped| mapped.allowed_clients.get().is_some()),
            throttles: all.iter().any(|mapped| mapped.device.throttle().is_some()),
        }
    }

    /// The needs of devices that were removed for a handover.
    #[must_use]
    pub fn of_devices(devices: &HandedOverDevices) -> HandoverNeeds {
        HandoverNeeds {
            allowed_clients: devices.devices.iter().any(|device| device.allow.is_some()),
            throttles: devices.devices.iter().any(|device| device.throttle.is_some()),
        }
    }
}

/// Describes a device for another process.
fn device_to_hand_over(registry: &DeviceRegistry, mapped: &RegisteredDevice) -> HandedOverDevice {
    let table = |table: &Arc<Table>| HandedOverTable {
        text: table_with_uris(registry, table),
        read_only: table.is_set_read_only(),
    };
    let live = mapped.device.live();
    let (info, requests) = (mapped.snapshot_info(), mapped.requests());
    let mut device = HandedOverDevice {
        name: mapped.device.name(),
        uuid: mapped.device.uuid(),
        minor: mapped.device.number().minor,
        read_only: mapped.read_only.load(Ordering::Relaxed),
        allow: mapped.allowed_clients.get().map(|names| names.to_vec()),
        description: mapped.description.get().to_string(),
        throttle: throttle_settings(mapped),
        queue_depth: requests.queue_depth,
        nr_hw_queues: requests.nr_hw_queues,
        live: live.as_ref().map(table),
        inactive: mapped.device.inactive().as_ref().map(table),
        is_snapshot_by_name: info.by_name,
        was_linear: info.was_linear,
        messages: Vec::new(),
        failed_by_hand: Vec::new(),
        counters: counters_to_hand_over(registry, mapped),
    };
    for entry in live.iter().flat_map(|table| table.targets()) {
        let Some(multipath) = entry.target.as_multipath() else { continue };
        describe_path_states(registry, entry.start.0, multipath, &mut device);
    }
    device
}

/// The messages and commands that fail the same paths and choose the same group.
fn describe_path_states(
    registry: &DeviceRegistry,
    start: u64,
    multipath: &dyn MultipathTarget,
    device: &mut HandedOverDevice,
) {
    for path in multipath.path_reports().into_iter().filter(|path| path.failed) {
        let uri = registry.uri_of(path.number);
        match path.held {
            Some(_) if !device.failed_by_hand.contains(&uri) => device.failed_by_hand.push(uri),
            Some(_) => {}
            None => device.messages.push((start, format!("fail_path {}", escape_table_word(&uri)))),
        }
    }
    let group = multipath.path_maintenance_report().and_then(|report| report.manual_group);
    device.messages.extend(group.map(|group| (start, format!("switch_group {group}"))));
}

/// The text of `table` with URIs in place of the numbers of devices.
pub(crate) fn table_with_uris(registry: &DeviceRegistry, table: &Table) -> String {
    let numbers: HashMap<String, DevNo> =
        table.devices().map(|used| (used.number.to_string(), used.number)).collect();
    let word = |word: &str| match numbers.get(word) {
        Some(number) => escape_table_word(&registry.uri_of(*number)).into_owned(),
        None => word.to_owned(),
    };
    let line = |line: &str| line.split(' ').map(word).collect::<Vec<_>>().join(" ");
    table.text().lines().map(line).collect::<Vec<_>>().join("\n")
}

/// Creates the devices of another process, or of this one after a failed upgrade. May block.
///
/// # Errors
/// The first device that cannot be created; those before it exist then.
pub async fn create_handed_over_devices(
    registry: &Arc<DeviceRegistry>,
    from: &HandedOverDevices,
) -> Result<(), VerbError> {
    let disks = from.disks.iter().map(|disk| (disk.uri.clone(), disk.identity.into())).collect();
    registry.remember_opened_disks(disks);
    registry.set_starting(true);
    // A path whose server is down must not prevent the upgrade, nor the way back from it.
    registry.opener().set_known_nbd_exports(from.nbd_exports.iter().map(Into::into).collect());
    registry.opener().set_known_nvme_namespaces(from.nvme_namespaces.iter().map(Into::into).collect());
    registry.opener().set_known_objects(known_objects(registry));
    let created = create_in_order(registry, &from.devices).await;
    registry.opener().set_known_nbd_exports(Vec::new());
    registry.opener().set_known_nvme_namespaces(Vec::new());
    registry.opener().set_known_objects(Vec::new());
    registry.set_starting(false);
    created?;
    registry.exporter().inspect(|exporter| exporter.reorder(&from.exports));
    for device in &from.devices {
        if let Some(HandedOverTable { text, read_only }) = &device.inactive {
            let (folder, token) = (BaseDir::none(), CancelToken::default());
            tables::load_table_cancellable(registry, &device.name, text, *read_only, &folder, &token)?;
        }
        for (sector, message) in &device.messages {
            tables::send_message_with_base_dir(registry, &device.name, *sector, message, &BaseDir::none())?;
        }
        for path in &device.failed_by_hand {
            tables::fail_or_reinstate_path(registry, &device.name, path, "fail", &BaseDir::none())?;
        }
        if let Ok(mapped) = registry.find(&device.name) {
            take_over_counters(registry, &mapped, &device.counters);
            if device.is_snapshot_by_name {
                snapshot::follow_allowed_clients_of_origin(registry, &mapped);
            }
        }
    }
    clone::record::take_over_clones(registry);
    config::take_over_config(registry, &from.config, &from.absent)
}

/// The objects that are sources of recorded clones: another version would be another source.
fn known_objects(registry: &DeviceRegistry) -> Vec<KnownObject> {
    let records = registry.state_folder().and_then(|folder| folder.clones().ok()).unwrap_or_default();
    records.into_iter().filter_map(|record| record.object).map(Into::into).collect()
}

/// Creates devices in their order. Those that depend on no other are created some at a time, so
/// that the cores answer for several while files are opened.
async fn create_in_order(
    registry: &Arc<DeviceRegistry>,
    mut left: &[HandedOverDevice],
) -> Result<(), VerbError> {
    let stands_alone = |device: &&HandedOverDevice| {
        let text = device.live.as_ref().map_or("", |table| &table.text).to_owned();
        let wanted = DesiredDevice::new(&device.name, text, None, false);
        !device.is_snapshot_by_name && wanted.is_ok_and(|wanted| wanted.stands_alone())
    };
    while !left.is_empty() {
        let group = left.iter().take_while(stands_alone).count().max(1);
        let creations = left[..group].iter().map(|device| create_handed_over_device(registry, device));
        let created: Vec<_> = stream::iter(creations).buffer_unordered(AT_ONCE).collect().await;
        created.into_iter().collect::<Result<(), _>>()?;
        left = &left[group..];
    }
    Ok(())
}

async fn create_handed_over_device(
    registry: &Arc<DeviceRegistry>,
    device: &HandedOverDevice,
) -> Result<(), VerbError> {
    let HandedOverDevice { name, queue_depth, nr_hw_queues, .. } = device;
    let (folder, token) = (BaseDir::none(), CancelToken::default());
    let allow = device.allow.as_deref().map(Into::into);
    let spec = DeviceSpec {
        name,
        uuid: device.uuid.as_deref(),
        minor: Some(device.minor),
        read_only: device.read_only,
        allow: allow.as_ref(),
        description: &device.description,
        requests: RequestQueueParams { queue_depth: *queue_depth, nr_hw_queues: *nr_hw_queues },
        throttle: device.throttle.as_ref(),
    };
    let live = device.live.as_ref();
    // A read-only table is loaded by its own verb.
    let (with, after) = match live {
        Some(table) if table.read_only => (None, live),
        table => (table.map(|table| table.text.clone()), None),
    };
    let table = |mapped: &Arc<RegisteredDevice>| {
        if device.is_snapshot_by_name {
            snapshot::restore_creation_info(registry, name, mapped)?;
        }
        mapped.snapshot_info().was_linear = device.was_linear;
        Ok(with)
    };
    let mapped = create_device(registry, spec, table, &folder, &token).await?.mapped;
    if let Some(HandedOverTable { text, read_only }) = after {
        tables::load_table_cancellable(registry, name, text, *read_only, &folder, &token)?;
        resume_devices(registry, &[(name.clone(), mapped)], &token).await?;
    }
    Ok(())
}
