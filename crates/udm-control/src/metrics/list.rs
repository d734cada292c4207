//! The one list of metrics. docs/metrics.md has the same, which a test keeps.

use prometheus::proto::MetricType;

/// A metric.
pub(super) struct Metric {
    /// Its name, by Prometheus' rules: base units, `_total` for what only grows.
    pub name: &'static str,
    /// What it is.
    pub help: &'static str,
    /// How its numbers behave.
    pub kind: MetricType,
}

macro_rules! metrics {
    ($($ident:ident = $kind:ident $name:literal: $help:literal;)*) => {
        $(pub(super) const $ident: Metric =
            Metric { name: $name, help: $help, kind: MetricType::$kind };)*

        /// All, in the order in which they are shown.
        pub(super) const ALL: &[&Metric] = &[$(&$ident),*];
    };
}

metrics! {
    BUILD = GAUGE "udm_build_info": "Always 1; the version is a label";
    CONNECTIONS = GAUGE "udm_connections": "Clients that are connected over NBD";
    ACCEPTED = COUNTER "udm_connections_accepted_total": "Connections that were accepted";
    REFUSED = COUNTER "udm_connections_refused_total":
        "Connections that were closed, or refused an export, because there were too many";
    MOVES = COUNTER "udm_connection_moves_total": "How often a connection went on on another core";
    CORE_REQUESTS = COUNTER "udm_core_requests_total": "Requests that a core has answered";
    DEVICE = GAUGE "udm_device_info": "Always 1; the device's uuid and number are labels";
    SIZE = GAUGE "udm_device_size_bytes": "The size of the live table";
    SUSPENDED = GAUGE "udm_device_suspended": "1 while the device is suspended";
    READ_ONLY = GAUGE "udm_device_read_only": "1 when writes fail";
    OPEN = GAUGE "udm_device_users": "Clients and tables that use the device";
    EVENTS = COUNTER "udm_device_events_total": "Events that the device has raised";
    REQUESTS = COUNTER "udm_requests_total": "Requests of clients that were answered, errors included";
    BYTES = COUNTER "udm_request_bytes_total": "What of them went well, in bytes";
    ERRORS = COUNTER "udm_request_errors_total": "Requests of clients that were answered with an error";
    IN_FLIGHT = GAUGE "udm_requests_in_flight": "Requests of clients that the device has";
    OP_IN_FLIGHT = GAUGE "udm_requests_in_flight_by_op": "Of those, the ones of an operation";
    DURATION = HISTOGRAM "udm_request_duration_seconds": "How long the device had requests of clients";
    PATH_UP = GAUGE "udm_path_up": "1 when the path is in use, 0 when it is failed";
    PATH_EJECTED = GAUGE "udm_path_ejected": "1 while the path is out of use for being slow";
    PATH_FAILURES = COUNTER "udm_path_failures_total": "How often the path failed";
    PATH_FAILED = COUNTER "udm_path_failed_seconds_total": "How long the path was failed in all";
    PATH_IN_FLIGHT = GAUGE "udm_path_requests_in_flight": "Requests that the path has";
    PATH_REQUESTS = COUNTER "udm_path_requests_total": "Requests that came back from the path, well or not";
    PATH_BYTES = COUNTER "udm_path_bytes_total": "Their length in bytes";
    PATH_ERRORS = COUNTER "udm_path_errors_total": "Requests that came back from the path with an error";
    PATH_RETRIES = COUNTER "udm_path_retries_total":
        "Requests that the path was given after another had failed them";
    PATH_WAITING = GAUGE "udm_path_requests_waiting":
        "Writes and flushes that are past their deadline and still wait for the path";
    PATH_HEDGES = COUNTER "udm_path_hedges_total": "Reads of the path that were sent to another one too";
    PATH_HEDGES_WON = COUNTER "udm_path_hedges_won_total": "Those that were answered there first";
    PATH_DURATION = HISTOGRAM "udm_path_read_duration_seconds": "How long reads of the path took";
    SNAPSHOT_VALID = GAUGE "udm_snapshot_valid": "1 while the snapshot can be read";
    SNAPSHOT_USED = GAUGE "udm_snapshot_used_bytes": "What of the store is in use, metadata included";
    SNAPSHOT_METADATA = GAUGE "udm_snapshot_metadata_bytes": "What of that is metadata";
    SNAPSHOT_STORE = GAUGE "udm_snapshot_store_bytes": "The size of the store";
}
