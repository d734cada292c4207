//! The verbs that show devices, tables and status, as dmsetup does.

use super::power::disk_power_states;
use super::queue::queue_reports;
use super::throttle::describe_throttle;
use crate::api;
use crate::error::VerbError;
use crate::registry::{DeviceRegistry, RegisteredDevice};
use std::collections::HashSet;
use std::sync::Arc;
use udm_core::{DevNo, Device, Nanos, Op};
use udm_dm::{
    MultipathTarget, PathLatencyAndHedgeReport, PathReport, QueueingAndFailbackReport, Table, TableEntry,
    Target,
};
use udm_targets::TARGETS;
use udm_targets::multipath::PathMaintenanceSettings;
use udm_wire::multipath_conf::{Failback, NoPathRetry};

/// The version of the kernel's device mapper (6.12) whose behaviour udm follows.
const DRIVER_VERSION: &str = "4.48.0";

/// Names of the operations in replies, in the order of [`Op::ALL`].
pub(crate) const OPS: [&str; Op::ALL.len()] = ["read", "write", "flush", "discard", "write-zeroes"];

/// All mapped devices, by number.
#[must_use]
pub fn list_mapped_devices(registry: &DeviceRegistry) -> Vec<api::DeviceDescription> {
    registry.all().iter().map(|mapped| describe_mapped_device(registry, mapped)).collect()
}

/// One mapped device.
///
/// # Errors
/// ENXIO if there is none.
pub fn describe_device_by_name(
    registry: &DeviceRegistry,
    name: &str,
) -> Result<api::DeviceDescription, VerbError> {
    Ok(describe_mapped_device(registry, &*registry.find(name)?))
}

/// A device, with the target types and the paths of its live table. Each type is listed once.
pub(crate) fn device_and_paths(
    registry: &DeviceRegistry,
    mapped: &RegisteredDevice,
) -> (api::DeviceDescription, Vec<String>, Vec<api::MultipathPathReport>) {
    let device = describe_mapped_device(registry, mapped);
    let Some(table) = mapped.device.live() else { return (device, Vec::new(), Vec::new()) };
    let mut types: Vec<&str> = Vec::new();
    for entry in table.targets() {
        let name = entry.target.type_name();
        if !types.contains(&name) {
            types.push(name);
        }
    }
    (device, types.into_iter().map(String::from).collect(), path_reports(registry, &table))
}

/// The table of a device, live or in the inactive slot.
///
/// # Errors
/// ENXIO if there is no such device.
pub fn table_by_device_name(
    registry: &DeviceRegistry,
    name: &str,
    inactive: bool,
) -> Result<api::TableDescription, VerbError> {
    Ok(table_of(registry, &*registry.find(name)?, inactive))
}

/// The tables of all devices, live or in the inactive slot, by number.
#[must_use]
pub fn all_device_tables(registry: &DeviceRegistry, inactive: bool) -> api::TableList {
    let all = registry.all();
    api::TableList { tables: all.iter().map(|mapped| table_of(registry, mapped, inactive)).collect() }
}

fn table_of(registry: &DeviceRegistry, mapped: &RegisteredDevice, inactive: bool) -> api::TableDescription {
    let (name, number) = (mapped.device.name(), mapped.device.number().to_string());
    let Some(table) = table_in_slot(mapped, inactive) else {
        return api::TableDescription { name, number, ..api::TableDescription::default() };
    };
    let mut known = HashSet::new();
    let numbers = table.devices().map(|device| device.number).filter(|number| known.insert(*number));
    let mut numbers: Vec<DevNo> = numbers.collect();
    // The kernel adds each device at the head of its list.
    numbers.reverse();
    let below =
        |number: DevNo| api::UnderlyingDevice { number: number.to_string(), uri: registry.uri_of(number) };
    api::TableDescription {
        name,
        number,
        text: table.text(),
        lines: table_lines(&table, |target| target.table()),
        devices: numbers.into_iter().map(below).collect(),
    }
}

/// The status of a device's table.
///
/// # Errors
/// ENXIO if there is no such device.
pub fn table_status_by_device_name(
    registry: &DeviceRegistry,
    name: &str,
    inactive: bool,
) -> Result<api::TableStatus, VerbError> {
    Ok(table_status_of(registry, &*registry.find(name)?, inactive))
}

/// The status of the tables of all devices, by number.
#[must_use]
pub fn all_table_statuses(registry: &DeviceRegistry, inactive: bool) -> api::TableStatusList {
    let all = registry.all();
    api::TableStatusList {
        statuses: all.iter().map(|mapped| table_status_of(registry, mapped, inactive)).collect(),
    }
}

fn table_status_of(registry: &DeviceRegistry, mapped: &RegisteredDevice, inactive: bool) -> api::TableStatus {
    // The number is read first: a client that waits for a number other than this one then sees an
    // event that comes between the two.
    let event_nr = mapped.device.event_nr();
    let table = table_in_slot(mapped, inactive);
    api::TableStatus {
        name: mapped.device.name(),
        text: table.as_ref().map(|t| t.status()).unwrap_or_default(),
        lines: table.as_ref().map(|t| table_lines(t, |target| target.status())).unwrap_or_default(),
        event_nr,
        paths: table.as_ref().map(|t| path_reports(registry, t)).unwrap_or_default(),
        path_maintenance: table.as_ref().and_then(|t| path_maintenance_status(mapped, t)),
        stalls: table.map(|table| device_stall_reasons(registry, &table)).unwrap_or_default(),
    }
}

/// The devices below a table that wait for something, with their reasons.
fn device_stall_reasons(registry: &DeviceRegistry, table: &Table) -> Vec<api::DeviceStallReason> {
    let mut waits = Vec::new();
    for used in table.devices() {
        let mut below: Vec<Arc<dyn Device>> = vec![used.device];
        while let Some(device) = below.pop() {
            let uri = || registry.uri_of(used.number);
            waits.extend(device.stall_reason().map(|why| api::DeviceStallReason { uri: uri(), why }));
            below.extend(device.stacked().map(|stacked| stacked.children()).unwrap_or_default());
        }
    }
    waits.sort_unstable_by(|a, b| (&a.uri, &a.why).cmp(&(&b.uri, &b.why)));
    waits.dedup();
    waits
}

/// The versions of this build.
#[must_use]
pub fn server_versions() -> api::ServerVersions {
    let version = |[a, b, c]: [u32; 3]| format!("{a}.{b}.{c}");
    api::ServerVersions {
        version: env!("CARGO_PKG_VERSION").into(),
        driver_version: DRIVER_VERSION.into(),
        targets: TARGETS
            .iter()
            .map(|t| api::TargetVersion { name: t.name.into(), version: version(t.version) })
            .collect(),
    }
}

/// Number of users of the device: clients, and tables in either slot of other devices.
pub(super) fn open_count(registry: &DeviceRegistry, mapped: &RegisteredDevice) -> u64 {
    let clients = registry.exporter().map_or(0, |exporter| exporter.users(mapped.device.id()));
    (mapped.use_count() + clients) as u64
}

/// The description of a device that `info` returns.
pub(super) fn describe_mapped_device(
    registry: &DeviceRegistry,
    mapped: &RegisteredDevice,
) -> api::DeviceDescription {
    let info = mapped.device.info();
    api::DeviceDescription {
        name: info.name,
        uuid: info.uuid,
        number: info.number.to_string(),
        size_bytes: info.size.bytes(),
        state: if info.suspended { "suspended" } else { "active" }.into(),
        live_table: info.live,
        inactive_table: info.inactive,
        open_count: open_count(registry, mapped),
        event_nr: info.event_nr,
        targets: info.targets as u64,
        read_only: info.read_only,
        deferred_remove: mapped.is_deferred(),
        queues: queue_reports(registry, mapped),
        power: disk_power_states(registry, mapped),
        throttle: describe_throttle(mapped),
    }
}

fn table_in_slot(mapped: &RegisteredDevice, inactive: bool) -> Option<Arc<Table>> {
    if inactive { mapped.device.inactive() } else { mapped.device.live() }
}

fn table_lines(table: &Table, params: impl Fn(&dyn Target) -> String) -> Vec<api::TableOrStatusLine> {
    let line = |entry: &TableEntry| api::TableOrStatusLine {
        start_bytes: entry.start.bytes(),
        length_bytes: entry.len.bytes(),
        target: entry.target.type_name().into(),
        params: params(&*entry.target),
    };
    table.targets().iter().map(line).collect()
}

/// The paths of a table, with their counters.
fn path_reports(registry: &DeviceRegistry, table: &Table) -> Vec<api::MultipathPathReport> {
    let of = |entry: &TableEntry| {
        let start_bytes = entry.start.bytes();
        let reports = entry.target.as_multipath().map(MultipathTarget::path_reports);
        let reports = reports.into_iter().flatten();
        reports
            .map(|report| api::MultipathPathReport { start_bytes, ..path_report(registry, report) })
            .collect::<Vec<_>>()
    };
    table.targets().iter().flat_map(of).collect()
}

/// How the paths of a table of a device are maintained.
fn path_maintenance_status(mapped: &RegisteredDevice, table: &Table) -> Option<api::PathMaintenanceStatus> {
    let settings = PathMaintenanceSettings::of(&mapped.device).paths?;
    let QueueingAndFailbackReport { queueing, fails_in, failback: planned, manual_group } =
        table.targets().iter().find_map(|entry| entry.target.as_multipath()?.path_maintenance_report())?;
    let no_path_retry = settings.no_path_retry.map(|rule| match rule {
        NoPathRetry::Fail => "fail".to_owned(),
        NoPathRetry::Queue => "queue".to_owned(),
        NoPathRetry::Checks(checks) => checks.to_string(),
    });
    let failback = match settings.failback {
        Failback::Manual => "manual".to_owned(),
        Failback::Immediate => "immediate".to_owned(),
        Failback::Followover => "followover".to_owned(),
        Failback::After(time) => (time.0 / 1_000_000_000).to_string(),
    };
    Some(api::PathMaintenanceStatus {
        no_path_retry,
        queueing,
        queueing_left_ns: fails_in.map(|left| left.0),
        failback,
        failback_group: planned.map(|(group, _)| group as u64),
        failback_left_ns: planned.map(|(_, left)| left.0),
        group_by_hand: manual_group.map(|group| group as u64),
    })
}

fn path_report(registry: &DeviceRegistry, report: PathReport) -> api::MultipathPathReport {
    // A mapped device may have been renamed since the table was loaded.
    let name = registry.name_of(report.number).unwrap_or(report.name);
    let moved = |(requests, bytes)| api::RequestAndByteCount { requests, bytes };
    api::MultipathPathReport {
        start_bytes: 0,
        number: report.number.to_string(),
        name,
        group: report.group as u64,
        state: if report.failed { "failed" } else { "active" }.into(),
        state_ns: report.in_state.0,
        failed_ns: report.failed_for.0,
        failures: report.fail_count,
        checker: report.check.text().into(),
        held: report.held,
        priority: report.prio,
        in_flight: report.in_flight,
        served: OPS.iter().zip(report.ops).map(|(op, n)| ((*op).to_owned(), moved(n))).collect(),
        errors: report.errors_by.iter().map(|(status, n)| (status.text().to_owned(), *n)).collect(),
        retries: report.retries,
        ejected: report.ejected,
        ejections: report.ejections,
        watch: report.watch.map(path_latency_and_hedge_counters),
    }
}

fn path_latency_and_hedge_counters(report: PathLatencyAndHedgeReport) -> api::PathLatencyAndHedgeCounters {
    let step = |(below, reads): (Nanos, u64)| api::PathLatencyBucket { below_ns: below.0, reads };
    api::PathLatencyAndHedgeCounters {
        waiting: report.waiting,
        given_up: report.abandoned_reads,
        late: report.late_completions,
        uncopied: report.uncopied_reads,
        hedges: report.hedges,
        hedges_won: report.hedges_won,
        hedges_wasted: report.hedges_wasted,
        hedges_refused: report.hedges_refused,
        hedges_free: report.free_hedges,
        latency: report.latency.into_iter().map(step).collect(),
        latency_sum_ns: report.time.0,
    }
}
