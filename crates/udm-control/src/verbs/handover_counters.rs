//! The counters of a device that go with it to another process: those of its clients, those of the
//! paths of its live table, and its event number.

use super::handover_paths::{HandedOverPathCounters, paths_to_hand_over, take_over_paths};
use crate::registry::{DeviceRegistry, RegisteredDevice};
use serde::{Deserialize, Serialize};
use udm_core::latency::LatencyHistogramSnapshot;
use udm_core::{Device, Nanos};
use udm_frontends::nbd::{DeviceIoReport, OpIoCounters};

/// The counters of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandedOverCounters {
    /// Event number of the device.
    pub event_nr: u32,
    /// For each operation that clients have used, in the order of `Op::ALL`.
    pub ops: Vec<HandedOverOpCounters>,
    /// For each path of the live table, in its order.
    #[serde(default)]
    pub paths: Vec<HandedOverPathCounters>,
}

/// Counters of one operation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandedOverOpCounters {
    /// Index in `Op::ALL` of `udm_core`.
    pub op: usize,
    /// Answered requests, including errors.
    pub requests: u64,
    /// Bytes of successful requests.
    pub bytes: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Sum of the latencies in ns.
    pub time_ns: u64,
    /// Number of latencies by step of [`udm_core::latency`], without empty steps.
    pub steps: Vec<(usize, u64)>,
}

/// The counters of `mapped`, whose clients have no request in flight.
pub(super) fn counters_to_hand_over(
    registry: &DeviceRegistry,
    mapped: &RegisteredDevice,
) -> HandedOverCounters {
    let served = registry.exporter().and_then(|exporter| exporter.served(mapped.device.id()));
    let op = |(op, counters): (usize, &OpIoCounters)| HandedOverOpCounters {
        op,
        requests: counters.requests,
        bytes: counters.bytes,
        errors: counters.errors,
        time_ns: counters.latency.time.0,
        steps: counters.latency.steps.iter().copied().enumerate().filter(|(_, count)| *count > 0).collect(),
    };
    let ops = served.iter().flat_map(|report| report.ops.iter().enumerate()).map(op);
    HandedOverCounters {
        event_nr: mapped.device.event_nr(),
        ops: ops.filter(|counters| counters.requests > 0).collect(),
        paths: paths_to_hand_over(mapped),
    }
}

/// Goes on with the counters of another process. Operations and steps that this program does not
/// know are left out.
pub(super) fn take_over_counters(
    registry: &DeviceRegistry,
    mapped: &RegisteredDevice,
    from: &HandedOverCounters,
) {
    mapped.device.set_event_nr(from.event_nr);
    take_over_paths(mapped, &from.paths);
    let mut report = DeviceIoReport::default();
    for counters in &from.ops {
        let Some(to) = report.ops.get_mut(counters.op) else { continue };
        let mut latency =
            LatencyHistogramSnapshot { time: Nanos(counters.time_ns), ..LatencyHistogramSnapshot::default() };
        for (step, count) in &counters.steps {
            latency.steps.get_mut(*step).into_iter().for_each(|to| *to = *count);
        }
        let HandedOverOpCounters { requests, bytes, errors, .. } = *counters;
        *to = OpIoCounters { in_flight: 0, requests, bytes, errors, latency };
    }
    registry.exporter().inspect(|exporter| exporter.set_served_before(mapped.device.id(), report));
}
