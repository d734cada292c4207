//! The counters of a server, collected for `/v1/stats` and `/metrics`.
//!
//! Contract: a reading takes no lock that a core takes; it sums the counters of each core. With
//! thousands of devices it may take a while.

use crate::api;
use crate::registry::{DeviceRegistry, RegisteredDevice};
use crate::verbs;
use std::collections::{BTreeMap, HashMap};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use udm_core::Device as _;
use udm_core::latency::latency_bucket_end;
use udm_frontends::nbd::{DeviceIoReport, OpIoCounters};
use udm_frontends::nvme::NvmeHostIoReport;

/// Start time of a server, by the wall clock and by a monotonic clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StartTime {
    wall: SystemTime,
    at: Instant,
}

impl StartTime {
    /// The current time.
    pub fn now() -> StartTime {
        StartTime { wall: SystemTime::now(), at: Instant::now() }
    }

    /// In milliseconds since 1970.
    pub fn ms(&self) -> u64 {
        self.wall.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
    }
}

/// Collects all statistics of the server that started at `began`.
pub(crate) fn collect_stats(registry: &DeviceRegistry, began: StartTime) -> api::ServerStatsReport {
    let server = registry.exporter().and_then(|exporter| exporter.server());
    let counts = server.map(|server| server.read());
    let cores = server.map(|server| server.requests()).unwrap_or_default();
    let snapshots = verbs::snapshot::list_live_snapshots(registry).into_iter();
    let mut snapshots: HashMap<_, _> = snapshots.map(|one| (one.name.clone(), one)).collect();
    let clones = verbs::clone::list_clones(registry).into_iter();
    let mut clones: HashMap<_, _> = clones.map(|one| (one.name.clone(), one)).collect();
    let moves = verbs::moves::list_running_moves(registry).into_iter();
    let mut moves: HashMap<_, _> = moves.map(|one| (one.name.clone(), one)).collect();
    let devices = registry.all();
    let device = |mapped: &_| {
        let stats = device_stats(registry, mapped);
        let snapshot = snapshots.remove(&stats.device.name);
        let clone = clones.remove(&stats.device.name);
        let moving = moves.remove(&stats.device.name);
        api::DeviceStats { snapshot, clone, moving, ..stats }
    };
    api::ServerStatsReport {
        version: env!("CARGO_PKG_VERSION").into(),
        started_ms: began.ms(),
        up_ns: began.at.elapsed().as_nanos() as u64,
        server: counts.map(|counts| api::NbdConnectionStats {
            connections: counts.connections as u64,
            tls: counts.tls as u64,
            accepted: counts.accepted,
            refused: counts.refused,
            moves: counts.moves,
        }),
        nvme: registry.nvme_target().map(|target| target.stats()),
        nvme_hosts: registry
            .nvme_target()
            .map(|target| host_stats(target.host_reports()))
            .unwrap_or_default(),
        nvme_paths: verbs::list_nvme_paths(registry),
        cores: (0..).zip(cores).map(|(core, requests)| api::CoreStats { core, requests }).collect(),
        devices: devices.iter().map(|mapped| &**mapped).map(device).collect(),
    }
}

fn device_stats(registry: &DeviceRegistry, mapped: &RegisteredDevice) -> api::DeviceStats {
    let (device, target_types, paths) = verbs::device_and_paths(registry, mapped);
    let exporter = registry.exporter();
    let report = exporter.and_then(|exporter| exporter.served(mapped.device.id()));
    let in_flight = report.as_ref().map(|report| report.in_flight);
    let served = report.as_ref().map(served_by_op).unwrap_or_default();
    api::DeviceStats { device, target_types, in_flight, served, paths, ..api::DeviceStats::default() }
}

/// The counters of operations that occurred.
fn served_by_op(report: &DeviceIoReport) -> BTreeMap<String, api::OperationStats> {
    let served = verbs::OPS.iter().zip(&report.ops);
    let served = served.filter(|(_, counts)| counts.requests + counts.in_flight > 0);
    served.map(|(op, counts)| ((*op).to_owned(), op_stats(counts))).collect()
}

fn host_stats(reports: Vec<NvmeHostIoReport>) -> Vec<api::NvmeHostStats> {
    let queue = |(queue, requests)| api::NvmeQueueStats { queue, requests };
    let stats = |one: NvmeHostIoReport| api::NvmeHostStats {
        in_flight: one.io.in_flight,
        served: served_by_op(&one.io),
        queues: one.queues.into_iter().map(queue).collect(),
        host_nqn: one.host,
    };
    reports.into_iter().map(stats).collect()
}

fn op_stats(counts: &OpIoCounters) -> api::OperationStats {
    let steps = counts.latency.steps.iter().enumerate().filter(|(_, count)| **count > 0);
    api::OperationStats {
        in_flight: counts.in_flight,
        requests: counts.requests,
        bytes: counts.bytes,
        errors: counts.errors,
        time_ns: counts.latency.time.0,
        latency: steps.map(|(step, count)| (latency_bucket_end(step).0, *count)).collect(),
    }
}
