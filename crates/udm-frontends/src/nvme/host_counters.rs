//! I/O counters of hosts, by core. As for devices, a core is the only writer of its counters. With
//! N cores, I/O queue `q` of a host is on core `(q - 1) % N`, so the counters of a core are those
//! of the queues `q`, `q + N` and so on, and are reported under the first of them.

use crate::nbd::{CoreDeviceIoCounters, DeviceIoCounters, DeviceIoReport};
use crossbeam_utils::CachePadded;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use udm_core::{CoreId, Nanos, Op};

/// Limit of hosts with counters of their own. A host says its name, so there may be any number.
const HOSTS_MAX: usize = 256;

/// The name under which further hosts are counted together.
const OTHER_HOSTS: &str = "other";

/// Counters of a host since its first connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmeHostIoReport {
    /// Name of the host; `other` for the hosts that are too many.
    pub host: String,
    /// Counters of all its queues.
    pub io: DeviceIoReport,
    /// Number of answered requests of the I/O queues of each core, by the first of their numbers.
    pub queues: Vec<(u16, u64)>,
}

/// Counters of hosts, by name.
#[derive(Default)]
pub(super) struct HostIoCounters(Mutex<BTreeMap<String, Arc<DeviceIoCounters>>>);

impl HostIoCounters {
    fn hosts(&self) -> MutexGuard<'_, BTreeMap<String, Arc<DeviceIoCounters>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The counters of a host. If there are too many hosts, those without queues make room. A queue
    /// keeps the counters while it is connected.
    pub(super) fn of(&self, host: &str) -> Arc<DeviceIoCounters> {
        let mut hosts = self.hosts();
        if let Some(known) = hosts.get(host) {
            return Arc::clone(known);
        }
        if hosts.len() >= HOSTS_MAX {
            hosts.retain(|_, counters| Arc::strong_count(counters) > 1);
        }
        let name = if hosts.len() >= HOSTS_MAX { OTHER_HOSTS } else { host };
        Arc::clone(hosts.entry(name.to_owned()).or_default())
    }

    /// The counters of all hosts, by name.
    pub(super) fn reports(&self) -> Vec<NvmeHostIoReport> {
        let hosts = self.hosts();
        let report = |(host, counters): (&String, &Arc<DeviceIoCounters>)| NvmeHostIoReport {
            host: host.clone(),
            io: counters.report(),
            queues: counters.requests_by_core().into_iter().map(|(core, n)| (core.0 + 1, n)).collect(),
        };
        hosts.iter().map(report).collect()
    }
}

/// Counters of the requests of a queue to a namespace: those of the device and of the host on this
/// core.
pub(super) struct NamespaceIoCounters {
    device: Arc<CachePadded<CoreDeviceIoCounters>>,
    host: Arc<CachePadded<CoreDeviceIoCounters>>,
    /// Keeps the counters of the host.
    _host: Arc<DeviceIoCounters>,
}

impl NamespaceIoCounters {
    pub(super) fn new(
        device: Arc<CachePadded<CoreDeviceIoCounters>>,
        host: Arc<DeviceIoCounters>,
        core: CoreId,
    ) -> NamespaceIoCounters {
        NamespaceIoCounters { device, host: host.on(core), _host: host }
    }

    /// See [`CoreDeviceIoCounters::begin`].
    pub(super) fn begin(&self, op: Op) {
        self.device.begin(op);
        self.host.begin(op);
    }

    /// See [`CoreDeviceIoCounters::end`].
    pub(super) fn end(&self, op: Op) {
        self.device.end(op);
        self.host.end(op);
    }

    /// See [`CoreDeviceIoCounters::answer`].
    pub(super) fn answer(&self, op: Op, bytes: u64, is_ok: bool, took: Option<Nanos>) {
        self.device.answer(op, bytes, is_ok, took);
        self.host.answer(op, bytes, is_ok, took);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any number of names needs limited memory, and a connected host keeps its counters.
    #[test]
    fn hosts_are_limited() {
        let counters = HostIoCounters::default();
        let (kept, core) = (counters.of("kept"), CoreId(1));
        kept.on(core).answer(Op::Read, 512, true, None);
        for number in 0..3 * HOSTS_MAX {
            drop(counters.of(&format!("host {number}")));
            assert!(counters.hosts().len() <= HOSTS_MAX);
        }
        let connected: Vec<_> =
            (0..2 * HOSTS_MAX).map(|number| counters.of(&format!("busy {number}"))).collect();
        assert!(counters.hosts().len() <= HOSTS_MAX + 1);
        connected.last().unwrap().on(core).answer(Op::Write, 1024, true, None);
        let reports = counters.reports();
        let of = |name: &str| reports.iter().find(|one| one.host == name).unwrap();
        assert_eq!(
            (of("kept").io.ops[Op::Read as usize].bytes, &of("kept").queues[..]),
            (512, &[(2, 1)][..])
        );
        assert_eq!(of(OTHER_HOSTS).io.ops[Op::Write as usize].bytes, 1024);
    }
}
