//! The statistics that `udm top` shows: those of devices, or of NVMe/TCP hosts in their place.

use udm_control::api::{DeviceDescription, DeviceStats, ServerStatsReport, verbs};
use udm_control::client::{ControlClient, ControlClientError};

/// The part of a host's name that most hosts share. Without it, names fit their column.
const COMMON_PREFIX: &str = "nqn.2014-08.org.nvmexpress:";

/// A server, and what its rows are.
#[derive(Debug)]
pub struct StatsSource {
    /// The server.
    pub client: ControlClient,
    /// Rows are hosts instead of devices.
    pub by_host: bool,
}

impl StatsSource {
    /// Reads the statistics.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn fetch(&self) -> Result<ServerStatsReport, ControlClientError> {
        let stats = self.client.call(verbs::GET_STATS, &())?;
        Ok(if self.by_host { hosts_as_devices(stats) } else { stats })
    }

    /// The name of a row.
    pub fn noun(&self) -> &'static str {
        if self.by_host { "host" } else { "device" }
    }
}

/// The hosts in the place of the devices. A host has its name as uuid too, so that it is known
/// again.
fn hosts_as_devices(stats: ServerStatsReport) -> ServerStatsReport {
    let device = |(number, host): (usize, &udm_control::api::NvmeHostStats)| {
        let name = host.host_nqn.strip_prefix(COMMON_PREFIX).unwrap_or(&host.host_nqn);
        let device = DeviceDescription {
            name: name.to_owned(),
            uuid: Some(host.host_nqn.clone()),
            number: number.to_string(),
            state: "host".into(),
            live_table: true,
            ..DeviceDescription::default()
        };
        let (in_flight, served) = (Some(host.in_flight), host.served.clone());
        DeviceStats { device, in_flight, served, ..DeviceStats::default() }
    };
    let devices = stats.nvme_hosts.iter().enumerate().map(device).collect();
    ServerStatsReport { devices, ..stats }
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_control::api::{NvmeHostStats, OperationStats};

    /// The rates of a host are its own, also if another host comes before it.
    #[test]
    fn hosts_are_rows() {
        let host = |name: &str, requests| NvmeHostStats {
            host_nqn: format!("{COMMON_PREFIX}uuid:{name}"),
            served: [("read".to_owned(), OperationStats { requests, ..OperationStats::default() })].into(),
            ..NvmeHostStats::default()
        };
        let stats = |up_ns, nvme_hosts| {
            hosts_as_devices(ServerStatsReport { up_ns, nvme_hosts, ..ServerStatsReport::default() })
        };
        let before = stats(1_000_000_000, vec![host("b", 10)]);
        let after = stats(2_000_000_000, vec![host("a", 500), host("b", 30)]);
        let rates = super::super::rates::compute_rates(Some(&before), &after);
        let row = |at: usize| (&*rates.devices[at].name, rates.devices[at].flow.map(|flow| flow.requests));
        assert_eq!((row(0), row(1)), (("uuid:a", None), ("uuid:b", None)), "their numbers have changed");
        let later = stats(3_000_000_000, vec![host("a", 600), host("b", 31)]);
        let rates = super::super::rates::compute_rates(Some(&after), &later);
        let row = |at: usize| (&*rates.devices[at].name, rates.devices[at].flow.map(|flow| flow.requests));
        assert_eq!((row(0), row(1)), (("uuid:a", Some(100.0)), ("uuid:b", Some(1.0))));
    }
}
