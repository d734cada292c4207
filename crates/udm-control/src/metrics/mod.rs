//! The content of `/metrics`: the counters of `/v1/stats` in Prometheus format.
//!
//! Contract: a device without requests of a kind has no series for that kind.

mod families;
mod list;

use crate::api;
use families::{MetricFamilies, MetricLabels, nanos_to_seconds};
use list as m;
use udm_core::Nanos;

/// Content type of [`prometheus_text`].
pub const CONTENT_TYPE: &str = prometheus::TEXT_FORMAT;

/// All metrics of a reading, as text.
#[must_use]
pub fn prometheus_text(stats: &api::ServerStatsReport) -> Vec<u8> {
    let mut all = MetricFamilies::default();
    all.add(&m::BUILD, &[("version", &stats.version)], 1.0);
    if let Some(server) = &stats.server {
        all.add(&m::CONNECTIONS, &[], server.connections as f64);
        all.add(&m::TLS, &[], server.tls as f64);
        all.add(&m::ACCEPTED, &[], server.accepted as f64);
        all.add(&m::REFUSED, &[], server.refused as f64);
        all.add(&m::MOVES, &[], server.moves as f64);
    }
    if let Some(nvme) = &stats.nvme {
        all.add(&m::NVME_HOSTS, &[], nvme.hosts as f64);
        all.add(&m::NVME_CONTROLLERS, &[], nvme.controllers as f64);
        all.add(&m::NVME_CONNECTIONS, &[], nvme.connections as f64);
        all.add(&m::NVME_ACCEPTED, &[], nvme.accepted as f64);
        all.add(&m::NVME_REFUSED, &[], nvme.refused as f64);
        all.add(&m::NVME_LATE_QUIESCES, &[], nvme.late_quiesces as f64);
    }
    for one in &stats.nvme_hosts {
        let host = ("host", one.host_nqn.as_str());
        all.add(&m::NVME_HOST_IN_FLIGHT, &[host], one.in_flight as f64);
        for (op, served) in &one.served {
            let labels = [host, ("op", op)];
            all.add(&m::NVME_HOST_REQUESTS, &labels, served.requests as f64);
            all.add(&m::NVME_HOST_BYTES, &labels, served.bytes as f64);
            all.add(&m::NVME_HOST_ERRORS, &labels, served.errors as f64);
        }
        for queue in &one.queues {
            let labels = [host, ("queue", &*queue.queue.to_string())];
            all.add(&m::NVME_QUEUE_REQUESTS, &labels, queue.requests as f64);
        }
    }
    for path in &stats.nvme_paths {
        let uri = ("uri", path.uri.as_str());
        all.add(&m::NVME_PATH_UP, &[uri], f64::from(path.state == "live"));
        all.add(&m::NVME_PATH_ASSOCIATIONS, &[uri], path.associations as f64);
        all.add(&m::NVME_PATH_LOSSES, &[uri], path.losses as f64);
        all.add(&m::NVME_PATH_HELD, &[uri], path.held_writes as f64);
        for (after, writes) in [("reset", path.writes_after_reset), ("time", path.writes_after_time)] {
            all.add(&m::NVME_PATH_RELEASED, &[uri, ("after", after)], writes as f64);
        }
        for (result, resets) in [("done", path.resets), ("failed", path.failed_resets)] {
            all.add(&m::NVME_PATH_RESETS, &[uri, ("result", result)], resets as f64);
        }
    }
    for core in &stats.cores {
        all.add(&m::CORE_REQUESTS, &[("core", &core.core.to_string())], core.requests as f64);
    }
    stats.devices.iter().for_each(|one| add_device_metrics(one, &mut all));
    all.text()
}

fn add_device_metrics(stats: &api::DeviceStats, all: &mut MetricFamilies) {
    let shown = &stats.device;
    let name = ("device", shown.name.as_str());
    let uuid = shown.uuid.as_deref().unwrap_or_default();
    all.add(&m::DEVICE, &[name, ("uuid", uuid), ("number", &shown.number)], 1.0);
    all.add(&m::SIZE, &[name], shown.size_bytes as f64);
    all.add(&m::SUSPENDED, &[name], f64::from(shown.state == "suspended"));
    all.add(&m::READ_ONLY, &[name], f64::from(shown.read_only));
    all.add(&m::OPEN, &[name], shown.open_count as f64);
    all.add(&m::EVENTS, &[name], shown.event_nr.into());
    if let Some(throttle) = &shown.throttle {
        for (key, rate) in &throttle.rates {
            all.add(&m::THROTTLE_LIMIT, &[name, ("limit", key)], rate.per_second as f64);
        }
        all.add(&m::THROTTLE_WAITING, &[name], throttle.waiting as f64);
        all.add(&m::THROTTLE_DELAYED, &[name], throttle.delayed as f64);
    }
    if let Some(in_flight) = stats.in_flight {
        all.add(&m::IN_FLIGHT, &[name], in_flight as f64);
    }
    stats.served.iter().for_each(|(op, served)| add_operation_metrics(&[name, ("op", op)], served, all));
    // The index of a path in its group distinguishes two paths over one disk.
    let mut last = (0, 0, 0);
    for shown in &stats.paths {
        let nth = if (shown.start_bytes, shown.group) == (last.0, last.1) { last.2 + 1 } else { 1 };
        last = (shown.start_bytes, shown.group, nth);
        add_path_metrics(name.1, nth, shown, all);
    }
    if let Some(snapshot) = &stats.snapshot {
        let valid = !matches!(snapshot.state.as_str(), "invalid" | "merge failed");
        all.add(&m::SNAPSHOT_VALID, &[name], f64::from(valid));
        all.add(&m::SNAPSHOT_USED, &[name], snapshot.used_bytes as f64);
        all.add(&m::SNAPSHOT_METADATA, &[name], snapshot.metadata_bytes as f64);
        all.add(&m::SNAPSHOT_STORE, &[name], snapshot.total_bytes as f64);
    }
    if let Some(clone) = &stats.clone {
        let has_failed = matches!(clone.state.as_str(), "ro" | "Fail");
        all.add(&m::CLONE_WRITABLE, &[name], f64::from(!has_failed));
        all.add(&m::CLONE_ACTIVE, &[name], f64::from(clone.state == "hydrating"));
        all.add(&m::CLONE_SIZE, &[name], clone.size_bytes as f64);
        all.add(&m::CLONE_HYDRATED, &[name], clone.hydrated_bytes as f64);
        all.add(&m::CLONE_SOURCE_ERRORS, &[name], clone.source_errors as f64);
        all.add(&m::CLONE_DESTINATION_ERRORS, &[name], clone.destination_errors as f64);
    }
    if let Some(moving) = &stats.moving {
        all.add(&m::MOVE_ACTIVE, &[name], f64::from(moving.state == "copying"));
        all.add(&m::MOVE_SIZE, &[name], moving.size_bytes as f64);
        all.add(&m::MOVE_COPIED, &[name], moving.copied_bytes as f64);
        if let Some(unlogged) = moving.unlogged_bytes {
            all.add(&m::MOVE_UNLOGGED, &[name], unlogged as f64);
        }
    }
}

fn add_operation_metrics(labels: MetricLabels<'_>, served: &api::OperationStats, all: &mut MetricFamilies) {
    all.add(&m::REQUESTS, labels, served.requests as f64);
    all.add(&m::BYTES, labels, served.bytes as f64);
    all.add(&m::ERRORS, labels, served.errors as f64);
    all.add(&m::OP_IN_FLIGHT, labels, served.in_flight as f64);
    let steps: Vec<_> = served.latency.iter().map(|(below, count)| (Nanos(*below), *count)).collect();
    all.add_times(&m::DURATION, labels, &steps, Nanos(served.time_ns));
}

fn add_path_metrics(device: &str, nth: u64, path: &api::MultipathPathReport, all: &mut MetricFamilies) {
    let (start, group, nth) = (path.start_bytes.to_string(), path.group.to_string(), nth.to_string());
    let labels = [
        ("device", device),
        ("start", start.as_str()),
        ("group", &group),
        ("nth", &nth),
        ("path", &path.name),
        ("number", &path.number),
    ];
    let with = |name: &'static str, value| {
        let mut labels = labels.to_vec();
        labels.push((name, value));
        labels
    };
    all.add(&m::PATH_UP, &labels, f64::from(path.state == "active"));
    all.add(&m::PATH_EJECTED, &labels, f64::from(path.ejected));
    all.add(&m::PATH_FAILURES, &labels, path.failures as f64);
    all.add(&m::PATH_FAILED, &labels, nanos_to_seconds(Nanos(path.failed_ns)));
    all.add(&m::PATH_IN_FLIGHT, &labels, path.in_flight as f64);
    all.add(&m::PATH_RETRIES, &labels, path.retries as f64);
    for (op, moved) in path.served.iter().filter(|(_, moved)| moved.requests > 0) {
        all.add(&m::PATH_REQUESTS, &with("op", op), moved.requests as f64);
        all.add(&m::PATH_BYTES, &with("op", op), moved.bytes as f64);
    }
    for (error, count) in &path.errors {
        all.add(&m::PATH_ERRORS, &with("error", error), *count as f64);
    }
    if let Some(watch) = &path.watch {
        all.add(&m::PATH_WAITING, &labels, watch.waiting as f64);
        all.add(&m::PATH_HEDGES, &labels, watch.hedges as f64);
        all.add(&m::PATH_HEDGES_WON, &labels, watch.hedges_won as f64);
        let steps: Vec<_> = watch.latency.iter().map(|step| (Nanos(step.below_ns), step.reads)).collect();
        all.add_times(&m::PATH_DURATION, &labels, &steps, Nanos(watch.latency_sum_ns));
    }
}

#[cfg(test)]
mod tests {
    use super::list::ALL;

    /// docs/metrics.md lists each metric in order, with its kind and description.
    #[test]
    fn the_list_is_in_the_docs() {
        let docs = include_str!("../../../../docs/metrics.md");
        let rows: Vec<&str> = docs.lines().filter(|line| line.starts_with("| `udm_")).collect();
        for (row, metric) in rows.iter().zip(ALL) {
            let kind = format!("{:?}", metric.kind).to_lowercase();
            let wanted = format!("| `{}` | {kind} | {} |", metric.name, metric.help);
            assert!(row.starts_with(&wanted), "{row}\n{wanted}");
        }
        assert_eq!(rows.len(), ALL.len());
    }
}
