//! The one list of verbs of the control socket. Each verb is a constant: its types are its query,
//! body and reply, with `()` for none, and its value has the method, path, name and summary.
//!
//! The server's routes, `/openapi.json` and the client's calls are made from these constants, so a
//! path or a method stands here and nowhere else.
#![expect(missing_docs, reason = "each verb has a summary")]

use super::clones::{CloneBootProfile, CloneDescription, CloneList, CreateCloneRequest};
use super::config::{ReconfigureQuery, ReconfigureReport};
use super::devices::{
    CreateDeviceRequest, CreateMultipathRequest, DeviceDescription, DeviceList, RemoveDeviceQuery,
    RenameDeviceRequest, ResumeDeviceRequest, ResumeDevicesRequest, SuspendDeviceRequest,
    SuspendDevicesRequest, WaitDeviceEventRequest,
};
use super::events::DeviceEventDescription;
use super::moves::{ForgetOldPlaceRequest, MoveDescription, MoveList, PauseMoveRequest, StartMoveRequest};
use super::nvme::{
    NvmeSubsystemList, ResetNvmeControllerReply, ResetNvmeControllerRequest, SetNvmeAnaStateRequest,
};
use super::paths::FailOrReinstatePathRequest;
use super::queue::{ChangeQueueSettingsRequest, SetDiskPowerRequest};
use super::server::{ExportList, ServerVersions, UpgradeReport, UpgradeServerRequest};
use super::snapshots::{
    ChangedRangesPage, ChangedRangesQuery, CreateSnapshotsRequest, RemoveSnapshotQuery, SnapshotDescription,
    SnapshotList,
};
use super::stats::ServerStatsReport;
use super::tables::{
    LoadTableRequest, TableDescription, TableList, TableSlotQuery, TableStatus, TableStatusList,
    TargetMessageReply, TargetMessageRequest,
};
use super::throttle::ThrottleDeviceRequest;
use super::ublk::{AddUblkDiskRequest, RemoveUblkDiskQuery, UblkDiskDescription, UblkDiskList};
use super::vhost_user::{
    AddVhostUserSocketRequest, RemoveVhostUserSocketQuery, VhostUserSocketDescription, VhostUserSocketList,
};
use hyper::Method;
use serde::Serialize;
use serde_json::Value;
use std::borrow::Cow;
use std::marker::PhantomData;

/// A verb with query `Q`, request body `B` and reply `R`.
pub struct ApiVerbEndpoint<Q, B, R> {
    /// The HTTP method.
    pub method: Method,
    /// The path, with `{name}` for a device until [`ApiVerbEndpoint::on`] puts one there.
    pub path: Cow<'static, str>,
    /// Stable name for generated clients.
    pub id: &'static str,
    /// Short description.
    pub summary: &'static str,
    types: PhantomData<fn(Q, B) -> R>,
}

impl<Q, B, R> ApiVerbEndpoint<Q, B, R> {
    const fn new(
        method: Method,
        path: &'static str,
        id: &'static str,
        summary: &'static str,
    ) -> ApiVerbEndpoint<Q, B, R> {
        ApiVerbEndpoint { method, path: Cow::Borrowed(path), id, summary, types: PhantomData }
    }

    const fn get(path: &'static str, id: &'static str, summary: &'static str) -> ApiVerbEndpoint<Q, B, R> {
        ApiVerbEndpoint::new(Method::GET, path, id, summary)
    }

    const fn post(path: &'static str, id: &'static str, summary: &'static str) -> ApiVerbEndpoint<Q, B, R> {
        ApiVerbEndpoint::new(Method::POST, path, id, summary)
    }

    const fn put(path: &'static str, id: &'static str, summary: &'static str) -> ApiVerbEndpoint<Q, B, R> {
        ApiVerbEndpoint::new(Method::PUT, path, id, summary)
    }

    const fn delete(path: &'static str, id: &'static str, summary: &'static str) -> ApiVerbEndpoint<Q, B, R> {
        ApiVerbEndpoint::new(Method::DELETE, path, id, summary)
    }

    /// The verb on the device or snapshot `name`: its name, UUID or number.
    #[must_use]
    pub fn on(mut self, name: &str) -> ApiVerbEndpoint<Q, B, R> {
        self.path = self.path.replace("{name}", &percent_encode(name)).into();
        self
    }

    /// The verb with the members of `query` that are not null.
    ///
    /// # Panics
    /// If `query` is not a plain struct.
    #[must_use]
    pub fn with(mut self, query: &Q) -> ApiVerbEndpoint<Q, B, R>
    where
        Q: Serialize,
    {
        let Ok(Value::Object(members)) = serde_json::to_value(query) else {
            panic!("a query is a plain struct");
        };
        let mut separator = '?';
        for (name, value) in members.iter().filter(|(_, value)| !value.is_null()) {
            let text = value.as_str().map_or_else(|| value.to_string(), percent_encode);
            self.path = format!("{}{separator}{name}={text}", self.path).into();
            separator = '&';
        }
        self
    }
}

fn percent_encode(text: &str) -> String {
    use std::fmt::Write as _;
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            // Writing to a String can't fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

pub const LIST_DEVICES: ApiVerbEndpoint<(), (), DeviceList> =
    ApiVerbEndpoint::get("/v1/devices", "listDevices", "All mapped devices");
pub const CREATE_DEVICE: ApiVerbEndpoint<(), CreateDeviceRequest, DeviceDescription> =
    ApiVerbEndpoint::post("/v1/devices", "createDevice", "Creates a device, loads its table and resumes it");
pub const CREATE_MULTIPATH: ApiVerbEndpoint<(), CreateMultipathRequest, DeviceDescription> =
    ApiVerbEndpoint::post(
        "/v1/multipath",
        "createMultipath",
        "Creates a multipath device from its paths, and resumes it",
    );
pub const GET_DEVICE: ApiVerbEndpoint<(), (), DeviceDescription> =
    ApiVerbEndpoint::get("/v1/devices/{name}", "getDevice", "One device");
pub const REMOVE_DEVICE: ApiVerbEndpoint<RemoveDeviceQuery, (), ()> =
    ApiVerbEndpoint::delete("/v1/devices/{name}", "removeDevice", "Removes a device that is not in use");
pub const RENAME_DEVICE: ApiVerbEndpoint<(), RenameDeviceRequest, ()> = ApiVerbEndpoint::post(
    "/v1/devices/{name}/rename",
    "renameDevice",
    "Gives a device another name, or a uuid; its clients, and tables that use it, are not affected",
);
pub const WAIT_EVENT: ApiVerbEndpoint<(), WaitDeviceEventRequest, DeviceDescription> = ApiVerbEndpoint::post(
    "/v1/devices/{name}/wait",
    "waitEvent",
    "Waits for an event of a device, or for its removal, and then describes the device",
);
pub const GET_STATUS: ApiVerbEndpoint<TableSlotQuery, (), TableStatus> =
    ApiVerbEndpoint::get("/v1/devices/{name}/status", "getStatus", "The status of a device's table");
pub const GET_TABLE: ApiVerbEndpoint<TableSlotQuery, (), TableDescription> =
    ApiVerbEndpoint::get("/v1/devices/{name}/table", "getTable", "A device's table");
pub const LOAD_TABLE: ApiVerbEndpoint<(), LoadTableRequest, ()> =
    ApiVerbEndpoint::put("/v1/devices/{name}/table", "loadTable", "Loads a table into the inactive slot");
pub const CLEAR_TABLE: ApiVerbEndpoint<(), (), ()> =
    ApiVerbEndpoint::delete("/v1/devices/{name}/table", "clearTable", "Empties the inactive slot");
pub const SEND_MESSAGE: ApiVerbEndpoint<(), TargetMessageRequest, TargetMessageReply> =
    ApiVerbEndpoint::post("/v1/devices/{name}/message", "sendMessage", "Sends a message to a target");
pub const COMMAND_PATH: ApiVerbEndpoint<(), FailOrReinstatePathRequest, ()> = ApiVerbEndpoint::post(
    "/v1/devices/{name}/path",
    "commandPath",
    "Reinstates a path, or fails it until a command or message reinstates it",
);
pub const CHANGE_QUEUE: ApiVerbEndpoint<(), ChangeQueueSettingsRequest, DeviceDescription> =
    ApiVerbEndpoint::post(
        "/v1/devices/{name}/queue",
        "changeQueue",
        "Changes settings of the queue of a device and of the queues of its table's disks; requests continue",
    );
pub const TURN_POWER: ApiVerbEndpoint<(), SetDiskPowerRequest, DeviceDescription> = ApiVerbEndpoint::post(
    "/v1/devices/{name}/power",
    "turnPower",
    "Turns the power of disks that a device's table uses on or off",
);
pub const THROTTLE_DEVICE: ApiVerbEndpoint<(), ThrottleDeviceRequest, DeviceDescription> =
    ApiVerbEndpoint::post(
        "/v1/devices/{name}/throttle",
        "throttleDevice",
        "Limits the requests and bytes per second of a device, or of a group of devices; requests continue",
    );
pub const LIST_NVME: ApiVerbEndpoint<(), (), NvmeSubsystemList> = ApiVerbEndpoint::get(
    "/v1/nvme",
    "listNvmeSubsystems",
    "The subsystem of the NVMe/TCP target, with its namespaces and the controllers of its hosts",
);
pub const SET_NVME_ANA: ApiVerbEndpoint<(), SetNvmeAnaStateRequest, NvmeSubsystemList> =
    ApiVerbEndpoint::post(
        "/v1/nvme/ana",
        "setNvmeAnaState",
        "Sets how good ports are for devices; hosts get an event and choose their paths by it",
    );
pub const RESET_NVME_CONTROLLER: ApiVerbEndpoint<(), ResetNvmeControllerRequest, ResetNvmeControllerReply> =
    ApiVerbEndpoint::post(
        "/v1/nvme/reset",
        "resetNvmeController",
        "For other servers of the subsystem: ends a controller that its host has lost, and answers when no request \
         of it can reach a disk any more",
    );
pub const LIST_VHOST_USER: ApiVerbEndpoint<(), (), VhostUserSocketList> = ApiVerbEndpoint::get(
    "/v1/vhost-user",
    "listVhostUserSockets",
    "The sockets on which devices are served to virtual machines",
);
pub const ADD_VHOST_USER: ApiVerbEndpoint<(), AddVhostUserSocketRequest, VhostUserSocketDescription> =
    ApiVerbEndpoint::post(
        "/v1/devices/{name}/vhost-user",
        "addVhostUserSocket",
        "Serves a device to a virtual machine on a new socket",
    );
pub const REMOVE_VHOST_USER: ApiVerbEndpoint<RemoveVhostUserSocketQuery, (), ()> = ApiVerbEndpoint::delete(
    "/v1/devices/{name}/vhost-user",
    "removeVhostUserSocket",
    "Removes a socket that was added while the server runs",
);
pub const LIST_UBLK: ApiVerbEndpoint<(), (), UblkDiskList> = ApiVerbEndpoint::get(
    "/v1/ublk",
    "listUblkDisks",
    "The devices that are block devices of this machine (ublk)",
);
pub const ADD_UBLK: ApiVerbEndpoint<(), AddUblkDiskRequest, UblkDiskDescription> = ApiVerbEndpoint::post(
    "/v1/devices/{name}/ublk",
    "addUblkDisk",
    "Makes a block device of this machine from a device, or takes over the one that an earlier server left",
);
pub const REMOVE_UBLK: ApiVerbEndpoint<RemoveUblkDiskQuery, (), ()> = ApiVerbEndpoint::delete(
    "/v1/devices/{name}/ublk",
    "removeUblkDisk",
    "Removes a block device that was added while the server runs",
);
pub const SUSPEND_DEVICE: ApiVerbEndpoint<(), SuspendDeviceRequest, ()> = ApiVerbEndpoint::post(
    "/v1/devices/{name}/suspend",
    "suspendDevice",
    "Holds back new requests and waits for those in flight",
);
pub const RESUME_DEVICE: ApiVerbEndpoint<(), ResumeDeviceRequest, ()> = ApiVerbEndpoint::post(
    "/v1/devices/{name}/resume",
    "resumeDevice",
    "Makes a loaded table live and lets requests continue",
);
pub const SUSPEND_TOGETHER: ApiVerbEndpoint<(), SuspendDevicesRequest, ()> = ApiVerbEndpoint::post(
    "/v1/suspend",
    "suspendTogether",
    "Suspends several devices, all or none: at one instant none has a request in flight",
);
pub const RESUME_TOGETHER: ApiVerbEndpoint<(), ResumeDevicesRequest, ()> = ApiVerbEndpoint::post(
    "/v1/resume",
    "resumeTogether",
    "Resumes several devices, all with their loaded tables or none",
);
pub const LISTEN: ApiVerbEndpoint<(), (), DeviceEventDescription> = ApiVerbEndpoint::get(
    "/v1/events",
    "listen",
    "Stream of events, without end; with the header Last-Event-ID it continues after that event",
);
pub const LIST_TABLES: ApiVerbEndpoint<TableSlotQuery, (), TableList> =
    ApiVerbEndpoint::get("/v1/tables", "listTables", "The tables of all devices");
pub const LIST_STATUSES: ApiVerbEndpoint<TableSlotQuery, (), TableStatusList> =
    ApiVerbEndpoint::get("/v1/statuses", "listStatuses", "The status of the tables of all devices");
pub const LIST_EXPORTS: ApiVerbEndpoint<(), (), ExportList> =
    ApiVerbEndpoint::get("/v1/exports", "listExports", "The exports that clients can connect to");
pub const RECONFIGURE: ApiVerbEndpoint<ReconfigureQuery, (), ReconfigureReport> = ApiVerbEndpoint::post(
    "/v1/reconfigure",
    "reconfigure",
    "Reads the server's configuration file again and applies it; each device changes completely or not at all",
);
pub const UPGRADE: ApiVerbEndpoint<(), UpgradeServerRequest, UpgradeReport> = ApiVerbEndpoint::post(
    "/v1/upgrade",
    "upgrade",
    "Starts another program, hands devices, clients and sockets over to it, and ends this server",
);
pub const GET_VERSION: ApiVerbEndpoint<(), (), ServerVersions> =
    ApiVerbEndpoint::get("/v1/version", "getVersion", "The server and its targets");
pub const GET_STATS: ApiVerbEndpoint<(), (), ServerStatsReport> =
    ApiVerbEndpoint::get("/v1/stats", "getStats", "The counters of the server, its cores and its devices");
pub const METRICS: ApiVerbEndpoint<(), (), String> =
    ApiVerbEndpoint::get("/metrics", "metrics", "The same numbers for Prometheus");
pub const OPENAPI: ApiVerbEndpoint<(), (), Value> =
    ApiVerbEndpoint::get("/openapi.json", "openapi", "This description");
pub const LIST_SNAPSHOTS: ApiVerbEndpoint<(), (), SnapshotList> =
    ApiVerbEndpoint::get("/v1/snapshots", "listSnapshots", "All snapshots");
pub const CREATE_SNAPSHOTS: ApiVerbEndpoint<(), CreateSnapshotsRequest, SnapshotList> = ApiVerbEndpoint::post(
    "/v1/snapshots",
    "createSnapshots",
    "Creates snapshots at one instant, all or none",
);
pub const GET_SNAPSHOT: ApiVerbEndpoint<(), (), SnapshotDescription> =
    ApiVerbEndpoint::get("/v1/snapshots/{name}", "getSnapshot", "One snapshot");
pub const REMOVE_SNAPSHOT: ApiVerbEndpoint<RemoveSnapshotQuery, (), ()> = ApiVerbEndpoint::delete(
    "/v1/snapshots/{name}",
    "removeSnapshot",
    "Removes a snapshot that is not in use",
);
pub const MERGE_SNAPSHOT: ApiVerbEndpoint<(), (), SnapshotDescription> = ApiVerbEndpoint::post(
    "/v1/snapshots/{name}/merge",
    "mergeSnapshot",
    "Starts merging a snapshot into its origin; from then on the origin reads as the snapshot",
);
pub const LIST_CLONES: ApiVerbEndpoint<(), (), CloneList> =
    ApiVerbEndpoint::get("/v1/clones", "listClones", "All clones");
pub const CREATE_CLONE: ApiVerbEndpoint<(), CreateCloneRequest, CloneDescription> = ApiVerbEndpoint::post(
    "/v1/clones",
    "createClone",
    "Creates a device that reads as its source at once, with the files for its destination and metadata",
);
pub const GET_CLONE: ApiVerbEndpoint<(), (), CloneDescription> =
    ApiVerbEndpoint::get("/v1/clones/{name}", "getClone", "One clone");
pub const GET_CLONE_PROFILE: ApiVerbEndpoint<(), (), CloneBootProfile> = ApiVerbEndpoint::get(
    "/v1/clones/{name}/profile",
    "getCloneProfile",
    "The regions of a clone in the order in which its clients first read them, as a boot profile",
);
pub const FINISH_CLONE: ApiVerbEndpoint<(), (), ()> = ApiVerbEndpoint::post(
    "/v1/clones/{name}/finish",
    "finishClone",
    "Replaces the table of a clone that is completely hydrated by a linear table over its destination",
);
pub const FORGET_CLONE: ApiVerbEndpoint<(), (), ()> = ApiVerbEndpoint::delete(
    "/v1/clones/{name}",
    "forgetClone",
    "Forgets a clone that has not returned after a restart; its files stay",
);
pub const LIST_MOVES: ApiVerbEndpoint<(), (), MoveList> = ApiVerbEndpoint::get(
    "/v1/moves",
    "listMoves",
    "Moves of devices to other places, and the disks that earlier servers moved",
);
pub const GET_MOVE: ApiVerbEndpoint<(), (), MoveDescription> =
    ApiVerbEndpoint::get("/v1/moves/{name}", "getMove", "The last move of a device");
pub const START_MOVE: ApiVerbEndpoint<(), StartMoveRequest, MoveDescription> = ApiVerbEndpoint::post(
    "/v1/moves/{name}",
    "startMove",
    "Begins to move a device to another place; its clients see a pause only",
);
pub const PAUSE_MOVE: ApiVerbEndpoint<(), PauseMoveRequest, MoveDescription> = ApiVerbEndpoint::post(
    "/v1/moves/{name}/pause",
    "pauseMove",
    "Pauses the copy and the switch of a move, or starts them again",
);
pub const STOP_MOVE: ApiVerbEndpoint<(), (), MoveDescription> =
    ApiVerbEndpoint::post("/v1/moves/{name}/stop", "stopMove", "Stops a move: the device stays where it is");
pub const FORGET_OLD_PLACE: ApiVerbEndpoint<(), ForgetOldPlaceRequest, ()> = ApiVerbEndpoint::post(
    "/v1/forget-old-place",
    "forgetOldPlace",
    "Lets tables use the old content of a place that a moved disk has left",
);
pub const GET_CHANGES: ApiVerbEndpoint<ChangedRangesQuery, (), ChangedRangesPage> = ApiVerbEndpoint::get(
    "/v1/snapshots/{name}/changes",
    "getChanges",
    "The ranges in which a snapshot may differ from its origin or another snapshot",
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_queries_are_encoded() {
        assert_eq!(LOAD_TABLE.on("a b/ü%").path, "/v1/devices/a%20b%2F%C3%BC%25/table");
        let page = ChangedRangesQuery { against: Some("a&b".into()), from: Some(7), max: None };
        assert_eq!(GET_CHANGES.on("s").with(&page).path, "/v1/snapshots/s/changes?against=a%26b&from=7");
        assert_eq!(GET_TABLE.on("d").with(&TableSlotQuery::of(false)).path, "/v1/devices/d/table");
    }
}
