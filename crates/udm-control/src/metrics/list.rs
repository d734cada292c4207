//! The one list of metrics. A test keeps docs/metrics.md the same.

use prometheus::proto::MetricType;

/// A metric.
pub(super) struct MetricDefinition {
    /// Name by Prometheus' rules: base units, `_total` for counters.
    pub name: &'static str,
    /// Description.
    pub help: &'static str,
    /// Counter, gauge or histogram.
    pub kind: MetricType,
}

macro_rules! metrics {
    ($($ident:ident = $kind:ident $name:literal: $help:literal;)*) => {
        $(pub(super) const $ident: MetricDefinition =
            MetricDefinition { name: $name, help: $help, kind: MetricType::$kind };)*

        /// All metrics, in the order of the output.
        pub(super) const ALL: &[&MetricDefinition] = &[$(&$ident),*];
    };
}

metrics! {
    BUILD = GAUGE "udm_build_info": "Always 1; the version is a label";
    CONNECTIONS = GAUGE "udm_connections": "Clients that are connected over NBD";
    TLS = GAUGE "udm_connections_tls": "Clients that are connected over NBD with TLS";
    ACCEPTED = COUNTER "udm_connections_accepted_total": "Connections that were accepted";
    REFUSED = COUNTER "udm_connections_refused_total":
        "Connections that were closed, or refused an export, because there were too many";
    MOVES = COUNTER "udm_connection_moves_total": "Moves of connections to another core";
    NVME_HOSTS = GAUGE "udm_nvme_hosts": "Hosts that are connected over NVMe/TCP";
    NVME_CONTROLLERS = GAUGE "udm_nvme_controllers": "NVMe controllers, one for each connection of a host to a subsystem";
    NVME_CONNECTIONS = GAUGE "udm_nvme_connections": "Connections of NVMe/TCP hosts, one per queue";
    NVME_ACCEPTED = COUNTER "udm_nvme_connections_accepted_total": "Connections of NVMe/TCP hosts that were accepted";
    NVME_REFUSED = COUNTER "udm_nvme_connections_refused_total":
        "Connections and queues of NVMe/TCP hosts that were refused, because there were too many";
    NVME_LATE_QUIESCES = COUNTER "udm_nvme_late_quiesces_total":
        "Queues of lost NVMe/TCP hosts whose requests stayed at a device for longer than the quiesce time";
    NVME_HOST_REQUESTS = COUNTER "udm_nvme_host_requests_total":
        "Requests of an NVMe/TCP host that were answered, errors included";
    NVME_HOST_BYTES = COUNTER "udm_nvme_host_request_bytes_total": "Bytes of requests of an NVMe/TCP host that succeeded";
    NVME_HOST_ERRORS = COUNTER "udm_nvme_host_request_errors_total":
        "Requests of an NVMe/TCP host that were answered with an error";
    NVME_HOST_IN_FLIGHT = GAUGE "udm_nvme_host_requests_in_flight": "Requests of an NVMe/TCP host in flight";
    NVME_QUEUE_REQUESTS = COUNTER "udm_nvme_queue_requests_total":
        "Requests of the I/O queues of an NVMe/TCP host with this number that were answered";
    NVME_PATH_UP = GAUGE "udm_nvme_path_up": "1 while the association with the controller of a namespace works";
    NVME_PATH_ASSOCIATIONS = COUNTER "udm_nvme_path_associations_total": "Associations with the controller";
    NVME_PATH_LOSSES = COUNTER "udm_nvme_path_losses_total": "Associations with the controller that were lost";
    NVME_PATH_HELD = GAUGE "udm_nvme_path_held_writes":
        "Writes of lost associations that wait until their controller can no longer execute them";
    NVME_PATH_RELEASED = COUNTER "udm_nvme_path_released_writes_total":
        "Writes of lost associations that were sent elsewhere; after a reset of the controller or after its time is a label";
    NVME_PATH_RESETS = COUNTER "udm_nvme_path_resets_total":
        "Resets of lost controllers that the path was asked for; the result is a label";
    CORE_REQUESTS = COUNTER "udm_core_requests_total": "Requests that a core has answered";
    DEVICE = GAUGE "udm_device_info": "Always 1; the device's uuid and number are labels";
    SIZE = GAUGE "udm_device_size_bytes": "The size of the live table";
    SUSPENDED = GAUGE "udm_device_suspended": "1 while the device is suspended";
    READ_ONLY = GAUGE "udm_device_read_only": "1 when writes fail";
    OPEN = GAUGE "udm_device_users": "Clients and tables that use the device";
    EVENTS = COUNTER "udm_device_events_total": "Events that the device has raised";
    THROTTLE_LIMIT = GAUGE "udm_device_throttle_limit":
        "A limit of the device, in requests or bytes per second; which one is a label";
    THROTTLE_WAITING = GAUGE "udm_device_throttle_waiting": "Requests that wait because of a limit";
    THROTTLE_DELAYED = COUNTER "udm_device_throttle_delayed_total":
        "Requests that had to wait because of a limit";
    REQUESTS = COUNTER "udm_requests_total": "Requests of clients that were answered, errors included";
    BYTES = COUNTER "udm_request_bytes_total": "Bytes of client requests that succeeded";
    ERRORS = COUNTER "udm_request_errors_total": "Requests of clients that were answered with an error";
    IN_FLIGHT = GAUGE "udm_requests_in_flight": "Requests of clients in flight";
    OP_IN_FLIGHT = GAUGE "udm_requests_in_flight_by_op": "Requests of clients in flight, by operation";
    DURATION = HISTOGRAM "udm_request_duration_seconds": "Time that requests of clients took in the device";
    PATH_UP = GAUGE "udm_path_up": "1 when the path is in use, 0 when it is failed";
    PATH_EJECTED = GAUGE "udm_path_ejected": "1 while the path is ejected because it is slow";
    PATH_FAILURES = COUNTER "udm_path_failures_total": "How often the path failed";
    PATH_FAILED = COUNTER "udm_path_failed_seconds_total": "Total time in which the path was failed";
    PATH_IN_FLIGHT = GAUGE "udm_path_requests_in_flight": "Requests in flight on the path";
    PATH_REQUESTS = COUNTER "udm_path_requests_total": "Requests that the path completed, with or without error";
    PATH_BYTES = COUNTER "udm_path_bytes_total": "Bytes of requests that the path completed";
    PATH_ERRORS = COUNTER "udm_path_errors_total": "Requests that the path completed with an error";
    PATH_RETRIES = COUNTER "udm_path_retries_total":
        "Requests that the path got after another path had failed them";
    PATH_WAITING = GAUGE "udm_path_requests_waiting":
        "Writes and flushes that are past their deadline and still wait for the path";
    PATH_HEDGES = COUNTER "udm_path_hedges_total": "Reads of the path that were also sent to another path";
    PATH_HEDGES_WON = COUNTER "udm_path_hedges_won_total": "Reads of the path that another path answered first";
    PATH_DURATION = HISTOGRAM "udm_path_read_duration_seconds": "Time that reads of the path took";
    SNAPSHOT_VALID = GAUGE "udm_snapshot_valid": "1 while the snapshot can be read";
    SNAPSHOT_USED = GAUGE "udm_snapshot_used_bytes": "Space in use in the store, metadata included";
    SNAPSHOT_METADATA = GAUGE "udm_snapshot_metadata_bytes": "Space in use in the store for metadata";
    SNAPSHOT_STORE = GAUGE "udm_snapshot_store_bytes": "The size of the store";
    CLONE_WRITABLE = GAUGE "udm_clone_metadata_writable": "0 if the metadata of the clone has failed";
    CLONE_ACTIVE = GAUGE "udm_clone_hydrating": "1 while the clone is copied in the background";
    CLONE_SIZE = GAUGE "udm_clone_bytes": "The size of the clone";
    CLONE_HYDRATED = GAUGE "udm_clone_hydrated_bytes": "Bytes of the clone that are in its destination";
    CLONE_SOURCE_ERRORS = COUNTER "udm_clone_source_errors_total":
        "Reads of the source that failed a copy, which is tried again";
    CLONE_DESTINATION_ERRORS = COUNTER "udm_clone_destination_errors_total":
        "Writes to the destination that failed a copy";
    MOVE_ACTIVE = GAUGE "udm_move_copying": "1 while the disk is copied; 0 while its move is paused or waits";
    MOVE_SIZE = GAUGE "udm_move_bytes": "The size of a disk that is being moved";
    MOVE_COPIED = GAUGE "udm_move_copied_bytes": "Bytes of the disk that are in both places";
    MOVE_UNLOGGED = GAUGE "udm_move_unlogged_bytes": "Bytes that the next server would copy, if this one ended now";
}
