//! What `/metrics` shows: the numbers of `status --json` and of the server, for Prometheus.
//!
//! Contract: a look takes no lock that a core takes, and reads what each core counts on its own.
//! Numbers are recent and not of one instant. A device that has served nothing of a kind has no
//! series for it.

mod families;
mod list;

use crate::http::api;
use crate::registry::{Mapped, Registry};
use crate::verbs;
use families::{Families, Labels, seconds};
use list as m;
use udm_core::latency::end_of;
use udm_core::{Device as _, Nanos};
use udm_frontends::nbd::ServedReport;

/// The type of [`text`].
pub const CONTENT_TYPE: &str = prometheus::TEXT_FORMAT;

/// All metrics, as text.
#[must_use]
pub fn text(registry: &Registry) -> Vec<u8> {
    let mut all = Families::default();
    all.add(&m::BUILD, &[("version", env!("CARGO_PKG_VERSION"))], 1.0);
    server(registry, &mut all);
    for mapped in registry.all() {
        device(registry, &mapped, &mut all);
    }
    for snapshot in verbs::snapshot::list(registry) {
        let labels: Labels<'_> = &[("device", &snapshot.name)];
        let valid = !matches!(snapshot.state.as_str(), "invalid" | "merge failed");
        all.add(&m::SNAPSHOT_VALID, labels, f64::from(valid));
        all.add(&m::SNAPSHOT_USED, labels, snapshot.used_bytes as f64);
        all.add(&m::SNAPSHOT_METADATA, labels, snapshot.metadata_bytes as f64);
        all.add(&m::SNAPSHOT_STORE, labels, snapshot.total_bytes as f64);
    }
    all.text()
}

fn server(registry: &Registry, all: &mut Families) {
    let Some(server) = registry.exporter().and_then(|exporter| exporter.server()) else { return };
    let stats = server.read();
    all.add(&m::CONNECTIONS, &[], stats.connections as f64);
    all.add(&m::ACCEPTED, &[], stats.accepted as f64);
    all.add(&m::REFUSED, &[], stats.refused as f64);
    all.add(&m::MOVES, &[], stats.moves as f64);
    for (core, requests) in server.requests().into_iter().enumerate() {
        all.add(&m::CORE_REQUESTS, &[("core", &core.to_string())], requests as f64);
    }
}

fn device(registry: &Registry, mapped: &Mapped, all: &mut Families) {
    let (shown, paths) = verbs::shown(registry, mapped);
    let name = ("device", shown.name.as_str());
    let uuid = shown.uuid.as_deref().unwrap_or_default();
    all.add(&m::DEVICE, &[name, ("uuid", uuid), ("number", &shown.number)], 1.0);
    all.add(&m::SIZE, &[name], shown.size_bytes as f64);
    all.add(&m::SUSPENDED, &[name], f64::from(shown.state == "suspended"));
    all.add(&m::READ_ONLY, &[name], f64::from(shown.read_only));
    all.add(&m::OPEN, &[name], shown.open_count as f64);
    all.add(&m::EVENTS, &[name], shown.event_nr.into());
    if let Some(report) = registry.exporter().and_then(|exporter| exporter.served(mapped.device.id())) {
        served(&shown.name, &report, all);
    }
    // The place of a path in its group tells two of one disk apart.
    let mut last = (0, 0, 0);
    for shown in &paths {
        let nth = if (shown.start_bytes, shown.group) == (last.0, last.1) { last.2 + 1 } else { 1 };
        last = (shown.start_bytes, shown.group, nth);
        path(name.1, nth, shown, all);
    }
}

fn served(device: &str, report: &ServedReport, all: &mut Families) {
    let device = ("device", device);
    all.add(&m::IN_FLIGHT, &[device], report.in_flight as f64);
    for (op, served) in verbs::OPS.iter().zip(&report.ops).filter(|(_, served)| served.requests > 0) {
        let labels: Labels<'_> = &[device, ("op", op)];
        all.add(&m::REQUESTS, labels, served.requests as f64);
        all.add(&m::BYTES, labels, served.bytes as f64);
        all.add(&m::ERRORS, labels, served.errors as f64);
        let steps = served.latency.steps.iter().enumerate();
        let steps: Vec<_> = steps.map(|(step, count)| (end(step), *count)).collect();
        all.add_times(&m::DURATION, labels, &steps, served.latency.time);
    }
}

/// The end of a step; the last has none.
fn end(step: usize) -> Nanos {
    if step + 1 == udm_core::latency::STEPS { Nanos::NEVER } else { end_of(step) }
}

fn path(device: &str, nth: u64, path: &api::Path, all: &mut Families) {
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
    all.add(&m::PATH_FAILED, &labels, seconds(Nanos(path.failed_ns)));
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

    /// docs/metrics.md lists each metric in its order, with its kind and what it is.
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
