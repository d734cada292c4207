//! The rates between two statistics of a server.
//!
//! Contract: a rate that the two statistics do not give is `None`, never wrong. Examples: the
//! server was restarted, a device was added or removed, or a counter decreased.

use super::clones::{CloneRates, clone_rates};
use super::moves::{MoveRates, move_rates};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use udm_control::api::{
    self, DeviceDescription, DeviceStats, DeviceThrottle, MultipathPathReport, OperationStats,
    ServerStatsReport,
};

/// The rates of all devices.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct AllDeviceRates {
    /// Seconds between the two statistics; null if there is only one of this server.
    pub seconds: Option<f64>,
    /// Number of NBD clients and NVMe/TCP hosts.
    pub connections: u64,
    /// The devices, in the order of their numbers.
    pub devices: Vec<DeviceRates>,
}

/// The rates of a device or a path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct IoRates {
    /// Reads per second.
    pub reads: f64,
    /// Writes per second.
    pub writes: f64,
    /// Requests of all kinds per second.
    pub requests: f64,
    /// Bytes per second.
    pub bytes: f64,
    /// Failed requests per second.
    pub errors: f64,
}

/// Latency percentiles, in ns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LatencyPercentiles {
    /// Half of the requests took less.
    pub p50_ns: u64,
    /// 95 % of the requests took less.
    pub p95_ns: u64,
    /// 99 % of the requests took less.
    pub p99_ns: u64,
}

/// The figures of a device.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct DeviceRates {
    /// The name.
    pub name: String,
    /// The uuid.
    pub uuid: Option<String>,
    /// The device number.
    pub number: String,
    /// "active" or "suspended", or a more precise state: "no table", "loaded", "removing",
    /// "throttled" (requests wait because of a limit).
    pub state: String,
    /// The types of the targets.
    pub target_types: Vec<String>,
    /// The size in bytes.
    pub size_bytes: u64,
    /// Number of clients and tables that use the device.
    pub open_count: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// Failed requests since the start.
    pub errors: u64,
    /// The rates.
    pub flow: Option<IoRates>,
    /// The latency of the requests; null if there were none.
    pub latency: Option<LatencyPercentiles>,
    /// Rates per operation.
    pub ops: Vec<OpRates>,
    /// The paths.
    pub paths: Vec<PathRates>,
    /// Used part of the snapshot's store in percent; null if the device is no snapshot.
    pub filled_percent: Option<f64>,
    /// The state of the snapshot.
    pub snapshot: Option<String>,
    /// The copy of the clone; null if the device is no clone.
    pub clone: Option<CloneRates>,
    /// The move that is under way.
    pub moving: Option<MoveRates>,
    /// Its limits of requests and bytes per second.
    pub throttle: Option<DeviceThrottle>,
}

/// The rates of one operation of a device.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct OpRates {
    /// "read", "write", ...
    pub op: String,
    /// Requests per second.
    pub requests: f64,
    /// Bytes per second.
    pub bytes: f64,
    /// Failed requests per second.
    pub errors: f64,
    /// The latency of the requests.
    pub latency: Option<LatencyPercentiles>,
}

/// The figures of a path.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PathRates {
    /// The word of the path in the table.
    pub name: String,
    /// The device number.
    pub number: String,
    /// The path group, from 1.
    pub group: u64,
    /// "active" or "failed", or a more precise state: "ejected", "held".
    pub state: String,
    /// True if the path is used: it is active, or it is ejected and its group has no other path.
    pub usable: bool,
    /// The result of the last check.
    pub checker: String,
    /// Requests in flight.
    pub in_flight: u64,
    /// Requests that failed on the path since the start.
    pub errors: u64,
    /// Number of failures of the path.
    pub failures: u64,
    /// The rates.
    pub flow: Option<IoRates>,
    /// The latency of reads, if the path watch is on.
    pub latency: Option<LatencyPercentiles>,
}

/// Computes the rates between two statistics. With only one, returns the figures that it contains.
pub fn compute_rates(before: Option<&ServerStatsReport>, after: &ServerStatsReport) -> AllDeviceRates {
    let same = before.filter(|before| before.started_ms == after.started_ms);
    let pair = same.and_then(|before| {
        let ns = after.up_ns.checked_sub(before.up_ns).filter(|ns| *ns > 0)?;
        Some((before, ns as f64 / 1e9))
    });
    let known: HashMap<&str, &DeviceStats> =
        pair.iter().flat_map(|(before, _)| &before.devices).map(|d| (d.device.number.as_str(), d)).collect();
    let device = |after: &DeviceStats| {
        // The number may belong to another device since. A renamed device keeps its uuid.
        let was = known.get(after.device.number.as_str()).filter(|was| was.device.uuid == after.device.uuid);
        device_rates(was.copied(), after, pair.map(|(_, seconds)| seconds))
    };
    AllDeviceRates {
        seconds: pair.map(|(_, seconds)| seconds),
        connections: after.server.as_ref().map_or(0, |server| server.connections)
            + after.nvme.as_ref().map_or(0, |nvme| nvme.hosts),
        devices: after.devices.iter().map(device).collect(),
    }
}

fn device_rates(was: Option<&DeviceStats>, is: &DeviceStats, seconds: Option<f64>) -> DeviceRates {
    let ops = was.zip(seconds).and_then(|(was, seconds)| {
        is.served.iter().map(|(op, served)| op_rates(op, was.served.get(op), served, seconds)).collect()
    });
    let steps: Option<Vec<Vec<LatencyBucket>>> = ops
        .as_ref()
        .map(|ops: &Vec<(OpRates, Vec<LatencyBucket>)>| ops.iter().map(|(_, steps)| steps.clone()).collect());
    let ops: Option<Vec<OpRates>> = ops.map(|ops| ops.into_iter().map(|(op, _)| op).collect());
    let flow = ops.as_ref().map(|ops| {
        let sum = |of: &dyn Fn(&OpRates) -> f64| ops.iter().map(of).sum::<f64>();
        let of = |name: &str| ops.iter().find(|op| op.op == name).map_or(0.0, |op| op.requests);
        IoRates {
            reads: of("read"),
            writes: of("write"),
            requests: sum(&|op| op.requests),
            bytes: sum(&|op| op.bytes),
            errors: sum(&|op| op.errors),
        }
    });
    let was_path = |path: &MultipathPathReport, nth: usize| {
        was.and_then(|was| was.paths.get(nth)).filter(|was| is_same_table_path(was, path))
    };
    let paths = is.paths.iter().zip(api::usable_path_flags(&is.paths)).enumerate();
    let filled = |used: u64, total: u64| if total == 0 { 0.0 } else { used as f64 * 100.0 / total as f64 };
    DeviceRates {
        name: is.device.name.clone(),
        uuid: is.device.uuid.clone(),
        number: is.device.number.clone(),
        state: device_state_text(is),
        target_types: is.target_types.clone(),
        size_bytes: is.device.size_bytes,
        open_count: is.device.open_count,
        in_flight: is.in_flight.unwrap_or(0),
        errors: is.served.values().map(|served| served.errors).sum(),
        flow,
        latency: steps.and_then(|steps| compute_latency_percentiles(steps.into_iter().flatten())),
        ops: ops.unwrap_or_default(),
        paths: paths
            .map(|(nth, (path, usable))| PathRates {
                usable,
                ..path_rates(was_path(path, nth), path, seconds)
            })
            .collect(),
        filled_percent: is.snapshot.as_ref().map(|snap| filled(snap.used_bytes, snap.total_bytes)),
        snapshot: is.snapshot.as_ref().map(|snap| snap.state.clone()),
        clone: is
            .clone
            .as_ref()
            .map(|clone| clone_rates(was.and_then(|was| was.clone.as_ref()), clone, seconds)),
        moving: is
            .moving
            .as_ref()
            .map(|moving| move_rates(was.and_then(|was| was.moving.as_ref()), moving, seconds)),
        throttle: is.device.throttle.clone(),
    }
}

fn device_state_text(is: &DeviceStats) -> String {
    let device = &is.device;
    let state = match (device.deferred_remove, device.live_table) {
        (true, _) => "removing",
        (false, false) => "no table",
        _ if device.state == "active" && waits_for_limit(device) => "throttled",
        _ => &device.state,
    };
    state.to_owned()
}

/// True if requests wait because of a limit.
fn waits_for_limit(device: &DeviceDescription) -> bool {
    device.throttle.as_ref().is_some_and(|throttle| throttle.waiting > 0)
}

/// True if both are the same path in the same place of the same table.
fn is_same_table_path(was: &MultipathPathReport, is: &MultipathPathReport) -> bool {
    (was.start_bytes, was.group, &was.number) == (is.start_bytes, is.group, &is.number)
}

/// The upper bound of a latency bucket in ns, and the number of requests in it.
type LatencyBucket = (u64, u64);

/// Returns `None` if a counter decreased.
fn op_rates(
    op: &str,
    was: Option<&OperationStats>,
    is: &OperationStats,
    seconds: f64,
) -> Option<(OpRates, Vec<LatencyBucket>)> {
    let nothing = OperationStats::default();
    let was = was.unwrap_or(&nothing);
    let rate = |is: u64, was: u64| Some(is.checked_sub(was)? as f64 / seconds);
    let steps = histogram_difference(&was.latency, &is.latency)?;
    let rates = OpRates {
        op: op.to_owned(),
        requests: rate(is.requests, was.requests)?,
        bytes: rate(is.bytes, was.bytes)?,
        errors: rate(is.errors, was.errors)?,
        latency: compute_latency_percentiles(steps.iter().copied()),
    };
    Some((rates, steps))
}

fn path_rates(
    was: Option<&MultipathPathReport>,
    is: &MultipathPathReport,
    seconds: Option<f64>,
) -> PathRates {
    let errors = |path: &MultipathPathReport| path.errors.values().sum::<u64>();
    let flow = was.zip(seconds).and_then(|(was, seconds)| {
        let rate = |is: u64, was: u64| Some(is.checked_sub(was)? as f64 / seconds);
        let of = |path: &MultipathPathReport, op: &str| path.served.get(op).map_or(0, |moved| moved.requests);
        let requests =
            |path: &MultipathPathReport| path.served.values().map(|moved| moved.requests).sum::<u64>();
        let bytes = |path: &MultipathPathReport| path.served.values().map(|moved| moved.bytes).sum::<u64>();
        Some(IoRates {
            reads: rate(of(is, "read"), of(was, "read"))?,
            writes: rate(of(is, "write"), of(was, "write"))?,
            requests: rate(requests(is), requests(was))?,
            bytes: rate(bytes(is), bytes(was))?,
            errors: rate(errors(is), errors(was))?,
        })
    });
    let watched = |path: &MultipathPathReport| -> Option<Vec<LatencyBucket>> {
        path.watch
            .as_ref()
            .map(|watch| watch.latency.iter().map(|step| (step.below_ns, step.reads)).collect())
    };
    let steps = flow.and_then(|_| histogram_difference(&watched(was?)?, &watched(is)?));
    let state = match (is.state.as_str(), &is.held, is.ejected) {
        ("failed", Some(_), _) => "held",
        ("active", _, true) => "ejected",
        (state, ..) => state,
    };
    PathRates {
        name: is.name.clone(),
        number: is.number.clone(),
        group: is.group,
        state: state.to_owned(),
        usable: false,
        checker: is.checker.clone(),
        in_flight: is.in_flight,
        errors: errors(is),
        failures: is.failures,
        flow,
        latency: steps.and_then(|steps| compute_latency_percentiles(steps.into_iter())),
    }
}

/// The difference of two histograms; `None` if a counter decreased.
fn histogram_difference(was: &[LatencyBucket], is: &[LatencyBucket]) -> Option<Vec<LatencyBucket>> {
    let mut left: BTreeMap<u64, u64> = is.iter().copied().collect();
    for (below, count) in was {
        let left = left.get_mut(below)?;
        *left = left.checked_sub(*count)?;
    }
    Some(left.into_iter().collect())
}

fn compute_latency_percentiles(steps: impl Iterator<Item = LatencyBucket>) -> Option<LatencyPercentiles> {
    let mut steps: Vec<LatencyBucket> = steps.filter(|(_, count)| *count > 0).collect();
    steps.sort_unstable();
    let all: u64 = steps.iter().map(|(_, count)| count).sum();
    let at = |percent: u64| {
        let rank = (all * percent).div_ceil(100).max(1);
        let mut below = 0;
        steps.iter().find_map(|(time, count)| {
            below += count;
            (below >= rank).then_some(*time)
        })
    };
    Some(LatencyPercentiles { p50_ns: at(50)?, p95_ns: at(95)?, p99_ns: at(99)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_control::api::{
        DeviceDescription, PathLatencyAndHedgeCounters, PathLatencyBucket, RequestAndByteCount,
        SnapshotDescription,
    };

    fn served(requests: u64, latency: &[LatencyBucket]) -> OperationStats {
        let latency = latency.to_vec();
        OperationStats {
            requests,
            bytes: requests * 4096,
            errors: requests / 10,
            latency,
            ..OperationStats::default()
        }
    }

    fn device(number: u32, served_by: &[(&str, OperationStats)]) -> DeviceStats {
        let name = format!("d{number}");
        let device = DeviceDescription {
            name,
            number: format!("254:{number}"),
            state: "active".into(),
            live_table: true,
            ..DeviceDescription::default()
        };
        let served = served_by.iter().map(|(op, served)| ((*op).to_owned(), served.clone())).collect();
        DeviceStats { device, served, in_flight: Some(3), ..DeviceStats::default() }
    }

    fn look(started_ms: u64, seconds: u64, devices: Vec<DeviceStats>) -> ServerStatsReport {
        ServerStatsReport {
            started_ms,
            up_ns: seconds * 1_000_000_000,
            devices,
            ..ServerStatsReport::default()
        }
    }

    #[test]
    fn rates_are_differences() {
        let before = look(1, 10, vec![device(0, &[("read", served(100, &[(2000, 100)]))])]);
        let reads = served(300, &[(2000, 150), (8000, 150)]);
        let writes = served(20, &[(16000, 20)]);
        let after = look(1, 12, vec![device(0, &[("read", reads), ("write", writes)])]);
        let rates = compute_rates(Some(&before), &after);
        assert_eq!(rates.seconds, Some(2.0));
        let one = &rates.devices[0];
        let flow = one.flow.unwrap();
        assert_eq!((flow.reads, flow.writes, flow.requests), (100.0, 10.0, 110.0));
        assert_eq!((flow.bytes, flow.errors), (110.0 * 4096.0, 11.0));
        // 50 requests below 2 µs, 150 below 8 µs, 20 below 16 µs, in this interval only.
        let all = LatencyPercentiles { p50_ns: 8000, p95_ns: 16000, p99_ns: 16000 };
        assert_eq!((one.latency, one.in_flight, one.errors), (Some(all), 3, 32));
        assert_eq!(one.ops.iter().map(|op| op.op.as_str()).collect::<Vec<_>>(), ["read", "write"]);
        assert_eq!(one.ops[0].latency.unwrap().p50_ns, 8000);
    }

    #[test]
    fn what_can_not_be_told_is_not() {
        let many = device(0, &[("read", served(100, &[(2000, 100)]))]);
        let few = device(0, &[("read", served(5, &[(2000, 5)]))]);
        let before = look(1, 10, vec![many.clone(), device(1, &[])]);
        // A restarted server; a clock that did not advance; counters that decreased; a new device.
        let unknown = |after: &ServerStatsReport| {
            let rates = compute_rates(Some(&before), after);
            assert!(rates.devices.iter().all(|one| one.flow.is_none() && one.latency.is_none()), "{rates:?}");
        };
        unknown(&look(2, 12, vec![many.clone()]));
        unknown(&look(1, 10, vec![many.clone()]));
        unknown(&look(1, 9, vec![many.clone()]));
        unknown(&look(1, 12, vec![few, device(7, &[("read", served(3, &[]))])]));
        let mut steps = many.clone();
        steps.served.get_mut("read").unwrap().latency = vec![(4000, 100)];
        unknown(&look(1, 12, vec![steps]));
        let mut other = many.clone();
        other.device.uuid = Some("u".into());
        unknown(&look(1, 12, vec![other]));
        assert_eq!(compute_rates(None, &before).devices.len(), 2);
        // A device without requests, and one that was removed.
        let rates = compute_rates(Some(&before), &look(1, 12, vec![many]));
        assert_eq!((rates.devices.len(), rates.devices[0].flow), (1, Some(IoRates::default())));
        assert_eq!(rates.devices[0].latency, None);
    }

    #[test]
    fn paths_and_snapshots() {
        let path = |requests: u64, failed: bool, reads: u64| MultipathPathReport {
            number: "253:1".into(),
            name: "a.img".into(),
            group: 1,
            state: if failed { "failed" } else { "active" }.into(),
            held: failed.then(|| "by command".into()),
            ejected: !failed,
            served: [("write".to_owned(), RequestAndByteCount { requests, bytes: requests * 512 })].into(),
            errors: [("I/O".to_owned(), requests / 10)].into(),
            watch: Some(PathLatencyAndHedgeCounters {
                latency: vec![PathLatencyBucket { below_ns: 9000, reads }],
                ..PathLatencyAndHedgeCounters::default()
            }),
            ..MultipathPathReport::default()
        };
        let with = |path: MultipathPathReport, used_bytes: u64| DeviceStats {
            paths: vec![path],
            snapshot: Some(SnapshotDescription {
                used_bytes,
                total_bytes: 200,
                ..SnapshotDescription::default()
            }),
            ..device(0, &[])
        };
        let before = look(1, 10, vec![with(path(100, false, 5), 20)]);
        let one = &compute_rates(Some(&before), &look(1, 11, vec![with(path(150, true, 9), 50)])).devices[0];
        let (flow, of) = (one.paths[0].flow.unwrap(), &one.paths[0]);
        assert_eq!((flow.writes, flow.bytes, flow.errors, of.errors), (50.0, 25600.0, 5.0, 15));
        assert_eq!((of.state.as_str(), of.latency.unwrap().p99_ns), ("held", 9000));
        assert_eq!(one.filled_percent, Some(25.0));
        // A path of another table, with its own counters.
        let other = MultipathPathReport { number: "253:2".into(), ..path(500, false, 0) };
        let one = &compute_rates(Some(&before), &look(1, 11, vec![with(other, 0)])).devices[0];
        assert_eq!((one.paths[0].flow, one.paths[0].state.as_str()), (None, "ejected"));
    }

    /// An ejected path is used if its group has no other.
    #[test]
    fn paths_that_can_be_used() {
        let path = |group, state: &str, ejected| MultipathPathReport {
            group,
            state: state.into(),
            ejected,
            ..MultipathPathReport::default()
        };
        let usable = |paths: Vec<MultipathPathReport>| {
            let look = look(1, 10, vec![DeviceStats { paths, ..device(0, &[]) }]);
            compute_rates(None, &look).devices[0].paths.iter().map(|path| path.usable).collect::<Vec<_>>()
        };
        assert_eq!(usable(vec![path(1, "active", true), path(1, "active", false)]), [false, true]);
        assert_eq!(usable(vec![path(1, "active", true), path(1, "failed", false)]), [true, false]);
        assert_eq!(usable(vec![path(1, "active", true), path(1, "active", true)]), [true, true]);
        assert_eq!(usable(vec![path(1, "active", true), path(2, "active", false)]), [true, true]);
        assert_eq!(usable(vec![path(1, "failed", true), path(2, "failed", false)]), [false, false]);
    }
}
